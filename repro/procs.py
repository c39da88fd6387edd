"""Processes the kit starts, and how it makes sure that none of them outlives it.

A ``ProcessTree`` is a process with everything it started. Its members are found again by two marks that survive
re-parenting: the session (the root gets one of its own) and a token in the environment (for members that
open sessions of their own, as nsys agents do). Processes are ended one by one, by pid; nothing is ever
looked for by name.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil

OWNER_VARIABLE = "REPRO_OWNER"
"""Environment variable of every process the kit starts: ``<pid of the kit>:<token>``, one pair a nesting level."""

AFTER_ROOT_S = 1.0
"""What is left of a tree this long after its root ended will not end by itself."""

_POLL_S = 0.02


class ProcessTree:
    """A started process, its children, and their children, however they were re-parented since.

    ``argv`` runs in a session of its own, so a terminal's Ctrl-C reaches the kit and not its children.
    ``options`` go to ``subprocess.Popen``. End it with ``end``, or use ``running``, which always does.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> None:
        self._mark = f"{os.getpid()}:{secrets.token_hex(8)}"
        environment = dict(os.environ if env is None else env)
        environment[OWNER_VARIABLE] = " ".join(filter(None, [environment.get(OWNER_VARIABLE), self._mark]))
        self.root = subprocess.Popen(argv, env=environment, start_new_session=True, **options)

    def members(self) -> list[psutil.Process]:
        """Every living process of the tree (zombies are not living)."""
        return [process for process in psutil.process_iter() if self._is_member(process) and _alive(process)]

    def end(self, *, grace_s: float = 10.0) -> list[str]:
        """End the tree: SIGTERM to the root, at most ``grace_s`` for it to take the others along, SIGKILL to the rest.

        Returns the command lines of those that had to be killed. Interrupts are held back until it is done.
        """
        with _interrupts_held():
            if self.root.poll() is None:
                self.root.terminate()
            self._wait_until_gone(grace_s)
            killed = []
            deadline = time.monotonic() + 5.0
            # A member can fork between the look and the kill, so look again until nobody is left.
            while (rest := self.members()) and time.monotonic() < deadline:
                for process in rest:
                    try:
                        killed.append(" ".join(filter(None, process.cmdline())) or process.name())
                        process.kill()
                    except psutil.NoSuchProcess:
                        continue
                _wait_for_end(rest, limit_s=1.0)
            self.root.wait(timeout=5.0)
        return killed

    def _wait_until_gone(self, limit_s: float) -> None:
        """Wait for the root to end, and ``AFTER_ROOT_S`` more for those it leaves."""
        deadline = time.monotonic() + limit_s
        try:
            self.root.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return
        deadline = min(deadline, time.monotonic() + AFTER_ROOT_S)
        while self.members() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _is_member(self, process: psutil.Process) -> bool:
        try:
            if os.getsid(process.pid) == self.root.pid:
                return True
            return self._mark in process.environ().get(OWNER_VARIABLE, "").split(" ")
        except (OSError, psutil.Error):
            return False  # ended meanwhile, or another user's


@contextmanager
def running(
    argv: Sequence[str], *, grace_s: float = 10.0, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[ProcessTree]:
    """A ``ProcessTree`` that is ended when the block is left, however it is left."""
    tree = ProcessTree(argv, env=env, **options)
    try:
        yield tree
    finally:
        tree.end(grace_s=grace_s)


def leftovers() -> list[psutil.Process]:
    """Living processes that a kit started which is gone: an earlier run was killed outright."""
    left = []
    for process in psutil.process_iter():
        try:
            marks = process.environ().get(OWNER_VARIABLE, "").split()
        except (OSError, psutil.Error):
            continue
        owners = [int(mark.partition(":")[0]) for mark in marks if mark.partition(":")[0].isdigit()]
        if owners and not any(psutil.pid_exists(owner) for owner in owners) and _alive(process):
            left.append(process)
    return left


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM raises ``KeyboardInterrupt`` inside the block, so both signals take the same way out.

    Does nothing outside the main thread, where Python takes no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """SIGINT and SIGTERM wait until the block is done; the first of them is delivered then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {
        number: signal.signal(number, lambda number, frame: held.append((number, frame)))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0][0])


def _wait_for_end(processes: Sequence[psutil.Process], *, limit_s: float) -> None:
    """Wait until all have ended; ``psutil.wait_procs`` would also wait for a slow init to reap the re-parented ones."""
    deadline = time.monotonic() + limit_s
    while any(_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
