"""The flush window in a real Ray: the library in the raylet, the patched node.py; nsys itself or its stand-in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from repro import ray_patches
from repro.ray_bugs import nsys_stand_in
from repro.ray_patches import flush_window

pytestmark = pytest.mark.needs("g++")

GUARD_S = 150.0
DRIVER = """
import json, os, sys, time, ray
how, folder = sys.argv[1:]
ray.init(address="local", include_dashboard=False, num_cpus=2, object_store_memory=256 * 1024**2, log_to_driver=False,
         _temp_dir=folder + "/r")
@ray.remote(num_cpus=0, runtime_env={"nsight": {"t": "nvtx", "sample": "none", "cpuctxsw": "none", "o": "'r'"}})
class Actor:
    def pid(self):
        return os.getpid()
actor = Actor.remote()
worker = ray.get(actor.pid.remote(), timeout=100)
node = ray._private.worker._global_node
raylet = node.all_processes["raylet"][0].process.pid
logs = node.get_logs_dir_path()
report = logs + "/nsight/r.nsys-rep"
lock = node.get_session_dir_path() + f"/profiler_flush.{raylet}.lock"
print(json.dumps({"raylet": raylet, "report": report, "errors": logs + "/raylet.err", "lock": lock}), flush=True)
if how == "sleep":
    time.sleep(600)
if how == "kill raylet":
    os.kill(raylet, 9)
if how == "kill worker":
    os.kill(worker, 9)
ray.shutdown()
print(json.dumps({"bytes": os.path.getsize(report) if os.path.exists(report) else None}), flush=True)
"""


class Driver:
    """One driver process with one profiled actor; ``facts`` are what it said once the actor ran."""

    def __init__(self, how: str, folder: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, how, str(folder)], env=env, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.facts: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
        assert self.facts, "the driver ended before its actor ran"
        self.report = Path(self.facts["report"])

    def returned(self) -> dict[str, Any]:
        """What it said after ``ray.shutdown()`` returned."""
        assert self.process.stdout
        said = self.process.stdout.read()  # Ray's own words about what was killed are in it
        assert self.process.wait(timeout=GUARD_S) == 0
        result: dict[str, Any] = json.loads(said.splitlines()[-1])
        return result

    def raylet_errors(self) -> str:
        return Path(self.facts["errors"]).read_text()


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a driver with the library and the patches."""
    folder = tmp_path_factory.mktemp("fixed")
    library = flush_window.build(folder / "build")
    packages = ray_patches.overlay(folder / "overlay", ["nsight-command", "profiler-flush-wait"])
    return {
        **os.environ,
        **flush_window.environment(library, ray_dir=packages / "ray"),
        "PYTHONPATH": str(packages),
        "RAY_worker_profiler_flush_timeout_ms": "20000",
    }


@pytest.fixture
def start(fixed: dict[str, str]) -> Iterator[Callable[..., Driver]]:
    """Starts drivers; ends what is left of them."""
    folders: list[Path] = []
    drivers: list[Driver] = []

    def starter(how: str, *, stand_in: bool = True, **knobs: str) -> Driver:
        folder = Path(tempfile.mkdtemp(prefix="pf"))  # short: Ray puts sockets below it
        folders.append(folder)
        env = {**fixed, "TMPDIR": str(folder), **knobs}
        if stand_in:
            nsys_stand_in.install(folder / "bin")
            env["PATH"] = f"{folder / 'bin'}{os.pathsep}{env['PATH']}"
        drivers.append(Driver(how, folder, env))
        return drivers[-1]

    yield starter
    for driver in drivers:
        if driver.process.poll() is None:
            driver.process.send_signal(signal.SIGTERM)
            driver.process.wait(timeout=GUARD_S)
    for folder in folders:
        for process in left_of(folder):
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def left_of(folder: Path) -> list[psutil.Process]:
    """Processes that name ``folder`` on their command line; zombies do not count."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(str(folder) in word for word in process.info["cmdline"] or [])
    ]


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {GUARD_S:.0f} s for {what}"
        time.sleep(0.05)


def whole(report: Path) -> bool:
    """Whether a report of the stand-in is complete."""
    return report.exists() and report.read_bytes().endswith(b" bytes\n")


def session_folder(driver: Driver) -> Path:
    return driver.report.parents[2]


@pytest.mark.parametrize("group", ["separate", "shared"])
def test_shutdown_returns_with_the_whole_report(start: Callable[..., Driver], group: str) -> None:
    driver = start("shut down", NSYS_STAND_IN_GROUP=group)
    assert flush_window.loaded(driver.facts["raylet"])
    assert driver.returned() == {"bytes": 1_000_000}
    assert whole(driver.report)
    assert "waiting for nsys" in driver.raylet_errors()
    wait_for(lambda: not left_of(session_folder(driver)), "the end of every process of the session")
    assert not Path(driver.facts["lock"]).exists()


@pytest.mark.parametrize("how", ["kill raylet", "kill worker"])
def test_a_killed_process_does_not_lose_the_report(start: Callable[..., Driver], how: str) -> None:
    driver = start(how)
    assert driver.returned() == {"bytes": 1_000_000}
    wait_for(lambda: not left_of(session_folder(driver)), "the end of every process of the session")


def test_a_hanging_exporter_does_not_hold_shutdown(start: Callable[..., Driver]) -> None:
    driver = start("shut down", NSYS_STAND_IN_MODE="hang", RAY_worker_profiler_flush_timeout_ms="2000")
    driver.returned()
    assert not whole(driver.report)
    assert "made no progress for" in driver.raylet_errors()
    wait_for(lambda: not left_of(session_folder(driver)), "the end of every process of the session")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_a_driver_that_ends_early_leaves_the_report_and_nothing_else(
    start: Callable[..., Driver], number: signal.Signals
) -> None:
    driver = start("sleep")
    driver.process.send_signal(number)
    driver.process.wait(timeout=GUARD_S)
    if number == signal.SIGINT:
        assert whole(driver.report), "Ray's exit handler waits as ray.shutdown() does"
    wait_for(lambda: not left_of(session_folder(driver)), "the end of every process of the session")
    assert whole(driver.report)


@pytest.mark.needs("nsys")
def test_nsys_itself(start: Callable[..., Driver], tmp_path: Path) -> None:
    driver = start("shut down", stand_in=False)
    assert driver.returned()["bytes"]
    exported = subprocess.run(
        ["nsys", "export", "--type=sqlite", f"--output={tmp_path / 'r.sqlite'}", str(driver.report)],
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert exported.returncode == 0, exported.stderr
    wait_for(lambda: not left_of(session_folder(driver)), "the end of every process of the session")
