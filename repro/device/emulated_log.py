"""The emulated device's event log, and turning logs into a ``Capture``.

One record a line, a JSON array that begins with the id of the device instance that wrote it; a header record opens
each instance. Lines are appended with one ``write`` as soon as what they say has happened, so a killed process loses
only what it had not finished, and several devices and processes may share a file. A torn line is skipped and
counted. Times are integer nanoseconds of the machine's monotonic clock.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from repro.errors import InputError, MachineError
from repro.nsysdb.model import Capture, Kernel, Memcpy, NvtxRange, RuntimeCall, Sync

LOG_SCHEMA = "repro.device-log/1"


class LogWriter:
    """Appends the records of one device instance. Not thread-safe. Without a path it writes nothing."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self._path = path
        self._instance = secrets.token_hex(4)
        self._file = -1
        self._lines: list[str] = []
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._lines.append("")  # a killed writer left half a line
        except OSError as error:
            raise MachineError(f"cannot write the device log {path}: {error}.") from None
        self.add("device", {"schema": LOG_SCHEMA, **header})
        self.flush()

    def add(self, kind: str, *fields: object) -> None:
        if self._file >= 0:
            self._lines.append(json.dumps([self._instance, kind, *fields], separators=(",", ":")))

    def flush(self) -> None:
        """Hand the records to the kernel, which keeps them whatever becomes of this process."""
        if not self._lines:
            return
        data = ("\n".join(self._lines) + "\n").encode()
        self._lines.clear()
        try:
            written = os.write(self._file, data)
        except OSError as error:
            raise MachineError(f"cannot write the device log {self._path}: {error}.") from None
        if written != len(data):
            raise MachineError(f"cannot write the device log {self._path}: the disk is full.")

    def close(self) -> None:
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1


def read_log(paths: Iterable[Path], *, window_ns: tuple[int, int] | None = None) -> Capture:
    """Merge device logs into one capture; a path is a log or a folder of ``*.jsonl`` logs.

    ``window_ns`` (monotonic clock) keeps what starts within it, so a warm-up can be left out. Time 0 of the capture is
    the instant that the first device was opened, or the start of the window; ``metadata`` holds it on the
    monotonic clock (``clock_origin_monotonic_ns``). Correlation ids are made unique across processes. Work that had
    not finished when its process died is not in the log; ``metadata`` counts its launches (``unfinished_operations``),
    torn lines and instances that were not closed.

    ``InputError`` if a path does not exist, holds no device, or the logs are of different devices.
    """
    files = _files(paths)
    headers: dict[str, dict[str, Any]] = {}
    records: list[list[Any]] = []
    torn = 0
    closed = set()
    for file in files:
        for line in _lines(file):
            try:
                record = json.loads(line)
                instance, kind = record[0], record[1]
            except (ValueError, TypeError, LookupError):
                torn += 1
                continue
            if kind == "device":
                _check_schema(file, record[2])
                headers[instance] = record[2]
            elif instance not in headers:
                raise InputError(f"device log {file}: a record of {instance!r} before that device's header.")
            elif kind == "close":
                closed.add(instance)
            else:
                records.append(record)
    if not headers:
        raise InputError(f"no emulated device in {', '.join(map(str, files)) or 'no file'}.")
    first = next(iter(headers.values()))
    for header in headers.values():
        if any(header[key] != first[key] for key in ("device_id", "device_name", "model")):
            raise InputError("the device logs are of different devices; a capture holds one.")
    origin_ns = window_ns[0] if window_ns else min(header["opened_ns"] for header in headers.values())
    capture = Capture(
        device_id=first["device_id"],
        device_name=first["device_name"],
        sm_count=first["sm_count"],
        total_memory_bytes=first["total_memory_bytes"],
        utc_epoch_ns=first["utc_ns"] - first["opened_ns"] + origin_ns,
        process_names={header["pid"]: header["process_name"] for header in headers.values()},
    )
    unfinished = _fill(capture, records, headers, origin_ns, window_ns)
    capture.metadata = {
        "emulated": "true",
        "device_model": json.dumps(first["model"], sort_keys=True),
        "clock_origin_monotonic_ns": str(origin_ns),
        "torn_lines": str(torn),
        "instances": str(len(headers)),
        "instances_not_closed": str(len(headers.keys() - closed)),
        "unfinished_operations": str(unfinished),
    }
    return capture


def _files(paths: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files.extend(sorted(path.glob("*.jsonl")))
        else:
            files.append(path)
    return files


def _lines(file: Path) -> list[bytes]:
    try:
        return [line for line in file.read_bytes().split(b"\n") if line]
    except OSError as error:
        raise InputError(f"device log {file} cannot be read: {error}.") from None


def _check_schema(file: Path, header: object) -> None:
    found = header.get("schema") if isinstance(header, dict) else None
    if found != LOG_SCHEMA:
        raise InputError(f"device log {file} has schema {found!r}, this kit reads {LOG_SCHEMA!r}.")


def _fill(
    capture: Capture,
    records: list[list[Any]],
    headers: dict[str, dict[str, Any]],
    origin_ns: int,
    window_ns: tuple[int, int] | None,
) -> int:
    """Sort the records into ``capture``; returns how many launched operations have no record of their own."""
    correlation: dict[tuple[str, int], int] = {}
    launched: set[int] = set()
    ran: set[int] = set()
    for instance, kind, *fields in records:
        pid = headers[instance]["pid"]
        if kind == "thread":
            tid, name = fields
            capture.thread_names[(pid, tid)] = name
            continue
        start_ns, end_ns, *rest = fields
        if window_ns and not window_ns[0] <= start_ns < window_ns[1]:
            continue
        start, end = start_ns - origin_ns, end_ns - origin_ns
        if kind == "nvtx":
            tid, text = rest
            capture.nvtx.append(NvtxRange(start, end, pid, tid, text))
            continue
        place, local_id, *rest = rest
        correlation_id = correlation.setdefault((instance, local_id), len(correlation) + 1)
        if kind == "kernel":
            capture.kernels.append(Kernel(start, end, place, correlation_id, pid, *rest))
            ran.add(correlation_id)
        elif kind == "memcpy":
            capture.memcpys.append(Memcpy(start, end, place, correlation_id, pid, *rest))
            ran.add(correlation_id)
        elif kind == "sync":
            capture.syncs.append(Sync(start, end, place, correlation_id, pid, *rest))
        elif kind == "call":
            (name,) = rest
            capture.runtime_calls.append(RuntimeCall(start, end, pid, place, correlation_id, name))
            if name in LAUNCHING_CALLS:
                launched.add(correlation_id)
        else:
            raise InputError(f"a device log holds a record of unknown kind {kind!r}.")
    for rows in (capture.kernels, capture.memcpys, capture.runtime_calls, capture.syncs, capture.nvtx):
        rows.sort()
    return len(launched - ran)


LAUNCH_KERNEL = "cudaLaunchKernel_v7000"
MEMCPY_ASYNC = "cudaMemcpyAsync_v3020"
LAUNCHING_CALLS = frozenset({LAUNCH_KERNEL, MEMCPY_ASYNC})
