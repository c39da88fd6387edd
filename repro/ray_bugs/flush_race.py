"""The teardown-flush race (ray#60904) as an experiment: does a profiler's report survive ``ray.shutdown()``?

Every repeat is a driver process with a cluster of its own (:mod:`repro.ray_bugs.flush_driver`): profiled actors work,
then Ray is shut down. The arms (:mod:`repro.ray_bugs.flush_model`) differ in the teardown and in the Ray they run, each
a private overlay of the installed one, whatever patches that has.

A report is looked at when ``ray.shutdown()`` returned, when the driver had exited, and when the last process of the
repeat was gone or the wait for it ran out. It counts as written at a moment if it has its final size and time of change
then, and ``nsys export`` accepts it in the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from rich.table import Table
from rich.text import Text

from repro.capture.machine import nvidia_traces, provenance
from repro.capture.nsys import Nsys, export_problem
from repro.errors import KitError, MachineError, UsageError
from repro.procs import ProcessTree
from repro.progress import Progress
from repro.ray_bugs import flush_driver
from repro.ray_bugs.driving import Event, driver, read_events
from repro.ray_bugs.flush_container import FOLDER, IMAGE, STAND_IN_INSIDE, Containers
from repro.ray_bugs.flush_model import (
    ARMS,
    OUTCOMES,
    SCHEMA,
    TEARDOWNS,
    Arm,
    ArmRecord,
    NsysRecord,
    Observation,
    RepeatRecord,
    Result,
    WorkRecord,
    judge,
    summarize,
    verdict,
    worst,
)
from repro.ray_bugs.nsys import STAND_IN, Choice, choose
from repro.ray_bugs.result import result_folder
from repro.ray_patches import flush_window, overlay
from repro.ray_patches.series import PATCHES_DIR
from repro.report.render import render_template
from repro.results import write_json, write_text

DEFAULT_REPORT_MB: Final[Mapping[str, float]] = {"real": 64.0, "stand-in": 1.0}
BYTES_PER_EVENT: Final = 33
"""Bytes that a traced system call adds to a report: 33 to 41 with nsys 2023.4, less where the worker is killed before
the last events left it. The low end, so that reports are big enough."""
STAND_IN_EVENTS: Final = 1000
BUILD_DIR: Final = PATCHES_DIR.parent / "build" / "profiler_flush"

START_LIMIT_S: Final = 120.0
WORK_LIMIT_S: Final = 300.0
FLUSH_LIMIT_S: Final = 660.0
"""For a driver that waits for reports, and for a shutdown: above the flush window's hard cap of ten minutes."""
LATE_LIMIT_S: Final = 60.0
LATE_S_PER_MB: Final = 2.0
"""Wait for what outlived the driver: 60 s, and for each MB of its reports 2 s more (0.3 measured, one at a time)."""
_PHASE_LIMITS_S: Final[Mapping[str, float]] = {
    "starting the driver": START_LIMIT_S,
    "starting Ray": START_LIMIT_S,
    "starting the profiled actors": START_LIMIT_S + 30,
    "working": WORK_LIMIT_S + 30,
    "waiting for the reports": FLUSH_LIMIT_S + 30,
    "shutting down": FLUSH_LIMIT_S,
}


