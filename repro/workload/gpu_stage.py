"""The GPU stage: one class a mode. Ray Data calls the instance once a batch, inside an actor pool of one.

Input batch: ``id`` (int64, the number of the batch on every row) and, except inline, ``data`` (float32, rows x cols)
and ``prep_ns``. Output: ``data`` as it came out of D2H, and per row ``id``, ``prep_ns`` (CPU time of prep),
``call``, ``start_ns`` and ``end_ns`` (the stage's own calls on this process's monotonic clock; ``call`` counts from 0).

The first ``warmup_blocks`` calls are warm-up. The next call, which opens the window, starts only when all of them have
left the stage, so the device is idle and no work straddles: the capture is cut at that call's ``start_ns``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from repro.device.nvtx_ranges import open_window
from repro.device.protocol import Device, DeviceArray, Stream
from repro.workload import staging
from repro.workload.plan import DevicePlan, WorkloadPlan
from repro.workload.prep import prepare

Batch = dict[str, Any]


def open_device(plan: DevicePlan) -> Device:
    """The device of ``plan`` in this process, the one that pinned staging copies to and from."""
    if plan.kind == "cuda":
        from repro.device.cuda import CudaDevice

        return CudaDevice(inner=plan.inner)
    from repro.device.staging_engine import shared_device

    return shared_device(plan.model, plan.log)


def open_recorder(plan: WorkloadPlan) -> Recorder:
    """What is to be told when the window opens and closes."""
    if plan.profiler == "torch":
        from repro.device.torch_recorder import TorchRecorder

        return TorchRecorder(plan.stem)
    return NvtxWindow()


class Recorder(Protocol):
    """Records the window; both calls return when recording has started or ended."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class NvtxWindow:
    """For nsys, which starts at the NVTX range of the window and records to the end of the process."""

    def start(self) -> None:
        open_window()

    def stop(self) -> None:
        pass


class Window:
    """Counts the calls of a stage and opens the window between the warm-up calls and the ``blocks`` calls after."""

    def __init__(self, warmup: int, *, blocks: int = 1, recorder: Recorder | None = None) -> None:
        self._warmup = warmup
        self._last = warmup + blocks
        self._recorder = recorder or NvtxWindow()
        self._changed = threading.Condition()
        self._entered = 0
        self._left = 0
        self._is_open = False

    @contextmanager
    def call(self) -> Iterator[int]:
        """One call; yields its number. Calls of the window start after every warm-up call has ended."""
        with self._changed:
            number = self._entered
            self._entered += 1
            if number == self._warmup:
                self._changed.wait_for(lambda: self._left == self._warmup)
                self._recorder.start()
                self._is_open = True
                self._changed.notify_all()
            elif number > self._warmup:
                self._changed.wait_for(lambda: self._is_open)
        try:
            yield number
        finally:
            with self._changed:
                self._left += 1
                if self._left == self._last:
                    self._recorder.stop()
                self._changed.notify_all()


class SplitStage:
    """H2D from pageable memory, matmuls, D2H, one after the other on one stream."""

    def __init__(self, plan: WorkloadPlan, *, device: Device | None = None) -> None:
        self._plan = plan
        self._device = device or open_device(plan.device)
        self._stream = self._device.new_stream("stage")
        self._window = Window(plan.warmup_blocks, blocks=plan.blocks, recorder=open_recorder(plan))

    def __call__(self, batch: Batch) -> Batch:
        with self._window.call() as call:
            start_ns = time.monotonic_ns()
            number = int(batch["id"][0])
            with self._device.annotate(f"batch {number}"):
                data, prep_ns = self._process(number, batch)
            end_ns = time.monotonic_ns()
        return labelled(data, id=number, prep_ns=prep_ns, call=call, start_ns=start_ns, end_ns=end_ns)

    def _process(self, number: int, batch: Batch) -> tuple[Any, int]:
        """The batch after D2H, and the CPU time of its prep."""
        return self._compute(batch["data"]), int(batch["prep_ns"][0])

    def _compute(self, data: Any) -> Any:
        stream = self._own_stream()
        with self._device.annotate("H2D"):
            on_device = self._upload(data, stream)
        on_device = self._matmuls(on_device, stream)
        with self._device.annotate("D2H"):
            return self._device.copy_d2h(on_device, stream)

    def _matmuls(self, on_device: DeviceArray, stream: Stream) -> DeviceArray:
        with self._device.annotate("compute"):
            for _ in range(self._plan.matmuls):
                on_device = self._device.matmul(on_device, stream)
        return on_device

    def _own_stream(self) -> Stream:
        return self._stream

    def _upload(self, data: np.ndarray, stream: Stream) -> DeviceArray:
        return self._device.copy_h2d(data, stream, nominal_bytes=self._plan.nominal_bytes)


class InlineStage(SplitStage):
    """Prep inside the stage, then as ``SplitStage``: nothing of it overlaps."""

    def _process(self, number: int, batch: Batch) -> tuple[Any, int]:
        started_ns = time.thread_time_ns()
        with self._device.annotate("prep"):
            data = prepare(number, self._plan.prep)
        prep_ns = time.thread_time_ns() - started_ns
        return self._compute(data), prep_ns


class PinnedStage(SplitStage):
    """Pins every batch before its copy: allocation and host copy are paid a batch, serial with compute."""

    def _upload(self, data: np.ndarray, stream: Stream) -> DeviceArray:
        with self._device.annotate("pin_memory"):
            pinned = self._device.pin_empty(data.shape, data.dtype, nominal_bytes=self._plan.nominal_bytes)
            with self._device.charge_host_copy(self._plan.nominal_bytes):
                np.copyto(pinned.array, data)
        on_device = self._device.copy_h2d(pinned, stream, nominal_bytes=self._plan.nominal_bytes)
        # The buffer may go only when the copy has left it.
        stream.record_event().synchronize()
        pinned.free()
        return on_device


class OverlapStage(SplitStage):
    """Several calls at once, each task thread on a stream of its own."""

    def __init__(self, plan: WorkloadPlan, *, device: Device | None = None) -> None:
        super().__init__(plan, device=device)
        self._local = threading.local()

    def _own_stream(self) -> Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = self._device.new_stream(threading.current_thread().name)
        return self._local.stream


class StagedStage(SplitStage):
    """Gets and returns device arrays: Ray's pinned staging copies them, in other threads, through the same device.

    Calls return before their kernels are done. The last call of the warm-up and the last of all wait for
    them, so that the window holds the work of its own batches.
    """

    def __init__(self, plan: WorkloadPlan, *, device: Device | None = None) -> None:
        super().__init__(plan, device=device)
        self._waits_after = (plan.warmup_blocks, plan.warmup_blocks + plan.blocks)
        self._calls = 0

    def _compute(self, data: Any) -> Any:
        stream = self._device.default_stream()  # staging orders it between its copies in and out
        result = self._matmuls(staging.received(self._device, data), stream)
        self._calls += 1
        if self._calls in self._waits_after:
            stream.synchronize()
        return staging.returned(result)


STAGES: dict[str, type[SplitStage]] = {
    "inline": InlineStage,
    "split": SplitStage,
    "pinned": PinnedStage,
    "overlap": OverlapStage,
    "staged": StagedStage,
}


def labelled(data: Any, **labels: int) -> Batch:
    """A batch of ``data`` with every label repeated on each row."""
    return {"data": data, **{name: np.full(data.shape[0], value, np.int64) for name, value in labels.items()}}
