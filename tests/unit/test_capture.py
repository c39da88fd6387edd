"""Capturing without Ray: the payload rule, the talk with the driver process, what is captured and what is recorded."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from repro.capture import driver, machine
from repro.capture import run as capturing
from repro.capture.messages import Measure, Measured, Ran, Started
from repro.capture.payload import Costs, choose_payload, stage_ms
from repro.capture.run import capture_run, workload_plan
from repro.capture.session import DriverFailedError, Session
from repro.device.clock import FakeClock
from repro.device.emulated import EmulatedDevice
from repro.device.model import load_model
from repro.errors import MachineError, NotReproducedError, UsageError, WaitTimeoutError
from repro.progress import Progress
from repro.results import RunDir
from repro.spec import PROFILES, RunSpec
from repro.workload.gpu_stage import STAGES
from repro.workload.graph import Call, timing
from repro.workload.plan import WorkloadPlan
from repro.workload.prep import PrepPlan, expected

MODEL = load_model("b200")


def spec(**changes: Any) -> RunSpec:
    values: dict[str, Any] = {"profiles": ("inline", "split"), "device": "emulated", "blocks": 2} | changes
    return RunSpec(**values)


class TestPayload:
    def rows(self, cores: int, store_ms_per_mib: float, **changes: Any) -> int:
        return choose_payload(spec(**changes), MODEL, Costs(cores, store_ms_per_mib)).travelled_rows

    def test_two_slow_cores_get_a_cut(self) -> None:
        assert self.rows(2, 1.0) == 128

    def test_many_or_fast_cores_get_everything(self) -> None:
        assert self.rows(16, 1.0) == 2048
        assert self.rows(2, 0.05) == 2048

    def test_is_never_cut_below_a_thirty_second(self) -> None:
        record = choose_payload(spec(prep_ms=500), MODEL, Costs(2, 1.0))
        assert record.travelled_rows == 64
        assert "still cannot" in record.reason

    def test_what_was_asked_for_travels(self) -> None:
        assert self.rows(2, 100.0, payload="full") == 2048
        assert self.rows(2, 100.0, payload=17) == 17
        assert self.rows(2, 0.0, payload=1_000_000) == 2048

    def test_records_both_sizes_cores_and_reason(self) -> None:
        record = choose_payload(spec(), MODEL, Costs(2, 1.0))
        assert (record.nominal_bytes, record.travelled_bytes) == (64 << 20, 4 << 20)
        assert "2 cores" in record.reason
        assert "128 of 2048 rows" in record.reason

    def test_stage_time_is_the_models(self) -> None:
        assert stage_ms(spec(), MODEL) == pytest.approx(39 + 2 * 64 * 2**20 / 8.5e6, abs=0.01)


class TestPlan:
    def test_only_the_producer_bound_pair_paces_its_source(self, tmp_path: Path) -> None:
        prep = PrepPlan(128, 8192, 40.0)
        plans = {name: workload_plan(spec(), one, prep, tmp_path) for name, one in PROFILES.items()}
        assert {name for name, plan in plans.items() if plan.interval_ms} == {"final_split", "final_staged"}

    def test_the_final_pair_differs_in_nothing_but_staging(self, tmp_path: Path) -> None:
        prep = PrepPlan(128, 8192, 40.0)
        split = workload_plan(spec(), PROFILES["final_split"], prep, tmp_path)
        staged = workload_plan(spec(), PROFILES["final_staged"], prep, tmp_path)
        assert dataclasses.replace(staged, mode="split") == split


def session_with(driver: str, tmp_path: Path) -> Session:
    script = tmp_path / "driver.py"
    prelude = "import json,os,sys,time\nanswers=open(int(sys.argv[1]),'w')\n"
    prelude += "def say(**fields):\n    answers.write(json.dumps(fields)+'\\n'); answers.flush()\n"
    script.write_text(prelude + textwrap.dedent(driver))
    return Session(cpus=2, argv=[sys.executable, str(script)])


class TestSession:
    def test_request_and_answer(self, tmp_path: Path) -> None:
        with session_with(
            "request=json.loads(input()); say(kind='started', node=request['kind'])", tmp_path
        ) as session:
            assert session.start().node == "start"

    def test_what_the_driver_prints_is_no_answer(self, tmp_path: Path) -> None:
        driver = """
            print(json.dumps({'kind': 'started', 'node': 'printed'}), flush=True)
            input(); say(kind='started', node='said')
        """
        with session_with(driver, tmp_path) as session:
            assert session.start().node == "said"

    def test_a_driver_that_ends_is_named_with_its_last_words(self, tmp_path: Path) -> None:
        with session_with("input(); print('no space left'); sys.exit(7)", tmp_path) as session:
            with pytest.raises(MachineError, match=r"Ray to start.*status 7: no space left"):
                session.start()

    def test_a_driver_that_ended_before_a_request_is_named_and_leaves_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(MachineError, match=r"Ray to start.*status 9: out of memory"):
            with session_with("print('out of memory'); sys.exit(9)", tmp_path) as session:
                session._tree.root.wait(timeout=30)
                session.start()
        assert not session.folder.exists()

    def test_a_failed_request_is_named_and_says_where_the_logs_are(self, tmp_path: Path) -> None:
        with session_with("input(); say(kind='failed', message='boom'); input()", tmp_path) as session:
            with pytest.raises(DriverFailedError, match=r"object store measurement.*boom") as caught:
                session.measure()
        assert "logs folder" in caught.value.remedy

    def test_a_driver_answers_with_its_failure_and_logs_the_traceback(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail() -> float:
            raise RuntimeError("the store is gone\nand more")

        monkeypatch.setattr("repro.workload.graph.measure_store", fail)
        answers = io.StringIO()
        driver.Driver(answers).handle(Measure())
        assert json.loads(answers.getvalue())["message"] == "RuntimeError: the store is gone"
        assert "Traceback" in capsys.readouterr().err

    def test_silence_ends_in_a_timeout_that_says_what_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("repro.capture.session.START_LIMIT_S", 0.2)
        with session_with("time.sleep(600)", tmp_path) as session:
            with pytest.raises(WaitTimeoutError, match="for Ray to start"):
                session.start()

    def test_leaves_no_process_and_no_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("repro.procs.AFTER_ROOT_S", 0.1)
        driver = "import subprocess; subprocess.Popen([sys.executable,'-c','import time;time.sleep(600)']); input()"
        driver += "; say(kind='started', node=''); time.sleep(600)"
        with session_with(driver, tmp_path) as session:
            session.start()
            pids = [process.pid for process in session._tree.members()]
            assert len(pids) == 2
        assert not session.folder.exists()
        assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)

    def test_ray_address_of_the_caller_does_not_reach_the_driver(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        driver = "input(); say(kind='started', node=str(os.environ.get('RAY_ADDRESS')))"
        with session_with(driver, tmp_path) as session:
            assert session.start().node == "None"


class FakeSession:
    """Runs the GPU stage on a fake clock instead of a pipeline; the pipelines of profiles in ``failing`` fail."""

    captured: list[str]
    wrong: str | None = None
    interrupt_at: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.captured = []

    def __call__(self, **_: object) -> FakeSession:
        return self

    def __enter__(self) -> FakeSession:
        self.folder.mkdir(exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.folder.glob("*.jsonl"):
            file.unlink()

    def start(self) -> Started:
        return Started(node="node")

    def measure(self, gpu: object = None) -> Measured:
        return Measured(store_ms_per_mib=1.0)

    def keep_logs(self, destination: Path) -> None:
        destination.mkdir(parents=True)

    def run(self, plan: WorkloadPlan) -> Ran:
        if len(self.captured) == self.interrupt_at:
            raise KeyboardInterrupt
        self.captured.append(plan.mode)
        clock = FakeClock()
        device = EmulatedDevice(load_model(plan.device.model), log_path=Path(plan.device.log), clock=clock)
        stage = STAGES[plan.mode](plan, device=device)
        calls = []
        for number in range(plan.warmup_blocks + plan.blocks):
            started_ns = clock.now_ns()
            stage({"id": [number], "data": expected(number, plan.prep), "prep_ns": [0]})
            calls.append(Call(number, number, started_ns, clock.now_ns(), 40_000_000))
        device.close()
        window = timing(plan, calls)
        return Ran(
            expected="0x1",
            got="0x1",
            wrong=self.wrong,
            opened_ns=window.opened_ns,
            closed_ns=window.closed_ns,
            wall_s=window.wall_s,
            warmup_s=1.0,
            wait_ms=window.wait_ms,
            call_ms=window.call_ms,
            prep_ms=window.prep_ms,
            producer_bound=window.producer_bound,
        )


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession(tmp_path / "session")
    monkeypatch.setattr(capturing, "Session", session)
    return session


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


# On a stock Ray, so that no test touches the patches of this environment's.
SMALL = {"rows": 8, "cols": 16, "prep_ms": 0.0, "payload": 4, "stock_ray": True}
QUIET = Progress(quiet=True)


class TestCaptureRun:
    def test_records_every_capture_with_its_file(self, fake: FakeSession, run: RunDir) -> None:
        record = capture_run(spec(**SMALL, repeats=2), run, fresh=False, progress=QUIET)
        assert record == run.read()
        assert [(one.profile, one.repeat) for one in record.captures] == [
            ("inline", 1),
            ("split", 1),
            ("inline", 2),
            ("split", 2),
        ]
        assert fake.captured == ["inline", "split", "inline", "split"]
        assert all((run.root / str(one.file)).is_file() for one in record.captures)
        assert record.payload and record.payload.travelled_rows == 4

    def test_the_profile_holds_the_window_and_nothing_of_the_warm_up(self, fake: FakeSession, run: RunDir) -> None:
        import sqlite3

        capture_run(spec(**SMALL, profiles=("split",), blocks=3), run, fresh=False, progress=QUIET)
        with sqlite3.connect(run.profile_path("split")) as db:
            assert db.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone() == (27,)
            assert db.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_MEMCPY").fetchone() == (6,)

    def test_an_interrupt_keeps_what_is_done_and_the_next_run_captures_the_rest(
        self, fake: FakeSession, run: RunDir
    ) -> None:
        fake.interrupt_at = 1
        with pytest.raises(KeyboardInterrupt):
            capture_run(spec(**SMALL), run, fresh=False, progress=QUIET)
        assert [one.profile for one in run.read().captures] == ["inline"]
        kept = run.profile_path("inline").read_bytes()
        fake.interrupt_at = None
        record = capture_run(spec(**SMALL), run, fresh=False, progress=QUIET)
        assert fake.captured == ["inline", "split"]
        assert [one.profile for one in record.captures] == ["inline", "split"]
        assert run.profile_path("inline").read_bytes() == kept

    def test_nothing_missing_starts_nothing(self, fake: FakeSession, run: RunDir) -> None:
        capture_run(spec(**SMALL), run, fresh=False, progress=QUIET)
        fake.captured.clear()
        capture_run(spec(**SMALL), run, fresh=False, progress=QUIET)
        assert fake.captured == []

    def test_a_profile_that_changed_on_disk_is_captured_again(self, fake: FakeSession, run: RunDir) -> None:
        capture_run(spec(**SMALL), run, fresh=False, progress=QUIET)
        run.profile_path("split").write_bytes(b"")
        fake.captured.clear()
        capture_run(spec(**SMALL), run, fresh=False, progress=QUIET)
        assert fake.captured == ["split"]

    def test_another_spec_is_refused_by_name_unless_fresh(self, fake: FakeSession, run: RunDir) -> None:
        capture_run(spec(**SMALL), run, fresh=False, progress=QUIET)
        before = run.run_json.read_bytes()
        with pytest.raises(UsageError, match="another matmuls"):
            capture_run(spec(**SMALL, matmuls=3), run, fresh=False, progress=QUIET)
        assert run.run_json.read_bytes() == before
        assert capture_run(spec(**SMALL, matmuls=3), run, fresh=True, progress=QUIET).spec.matmuls == 3

    def test_wrong_results_leave_a_record_logs_and_no_profile(self, fake: FakeSession, run: RunDir) -> None:
        fake.wrong = "wrong results: batch 3 came out 2 times."
        with pytest.raises(NotReproducedError, match=r"^split: wrong results: batch 3 came out 2 times") as caught:
            capture_run(spec(**SMALL, profiles=("split",)), run, fresh=False, progress=QUIET)
        assert caught.value.exit_status == 1
        assert "batch 3" in str(run.read().captures[0].error)
        assert not run.profile_path("split").exists()
        assert run.logs.is_dir()

    def test_logs_that_cannot_be_kept_do_not_hide_the_failure(
        self, fake: FakeSession, run: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(destination: Path) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(fake, "keep_logs", full)
        fake.wrong = "wrong results: batch 3 came out 2 times."
        said = io.StringIO()
        progress = Progress(Console(file=said, width=200), quiet=True)
        with pytest.raises(NotReproducedError, match="batch 3"):
            capture_run(spec(**SMALL, profiles=("split",)), run, fresh=False, progress=progress)
        assert "could not be kept" in said.getvalue()
        assert "No space left on device" in said.getvalue()

    def test_a_missing_patch_skips_the_profile_and_says_which(self, fake: FakeSession, run: RunDir) -> None:
        record = capture_run(spec(**SMALL, profiles=("final_staged",)), run, fresh=False, progress=QUIET)
        assert "pinned-staging" in str(record.captures[0].skipped)
        assert record.captures[0].file is None


class TestResolveDevice:
    @pytest.fixture(autouse=True)
    def plain_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "nvidia_traces", list)
        monkeypatch.setattr(machine, "cuda_problem", lambda: "PyTorch is not installed")

    def test_auto_without_any_nvidia_is_emulated(self) -> None:
        kind, reason = machine.resolve_device("auto")
        assert kind == "emulated"
        assert "no NVIDIA device" in reason

    def test_auto_with_a_broken_gpu_is_an_error_and_no_fall_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "nvidia_traces", lambda: ["/dev/nvidia0"])
        with pytest.raises(MachineError, match=r"/dev/nvidia0.*PyTorch is not installed") as caught:
            machine.resolve_device("auto")
        assert caught.value.exit_status == 3
        assert machine.resolve_device("emulated")[0] == "emulated"

    def test_auto_with_working_cuda_takes_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "cuda_problem", lambda: None)
        assert machine.resolve_device("auto")[0] == "cuda"
        assert machine.resolve_device("cuda")[0] == "cuda"

    def test_cuda_without_cuda_ends_with_status_3(self) -> None:
        with pytest.raises(MachineError, match="PyTorch is not installed") as caught:
            machine.resolve_device("cuda")
        assert caught.value.exit_status == 3


def test_cores_respect_the_container_quota(tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    file.write_text("150000 100000\n")
    assert machine._cgroup_quota(file) == 1.5
    file.write_text("max 100000\n")
    assert machine._cgroup_quota(file) is None
    assert machine._cgroup_quota(tmp_path / "none") is None
