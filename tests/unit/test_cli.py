"""What a user can get wrong on the command line, and what the program then says and returns."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from report_models import full_run, run_record, write_run

from repro import cli, commandline
from repro.cli import COMMANDS, main
from repro.commandline import Shown
from repro.errors import InputError, MachineError, NoGpuActivityError, NotReproducedError, UsageError
from repro.report import figures

PATHS = [
    [name] if not isinstance(command, Mapping) else [name, sub]
    for name, command in COMMANDS.items()
    for sub in (command if isinstance(command, Mapping) else [""])
]
seen: dict[str, Any] = {}


def example(
    file: Annotated[Path, Shown("FILE")],
    *,
    out: Annotated[Path | None, Shown("DIR")] = None,
    repeats: int = 3,
    prep_ms: float = 1.5,
    device: Literal["auto", "cuda"] = "auto",
    fresh: bool = False,
) -> int:
    """Do the example.

    With a longer text.

    Args:
        file: What to read.
        out: Where to write, a folder whose
            description takes two lines.
        repeats: How often.
        device: On what.
        fresh: From the start.
    """
    seen.update(file=file, out=out, repeats=repeats, prep_ms=prep_ms, device=device, fresh=fresh)
    return 7


def _run(*arguments: str) -> int:
    seen.clear()
    commands = {"example": example, "group": {"one": example}}
    return commandline.run(list(arguments), commands, about="About.", closing="Closing.")


def _error(*arguments: str) -> str:
    with pytest.raises(UsageError) as caught:
        _run(*arguments)
    assert not seen, "a command with wrong arguments must not run"
    return str(caught.value)


def test_values_have_the_declared_type_and_defaults_stay() -> None:
    assert _run("example", "1e5", "--out=123", "--repeats", "4", "--prep_ms=2", "--fresh") == 7
    assert seen == {
        "file": Path("1e5"),
        "out": Path("123"),
        "repeats": 4,
        "prep_ms": 2.0,
        "device": "auto",
        "fresh": True,
    }
    _run("example", "x", "--fresh=false")
    assert seen == {"file": Path("x"), "out": None, "repeats": 3, "prep_ms": 1.5, "device": "auto", "fresh": False}


@pytest.mark.parametrize("value", ["None", "True", "[1,2]", "{}", "a b", "a=b", "'quoted'", "-", "--", "é", "x\ny"])
def test_text_is_not_typed_again(value: str) -> None:
    _run("group", "one", f"--file={value}")
    assert seen["file"] == Path(value)


def test_usage_errors_are_one_line_and_name_the_nearest() -> None:
    assert _error("exampl") == "There is no command 'exampl'. Did you mean example?"
    assert _error("--fresh") == "There is no flag '--fresh'. See python -m repro --help."
    assert _error("group", "on") == "group has no command 'on'. Did you mean one?"
    assert _error("example", "x", "--repeat=1") == "example has no flag --repeat. Did you mean --repeats?"
    assert _error("example", "x", "--zzz").startswith("example has no flag --zzz. See python -m repro example --help.")
    assert _error("example", "x", "y").startswith("example does not take the argument 'y'.")
    assert _error("example").startswith("example needs FILE.")
    assert _error("example", "x", "--out").startswith("--out needs a value (--out=DIR).")
    assert _error("example", "x", "--out=").startswith("--out needs a value (--out=DIR).")
    assert _error("example", "x", "--out", "--fresh").startswith("--out needs a value (--out=DIR).")
    assert _error("example", "x", "--out=a", "--out=b") == "--out is given twice."
    assert _error("example", "x", "--device=cud") == "--device=cud: should be 'auto' or 'cuda'. Did you mean cuda?"
    assert _error("example", "x", "--repeats=1.5").startswith("--repeats=1.5: should be a valid integer")
    assert _error("example", "x", "--fresh=perhaps").startswith("--fresh=perhaps: should be a valid boolean")
    assert _error("example", "x", "--\x1b[31m\n").startswith("example has no flag --�[31m .")


@pytest.mark.parametrize("flag", ["--trace", "--interactive", "--completion", "--verbose", "--separator=x", "-i"])
def test_fires_own_flags_are_no_flags_of_ours(flag: str) -> None:
    assert "has no flag" in _error("example", "x", flag)
    assert "has no flag" in _error("example", "x", "--", flag)


def test_members_of_results_are_no_commands() -> None:
    assert "does not take the argument" in _error("example", "x", "bit_length")
    assert "does not take the argument" in _error("example", "x", "-", "real")


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("example", "--help") == 0
    assert not seen
    assert (
        capsys.readouterr().out
        == """\
Usage: python -m repro example FILE [--out=DIR] [--repeats=N] [--prep-ms=X] [--device=auto|cuda]
         [--fresh]

Do the example.

With a longer text.

Arguments:
  FILE                What to read.
  --out=DIR           Where to write, a folder whose description takes two lines.
  --repeats=N         How often. (default: 3)
  --prep-ms=X         (default: 1.5)
  --device=auto|cuda  On what. (default: auto)
  --fresh             From the start.
