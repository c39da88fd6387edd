"""Rows of a capture as the writer takes them. Times are integer nanoseconds on one clock, sizes bytes.

Codes are Nsight's: ``copy_kind`` 1 HtoD, 2 DtoH, 8 DtoD; memory kind 0 pageable, 1 pinned, 2 device;
``sync_type`` 1 event, 2 stream wait, 3 stream, 4 context.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

HTOD, DTOH, DTOD = 1, 2, 8
PAGEABLE, PINNED, DEVICE = 0, 1, 2


class Kernel(NamedTuple):
    """One kernel execution on the device."""

    start_ns: int
    end_ns: int
    stream_id: int
    correlation_id: int
    pid: int
    name: str


class Memcpy(NamedTuple):
    """One copy executed by a copy engine."""

    start_ns: int
    end_ns: int
    stream_id: int
    correlation_id: int
    pid: int
    bytes: int
    copy_kind: int
    src_kind: int
    dst_kind: int


class RuntimeCall(NamedTuple):
    """One CUDA runtime API call on the host (``cudaLaunchKernel_v7000``, ``cudaMemcpyAsync_v3020``, ...)."""

    start_ns: int
    end_ns: int
    pid: int
    tid: int
    correlation_id: int
    name: str


class Sync(NamedTuple):
    """One synchronisation that blocked a host thread or a stream."""

    start_ns: int
    end_ns: int
    stream_id: int
    correlation_id: int
    pid: int
    sync_type: int


class NvtxRange(NamedTuple):
    """One push/pop range on a host thread."""

    start_ns: int
    end_ns: int
    pid: int
    tid: int
    text: str


@dataclass
class Capture:
    """A whole profile in memory, ready to be written. One device."""

    device_id: int
    device_name: str
    kernels: list[Kernel] = field(default_factory=list)
    memcpys: list[Memcpy] = field(default_factory=list)
    runtime_calls: list[RuntimeCall] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    nvtx: list[NvtxRange] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    """Rows for META_DATA_CAPTURE: who made it, the device model, that it is emulated."""
    sm_count: int = 0
    total_memory_bytes: int = 0
    process_names: dict[int, str] = field(default_factory=dict)
    thread_names: dict[tuple[int, int], str] = field(default_factory=dict)
    """(pid, tid) -> name."""
    utc_epoch_ns: int = 0
    """Wall clock at time 0 of the capture."""
    emulated: bool = True
