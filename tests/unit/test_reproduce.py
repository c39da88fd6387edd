"""``reproduce`` around fake captures: folders, continuing, locks, errors in the middle, exit statuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_models import IDLE, analysis, capture_record, run_record

from repro import reproduce as room
from repro.analysis.model import Analysis
from repro.cli import main
from repro.errors import MachineError, NoGpuActivityError, NotReproducedError
from repro.progress import Progress
from repro.report import figures
from repro.results import RunDir, RunRecord, sha256_of
from repro.spec import RunSpec

FLAGS = ["reproduce", "--device=emulated", "--profiles=inline,split"]


class Fake:
    """A capture and an analysis that take no time. ``stop_after`` captures, ``error`` is raised."""

    def __init__(self) -> None:
        self.captured: list[str] = []
        self.analysed: list[str] = []
        self.folders: list[Path] = []
        self.stop_after = 99
        self.error: BaseException | None = None
        self.no_kernels: set[str] = set()
        self.idle = {name: idle_pct for name, (idle_pct, _) in IDLE.items()}
        self.during: Callable[[], None] = lambda: None

    def capture_run(
        self, spec: RunSpec, run: RunDir, *, fresh: bool, progress: Progress, address: str | None = None
    ) -> RunRecord:
        self.folders.append(run.root)
        self.during()
        if run.run_json.exists() and not fresh:
            record = run.read()
        else:
            record = run_record(run=run.root.name, spec=spec, revision=room.revision(), versions=room.versions())
        have = {(capture.profile, capture.repeat) for capture in record.captures}
        for repeat in range(1, spec.repeats + 1):
            for name in spec.profiles:
                if (name, repeat) in have:
                    continue
                if self.stop_after == 0 and self.error:
                    run.write(record)
                    raise self.error
                self.stop_after -= 1
                path = run.profile_path(name, repeat)
                path.parent.mkdir(exist_ok=True)
                path.write_text(f"{name} {repeat}")
                self.captured.append(RunDir.stem(name, repeat))
                file = str(path.relative_to(run.root))
                record.captures.append(capture_record(name, repeat, file=file, sha256=sha256_of(path)))
        run.write(record)
        return record

    def analyze(self, path: Path, device_id: int | None = None) -> Analysis:
        self.analysed.append(path.stem)
        name = path.stem.partition(".")[0]
        if name in self.no_kernels:
            raise NoGpuActivityError(f"{path.name} holds no kernels.")
        return analysis(name, idle_pct=self.idle[name], sha256=sha256_of(path))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    made = Fake()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(room, "capture_run", made.capture_run)
    monkeypatch.setattr(room, "analyze", made.analyze)
    monkeypatch.setattr(figures, "draw", lambda model: [])
    return made


def test_a_run_is_captured_analysed_and_rendered(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FLAGS) == 0
    assert fake.captured == fake.analysed == ["inline", "split"]
    out, err = capsys.readouterr()
    report = Path(out.splitlines()[-1].removeprefix("Report: "))
    assert "holds on the emulated device" in report.read_text()
    assert "EMULATED device, model b200 (asked for)" in err
    assert report.parent.parent == Path("results")


def test_a_finished_run_is_not_touched(fake: Fake) -> None:
    assert main(FLAGS) == 0
    before = {path: path.read_bytes() for path in Path("results").rglob("*") if path.is_file()}
    assert main(FLAGS) == 0
    assert len(set(fake.folders)) == 2
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (MachineError("Ray died."), 3), (NotReproducedError("Wrong sum."), 1)],
    ids=lambda value: type(value).__name__,
)
def test_an_unfinished_run_is_continued(fake: Fake, error: BaseException, status: int) -> None:
    fake.error, fake.stop_after = error, 1
    assert main(FLAGS) == status
    fake.error = None
    assert main(FLAGS) == 0
    assert fake.captured == ["inline", "split"]
    assert len(set(fake.folders)) == 1


@pytest.mark.parametrize("moment", ["analyze", "write_report"])
@pytest.mark.parametrize("out", [[], ["--out=run"]])
def test_an_interrupt_after_the_captures_loses_none(
    fake: Fake, moment: str, out: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(room, moment, interrupt)
        assert main([*FLAGS, *out]) == 130
    assert f"Interrupted. Finished profiles are kept in {fake.folders[0]};" in capsys.readouterr().err
    assert main([*FLAGS, *out]) == 0
    assert fake.captured == fake.analysed == ["inline", "split"]
    assert len(set(fake.folders)) == 1
    if not out:
        assert main(FLAGS) == 0, "that one was finished: a new run"
        assert len(set(fake.folders)) == 2


def test_a_stale_report_does_not_finish_a_run(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.error, fake.stop_after = MachineError("Ray died."), 1
    assert main(FLAGS) == 3
    fake.error = KeyboardInterrupt()
    with monkeypatch.context() as patch:
        patch.setattr(room, "write_report", lambda run_dir: (_ for _ in ()).throw(KeyboardInterrupt))
        fake.stop_after = 99
        assert main(FLAGS) == 130
    assert main(FLAGS) == 0
    assert len(set(fake.folders)) == 1
    assert "split: not captured" not in (fake.folders[0] / "report.md").read_text()


def test_an_interrupt_before_anything_was_kept_promises_nothing(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    fake.during = interrupt
    assert main([*FLAGS, "--out=run"]) == 130
    assert "kept" not in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_folder_that_is_removed_meanwhile_hides_no_error(fake: Fake) -> None:
    def remove() -> None:
        (Path("run") / room.LOCK).unlink()
        Path("run").rmdir()
        raise MachineError("Ray died.")

    fake.during = remove
    assert main([*FLAGS, "--out=run"]) == 3


def test_fresh_and_other_specifications_do_not_continue(fake: Fake) -> None:
    fake.error, fake.stop_after = KeyboardInterrupt(), 1
    assert main(FLAGS) == 130
    fake.error = None
    assert main([*FLAGS, "--blocks=8"]) == 0
    assert main([*FLAGS, "--fresh"]) == 0
    assert len(set(fake.folders)) == 3


def test_another_revision_does_not_continue(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.error, fake.stop_after = KeyboardInterrupt(), 1
    assert main(FLAGS) == 130
    fake.error = None
    monkeypatch.setattr(room, "revision", lambda: "another")
    assert main(FLAGS) == 0
    assert len(set(fake.folders)) == 2


def test_an_error_in_the_middle_still_leaves_a_report(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.error, fake.stop_after = MachineError("Ray died.", remedy="Again."), 1
    assert main(FLAGS) == 3
    out, err = capsys.readouterr()
    assert err.endswith("error: Ray died. Again.\n")
    text = Path(out.splitlines()[-1].removeprefix("Report: ")).read_text()
    assert "split: not captured, the run stopped before it" in text


def test_without_any_profile_there_is_no_report(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.error, fake.stop_after = MachineError("Ray did not start."), 0
    assert main(FLAGS) == 3
    assert not capsys.readouterr().out
    assert not list(Path("results").rglob("report.md"))
    fake.error = None
    assert main(FLAGS) == 0
    assert len(set(fake.folders)) == 1


def test_a_profile_without_kernels_is_status_4_and_is_analysed_again(fake: Fake) -> None:
    fake.no_kernels = {"split"}
    assert main([*FLAGS, "--out=run"]) == 4
    record = RunDir(Path("run")).read()
    assert [capture.error for capture in record.captures] == [None, "analysis: split.sqlite holds no kernels."]
    assert "failed: analysis: split.sqlite holds no kernels." in Path("run/report.md").read_text()
    fake.no_kernels = set()
    assert main([*FLAGS, "--out=run"]) == 0
    assert fake.analysed == ["inline", "split", "split"]
    assert [capture.error for capture in RunDir(Path("run")).read().captures] == [None, None]


@pytest.mark.parametrize(("split", "status"), [(40.0, 0), (61.5, 1), (65.0, 1)])
def test_a_claim_that_does_not_hold_is_status_1(fake: Fake, split: float, status: int) -> None:
    fake.idle["split"] = split
    assert main(FLAGS) == status


def test_a_folder_in_use_is_refused_or_passed_over(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.error, fake.stop_after = KeyboardInterrupt(), 1
    assert main(FLAGS) == 130
    busy = fake.folders[0]
    lock = room._lock(busy)
    assert lock is not None
    try:
        assert main([*FLAGS, f"--out={busy}"]) == 2
        assert f"Another process works on {busy}." in capsys.readouterr().err
        fake.error = None
        assert main(FLAGS) == 0
        assert fake.folders[-1] != busy
    finally:
        os.close(lock)


def test_the_folder_is_locked_while_it_is_worked_on(fake: Fake) -> None:
    locks: list[int | None] = []
    fake.during = lambda: locks.append(room._lock(fake.folders[-1]))
    assert main([*FLAGS, "--out=run"]) == 0
    assert locks == [None]


def test_two_runs_in_one_second_get_a_folder_each(fake: Fake) -> None:
    spec = RunSpec(profiles=("inline",), device="emulated")
    with room._open_run(spec, None, fresh=True) as one, room._open_run(spec, None, fresh=True) as two:
        assert one.root != two.root
    assert not list(Path("results").iterdir()), "folders without a run are removed"


@pytest.mark.parametrize("name", ["sp ace é 'q'", "a\nb", "-", "x=y", "[bold]"])
def test_out_may_have_any_name(fake: Fake, name: str) -> None:
    assert main([*FLAGS, f"--out={name}"]) == 0
    assert RunDir(Path(name)).read().run == name
    assert main(["report", f"--run={name}"]) == 0


def test_out_must_be_a_run_or_empty(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    Path("full").mkdir()
    Path("full/thesis.tex").write_text("x")
    Path("file").write_text("x")
    assert main([*FLAGS, "--out=full"]) == 2
    assert main([*FLAGS, "--out=file"]) == 2
    assert main([*FLAGS, "--out=file/below"]) == 2
    assert main([*FLAGS, "--out=\udcff"]) == 2
    assert not fake.folders
    assert sorted(path.name for path in Path("full").iterdir()) == ["thesis.tex"]
    assert "Traceback" not in capsys.readouterr().err


def test_nothing_is_left_where_nothing_was_captured(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> RunRecord:
        raise MachineError("No CUDA.")

    monkeypatch.setattr(room, "capture_run", refuse)
    assert main([*FLAGS, "--out=run"]) == 3
    assert not Path("run").exists()


@pytest.mark.parametrize("flag", ["--device-model=other.toml", "--payload=64"])
def test_flags_of_the_emulated_device_are_refused_on_cuda(
    fake: Fake, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(room, "resolve_device", lambda asked: ("cuda", "found"))
    assert main(["reproduce", "--device=cuda", flag]) == 2
    assert flag.partition("=")[0] in capsys.readouterr().err
    assert not fake.folders


def test_nsys_on_the_emulated_device_is_said_to_see_no_device(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.no_kernels = {"inline", "split"}
    assert main([*FLAGS, "--profiler=nsys"]) == 4
    assert "it sees no CUDA" in capsys.readouterr().err
    assert RunDir(fake.folders[0]).read().spec.profiler == "nsys"


@pytest.mark.parametrize(("asked", "used"), [([], "nsys"), (["--profiler=torch"], "torch")])
def test_profiler_on_cuda(fake: Fake, asked: list[str], used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "resolve_device", lambda asked: ("cuda", "found"))
    specs: list[RunSpec] = []

    def capture_run(spec: RunSpec, *_: Any, **__: Any) -> RunRecord:
        specs.append(spec)
        raise MachineError("No CUDA here.")

    monkeypatch.setattr(room, "capture_run", capture_run)
    assert main(["reproduce", "--device=cuda", *asked]) == 3
    assert specs[0].profiler == used
