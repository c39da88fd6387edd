"""Nsight Systems around a capture: its options, which report is the capture's, and the export to SQLite.

``nsight_options`` goes into Ray's ``runtime_env={"nsight": ...}``; Ray starts the GPU stage's worker under
``nsys profile`` with it and puts reports into the session's ``logs/nsight`` folder of the worker's node.
:mod:`repro.capture.collect` waits for them there and fetches them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from repro import ray_patches
from repro.device.nvtx_ranges import DOMAIN, WINDOW
from repro.errors import InputError, KitError, MachineError, WaitTimeoutError
from repro.nsysdb import schema
from repro.nsysdb.reader import connect
from repro.results import whole_file
from repro.text import one_line

REPORT_SUFFIXES: Final = (".nsys-rep", ".qdrep")
VERSION_LIMIT_S: Final = 60.0
EXPORT_LIMIT_S: Final = 600.0
NO_KERNELS_REMEDY: Final = (
    "An nsys older than the driver records none (python -m repro doctor compares them). CUPTI serves one profiler at a "
    "time: end ncu, another nsys and DCGM's profiling. On a MIG slice: --profiler=torch."
)

Version = tuple[int, int, int]

# nsys writes its version into the first line of a report, with "@" for ".".
_REPORT_HEADER: Final = re.compile(rb"NVIDIA Tegra Profiler Report (\d+)[@.](\d+)[@.](\d+)")
_SEVERITIES: Final = {"Info": 1, "Warning": 2, "Error": 3}


def nsight_options(stem: str) -> dict[str, str]:
    """Options of ``nsys profile`` for one capture, in the order and form that Ray's plugin takes.

    Collects CUDA and NVTX from the instant that the GPU stage opens its window to the end of the process; reports are
    called ``<stem>.<pid>.nsys-rep``. No CPU sampling: it costs CPU time that the pipeline needs.
    """
    return {
        "t": "cuda,nvtx",
        "sample": "none",
        "cpuctxsw": "none",
        "capture-range": "nvtx",
        "nvtx-capture": f"{WINDOW}@{DOMAIN}",
        "capture-range-end": "none",
        "stop-on-exit": "true",
        "o": f"{stem}.%p",
    }


@dataclass(frozen=True)
class Nsys:
    """An nsys, or the stand-in of the bug experiments: what it says of its version, and the command that runs it."""

    kind: Literal["real", "stand-in"]
    version: str
    command: tuple[str, ...]


def find_nsys() -> Nsys:
    """The nsys on PATH. ``MachineError`` if there is none or it does not run."""
    found = shutil.which("nsys")
    if not found:
        raise MachineError(
            "There is no nsys on PATH.", remedy="Install Nsight Systems (docker/install-nsight installs one)."
        )
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=VERSION_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise WaitTimeoutError(f"{found} --version did not answer within {VERSION_LIMIT_S:.0f} s.") from None
    except OSError as error:
        raise MachineError(f"{found} does not run: {error.strerror}.") from None
    if done.returncode:
        raise MachineError(f"{found} --version failed: {one_line((done.stderr or done.stdout).strip())}.")
    return Nsys("real", one_line(done.stdout.strip()), (found,))


def ready_nsys(*, stock_ray: bool = False) -> Nsys:
    """The nsys of this machine, checked so far as can be before a worker starts under it.

    ``MachineError`` if there is none, if it does not run, or if Ray would start another Python under it
    (ray#66093: its plugin forgets the command it was to run and takes whatever ``python`` is on PATH).
    """
    nsys = find_nsys()
    if not find_spec("nvtx"):
        raise MachineError(
            "The nvtx package, which tells nsys where the window begins, is not installed.", remedy="make setup."
        )
    if (stock_ray or not _is_fixed()) and (problem := _bare_python_problem()):
        raise MachineError(
            f"Ray's nsight plugin starts profiled workers with a bare python, and {problem}: none would start "
            "(ray#66093).",
            remedy="Activate the environment of this Python, so that PATH has its python, or drop --stock-ray."
            if stock_ray
            else "python -m repro patches apply.",
        )
    return nsys


def _is_fixed() -> bool:
    return any(one.patch.name == "nsight-command" and one.state == "applied" for one in ray_patches.status().patches)


def _bare_python_problem() -> str | None:
    found = shutil.which("python")
    if found is None:
        return "PATH has none"
    if Path(found).parent.resolve() != Path(sys.executable).parent.resolve():
        return f"PATH has {found}, which is not {sys.executable}"
    return None


def version_of(nsys: Nsys) -> Version | None:
    """The version that ``nsys --version`` says; ``None`` if it is of a form we do not know."""
    match = re.search(r"version (\d+)\.(\d+)\.(\d+)", nsys.version)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def report_version(report: Path) -> Version | None:
    """The version of nsys that wrote ``report``; ``None`` if its header does not say. ``InputError`` if unreadable."""
    try:
        with report.open("rb") as file:
            match = _REPORT_HEADER.match(file.read(200))
    except OSError as error:
        raise InputError(f"{report} cannot be read: {error.strerror}.") from None
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def export(nsys: Nsys, report: Path, database: Path) -> None:
    """``nsys export`` of ``report``; ``database`` appears only when whole.

    Where the export has no kernels and no diagnostics, as that of 2023.4, nsys's diagnostics are added to it, in the
    table that later versions write.

    ``InputError`` if the report is newer than nsys, empty, or does not export; ``WaitTimeoutError`` if that takes
    more than ``EXPORT_LIMIT_S``.
    """
    written, ours = report_version(report), version_of(nsys)
    if report.stat().st_size == 0:
        raise InputError(f"{report} is empty: nsys was ended before it had written it.")
    if written and ours and written > ours:
        raise InputError(
            f"{report} was written by nsys {_dotted(written)}, and {nsys.command[0]} is {_dotted(ours)}, which cannot "
            "read it.",
            remedy=f"Install Nsight Systems {_dotted(written)} or newer (docker/install-nsight).",
        )
    with whole_file(database) as temporary:
        _export_tables(nsys, report, temporary)
        if not _has(temporary, schema.KERNEL) and not _has(temporary, "DIAGNOSTIC_EVENT"):
            _add_diagnostics(nsys, report, temporary)


def export_problem(nsys: Nsys, report: Path) -> str | None:
    """Why ``nsys export`` makes no readable SQLite file of ``report``; None if it does."""
    with tempfile.TemporaryDirectory(prefix="repro-export-") as folder:
        try:
            _export_tables(nsys, report, Path(folder) / "report.sqlite")
        except KitError as error:
            return error.message.removesuffix(".")
    return None


@contextmanager
def sqlite_of(profile: Path) -> Iterator[Path]:
    """``profile`` itself, or a temporary export of it where it is a report of nsys (.nsys-rep, .qdrep).

    ``MachineError`` if a report is given and there is no nsys to export it; otherwise as ``export``.
    """
    if profile.suffix not in REPORT_SUFFIXES:
        yield profile
        return
    if not profile.is_file():
        raise InputError(f"{profile} {'is not a file' if profile.exists() else 'does not exist'}.")
    with tempfile.TemporaryDirectory(prefix="repro-export-") as folder:
        database = Path(folder) / f"{profile.stem}.sqlite"
        export(find_nsys(), profile, database)
        yield database


def _export_tables(nsys: Nsys, report: Path, database: Path) -> None:
    """Export, and look at what came of it: an export without a table is none, whatever the status of nsys was."""
    _run_export(nsys, report, "sqlite", database)
    try:
        with closing(connect(database)) as db:
            tables = db.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    except sqlite3.Error as error:
        raise InputError(f"nsys export of {report.name} left no readable database: {error}.") from None
    if not tables:
        raise InputError(f"nsys export of {report.name} left a database without tables.")


def _run_export(nsys: Nsys, report: Path, kind: str, output: Path) -> None:
    # The importer keeps scratch files in TMPDIR; beside the output is where there is room.
    environment = {**os.environ, "TMPDIR": str(output.parent)}
    command = [*nsys.command, "export", f"--type={kind}", "--force-overwrite=true", f"--output={output}", str(report)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=EXPORT_LIMIT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        raise WaitTimeoutError(f"Waited {EXPORT_LIMIT_S:.0f} s for nsys export of {report.name}.") from None
    if done.returncode:
        said = one_line((done.stderr or done.stdout).strip()[-300:])
        raise InputError(f"nsys export of {report.name} ended with status {done.returncode}: {said}.")


def _has(database: Path, table: str) -> bool:
    """Whether a table, or a version of it with a suffix, has rows."""
    with closing(connect(database)) as db:
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return any(
            db.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone() for name in names if name.upper().startswith(table)
        )


def _add_diagnostics(nsys: Nsys, report: Path, database: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="repro-export-") as folder:
        text = Path(folder) / "report.json"
        _run_export(nsys, report, "json", text)
        rows = list(_diagnostics(text))
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(schema.create_table("DIAGNOSTIC_EVENT"))
        db.executemany(
            "INSERT INTO DIAGNOSTIC_EVENT (timestamp, timestampType, source, severity, text) VALUES (?, 0, 0, ?, ?)",
            rows,
        )


def _diagnostics(lines: Path) -> Iterator[tuple[int, int, str]]:
    """(time in ns, severity, text) of each diagnostic event in a JSON export, which has an event a line."""
    with lines.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if '"DiagnosticEvent"' not in line:
                continue
            event: dict[str, Any] = json.loads(line)["DiagnosticEvent"]
            severity = _SEVERITIES.get(event.get("Level", ""), _SEVERITIES["Error"])
            yield int(event.get("Timestamp", {}).get("Time", 0)), severity, str(event.get("Text", ""))


def keep_report(nsys: Nsys, fetched: Sequence[Path], path: Path, what: str) -> tuple[Path, Exported]:
    """Export the fetched reports of one capture and keep the GPU stage's: ``path``, and its report beside it.

    Returns the report's new place and what the export holds. Errors as of ``export`` and ``choose_report``.
    """
    with tempfile.TemporaryDirectory(prefix="repro-export-") as folder:
        found = []
        for report in fetched:
            database = Path(folder) / f"{report.stem}.sqlite"
            export(nsys, report, database)
            found.append(inspect(report, database))
        chosen = choose_report(found, what)
        kept = path.with_suffix(".nsys-rep")
        for source, target in ((chosen.report, kept), (chosen.database, path)):
            with whole_file(target) as temporary:
                shutil.copyfile(source, temporary)
    return kept, chosen


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True)
class Exported:
    """A report of one worker and its export: how many kernels and NVTX ranges of the kit are in it."""

    report: Path
    database: Path
    devices: dict[int, int]
    """Kernels by device."""
    ranges: int


def inspect(report: Path, database: Path) -> Exported:
    """What the export ``database`` of ``report`` holds."""
    with closing(connect(database)) as db:
        names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        devices: dict[int, int] = {}
        for name in names:
            if re.fullmatch(rf"{schema.KERNEL}(_V\d+)?", name, re.IGNORECASE):
                devices |= dict(db.execute(f'SELECT deviceId, count(*) FROM "{name}" GROUP BY deviceId'))
        ranges = 0
        if "NVTX_EVENTS" in names:
            text = "coalesce(text, (SELECT value FROM StringIds WHERE id = textId))"
            ranges = db.execute(f"SELECT count(*) FROM NVTX_EVENTS WHERE {text} = ?", (WINDOW,)).fetchone()[0]
    return Exported(report, database, devices, ranges)


def choose_report(found: Sequence[Exported], what: str) -> Exported:
    """The report of the worker that ran the GPU stage: the one with kernels, or, where none has, with our window.

    ``MachineError`` if there is none, or several could be it.
    """
    candidates = [one for one in found if one.devices] or [one for one in found if one.ranges]
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(one.report.name for one in candidates or found)
    if candidates:
        raise MachineError(
            f"{what}: {len(candidates)} reports could be the GPU stage's ({names}), so its worker was started again "
            "or another profiled process used the GPU.",
            remedy="Capture again with nothing else on the GPU.",
        )
    raise MachineError(
        f"{what}: no report has GPU kernels or the NVTX range {WINDOW!r} of the GPU stage ({names or 'no reports'})."
    )
