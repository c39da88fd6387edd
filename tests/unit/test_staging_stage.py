"""The staged GPU stage and the options it is given, without Ray."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from staging_fakes import load, patched_source

from repro.device.emulated import expected_output
from repro.device.emulated_log import read_log
from repro.errors import MachineError
from repro.workload.gpu_stage import StagedStage
from repro.workload.plan import DevicePlan, WorkloadPlan
from repro.workload.staging import staging_options

staging = load(patched_source())
ROWS, COLS, SCALE = 8, 64, 16


def plan(tmp_path: Path, **changes: Any) -> WorkloadPlan:
    values: dict[str, Any] = dict.fromkeys(WorkloadPlan.__dataclass_fields__)
    values |= {
        "mode": "staged",
        "regime": "compute-bound",
        "blocks": 3,
        "warmup_blocks": 2,
        "matmuls": 3,
        "nominal_bytes": ROWS * COLS * 4 * SCALE,
        "prep": SimpleNamespace(rows=ROWS, cols=COLS),
        "device": DevicePlan("emulated", "b200", str(tmp_path / "log.jsonl")),
    }
    return WorkloadPlan(**(values | changes))


@pytest.fixture
def patched_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    data = SimpleNamespace(PinnedStagingOptions=staging.PinnedStagingOptions)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(data=data, __version__="2.58.0"))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray.data", data)  # type: ignore[arg-type]


@pytest.mark.usefixtures("patched_ray")
def test_batches_pass_the_stage_and_the_window_holds_its_own_kernels(tmp_path: Path) -> None:
    this = plan(tmp_path)
    options = staging_options(this)
    stager = staging.BatchStager(options)
    stage = StagedStage(this)
    windows = []
    for number in range(5):
        data = np.full((ROWS, COLS), number, np.float32)
        batch = {"id": np.full(ROWS, number), "data": data, "prep_ns": np.zeros(ROWS, np.int64)}
        out = stager.collect(stager.leave(stage(stager.enter(stager.stage(batch)))))
        np.testing.assert_array_equal(out["data"], expected_output(data, 3))
        windows.append((out["start_ns"][0], out["end_ns"][0]))
    log = read_log([tmp_path / "log.jsonl"], window_ns=(windows[2][0], windows[4][1] + 1))
    assert len(log.kernels) == 3 * 3
    assert stager.stats().h2d_bytes == stager.stats().d2h_bytes == 5 * ROWS * COLS * 4
    stager.close()


@pytest.mark.usefixtures("patched_ray")
@pytest.mark.parametrize(("scale", "slot_bytes"), [(1, 8 << 20), (16, 512 << 10), (3, 2796200)])
def test_the_ring_has_the_nominal_size(tmp_path: Path, scale: int, slot_bytes: int) -> None:
    options = staging_options(plan(tmp_path, nominal_bytes=ROWS * COLS * 4 * scale))
    assert options.slot_bytes == slot_bytes and options.num_slots == 16
    assert options.engine.scale == scale and options.columns == ("data",)


def test_a_ray_without_the_patch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(data=data, __version__="2.58.0"))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray.data", data)  # type: ignore[arg-type]
    with pytest.raises(MachineError, match=r"The Ray 2\.58\.0 here has no pinned staging\."):
        staging_options(plan(tmp_path))


@pytest.mark.usefixtures("patched_ray")
def test_a_cuda_run_stages_with_the_patch_s_own_engine(tmp_path: Path) -> None:
    assert staging_options(plan(tmp_path, device=DevicePlan("cuda", "", ""))).engine == "cuda"
