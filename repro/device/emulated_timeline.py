"""When each piece of work runs: the discrete-event model behind the emulated device. Pure arithmetic, no clock.

The device has three engines: one for kernels, one copy engine a direction. An operation is *ready* when it was
submitted and everything it comes after (earlier work of its stream, events its stream waits for) has ended. It then
queues at its engine. An engine does one operation at a time, to its end, first ready first served (ties in
order of submission), and never idles while something is ready: work that still waits for an event holds up nobody
else. That is the queueing that Amert et al. ("GPU Scheduling on the NVIDIA TX2", RTSS 2017) found: the
head of each stream enters the FIFO queue of its engine.

What runs before an instant never depends on what is submitted after it, so a schedule computed from the work submitted
so far is final up to now and a forecast beyond.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable
from enum import IntEnum


class Engine(IntEnum):
    COMPUTE = 0
    H2D = 1
    D2H = 2


class Operation:
    """One kernel or copy. ``start_ns`` and ``end_ns`` are a forecast until ``fixed``."""

    __slots__ = (
        "after",
        "correlation_id",
        "duration_ns",
        "effect",
        "end_ns",
        "engine",
        "fixed",
        "lock",
        "log_fields",
        "moved",
        "number",
        "start_ns",
        "stream_id",
        "submitted_ns",
    )

    def __init__(
        self,
        engine: Engine,
        duration_ns: int,
        after: Iterable[Operation] = (),
        *,
        stream_id: int = 0,
        correlation_id: int = 0,
        effect: Callable[[], None] | None = None,
        log_fields: tuple[object, ...] = (),
    ) -> None:
        if duration_ns < 1:
            raise ValueError("an operation takes at least 1 ns")
        self.engine = engine
        self.duration_ns = duration_ns
        self.after = tuple(after)
        self.stream_id = stream_id
        self.correlation_id = correlation_id
        self.log_fields = log_fields
        self.effect = effect
        self.lock = threading.Lock()
        self.moved = False
        """True once ``effect`` has run."""
        self.number = 0
        self.submitted_ns = 0
        self.start_ns = 0
        self.end_ns = 0
        self.fixed = False

    def ended(self, now_ns: int) -> bool:
        return self.fixed and self.end_ns <= now_ns

    def finished(self, now_ns: int) -> bool:
        """Ended, and its bytes have moved."""
        return self.moved and self.ended(now_ns)


class Timeline:
    """Schedules operations. Not thread-safe; times given to it must not decrease."""

    def __init__(self) -> None:
        self._unfixed: list[Operation] = []
        self._free_ns = [0] * len(Engine)
        self._submitted = 0
        self._stale = False

    def submit(self, operation: Operation, now_ns: int) -> None:
        self._submitted += 1
        operation.number = self._submitted
        operation.submitted_ns = now_ns
        self._unfixed.append(operation)
        self._stale = True

    def advance(self, now_ns: int) -> None:
        """Bring the schedule up to date.

        Afterwards ``start_ns`` and ``end_ns`` of every submitted operation are set: final for those that have
        started by ``now_ns``, for the others what they will be unless more is submitted.
        """
        if self._stale:
            self._schedule()
            self._stale = False
        started = [operation for operation in self._unfixed if operation.start_ns <= now_ns]
        if started:
            self._unfixed = [operation for operation in self._unfixed if operation.start_ns > now_ns]
            for operation in started:
                operation.fixed = True
                self._free_ns[operation.engine] = max(self._free_ns[operation.engine], operation.end_ns)

    def _schedule(self) -> None:
        free_ns = list(self._free_ns)
        queues: list[list[tuple[int, int, Operation]]] = [[] for _ in Engine]
        blocked: dict[Operation, int] = {}
        followers: dict[Operation, list[Operation]] = {}

        def enqueue(operation: Operation) -> None:
            ready_ns = max([operation.submitted_ns, *(earlier.end_ns for earlier in operation.after)])
            heapq.heappush(queues[operation.engine], (ready_ns, operation.number, operation))

        for operation in self._unfixed:
            unfixed = [earlier for earlier in operation.after if not earlier.fixed]
            for earlier in unfixed:
                followers.setdefault(earlier, []).append(operation)
            if unfixed:
                blocked[operation] = len(unfixed)
            else:
                enqueue(operation)
        while any(queues):
            # The engine whose next operation starts first: everything that could be ready by then is queued.
            engine = min(
                (engine for engine in Engine if queues[engine]),
                key=lambda engine: max(free_ns[engine], queues[engine][0][0]),
            )
            ready_ns, _, operation = heapq.heappop(queues[engine])
            operation.start_ns = max(free_ns[engine], ready_ns)
            operation.end_ns = free_ns[engine] = operation.start_ns + operation.duration_ns
            for follower in followers.get(operation, ()):
                blocked[follower] -= 1
                if not blocked[follower]:
                    enqueue(follower)
