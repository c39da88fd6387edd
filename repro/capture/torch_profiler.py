"""A trace of torch's profiler (Chrome format, as Kineto writes it) as a capture, for machines without nsys.

Of the trace: kernels, copies, runtime calls, synchronisations, and the stage's ranges. Times in the trace are
microseconds with three decimals after ``baseTimeNanoseconds``; they are read as decimals, so that no nanosecond is
lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from repro.errors import InputError, MachineError, NoGpuActivityError
from repro.nsysdb.model import (
    DEVICE,
    DTOD,
    DTOH,
    HTOD,
    PAGEABLE,
    PINNED,
    Capture,
    Kernel,
    Memcpy,
    NvtxRange,
    RuntimeCall,
    Sync,
)

_COPY: Final = re.compile(r"Memcpy (\w+) \((\w+) -> (\w+)\)")
_KINDS: Final = {"HtoD": HTOD, "DtoH": DTOH, "DtoD": DTOD, "HtoH": 9, "PtoP": 10}
_UNKNOWN_COPY, _UNKNOWN_MEMORY = 0, 7
_MEMORY: Final = {"Pageable": PAGEABLE, "Pinned": PINNED, "Device": DEVICE, "Managed": 4}
_SYNC_TYPES: Final = {"Event Sync": 1, "Stream Wait Event": 2, "Stream Sync": 3, "Context Sync": 4}


def read_trace(path: Path) -> Capture:
    """The capture in the trace at ``path``. Time 0 is its first event.

    ``InputError`` if the file is no such trace, ``NoGpuActivityError`` if it holds no kernels, ``MachineError`` if
    kernels ran on several devices.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), parse_float=Decimal)
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        base_ns = int(trace.get("baseTimeNanoseconds", 0))
        properties = trace.get("deviceProperties", [])
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(f"{path} is no trace of torch's profiler: {type(error).__name__}: {error}.") from None
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        raise NoGpuActivityError(
            f"torch's profiler recorded no kernels in {path.name}.",
            remedy="Another profiler may hold CUPTI, which serves one at a time: end nsys, ncu and DCGM's profiling.",
        )
    devices = sorted({int(_argument(event, "device")) for event in kernels})
    if len(devices) > 1:
        raise MachineError(
            f"{path.name} has kernels on devices {', '.join(map(str, devices))}.",
            remedy="Show the stage one GPU: CUDA_VISIBLE_DEVICES.",
        )
    device: dict[str, Any] = next((one for one in properties if one.get("id") == devices[0]), {})
    origin_ns = min(_start_ns(event) for event in events)
    capture = Capture(
        device_id=devices[0],
        device_name=str(device.get("name", "unnamed CUDA device")),
        sm_count=int(device.get("numSms", 0)),
        total_memory_bytes=int(device.get("totalGlobalMem", 0)),
        utc_epoch_ns=base_ns + origin_ns,
        emulated=False,
        metadata={"RECORDED_WITH": "torch.profiler", "TRACE_SCHEMA": str(trace.get("schemaVersion", ""))},
    )
    _fill(capture, events, origin_ns)
    return capture


def _fill(capture: Capture, events: list[dict[str, Any]], origin_ns: int) -> None:
    processes = {
        _argument(event, "correlation"): int(event["pid"])
        for event in _of(events, "cuda_runtime", "cuda_driver")
        if "correlation" in event.get("args", {})
    }
    default = next(iter(processes.values()), 0)

    def times(event: dict[str, Any]) -> tuple[int, int]:
        start_ns = _start_ns(event) - origin_ns
        return start_ns, start_ns + _nanoseconds(event.get("dur", 0))

    def place(event: dict[str, Any]) -> tuple[int, int, int]:
        correlation = _argument(event, "correlation")
        return int(_argument(event, "stream")), correlation, processes.get(correlation, default)

    capture.kernels = [Kernel(*times(event), *place(event), event["name"]) for event in _of(events, "kernel")]
    for event in _of(events, "gpu_memcpy"):
        match = _COPY.match(event["name"])
        direction, source, target = match.groups() if match else ("", "", "")
        kinds = (_KINDS.get(direction, _UNKNOWN_COPY), *(_MEMORY.get(one, _UNKNOWN_MEMORY) for one in (source, target)))
        capture.memcpys.append(Memcpy(*times(event), *place(event), int(_argument(event, "bytes")), *kinds))
    for event in _of(events, "cuda_runtime", "cuda_driver"):
        correlation = int(event.get("args", {}).get("correlation", 0))
        capture.runtime_calls.append(
            RuntimeCall(*times(event), int(event["pid"]), int(event["tid"]), correlation, event["name"])
        )
    for event in _of(events, "cuda_sync"):
        if event["name"] in _SYNC_TYPES and int(_argument(event, "stream")) >= 0:
            capture.syncs.append(Sync(*times(event), *place(event), _SYNC_TYPES[event["name"]]))
    for event in _of(events, "user_annotation"):
        capture.nvtx.append(NvtxRange(*times(event), int(event["pid"]), int(event["tid"]), event["name"]))
    for rows in (capture.kernels, capture.memcpys, capture.runtime_calls, capture.syncs, capture.nvtx):
        rows.sort()


def _of(events: list[dict[str, Any]], *categories: str) -> Iterator[dict[str, Any]]:
    return (event for event in events if event.get("cat") in categories)


def _argument(event: dict[str, Any], name: str) -> int:
    try:
        return int(event["args"][name])
    except (LookupError, TypeError, ValueError):
        raise InputError(f"a trace event {event.get('name')!r} of torch's profiler says no {name}.") from None


def _start_ns(event: dict[str, Any]) -> int:
    return _nanoseconds(event["ts"])


def _nanoseconds(microseconds: Decimal | int) -> int:
    return int((Decimal(microseconds) * 1000).to_integral_value())
