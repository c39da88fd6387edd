"""CPU preparation of one batch: as many walks over all its elements as fit into the wanted CPU time.

``prepare`` fills a batch with whole numbers and walks over it twice at a time (``x = PIVOT - x``, exact in float32 for
these values, and twice gives ``x`` again) until the thread has used ``cpu_ms``. The time is metered at every batch
because a calibration at the start does not hold: on a shared machine the cost of a walk was seen to change by half
within a minute. On the nominal 2048 x 8192 float32 a walk streams the whole 64 MiB; when fewer rows travel it streams
those and there are more walks: the CPU time stays, the memory traffic is that of a smaller working set.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

PIVOT = np.float32(1021)
_PERIOD = 251
_BATCHES = 64


@dataclass(frozen=True)
class PrepPlan:
    """Shape of a batch and the CPU time of its preparation."""

    rows: int
    cols: int
    cpu_ms: float


def prepare(batch: int, plan: PrepPlan) -> np.ndarray:
    """Batch number ``batch``: float32 of ``rows`` x ``cols``, after at least two walks and ``plan.cpu_ms``."""
    return walk(expected(batch, plan), plan.cpu_ms)


def walk(data: np.ndarray, cpu_ms: float) -> np.ndarray:
    """Walk over ``data``, in place, at least twice and for ``cpu_ms`` of this thread's CPU time."""
    until_ns = time.thread_time_ns() + round(cpu_ms * 1e6)
    while True:
        np.subtract(PIVOT, data, out=data)
        np.subtract(PIVOT, data, out=data)
        if time.thread_time_ns() >= until_ns:
            return data


def expected(batch: int, plan: PrepPlan) -> np.ndarray:
    """What ``prepare`` returns, without the work."""
    return _template(plan.rows, plan.cols) + np.float32(batch % _BATCHES)


@lru_cache(maxsize=1)
def _template(rows: int, cols: int) -> np.ndarray:
    return (np.arange(rows * cols, dtype=np.uint32) % _PERIOD).astype(np.float32).reshape(rows, cols)
