"""A CUDA GPU through PyTorch: the device of measured runs. Importing this module does not import torch.

A matmul multiplies the batch, taken as a [rows * cols / inner, inner] matrix, with an [inner, inner] float32 matrix
that moves every column one to the right and doubles it. Each output is then one input times two, exact in float32
whatever order the GPU adds in, so what comes out of D2H can be checked to the bit (``expected_output``), and one matmul
too few or too many shows. TF32 is off: the published times are those of float32.

``inner`` sets what a matmul costs: the power-of-two part (or multiple) of the columns for which one takes closest to
the wanted time on this GPU (``choose_inner``, ``repro.workload.calibrate``). The batch's shape and its copies stay as
they are. On a B200 that should be the published 8192.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from repro.device.nvtx_ranges import nvtx_range
from repro.device.protocol import DeviceArray, Event, PinnedBuffer, Stream
from repro.errors import MachineError, UsageError

if TYPE_CHECKING:
    import torch

MAX_MATMULS = 100
"""Each doubles the values of a batch, which are below 2**10; float32 ends at 2**128."""
MAX_INNER = 16384
"""The matrix of this inner size takes 1 GiB."""


def expected_output(batch: np.ndarray, matmuls: int, inner: int) -> np.ndarray:
    """What D2H yields for ``batch`` (float32) after ``matmuls`` matmuls of that inner size; a new array."""
    rolled = np.roll(batch.reshape(-1, inner), matmuls % inner, axis=1)
    return np.ldexp(rolled, matmuls).astype(batch.dtype, copy=False).reshape(batch.shape)


def inner_sizes(rows: int, cols: int) -> list[int]:
    """Inner sizes that a batch can be multiplied at: ``cols`` times or over a power of two, dividing the batch."""
    elements = rows * cols
    sizes = {cols}
    size = cols
    while size % 2 == 0 and size > 256:
        size //= 2
        sizes.add(size)
    size = cols
    while elements % (2 * size) == 0 and 2 * size <= MAX_INNER:
        size *= 2
        sizes.add(size)
    return sorted(size for size in sizes if elements % size == 0)


def choose_inner(matmul_ms: Mapping[int, float], wanted_ms: float) -> int:
    """Of inner sizes with their measured time, the one whose time is closest to the wanted one by ratio."""
    return min(matmul_ms, key=lambda inner: (abs(math.log(matmul_ms[inner] / wanted_ms)), inner))


def kernel_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Version of the loaded NVIDIA kernel driver; None without one."""
    try:
        match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


class CudaArray:
    """A contiguous CUDA tensor; ``stream`` is the one whose allocations it belongs to, if one of ours."""

    def __init__(self, tensor: torch.Tensor, stream: CudaStream | None = None) -> None:
        self.tensor = tensor
        self.stream = stream
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.dtype: np.dtype[Any] = np.dtype(str(tensor.dtype).removeprefix("torch."))
        self.nbytes = int(tensor.nbytes)
        self.nominal_bytes = self.nbytes


class CudaEvent:
    """A torch event whose waiting threads sleep: a spinning one would take a core from the pipeline."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A torch stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.stream_id = int(stream.cuda_stream)

    def record_event(self) -> CudaEvent:
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return CudaEvent(event)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class CudaPinnedBuffer:
    """Pinned memory of torch's host allocator, which keeps and reuses it after ``free``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.array: np.ndarray = tensor.numpy()
        self.nominal_bytes = int(self.array.nbytes)

    def free(self) -> None:
        """The memory goes back to torch; copies from it must have ended, and no view of it may be used any more."""
        if self.tensor is None:
            raise UsageError("this pinned buffer was freed before.")
        self.tensor = None
        self.array = np.empty(0, self.array.dtype)


