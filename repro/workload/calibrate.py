"""Calibrate a GPU at the start of a run: what a matmul costs on it, and how fast it copies.

``calibrate`` runs in a process that sees the GPU (a Ray task with ``num_gpus=1`` on the stage's node).
``python -m repro.workload.calibrate`` measures copies alone and prints ``CopyRates`` as JSON, or an error on stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
from pydantic import BaseModel, ConfigDict

from repro.device.cuda import CudaDevice, choose_inner, inner_sizes, kernel_driver
from repro.device.protocol import Stream
from repro.errors import KitError

COPY_BYTES = 64 << 20
_TRIES = 5


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuRequest(_Frozen):
    """A batch of ``rows`` x ``cols`` float32, and the time wanted for one matmul on it."""

    rows: int
    cols: int
    matmul_ms: float


class CopyRates(_Frozen):
    """Rates of copies of ``COPY_BYTES``, median of five, timed on the host from call to done; GB are 1e9 bytes."""

    pageable_h2d_gb_per_s: float
    pinned_h2d_gb_per_s: float
    pageable_d2h_gb_per_s: float
    pinned_d2h_gb_per_s: float


class GpuFacts(_Frozen):
    """The GPU of the stage. ``inner`` is the inner size chosen for its matmuls, ``matmul_ms`` what one then takes."""

    name: str
    driver: str | None
    cuda: str | None
    inner: int
    matmul_ms: float
    copies: CopyRates


def calibrate(request: GpuRequest) -> GpuFacts:
    """Choose the matmuls and measure copies; takes a few seconds. ``MachineError`` if there is no GPU."""
    import torch

    times = {}
    for inner in inner_sizes(request.rows, request.cols):
        times[inner] = _matmul_ms(CudaDevice(inner=inner), request)
        torch.cuda.empty_cache()
        if times[inner] > 2 * request.matmul_ms:
            break  # the sizes go up, and with them the time
    inner = choose_inner(times, request.matmul_ms)
    device = CudaDevice(inner=inner)
    return GpuFacts(
        name=device.name,
        driver=kernel_driver(),
        cuda=torch.version.cuda,
        inner=inner,
        matmul_ms=times[inner],
        copies=measure_copies(device),
    )


def measure_copies(device: CudaDevice) -> CopyRates:
    """Copy rates of one direction at a time, with one host thread."""
    stream = device.new_stream("copies")
    pageable = np.ones(COPY_BYTES // 4, np.float32)
    pinned = device.pin_empty(pageable.shape, pageable.dtype)
    pinned.array[:] = pageable
    array = device.copy_h2d(pinned, stream)
    rates = CopyRates(
        pageable_h2d_gb_per_s=_gb_per_s(stream, lambda: device.copy_h2d(pageable, stream)),
        pinned_h2d_gb_per_s=_gb_per_s(stream, lambda: device.copy_h2d(pinned, stream)),
        pageable_d2h_gb_per_s=_gb_per_s(stream, lambda: device.copy_d2h(array, stream, out=pageable)),
        pinned_d2h_gb_per_s=_gb_per_s(stream, lambda: device.copy_d2h(array, stream, out=pinned)),
    )
    stream.synchronize()
    pinned.free()
    return rates


def _matmul_ms(device: CudaDevice, request: GpuRequest) -> float:
    stream = device.new_stream("matmuls")
    array = device.copy_h2d(np.ones((request.rows, request.cols), np.float32), stream)

    def matmuls() -> None:
        for _ in range(_TRIES):
            device.matmul(array, stream)

    return _seconds(stream, matmuls) * 1e3 / _TRIES


def _gb_per_s(stream: Stream, copy: Callable[[], object]) -> float:
    return COPY_BYTES / 1e9 / _seconds(stream, copy)


def _seconds(stream: Stream, work: Callable[[], object]) -> float:
    """Median time of ``work`` on ``stream`` until it is done, after one time that does not count."""
    samples = []
    for _ in range(_TRIES + 1):
        stream.synchronize()
        started = time.perf_counter()
        work()
        stream.synchronize()
        samples.append(time.perf_counter() - started)
    return float(np.median(samples[1:]))


def main() -> int:
    try:
        rates = measure_copies(CudaDevice(inner=256))
    except KitError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    sys.stdout.write(rates.model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
