"""How the flush-race experiment judges what it saw, from hand-built observations, and the page it renders."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from docker.errors import APIError
from golden_files import check_golden
from rich.console import Console

from repro.errors import KitError, MachineError, UsageError
from repro.progress import Progress
from repro.ray_bugs import flush_race
from repro.ray_bugs.driving import read_events
from repro.ray_bugs.flush_container import Containers, _nanoseconds
from repro.ray_bugs.flush_driver import FileState, snapshot
from repro.ray_bugs.flush_model import (
    SCHEMA,
    ArmRecord,
    NsysRecord,
    Observation,
    RepeatRecord,
    ReportRecord,
    Result,
    WorkRecord,
    judge,
    summarize,
    verdict,
    worst,
)

VERSIONS = {"real": "NVIDIA Nsight Systems version 2023.4.4", "stand-in": "nsys stand-in 1"}
START_NS = 1_000_000_000_000
WHOLE: FileState = {"bytes": 5000, "mtime_ns": START_NS + 3_000_000_000}
GROWING: FileState = {"bytes": 700, "mtime_ns": START_NS + 1_000_000_000}
EMPTY: FileState = {"bytes": 0, "mtime_ns": START_NS}


def _seen(
    at_return: FileState | None, at_exit: FileState | None, later: FileState | None, streams: int = 0
) -> Observation:
    def files(state: FileState | None) -> dict[str, FileState]:
        return {"r.nsys-rep": state} if state else {}

    return Observation(["r.nsys-rep"], files(at_return), files(at_exit), files(later), streams, START_NS)


def _judge(seen: Observation, problem: str | None = None) -> ReportRecord:
    return judge(seen, lambda name: problem)[0]


@pytest.mark.parametrize(
    ("seen", "problem", "states", "outcome"),
    [
        (_seen(WHOLE, WHOLE, WHOLE), None, ("written", "written", "written"), "written"),
        (_seen(None, None, WHOLE), None, ("missing", "missing", "written"), "late"),
        (_seen(EMPTY, GROWING, WHOLE), None, ("empty", "incomplete", "written"), "late"),
        (_seen(EMPTY, WHOLE, WHOLE), None, ("empty", "written", "written"), "late"),
        (_seen(None, None, None), None, ("missing", "missing", "missing"), "missing"),
        (_seen(EMPTY, EMPTY, EMPTY), None, ("empty", "empty", "empty"), "empty"),
        (_seen(None, EMPTY, EMPTY, streams=1), None, ("missing", "empty", "partial"), "partial"),
        (_seen(None, None, None, streams=1), None, ("missing", "missing", "partial"), "partial"),
        (_seen(WHOLE, WHOLE, WHOLE), "refused", ("corrupt", "corrupt", "corrupt"), "corrupt"),
        (_seen(GROWING, GROWING, GROWING), "refused", ("corrupt", "corrupt", "corrupt"), "corrupt"),
        (_seen(GROWING, GROWING, WHOLE), "refused", ("incomplete", "incomplete", "corrupt"), "corrupt"),
        # A stream beside a whole report is another actor's: it does not make this one partial.
        (_seen(WHOLE, WHOLE, WHOLE, streams=1), None, ("written", "written", "written"), "written"),
    ],
)
def test_judges_a_report_by_what_became_of_it(
    seen: Observation, problem: str | None, states: tuple[str, ...], outcome: str
) -> None:
    report = _judge(seen, problem)
    assert (report.at_return, report.at_exit, report.later) == states
    assert report.outcome == outcome
    assert report.export_error == problem


def test_same_size_at_another_time_is_not_final() -> None:
    touched: FileState = {"bytes": WHOLE["bytes"], "mtime_ns": WHOLE["mtime_ns"] - 1}
    assert _judge(_seen(touched, WHOLE, WHOLE)).at_return == "incomplete"


def test_times_count_from_the_shutdown() -> None:
    assert _judge(_seen(None, None, WHOLE)).ready_s == 3.0
    before: FileState = {"bytes": 10, "mtime_ns": START_NS - 500_000_000}
    assert _judge(_seen(before, before, before)).ready_s == -0.5
    assert _judge(_seen(EMPTY, EMPTY, EMPTY)).ready_s is None


def test_a_repeat_is_as_bad_as_its_worst_report() -> None:
    seen = Observation(["a", "b"], {"a": WHOLE}, {"a": WHOLE}, {"a": WHOLE, "b": WHOLE}, 0, START_NS)
    reports = judge(seen, lambda name: None)
    assert [report.outcome for report in reports] == ["written", "late"]
    assert worst(reports) == "late"


def _report(outcome: str, name: str = "report_7.nsys-rep") -> ReportRecord:
    later = "written" if outcome == "late" else outcome
    at_return = {"written": "written", "late": "missing", "partial": "missing"}.get(outcome, outcome)
    return ReportRecord(
        name=name,
        at_return=at_return,
        at_exit=at_return,
        later=later,
        outcome=outcome,
        bytes=64_000_000 if later in ("written", "corrupt") else None,
        ready_s={"written": 15.25, "late": 16.5}.get(outcome),
        export_error="nsys export ended with 1: bad | file" if outcome == "corrupt" else None,
    )


def _repeat(arm: str, number: int, *outcomes: str, **more: object) -> RepeatRecord:
    reports = [_report(outcome, f"report_{index}.nsys-rep") for index, outcome in enumerate(outcomes, 70)]
    values = {"shutdown_s": 16.5 if arm == "fixed+immediate" else 1.25, "left_over_at_exit": 0, **more}
    return RepeatRecord(arm=arm, repeat=number, outcome=worst(reports) if reports else None, reports=reports, **values)


def _result(*repeats: RepeatRecord, kind: str = "real", skipped: str | None = None) -> Result:
    arms = [ArmRecord(arm=arm) for arm in dict.fromkeys(repeat.arm for repeat in repeats)]
    if skipped:
        arms.append(ArmRecord(arm="container", skipped=skipped))
    return Result(
        schema=SCHEMA,
        created_utc="2026-01-02T03:04:05Z",
        kit_version="0.1.0",
        revision="0123abc",
        versions={"python": "3.11.7", "ray": "2.58.0"},
        machine={"cores": 2, "cpu": "A <CPU> | B", "system": "Linux", "kernel": "6.1"},
        nsys=NsysRecord(
            kind=kind, version="NVIDIA Nsight Systems version 2023.4.4" if kind == "real" else "nsys stand-in 1"
        ),
        report_mb=64,
        actors=max((len(repeat.reports) for repeat in repeats), default=1) or 1,
        repeats=2,
        arms=arms,
        results=list(repeats),
    )


@pytest.mark.parametrize(
    ("repeats", "expected", "said"),
    [
        (
            (_repeat("stock+immediate", 1, "late"), _repeat("fixed+immediate", 1, "written")),
            "reproduced",
            "lost 1 of 1",
        ),
        (
            (_repeat("stock+immediate", 1, "late"), _repeat("fixed+immediate", 1, "late")),
            "not reproduced",
            "kept 0 of 1",
        ),
        (
            (_repeat("stock+immediate", 1, "missing"), _repeat("fixed+immediate", 1, "written", "corrupt")),
            "not reproduced",
            "kept 1 of 2",
        ),
        ((_repeat("stock+immediate", 1, "written"), _repeat("fixed+immediate", 1, "written")), "inconclusive", "none"),
        ((_repeat("stock+immediate", 1, "late"),), "inconclusive", "fixed+immediate did not run"),
        ((_repeat("fixed+immediate", 1, "written"),), "inconclusive", "stock+immediate did not run"),
        (
            (_repeat("stock+immediate", 1, "late"), _repeat("fixed+immediate", 1, error="no raylet")),
            "inconclusive",
            "fixed+immediate failed: no raylet",
        ),
    ],
)
def test_verdict(repeats: tuple[RepeatRecord, ...], expected: str, said: str) -> None:
    result = _result(*repeats)
    result.verdict, result.reason = verdict(result)
    assert result.verdict == expected
    assert said in result.reason
    assert result.exit_status == (0 if expected == "reproduced" else 1)


def test_summary_counts_reports_and_keeps_absent_figures_absent() -> None:
    result = _result(_repeat("fixed+immediate", 1, "written", "late"), _repeat("fixed+immediate", 2, error="hung"))
    summary = summarize(result, "fixed+immediate")
    assert (summary.repeats, summary.reports, summary.written_at_return, summary.errors) == (1, 2, 1, 1)
    assert summary.lost_at_return == 1
    assert summary.outcomes == (1, 1, 0, 0, 0, 0)
    assert summary.ready_s == pytest.approx((15.25 + 16.5) / 2)
    assert summary.added_s is None  # the shutdown did not wait for both
    nothing = summarize(result, "container")
    assert (nothing.shutdown_s, nothing.ready_s, nothing.left_over_at_exit) == (None, None, None)


def test_return_after_the_last_write() -> None:
    summary = summarize(_result(_repeat("fixed+immediate", 1, "written")), "fixed+immediate")
    assert summary.added_s == pytest.approx(16.5 - 15.25)


def _page_result(kind: str) -> Result:
    result = _result(
        _repeat("stock+wait", 1, "written", shutdown_s=1.5, work=WorkRecord(reads=1939393, nvtx=False, kernels=0)),
        _repeat("stock+immediate", 1, "late", left_over_at_exit=3),
        _repeat("stock+immediate", 2, "corrupt", left_over_at_exit=4, ended_by_us=["nsys profile"]),
        _repeat("fixed+immediate", 1, "written"),
        _repeat("fixed+immediate", 2, error="the driver was at 'working' for more than 330 s | <b>", shutdown_s=None),
        kind=kind,
        skipped="no Docker engine answers: [x](y)",
    )
    result.verdict, result.reason = verdict(result)
    return result


def test_page() -> None:
    check_golden("flush_race.md", flush_race.markdown(_page_result("real")))


def test_page_says_stand_in() -> None:
    page = flush_race.markdown(_page_result("stand-in"))
    assert "**STAND-IN.**" in page
    assert "**STAND-IN.**" not in flush_race.markdown(_page_result("real"))


def test_terminal_table_says_stand_in_and_verdict() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(flush_race.table(_page_result("stand-in")))
    text = console.file.getvalue()
    assert "STAND-IN" in text
    assert "inconclusive: fixed+immediate failed" in text
    assert "skipped: no Docker engine answers: [x](y)" in text


def test_parse_arms() -> None:
    assert flush_race.parse_arms("fixed+immediate, stock+wait") == ("stock+wait", "fixed+immediate")
    for wrong in ("", "stock", "stock+wait,none"):
        with pytest.raises(ValueError, match="there is no arm"):
            flush_race.parse_arms(wrong)


@pytest.mark.parametrize(("repeats", "report_mb", "actors"), [(0, None, 1), (1, 0.0, 1), (1, 1.0, 0)])
def test_refuses_values_out_of_range(tmp_path: Path, repeats: int, report_mb: float | None, actors: int) -> None:
    with pytest.raises(UsageError):
        flush_race.run(["stock+wait"], repeats, "stand-in", report_mb, tmp_path, Progress(quiet=True), actors=actors)


def test_never_overwrites_a_result(tmp_path: Path) -> None:
    (tmp_path / "flush_race.json").write_text("{}")
    with pytest.raises(UsageError, match="holds a result"):
        flush_race.run(["stock+wait"], 1, "stand-in", 1, tmp_path, Progress(quiet=True))


def test_container_arm_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    result, out = flush_race.run(["container"], 1, "stand-in", 1, tmp_path / "out", Progress(quiet=True))
    assert result.arms[0].skipped is not None
    assert "no Docker engine answers" in result.arms[0].skipped
    assert "skipped, connecting to the Docker engine: no Docker engine answers" in (out / "flush_race.md").read_text()
    assert result.exit_status == 1


class _FailingArm:
    def __init__(self, *_: object) -> None:
        self.calls = 0

    def run(self, repeat: RepeatRecord, *_: object) -> None:
        raise MachineError("the raylet did not start.", remedy="Look at the log.")


def test_an_arm_ends_with_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush_race, "_ProcessArm", _FailingArm)
    result, _ = flush_race.run(
        ["stock+immediate", "fixed+immediate"], 3, "stand-in", 1, tmp_path / "out", Progress(quiet=True)
    )
    assert [(repeat.arm, repeat.error) for repeat in result.results] == [
        ("stock+immediate", "the raylet did not start. Look at the log."),
        ("fixed+immediate", "the raylet did not start. Look at the log."),
    ]
    assert result.verdict == "inconclusive"


def test_snapshot_sees_reports_and_streams_only(tmp_path: Path) -> None:
    for name in ("report_1.nsys-rep", "empty.nsys-rep", "report_1.qdstrm", "note.txt"):
        (tmp_path / name).write_bytes(b"xx")
    assert snapshot(tmp_path).keys() == {"report_1.nsys-rep", "report_1.qdstrm"}
    assert snapshot(tmp_path / "none") == {}


def test_events_leave_out_half_a_line_and_noise() -> None:
    text = 'noise\n{"phase": "a", "at_s": 1}\n{"phase": "b", "at_s": 2}\n{"phase": "c", "at'
    assert list(read_events(text)) == ["a", "b"]


def test_docker_times_keep_their_nanoseconds() -> None:
    assert _nanoseconds("1970-01-01T00:00:01.5Z") == 1_500_000_000
    assert _nanoseconds("1970-01-01T01:00:00.000000007+01:00") == 7
    with pytest.raises(KitError):
        _nanoseconds("yesterday")


def test_an_engine_that_fails_in_between_is_the_arms_error(tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise APIError("500 Server Error: write /var/lib/docker/x: no space left on device")

    containers = Containers.__new__(Containers)
    containers._client, containers._image = SimpleNamespace(containers=SimpleNamespace(create=full)), None
    (tmp_path / "a.nsys-rep").touch()
    with pytest.raises(MachineError, match="running nsys in a container: the engine's disk is full"):
        containers.export_problem(tmp_path / "a.nsys-rep")


def test_fetches_a_file_with_its_state(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("r.nsys-rep")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"data"))
    status = {"size": 4, "mtime": "1970-01-01T00:00:01.25Z"}
    box = SimpleNamespace(get_archive=lambda path: ([buffer.getvalue()], status))
    state = Containers.fetch(None, box, "/x/r.nsys-rep", tmp_path / "copy")  # type: ignore[arg-type]
    assert state == {"bytes": 4, "mtime_ns": 1_250_000_000}
    assert (tmp_path / "copy").read_bytes() == b"data"