class CudaDevice:
    """``repro.device.protocol.Device`` on CUDA device 0 of this process (Ray shows an actor only its own GPU).

    ``MachineError`` if torch is missing or finds no CUDA device.
    """

    kind: Literal["emulated", "cuda"] = "cuda"

    def __init__(self, *, inner: int) -> None:
        try:
            import torch
        except ImportError:
            raise MachineError(
                "PyTorch is not installed.", remedy="pip install torch: its build for CUDA 13."
            ) from None
        if not torch.cuda.is_available():
            raise MachineError(
                "PyTorch finds no CUDA device in this process.", remedy="Run the doctor: python -m repro doctor."
            )
        # Batches from the object store are read-only; they are only ever copied from.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.backends.cuda.matmul.allow_tf32 = False
        self._torch = torch
        self.device_id = torch.cuda.current_device()
        self.name = torch.cuda.get_device_name(self.device_id)
        self._inner = inner
        self._default = CudaStream(torch.cuda.default_stream(self.device_id))
        # Made before any stream of ours works, and complete when the constructor returns.
        self._weights = torch.roll(2 * torch.eye(inner, dtype=torch.float32, device="cuda"), 1, dims=1)
        self.synchronize()

    def default_stream(self) -> CudaStream:
        return self._default

    def new_stream(self, name: str = "") -> CudaStream:
        """``name`` is for people: CUDA streams have none."""
        return CudaStream(self._torch.cuda.Stream(self.device_id))

    def pin_empty(self, shape: tuple[int, ...], dtype: Any, *, nominal_bytes: int | None = None) -> CudaPinnedBuffer:
        kind = getattr(self._torch, np.dtype(dtype).name)
        buffer = CudaPinnedBuffer(self._torch.empty(shape, dtype=kind, pin_memory=True))
        _check_nominal(nominal_bytes, buffer.array.nbytes)
        return buffer

    def copy_h2d(
        self, source: np.ndarray | PinnedBuffer, stream: Stream, *, nominal_bytes: int | None = None
    ) -> CudaArray:
        host = self._host_tensor(source)
        _check_nominal(nominal_bytes, host.nbytes)
        ours = _stream(stream)
        with self._torch.cuda.stream(ours.stream):
            target = self._torch.empty(host.shape, dtype=host.dtype, device="cuda")
            target.copy_(host, non_blocking=host.is_pinned())
        return CudaArray(target, ours)

    def copy_d2h(
        self, source: DeviceArray, stream: Stream, *, out: np.ndarray | PinnedBuffer | None = None
    ) -> np.ndarray:
        array = _array(source)
        ours = self._used_on(array, stream)
        target = out if out is not None else np.empty(array.shape, array.dtype)
        host = self._host_tensor(target)
        if host.shape != array.tensor.shape or host.dtype != array.tensor.dtype:
            raise UsageError(f"D2H of {array.shape} {array.dtype} into {tuple(host.shape)} {host.dtype}.")
        with self._torch.cuda.stream(ours.stream):
            host.copy_(array.tensor, non_blocking=host.is_pinned())
        return target if isinstance(target, np.ndarray) else target.array

    def matmul(self, source: DeviceArray, stream: Stream) -> CudaArray:
        array = _array(source)
        ours = self._used_on(array, stream)
        with self._torch.cuda.stream(ours.stream):
            result = self._torch.mm(array.tensor.view(-1, self._inner), self._weights)
            return CudaArray(result.view(array.shape), ours)

    def charge_host_copy(self, nominal_bytes: int) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        """For nsys as an NVTX range, for torch's profiler as a record."""
        with nvtx_range(name), self._torch.profiler.record_function(name):
            yield

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self.device_id)

    def close(self) -> None:
        self.synchronize()

    def _host_tensor(self, memory: np.ndarray | PinnedBuffer) -> torch.Tensor:
        if isinstance(memory, CudaPinnedBuffer):
            if memory.tensor is None:
                raise UsageError("this pinned buffer has been freed.")
            return memory.tensor
        return self._torch.from_numpy(memory if isinstance(memory, np.ndarray) else memory.array)

    def _used_on(self, array: CudaArray, stream: Stream) -> CudaStream:
        """Tell torch's allocator where the array is used, so that its memory is not reused too early."""
        ours = _stream(stream)
        if array.stream is not ours:
            array.tensor.record_stream(ours.stream)
        return ours


def _check_nominal(nominal_bytes: int | None, size_bytes: int) -> None:
    if nominal_bytes not in (None, size_bytes):
        raise UsageError(f"a CUDA copy of {size_bytes} bytes cannot be accounted at {nominal_bytes}.")


def _stream(stream: Stream) -> CudaStream:
    if not isinstance(stream, CudaStream):
        raise UsageError("the CUDA device was given the stream of another device.")
    return stream


def _array(array: DeviceArray) -> CudaArray:
    if not isinstance(array, CudaArray):
        raise UsageError("the CUDA device was given the array of another device.")
    return array
