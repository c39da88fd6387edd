"""CPU preparation of one batch: a fixed amount of work on every element, and its calibration.

``prepare`` fills a batch with whole numbers and walks over it ``passes`` times (``x = PIVOT - x``, exact in float32
for these values), so the result is known for every batch without repeating the work. ``calibrate`` finds the number
of passes that costs the wanted CPU time. On the nominal 2048 x 8192 float32 a pass streams the whole 64 MiB; when
fewer rows travel, each pass streams those and there are more passes: the CPU time stays, the memory traffic
is that of a smaller working set.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

PIVOT = np.float32(1021)
_PERIOD = 251
_BATCHES = 64
_MAX_PASSES = 1_000_000


@dataclass(frozen=True)
class PrepPlan:
    """Shape of a batch and the work on it. ``cpu_ms`` is what ``passes`` cost when calibrated."""

    rows: int
    cols: int
    passes: int
    cpu_ms: float


def prepare(batch: int, plan: PrepPlan) -> np.ndarray:
    """Batch number ``batch``: float32 of ``rows`` x ``cols``, after ``plan.passes`` passes over it."""
    data = _template(plan.rows, plan.cols) + np.float32(batch % _BATCHES)
    for _ in range(plan.passes):
        np.subtract(PIVOT, data, out=data)
    return data


def expected(batch: int, plan: PrepPlan) -> np.ndarray:
    """What ``prepare`` returns, from its closed form."""
    data = _template(plan.rows, plan.cols) + np.float32(batch % _BATCHES)
    return PIVOT - data if plan.passes % 2 else data


def calibrate(rows: int, cols: int, prep_ms: float, *, tries: int = 5) -> PrepPlan:
    """The number of passes for which ``prepare`` takes ``prep_ms`` of this thread's CPU time.

    Doubles the passes until they cost that much, then interpolates between the last two medians of ``tries``. A batch
    whose bare filling costs more gets 0 passes; ``cpu_ms`` says what it comes to.
    """
    low, low_ms = 0, _median_cpu_ms(rows, cols, 0, tries)
    if low_ms >= prep_ms:
        return PrepPlan(rows, cols, 0, low_ms)
    high = 1
    while (high_ms := _median_cpu_ms(rows, cols, high, tries)) < prep_ms and high < _MAX_PASSES:
        low, low_ms, high = high, high_ms, high * 2
    share = min(1.0, max(0.0, (prep_ms - low_ms) / (high_ms - low_ms))) if high_ms > low_ms else 1.0
    passes = low + round(share * (high - low))
    return PrepPlan(rows, cols, passes, _median_cpu_ms(rows, cols, passes, tries))


def _median_cpu_ms(rows: int, cols: int, passes: int, tries: int) -> float:
    plan = PrepPlan(rows, cols, passes, 0.0)
    prepare(0, plan)  # the first one pays for the template and for fresh memory
    samples = []
    for batch in range(tries):
        started = time.thread_time_ns()
        prepare(batch, plan)
        samples.append((time.thread_time_ns() - started) / 1e6)
    return float(np.median(samples))


@lru_cache(maxsize=1)
def _template(rows: int, cols: int) -> np.ndarray:
    return (np.arange(rows * cols, dtype=np.uint32) % _PERIOD).astype(np.float32).reshape(rows, cols)
