"""The nsight-command experiment on real Ray, with the stand-in; nothing it starts is left over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from own_processes import marked

from repro.progress import Progress
from repro.ray_bugs import nsight_command
from repro.ray_bugs.nsight_command import SCHEMA, Result
from repro.results import read_json

pytestmark = pytest.mark.timeout(600)


def test_stock_loses_the_command_and_the_fix_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsight_command, "ACTOR_LIMIT_S", 30.0)
    result, out = nsight_command.run("stand-in", tmp_path / "out", Progress(quiet=True))
    assert [record.error for record in result.cases] == [None] * 6
    assert {(record.case, record.arm): record.outcome for record in result.cases} == {
        ("no python on PATH", "stock"): "never started",
        ("no python on PATH", "fixed"): "started",
        ("py_executable with arguments", "stock"): "wrong command",
        ("py_executable with arguments", "fixed"): "started",
        ("venv path with a space", "stock"): "never started",
        ("venv path with a space", "fixed"): "started",
    }
    assert result.exit_status == 0
    reason = result.cases[0].reason or ""
    assert "no worker after 30 s" in reason
    assert "nsys stand-in: python: No such file or directory" in reason
    assert (result.cases[0].command or "").endswith(" python")
    assert read_json(out / "nsight_command.json", Result, SCHEMA) == result
    assert "STAND-IN" in (out / "nsight_command.md").read_text()
    assert not [process.cmdline() for process in marked(f"{os.getpid()}:")]
