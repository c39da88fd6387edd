"""Progress on a terminal, in a file, in CI."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from repro.progress import Console as PipeConsole
from repro.progress import Progress


def _progress(*, terminal: bool, quiet: bool | None = False) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(Console(file=out, force_terminal=terminal, width=60, highlight=False), quiet=quiet), out


def test_plain_lines_where_there_is_no_terminal() -> None:
    progress, out = _progress(terminal=False)
    with progress.waiting("Exporting", limit_s=30), progress.waiting("inner"):
        pass
    text = re.sub(r"\d+\.\d s", "N s", out.getvalue())
    assert text == "Exporting (at most 30 s) ...\ninner ...\ninner: N s\nExporting: N s\n"


def test_live_lines_with_elapsed_time_on_a_terminal() -> None:
    progress, out = _progress(terminal=True)
    with progress.waiting("outer"):
        with progress.waiting("inner"):
            progress.say("kept")
    with progress.waiting("again"):
        pass
    text = out.getvalue()
    assert "0:00:00" in text
    assert "kept\n" in text
    assert re.search(r"inner: \d\.\d s\n", text)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor is shown again"


def test_a_failure_ends_the_live_line_and_claims_no_duration() -> None:
    progress, out = _progress(terminal=True)
    with pytest.raises(KeyboardInterrupt), progress.waiting("work"):
        raise KeyboardInterrupt
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")
    assert "work: " not in out.getvalue()


def test_ci_sees_only_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    progress, out = _progress(terminal=False, quiet=None)
    with progress.waiting("work"):
        progress.say("banner")
    assert out.getvalue() == "banner\n"


def test_text_is_data() -> None:
    progress, out = _progress(terminal=False)
    progress.say("[bold]x[/] \x1b[31m\nnext " + "long " * 20)
    assert out.getvalue() == "[bold]x[/] �[31m next " + "long " * 20 + "\n"


def test_a_pipe_that_nobody_reads_raises_as_a_file_does() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Progress(PipeConsole(file=Closed()), quiet=False).say("line")
