"""nsys around a capture, with programs that stand in for it: options, export, choice of the report."""

from __future__ import annotations

import shlex
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from repro.analysis import analyze
from repro.capture import nsys
from repro.capture.nsys import (
    Exported,
    Nsys,
    choose_report,
    export,
    export_problem,
    inspect,
    nsight_options,
    report_version,
    sqlite_of,
)
from repro.errors import InputError, KitError, MachineError, NoGpuActivityError, WaitTimeoutError
from repro.nsysdb import schema
from repro.nsysdb.model import Capture, Kernel, NvtxRange
from repro.nsysdb.writer import write_profile

HEADER = b"NVIDIA Tegra Profiler Report %s-234433681190v0.\n\x0b\x0cLocal (CLI)"

EVENTS = """\
{"Type":48,"NvtxEvent":{"Text":"batch 1"}}
{"Type":49,"DiagnosticEvent":{"Timestamp":{"Time":"-5","NsTime":true},"Level":"Info","Text":"Profiling has started."}}
{"Type":49,"DiagnosticEvent":{"Timestamp":{"Time":"7"},"Level":"Warning","Text":"No CUDA events collected."}}
"""


def stand_in(folder: Path, program: str, version: str = "2023.4.4") -> Nsys:
    """An nsys that runs ``program``, in which ``kind`` and ``output`` are those of the export asked for."""
    script = folder / "nsys.py"
    header = """\
import pathlib, sqlite3, sys
options = dict(word.lstrip("-").split("=", 1) for word in sys.argv if word.startswith("--"))
kind, output = options["type"], pathlib.Path(options["output"])
"""
    script.write_text(header + program)
    return Nsys("real", f"NVIDIA Nsight Systems version {version}.54-234433681190v0", (sys.executable, str(script)))


def report(folder: Path, version: bytes = b"2023@4@4@54", name: str = "split.7.nsys-rep") -> Path:
    path = folder / name
    path.write_bytes(HEADER % version)
    return path


def copying(source: Path, text: str = EVENTS) -> str:
    return f"output.write_bytes(pathlib.Path({str(source)!r}).read_bytes() if kind == 'sqlite' else {text.encode()!r})"


def database(path: Path, *, kernels: int = 0, window: bool = True, device: int = 0) -> Path:
    capture = Capture(device_id=device, device_name="H200")
    capture.kernels = [Kernel(10 * i + 10, 10 * i + 15, 7, i + 1, 7, "sgemm") for i in range(kernels)]
    capture.nvtx = [NvtxRange(0, 100, 7, 7, "window")] if window else []
    write_profile(path, capture)
    return path


