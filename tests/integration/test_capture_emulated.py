"""Captures on a real Ray cluster with the emulated device: small, checked, interrupted, continued."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from own_processes import marked

from repro.capture import capture_run
from repro.procs import OWNER_VARIABLE, leftovers
from repro.progress import Progress
from repro.results import CaptureRecord, RunDir
from repro.spec import RunSpec

HANG_S = 200.0
KNOBS = {"device": "emulated", "blocks": 3, "prep_ms": 5.0, "payload": 4, "stock_ray": True}


def spec(*profiles: str) -> RunSpec:
    return RunSpec(profiles=profiles, **KNOBS)  # type: ignore[arg-type]


def test_modes_give_right_results_whole_profiles_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # must lead no driver astray
    run = RunDir(tmp_path / "run")
    before = {process.pid for process in leftovers()}
    record = capture_run(spec("inline", "pinned", "overlap"), run, fresh=False, progress=Progress(quiet=True))
    assert [one.profile for one in record.captures] == ["inline", "pinned", "overlap"]
    for one in record.captures:
        assert one.checksum
        assert one.checksum.ok
        assert one.checksum.expected == one.checksum.got
        assert one.batch_wait_ms is not None
        with sqlite3.connect(run.root / str(one.file)) as db:
            assert db.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone() == (3 * 9,)
            assert db.execute("SELECT count(*), min(bytes) FROM CUPTI_ACTIVITY_KIND_MEMCPY").fetchone() == (6, 64 << 20)
    assert not run.logs.exists()
    assert {process.pid for process in leftovers()} <= before
    assert children_gone()


def children_gone() -> bool:
    return all(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children(recursive=True))


CAPTURE = """
import sys
from pathlib import Path
from repro.capture import capture_run
from repro.progress import Progress
from repro.results import RunDir
from repro.spec import RunSpec
capture_run(RunSpec.model_validate_json(sys.argv[2]), RunDir(Path(sys.argv[1])), fresh=False, progress=Progress())
"""


@pytest.fixture
def interrupted(tmp_path: Path, environment: dict[str, str]) -> Iterator[RunDir]:
    """A run that got SIGTERM once its first profile was there."""
    run = RunDir(tmp_path / "run")
    arguments = [str(run.root), spec("inline", "split").model_dump_json()]
    process = subprocess.Popen([sys.executable, "-c", CAPTURE, *arguments], env=environment, cwd=tmp_path)
    try:
        deadline = time.monotonic() + HANG_S
        while not any(one.profile == "inline" for one in captures(run)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) != 0
        yield run
    finally:
        process.kill()
        process.wait()


def captures(run: RunDir) -> list[CaptureRecord]:
    return run.read().captures if run.run_json.exists() else []


def test_sigterm_leaves_no_process_and_the_next_run_captures_only_what_is_missing(
    interrupted: RunDir, environment: dict[str, str]
) -> None:
    run = interrupted
    assert marked(environment[OWNER_VARIABLE]) == []
    (first,) = captures(run)
    record = capture_run(spec("inline", "split"), run, fresh=False, progress=Progress(quiet=True))
    assert record.captures[0] == first
    assert [one.profile for one in record.captures] == ["inline", "split"]
    assert all((run.root / str(one.file)).is_file() for one in record.captures)
