"""The emulated device as a copy engine under the patch's stager, on a fake clock's arithmetic and in real threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from staging_fakes import load, patched_source

from repro.device.emulated import POISON, EmulatedDevice, expected_output
from repro.device.emulated_log import read_log
from repro.device.model import load_model
from repro.device.staging_engine import EmulatedCopyEngine, EmulatedEngineFactory, shared_device
from repro.errors import InputError, UsageError
from repro.nsysdb.model import PINNED
from repro.results import StagingRecord
from repro.workload import staging as workload_staging
from repro.workload.plan import DevicePlan, WorkloadPlan
from repro.workload.staging import StatsLog, read_stats

staging = load(patched_source())
SCALE = 16.0


def engine(tmp_path: Path) -> EmulatedCopyEngine:
    device = EmulatedDevice(load_model("b200"), log_path=tmp_path / "device.jsonl")
    return EmulatedCopyEngine(device, SCALE)


def test_a_batch_travels_in_chunks_at_its_nominal_size(tmp_path: Path) -> None:
    copies = engine(tmp_path)
    device = copies.device
    stager = staging.BatchStager(
        staging.PinnedStagingOptions(slot_bytes=4096, max_pinned_bytes=8192, engine=lambda: copies)
    )
    batch = np.arange(4000, dtype=np.float32).reshape(40, 100)
    columns = stager.enter(stager.stage({"data": batch}))
    result = device.matmul(device.matmul(columns["data"], device.default_stream()), device.default_stream())
    out = stager.collect(stager.leave({"data": result}))
    np.testing.assert_array_equal(out["data"], expected_output(batch, 2))
    stager.close()
    device.close()
    log = read_log([tmp_path / "device.jsonl"])
    to_device = [copy for copy in log.memcpys if copy.src_kind == PINNED]
    assert [copy.bytes for copy in to_device] == [4096 * 16] * 3 + [(16000 - 3 * 4096) * 16]
    assert sum(copy.bytes for copy in log.memcpys) == 2 * 16000 * 16
    # The ring is two slots, so the host copies of four chunks cannot have taken less than the model charges.
    assert stager.stats().host_copy_s >= 2 * 16000 * SCALE / 8.5e9 * 0.99


def test_a_kernel_that_does_not_wait_reads_poison(tmp_path: Path) -> None:
    copies = engine(tmp_path)
    array = copies.empty((64, 64), np.dtype("f4"))
    slot = copies.pin(64 * 64 * 4)
    slot[:] = 1
    copies.copy_h2d(slot, array, 0)
    out = copies.device.copy_d2h(
        copies.device.matmul(array, copies.device.default_stream()), copies.device.default_stream()
    )
    assert (out.view(np.uint8) == POISON).all()


def test_a_kernel_in_the_middle_of_an_upload_reads_what_was_there(tmp_path: Path) -> None:
    copies = engine(tmp_path)
    array = copies.empty((2, 256), np.dtype("u1"))
    slot = copies.pin(256)
    slot[:] = 1
    copies.begin_use([array], copies.copy_h2d(slot, array, 0))
    result = copies.device.matmul(array, copies.device.default_stream())
    copies.device.default_stream().synchronize()
    copies.copy_h2d(slot, array, 256).synchronize()
    out = copies.device.copy_d2h(result, copies.device.default_stream())
    assert (out[0] == 2).all() and (out[1] == POISON + 1).all()


def test_parts_must_lie_inside_and_in_whole_elements(tmp_path: Path) -> None:
    copies = engine(tmp_path)
    array = copies.empty((4,), np.dtype("f4"))
    with pytest.raises(UsageError, match="bytes 8 to 24 are outside an array of 16"):
        copies.copy_h2d(np.zeros(16, np.uint8), array, 8)
    with pytest.raises(UsageError, match="in multiples of 4"):
        copies.copy_h2d(np.zeros(3, np.uint8), array, 0)


def test_the_factory_gives_stage_and_engine_one_device(tmp_path: Path) -> None:
    factory = EmulatedEngineFactory("b200", str(tmp_path / "log.jsonl"), SCALE)
    assert factory == EmulatedEngineFactory("b200", str(tmp_path / "log.jsonl"), SCALE)
    assert factory().device is shared_device("b200", str(tmp_path / "log.jsonl"))


def plan(tmp_path: Path) -> WorkloadPlan:
    values: dict[str, Any] = dict.fromkeys(WorkloadPlan.__dataclass_fields__)
    return WorkloadPlan(**{**values, "device": DevicePlan("emulated", "b200", str(tmp_path / "log.jsonl"))})


def test_statistics_of_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = StatsLog(str(workload_staging.stats_path(plan(tmp_path))), SCALE)
    for time_ns, host_copy_s in ((100, 1.0), (200, 1.5), (300, 1.75)):
        monkeypatch.setattr(workload_staging.time, "monotonic_ns", lambda now=time_ns: now)
        log(staging.PinnedStagingStats(host_copy_s=host_copy_s, pinned_bytes=10, slots=2))
    assert read_stats(plan(tmp_path), (150, 290)) == StagingRecord(host_copy_ms=750.0, pinned_bytes=160, slots=2)
    assert read_stats(plan(tmp_path), (50, 290)).host_copy_ms == 1750.0
    with pytest.raises(InputError, match="holds no staging statistics of the window"):
        read_stats(plan(tmp_path), (400, 500))


def test_statistics_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file or directory"):
        read_stats(plan(tmp_path), (0, 1))


def test_waiting_is_read_from_the_device() -> None:
    assert workload_staging.kernel_wait([0, 80_000_000], [60_000_000, 120_000_000], 2) == (10.0, False)
    assert workload_staging.kernel_wait([0, 90_000_000], [60_000_000, 120_000_000], 2) == (15.0, True)


def test_statistics_are_json(tmp_path: Path) -> None:
    StatsLog(str(tmp_path / "stats"), 2.0)(staging.PinnedStagingStats(batches=1))
    assert json.loads((tmp_path / "stats").read_text())["batches"] == 1
