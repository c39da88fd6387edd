"""The stand-in for nsys against real processes: structure, outcomes, and what a signal at the wrong time leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from repro.capture.nsys import Nsys, export_problem
from repro.ray_bugs import nsys_stand_in
from repro.ray_bugs.nsys import choose

GUARD_S = 60.0


class Bench:
    """A folder with the stand-in, and the environment that marks and bounds whatever it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nsys = nsys_stand_in.install(folder / "a bin")
        (folder / "tmp").mkdir()
        self.environment = {
            **os.environ,
            "TMPDIR": str(folder / "tmp"),
            "NSYS_STAND_IN_EXPORT_S": "0.4",
            "NSYS_STAND_IN_REPORT_BYTES": "20000",
            "NSYS_STAND_IN_LIFE_S": "30",
            "TEST_BENCH": str(folder),
        }
        self.report = folder / "report.nsys-rep"

    def profile(self, *command: str, output: str = "report", **knobs: str) -> subprocess.Popen[bytes]:
        environment = {**self.environment, **{f"NSYS_STAND_IN_{name}": value for name, value in knobs.items()}}
        return subprocess.Popen(
            [self.nsys, "profile", "--sample=none", "-t", "nvtx", "-o", output, *command],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def processes(self) -> dict[str, psutil.Process]:
        """Living processes of this bench by name."""
        found = {}
        for process in psutil.process_iter():
            try:
                if process.environ().get("TEST_BENCH") == str(self.folder) and process.status() != "zombie":
                    found[process.name()] = process
            except psutil.Error:
                continue
        return found

    def streams(self) -> list[Path]:
        return list((self.folder / "tmp").glob("*.qdstrm"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for process in bench.processes().values():
        process.kill()


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < deadline, f"never saw: {what}"
        time.sleep(0.02)


def _tool() -> Nsys:
    return choose("stand-in")


def test_writes_a_report_that_exports_and_keeps_the_exit_status(bench: Bench) -> None:
    process = bench.profile("sh", "-c", "exit 7", output="report_%p")
    assert process.wait(GUARD_S) == 7
    (report,) = bench.folder.glob("report_*.nsys-rep")
    assert report.stem.removeprefix("report_").isdigit()
    assert report.stat().st_size == 20000
    assert export_problem(_tool(), report) is None
    assert not bench.streams()
    _until(lambda: not bench.processes(), "the agent's end")


def test_cut_reports_do_not_export(bench: Bench) -> None:
    assert bench.profile("true").wait(GUARD_S) == 0
    whole = bench.report.read_bytes()
    for content in (whole[:-1], whole[:100], whole + b"x", b""):
        bench.report.write_bytes(content)
        assert "not a whole report" in (export_problem(_tool(), bench.report) or "")


def test_process_structure(bench: Bench) -> None:
    process = bench.profile(sys.executable, "-c", "input()", MODE="normal")
    _until(lambda: {"nsys-launcher", "nsys"} <= bench.processes().keys() and _target(bench), "the target")
    target = _target(bench)
    launcher = bench.processes()["nsys-launcher"]
    agent = next(one for one in _all_named(bench, "nsys") if one.pid != process.pid)
    assert os.getpgid(launcher.pid) == process.pid
    assert os.getsid(target.pid) == target.pid
    assert os.getsid(agent.pid) == agent.pid
    assert agent.ppid() != process.pid
    assert f"--session-name=profile-{process.pid}" in agent.cmdline()
    target.kill()
    _until(lambda: "QdstrmImporter" in bench.processes(), "the importer")
    assert bench.processes()["QdstrmImporter"].ppid() == agent.pid
    assert process.wait(GUARD_S) == 128 + signal.SIGKILL


def test_shared_group_puts_target_and_export_into_the_profilers_group(bench: Bench) -> None:
    process = bench.profile(sys.executable, "-c", "input()", GROUP="shared", EXPORT_S="20")
    _until(lambda: _target(bench), "the target")
    assert os.getpgid(_target(bench).pid) == process.pid
    _target(bench).kill()
    _until(bench.report.exists, "the export's begin")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(GUARD_S)
    _until(lambda: not bench.processes(), "the end of all")
    assert bench.report.stat().st_size == 0


@pytest.mark.parametrize(
    ("mode", "size", "streams"),
    [("empty", 0, 0), ("corrupt", 20000 - len(nsys_stand_in._TAIL % 0), 0), ("missing", None, 0), ("partial", None, 1)],
)
def test_what_a_mode_leaves(bench: Bench, mode: str, size: int | None, streams: int) -> None:
    assert bench.profile("true", MODE=mode).wait(GUARD_S) == 0
    if size is None:
        assert not bench.report.exists()
    else:
        assert bench.report.stat().st_size == size
        assert export_problem(_tool(), bench.report) is not None
    assert len(bench.streams()) == streams


def test_knobs_are_not_for_the_trial_of_rays_plugin(bench: Bench) -> None:
    assert bench.profile("true", output="empty", MODE="hang", EXPORT_S="100").wait(GUARD_S) == 0
    assert export_problem(_tool(), bench.folder / "empty.nsys-rep") is None


def test_a_killed_profiler_leaves_an_agent_that_finishes_the_report(bench: Bench) -> None:
    process = bench.profile("true", EXPORT_S="3")
    _until(bench.report.exists, "the export's begin")
    process.kill()
    process.wait(GUARD_S)
    assert export_problem(_tool(), bench.report) is not None
    _until(lambda: not bench.processes(), "the agent's end")
    assert export_problem(_tool(), bench.report) is None


def test_a_terminated_profiler_abandons_the_report(bench: Bench) -> None:
    process = bench.profile("true", EXPORT_S="20")
    _until(bench.report.exists, "the export's begin")
    process.terminate()
    assert process.wait(GUARD_S) == 128 + signal.SIGTERM
    _until(lambda: not bench.processes(), "the end of all")
    assert len(bench.streams()) == 1


def test_a_hanging_export_burns_no_cpu_and_grows_no_file(bench: Bench) -> None:
    process = bench.profile("true", MODE="hang")
    _until(lambda: bench.report.exists() and bench.report.stat().st_size > 9000, "half a report")
    time.sleep(0.5)  # the last tick of growing
    before = [bench.report.stat().st_size, *(one.cpu_times()[:2] for one in bench.processes().values())]
    time.sleep(1.5)
    assert [bench.report.stat().st_size, *(one.cpu_times()[:2] for one in bench.processes().values())] == before
    assert process.poll() is None


def test_an_export_without_end_grows_until_its_life_is_over(bench: Bench) -> None:
    process = bench.profile("true", MODE="for-ever", LIFE_S="2")
    _until(lambda: bench.report.exists() and bench.report.stat().st_size > 21_000, "more than a whole report")
    process.wait(GUARD_S)
    _until(lambda: not bench.processes(), "the end of all")


def test_refuses_what_it_does_not_know(bench: Bench) -> None:
    assert bench.profile("true", MODE="other").wait(GUARD_S) == 1
    assert bench.profile("no-such-program-here").wait(GUARD_S) == 127
    assert subprocess.run([bench.nsys, "stats"], capture_output=True).returncode == 1
    version = subprocess.run([bench.nsys, "--version"], capture_output=True, text=True)
    assert version.stdout == f"{nsys_stand_in.VERSION}\n"


def _all_named(bench: Bench, name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.name() == name and process.environ().get("TEST_BENCH") == str(bench.folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _target(bench: Bench) -> psutil.Process:
    """The profiled process, None before it runs its own program."""
    for process in psutil.process_iter():
        try:
            if process.cmdline()[1:] == ["-c", "input()"] and process.environ().get("TEST_BENCH") == str(bench.folder):
                return process
        except psutil.Error:
            continue
    return None  # type: ignore[return-value]
