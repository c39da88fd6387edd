"""Write a :class:`~repro.nsysdb.model.Capture` as an Nsight Systems SQLite export (schema 3.7.2).

The file is what ``nsys export --type sqlite`` would leave: no indexes, ``journal_mode=DELETE``, one file. Of an
emulated capture it says that no GPU made it: the device name and META_DATA_CAPTURE carry the word *emulated*.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from repro import __version__
from repro.nsysdb import schema
from repro.nsysdb.model import Capture
from repro.results import whole_file

_VM_ID = 1
_CONTEXT_ID = 1
_ANY_EVENT = 2**32 - 1
_NVTX_PUSH_POP = 59


def write_profile(path: Path, capture: Capture) -> None:
    """Write ``capture`` to ``path``, which appears only when whole and replaces an older file.

    ``ValueError`` if an interval ends before it starts.
    """
    _check(capture)
    with whole_file(path) as temporary:
        with closing(sqlite3.connect(temporary)) as db:
            db.execute("PRAGMA journal_mode=DELETE")
            db.execute("PRAGMA synchronous=OFF")  # whole_file syncs once, at the end
            with db:
                _write_tables(db, capture)


def global_pid(pid: int) -> int:
    """Nsight's serialised process id."""
    return _VM_ID << 48 | pid << 24


def global_tid(pid: int, tid: int) -> int:
    """Nsight's serialised thread id. Only 24 bits hold the thread."""
    return global_pid(pid) | tid & 0xFFFFFF


def _check(capture: Capture) -> None:
    for rows in (capture.kernels, capture.memcpys, capture.runtime_calls, capture.syncs, capture.nvtx):
        for row in rows:
            if row.end_ns < row.start_ns:
                raise ValueError(f"{row} ends before it starts")


