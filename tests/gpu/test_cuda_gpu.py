"""The CUDA device on a GPU: the rules of ``repro.device.protocol``, exact results, calibration, torch's recorder."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from repro.capture.torch_profiler import read_trace
from repro.device.cuda import CudaDevice, expected_output
from repro.nsysdb.model import DTOH, HTOD, PAGEABLE, PINNED
from repro.workload.calibrate import GpuRequest, calibrate
from repro.workload.gpu_stage import STAGES
from repro.workload.graph import checksum, verify
from repro.workload.plan import DevicePlan, WorkloadPlan
from repro.workload.prep import PrepPlan, expected

pytestmark = pytest.mark.needs("gpu")
ROWS, COLS, INNER = 2048, 8192, 4096


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice(inner=INNER)


def batch(number: int = 3) -> np.ndarray:
    return expected(number, PrepPlan(ROWS, COLS, 0.0))


def test_nine_matmuls_of_a_published_batch_are_exact(device: CudaDevice) -> None:
    stream = device.new_stream()
    array = device.copy_h2d(batch(), stream)
    for _ in range(9):
        array = device.matmul(array, stream)
    assert device.copy_d2h(array, stream).tobytes() == expected_output(batch(), 9, INNER).tobytes()


def test_pinned_copies_return_before_earlier_work_is_done_and_pageable_ones_after(device: CudaDevice) -> None:
    stream = device.new_stream()
    pinned = device.pin_empty((ROWS, COLS), np.float32)
    pinned.array[...] = batch()
    warm = device.copy_h2d(pinned, stream)
    for _ in range(3):
        device.matmul(warm, stream)
    device.synchronize()
    for _ in range(100):
        device.matmul(warm, stream)
    device.copy_h2d(pinned, stream)
    event = stream.record_event()
    assert not event.query(), "a pinned copy waited for the kernels before it"
    device.copy_h2d(batch(), stream)
    assert event.query(), "a pageable copy did not wait for its stream"
    stream.synchronize()
    pinned.free()


def test_an_event_orders_streams_and_memory_is_not_reused_too_early(device: CudaDevice) -> None:
    copies, kernels = device.new_stream(), device.new_stream()
    outputs = []
    for number in range(8):
        array = device.copy_h2d(batch(number), copies)
        kernels.wait_event(copies.record_event())
        for _ in range(3):
            array = device.matmul(array, kernels)
        outputs.append(device.copy_d2h(array, kernels))
    for number, output in enumerate(outputs):
        assert output.tobytes() == expected_output(batch(number), 3, INNER).tobytes()


def test_a_waiting_thread_sleeps(device: CudaDevice) -> None:
    stream = device.new_stream()
    array = device.copy_h2d(batch(), stream)
    for _ in range(200):
        device.matmul(array, stream)
    started, started_cpu = time.monotonic(), time.thread_time()
    stream.synchronize()
    waited = time.monotonic() - started
    assert time.thread_time() - started_cpu < 0.5 * waited


def test_calibration_is_within_its_steps_of_the_wanted_time() -> None:
    facts = calibrate(GpuRequest(rows=ROWS, cols=COLS, matmul_ms=39 / 9))
    assert 0.5 < facts.matmul_ms / (39 / 9) < 2.0, facts
    assert facts.copies.pinned_h2d_gb_per_s > facts.copies.pageable_h2d_gb_per_s > 0.5
    assert facts.copies.pinned_d2h_gb_per_s > 0.5


@pytest.mark.parametrize("mode", ["inline", "split", "pinned", "overlap"])
def test_a_recorded_stage_is_what_its_mode_says(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.device.torch_recorder.report_folder", lambda: tmp_path)
    prep = PrepPlan(ROWS, COLS, 5.0)
    plan = WorkloadPlan(
        mode=mode,  # type: ignore[arg-type]
        regime="single-operator",
        blocks=4,
        warmup_blocks=2,
        matmuls=9,
        nominal_bytes=ROWS * COLS * 4,
        prep=prep,
        interval_ms=0.0,
        device=DevicePlan(kind="cuda", model="", log="", inner=INNER),
        profiler="torch",
        stem=mode,
    )
    stage = STAGES[mode](plan)
    sums = {}
    for number in range(6):
        data = {} if mode == "inline" else {"data": batch(number), "prep_ns": np.zeros(ROWS)}
        sums[number] = [checksum(stage({"id": np.full(ROWS, number), **data})["data"])]
    assert verify(plan, sums).wrong is None
    (trace,) = tmp_path.iterdir()
    capture = read_trace(trace)
    assert len(capture.kernels) >= 4 * 9
    kinds = {(copy.copy_kind, copy.src_kind if copy.copy_kind == HTOD else copy.dst_kind) for copy in capture.memcpys}
    assert kinds == {(HTOD, PINNED if mode == "pinned" else PAGEABLE), (DTOH, PAGEABLE)}
    ranges = [one.text for one in capture.nvtx if one.text.startswith("batch")]
    assert sorted(ranges) == [f"batch {number}" for number in range(2, 6)]
