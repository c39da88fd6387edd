"""The ``reproduce`` command as a user has it: real Ray, real profiles, Ctrl-C in the middle, the same command again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from own_processes import marked

from repro.procs import OWNER_VARIABLE
from repro.results import RunDir

FLAGS = ["--device=emulated", "--profiles=inline,split", "--blocks=4", "--prep-ms=5"]
LIMIT_S = 240.0


def _command(out: Path) -> list[str]:
    return [sys.executable, "-m", "repro", "reproduce", *FLAGS, f"--out={out}"]


def test_interrupted_and_continued(tmp_path: Path, environment: dict[str, str]) -> None:
    run_dir = RunDir(tmp_path / "run")
    with (tmp_path / "first.log").open("w") as log:
        process = subprocess.Popen(
            _command(run_dir.root), cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_for_a_capture(run_dir, process, tmp_path / "first.log")
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=LIMIT_S) == 130, (tmp_path / "first.log").read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    said = (tmp_path / "first.log").read_text()
    assert "Traceback" not in said
    assert "Finished profiles are kept in" in said
    assert not marked(environment[OWNER_VARIABLE]), "a process outlived the command"
    kept = run_dir.profile_path("inline").read_bytes()
    assert [capture.profile for capture in run_dir.read().captures] == ["inline"]

    done = subprocess.run(
        _command(run_dir.root), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode in (0, 1), done.stderr
    assert "(continued: 1 of 2 captures are there)" in done.stderr
    assert run_dir.profile_path("inline").read_bytes() == kept
    assert [capture.profile for capture in run_dir.read().captures] == ["inline", "split"]
    assert done.stdout.endswith(f"Report: {run_dir.report}\n")
    assert "EMULATED" in run_dir.report.read_text()
    assert not marked(environment[OWNER_VARIABLE])

    analysis = subprocess.run(
        [sys.executable, "-m", "repro", "analyze", str(run_dir.profile_path("split")), "--format=json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    found = json.loads(analysis.stdout)
    assert found["schema"] == "repro.analysis/1"
    assert found["kernels"] == 4 * 9
    assert found["copy_ns"] + found["wait_ns"] == found["idle_ns"]


def _wait_for_a_capture(run_dir: RunDir, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (run_dir.run_json.exists() and run_dir.read().captures):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"no capture after {LIMIT_S:.0f} s: {log.read_text()}"
        time.sleep(0.05)
