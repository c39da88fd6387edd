"""NVTX ranges for whichever profiler listens in this process; without one they do nothing and import nothing.

All are of one domain. The window is a start/end range of the whole process, which nsys can start its collection at
(``--capture-range=nvtx``); it is never ended, so a profile runs on to the end of the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

DOMAIN: Final = "repro"
WINDOW: Final = "window"
INJECTION_VARIABLE: Final = "NVTX_INJECTION64_PATH"
"""Set by profilers in the processes they start: the library that NVTX loads."""


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """A range of this thread around the block."""
    if INJECTION_VARIABLE not in os.environ:
        yield
        return
    import nvtx

    nvtx.push_range(name, domain=DOMAIN)
    try:
        yield
    finally:
        nvtx.pop_range(domain=DOMAIN)


def open_window() -> None:
    """Start the range that a profiler's collection starts at; returns when it has started (0.1 s with nsys 2023.4)."""
    if INJECTION_VARIABLE in os.environ:
        import nvtx

        nvtx.start_range(WINDOW, domain=DOMAIN)