def without_diagnostics(path: Path) -> Path:
    """Like the export of 2023.4 of a process without CUDA: no activity tables, no DIAGNOSTIC_EVENT."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"CREATE TABLE StringIds {STRINGS}")
        db.execute(schema.create_table("NVTX_EVENTS"))
    return path


STRINGS = "(id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)"


def test_options_are_those_of_the_command_line() -> None:
    words = " ".join(
        f"--{name}={value}" if len(name) > 1 else f"-{name} {value}" for name, value in nsight_options("a").items()
    )
    assert words == (
        "-t cuda,nvtx --sample=none --cpuctxsw=none --capture-range=nvtx --nvtx-capture=window@repro "
        "--capture-range-end=none --stop-on-exit=true -o a.%p"
    )
    assert all(shlex.quote(value) == value or "@" in value or "%" in value for value in nsight_options("a").values())


@pytest.mark.parametrize(
    ("header", "version"),
    [(b"2023@4@4@54", (2023, 4, 4)), (b"2026.1.3.425", (2026, 1, 3)), (b"soon", None)],
)
def test_a_report_says_which_nsys_wrote_it(tmp_path: Path, header: bytes, version: tuple[int, ...] | None) -> None:
    assert report_version(report(tmp_path, header)) == version


def test_an_export_without_kernels_gets_the_diagnostics(tmp_path: Path) -> None:
    source = without_diagnostics(tmp_path / "source")
    out = tmp_path / "out" / "split.sqlite"
    export(stand_in(tmp_path, copying(source)), report(tmp_path), out)
    assert [path.name for path in out.parent.iterdir()] == ["split.sqlite"]
    with pytest.raises(NoGpuActivityError, match=r"said: 'No CUDA events collected\.'") as caught:
        analyze(out, with_nsys_ai=False)
    assert "has started" not in caught.value.message


def test_an_export_with_kernels_is_kept_byte_for_byte(tmp_path: Path) -> None:
    source = database(tmp_path / "source", kernels=2)
    out = tmp_path / "split.sqlite"
    export(stand_in(tmp_path, copying(source)), report(tmp_path), out)
    assert out.read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ('output.write_bytes(b"half"); sys.exit("Importer error")', "ended with status 1: Importer error"),
        ('print("left a file"); sqlite3.connect(output).execute("create table a(b)"); sys.exit(1)', "status 1"),
        ('output.write_bytes(b"x" * 5000)', "left no readable database"),
        ('output.write_bytes(b"")', "without tables"),
    ],
    ids=["partial", "a database beside status 1", "garbage", "empty"],
)
def test_an_export_that_fails_leaves_nothing(tmp_path: Path, program: str, message: str) -> None:
    out = tmp_path / "out" / "split.sqlite"
    nsys = stand_in(tmp_path, program)
    with pytest.raises(InputError, match=message):
        export(nsys, report(tmp_path), out)
    assert not list(out.parent.iterdir())
    assert message in (export_problem(nsys, report(tmp_path)) or "")


def test_an_export_without_a_problem(tmp_path: Path) -> None:
    source = without_diagnostics(tmp_path / "source")
    assert export_problem(stand_in(tmp_path, copying(source)), report(tmp_path)) is None


def test_an_export_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "EXPORT_LIMIT_S", 0.2)
    with pytest.raises(WaitTimeoutError, match="for nsys export of"):
        export(stand_in(tmp_path, "import time; time.sleep(60)"), report(tmp_path), tmp_path / "out.sqlite")


def test_a_report_of_a_newer_nsys_is_refused_before_the_export(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"by nsys 2026\.1\.3, and .* is 2023\.4\.4") as caught:
        export(stand_in(tmp_path, "raise SystemExit('ran')"), report(tmp_path, b"2026@1@3@9"), tmp_path / "out.sqlite")
    assert "2026.1.3 or newer" in caught.value.remedy


def test_an_empty_report(tmp_path: Path) -> None:
    (tmp_path / "a.nsys-rep").touch()
    with pytest.raises(InputError, match="is empty"):
        export(stand_in(tmp_path, ""), tmp_path / "a.nsys-rep", tmp_path / "out.sqlite")


def test_analysing_a_report_exports_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = stand_in(tmp_path, copying(database(tmp_path / "source", kernels=3)))
    monkeypatch.setattr(nsys, "find_nsys", lambda: tool)
    for name in ("a.nsys-rep", "b.qdrep"):
        with sqlite_of(report(tmp_path, name=name)) as exported:
            assert analyze(exported, with_nsys_ai=False).kernels == 3
            assert exported.stem == name[0]
        assert not exported.exists()
    with sqlite_of(tmp_path / "source") as same:
        assert same == tmp_path / "source"
    with pytest.raises(InputError, match="does not exist"), sqlite_of(tmp_path / "none.nsys-rep"):
        pass


def exported(folder: Path, name: str, **contents: int) -> Exported:
    return inspect(folder / f"{name}.nsys-rep", database(folder / f"{name}.sqlite", **contents))


def test_the_report_with_kernels_is_the_captures(tmp_path: Path) -> None:
    stage = exported(tmp_path, "stage", kernels=9)
    other = exported(tmp_path, "other", window=False)
    started_in_vain = exported(tmp_path, "vain")
    assert stage.devices == {0: 9}
    assert choose_report([other, stage, started_in_vain], "split") is stage


def test_without_kernels_it_is_the_one_with_the_window(tmp_path: Path) -> None:
    found = [exported(tmp_path, "other", window=False), exported(tmp_path, "stage")]
    assert choose_report(found, "split") is found[1]


@pytest.mark.parametrize("kernels", [0, 9])
def test_several_candidates_are_refused(tmp_path: Path, kernels: int) -> None:
    found = [exported(tmp_path, "one", kernels=kernels), exported(tmp_path, "two", kernels=kernels)]
    with pytest.raises(MachineError, match=r"2 reports could be the GPU stage's \(one.nsys-rep, two.nsys-rep\)"):
        choose_report(found, "split")


def test_no_candidate(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"no report has GPU kernels .* \(other.nsys-rep\)"):
        choose_report([exported(tmp_path, "other", window=False)], "split")
    with pytest.raises(MachineError, match="no reports"):
        choose_report([], "split")


def test_kernels_in_a_table_with_a_suffix_count(tmp_path: Path) -> None:
    path = database(tmp_path / "a.sqlite", kernels=2)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"ALTER TABLE {schema.KERNEL} RENAME TO {schema.KERNEL}_V3")
    assert inspect(path, path).devices == {0: 2}


def test_missing_nsys_and_the_command_bug_are_found_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no nsys on PATH"):
        nsys.ready_nsys()
    monkeypatch.setattr(nsys, "find_nsys", lambda: stand_in(tmp_path, ""))
    monkeypatch.setattr(nsys, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="The nvtx package"):
        nsys.ready_nsys()
    monkeypatch.setattr(nsys, "find_spec", lambda name: name)
    monkeypatch.setattr(nsys, "_is_fixed", lambda: False)
    with pytest.raises(MachineError, match=r"PATH has none: none would start \(ray#66093\)") as caught:
        nsys.ready_nsys()
    assert "patches apply" in caught.value.remedy
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    with pytest.raises(KitError, match="which is not"):
        nsys.ready_nsys()
    monkeypatch.setattr(nsys, "_is_fixed", lambda: True)
    assert nsys.ready_nsys().kind == "real"