def parse_arms(text: str) -> tuple[Arm, ...]:
    """``a,b`` as arms, in the order of ``ARMS``. ``ValueError`` for an unknown one, or none."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    unknown = sorted(names - set(ARMS))
    if unknown or not names:
        raise ValueError(f"there is no arm {', '.join(unknown) or '(none)'}; there are {', '.join(ARMS)}")
    return tuple(arm for arm in ARMS if arm in names)


def run(
    arms: Sequence[Arm],
    repeats: int,
    nsys: Choice,
    report_mb: float | None,
    out: Path | None,
    progress: Progress,
    *,
    actors: int = 1,
    image: str | None = None,
) -> tuple[Result, Path]:
    """Run the experiment; the result, and the folder with its ``flush_race.json`` and ``flush_race.md``.

    ``report_mb``: size of a report to aim at, in MB of 1e6 bytes; ``actors``: profiled actors of a repeat; ``image``:
    of the container arm. Both files are written after each repeat; an arm ends with its first error.
    ``UsageError`` for values out of range and for an ``out`` that holds a result; ``MachineError`` if the real nsys, or
    a compiler for the fixed arm, is asked for and missing.
    """
    _check("repeats", repeats, 1, 1000)
    _check("actors", actors, 1, 64)
    if report_mb is not None:
        _check("report-mb", report_mb, 0.1, 10_000)
    out = result_folder(out, "flush-race")
    tool = choose(nsys)
    if tool.kind == "stand-in":
        progress.say("STAND-IN nsys: it has the process structure of the real one, and nothing else.")
    result = Result(
        schema=SCHEMA,
        **provenance(),
        nsys=NsysRecord(kind=tool.kind, version=tool.version),
        report_mb=report_mb or DEFAULT_REPORT_MB[tool.kind],
        actors=actors,
        repeats=repeats,
        arms=[ArmRecord(arm=arm) for arm in ARMS if arm in arms],
    )
    (out / "logs").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fr-", ignore_cleanup_errors=True)))
        runners = []
        for record in result.arms:
            with progress.waiting(f"{record.arm}: preparing"):
                runners.append((record, _prepare(record, result, tool, scratch, stack, image or IMAGE)))
        for record, runner in runners:
            if runner is None:
                progress.say(f"{record.arm}: skipped, {record.skipped}")
                continue
            for number in range(1, repeats + 1):
                repeat = RepeatRecord(arm=record.arm, repeat=number)
                with progress.waiting(f"{record.arm}, {number} of {repeats}"):
                    try:
                        runner.run(repeat, scratch, out / "logs" / f"{record.arm}.{number}.log")
                    except KitError as error:
                        repeat.error = str(error)
                result.results.append(repeat)
                progress.say(f"{record.arm}, {number} of {repeats}: {_told(repeat)}")
                _write(result, out)
                if repeat.error:
                    break
    result.verdict, result.reason = verdict(result)
    _write(result, out)
    return result, out


def _prepare(record: ArmRecord, result: Result, tool: Nsys, scratch: Path, stack: ExitStack, image: str) -> _Arm | None:
    """What runs an arm's repeats; None, with the reason in the record, if this machine cannot."""
    if record.arm != "container":
        return _ProcessArm(record.arm, result, tool, scratch)
    try:
        containers = Containers(image)
    except MachineError as error:
        record.skipped = str(error)
        return None
    stack.callback(containers.close)
    return _ContainerArm(result, tool, containers)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"--{name}={value}: should be from {low} to {high}.")


def _told(repeat: RepeatRecord) -> str:
    if repeat.error:
        return f"failed: {repeat.error}"
    return f"{repeat.outcome}, the shutdown took {repeat.shutdown_s or 0:.1f} s"


def _write(result: Result, out: Path) -> None:
    write_json(out / "flush_race.json", result)
    write_text(out / "flush_race.md", markdown(result))


class _Arm:
    """How one arm runs a repeat: fills a record, or raises a ``KitError`` that says why it cannot be judged."""

    def __init__(self, arm: Arm, result: Result, tool: Nsys) -> None:
        self._arm = arm
        self._result = result
        self._tool = tool
        self._real = tool.kind == "real"
        self._variables = {"NSYS_STAND_IN_REPORT_BYTES": str(int(result.report_mb * 1e6))}

    def run(self, repeat: RepeatRecord, scratch: Path, log: Path) -> None:
        raise NotImplementedError

    def _config(self, folder: str, stand_in: str) -> flush_driver.Config:
        return {
            "teardown": "wait" if self._arm == "stock+wait" else "immediate",
            "actors": self._result.actors,
            "events": int(self._result.report_mb * 1e6 / BYTES_PER_EVENT) if self._real else STAND_IN_EVENTS,
            "nsight": {
                "t": "cuda,nvtx,osrt" if nvidia_traces() else "nvtx,osrt",
                "sample": "none",
                "cpuctxsw": "none",
                "osrt-threshold": "0",  # record every call, however short: the size of the report is then known
                "o": "report_%p",
            },
            "folder": folder,
            "stand_in": "" if self._real else stand_in,
            "start_limit_s": START_LIMIT_S,
            "work_limit_s": WORK_LIMIT_S,
            "wait_limit_s": FLUSH_LIMIT_S,
        }


