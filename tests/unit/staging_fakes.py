"""The patch's ``pinned_staging`` module, loaded from ``patches/`` into a process with any Ray, and a device for it.

``FakeEngine`` is a device that is late on purpose. It has a stream a copy direction and one for the UDF's kernels;
an operation runs only when a call makes it run, and how many run is drawn from a seeded generator. Bytes move when the
operation runs, so everything that staging does not wait for is seen: a slot refilled too early, a kernel or
a copy ahead of its input.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from collections import deque
from types import ModuleType
from typing import Any

import numpy as np

from repro.ray_patches import load_series

MODULE = "ray.data._internal.pinned_staging"
POISON = 0xA5


def patched_source() -> str:
    """Source of the module that the patch adds to Ray."""
    (patch,) = (patch for patch in load_series() if patch.name == "pinned-staging")
    (change,) = (change for change in patch.files if change.path == "data/_internal/pinned_staging.py")
    return change.forward(None).decode()


def load(source: str) -> ModuleType:
    """The module that ``source`` defines. It takes its place among Ray's modules while it is being run only."""
    spec = importlib.util.spec_from_loader(MODULE, loader=None)
    assert spec
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(MODULE)
    sys.modules[MODULE] = module  # dataclasses look their module up
    try:
        exec(compile(source, "pinned_staging.py", "exec"), module.__dict__)
    finally:
        if before is None:
            del sys.modules[MODULE]
        else:
            sys.modules[MODULE] = before
    return module


class Operation:
    """Work in a stream; also the event that is recorded behind it."""

    def __init__(self, engine: FakeEngine, work: Any = None, after: Operation | None = None, reads: Any = None) -> None:
        self._engine = engine
        self.work = work
        self.after = after
        self.buffer = reads
        self.done = False

    def query(self) -> bool:
        self._engine.progress()
        return self.done

    def synchronize(self) -> None:
        self._engine.finish(self)


class FakeArray:
    """Device memory, poisoned until something is written to it."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.data = np.empty(shape, dtype)
        as_bytes(self.data).fill(POISON)


def as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


class FakeEngine:
    """Not a subclass of ``CopyEngine``, so that it serves every mutation of the module.

    ``pin_limit`` is how many bytes can be pinned. ``fail`` names a method that raises. ``faults`` holds what a
    correct user of the engine never causes.
    """

    def __init__(self, seed: int = 0, *, eager: float = 0.3, pin_limit: int | None = None, fail: str = "") -> None:
        self._random = random.Random(seed)
        self._eager = eager
        self._pin_limit = pin_limit
        self.fail = fail
        self.lock = threading.RLock()
        self.streams: dict[str, deque[Operation]] = {"h2d": deque(), "d2h": deque(), "udf": deque()}
        self.pinned: list[np.ndarray] = []
        self.most_pinned_bytes = 0
        self.faults: list[str] = []
        self.host_copies: list[tuple[int, np.ndarray]] = []
        """(thread, source) of every host copy, in order."""
        self.closed = False

    # The device

    def progress(self) -> None:
        """Run some of what could run, perhaps nothing."""
        with self.lock:
            while self._random.random() < self._eager and self._step():
                pass

    def _step(self) -> bool:
        ready = [
            stream for stream in self.streams.values() if stream and (stream[0].after is None or stream[0].after.done)
        ]
        if not ready:
            return False
        operation = self._random.choice(ready).popleft()
        if operation.work:
            operation.work()
        operation.done = True
        return True

    def finish(self, operation: Operation) -> None:
        with self.lock:
            while not operation.done:
                assert self._step(), "the device has nothing to run, but a thread waits for it"

    def drain(self) -> None:
        with self.lock:
            while self._step():
                pass

    def _submit(self, stream: str, **fields: Any) -> Operation:
        with self.lock:
            operation = Operation(self, **fields)
            self.streams[stream].append(operation)
            self.progress()
            return operation

    def _maybe_fail(self, method: str) -> None:
        if self.fail == method:
            raise OSError(f"{method} failed")

    def kernel(self, source: FakeArray) -> FakeArray:
        """What a UDF does: twice the input, on the UDF's stream."""
        result = FakeArray(source.shape, source.dtype)

        def work() -> None:
            np.add(source.data, source.data, out=result.data)

        self._submit("udf", work=work)
        return result

    # CopyEngine

    def pin(self, nbytes: int) -> np.ndarray:
        self._maybe_fail("pin")
        held = sum(buffer.nbytes for buffer in self.pinned)
        if self._pin_limit is not None and held + nbytes > self._pin_limit:
            raise MemoryError(f"cannot pin {nbytes} bytes")
        self.pinned.append(np.zeros(nbytes, np.uint8))
        self.most_pinned_bytes = max(self.most_pinned_bytes, held + nbytes)
        return self.pinned[-1]

    def unpin(self, buffer: np.ndarray) -> None:
        if any(np.shares_memory(op.buffer, buffer) for s in self.streams.values() for op in s if op.buffer is not None):
            self.faults.append("memory was unpinned under a copy")
        self.pinned = [one for one in self.pinned if one is not buffer]

    def supports(self, dtype: np.dtype) -> bool:
        return dtype != np.dtype(np.longdouble)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> FakeArray:
        self._maybe_fail("empty")
        return FakeArray(shape, dtype)

    def copy_h2d(self, source: np.ndarray, target: FakeArray, offset: int) -> Operation:
        self._maybe_fail("copy_h2d")

        def work() -> None:
            as_bytes(target.data)[offset : offset + source.size] = source

        return self._submit("h2d", work=work, reads=source)

    def begin_use(self, arrays: list[FakeArray], ready: Operation) -> None:
        self._maybe_fail("begin_use")
        self._submit("udf", after=ready)

    def is_device_array(self, value: Any) -> bool:
        return isinstance(value, FakeArray)

    def end_use(self, arrays: list[FakeArray]) -> tuple[list[FakeArray], Operation]:
        self._maybe_fail("end_use")
        return list(arrays), self._submit("udf")

    def spec(self, array: FakeArray) -> tuple[tuple[int, ...], np.dtype]:
        return array.shape, array.dtype

    def copy_d2h(self, source: FakeArray, offset: int, target: np.ndarray) -> Operation:
        self._maybe_fail("copy_d2h")

        def work() -> None:
            target[:] = as_bytes(source.data)[offset : offset + target.size]

        return self._submit("d2h", work=work, reads=target)

    def host_copy(self, target: np.ndarray, source: np.ndarray) -> None:
        self._maybe_fail("host_copy")
        with self.lock:
            self.host_copies.append((threading.get_ident(), source))
            np.copyto(target, source)

    def close(self) -> None:
        self.closed = True
