"""Pinned staging for the staged mode: options for Ray's ``ActorPoolStrategy`` and what staging says of itself.

Needs a Ray with ``patches/pinned-staging.patch``. Sizes are given at the nominal batch and travel scaled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from repro.device.node_folder import on_node
from repro.device.protocol import Device, DeviceArray
from repro.errors import InputError, MachineError
from repro.results import StagingRecord
from repro.workload.plan import WorkloadPlan

DEPTH = 3
"""One batch computes, one is on its way in, one on its way out."""
SLOT_BYTES = 8 << 20
PINNED_BYTES = 128 << 20
"""Pinned memory of the ring: two nominal batches, one a direction."""


def staging_options(plan: WorkloadPlan) -> Any:
    """``PinnedStagingOptions`` for ``plan``; ``MachineError`` where Ray lacks the patch."""
    import ray.data

    if not hasattr(ray.data, "PinnedStagingOptions"):
        raise MachineError(
            f"The Ray {ray.__version__} here has no pinned staging.", remedy="python -m repro patches apply."
        )
    scale = plan.nominal_bytes / (plan.prep.rows * plan.prep.cols * 4)
    engine: Any = "cuda"
    if plan.device.kind == "emulated":
        from repro.device.staging_engine import EmulatedEngineFactory

        engine = EmulatedEngineFactory(model=plan.device.model, log=plan.device.log, scale=scale)
    slot_bytes = max(8, round(SLOT_BYTES / scale) // 8 * 8)
    return ray.data.PinnedStagingOptions(
        depth=DEPTH,
        slot_bytes=slot_bytes,
        max_pinned_bytes=slot_bytes * (PINNED_BYTES // SLOT_BYTES),
        columns=("data",),
        engine=engine,
        stats_callback=StatsLog(str(stats_path(plan)), scale),
    )


def received(device: Device, data: Any) -> DeviceArray:
    """A batch column as staging gives it to the stage (a tensor on CUDA), as an array of ``device``."""
    if device.kind == "cuda":
        from repro.device.cuda import CudaArray

        return CudaArray(data)
    array: DeviceArray = data
    return array


def returned(array: DeviceArray) -> Any:
    """What the stage returns of ``array``, for staging to copy back."""
    return getattr(array, "tensor", array)


def stats_path(plan: WorkloadPlan) -> Path:
    """Where the actor of ``plan`` logs its staging statistics, beside the device's log."""
    return Path(f"{plan.device.log}.staging")


@dataclass(frozen=True)
class StatsLog:
    """Appends the actor's statistics to a file after each batch, one JSON object a line, with the monotonic time.

    ``scale`` is the nominal bytes that a byte stands for.
    """

    path: str
    scale: float

    def __call__(self, stats: Any) -> None:
        line = json.dumps({"time_ns": time.monotonic_ns(), "scale": self.scale, **asdict(stats)})
        with on_node(self.path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_stats(plan: WorkloadPlan, window_ns: tuple[int, int], folder: Path = Path()) -> StagingRecord:
    """What staging did within the window. ``InputError`` if it left no statistics there.

    A relative path of the plan is one below ``folder``.

    ``host_copy_ms`` counts batches that came back within the window, from those that came back before.
    """
    path = folder / stats_path(plan)
    lines = list(_read(path))
    before = [line for line in lines if line["time_ns"] < window_ns[0]]
    within = [line for line in lines if line["time_ns"] >= window_ns[0]]
    if not within:
        raise InputError(f"{path} holds no staging statistics of the window.")
    last = within[-1]
    copied_s = last["host_copy_s"] - (before[-1]["host_copy_s"] if before else 0.0)
    return StagingRecord(
        host_copy_ms=copied_s * 1e3,
        pinned_bytes=round(last["pinned_bytes"] * last["scale"]),
        slots=last["slots"],
        fallback=last["fallback"],
    )


def kernel_wait(starts_ns: Sequence[int], ends_ns: Sequence[int], batches: int) -> tuple[float, bool]:
    """(time without a kernel in ms a batch, whether that is more than a quarter of the time with one).

    For kernels of which no two run at a time, as those of one stream. Calls of the staged stage return before their
    kernels are done, so how long it waited is read from the device.
    """
    busy_ns = sum(ends_ns) - sum(starts_ns)
    wait_ns = max(ends_ns) - min(starts_ns) - busy_ns
    return wait_ns / batches / 1e6, wait_ns > busy_ns / 4


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"the staging statistics {path} cannot be read: {error.strerror}.") from None
    for line in text.splitlines():
        yield json.loads(line)
