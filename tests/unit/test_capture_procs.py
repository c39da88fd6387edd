"""Processes are ended with everything they started, wherever it moved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from repro import procs

SLEEP = "import time; time.sleep(600)"


def wait_for(file: Path) -> str:
    deadline = time.monotonic() + 30
    while not (file.exists() and (text := file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return text


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays behind here sleeps for minutes."""
    monkeypatch.setattr(procs, "AFTER_ROOT_S", 0.1)


def test_ends_grandchildren_that_left_the_session_and_lost_their_parent(tmp_path: Path) -> None:
    # The middle process starts one in a session of its own and exits, so it is re-parented.
    middle = (
        "import subprocess,sys;"
        f"child=subprocess.Popen([sys.executable,'-c',{SLEEP!r}],start_new_session=True);"
        f"open({str(tmp_path / 'pid')!r},'w').write(str(child.pid))"
    )
    root = f"import subprocess,sys;subprocess.run([sys.executable,'-c',{middle!r}]);{SLEEP}"
    tree = procs.ProcessTree([sys.executable, "-c", root])
    child = int(wait_for(tmp_path / "pid"))
    assert {tree.root.pid, child} <= {process.pid for process in tree.members()}
    killed = tree.end(grace_s=0.5)
    assert gone(child)
    assert gone(tree.root.pid)
    assert any("time.sleep(600)" in command for command in killed)


def test_a_member_without_the_mark_is_found_by_its_session(tmp_path: Path) -> None:
    # As Ray's agents, whose process title overwrites their environment.
    root = (
        f"import subprocess,sys;child=subprocess.Popen([sys.executable,'-c',{SLEEP!r}],env={{}});"
        f"open({str(tmp_path / 'pid')!r},'w').write(str(child.pid));{SLEEP}"
    )
    with procs.running([sys.executable, "-c", root], grace_s=0.1):
        child = int(wait_for(tmp_path / "pid"))
    assert gone(child)


def test_a_root_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = f"import signal;signal.signal(15,signal.SIG_IGN);open({str(tmp_path / 'up')!r},'w').write('1');{SLEEP}"
    tree = procs.ProcessTree([sys.executable, "-c", stubborn])
    wait_for(tmp_path / "up")
    assert len(tree.end(grace_s=0.1)) == 1
    assert gone(tree.root.pid)


def test_foreign_processes_are_left_alone() -> None:
    other = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    try:
        with procs.running([sys.executable, "-c", SLEEP], grace_s=0.1) as tree:
            assert other.pid not in {process.pid for process in tree.members()}
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_tree_is_ended_when_the_block_raises() -> None:
    with pytest.raises(RuntimeError), procs.running([sys.executable, "-c", SLEEP], grace_s=0.1) as tree:
        raise RuntimeError
    assert tree.root.poll() is not None


def test_sigterm_becomes_an_interrupt_and_the_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), procs.terminate_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_during_the_end_waits_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = procs.ProcessTree([sys.executable, "-c", SLEEP])
    wait = tree._wait_until_gone

    def interrupted_wait(limit_s: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wait(limit_s)

    monkeypatch.setattr(tree, "_wait_until_gone", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        tree.end(grace_s=1.0)
    assert tree.root.poll() is not None


def test_leftovers_are_those_whose_kit_is_gone(tmp_path: Path) -> None:
    kit = (
        "import sys;from repro.procs import ProcessTree;"
        f"tree=ProcessTree([sys.executable,'-c',{SLEEP!r}]);"
        f"open({str(tmp_path / 'pid')!r},'w').write(str(tree.root.pid))"
    )
    subprocess.run([sys.executable, "-c", kit], check=True, cwd=Path(__file__).parents[2])
    orphan = psutil.Process(int(wait_for(tmp_path / "pid")))
    try:
        with procs.running([sys.executable, "-c", SLEEP], grace_s=0.1) as mine:
            left = {process.pid for process in procs.leftovers()}
            assert orphan.pid in left
            assert mine.root.pid not in left
    finally:
        orphan.kill()
