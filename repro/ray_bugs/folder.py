"""Where an experiment puts its result."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from repro.errors import UsageError


def result_folder(out: Path | None, experiment: str) -> Path:
    """``out``, or one below ``results/`` named by the experiment and the time. ``UsageError`` if it holds a result."""
    out = out or Path("results") / f"{experiment}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    if (out / f"{experiment.replace('-', '_')}.json").exists():
        raise UsageError(f"{out} holds a result already.", remedy="Name another folder with --out.")
    return out