class _ProcessArm(_Arm):
    """The driver is a child process; its Ray is an overlay in ``scratch`` with just the patches of the arm."""

    def __init__(self, arm: Arm, result: Result, tool: Nsys, scratch: Path) -> None:
        super().__init__(arm, result, tool)
        self._fixed = arm == "fixed+immediate"
        self._packages = scratch / ("fixed" if self._fixed else "stock")
        if not self._packages.exists():
            overlay(self._packages, ["profiler-flush-wait"] if self._fixed else [])
        self._environment = {**os.environ, "PYTHONPATH": str(self._packages), **self._variables}
        if self._fixed:
            library = flush_window.build(BUILD_DIR)
            self._environment |= flush_window.environment(library, ray_dir=self._packages / "ray")

    def run(self, repeat: RepeatRecord, scratch: Path, log: Path) -> None:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        config = self._config(str(folder), str(STAND_IN))
        program, output, killed = Path(flush_driver.__file__), folder / "events", repeat.ended_by_us
        try:
            with driver(program, config, self._environment, output, log, killed=killed) as running:
                tree = running.tree
                events = running.follow(_PHASE_LIMITS_S, lambda phase, events: self._check_ray(tree, phase, events))
                _take(repeat, events)
                reports = Path(events["starting the profiled actors"]["reports"])
                at_exit = flush_driver.snapshot(reports)
                repeat.left_over_at_exit = len(tree.members())
                self._wait_until_gone(tree)
        finally:
            _keep_raylet_log(folder, log)
        observation = Observation(
            expected=_expected(events),
            at_return=events["returned"]["files"],
            at_exit=at_exit,
            later=flush_driver.snapshot(reports),
            streams=len(list((folder / flush_driver.TEMPORARY).glob("*.qdstrm"))),
            shutdown_wall_ns=events["shutting down"]["wall_ns"],
        )
        repeat.reports = judge(observation, lambda name: export_problem(self._tool, reports / name))
        repeat.outcome = worst(repeat.reports)
        shutil.rmtree(folder, ignore_errors=True)

    def _check_ray(self, tree: ProcessTree, phase: str, events: dict[str, Event]) -> None:
        """The arm runs what it is named after: its own overlay, and the library in the raylet or not."""
        if phase != "working":
            return
        path = Path(events["starting the profiled actors"]["ray_path"])
        if self._packages not in path.parents:
            raise MachineError(f"the driver imported Ray from {path.parent}, not from the arm's own copy of it")
        raylets = [process.pid for process in tree.members() if process.name() == "raylet"]
        if not raylets:
            raise MachineError("the driver's raylet was not found")
        if flush_window.loaded(raylets[0]) != self._fixed:
            raise MachineError(
                "the raylet did not load the flush-window library"
                if self._fixed
                else "the raylet loaded the flush-window library, and this arm is to run without"
            )

    def _wait_until_gone(self, tree: ProcessTree) -> None:
        limit_s = LATE_LIMIT_S + LATE_S_PER_MB * self._result.report_mb * self._result.actors
        deadline = time.monotonic() + limit_s
        while tree.members() and time.monotonic() < deadline:
            time.sleep(0.25)


