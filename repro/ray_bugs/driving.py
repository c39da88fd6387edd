"""A Ray driver as a process of its own that says its phases as JSON lines: start it, follow it, end all it started."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from repro.errors import MachineError, WaitTimeoutError
from repro.procs import ProcessTree
from repro.text import one_line

Event = dict[str, Any]
"""A line of a driver: ``phase``, ``at_s`` (monotonic) and facts of the phase that begins there."""

EXIT_LIMIT_S: Final = 60.0
_POLL_S: Final = 0.05


def read_events(output: str) -> dict[str, Event]:
    """A driver's lines by phase, in their order; a line that is still being written is left out."""
    lines = [line for line in output.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n")]
    return {event["phase"]: event for event in map(json.loads, lines)}


class Driver:
    """A running driver: ``tree`` is it and everything it started."""

    def __init__(self, tree: ProcessTree, output: Path, log: Path) -> None:
        self.tree = tree
        self._output = output
        self._log = log

    def follow(
        self, limits_s: Mapping[str, float], on_phase: Callable[[str, dict[str, Event]], None] = lambda *_: None
    ) -> dict[str, Event]:
        """Wait for its end and return its events by phase.

        ``limits_s`` bounds each phase (others: ``EXIT_LIMIT_S``); the first is called "starting the driver".
        ``on_phase(phase, events)`` may raise. ``WaitTimeoutError`` names the phase that took too long,
        ``MachineError`` the one at which the driver failed, with the last line of its log.
        """
        phase, since = "starting the driver", time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                self.tree.root.wait(timeout=_POLL_S)
            ended = self.tree.root.poll() is not None
            events = read_events(self._output.read_text(encoding="utf-8", errors="replace"))
            last = next(reversed(events), phase)
            if last != phase:
                phase, since = last, time.monotonic()
                on_phase(phase, events)
            if ended:
                break
            limit = limits_s.get(phase, EXIT_LIMIT_S)
            if time.monotonic() - since > limit:
                raise WaitTimeoutError(f"the driver was at {phase!r} for more than {limit:.0f} s ({self._log})")
        if self.tree.root.returncode:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = one_line(lines[-1]) if lines else "it said nothing"
            raise MachineError(
                f"the driver ended with status {self.tree.root.returncode} at {phase!r}: {said} ({self._log})"
            )
        return events


@contextmanager
def driver(
    program: Path,
    config: Mapping[str, Any],
    environment: Mapping[str, str],
    output: Path,
    log: Path,
    *,
    killed: list[str],
    python: str = sys.executable,
) -> Iterator[Driver]:
    """Run ``program`` with ``config`` as JSON; what is left of it and its processes at the end of the block is ended.

    Its events go to ``output``, its errors to ``log``; ``killed`` gets the command lines of what had to be killed.
    """
    with output.open("wb") as out, log.open("wb") as errors:
        tree = ProcessTree(
            [python, str(program), json.dumps(config)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
        )
    try:
        yield Driver(tree, output, log)
    finally:
        left = tree.end(grace_s=5.0 if tree.root.poll() is None else 0.0)
        killed += [one_line(command)[:200] for command in left]
