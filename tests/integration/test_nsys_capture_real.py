"""Real nsys around the GPU stage of a real pipeline, on the emulated device: ranges arrive, and no CUDA does."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from own_processes import marked

from repro.capture.nsys import report_version
from repro.capture.run import WARMUP_BLOCKS
from repro.procs import OWNER_VARIABLE
from repro.results import RunDir

LIMIT_S = 280.0
BLOCKS = 4

pytestmark = pytest.mark.needs("nsys")


def kit(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "repro", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def ranges(profile: Path) -> list[str]:
    with closing(sqlite3.connect(profile)) as db:
        text = "coalesce(text, (SELECT value FROM StringIds WHERE id = textId))"
        return [name for (name,) in db.execute(f"SELECT {text} FROM NVTX_EVENTS WHERE eventType IN (59, 60)")]


@pytest.mark.timeout(600)
def test_ranges_arrive_and_the_analysis_says_why_there_is_no_idle_time(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    flags = ["--device=emulated", "--profiler=nsys", "--profiles=inline,overlap", "--prep-ms=5", "--payload=64"]
    done = kit(tmp_path, environment, "reproduce", *flags, f"--blocks={BLOCKS}", "--out=run")
    assert done.returncode == 4, done.stderr
    assert "No CUDA events collected" in done.stderr
    assert "Traceback" not in done.stderr
    assert not marked(environment[OWNER_VARIABLE]), "a process outlived the command"

    run = RunDir(tmp_path / "run")
    record = run.read()
    assert [capture.error is None for capture in record.captures] == [False, False]
    assert all(capture.checksum and capture.checksum.ok for capture in record.captures)
    for capture in record.captures:
        assert capture.file
        assert capture.nsys_rep
        found = ranges(run.root / capture.file)
        batches = {f"batch {number}" for number in range(WARMUP_BLOCKS["single-operator"] + BLOCKS)}
        assert len(batches & set(found)) == BLOCKS, "warm-up batches are outside the window"
        stages = ["H2D", "compute", "D2H"] + (["prep"] if capture.profile == "inline" else [])
        assert {name: found.count(name) for name in stages} == dict.fromkeys(stages, BLOCKS)
        assert report_version(run.root / capture.nsys_rep)

    report = str(run.root / str(record.captures[0].nsys_rep))
    for flag in ("--format=table", "--format=json"):
        answer = kit(tmp_path, environment, "analyze", report, flag)
        assert answer.returncode == 4
        assert "No CUDA events collected" in answer.stderr
        assert not answer.stdout
    assert json.loads((run.root / "run.json").read_text())["spec"]["profiler"] == "nsys"


@pytest.mark.timeout(300)
def test_an_interrupt_under_nsys_leaves_no_process(tmp_path: Path, environment: dict[str, str]) -> None:
    flags = ["--device=emulated", "--profiler=nsys", "--profiles=split", "--payload=64", "--blocks=1000"]
    command = [sys.executable, "-m", "repro", "reproduce", *flags, "--out=run"]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not any("nsys" in one.name() for one in marked(environment[OWNER_VARIABLE])):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "nsys never started"
            time.sleep(0.2)
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert "Traceback" not in log.read_text()
    assert not marked(environment[OWNER_VARIABLE]), "a process outlived the command"
