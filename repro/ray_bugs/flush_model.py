"""What the flush-race experiment records, and how reports, repeats and the whole are judged. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from pydantic import Field

from repro.ray_bugs.flush_driver import FileState
from repro.ray_bugs.result import ExperimentResult, Model, Verdict

SCHEMA: Final = "repro.flush_race/1"

Arm = Literal["stock+wait", "stock+immediate", "fixed+immediate", "container"]
ARMS: Final[tuple[Arm, ...]] = get_args(Arm)
TEARDOWNS: Final[Mapping[Arm, str]] = {
    "stock+wait": "stock Ray; the driver ends its actors, waits for their profilers, then calls ray.shutdown()",
    "stock+immediate": "stock Ray; ray.shutdown() at once",
    "fixed+immediate": "Ray with the flush window; ray.shutdown() at once",
    "container": "stock Ray; ray.shutdown() at once; the driver is a container's main process",
}

State = Literal["written", "incomplete", "empty", "partial", "missing", "corrupt"]
"""A report at a moment. incomplete: it still changed afterwards; partial: nsys left only its raw stream (.qdstrm);
corrupt: final, but ``nsys export`` refuses it."""
Outcome = Literal["written", "late", "empty", "partial", "missing", "corrupt"]
"""What became of a report. written: whole when ray.shutdown() returned; late: whole only afterwards."""
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
_WORSE: Final[tuple[Outcome, ...]] = ("written", "late", "partial", "corrupt", "empty", "missing")


class NsysRecord(Model):
    kind: Literal["real", "stand-in"]
    version: str


class ReportRecord(Model):
    """One actor's report."""

    name: str
    at_return: State
    at_exit: State
    later: State
    outcome: Outcome
    bytes: int | None = None
    ready_s: float | None = None
    """Last write to it, in seconds after the shutdown began; negative is before."""
    export_error: str | None = None


class WorkRecord(Model):
    """What one actor did under the profiler."""

    reads: int
    """Traced system calls."""
    nvtx: bool
    """Whether it marked NVTX ranges; it needs the package nvtx for them."""
    kernels: int
    """CUDA kernels; none without a GPU."""


class RepeatRecord(Model):
    """One driver. ``error``: why its reports were not judged; the other fields are what was seen until then."""

    arm: Arm
    repeat: int
    outcome: Outcome | None = None
    """The worst of its reports."""
    reports: list[ReportRecord] = Field(default_factory=list)
    work: WorkRecord | None = None
    """Of its first actor; they all do the same."""
    shutdown_s: float | None = None
    """Duration of ``ray.shutdown()``."""
    left_over_at_exit: int | None = None
    """Processes of the repeat that outlived the driver; None for a container, which takes them along."""
    ended_by_us: list[str] = Field(default_factory=list)
    """Command lines of those that had to be ended when the wait for them ran out."""
    error: str | None = None


class ArmRecord(Model):
    """An arm that was asked for; ``skipped``: why it could not run on this machine."""

    arm: Arm
    skipped: str | None = None


class Result(ExperimentResult):
    """``flush_race.json``. Reproduced: stock+immediate lost reports and fixed+immediate kept all of them."""

    nsys: NsysRecord
    report_mb: float
    """Size of a report that was aimed at, in MB of 1e6 bytes."""
    actors: int
    """Profiled actors of a repeat."""
    repeats: int
    arms: list[ArmRecord]
    results: list[RepeatRecord] = Field(default_factory=list)


@dataclass(frozen=True)
class Observation:
    """Files of one repeat by name at the three moments, and ``streams``, the raw streams left in the end."""

    expected: Sequence[str]
    at_return: Mapping[str, FileState]
    at_exit: Mapping[str, FileState]
    later: Mapping[str, FileState]
    streams: int
    shutdown_wall_ns: int


def judge(seen: Observation, export_problem: Callable[[str], str | None]) -> list[ReportRecord]:
    """Judge each expected report. ``export_problem(name)`` says why ``nsys export`` refuses a file, or None."""
    records = []
    for name in seen.expected:
        final = seen.later.get(name)
        problem = export_problem(name) if final and final["bytes"] else None

        def state(moment: Mapping[str, FileState], name: str = name, problem: str | None = problem) -> State:
            file, last = moment.get(name), seen.later.get(name)
            if not file or not file["bytes"]:
                if moment is seen.later and seen.streams:
                    return "partial"
                return "empty" if file else "missing"
            if file != last:
                return "incomplete"
            return "corrupt" if problem else "written"

        at_return, later = state(seen.at_return), state(seen.later)
        records.append(
            ReportRecord(
                name=name,
                at_return=at_return,
                at_exit=state(seen.at_exit),
                later=later,
                outcome=_outcome(at_return, later),
                bytes=final["bytes"] if final else None,
                ready_s=(final["mtime_ns"] - seen.shutdown_wall_ns) / 1e9 if final and final["bytes"] else None,
                export_error=problem,
            )
        )
    return records


