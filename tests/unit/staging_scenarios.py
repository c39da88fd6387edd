"""Scenarios that hold for the patch's ``pinned_staging`` module and must not hold for a mutation of it.

Each takes the module and raises ``AssertionError`` where staging is wrong. All of them end: threads are daemons, and
one that does not finish in ``WATCHDOG_S`` is a failure.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
from staging_fakes import FakeEngine

WATCHDOG_S = 20


@dataclass(frozen=True)
class Scenario:
    seed: int
    eager: float
    slot_bytes: int
    slots: int
    depth: int
    rows: tuple[int, ...]


def doubled(column: np.ndarray) -> np.ndarray:
    return column + column


def make_batch(number: int, rows: int) -> dict[str, Any]:
    """Dtype, number of columns and width change from batch to batch."""
    random = np.random.default_rng(number)
    dtype = ["f4", "i2", "u1", "f8"][number % 4]
    batch: dict[str, Any] = {
        "a": random.integers(1, 100, (rows, 1 + number % 5)).astype(dtype),
        "text": np.array([f"{number}/{row}" for row in range(rows)]),
    }
    if number % 3:
        batch["b"] = random.integers(1, 100, (rows, 3, 2)).astype("i4")[:, ::2]
    return batch


def run_scenario(module: ModuleType, scenario: Scenario) -> None:
    """All batches through ``depth`` task threads; values, slots and pinned memory are checked."""
    engine = FakeEngine(scenario.seed, eager=scenario.eager)
    options = module.PinnedStagingOptions(
        depth=scenario.depth,
        slot_bytes=scenario.slot_bytes,
        max_pinned_bytes=scenario.slot_bytes * scenario.slots,
        engine=lambda: engine,
    )

    class Double:
        def __call__(self, batch: dict[str, Any], factor: int) -> dict[str, Any]:
            assert factor == 2
            numeric = {name: engine.kernel(value) for name, value in batch.items() if name != "text"}
            return {**numeric, "text": batch["text"]}

    actor = [module.make_callable_class_staged(Double, options)()]
    todo = deque(enumerate(scenario.rows))
    results: dict[int, dict[str, Any]] = {}

    def task_thread() -> None:
        while todo:
            try:
                number, rows = todo.popleft()
            except IndexError:
                return
            results[number] = actor[0](make_batch(number, rows), factor=2)

    in_threads([task_thread] * scenario.depth)
    for number, rows in enumerate(scenario.rows):
        batch = make_batch(number, rows)
        assert list(results[number]) == [*(name for name in batch if name != "text"), "text"]
        for name, column in batch.items():
            np.testing.assert_array_equal(results[number][name], column if name == "text" else doubled(column))
    assert engine.most_pinned_bytes == scenario.slot_bytes * scenario.slots
    actor.clear()
    assert not engine.faults and not engine.pinned and engine.closed


class _SlowDeque(deque):  # type: ignore[type-arg]
    """Lets other threads run between a look at the length and what follows from it."""

    def __len__(self) -> int:
        length = super().__len__()
        time.sleep(0.0005)
        return length


def check_ring(module: ModuleType) -> None:
    """Six threads share three slots, with a thread switch wherever the ring looks before it leaps."""
    ring = module.SlotRing([np.zeros(8, np.uint8) for _ in range(3)])
    ring._idle = _SlowDeque(ring._idle)
    held: set[int] = set()

    def use() -> None:
        for _ in range(15):
            slot = ring.try_acquire() or ring.acquire()
            assert id(slot) not in held, "two threads hold one slot"
            held.add(id(slot))
            time.sleep(0.0002)
            held.remove(id(slot))
            ring.release(slot, None)

    in_threads([use] * 6)
    assert len(ring._idle) == 3


def check_stage_order(module: ModuleType) -> None:
    """Two threads stage at once: the host copies of one batch come before those of the other."""
    engine = FakeEngine(0)
    copy = engine.host_copy

    def slow_copy(target: np.ndarray, source: np.ndarray) -> None:
        copy(target, source)
        time.sleep(0.001)

    engine.host_copy = slow_copy  # type: ignore[method-assign]
    stager = module.BatchStager(module.PinnedStagingOptions(slot_bytes=8, max_pinned_bytes=64, engine=lambda: engine))
    start = threading.Barrier(2)

    def stage() -> None:
        start.wait(WATCHDOG_S)
        stager.stage({"x": np.arange(16.0), "y": np.arange(4.0)})

    in_threads([stage] * 2)
    threads = [thread for thread, _ in engine.host_copies]
    assert len(threads) == 2 * 20
    assert sum(a != b for a, b in pairwise(threads)) == 1, "the batches were staged in turns"


def in_threads(targets: list[Callable[[], None]]) -> None:
    """Run all at once; the first error is raised here, and a thread that does not end is one."""
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WATCHDOG_S
    for thread in threads:
        while thread.is_alive() and not errors and time.monotonic() < deadline:
            thread.join(0.05)
    if errors:
        raise AssertionError(f"a thread failed: {errors[0]!r}") from errors[0]
    assert not any(thread.is_alive() for thread in threads), f"a thread still runs after {WATCHDOG_S} s"
