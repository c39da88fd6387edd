"""The flush-race experiment on real Ray: with the stand-in every outcome, with nsys a small report in three arms."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_processes import marked

from repro.progress import Progress
from repro.ray_bugs import flush_race
from repro.ray_bugs.flush_model import SCHEMA, Arm, RepeatRecord, Result
from repro.results import read_json

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """No process that this test started is alive after it."""
    yield
    assert not [process.cmdline() for process in marked(f"{os.getpid()}:")]


@pytest.fixture
def race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run arms with the stand-in and knobs for it; its exports take a second."""

    def new_folder() -> Path:
        return tmp_path / f"out-{len(list(tmp_path.iterdir()))}"

    def run(*arms: Arm, actors: int = 1, image: str | None = None, **knobs: str) -> Result:
        for name, value in {"EXPORT_S": "1", **knobs}.items():
            monkeypatch.setenv(f"NSYS_STAND_IN_{name}", value)
        result, out = flush_race.run(
            list(arms), 1, "stand-in", 0.1, new_folder(), Progress(quiet=True), actors=actors, image=image
        )
        assert [repeat.error for repeat in result.results] == [None] * len(arms)
        written = read_json(out / "flush_race.json", Result, SCHEMA)
        assert written == result
        return result

    return run


def _only(result: Result) -> RepeatRecord:
    (repeat,) = result.results
    return repeat


def test_a_driver_that_waits_keeps_the_report(race) -> None:
    repeat = _only(race("stock+wait"))
    assert repeat.outcome == "written"
    assert repeat.reports[0].bytes == 100_000
    assert repeat.work is not None and repeat.work.reads == flush_race.STAND_IN_EVENTS
    assert repeat.reports[0].ready_s is not None and repeat.reports[0].ready_s < 0


def test_stock_is_late_and_its_exporter_outlives_the_driver(race) -> None:
    repeat = _only(race("stock+immediate", actors=2, EXPORT_S="8"))
    assert [report.outcome for report in repeat.reports] == ["late", "late"]
    assert repeat.outcome == "late"
    assert {report.at_return for report in repeat.reports} <= {"missing", "empty", "incomplete"}
    assert repeat.left_over_at_exit
    assert repeat.ended_by_us == []


@pytest.mark.parametrize("mode", ["empty", "partial", "corrupt", "missing"])
def test_what_becomes_of_a_report(race, mode: str) -> None:
    repeat = _only(race("stock+immediate", MODE=mode))
    assert repeat.outcome == mode
    assert (repeat.reports[0].export_error is not None) == (mode == "corrupt")


def test_a_group_kill_loses_the_report_for_good(race) -> None:
    """A race: where the raylet is killed before it kills the group, the report still comes late."""
    lost = False
    for _ in range(5):
        repeat = _only(race("stock+immediate", GROUP="shared", EXPORT_S="5"))
        assert repeat.outcome in ("missing", "empty", "partial", "corrupt", "late")
        assert repeat.ended_by_us == []
        lost = repeat.outcome != "late"
        if lost:
            break
    assert lost


def test_an_exporter_that_hangs_is_ended_by_the_kit(race, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush_race, "LATE_LIMIT_S", 3.0)
    repeat = _only(race("stock+immediate", MODE="hang"))
    assert repeat.outcome == "corrupt"
    assert any("nsys" in command for command in repeat.ended_by_us)


@pytest.mark.needs("g++")
def test_the_fix_keeps_what_stock_loses(race) -> None:
    result = race("stock+immediate", "fixed+immediate", actors=2, EXPORT_S="4")
    stock, fixed = result.results
    assert stock.outcome == "late"
    assert [report.outcome for report in fixed.reports] == ["written", "written"]
    assert fixed.left_over_at_exit == 0
    assert result.verdict == "reproduced"
    assert result.exit_status == 0


@pytest.mark.needs("nsys", "g++")
def test_a_small_real_report(tmp_path: Path) -> None:
    arms: tuple[Arm, ...] = ("stock+wait", "stock+immediate", "fixed+immediate")
    result, out = flush_race.run(arms, 1, "real", 3, tmp_path / "out", Progress(quiet=True))
    waited, stock, fixed = result.results
    assert [repeat.error for repeat in result.results] == [None] * 3
    assert (waited.outcome, stock.outcome, fixed.outcome) == ("written", "late", "written")
    assert stock.reports[0].at_return in ("missing", "empty", "incomplete")
    assert "STAND-IN" not in (out / "flush_race.md").read_text()
    assert (out / "logs" / "stock+immediate.1.raylet.out").exists()


@pytest.mark.needs("docker")
def test_a_container_takes_its_reports_along(race) -> None:
    image = os.environ.get("REPRO_TEST_IMAGE")
    if image is None:
        pytest.skip("REPRO_TEST_IMAGE names no image (make image builds one)")
    repeat = _only(race("container", image=image, EXPORT_S="20"))
    assert repeat.outcome in ("missing", "empty", "partial", "corrupt")  # corrupt: cut off while it was written
    assert repeat.left_over_at_exit is None


def test_a_driver_that_fails_is_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_STAND_IN_MODE", "no such mode")
    monkeypatch.setattr(flush_race, "START_LIMIT_S", 30.0)
    result, out = flush_race.run(["stock+immediate"], 2, "stand-in", 0.1, tmp_path / "out", Progress(quiet=True))
    repeat = _only(result)  # the second repeat is not tried
    assert repeat.outcome is None
    assert repeat.error is not None and "starting the profiled actors" in repeat.error
    assert result.verdict == "inconclusive"
    assert json.loads((out / "flush_race.json").read_text())["results"][0]["error"] == repeat.error
