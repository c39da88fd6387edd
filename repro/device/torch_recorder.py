"""torch's profiler around the window of the GPU stage, for machines without nsys. Runs in the stage's process.

``stop`` writes a trace in Chrome's format that :mod:`repro.capture.torch_profiler` turns into a profile.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from repro.device.node_folder import report_folder
from repro.device.nvtx_ranges import INJECTION_VARIABLE
from repro.errors import MachineError

TRACE_SUFFIX = ".trace.json"


class TorchRecorder:
    """Traces of all threads go to ``<stem>.<pid>.trace.json`` in ``folder`` (Ray's logs/nsight, where nsys's go too).

    torch ties a profiler to the thread that starts it, and calls of the stage come from several: one thread does both.
    CUPTI takes seconds to come up, so that is done here, and the window opens without a pause in which batches pile up.
    """

    def __init__(self, stem: str, folder: Path | None = None) -> None:
        if INJECTION_VARIABLE in os.environ:
            raise MachineError(
                "Another profiler is loaded in the process of the GPU stage, and CUPTI serves one at a time.",
                remedy="Run the command without nsys or ncu around it, or with --profiler=nsys.",
            )
        self._path = (folder or report_folder()) / f"{stem}.{os.getpid()}{TRACE_SUFFIX}"
        self._thread = ThreadPoolExecutor(1, "recorder")
        self._profile: Any = self._thread.submit(self._prepared).result()

    def start(self) -> None:
        self._thread.submit(self._profile.start_trace).result()

    def stop(self) -> None:
        self._thread.submit(self._stop).result()
        self._thread.shutdown()

    def _prepared(self) -> Any:
        import torch

        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities, experimental_config=config)
        profile.prepare_trace()
        return profile

    def _stop(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop_trace()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{threading.get_native_id()}.json")
        self._profile.export_chrome_trace(str(temporary))
        temporary.replace(self._path)
