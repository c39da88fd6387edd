"""Progress for people: what is being done, what is being waited for, and for how long.

Rich status lines on a terminal, plain lines elsewhere, nothing but the essentials in CI (``CI`` set) or with ``quiet``.
Everything goes to stderr, so stdout holds only results.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


class Progress:
    """One per command. Text is data: markup in it is escaped."""

    def __init__(self, console: Console | None = None, *, quiet: bool | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._quiet = bool(os.environ.get("CI")) if quiet is None else quiet

    def say(self, line: str) -> None:
        """A line worth keeping (a profile finished, a banner); shown even when quiet."""
        self._console.print(escape(line))

    @contextmanager
    def waiting(self, what: str, *, limit_s: float | None = None) -> Iterator[None]:
        """Show ``what`` with the elapsed time while the block runs, and how long it took after."""
        started = time.monotonic()
        limit = f", at most {limit_s:.0f} s" if limit_s else ""
        if self._console.is_terminal and not self._quiet:
            with self._console.status(escape(f"{what}{limit}")):
                yield
        else:
            if not self._quiet:
                self._console.print(escape(f"{what}{limit} ..."))
            yield
        if not self._quiet:
            self._console.print(escape(f"{what}: {time.monotonic() - started:.1f} s"))
