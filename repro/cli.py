"""The kit's commands (Fire): check arguments, call one room, print, set the exit status."""

from __future__ import annotations


def main() -> int:
    """Entry point of ``python -m repro``; returns the exit status."""
    raise NotImplementedError
