"""What the results of both experiments have in common: how they begin, how they end, and where they go."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from repro.errors import UsageError

Verdict = Literal["reproduced", "not reproduced", "inconclusive"]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class ExperimentResult(Model):
    """An experiment's JSON file; it begins with when, where and with what it was made."""

    schema_: str = Field(alias="schema")
    created_utc: str
    kit_version: str
    revision: str | None
    versions: dict[str, str]
    machine: dict[str, Any]
    verdict: Verdict = "inconclusive"
    reason: str = "not finished"

    @property
    def exit_status(self) -> int:
        """0 if the bug and its fix were reproduced, else 1."""
        return 0 if self.verdict == "reproduced" else 1


def result_folder(out: Path | None, experiment: str) -> Path:
    """``out``, or one below ``results/`` named by the experiment and the time. ``UsageError`` if it holds a result."""
    out = out or Path("results") / f"{experiment}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    if (out / f"{experiment.replace('-', '_')}.json").exists():
        raise UsageError(f"{out} holds a result already.", remedy="Name another folder with --out.")
    return out
