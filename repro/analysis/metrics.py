"""From a profile to the metrics of one device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from repro.analysis.intervals import Union, total, union
from repro.analysis.model import SCHEMA, Analysis, Direction, Gap, NsysAi
from repro.analysis.nsys_ai import AGREEMENT_MS, gpu_idle_gaps
from repro.errors import NoGpuActivityError
from repro.nsysdb.model import DTOH, HTOD, PAGEABLE, PINNED
from repro.nsysdb.pages import NULL
from repro.nsysdb.reader import Profile, Rows, check_file, read_profile
from repro.results import sha256_of
from repro.text import one_line

_TOP_GAPS = 10
_DEVICES_NAMED = 16
_UNKNOWN_MEMORY = 7
_UNIFIED_MEMORY_KINDS = (11, 12, 13)


def analyze(path: Path, device_id: int | None = None, *, with_nsys_ai: bool = True) -> Analysis:
    """Metrics of one device of the profile at ``path``; the definitions are ``repro.analysis.model``'s.

    ``device_id`` ``None`` takes device 0 if it has kernels, else the only device that has some. nsys-ai runs on a copy
    and its answer stands beside ours; that it fails is recorded in the result and raises nothing.

    ``InputError`` if the file cannot be read or is foreign, ``NoGpuActivityError`` if the device has no kernels.
    """
    path = Path(path)
    check_file(path)  # first: not every file that could be hashed ends
    with ThreadPoolExecutor(1, "sha256") as pool:
        digest = pool.submit(sha256_of, path)  # releases the GIL: runs beside the rest
        profile = read_profile(path)
        device = _choose_device(path, profile, device_id)
        analysis = measure(profile, device, file=one_line(path.name))
        analysis.sha256 = digest.result()
    if with_nsys_ai:
        analysis.nsys_ai = _compare(gpu_idle_gaps(path, device), analysis, profile)
    return analysis


def measure(profile: Profile, device_id: int, *, file: str = "", sha256: str = "") -> Analysis:
    """Metrics of one device that has kernels or graph launches; arithmetic only."""
    kernels, graphs, memcpys = (
        rows.of_device(device_id) for rows in (profile.kernels, profile.graphs, profile.memcpys)
    )
    busy = busy_union(kernels, graphs)
    first_ns, last_ns = int(busy.start[0]), int(busy.end[-1])
    span_ns = last_ns - first_ns
    idle = Union(busy.end[:-1], busy.start[1:])
    copying = union(memcpys.start, memcpys.end)
    touched = idle.touched_by(copying)
    copy_in_gap = np.zeros(len(idle.start), np.int64)
    copy_in_gap[touched] = copying.covered_within(idle.start[touched], idle.end[touched])
    copy_ns = int(copy_in_gap.sum())
    idle_ns = idle.length_ns
    wait_ns = idle_ns - copy_ns
    _check_buckets(busy, copying.clipped(first_ns, last_ns), span_ns, idle_ns, copy_ns)

    notes = list(profile.notes)
    absent: dict[str, str] = {}
    if len(graphs):
        notes.append(_graph_note(kernels, graphs))
    if not profile.has_memcpy_table:
        notes.append("The profile has no memcpy table: no copies were made or traced, so all idle time counts as wait.")
    kinds = memcpys.columns["copyKind"]
    if undirected := int((kinds == NULL).sum()):
        notes.append(
            f"{undirected} copies do not say their direction: they count as copies, but neither as H2D nor as D2H."
        )
    if unified := int(np.isin(kinds, _UNIFIED_MEMORY_KINDS).sum()):
        notes.append(f"{unified} unified-memory migrations count as copies, but neither as H2D nor as D2H.")
    return Analysis(
        schema=SCHEMA,
        file=file,
        sha256=sha256,
        device_id=device_id,
        device_name=profile.device_names.get(device_id),
        emulated=profile.emulated,
        devices_with_kernels=list(profile.devices),
        span_ns=span_ns,
        busy_ns=busy.length_ns,
        idle_ns=idle_ns,
        copy_ns=copy_ns,
        wait_ns=wait_ns,
        span_ms=span_ns / 1e6,
        busy_ms=busy.length_ns / 1e6,
        idle_ms=idle_ns / 1e6,
        idle_pct=100 * idle_ns / span_ns,
        copy_ms=copy_ns / 1e6,
        wait_ms=wait_ns / 1e6,
        kernels=len(kernels),
        graphs=len(graphs),
        memcpys=len(memcpys),
        h2d=_direction("h2d", memcpys, HTOD, "srcKind", busy, absent),
        d2h=_direction("d2h", memcpys, DTOH, "dstKind", busy, absent),
        top_gaps=_top_gaps(idle, copy_in_gap, first_ns),
        dropped=dict(profile.dropped),
        notes=notes,
        absent=absent,
    )


def busy_union(kernels: Rows, graphs: Rows) -> Union:
    """When a device was busy: kernels, and graph launches traced as a whole, of that device."""
    if not len(graphs):
        return union(kernels.start, kernels.end)
    return union(np.concatenate([kernels.start, graphs.start]), np.concatenate([kernels.end, graphs.end]))


def _check_buckets(busy: Union, copying: Union, span_ns: int, idle_ns: int, copy_ns: int) -> None:
    """Idle and copy time once more from the other side: busy time from the span, copies less their busy part."""
    hidden_ns = int(busy.covered_within(copying.start, copying.end).sum())
    if span_ns - busy.length_ns != idle_ns or copying.length_ns - hidden_ns != copy_ns or not 0 <= copy_ns <= idle_ns:
        raise AssertionError(
            f"time buckets do not add up: span {span_ns}, busy {busy.length_ns}, idle {idle_ns}, copy {copy_ns}, "
            f"copies {copying.length_ns} of which {hidden_ns} under kernels"
        )


def _direction(
    name: str, memcpys: Rows, copy_kind: int, host_side: str, busy: Union, absent: dict[str, str]
) -> Direction:
    """Copies of one direction over the whole profile, those before the first kernel included.

    ``ms`` sums the copies' own durations, so rates and shares are a copy's, whatever else ran beside it.
    """
    rows = memcpys.where(memcpys.columns["copyKind"] == copy_kind)
    if not len(rows):
        said = "in this direction" if len(memcpys) else "of this device"
        for figure in ("gb_per_s", "overlapped_pct", "pageable_pct"):
            absent[f"{name}.{figure}"] = f"the profile holds no copies {said}"
        return Direction()
    duration, size, memory = rows.end - rows.start, rows.columns["bytes"], rows.columns[host_side]
    total_ns = total(duration)
    sized = size >= 0  # NULL is negative, and so is nonsense
    if not sized.all():
        absent[f"{name}.bytes"] = absent[f"{name}.gb_per_s"] = "some copies do not say their size"
    known = sized & (memory != NULL) & (memory != _UNKNOWN_MEMORY)

    def rate(mask: np.ndarray) -> float | None:
        if not sized.all() or not mask.any():
            return None
        return total(size[mask]) / total(duration[mask])  # bytes a nanosecond are GB a second

    known_bytes = total(size[known])
    if not known_bytes:
        absent[f"{name}.pageable_pct"] = "no copy says its memory kind and size"
    return Direction(
        bytes=total(size) if sized.all() else None,
        count=len(rows),
        ms=total_ns / 1e6,
        gb_per_s=rate(np.ones(len(rows), bool)),
        overlapped_pct=100 * total(busy.covered_within(rows.start, rows.end)) / total_ns,
        pageable_pct=100 * total(size[known & (memory == PAGEABLE)]) / known_bytes if known_bytes else None,
        pageable_gb_per_s=rate(memory == PAGEABLE),
        pinned_gb_per_s=rate(memory == PINNED),
    )


def _top_gaps(idle: Union, copy_in_gap: np.ndarray, first_ns: int) -> list[Gap]:
    """The longest idle intervals, longest first, earlier first among equals."""
    length = idle.end - idle.start
    if len(length) > _TOP_GAPS:
        shortest = np.partition(length, -_TOP_GAPS)[-_TOP_GAPS]
        candidates = np.flatnonzero(length >= shortest)
    else:
        candidates = np.arange(len(length))
    order = candidates[np.argsort(-length[candidates], kind="stable")][:_TOP_GAPS]
    return [
        Gap(
            start_ms=int(idle.start[i] - first_ns) / 1e6,
            ms=int(length[i]) / 1e6,
            copy_ms=int(copy_in_gap[i]) / 1e6,
            wait_ms=int(length[i] - copy_in_gap[i]) / 1e6,
        )
        for i in order
    ]


def _kernel_idle(kernels: Rows) -> tuple[int, int]:
    """(span, idle) in ns by kernels alone, graph launches aside; at least one kernel."""
    alone = union(kernels.start, kernels.end)
    span_ns = int(alone.end[-1] - alone.start[0])
    return span_ns, span_ns - alone.length_ns


def _graph_note(kernels: Rows, graphs: Rows) -> str:
    said = f"{len(graphs)} CUDA graph launches traced as a whole count as busy"
    if not len(kernels):
        return f"{said}; the kernel table has no rows of this device."
    span_ns, idle_ns = _kernel_idle(kernels)
    return (
        f"{said}. By the kernel table alone: span {span_ns / 1e6:.3f} ms, busy {(span_ns - idle_ns) / 1e6:.3f} ms, "
        f"idle {idle_ns / 1e6:.3f} ms ({100 * idle_ns / span_ns:.2f}%)."
    )


def _choose_device(path: Path, profile: Profile, device_id: int | None) -> int:
    """The device to analyse, or ``NoGpuActivityError`` that says what there is instead."""
    devices = profile.devices
    having = ", ".join(f"{device} ({count})" for device, count in list(devices.items())[:_DEVICES_NAMED])
    if len(devices) > _DEVICES_NAMED:
        having += f" and {len(devices) - _DEVICES_NAMED} more"
    if not devices:
        why = [f"The profiler said: {text!r}." for text in profile.diagnostics]
        if profile.dropped:
            dropped = ", ".join(f"{reason}: {count}" for reason, count in profile.dropped.items())
            why.append(f"Rows left out: {dropped}.")
        raise NoGpuActivityError(
            " ".join([f"{path} holds no GPU kernels.", *why]),
            remedy="Capture with CUDA tracing (nsys profile -t cuda) on a machine whose driver this nsys supports.",
        )
    if device_id is not None:
        if device_id in devices:
            return device_id
        raise NoGpuActivityError(
            f"{path} has no kernels on device {device_id}.", remedy=f"Devices with kernels (count): {having}."
        )
    if 0 in devices:
        return 0
    if len(devices) == 1:
        return next(iter(devices))
    raise NoGpuActivityError(
        f"{path} has no kernels on device 0 but on several others.",
        remedy=f"Name one with --device-id; devices with kernels (count): {having}.",
    )


def _compare(theirs: NsysAi, ours: Analysis, profile: Profile) -> NsysAi:
    """Say whether nsys-ai's device idle and copy time agree with ours.

    nsys-ai knows the kernel table alone, so with graph launches its idle is compared with that of the kernels.
    """
    if theirs.error is not None:
        return theirs
    if theirs.device_idle_ms is None:
        theirs.note = "nsys-ai gave no device_idle_ms (it gives none without a gap of 1 ms on one stream)."
        return theirs
    idle_ms, of = ours.idle_ms, "idle"
    if ours.graphs and ours.kernels:
        idle_ms = _kernel_idle(profile.kernels.of_device(ours.device_id))[1] / 1e6
        of = "idle by the kernel table alone"
    theirs.agrees = abs(theirs.device_idle_ms - idle_ms) <= AGREEMENT_MS
    said = "agrees" if theirs.agrees else "does not agree"
    theirs.note = f"device_idle_ms {theirs.device_idle_ms} {said} with our {of} of {idle_ms:.3f} ms."
    if theirs.copy_ms is not None:
        same = abs(theirs.copy_ms - ours.copy_ms) <= AGREEMENT_MS
        theirs.agrees = theirs.agrees and same
        said = "agrees" if same else "does not agree"
        theirs.note += f" copy_ms {theirs.copy_ms} {said} with our {ours.copy_ms:.3f} ms."
    return theirs