class _Strings:
    """StringIds as it fills up."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def id_of(self, text: str) -> int:
        return self.ids.setdefault(text, len(self.ids))


def _insert(db: sqlite3.Connection, table: str, rows: Iterable[dict[str, Any]]) -> None:
    """Create ``table`` and fill it; columns a row does not name are NULL. All rows name the same columns."""
    db.execute(schema.create_table(table))
    rows = list(rows)
    if rows:
        names = list(rows[0])
        marks = ",".join(f":{name}" for name in names)
        quoted = ",".join(f'"{name}"' for name in names)
        db.executemany(f'INSERT INTO "{table}" ({quoted}) VALUES ({marks})', rows)


def _write_tables(db: sqlite3.Connection, capture: Capture) -> None:
    strings = _Strings()
    device = capture.device_id
    pids = sorted(
        {row.pid for rows in (capture.kernels, capture.memcpys, capture.runtime_calls, capture.nvtx) for row in rows}
        | capture.process_names.keys()
    )

    def activity(row: Any) -> dict[str, Any]:
        return {
            "start": row.start_ns,
            "end": row.end_ns,
            "deviceId": device,
            "contextId": _CONTEXT_ID,
            "greenContextId": 0,
            "streamId": row.stream_id,
            "correlationId": row.correlation_id,
            "globalPid": global_pid(row.pid),
        }

    # Launch geometry is not modelled: the columns are NOT NULL, so they hold the smallest legal launch.
    launch = dict.fromkeys(("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "launchType"), 1) | dict.fromkeys(
        (
            "registersPerThread",
            "staticSharedMemory",
            "dynamicSharedMemory",
            "localMemoryPerThread",
            "localMemoryTotal",
        ),
        0,
    )
    _insert(
        db,
        schema.KERNEL,
        (
            activity(row)
            | launch
            | {
                "demangledName": strings.id_of(row.name),
                "shortName": strings.id_of(_short_name(row.name)),
                "gridId": number,
            }
            for number, row in enumerate(capture.kernels, 1)
        ),
    )
    _insert(
        db,
        schema.MEMCPY,
        (
            activity(row)
            | {"bytes": row.bytes, "copyKind": row.copy_kind, "srcKind": row.src_kind, "dstKind": row.dst_kind}
            for row in capture.memcpys
        ),
    )
    _insert(db, schema.MEMSET, ())
    _insert(
        db,
        schema.SYNC,
        (activity(row) | {"syncType": row.sync_type, "eventId": _ANY_EVENT} for row in capture.syncs),
    )
    _insert(
        db,
        schema.RUNTIME,
        (
            {
                "start": row.start_ns,
                "end": row.end_ns,
                "eventClass": 0,
                "globalTid": global_tid(row.pid, row.tid),
                "correlationId": row.correlation_id,
                "nameId": strings.id_of(row.name),
                "returnValue": 0,
            }
            for row in capture.runtime_calls
        ),
    )
    _insert(
        db,
        "NVTX_EVENTS",
        (
            {
                "start": row.start_ns,
                "end": row.end_ns,
                "eventType": _NVTX_PUSH_POP,
                "text": row.text,
                "globalTid": global_tid(row.pid, row.tid),
                "domainId": 0,
            }
            for row in capture.nvtx
        ),
    )
    _insert(
        db,
        "ThreadNames",
        (
            {"nameId": strings.id_of(name), "globalTid": global_tid(pid, tid)}
            for (pid, tid), name in capture.thread_names.items()
        ),
    )
    _insert(
        db,
        "PROCESSES",
        ({"globalPid": global_pid(pid), "pid": pid, "name": capture.process_names.get(pid)} for pid in pids),
    )
    _write_target(db, capture, pids)
    _write_metadata(db, capture)
    _insert(db, "StringIds", ({"id": number, "value": text} for text, number in strings.ids.items()))
    for table, rows in schema.ENUMS.items():
        db.execute(schema.create_enum(table))
        db.executemany(f'INSERT INTO "{table}" VALUES (?,?,?)', rows)


def _write_target(db: sqlite3.Connection, capture: Capture, pids: list[int]) -> None:
    _insert(
        db,
        "TARGET_INFO_GPU",
        [
            {
                "vmId": _VM_ID << 48,
                "id": capture.device_id,
                "name": _device_name(capture),
                "isDiscrete": 1,
                "totalMemory": capture.total_memory_bytes or None,
                "smCount": capture.sm_count or None,
                "cuDevice": capture.device_id,
            }
        ],
    )
    _insert(
        db,
        "TARGET_INFO_CUDA_DEVICE",
        (
            {
                "gpuId": capture.device_id,
                "cudaId": capture.device_id,
                "pid": pid,
                "numMultiprocessors": capture.sm_count or None,
            }
            for pid in pids
        ),
    )


def _write_metadata(db: sqlite3.Connection, capture: Capture) -> None:
    began = datetime.fromtimestamp(capture.utc_epoch_ns / 1e9, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    _insert(
        db,
        "TARGET_INFO_SESSION_START_TIME",
        [{"utcEpochNs": capture.utc_epoch_ns, "utcTime": began, "localTime": began}],
    )
    last_ns = max(
        (
            row.end_ns
            for rows in (capture.kernels, capture.memcpys, capture.runtime_calls, capture.nvtx)
            for row in rows
        ),
        default=0,
    )
    _insert(
        db,
        "ANALYSIS_DETAILS",
        [{"globalVid": _VM_ID << 48, "duration": last_ns, "startTime": 0, "stopTime": last_ns}],
    )
    major, minor, micro = schema.VERSION.split(".")
    export = {
        "EXPORT_PRODUCT_NAME": f"gpu-idle-repro ({'emulated device' if capture.emulated else 'torch profiler'})",
        "EXPORT_PRODUCT_VERSION": __version__,
        "EXPORT_SCHEMA_VERSION": schema.VERSION,
        "EXPORT_SCHEMA_VERSION_MAJOR": major,
        "EXPORT_SCHEMA_VERSION_MINOR": minor,
        "EXPORT_SCHEMA_VERSION_MICRO": micro,
    }
    _insert(db, "META_DATA_EXPORT", ({"name": name, "value": value} for name, value in export.items()))
    kind = "emulated" if capture.emulated else "cuda"
    written = {schema.DEVICE_KIND_KEY: kind, "DEVICE_NAME": _device_name(capture)}
    _insert(
        db,
        schema.CAPTURE_METADATA,
        ({"name": name, "value": value} for name, value in (capture.metadata | written).items()),
    )


def _device_name(capture: Capture) -> str:
    name = capture.device_name
    return name if not capture.emulated or "emulated" in name.lower() else f"{name} (emulated)"


def _short_name(name: str) -> str:
    """``void ns::gemm<float>(int)`` -> ``gemm``."""
    head = re.split(r"[<(]", name, maxsplit=1)[0].split()
    return head[-1].rsplit("::", 1)[-1] if head else name
