"""Hand-built analyses and run records for the tests of claims and reports. Figures add up as real ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from repro.analysis.model import Analysis, Direction, NsysAi
from repro.results import (
    CaptureRecord,
    ChecksumRecord,
    DeviceRecord,
    PayloadRecord,
    RunDir,
    RunRecord,
    StagingRecord,
    write_json,
)
from repro.spec import PROFILES, PUBLISHED, RunSpec

SPAN_NS = 3_000_000_000
BATCH_BYTES = 2048 * 8192 * 4


def _direction(copy_ms_each: float, overlapped_pct: float | None, *, pageable: bool = True) -> Direction:
    if overlapped_pct is None:
        return Direction()
    rate = BATCH_BYTES / copy_ms_each / 1e6
    return Direction(
        bytes=32 * BATCH_BYTES,
        count=32,
        ms=32 * copy_ms_each,
        gb_per_s=rate,
        overlapped_pct=overlapped_pct,
        pageable_pct=100.0 if pageable else 0.0,
        pageable_gb_per_s=rate if pageable else None,
        pinned_gb_per_s=None if pageable else rate,
    )


def analysis(
    name: str,
    *,
    idle_pct: float,
    copy_ms: float = 300.0,
    h2d_overlapped_pct: float | None = 0.0,
    pageable: bool = True,
    emulated: bool = True,
    device_name: str = "NVIDIA B200 (emulated)",
    sha256: str = "",
    **changes: Any,
) -> Analysis:
    """An analysis of a 3 s span with 32 batches."""
    idle_ns = round(SPAN_NS * idle_pct / 100)
    copy_ns = round(copy_ms * 1e6)
    wait_ns = idle_ns - copy_ns
    values: dict[str, Any] = {
        "file": f"{name}.sqlite",
        "sha256": sha256 or name,
        "device_id": 0,
        "device_name": device_name,
        "emulated": emulated,
        "devices_with_kernels": [0],
        "span_ns": SPAN_NS,
        "busy_ns": SPAN_NS - idle_ns,
        "idle_ns": idle_ns,
        "copy_ns": copy_ns,
        "wait_ns": wait_ns,
        "span_ms": SPAN_NS / 1e6,
        "busy_ms": (SPAN_NS - idle_ns) / 1e6,
        "idle_ms": idle_ns / 1e6,
        "idle_pct": idle_pct,
        "copy_ms": copy_ms,
        "wait_ms": wait_ns / 1e6,
        "kernels": 288,
        "graphs": 0,
        "memcpys": 64,
        "h2d": _direction(7.9 if pageable else 1.2, h2d_overlapped_pct, pageable=pageable),
        "d2h": _direction(7.9 if pageable else 1.2, 0.0, pageable=pageable),
        "top_gaps": [],
        "dropped": {},
        "nsys_ai": NsysAi(
            version="0.3.0",
            rows=[{"_summary": True, "device_idle_ms": idle_ns / 1e6}],
            device_idle_ms=idle_ns / 1e6,
            agrees=True,
        ),
    }
    return Analysis(**(values | changes))


IDLE = {
    "inline": (61.7, 505.6),
    "split": (40.0, 505.6),
    "pinned": (47.3, 76.8),
    "overlap": (29.2, 300.0),
    "patched_split": (40.4, 505.6),
    "final_split": (62.9, 505.6),
    "final_staged": (55.1, 94.4),
}
"""Profile -> device idle in percent, copy_ms."""


def run_record(**changes: Any) -> RunRecord:
    """An emulated run of everything but the profile whose patch is missing."""
    values: dict[str, Any] = {
        "run": "20261129-120000-emulated",
        "created_utc": "2026-11-29T12:00:00Z",
        "kit_version": "0.1.0",
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "versions": {"python": "3.11.9", "ray": "2.58.0", "nsys-ai": "0.3.0"},
        "machine": {"cores": 2, "memory_bytes": 8 << 30, "cpu": "A|B `CPU` <1>"},
        "spec": RunSpec(profiles=PUBLISHED, device="emulated"),
        "device": DeviceRecord(kind="emulated", name="NVIDIA B200", model_file="b200.toml", model_sha256="ab" * 32),
        "payload": PayloadRecord(
            nominal_bytes=BATCH_BYTES,
            travelled_bytes=256 * 8192 * 4,
            travelled_rows=256,
            reason="2 cores feed the modelled GPU with at most 256 rows a batch",
        ),
        "patches": [{"name": "nsight-command", "sha256": "cd" * 32, "state": "applied"}],
    }
    return RunRecord(**(values | changes))


def capture_record(name: str, repeat: int = 1, **changes: Any) -> CaptureRecord:
    """A finished capture of 32 batches."""
    stem = name if repeat == 1 else f"{name}.{repeat}"
    producer_bound = PROFILES[name].regime == "producer-bound"
    values: dict[str, Any] = {
        "profile": name,
        "repeat": repeat,
        "file": f"profiles/{stem}.sqlite",
        "sha256": stem,
        "wall_s": 3.2,
        "warmup_batches": 16 if producer_bound else 24,
        "warmup_s": 4.0,
        "batches": 32,
        "batch_wait_ms": 38.5 if producer_bound else 1.5,
        "producer_bound": producer_bound,
        "prep_ms": 40.1,
        "source_interval_ms": 104.0 if producer_bound else 0.0,
        "checksum": ChecksumRecord(expected="1.5", got="1.5", ok=True),
        "staging": StagingRecord(host_copy_ms=212.5, pinned_bytes=128 << 20, slots=2)
        if name == "final_staged"
        else None,
    }
    return CaptureRecord(**(values | changes))


def write_run(root: Path, record: RunRecord, analyses: dict[tuple[str, int], Analysis]) -> RunDir:
    """A run on disk: ``run.json`` and ``analysis/*.json``, without the profiles."""
    run_dir = RunDir(root)
    run_dir.write(record)
    for (name, repeat), result in analyses.items():
        write_json(run_dir.analysis_path(name, repeat), result)
    return run_dir


def full_run(root: Path) -> RunDir:
    """An emulated run of all seven, one repeat."""
    analyses = {
        (name, 1): analysis(
            name,
            idle_pct=idle_pct,
            copy_ms=copy_ms,
            h2d_overlapped_pct={"overlap": 31.3, "final_staged": 88.0}.get(name, 0.0),
            pageable=name not in ("pinned", "final_staged"),
        )
        for name, (idle_pct, copy_ms) in IDLE.items()
    }
    return write_run(root, run_record(captures=[capture_record(name) for name in IDLE]), analyses)
