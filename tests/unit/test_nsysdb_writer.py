"""The writer: schema 3.7.2, marked as emulated, accepted by nsys-ai's skills."""

from __future__ import annotations

import sqlite3
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
from repro.nsysdb.writer import global_pid, global_tid, write_profile

SKILLS = ("gpu_idle_gaps", "overlap_breakdown", "memory_transfers", "memory_bandwidth", "profile_health_manifest")
MS = 1_000_000


def capture(device_id: int = 0) -> Capture:
    """Two batches: 8 ms H2D, two kernels of 10 ms, 8 ms D2H, then 5 ms of nothing; the second pinned at 4 ms."""
    made = Capture(
        device_id,
        "Test GPU",
        metadata={"MODEL": "test"},
        sm_count=148,
        process_names={77: "worker"},
        thread_names={(77, 78): "gpu"},
        utc_epoch_ns=1_700_000_000 * 10**9,
    )
    at, correlation = 1 * MS, 1
    for host, copy_ms in ((PAGEABLE, 8), (PINNED, 4)):
        for kind, src, dst in ((HTOD, host, DEVICE), (DTOH, DEVICE, host)):
            made.memcpys.append(Memcpy(at, at + copy_ms * MS, 7, correlation, 77, 64 << 20, kind, src, dst))
            made.runtime_calls.append(RuntimeCall(at, at + copy_ms * MS, 77, 78, correlation, "cudaMemcpyAsync_v3020"))
            at, correlation = at + copy_ms * MS, correlation + 1
            if kind == HTOD:
                for _ in range(2):
                    made.kernels.append(Kernel(at, at + 10 * MS, 7, correlation, 77, "void ns::gemm<float>(int)"))
                    made.runtime_calls.append(RuntimeCall(at, at + 1, 77, 78, correlation, "cudaLaunchKernel_v7000"))
                    at, correlation = at + 10 * MS, correlation + 1
        made.syncs.append(Sync(at, at + 1, 7, correlation, 77, 3))
        made.nvtx.append(NvtxRange(at - MS, at, 77, 78, "batch"))
        at += 5 * MS
    return made


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "made.sqlite"
    write_profile(path, capture())
    return path


def test_rows_codes_and_ids(profile: Path) -> None:
    with closing(sqlite3.connect(profile)) as db:
        one = db.execute(
            f"SELECT k.deviceId, k.globalPid, d.value, s.value, typeof(k.end) FROM {schema.KERNEL} k "
            "JOIN StringIds d ON d.id = demangledName JOIN StringIds s ON s.id = shortName"
        ).fetchone()
        assert one == (0, global_pid(77), "void ns::gemm<float>(int)", "gemm", "integer")
        assert db.execute(
            f"SELECT count(*) FROM {schema.RUNTIME} WHERE globalTid = {global_tid(77, 78)}"
        ).fetchone() == (8,)
        assert db.execute(f"SELECT copyKind, srcKind, dstKind FROM {schema.MEMCPY}").fetchall() == [
            (1, 0, 2),
            (2, 2, 0),
            (1, 1, 2),
            (2, 2, 1),
        ]
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert not db.execute("SELECT * FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL").fetchall()
    assert [file.name for file in profile.parent.iterdir()] == ["made.sqlite"]


def test_says_that_it_is_emulated(profile: Path) -> None:
    with closing(sqlite3.connect(profile)) as db:
        assert db.execute("SELECT name FROM TARGET_INFO_GPU").fetchone() == ("Test GPU (emulated)",)
        rows = dict(db.execute("SELECT name, value FROM META_DATA_CAPTURE"))
    assert rows["DEVICE_KIND"] == "emulated"
    assert rows["MODEL"] == "test"


def test_metadata_cannot_hide_the_emulation(tmp_path: Path) -> None:
    sly = capture()
    sly.metadata["DEVICE_KIND"] = "cuda"
    write_profile(tmp_path / "sly.sqlite", sly)
    assert analyze(tmp_path / "sly.sqlite", with_nsys_ai=False).emulated


def test_reads_back(profile: Path) -> None:
    got = analyze(profile, with_nsys_ai=False)
    # The span runs from the first kernel at 9 ms; between the pairs lie D2H 8, nothing 5 and H2D 4 ms.
    assert (got.span_ms, got.busy_ms, got.idle_ms, got.copy_ms, got.wait_ms) == (57, 40, 17, 12, 5)
    assert (got.kernels, got.memcpys, got.emulated, got.device_name) == (4, 4, True, "Test GPU (emulated)")
    assert got.h2d.bytes == 2 * (64 << 20)
    assert got.h2d.pageable_pct == 50
    assert got.h2d.pageable_gb_per_s == pytest.approx(8.388608)
    assert got.h2d.pinned_gb_per_s == pytest.approx(16.777216)
    assert got.h2d.gb_per_s == pytest.approx(11.184811)
    assert got.h2d.overlapped_pct == 0


def test_an_interval_that_ends_early_is_refused(tmp_path: Path) -> None:
    wrong = capture()
    wrong.kernels.append(Kernel(5, 4, 7, 1, 77, "gemm"))
    with pytest.raises(ValueError, match="ends before it starts"):
        write_profile(tmp_path / "wrong.sqlite", wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SKILLS)
def test_nsys_ai_skills_accept_it(profile: Path, name: str) -> None:
    from nsys_ai.skills.registry import get_skill

    with closing(sqlite3.connect(profile)) as db:
        db.row_factory = sqlite3.Row
        rows = get_skill(name).execute(db, device=0)
    assert rows
    assert not any("error" in row or "_abstained" in row for row in rows)
