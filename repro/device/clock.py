"""Clocks for the emulated device: the machine's own, and one that tests turn by hand.

Times are integer nanoseconds. ``RealClock`` is ``time.monotonic_ns``, so times of several processes of one machine
compare. ``FakeClock`` jumps to the instant that is waited for, so the same device code is exact and instant.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

_TOO_SHORT_TO_SLEEP_NS = 50_000
"""A sleep on Linux ends about this much late (the default timer slack), so shorter waits spin."""
_LATENESS_NS = 200_000
"""Sleeps of several milliseconds end later still (100 to 200 us on a virtual machine), so they are cut short by this
and the rest is slept separately."""


class ClockCondition(Protocol):
    """A lock with a wait that ends at an instant or at ``notify_all``, whichever comes first."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def wait_until(self, deadline_ns: int) -> None:
        """Called with the lock held; may return early."""

    def notify_all(self) -> None: ...


class Clock(Protocol):
    def now_ns(self) -> int: ...

    def utc_ns(self) -> int:
        """Wall clock now, nanoseconds since 1970."""

    def sleep_until(self, deadline_ns: int) -> None: ...

    def condition(self) -> ClockCondition: ...


class RealClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def utc_ns(self) -> int:
        return time.time_ns()

    def sleep_until(self, deadline_ns: int) -> None:
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            if left_ns > _TOO_SHORT_TO_SLEEP_NS:
                time.sleep(_nap_s(left_ns))

    def condition(self) -> ClockCondition:
        return _RealCondition()


def _nap_s(left_ns: int) -> float:
    return (left_ns - _LATENESS_NS if left_ns > 2 * _LATENESS_NS else left_ns) / 1e9


class _RealCondition:
    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())

    def __enter__(self) -> object:
        return self._condition.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._condition.__exit__(kind, error, traceback)

    def wait_until(self, deadline_ns: int) -> None:
        left_ns = deadline_ns - time.monotonic_ns()
        if left_ns > 0:
            self._condition.wait(_nap_s(left_ns))

    def notify_all(self) -> None:
        self._condition.notify_all()


class FakeClock:
    """A clock that stands still while code runs and jumps when code waits.

    With one thread, every wait returns at once with the time moved on. ``run`` gives several threads one clock: they
    take turns, one at a time, each until its next wait, in order of their deadlines (ties in order of their waits), so
    a run is deterministic. Such threads may meet in the device and in ``sleep_until`` only: one that blocks in
    anything else keeps its turn and stops the clock.
    """

    def __init__(self, start_ns: int = 1_000_000_000, utc_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_ns = start_ns
        self._utc_offset_ns = utc_ns - start_ns
        self._turn = threading.Condition(threading.Lock())
        self._current: int | None = None
        self._waiting: dict[int, tuple[int, int]] = {}
        """Thread -> (deadline, number of the wait)."""
        self._waits = 0

    def now_ns(self) -> int:
        return self._now_ns

    def utc_ns(self) -> int:
        return self._now_ns + self._utc_offset_ns

    def advance(self, by_ns: int) -> None:
        """Let ``by_ns`` pass in the calling thread (its own work, say)."""
        self.sleep_until(self._now_ns + by_ns)

    def sleep_until(self, deadline_ns: int) -> None:
        me = threading.get_ident()
        with self._turn:
            if self._current not in (None, me):
                raise RuntimeError("a thread that FakeClock.run did not start waits on its clock")
            alone = self._current is None
            self._enqueue(me, deadline_ns)
            self._pass_turn()
            self._turn.wait_for(lambda: self._current == me)
            if alone:
                self._current = None

    def condition(self) -> ClockCondition:
        return _FakeCondition(self)

    def run(self, *bodies: Callable[[], None]) -> None:
        """Run each body in a thread of its own until all have returned; re-raises the first error of any."""
        errors: list[BaseException] = []

        def turn_taker(body: Callable[[], None], started: threading.Event) -> None:
            me = threading.get_ident()
            with self._turn:
                self._enqueue(me, self._now_ns)
                started.set()
                self._turn.wait_for(lambda: self._current == me)
            try:
                body()
            except BaseException as error:
                errors.append(error)
            finally:
                with self._turn:
                    self._pass_turn()

        threads = []
        for body in bodies:
            started = threading.Event()
            thread = threading.Thread(target=turn_taker, args=(body, started), daemon=True)
            thread.start()
            started.wait()
            threads.append(thread)
        with self._turn:
            self._pass_turn()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def wake(self, threads: set[int]) -> None:
        """End the waits of ``threads`` now (their turns come when the caller waits)."""
        with self._turn:
            for thread in threads & self._waiting.keys():
                self._waiting[thread] = (self._now_ns, self._waiting[thread][1])

    def _enqueue(self, thread: int, deadline_ns: int) -> None:
        self._waits += 1
        self._waiting[thread] = (deadline_ns, self._waits)

    def _pass_turn(self) -> None:
        """Give the turn to the thread whose wait ends first and move the time there."""
        if not self._waiting:
            self._current = None
            return
        due = {thread: (max(deadline, self._now_ns), number) for thread, (deadline, number) in self._waiting.items()}
        chosen = min(due, key=lambda thread: due[thread])
        self._now_ns = due[chosen][0]
        del self._waiting[chosen]
        self._current = chosen
        self._turn.notify_all()


class _FakeCondition:
    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sleepers: set[int] = set()

    def __enter__(self) -> object:
        return self._lock.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait_until(self, deadline_ns: int) -> None:
        me = threading.get_ident()
        self._sleepers.add(me)
        self._lock.release()
        try:
            self._clock.sleep_until(deadline_ns)
        finally:
            self._lock.acquire()
            self._sleepers.discard(me)

    def notify_all(self) -> None:
        self._clock.wake(self._sleepers)
