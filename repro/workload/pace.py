"""The pace of a source that waits for its data: one batch every ``interval_ms``, however Ray schedules the tasks.

Ray Data starts a task up to 100 ms after the one before it has ended, so a fixed wait a task would make the source's
rate a matter of scheduling, and of the mode. Every task asks one clock instead when its batch is due.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Pace:
    """Gives out the times at which batches are due. A time that nobody asked for is lost: there is no catching up."""

    def __init__(self, interval_ms: float, *, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._interval_ns = interval_ms * 1e6
        self._now_ns = now_ns
        self._last_ns = float(now_ns())

    def next_ms(self) -> float:
        """Time until the next batch is due: ``interval_ms`` after the one before it, or now if that has passed."""
        now_ns = self._now_ns()
        self._last_ns = max(self._last_ns + self._interval_ns, now_ns)
        return (self._last_ns - now_ns) / 1e6


def start(interval_ms: float) -> Any:
    """A ``Pace`` in a Ray actor of its own, which lives as long as its handle. Times stay on its node's clock."""
    import ray

    return ray.remote(num_cpus=0)(Pace).remote(interval_ms)
