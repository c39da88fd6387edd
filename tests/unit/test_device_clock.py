from __future__ import annotations

import threading
import time

import pytest

from repro.device.clock import FakeClock, RealClock


def test_fake_clock_jumps_to_the_deadline_and_never_back() -> None:
    clock = FakeClock(start_ns=100)
    clock.sleep_until(250)
    assert clock.now_ns() == 250
    clock.sleep_until(10)
    assert clock.now_ns() == 250
    clock.advance(5)
    assert clock.now_ns() == 255


def test_fake_utc_moves_with_the_clock() -> None:
    clock = FakeClock(start_ns=100, utc_ns=9_000)
    clock.advance(7)
    assert clock.utc_ns() == 9_007


def test_fake_clock_runs_threads_in_order_of_their_deadlines() -> None:
    clock = FakeClock(start_ns=0)
    seen: list[tuple[str, int]] = []

    def body(name: str, step_ns: int) -> None:
        for _ in range(3):
            clock.advance(step_ns)
            seen.append((name, clock.now_ns()))

    clock.run(lambda: body("a", 10), lambda: body("b", 15))
    assert seen == [("a", 10), ("b", 15), ("a", 20), ("b", 30), ("a", 30), ("b", 45)]
    clock.advance(1)
    assert clock.now_ns() == 46


def test_fake_condition_ends_a_wait_at_notify() -> None:
    clock = FakeClock(start_ns=0)
    condition = clock.condition()
    woken: list[int] = []

    def waiter() -> None:
        with condition:
            condition.wait_until(1_000)
            woken.append(clock.now_ns())

    def notifier() -> None:
        clock.advance(300)
        with condition:
            condition.notify_all()

    clock.run(waiter, notifier)
    assert woken == [300]


def test_fake_clock_raises_the_error_of_a_thread() -> None:
    clock = FakeClock()

    def fails() -> None:
        raise ValueError("in the thread")

    with pytest.raises(ValueError, match="in the thread"):
        clock.run(lambda: clock.advance(5), fails)


def test_fake_clock_refuses_a_thread_that_it_did_not_start() -> None:
    clock = FakeClock()
    errors: list[BaseException] = []

    def foreign() -> None:
        try:
            clock.advance(1)
        except RuntimeError as error:
            errors.append(error)

    def body() -> None:
        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()

    clock.run(body)
    assert len(errors) == 1


def test_real_clock_does_not_return_early() -> None:
    clock = RealClock()
    condition = clock.condition()
    for wait_ns in (0, 20_000, 300_000, 3_000_000):
        deadline_ns = clock.now_ns() + wait_ns
        clock.sleep_until(deadline_ns)
        assert clock.now_ns() >= deadline_ns
    with condition:
        deadline_ns = clock.now_ns() + 1_000_000
        while clock.now_ns() < deadline_ns:
            condition.wait_until(deadline_ns)
        condition.wait_until(deadline_ns)  # in the past: returns


def test_real_condition_ends_a_wait_at_notify() -> None:
    clock = RealClock()
    condition = clock.condition()
    waiting = threading.Event()
    ended = threading.Event()

    def waiter() -> None:
        with condition:
            waiting.set()
            condition.wait_until(clock.now_ns() + 60_000_000_000)
        ended.set()

    thread = threading.Thread(target=waiter, daemon=True)
    thread.start()
    waiting.wait(10)
    while not ended.is_set():
        with condition:
            condition.notify_all()
        time.sleep(0.001)
    thread.join(10)
    assert not thread.is_alive()
