"""The nsight command bug (ray#66093) as an experiment: does a profiled worker start with the Python it was to have?

Ray's nsight plugin replaces the worker's Python command by a bare ``python``. Each case makes that matter in another
way, and runs once on stock Ray and once with ``patches/nsight-command.patch``, each a private overlay of the installed
Ray. The worker itself says how it was started.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import site
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import Field
from rich.table import Table
from rich.text import Text

from repro.capture.machine import provenance
from repro.capture.nsys import Nsys
from repro.errors import KitError, MachineError
from repro.progress import Progress
from repro.ray_bugs import nsight_driver, nsys_stand_in
from repro.ray_bugs.driving import Event, driver
from repro.ray_bugs.nsys import Choice, choose
from repro.ray_bugs.result import ExperimentResult, Model, Verdict, result_folder
from repro.ray_patches import overlay
from repro.report.render import render_template
from repro.results import write_json, write_text
from repro.text import one_line

SCHEMA: Final = "repro.nsight_command/1"

Arm = Literal["stock", "fixed"]
Case = Literal["no python on PATH", "py_executable with arguments", "venv path with a space"]
Outcome = Literal["started", "wrong command", "never started"]
CASES: Final[Mapping[Case, str]] = {
    "no python on PATH": "PATH has nsys, and neither python nor python3",
    "py_executable with arguments": 'runtime_env has "py_executable": "PYTHON -X marker"; PATH has a python as well',
    "venv path with a space": "the driver runs in a virtual environment whose path has a space; PATH has no python",
}
MARKER: Final = "repro_marker"

ACTOR_LIMIT_S: Final = 45.0
"""For the profiled actor to answer; where it starts it took 2 to 4 s."""
_PHASE_LIMITS_S: Final[Mapping[str, float]] = {
    "starting the driver": 60.0,
    "starting Ray": 120.0,
    "starting the actor": ACTOR_LIMIT_S + 30,
}


class CaseRecord(Model):
    """One case of one arm. ``wrong command``: the worker runs, under another Python command than the chosen one."""

    case: Case
    arm: Arm
    outcome: Outcome | None = None
    chosen: str
    """The Python command the worker was to have."""
    command: str | None = None
    """The command Ray made of it, from the log of the runtime environment."""
    reason: str | None = None
    """Why it never started, from Ray's logs, or what is wrong with the command."""
    start_s: float | None = None
    """From asking for the actor to its answer."""
    error: str | None = None
    """Why there is no outcome."""


class Result(ExperimentResult):
    """``nsight_command.json``. Reproduced: every case fails on stock Ray and starts as chosen with the fix."""

    nsys_kind: Literal["real", "stand-in"]
    nsys_version: str
    actor_limit_s: float
    cases: list[CaseRecord] = Field(default_factory=list)


def run(nsys: Choice, out: Path | None, progress: Progress) -> tuple[Result, Path]:
    """Run all cases in both arms; the result, and the folder with its ``nsight_command.json`` and ``.md``.

    Both files are written after each case. ``UsageError`` for an ``out`` that holds a result, ``MachineError`` if the
    real nsys is asked for and missing.
    """
    out = result_folder(out, "nsight-command")
    tool = choose(nsys)
    if tool.kind == "stand-in":
        progress.say("STAND-IN nsys: it starts its target as the real one does, and measures nothing.")
    result = Result(
        schema=SCHEMA,
        **provenance(),
        nsys_kind=tool.kind,
        nsys_version=tool.version,
        actor_limit_s=ACTOR_LIMIT_S,
    )
    (out / "logs").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nc-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        with progress.waiting("Preparing stock and fixed Ray"):
            packages: dict[Arm, Path] = {
                "stock": overlay(scratch / "stock", []),
                "fixed": overlay(scratch / "fixed", ["nsight-command"]),
            }
        for case in CASES:
            setting = _setting(case, tool, Path(tempfile.mkdtemp(dir=scratch)))
            for arm in get_args(Arm):
                record = CaseRecord(case=case, arm=arm, chosen=shlex.join(setting.chosen))
                log = out / "logs" / f"{case.replace(' ', '-')}.{arm}.log"
                with progress.waiting(f"{case}, {arm}"):
                    try:
                        _run_case(record, setting, packages[arm], Path(tempfile.mkdtemp(dir=scratch)), log)
                    except KitError as error:
                        record.error = str(error)
                result.cases.append(record)
                progress.say(f"{case}, {arm}: {record.outcome or record.error}")
                _write(result, out)
    result.verdict, result.reason = verdict(result)
    _write(result, out)
    return result, out


def verdict(result: Result) -> tuple[Verdict, str]:
    """The verdict on the whole experiment, and what it rests on."""
    failed = [record for record in result.cases if record.error]
    if failed:
        return "inconclusive", f"{failed[0].case}, {failed[0].arm} could not be run: {failed[0].error}"
    stock = [record for record in result.cases if record.arm == "stock"]
    fixed = [record for record in result.cases if record.arm == "fixed"]
    lost = sum(record.outcome != "started" for record in stock)
    kept = sum(record.outcome == "started" for record in fixed)
    text = (
        f"stock Ray lost the chosen command in {lost} of {len(stock)} cases, the fix kept it in {kept} of {len(fixed)}"
    )
    if not lost:
        return "inconclusive", text
    return ("reproduced" if lost == len(stock) and kept == len(fixed) else "not reproduced"), text


