"""Progress for people: what is being done, what is being waited for, and for how long.

Live lines with the elapsed time on a terminal, plain lines elsewhere, nothing but the essentials in CI (``CI`` set) or
with ``quiet``. Everything goes to stderr, so stdout holds only results.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import console as rich_console
from rich import progress
from rich.markup import escape

from repro.text import one_line


class Console(rich_console.Console):
    """A terminal or a pipe; a pipe that nobody reads any more raises ``BrokenPipeError`` as every file does."""

    def on_broken_pipe(self) -> None:  # rich itself would end the process with status 1
        raise


class Progress:
    """One per command. Text is data: markup and control characters in it are made harmless. Waits may nest."""

    def __init__(self, console: rich_console.Console | None = None, *, quiet: bool | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._quiet = bool(os.environ.get("CI")) if quiet is None else quiet
        self._live = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )

    def say(self, line: str) -> None:
        """A line worth keeping (a profile finished, a banner); shown even when quiet."""
        self._console.print(escape(one_line(line)), soft_wrap=True)

    @contextmanager
    def waiting(self, what: str, *, limit_s: float | None = None) -> Iterator[None]:
        """Show ``what`` with the elapsed time while the block runs, and how long it took after.

        ``limit_s`` is only shown: the block itself keeps it.
        """
        if self._quiet:
            yield
            return
        started = time.monotonic()
        limit = f" (at most {limit_s:.0f} s)" if limit_s else ""
        if self._console.is_terminal:
            with self._line(f"{what}{limit}"):
                yield
        else:
            self.say(f"{what}{limit} ...")
            yield
        self.say(f"{what}: {time.monotonic() - started:.1f} s")

    @contextmanager
    def _line(self, what: str) -> Iterator[None]:
        task = self._live.add_task(escape(one_line(what)), total=None)
        self._live.start()
        try:
            yield
        finally:
            self._live.remove_task(task)
            if not self._live.tasks:
                self._live.stop()
