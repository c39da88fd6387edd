"""The preload library and its warden on real processes, without Ray: a Python named "raylet" that signals as Ray does.

The profiler is the stand-in for nsys, in both of its process structures.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from repro.ray_bugs import nsys_stand_in
from repro.ray_patches import flush_window

pytestmark = pytest.mark.needs("g++")

GUARD_S = 60.0
"""For what takes well under a second or two on an idle machine; only a hang reaches it."""

RAYLET = """
import json, os, signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def spawn(argv):
    return subprocess.Popen(argv, preexec_fn=os.setpgrp, stdin=subprocess.DEVNULL).pid
do = {"spawn": spawn, "getpgid": os.getpgid, "kill": os.kill, "killpg": os.killpg}
for line in sys.stdin:
    name, *arguments = json.loads(line)
    if name == "exit":
        break
    try:
        answer = [do[name](*arguments), 0]
    except OSError as error:
        answer = [None, error.errno]
    print(json.dumps(answer), flush=True)
"""


class Raylet:
    """A process named raylet with the library preloaded; what it is told to do goes through the library."""

    def __init__(self, folder: Path, library: Path, *, name: str = "raylet", **limits_ms: int) -> None:
        self.folder = folder
        program = folder / name
        shutil.copy(os.path.realpath(sys.executable), program)
        self.errors = folder / "raylet.err"
        env = {
            **os.environ,
            "PYTHONHOME": sys.base_prefix,
            "LD_PRELOAD": str(library),
            "TMPDIR": str(folder),
            "NSYS_STAND_IN_LIFE_S": "120",
            **{f"RAY_worker_profiler_flush_{limit}_ms": str(value) for limit, value in limits_ms.items()},
        }
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [str(program), "-c", RAYLET, f"--session_dir={folder}"],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.lock = folder / f"profiler_flush.{self.process.pid}.lock"

    def ask(self, *words: Any) -> tuple[Any, int]:
        """What the call returned, and errno."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        result, error = json.loads(self.process.stdout.readline())
        return result, error

    def stop(self) -> None:
        """Leave the way a raylet does that got SIGTERM, and wait for it."""
        assert self.process.stdin
        self.process.stdin.write('["exit"]\n')
        self.process.stdin.close()
        self.process.wait(timeout=GUARD_S)

    def said(self) -> str:
        return self.errors.read_text()

    def wardens(self) -> list[psutil.Process]:
        return [one for one in psutil.process_iter(["cmdline"]) if str(self.lock) in (one.info["cmdline"] or [])]

    def profile(
        self, *, mode: str = "normal", shared: bool = False, export_s: float = 1.0, report: str = "r"
    ) -> Profiled:
        """Start a worker under the stand-in and register it."""
        knobs = [
            f"NSYS_STAND_IN_MODE={mode}",
            f"NSYS_STAND_IN_GROUP={'shared' if shared else 'separate'}",
            f"NSYS_STAND_IN_EXPORT_S={export_s}",
        ]
        nsys = self.folder / "bin" / "nsys"
        if not nsys.exists():
            nsys_stand_in.install(nsys.parent)
        target = [sys.executable, "-S", "-c", "import time; time.sleep(600)", f"worker of {report}"]
        output = self.folder / f"{report}.nsys-rep"
        launcher, _ = self.ask("spawn", ["env", *knobs, str(nsys), "profile", "-o", str(output), *target])

        def find() -> int | None:
            for child in psutil.Process(launcher).children(recursive=True):
                if child.cmdline()[1:] == target[1:]:
                    return child.pid
            return None

        worker = wait_for(find, "the worker")
        group, _ = self.ask("getpgid", worker)
        return Profiled(launcher, worker, group, output)


class Profiled:
    def __init__(self, launcher: int, worker: int, group: int, report: Path) -> None:
        self.launcher = launcher
        self.worker = worker
        self.group = group
        self.report = report
        self.tree = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
        self.tree += [one for one in psutil.process_iter(["name", "cmdline"]) if _is_agent(one, report.parent)]

    def whole(self) -> bool:
        return self.report.exists() and self.report.read_bytes().endswith(b" bytes\n")

    def left(self) -> list[str]:
        """Names of the processes of this worker that still run."""
        return [f"{one.pid} {one.name()}" for one in self.tree if alive(one.pid)]