@dataclass(frozen=True)
class _Setting:
    """How a case starts its driver, and the command its worker is to have."""

    python: Path
    path: Path
    runtime_env: dict[str, Any]
    chosen: tuple[str, ...]


def _setting(case: Case, tool: Nsys, folder: Path) -> _Setting:
    programs = folder / "programs"
    runtime_env: dict[str, Any] = {"nsight": {"t": "nvtx", "sample": "none", "cpuctxsw": "none", "o": "report_%p"}}
    python = Path(sys.executable)
    chosen: tuple[str, ...] = (str(python),)
    if case == "py_executable with arguments":
        chosen = (str(python), "-X", MARKER)
        runtime_env["py_executable"] = shlex.join(chosen)
        programs.mkdir()
        script = programs / "python"
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(str(python))} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    elif case == "venv path with a space":
        python = _environment_with_a_space(folder)
        chosen = (str(python),)
    if tool.kind == "stand-in":
        nsys_stand_in.install(programs)
    _link_programs(programs)
    return _Setting(python, programs, runtime_env, chosen)


def _link_programs(folder: Path) -> None:
    """Links to everything on PATH that is no Python, behind what ``folder`` has already."""
    folder.mkdir(exist_ok=True)
    for entry in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if not entry or not Path(entry).is_dir():
            continue
        for program in Path(entry).iterdir():
            link = folder / program.name
            if not program.name.startswith("python") and not link.is_symlink() and not link.exists():
                link.symlink_to(program.absolute())


def _environment_with_a_space(folder: Path) -> Path:
    """A virtual environment that sees the packages of this interpreter; its python."""
    home = folder / "a venv"
    venv.EnvBuilder(with_pip=False, symlinks=True).create(home)
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (home / "lib" / version / "site-packages" / "kit.pth").write_text(
        "".join(f"{path}\n" for path in sorted(packages)), encoding="utf-8"
    )
    return home / "bin" / "python"


def _run_case(record: CaseRecord, setting: _Setting, packages: Path, folder: Path, log: Path) -> None:
    config: nsight_driver.Config = {
        "folder": str(folder / "ray"),
        "runtime_env": setting.runtime_env,
        "limit_s": ACTOR_LIMIT_S,
    }
    environment = {**os.environ, "PATH": str(setting.path), "PYTHONPATH": str(packages), "TMPDIR": str(folder)}
    program = Path(nsight_driver.__file__)
    killed: list[str] = []
    with driver(
        program, config, environment, folder / "events", log, killed=killed, python=str(setting.python)
    ) as running:
        events = running.follow(_PHASE_LIMITS_S)
    begun = events["starting the actor"]
    if packages not in Path(begun["ray_path"]).parents:
        raise MachineError(f"the driver imported Ray from {begun['ray_path']}, not from the arm's own copy of it")
    logs = Path(begun["session"]) / "logs"
    record.command = _worker_command(logs)
    answer = events.get("started")
    if answer is None:
        record.outcome = "never started"
        record.reason = _reason(events["gave up"], logs)
        return
    record.start_s = answer["at_s"] - begun["at_s"]
    record.reason = _difference(answer, setting.chosen)
    record.outcome = "wrong command" if record.reason else "started"


def _difference(answer: Event, chosen: tuple[str, ...]) -> str | None:
    """What is wrong with the command a worker was started with; None if it is the chosen one."""
    if answer["executable"] != chosen[0]:
        return f"runs {answer['executable']}"
    if (MARKER in chosen) != (MARKER in answer["options"]):
        return f"its arguments {shlex.join(chosen[1:])} are gone"
    return None


def _worker_command(logs: Path) -> str | None:
    """The command that the runtime environment made, from the last line of its log that has one."""
    try:
        text = (logs / "runtime_env_agent.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.findall(r'"py_executable": ("(?:[^"\\]|\\.)*")', text)
    return one_line(json.loads(found[-1])) if found else None


def _reason(event: Event, logs: Path) -> str:
    """Why no worker came: what the driver was told, and the last word of the worker's launcher."""
    said = ""
    for path in (logs / "raylet.err", logs / "runtime_env_agent.err"):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
        said = next((one_line(line.strip()) for line in reversed(lines) if line.strip()), "")
        if said:
            return f"{one_line(event['problem'])[:300]}; {path.name}: {said[:300]}"
    return one_line(event["problem"])[:300]


def _write(result: Result, out: Path) -> None:
    write_json(out / "nsight_command.json", result)
    write_text(out / "nsight_command.md", markdown(result))


def markdown(result: Result) -> str:
    """The result as a page."""
    return render_template(
        "nsight_command.md.j2", result=result, stand_in=result.nsys_kind == "stand-in", cases=CASES.items()
    )


def table(result: Result) -> Table:
    """The outcomes for a terminal."""
    nsys = "STAND-IN nsys" if result.nsys_kind == "stand-in" else result.nsys_version
    view = Table(title=Text(f"Python command of a profiled worker, {nsys}"), title_justify="left")
    for heading in ("case", "arm", "outcome", "reason"):
        view.add_column(heading)
    for record in result.cases:
        view.add_row(
            Text(record.case), record.arm, record.outcome or "not run", Text(record.reason or record.error or "")
        )
    view.caption = Text(f"{result.verdict}: {result.reason}.")
    view.caption_justify = "left"
    return view
