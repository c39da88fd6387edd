"""The published idle figures come out of the model alone: fake clock, no Ray (reference.md derives them)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from repro.device.clock import FakeClock
from repro.device.emulated import EmulatedDevice
from repro.device.emulated_log import read_log
from repro.device.model import load_model
from repro.device.protocol import DeviceArray
from repro.nsysdb.model import Kernel

BATCH_BYTES = 2048 * 8192 * 4
MATMULS = 9
PREP_NS = 40_000_000
ROWS = np.zeros((1, 8192), np.float32)
"""What travels; accounted at ``BATCH_BYTES``."""


class Pipeline:
    """One GPU stage on the emulated B200, fed as the modes feed it."""

    def __init__(self, log: Path) -> None:
        self.clock = FakeClock()
        self.log = log
        self.device = EmulatedDevice(load_model("b200"), log_path=log, clock=self.clock)
        self.stream = self.device.new_stream()

    def gpu_stage(self) -> None:
        on_device = self.device.copy_h2d(ROWS, self.stream, nominal_bytes=BATCH_BYTES)
        self.compute(on_device)

    def pinned_gpu_stage(self) -> None:
        pinned = self.device.pin_empty(ROWS.shape, ROWS.dtype, nominal_bytes=BATCH_BYTES)
        with self.device.charge_host_copy(BATCH_BYTES):
            np.copyto(pinned.array, ROWS)
        on_device = self.device.copy_h2d(pinned, self.stream)
        self.compute(on_device)
        pinned.free()

    def compute(self, on_device: DeviceArray) -> None:
        for _ in range(MATMULS):
            on_device = self.device.matmul(on_device, self.stream)
        self.device.copy_d2h(on_device, self.stream)

    def kernels(self) -> list[Kernel]:
        self.device.close()
        return read_log([self.log]).kernels


def run_inline(pipeline: Pipeline, batches: int) -> list[Kernel]:
    for _ in range(batches):
        pipeline.clock.advance(PREP_NS)  # prep on the thread that calls the device
        pipeline.gpu_stage()
    return pipeline.kernels()


def run_split(pipeline: Pipeline, batches: int) -> list[Kernel]:
    opened_ns = pipeline.clock.now_ns()
    for number in range(1, batches + 1):
        pipeline.clock.sleep_until(opened_ns + number * PREP_NS)  # prep elsewhere: batch n is there after n preps
        pipeline.gpu_stage()
    return pipeline.kernels()


def run_pinned(pipeline: Pipeline, batches: int) -> list[Kernel]:
    for _ in range(batches):
        pipeline.pinned_gpu_stage()
    return pipeline.kernels()


Run = Callable[[Pipeline, int], list[Kernel]]


def idle_pct(kernels: list[Kernel], end_ns: int | None = None) -> float:
    """Idle share from the first kernel's start to ``end_ns``, by default the last kernel's end."""
    span_ns = (kernels[-1].end_ns if end_ns is None else end_ns) - kernels[0].start_ns
    busy_ns = sum(kernel.end_ns - kernel.start_ns for kernel in kernels)
    return 100 * (1 - busy_ns / span_ns)


@pytest.mark.parametrize(("run", "published"), [(run_inline, 58.9), (run_split, 28.8)])
def test_idle_of_32_batches(tmp_path: Path, run: Run, published: float) -> None:
    """Over whole periods (a batch's kernels and the gap after them), which is what the derivation computes."""
    kernels = run(Pipeline(tmp_path / "log.jsonl"), 33)
    assert len(kernels) == 33 * MATMULS
    whole = kernels[: 32 * MATMULS]
    assert idle_pct(whole, end_ns=kernels[32 * MATMULS].start_ns) == pytest.approx(published, abs=0.5)


@pytest.mark.parametrize(("run", "published"), [(run_inline, 58.9), (run_split, 28.8)])
def test_idle_over_the_kernel_span(tmp_path: Path, run: Run, published: float) -> None:
    """The kit's own definition. A span of n batches has n - 1 gaps: 32 batches read 0.8 points low, 160 hardly."""
    assert idle_pct(run(Pipeline(tmp_path / "a.jsonl"), 160)) == pytest.approx(published, abs=0.5)
    gap_share = published / (100 - published) * 31 / 32
    assert idle_pct(run(Pipeline(tmp_path / "b.jsonl"), 32)) == pytest.approx(
        100 * gap_share / (1 + gap_share), abs=0.5
    )


def test_naive_pinning_is_no_better_than_pageable_copies(tmp_path: Path) -> None:
    """Published 31.4 beside 29.1: the host copy into pinned memory costs what the faster transfer saves."""
    pinned = idle_pct(run_pinned(Pipeline(tmp_path / "pinned.jsonl"), 160))
    assert pinned > idle_pct(run_split(Pipeline(tmp_path / "split.jsonl"), 160))
    assert pinned == pytest.approx(31.4, abs=1.5)
