"""A CUDA run without a GPU: what the driver would answer is made up, the rest of the capture is real."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_nsys_capture import copying, database, report, stand_in, without_diagnostics
from test_nsys_capture_torch import EVENTS, on_device, trace

from repro.analysis import analyze
from repro.capture import nsys, run
from repro.capture.messages import Measured, Ran, StageNode, Started
from repro.cli import main
from repro.errors import KitError, NoGpuActivityError, UsageError
from repro.progress import Progress
from repro.results import RunDir, RunRecord
from repro.spec import RunSpec
from repro.workload.calibrate import CopyRates, GpuFacts, GpuRequest
from repro.workload.plan import WorkloadPlan

H200 = GpuFacts(
    name="NVIDIA H200",
    driver="580.95.05",
    cuda="13.0",
    inner=8192,
    matmul_ms=5.0,
    copies=CopyRates(pageable_h2d_gb_per_s=9, pinned_h2d_gb_per_s=55, pageable_d2h_gb_per_s=8, pinned_d2h_gb_per_s=54),
)


class Driver:
    """Stands for the session: answers as a driver on a node with a GPU would; ``left`` makes the profiler's files."""

    gpu = H200

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.options: dict[str, Any] = {}
        self.requests: list[GpuRequest | None] = []
        self.plans: list[WorkloadPlan] = []
        self.left: Callable[[], list[Path]] = lambda: [trace(folder)]

    def __call__(self, **options: Any) -> Driver:
        self.options = options
        return self

    def __enter__(self) -> Driver:
        self.folder.mkdir(exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> Started:
        return Started(node="own", stage_node=StageNode(node_id="gpu-node", address="10.0.0.2", gpus=8))

    def measure(self, gpu: GpuRequest | None = None) -> Measured:
        self.requests.append(gpu)
        return Measured(store_ms_per_mib=50.0, gpu=self.gpu)

    def keep_logs(self, destination: Path) -> None:
        pass

    def run(self, plan: WorkloadPlan) -> Ran:
        self.plans.append(plan)
        return Ran(
            expected="0x1",
            got="0x1",
            wrong=None,
            opened_ns=0,
            closed_ns=10**9,
            wall_s=1.0,
            warmup_s=1.0,
            wait_ms=1.0,
            call_ms=39.0,
            prep_ms=40.0,
            producer_bound=False,
            files=[str(path) for path in self.left()],
        )


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(tmp_path / "session")
    monkeypatch.setattr(run, "Session", made)
    monkeypatch.setattr(run, "_patches", lambda spec: [])
    return made


def capture(tmp_path: Path, **values: Any) -> tuple[RunDir, RunRecord]:
    spec = RunSpec(**{"profiles": ("split",), "device": "cuda", "profiler": "torch", **values})
    folder = RunDir(tmp_path / "run")
    return folder, run.capture_run(spec, folder, fresh=False, progress=Progress(quiet=True))


def test_a_run_recorded_by_torch(driver: Driver, tmp_path: Path) -> None:
    folder, record = capture(tmp_path)
    assert record.device.model_dump(exclude_none=True) == {"kind": "cuda", "name": "NVIDIA H200", "driver": "580.95.05"}
    assert record.machine["gpu"]["matmul_ms"] == 5.0
    assert driver.options["device"] == "cuda"
    assert driver.options["object_store_bytes"] == record.machine["object_store_bytes"] >= 2 << 30
    (request,) = driver.requests
    assert request
    assert request.matmul_ms == pytest.approx(39 / 9, rel=0.01)
    assert record.payload
    assert record.payload.travelled_rows == 2048, "a slow store must not cut a batch that a GPU copies"
    (plan,) = driver.plans
    assert (plan.device.kind, plan.device.inner, plan.profiler, plan.stem) == ("cuda", 8192, "torch", "split-1")
    (one,) = record.captures
    assert (one.node, one.extra["node_address"]) == ("gpu-node", "10.0.0.2")
    analysis = analyze(folder.profile_path("split"), with_nsys_ai=False)
    assert analysis.kernels == 2
    assert not analysis.emulated


def test_a_run_is_continued_on_the_same_gpu_with_the_same_matmuls(driver: Driver, tmp_path: Path) -> None:
    folder, _ = capture(tmp_path)
    folder.profile_path("split").unlink()
    driver.gpu = H200.model_copy(update={"inner": 4096, "matmul_ms": 4.0})
    _, record = capture(tmp_path)
    assert driver.plans[-1].device.inner == 8192
    assert record.machine["gpu"]["inner"] == 8192
    folder.profile_path("split").unlink()
    driver.gpu = H200.model_copy(update={"name": "NVIDIA L40S"})
    with pytest.raises(UsageError, match="NVIDIA H200, and this GPU is NVIDIA L40S"):
        capture(tmp_path)


@pytest.fixture
def with_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    def use(exported: Path) -> None:
        monkeypatch.setattr(nsys, "ready_nsys", lambda **_: stand_in(tmp_path, copying(exported)))

    return use


def test_a_run_recorded_by_nsys(driver: Driver, tmp_path: Path, with_nsys: Callable[[Path], None]) -> None:
    with_nsys(database(tmp_path / "exported", kernels=5))
    driver.left = lambda: [report(driver.folder)]
    folder, record = capture(tmp_path, profiler="nsys")
    (one,) = record.captures
    assert one.nsys_rep == "profiles/split.nsys-rep"
    assert (folder.root / one.nsys_rep).read_bytes().startswith(b"NVIDIA")
    assert (one.extra["reports_expected"], one.extra["reports_found"]) == (1, ["split.7.nsys-rep"])
    assert analyze(folder.profile_path("split"), with_nsys_ai=False).kernels == 5


def test_nsys_without_kernels_is_quoted(driver: Driver, tmp_path: Path, with_nsys: Callable[[Path], None]) -> None:
    source = without_diagnostics(tmp_path / "exported")
    with closing(sqlite3.connect(source)) as db, db:
        db.execute("INSERT INTO NVTX_EVENTS (start, end, eventType, text) VALUES (1, 2, 60, 'window')")
    with_nsys(source)
    driver.left = lambda: [report(driver.folder)]
    with pytest.raises(NoGpuActivityError, match=r"It said: No CUDA events collected\.") as caught:
        capture(tmp_path, profiler="nsys")
    assert caught.value.exit_status == 4
    assert "CUPTI" in caught.value.remedy
    (one,) = RunDir(tmp_path / "run").read().captures
    assert one.error


@pytest.mark.parametrize(
    ("left", "error"),
    [
        (lambda folder: [], "left 0 traces"),
        (lambda folder: [trace(folder, EVENTS[:2])], "no kernels"),
        (lambda folder: [trace(folder, [*EVENTS, on_device("kernel", "k", "5", "1", 9, device=1)])], "devices 0, 1"),
    ],
    ids=["lost", "CUPTI in use", "several devices"],
)
def test_torch_traces_that_cannot_be_used(
    driver: Driver, tmp_path: Path, left: Callable[[Path], list[Path]], error: str
) -> None:
    driver.left = lambda: left(driver.folder)
    with pytest.raises(KitError, match=error):
        capture(tmp_path)
    (one,) = RunDir(tmp_path / "run").read().captures
    assert one.error
    assert not one.file


def test_more_matmuls_than_can_be_checked_are_refused(driver: Driver, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--matmuls=101"):
        capture(tmp_path, matmuls=101)


def test_cuda_with_everything_missing_is_status_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("repro.reproduce.check_machine", lambda *_, **__: None)
    monkeypatch.setattr("repro.capture.machine.cuda_problem", lambda: "PyTorch is not installed")
    assert main(["reproduce", "--device=cuda"]) == 3
    assert "No CUDA device: PyTorch is not installed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