class _ContainerArm(_Arm):
    """The driver is a container's main process. What its profilers had not written when it ended is gone."""

    def __init__(self, result: Result, tool: Nsys, containers: Containers) -> None:
        super().__init__("container", result, tool)
        self._containers = containers

    def run(self, repeat: RepeatRecord, scratch: Path, log: Path) -> None:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        config = self._config(FOLDER, STAND_IN_INSIDE)
        limit_s = sum(_PHASE_LIMITS_S.values())
        with self._containers.drive(config, self._variables, limit_s, log) as (output, box):
            events = read_events(output)
            if "returned" not in events:
                raise MachineError(f"the driver in the container ended at {next(reversed(events), 'its start')!r}")
            _take(repeat, events)
            expected = _expected(events)
            reports = events["starting the profiled actors"]["reports"]
            found = {name: self._containers.fetch(box, f"{reports}/{name}", folder / name) for name in expected}
            left = self._containers.names(box, f"{FOLDER}/{flush_driver.TEMPORARY}")
        final = {name: state for name, state in found.items() if state}
        observation = Observation(
            expected=expected,
            at_return=events["returned"]["files"],
            at_exit=final,
            later=final,
            streams=sum(name.endswith(".qdstrm") for name in left),
            shutdown_wall_ns=events["shutting down"]["wall_ns"],
        )
        repeat.reports = judge(observation, lambda name: self._export_problem(folder / name))
        repeat.outcome = worst(repeat.reports)
        shutil.rmtree(folder, ignore_errors=True)

    def _export_problem(self, report: Path) -> str | None:
        return self._containers.export_problem(report) if self._real else export_problem(self._tool, report)


def _take(repeat: RepeatRecord, events: dict[str, Event]) -> None:
    repeat.work = WorkRecord(**events["worked"]["work"][0])
    repeat.shutdown_s = events["returned"]["shutdown_s"]


def _expected(events: dict[str, Event]) -> list[str]:
    return [f"report_{pid}.nsys-rep" for pid in events["working"]["workers"]]


def _keep_raylet_log(folder: Path, log: Path) -> None:
    """The raylet's logs say what it waited for and whom it signalled; keep them beside the driver's."""
    for source in folder.glob(f"{flush_driver.RAY}/session_2*/logs/raylet.*"):
        shutil.copyfile(source, log.with_name(f"{log.stem}.{source.name}"))


def markdown(result: Result) -> str:
    """The result as a page."""
    return render_template(
        "flush_race.md.j2",
        result=result,
        stand_in=result.nsys.kind == "stand-in",
        work=next((repeat.work for repeat in result.results if repeat.work), None),
        summaries=[summarize(result, record.arm) for record in result.arms if not record.skipped],
        skipped=[record for record in result.arms if record.skipped],
        outcomes=OUTCOMES,
        teardowns=TEARDOWNS,
    )


def table(result: Result) -> Table:
    """The summary for a terminal."""
    title = f"Reports of profiled actors at ray.shutdown(), {_nsys(result)}"
    view = Table(title=Text(title), title_justify="left")
    for heading in ("arm", "repeats", "written at return", "in the end", "shutdown", "left-overs at exit"):
        view.add_column(heading, justify="left" if heading in ("arm", "in the end") else "right")
    for record in result.arms:
        if record.skipped:
            view.add_row(Text(record.arm), "", "", Text(f"skipped: {record.skipped}"), "", "")
            continue
        summary = summarize(result, record.arm)
        ends = [f"{count} {name}" for name, count in zip(OUTCOMES, summary.outcomes, strict=True) if count]
        view.add_row(
            Text(record.arm),
            f"{summary.repeats}" + (f", {summary.errors} failed" if summary.errors else ""),
            f"{summary.written_at_return} of {summary.reports}",
            Text(", ".join(ends) or "-"),
            "-" if summary.shutdown_s is None else f"{summary.shutdown_s:.1f} s",
            "-" if summary.left_over_at_exit is None else str(summary.left_over_at_exit),
        )
    view.caption = Text(f"{result.verdict}: {result.reason}.")
    view.caption_justify = "left"
    return view


def _nsys(result: Result) -> str:
    return "STAND-IN nsys" if result.nsys.kind == "stand-in" else result.nsys.version