"""
    )


def test_help_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        assert _run(*arguments) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert "  example  Do the example\n  group    one\n" in texts[0]
    assert _run("group") == 0
    assert "  one  Do the example\n" in capsys.readouterr().out


@pytest.mark.parametrize("path", [[], ["example"], ["group"], ["group", "one"]], ids=" ".join)
def test_help_is_a_command_too(path: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*path, "--help") == 0
    text = capsys.readouterr().out
    assert _run("help", *path) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_command_documents_every_flag(path: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = [part for part in path if part]
    assert main([*path, "--help"]) == 0
    captured = capsys.readouterr()
    assert not captured.err
    assert captured.out.startswith(f"Usage: python -m repro {' '.join(path)}")
    assert max(map(len, captured.out.splitlines())) <= 120
    command: Any = COMMANDS[path[0]]
    command = command[path[1]] if len(path) > 1 else command
    for parameter in commandline._parameters(command).values():
        assert parameter.text, f"{parameter.flag} has no text in the docstring of {path}"


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_command_refuses_unknown_flags(path: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*filter(None, path), "--no-such-flag=1"]) == 2
    assert _one_error_line(capsys).endswith("--help.")


def _one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err.strip()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotReproducedError("It did not."), 1),
        (UsageError("Wrong flag."), 2),
        (InputError("Bad\nfile \x1b[0m."), 2),
        (MachineError("No GPU.", remedy="Get one."), 3),
        (NoGpuActivityError("No kernels."), 4),
    ],
)
def test_kit_errors_are_one_line_with_their_status(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        """Fail."""
        raise error

    monkeypatch.setattr(cli, "COMMANDS", {"fail": fail})
    assert main(["fail"]) == status
    assert "\x1b" not in _one_error_line(capsys)


def test_interrupt_is_130_and_a_bug_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        """Be interrupted."""
        raise KeyboardInterrupt

    def bug() -> int:
        """Have a bug."""
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "COMMANDS", {"interrupted": interrupted, "bug": bug})
    assert main(["interrupted"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(ZeroDivisionError):
        main(["bug"])


def test_sigterm_ends_a_command_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped() -> int:
        """Be stopped."""
        signal.raise_signal(signal.SIGTERM)
        return 0

    monkeypatch.setattr(cli, "COMMANDS", {"stopped": stopped})
    assert main(["stopped"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["reproduce", "--profiles=inlin"],
        ["reproduce", "--profiles=inline,inline"],
        ["reproduce", "--profiles=,"],
        ["reproduce", "--profiles", "inline", "split"],
        ["reproduce", "--device=tpu"],
        ["reproduce", "--device=emulated", "--repeats=0"],
        ["reproduce", "--device=emulated", "--blocks=-1"],
        ["reproduce", "--device=emulated", "--prep-ms=nan"],
        ["reproduce", "--payload=0"],
        ["reproduce", "--device=emulated", "--payload=2049"],
        ["reproduce", "--device=emulated", "--cols=999999999"],
        ["reproduce", "--payload=half"],
        ["reproduce", "--device=emulated", "--profiler=torch"],
        ["analyze", "no-such-file.sqlite"],
        ["analyze", "x.sqlite", "--format=xml"],
        ["analyze", "x.sqlite", "--device-id=one"],
        ["report", "no-such-run"],
        ["report", "a", "b"],
        ["profiles", "inline"],
    ],
    ids=" ".join,
)
def test_wrong_usage_of_the_kits_commands_is_status_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    _one_error_line(capsys)
    assert not list(tmp_path.rglob("*")), "nothing may be left behind"


def test_profiles_lists_the_published_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles"]) == 0
    out = capsys.readouterr().out
    for text in ("overlap", "24.7%", "830.3", "copy_ms −82%", "pinned-staging"):
        assert text in out


def test_report_prints_tables_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "draw", lambda model: [])
    run_dir = full_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith(f"Report: {run_dir.report}\n")
    assert "EMULATED NVIDIA B200" in captured.out
    assert not captured.err


def test_markup_in_names_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = run_record(notes=[], captures=[])
    record.device.name = "[bold red]\x1b[31mGPU[/]"
    write_run(tmp_path, record, {})
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "[bold red]�[31mGPU[/]" in out
    assert "\x1b" not in out


def _python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options)


def test_help_imports_neither_ray_nor_matplotlib() -> None:
    heavy = "('ray', 'matplotlib', 'duckdb', 'pyarrow', 'docker', 'torch', 'numpy')"
    program = (
        f"import sys; from repro.cli import main; main(['--help']); print([m for m in {heavy} if m in sys.modules])"
    )
    assert _python("-c", program).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("--help | true", 141, ""),  # a pipe whose reader has ended before anything is written
        ("--help >/dev/full", 3, "error: Output: No space left on device.\n"),
        ("none 1>&- 2>/dev/full", 2, ""),
    ],
)
def test_output_that_goes_nowhere(command: str, status: int, said: str) -> None:
    words, pipe, reader = command.partition(" | ")
    shell = f"(sleep 0.05; exec {sys.executable} -m repro {words}) {pipe}{reader}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.parametrize(
    "arguments", [["analyze"], ["report"], ["reproduce", "--device=emulated", "--out"]], ids=lambda words: words[0]
)
def test_a_name_that_no_file_can_have(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "a" * 300]) == 2
    assert _one_error_line(capsys).endswith("File name too long.")


def test_what_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(number: int) -> Callable[[], int]:
        def command() -> int:
            raise OSError(number, os.strerror(number), "results/run")

        return command

    for number, status in ((errno.ENOSPC, 3), (errno.EACCES, 3), (errno.EROFS, 3), (errno.ELOOP, 2)):
        monkeypatch.setattr(cli, "COMMANDS", {"fail": fails(number)})
        assert main(["fail"]) == status
        assert _one_error_line(capsys) == f"error: results/run: {os.strerror(number)}."
    monkeypatch.setattr(cli, "COMMANDS", {"fail": fails(errno.ENOENT)})
    with pytest.raises(FileNotFoundError):  # may be a bug, and keeps its traceback
        main(["fail"])


def test_output_that_the_terminal_cannot_encode() -> None:
    done = _python("-m", "repro", "profiles", env={"PYTHONIOENCODING": "ascii", "PATH": ""})
    assert done.returncode == 0, done.stderr
    assert "59.0%" in done.stdout