def _is_agent(process: psutil.Process, folder: Path) -> bool:
    words = process.info["cmdline"] or []
    return "--start-agent" in words and any(word.startswith(str(folder)) for word in words)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + GUARD_S
    while time.monotonic() < deadline:
        with suppress(psutil.Error, FileNotFoundError):
            if result := condition():
                return result
        time.sleep(0.02)
    pytest.fail(f"waited {GUARD_S:.0f} s for {what}")


def locked(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flush_window.build(tmp_path_factory.mktemp("profiler_flush"))


@pytest.fixture
def start(tmp_path: Path, library: Path) -> Iterator[Callable[..., Raylet]]:
    """Starts raylets; ends whatever of them is left, and their wardens and workers."""
    started: list[Raylet] = []

    def starter(*, library: Path = library, name: str = "raylet", **limits_ms: int) -> Raylet:
        folder = tmp_path / f"s{len(started)}"
        folder.mkdir()
        started.append(Raylet(folder, library, name=name, **{"timeout": 5000, "cap": 60000, **limits_ms}))
        return started[-1]

    yield starter
    for raylet in started:
        for process in psutil.process_iter(["cmdline"]):
            if any(str(raylet.folder) in word for word in process.info["cmdline"] or []):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        raylet.process.wait(timeout=GUARD_S)


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
def test_the_raylet_leaves_only_when_the_report_is_whole(start: Callable[..., Raylet], shared: bool) -> None:
    raylet = start()
    profiled = raylet.profile(shared=shared)
    assert (profiled.group == profiled.launcher) == shared
    wait_for(lambda: locked(raylet.lock), "the lock")
    assert raylet.lock.read_text().startswith("armed")
    for number in (signal.SIGTERM, 0, signal.SIGKILL):  # what NodeManager::Stop does
        raylet.ask("killpg", profiled.group, number)
    raylet.stop()
    assert profiled.whole()
    assert profiled.left() == []
    assert not raylet.lock.exists()
    assert raylet.wardens() == []
    assert f"waiting for nsys (pid {profiled.launcher})" in raylet.said()
    assert f"nsys (pid {profiled.launcher}) is gone" in raylet.said()


def test_several_workers_end_one_by_one(start: Callable[..., Raylet]) -> None:
    raylet = start()
    first = raylet.profile(report="first", shared=True)
    second = raylet.profile(report="second")
    raylet.ask("killpg", first.group, signal.SIGKILL)
    wait_for(first.whole, "the first report")
    wait_for(lambda: not first.left(), "the first profiler's end")
    assert alive(second.worker) and alive(second.launcher)
    assert len(raylet.wardens()) == 1
    raylet.ask("kill", second.worker, signal.SIGTERM)
    raylet.stop()
    assert second.whole()
    assert second.left() == []


def test_the_launcher_is_not_killed_through_its_pid(start: Callable[..., Raylet]) -> None:
    raylet = start()
    profiled = raylet.profile()
    assert raylet.ask("kill", profiled.launcher, signal.SIGKILL) == (None, 0)
    assert raylet.ask("kill", -profiled.launcher, signal.SIGKILL) == (None, 0)
    assert alive(profiled.launcher)
    raylet.ask("kill", profiled.worker, signal.SIGKILL)
    raylet.stop()
    assert profiled.whole()


def test_the_window_outlives_a_killed_raylet(start: Callable[..., Raylet]) -> None:
    raylet = start()
    profiled = raylet.profile(export_s=2.0)
    raylet.process.kill()
    raylet.process.wait(timeout=GUARD_S)
    os.kill(profiled.worker, signal.SIGKILL)  # Ray's worker does so itself when its raylet is gone
    assert locked(raylet.lock)
    wait_for(lambda: not locked(raylet.lock), "the window's end")
    assert profiled.whole()
    assert profiled.left() == []


def test_a_killed_raylet_and_a_worker_that_stays_are_bounded(start: Callable[..., Raylet]) -> None:
    raylet = start(timeout=1000)
    profiled = raylet.profile()
    raylet.process.kill()
    wait_for(lambda: not profiled.left(), "the end of the whole tree")
    assert "made no progress" in raylet.said()


@pytest.mark.parametrize(
    ("mode", "limits_ms", "reason"),
    [
        ("hang", {"timeout": 1000}, "made no progress for"),
        ("busy", {"timeout": 1000, "cap": 3000}, "the cap"),
        ("for-ever", {"timeout": 1000, "cap": 3000}, "the cap"),
    ],
)
@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
def test_past_its_limit_nothing_is_left(
    start: Callable[..., Raylet], mode: str, limits_ms: dict[str, int], reason: str, shared: bool
) -> None:
    raylet = start(**limits_ms)
    profiled = raylet.profile(mode=mode, shared=shared, export_s=0.2)
    raylet.ask("killpg", profiled.group, signal.SIGKILL)
    raylet.stop()
    assert profiled.left() == []
    assert reason in raylet.said()
    assert "was ended" in raylet.said() and "is gone" not in raylet.said()


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
def test_a_killed_launcher_ends_the_window(start: Callable[..., Raylet], shared: bool) -> None:
    raylet = start()
    profiled = raylet.profile(shared=shared)
    os.kill(profiled.launcher, signal.SIGKILL)
    assert alive(profiled.worker), "only the raylet ends a worker"
    raylet.ask("kill", profiled.worker, signal.SIGKILL)
    raylet.stop()
    assert profiled.left() == []
    assert profiled.whole() != shared, "an agent of its own session still exports"


def test_without_a_profiler_nothing_is_different(start: Callable[..., Raylet]) -> None:
    raylet = start()
    worker, _ = raylet.ask("spawn", [sys.executable, "-S", "-c", "import time; time.sleep(600)", str(raylet.folder)])
    assert raylet.ask("getpgid", worker) == (worker, 0)
    assert raylet.ask("getpgid", 2**22 - 1) == (None, errno.ESRCH)
    assert raylet.ask("killpg", 2**22 - 1, signal.SIGTERM) == (None, errno.ESRCH)
    assert raylet.ask("killpg", worker, 0) == (None, 0)
    assert raylet.ask("killpg", worker, signal.SIGTERM) == (None, 0)
    wait_for(lambda: not alive(worker), "the worker's end")
    assert raylet.wardens() == []
    raylet.stop()
    assert raylet.said() == ""
    assert not raylet.lock.exists()


def test_any_other_process_is_left_alone(start: Callable[..., Raylet]) -> None:
    raylet = start(name="gcs_server")
    profiled = raylet.profile(shared=True)
    raylet.ask("killpg", profiled.group, signal.SIGKILL)
    wait_for(lambda: not alive(profiled.launcher), "the launcher's end")
    raylet.stop()
    assert raylet.said() == ""
    assert not profiled.whole()


def test_without_its_warden_the_raylet_acts_as_stock(
    start: Callable[..., Raylet], library: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone" / library.name
    alone.parent.mkdir()
    shutil.copy(library, alone)
    raylet = start(library=alone)
    profiled = raylet.profile(shared=True)
    raylet.ask("killpg", profiled.group, signal.SIGKILL)
    wait_for(lambda: not alive(profiled.launcher), "the launcher's end")
    raylet.stop()
    assert "no warden (No such file or directory): profilers are not waited for" in raylet.said()


def test_a_killed_warden_leaves_a_stock_raylet(start: Callable[..., Raylet]) -> None:
    raylet = start()
    profiled = raylet.profile(shared=True)
    wait_for(lambda: locked(raylet.lock), "the lock")
    (warden,) = raylet.wardens()
    warden.kill()
    wait_for(lambda: not locked(raylet.lock), "the lock's end")
    raylet.ask("killpg", profiled.group, signal.SIGKILL)
    wait_for(lambda: not alive(profiled.launcher), "the launcher's end")
    raylet.stop()
    assert "no warden (it is gone)" in raylet.said()


def test_a_full_disk_ends_the_window(start: Callable[..., Raylet]) -> None:
    raylet = start(timeout=2000)
    small = raylet.folder / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        profiled = raylet.profile(report="small/r")
        raylet.ask("kill", profiled.worker, signal.SIGKILL)
        raylet.stop()
        assert not profiled.whole()
        assert profiled.left() == []
        assert not raylet.lock.exists()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
