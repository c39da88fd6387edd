"""The workload without Ray: prep, the stages on a fake clock, the window, and what results say."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from repro.device.clock import FakeClock
from repro.device.emulated import EmulatedDevice, checksum, expected_output
from repro.device.emulated_log import read_log
from repro.device.model import load_model
from repro.device.staging_engine import EmulatedEngineFactory
from repro.nsysdb.model import HTOD, PAGEABLE, PINNED
from repro.workload.gpu_stage import STAGES, InlineStage, OverlapStage, PinnedStage, SplitStage, Window, open_device
from repro.workload.graph import Call, Verified, timing, verify
from repro.workload.pace import Pace
from repro.workload.plan import DevicePlan, WorkloadPlan
from repro.workload.prep import PrepPlan, expected, prepare

PREP = PrepPlan(rows=2, cols=8192, cpu_ms=0.0)
NOMINAL = 2048 * 8192 * 4


def plan(mode: str = "split", *, blocks: int = 3, warmup: int = 1, log: str = "") -> WorkloadPlan:
    return WorkloadPlan(
        mode=mode,
        regime="single-operator",
        blocks=blocks,
        warmup_blocks=warmup,
        matmuls=9,
        nominal_bytes=NOMINAL,
        prep=PREP,
        interval_ms=0.0,
        device=DevicePlan(kind="emulated", model="b200", log=log),
    )


def batch(number: int) -> dict[str, np.ndarray]:
    rows = np.full(PREP.rows, number)
    return {"id": rows, "data": expected(number, PREP), "prep_ns": np.zeros(PREP.rows, np.int64)}


def emulated(log: Path | None = None) -> EmulatedDevice:
    return EmulatedDevice(load_model("b200"), log_path=log, clock=FakeClock())


class TestPrep:
    def test_result_does_not_depend_on_the_time_spent(self) -> None:
        for number in (0, 1, 63, 64, 1000):
            wanted = expected(number, PREP)
            assert np.array_equal(prepare(number, PREP), wanted)
            assert np.array_equal(prepare(number, PrepPlan(PREP.rows, PREP.cols, 3.0)), wanted)

    def test_uses_the_cpu_time_asked_for(self) -> None:
        started_ns = time.thread_time_ns()
        prepare(0, PrepPlan(64, 64, 20.0))
        assert 20e6 <= time.thread_time_ns() - started_ns < 200e6

    def test_neighbouring_batches_differ(self) -> None:
        assert len({checksum(expected(number, PREP)) for number in range(64)}) == 64

    def test_is_float32_of_the_shape_asked_for(self) -> None:
        data = prepare(5, PrepPlan(3, 7, 0.0))
        assert data.shape == (3, 7)
        assert data.dtype == np.float32


class TestPace:
    def setup_method(self) -> None:
        self.now_ms = 0.0
        self.pace = Pace(100.0, now_ns=lambda: round(self.now_ms * 1e6))

    def test_tasks_that_ask_together_get_one_interval_after_the_other(self) -> None:
        assert [self.pace.next_ms() for _ in range(3)] == [100.0, 200.0, 300.0]

    @pytest.mark.parametrize("late_ms", [0.0, 30.0, 99.0])
    def test_the_rate_does_not_depend_on_when_tasks_ask(self, late_ms: float) -> None:
        due_ms = []
        for number in range(5):
            self.now_ms = max(0, number - 1) * 100.0 + late_ms
            due_ms.append(self.now_ms + self.pace.next_ms())
        assert due_ms == [100.0, 200.0, 300.0, 400.0, 500.0]

    def test_lost_time_is_not_caught_up(self) -> None:
        self.now_ms = 1000.0
        assert [self.pace.next_ms() for _ in range(3)] == [0.0, 100.0, 200.0]


class TestWindow:
    def test_first_call_of_the_window_waits_for_every_warm_up_call(self) -> None:
        window = Window(warmup=2)
        release, opened = threading.Event(), threading.Event()

        def slow_warm_up() -> None:
            with window.call():
                release.wait(10)

        def first_inside() -> None:
            with window.call() as number:
                assert number == 2
                opened.set()

        slow = threading.Thread(target=slow_warm_up)
        slow.start()
        with window.call():
            pass
        inside = threading.Thread(target=first_inside)
        inside.start()
        assert not opened.wait(0.1)
        release.set()
        assert opened.wait(10)
        slow.join()
        inside.join()

    def test_without_warm_up_it_is_open_at_once(self) -> None:
        with Window(warmup=0).call() as number:
            assert number == 0


class TestStages:
    @pytest.mark.parametrize("mode", ["inline", "split", "pinned", "overlap"])
    def test_what_comes_out_is_what_the_device_makes_of_the_batch(self, mode: str) -> None:
        stage = STAGES[mode](plan(mode), device=emulated())
        for number in range(4):
            out = stage(batch(number))
            assert checksum(out["data"]) == checksum(expected_output(expected(number, PREP), 9))
            assert out["id"].tolist() == [number] * PREP.rows
            assert out["call"][0] == number

    def idle_and_copies(self, stage_class: type[SplitStage], tmp_path: Path) -> tuple[float, list[tuple[int, int]]]:
        """Idle share over ten batches without any waiting between calls, and (kind, bytes) of the H2D copies."""
        log = tmp_path / "log.jsonl"
        device = emulated(log)
        stage = stage_class(plan(), device=device)
        for number in range(10):
            stage(batch(number))
        device.close()
        capture = read_log([log])
        span_ns = capture.kernels[-1].end_ns - capture.kernels[0].start_ns
        busy_ns = sum(kernel.end_ns - kernel.start_ns for kernel in capture.kernels)
        copies = [(copy.src_kind, copy.bytes) for copy in capture.memcpys if copy.copy_kind == HTOD]
        return 1 - busy_ns / span_ns, copies

    def test_split_copies_pageable_and_naive_pinning_does_not_help(self, tmp_path: Path) -> None:
        split_idle, split_copies = self.idle_and_copies(SplitStage, tmp_path / "split")
        pinned_idle, pinned_copies = self.idle_and_copies(PinnedStage, tmp_path / "pinned")
        assert split_copies == [(PAGEABLE, NOMINAL)] * 10
        assert pinned_copies == [(PINNED, NOMINAL)] * 10
        assert split_idle == pytest.approx(0.27, abs=0.02)
        assert pinned_idle > split_idle

    def test_overlap_gives_each_thread_a_stream(self, tmp_path: Path) -> None:
        log = tmp_path / "log.jsonl"
        device = EmulatedDevice(load_model("b200"), log_path=log)
        stage = OverlapStage(plan(warmup=0), device=device)
        threads = [threading.Thread(target=stage, args=(batch(number),)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        device.close()
        assert len({kernel.stream_id for kernel in read_log([log]).kernels}) == 2

    def test_inline_prepares_inside_the_call(self) -> None:
        stage = InlineStage(plan("inline"), device=emulated())
        out = stage({"id": np.array([7])})
        assert checksum(out["data"]) == checksum(expected_output(expected(7, PREP), 9))
        assert out["prep_ns"][0] > 0

    def test_the_stage_has_the_device_of_its_staging(self, tmp_path: Path) -> None:
        device = DevicePlan("emulated", "b200", str(tmp_path / "log.jsonl"))
        assert open_device(device) is EmulatedEngineFactory(device.model, device.log)().device


class TestVerify:
    def right(self) -> dict[int, list[int]]:
        return {number: [checksum(expected_output(expected(number, PREP), 9))] for number in range(4)}

    def test_right_results(self) -> None:
        total = sum(value for (value,) in self.right().values()) % 2**64
        assert verify(plan(), self.right()) == Verified(expected=total, got=total, wrong=None)

    def test_missing_doubled_wrong_and_foreign_batches_are_named(self) -> None:
        for change, message in (
            ({1: []}, "batch 1 came out 0 times"),
            ({2: self.right()[2] * 2}, "batch 2 came out 2 times"),
            ({3: [5]}, "batch 3 has checksum 0x5"),
            ({9: [1]}, "batch 9 was never put in"),
        ):
            found = verify(plan(), self.right() | change)
            assert (found.wrong or "").startswith(f"wrong results: {message}")
            assert found.got != found.expected

    def test_two_swapped_batches_are_found(self) -> None:
        sums = self.right()
        sums[0], sums[1] = sums[1], sums[0]
        found = verify(plan(), sums)
        assert "batch 0 has checksum" in (found.wrong or "")
        assert found.got == found.expected, "their sum does not show it"


class TestTiming:
    MS = 1_000_000

    def calls(self, *spans: tuple[int, int], first: int = 1) -> list[Call]:
        return [Call(first + i, i, a * self.MS, b * self.MS, 40 * self.MS) for i, (a, b) in enumerate(spans)]

    def test_waiting_is_time_without_a_call(self) -> None:
        result = timing(plan(), self.calls((0, 50), (60, 110), (120, 170)))
        assert (result.wall_s, result.wait_ms, result.call_ms) == pytest.approx((0.17, 20 / 3, 50))
        assert not result.producer_bound
        assert (result.opened_ns, result.closed_ns) == (0, 170 * self.MS)

    def test_calls_that_overlap_count_once(self) -> None:
        result = timing(plan(), self.calls((0, 100), (20, 50), (60, 130)))
        assert (result.wait_ms, result.call_ms) == pytest.approx((0, 130 / 3))

    def test_a_stage_that_waits_over_a_quarter_of_its_work_is_producer_bound(self) -> None:
        assert timing(plan(), self.calls((0, 40), (51, 91))).producer_bound is False
        assert timing(plan(), self.calls((0, 40), (61, 101))).producer_bound is True

    def test_warm_up_calls_are_left_out(self) -> None:
        warm_up = Call(0, 99, -500 * self.MS, -400 * self.MS, 0)
        assert timing(plan(), [warm_up, *self.calls((0, 50))]).wall_s == pytest.approx(0.05)