def _outcome(at_return: State, later: State) -> Outcome:
    if later == "written":
        return "written" if at_return == "written" else "late"
    if later == "incomplete":
        raise ValueError("the last look at a report cannot find that it changed afterwards")
    return later


def worst(reports: Sequence[ReportRecord]) -> Outcome:
    """The outcome of a repeat: that of its worst report."""
    return max((report.outcome for report in reports), key=_WORSE.index)


@dataclass(frozen=True)
class Summary:
    """One arm in numbers. Counts are of reports; ``outcomes`` in the order of ``OUTCOMES``."""

    arm: Arm
    repeats: int
    reports: int
    written_at_return: int
    outcomes: tuple[int, ...]
    smallest_mb: float | None
    shutdown_s: float | None
    """Median."""
    longest_shutdown_s: float | None
    ready_s: float | None
    """Median, of those that became whole."""
    added_s: float | None
    """Largest difference between the end of a shutdown and the last write to its last report."""
    left_over_at_exit: int | None
    ended_by_us: int
    errors: int

    @property
    def lost_at_return(self) -> int:
        return self.reports - self.written_at_return


def summarize(result: Result, arm: Arm) -> Summary:
    """The figures of one arm; a figure that no repeat gave is None."""
    repeats = [repeat for repeat in result.results if repeat.arm == arm]
    judged = [repeat for repeat in repeats if not repeat.error]
    reports = [report for repeat in judged for report in repeat.reports]
    ready = [report.ready_s for report in reports if report.later == "written" and report.ready_s is not None]
    shutdowns = [repeat.shutdown_s for repeat in judged if repeat.shutdown_s is not None]
    added = [
        repeat.shutdown_s - max(0.0, *(report.ready_s or 0.0 for report in repeat.reports))
        for repeat in judged
        if repeat.shutdown_s is not None and repeat.outcome == "written"
    ]
    left = [repeat.left_over_at_exit for repeat in judged if repeat.left_over_at_exit is not None]
    return Summary(
        arm=arm,
        repeats=len(judged),
        reports=len(reports),
        written_at_return=sum(report.at_return == "written" for report in reports),
        outcomes=tuple(sum(report.outcome == outcome for report in reports) for outcome in OUTCOMES),
        smallest_mb=min((report.bytes / 1e6 for report in reports if report.bytes), default=None),
        shutdown_s=statistics.median(shutdowns) if shutdowns else None,
        longest_shutdown_s=max(shutdowns, default=None),
        ready_s=statistics.median(ready) if ready else None,
        added_s=max(added, default=None),
        left_over_at_exit=sum(left) if left else None,
        ended_by_us=sum(len(repeat.ended_by_us) for repeat in repeats),
        errors=len(repeats) - len(judged),
    )


def verdict(result: Result) -> tuple[Verdict, str]:
    """The verdict on the whole experiment, and what it rests on."""
    stock, fixed = summarize(result, "stock+immediate"), summarize(result, "fixed+immediate")
    for arm, needed in ((stock, stock.repeats), (fixed, fixed.repeats)):
        if arm.errors:
            return "inconclusive", f"{arm.arm} failed: {_first_error(result, arm.arm)}"
        if not needed:
            return (
                "inconclusive",
                f"{arm.arm} did not run, and the verdict compares stock+immediate and fixed+immediate",
            )
    if not stock.lost_at_return:
        return (
            "inconclusive",
            f"stock+immediate lost none of its {stock.reports} reports, so that there was nothing to fix; "
            "make them bigger with --report-mb",
        )
    lost = f"stock+immediate lost {stock.lost_at_return} of {stock.reports} reports at the return of ray.shutdown()"
    kept = f"fixed+immediate kept {fixed.written_at_return} of {fixed.reports}"
    return ("not reproduced" if fixed.lost_at_return else "reproduced"), f"{lost}, {kept}"


def _first_error(result: Result, arm: Arm) -> str:
    return next(repeat.error for repeat in result.results if repeat.arm == arm and repeat.error)
