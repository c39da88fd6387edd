"""NVIDIA's own tools accept what the kit writes, and their gap rule agrees with our wait time."""

from __future__ import annotations

import csv
import io
import random
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from repro.analysis import analyze
from repro.nsysdb import schema
from repro.nsysdb.model import (
    DEVICE,
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
from repro.nsysdb.writer import write_profile

pytestmark = pytest.mark.needs("nsys")

LATER = {"TARGET_INFO_CUDA_DEVICE", "DIAGNOSTIC_EVENT"}  # tables that nsys 2023.4 does not write


def nsys(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(["nsys", *arguments], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"nsys {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def table(kind: str, report: str, path: Path) -> list[dict[str, str]]:
    """Rows of ``nsys stats`` or ``nsys analyze`` as CSV; their chatter around it is skipped."""
    said = nsys(kind, "--quiet", "--format=csv", "--output=-", "-r", report, str(path), cwd=path.parent)
    lines = said.splitlines()
    header = next((i for i, line in enumerate(lines) if "," in line and ("(ns)" in line or "Total" in line)), None)
    if header is None:
        return []
    body = [line for line in lines[header:] if line.count(",") >= lines[header].count(",")]
    return list(csv.DictReader(io.StringIO("\n".join(body))))


def random_capture(seed: int, device_id: int = 0) -> Capture:
    """Kernels and copies on three streams at random: overlapping, nested, touching."""
    rng = random.Random(seed)
    made = Capture(device_id, "Test GPU", process_names={9: "worker"}, utc_epoch_ns=1_700_000_000 * 10**9)
    for correlation in range(1, 301):
        start = 1_000_000 + rng.randrange(3_000_000)
        end = start + rng.randrange(1, 40_000)
        stream = rng.choice((7, 13, 14))
        if rng.random() < 0.6:
            made.kernels.append(Kernel(start, end, stream, correlation, 9, "gemm<float>(int)"))
            made.runtime_calls.append(RuntimeCall(start - 100, start, 9, 10, correlation, "cudaLaunchKernel_v7000"))
        else:
            host = rng.choice((PAGEABLE, PINNED))
            kinds = (HTOD, host, DEVICE) if rng.random() < 0.5 else (DTOH, DEVICE, host)
            made.memcpys.append(Memcpy(start, end, stream, correlation, 9, 4096, *kinds))
            made.runtime_calls.append(RuntimeCall(start - 100, end, 9, 10, correlation, "cudaMemcpyAsync_v3020"))
            made.syncs.append(Sync(start, end, stream, correlation, 9, 3))
    made.nvtx.append(NvtxRange(1_000_000, 4_000_000, 9, 10, "all"))
    return made


@pytest.mark.parametrize("seed", [1, 2])
def test_gpu_gaps_is_our_wait_time(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "made.sqlite"
    # First and last stand kernels, because nsys's window begins and ends with any operation.
    made = random_capture(seed)
    made.kernels.append(Kernel(900_000, 900_010, 7, 1001, 9, "first"))
    made.kernels.append(Kernel(4_100_000, 4_100_010, 7, 1002, 9, "last"))
    write_profile(path, made)
    ours = analyze(path, with_nsys_ai=False)
    gaps = table("analyze", "gpu_gaps:gap=0:rows=-1", path)
    assert len(gaps) > 3
    assert sum(int(row["Duration (ns)"]) for row in gaps) == ours.wait_ns
    assert ours.copy_ns > 0


def test_stats_reports(tmp_path: Path) -> None:
    path = tmp_path / "made.sqlite"
    made = random_capture(3)
    write_profile(path, made)
    kernels = table("stats", "cuda_gpu_kern_sum", path)
    assert [row["Name"] for row in kernels] == ["gemm<float>(int)"]
    assert int(kernels[0]["Total Time (ns)"]) == sum(row.end_ns - row.start_ns for row in made.kernels)
    copies = table("stats", "cuda_gpu_mem_time_sum", path)
    assert sum(int(row["Count"]) for row in copies) == len(made.memcpys)
    assert {row["Operation"] for row in copies} == {"[CUDA memcpy Host-to-Device]", "[CUDA memcpy Device-to-Host]"}
    assert sum(int(row["Num Calls"]) for row in table("stats", "cuda_api_sum", path)) == len(made.runtime_calls)
    assert [row["Range"].lstrip(":") for row in table("stats", "nvtx_sum", path)] == ["all"]


@pytest.mark.parametrize("rule", ["gpu_time_util", "cuda_memcpy_async", "cuda_memcpy_sync", "cuda_api_sync"])
def test_analyze_rules_run(tmp_path: Path, rule: str) -> None:
    path = tmp_path / "made.sqlite"
    made = random_capture(4)
    write_profile(path, made)
    said = nsys("analyze", "-r", f"{rule}:rows=-1", str(path), cwd=tmp_path)
    assert "ERROR" not in said
    assert "could not be" not in said
    if rule == "cuda_memcpy_async":
        pageable = sum(PAGEABLE in (row.src_kind, row.dst_kind) for row in made.memcpys)
        assert len(table("analyze", f"{rule}:rows=-1", path)) == pageable


def test_schema_is_the_exporter_s(tmp_path: Path) -> None:
    nsys("profile", "-t", "nvtx", "--sample=none", "--cpuctxsw=none", "-o", "empty", "true", cwd=tmp_path)
    nsys("export", "--type=sqlite", "--lazy=false", "-o", "empty.sqlite", "empty.nsys-rep", cwd=tmp_path)
    write_profile(tmp_path / "made.sqlite", random_capture(5))
    with closing(sqlite3.connect(tmp_path / "empty.sqlite")) as db:
        version = db.execute("SELECT value FROM META_DATA_EXPORT WHERE name = 'EXPORT_SCHEMA_VERSION'").fetchone()[0]
        if version != schema.VERSION:
            pytest.skip(f"this nsys exports schema {version}, the kit writes {schema.VERSION}")
        with closing(sqlite3.connect(tmp_path / "made.sqlite")) as ours:
            for (name,) in ours.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                if name in LATER:
                    continue
                described = f"PRAGMA table_info({name})"
                assert ours.execute(described).fetchall() == db.execute(described).fetchall(), name
                if name.startswith("ENUM_"):
                    rows = f"SELECT * FROM {name}"
                    assert set(ours.execute(rows)) <= set(db.execute(rows)), name
