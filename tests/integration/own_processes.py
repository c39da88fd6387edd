"""Processes that a test started, found by the mark in their environment, and none of anybody else's."""

from __future__ import annotations

import psutil

from repro.procs import OWNER_VARIABLE


def marked(prefix: str) -> list[psutil.Process]:
    """Living processes with a mark that begins with ``prefix``."""
    found = []
    for process in psutil.process_iter():
        try:
            marks = process.environ().get(OWNER_VARIABLE, "").split()
            if any(mark.startswith(prefix) for mark in marks) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or another user's
    return found
