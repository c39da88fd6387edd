"""A GPU in software: streams, engines and a host that blocks where CUDA would, over a time model.

Timing. Work is scheduled by ``repro.device.emulated_timeline``; nothing runs in the background. A call that CUDA
would return from at once returns after the model's launch overhead; a call that would block sleeps until the instant at
which the schedule says that the work ends. CUDA rules claimed, each with a unit test:

- work of one stream runs in order; events order streams; a stream that waits for an event holds up no other stream;
- one engine runs kernels (those of all streams share it), one copies to the device, one back: the three overlap;
- a copy from or to pageable memory blocks the caller until it is done, after the earlier work of its stream, at
  the pageable rate; a copy of pinned memory returns at once and runs at the pinned rate;
- pinning blocks the caller. As in PyTorch, freed pinned memory is kept, and a buffer of the same size takes it without
  pinning anew once the copies of its former life have ended.

Streams from ``new_stream`` are non-blocking, as PyTorch's are: the default stream neither waits for them nor they for
it. Not modelled: kernels small enough to share the SMs, contention of copies for host memory, CUDA's default-stream
synchronisation of blocking streams, device memory running out, and locks of the driver: threads of one process do not
hold each other up here. On GPUs a pageable D2H that waits for its stream was seen to stall other threads' launches
(NVIDIA's developer forums, threads 222211 and 364986); CUDA documents only that any call may block on internal
resources. So two threads overlap more of their pageable copies here than a GPU may let them.

Data. Arrays carry real bytes. A copy's bytes move while it runs if a thread waits for it, else at the first call that
observes its end (a ``synchronize``, a true ``query``, a blocking copy after it), never before it starts
and always before such a call returns. So reading a result early yields stale bytes, and refilling a pinned buffer
before an observed end of its copy corrupts the copy, as on a GPU (stricter: on a GPU one may be lucky). Work that
reads an array which no stream order or event made ready reads ``POISON`` bytes. A matmul adds 1 to every element taken
as an unsigned integer of its size (for float32 it moves each value to its neighbour); ``expected_output`` does the same
on the host, so what comes out can be checked exactly.

Sizes. A copy is accounted at ``nominal_bytes`` and a matmul at the rows which that size implies, however few rows
travel.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from repro.device.clock import Clock, RealClock
from repro.device.emulated_log import LAUNCH_KERNEL, MEMCPY_ASYNC, LogWriter
from repro.device.emulated_timeline import Engine, Operation, Timeline
from repro.device.model import DeviceModel, load_model, transfer_ns
from repro.device.nvtx_ranges import nvtx_range
from repro.device.protocol import DeviceArray, Event, PinnedBuffer, Stream
from repro.errors import UsageError
from repro.nsysdb.model import DEVICE, DTOH, HTOD, PAGEABLE, PINNED

KERNEL_NAME = "emulated_sgemm_nn"
POISON = 0xA5
"""Byte value of device memory that nothing was written to."""
_DEFAULT_STREAM_ID = 7
_FIRST_STREAM_ID = 13
_SYNC_EVENT, _SYNC_STREAM_WAIT, _SYNC_STREAM, _SYNC_CONTEXT = 1, 2, 3, 4


def expected_output(batch: np.ndarray, matmuls: int) -> np.ndarray:
    """What D2H yields for ``batch`` after ``matmuls`` matmuls: a new array of the same shape and dtype."""
    output = np.empty(batch.shape, batch.dtype)
    _apply_matmuls(np.ascontiguousarray(batch), matmuls, output)
    return output


def checksum(array: np.ndarray) -> int:
    """Sum of the array's bytes taken as unsigned 64-bit integers, modulo 2**64 (a remainder is padded with zeros)."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = data.size // 8 * 8
    total = int(np.add.reduce(data[:whole].view(np.uint64), dtype=np.uint64))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64


def _words(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def _poison(array: np.ndarray) -> None:
    _words(array)[...] = int.from_bytes(bytes([POISON]) * array.dtype.itemsize, "little")


def _apply_matmuls(source: np.ndarray, matmuls: int, out: np.ndarray) -> None:
    words = _words(source)
    np.add(words, words.dtype.type(matmuls), out=_words(out))


class EmulatedArray:
    """Device memory. ``nominal_bytes`` is what its copies are accounted at."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], nominal_bytes: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.nominal_bytes = nominal_bytes
        self._data: np.ndarray | None = None
        """What H2D brought; never written again once whole, so the arrays of a chain of matmuls share it."""
        self._missing_bytes = 0
        """What copies of parts have still to bring."""
        self._matmuls = 0

    def _copy_from_host(self, source: np.ndarray) -> None:
        data = np.empty(self.shape, self.dtype)
        np.copyto(data, source)
        self._data = data

    def _copy_part_from_host(self, source: np.ndarray, offset: int) -> None:
        if self._data is None:
            self._data = np.empty(self.shape, self.dtype)
            _poison(self._data)
            self._missing_bytes = self.nbytes
        np.copyto(self._data.reshape(-1).view(np.uint8)[offset : offset + source.nbytes], source)
        self._missing_bytes -= source.nbytes

    def _multiply(self, source: EmulatedArray) -> None:
        self._data = source._data.copy() if source._data is not None and source._missing_bytes else source._data
        self._matmuls = source._matmuls + 1

    def _copy_to_host(self, out: np.ndarray) -> None:
        if self._data is None:
            _poison(out)
        else:
            _apply_matmuls(self._data, self._matmuls, out)

    def _copy_part_to_host(self, out: np.ndarray, offset: int) -> None:
        if self._data is None:
            _poison(out)
        else:
            part = self._data.reshape(-1).view(np.uint8)[offset : offset + out.nbytes]
            _apply_matmuls(part.view(self.dtype), self._matmuls, out.view(self.dtype))


class EmulatedEvent:
    """Done when the work that its stream held when it was recorded has ended."""

    def __init__(self, device: EmulatedDevice, stream_id: int, operations: tuple[Operation, ...]) -> None:
        self._device = device
        self._stream_id = stream_id
        self._operations = operations

    def query(self) -> bool:
        return self._device._query(self._operations)

    def synchronize(self) -> None:
        self._device._synchronize("cudaEventSynchronize_v3020", self._stream_id, _SYNC_EVENT, self._operations)


class EmulatedStream:
    """An in-order queue of work."""

    def __init__(self, device: EmulatedDevice, stream_id: int, name: str) -> None:
        self._device = device
        self.stream_id = stream_id
        self.name = name
        self._tail: tuple[Operation, ...] = ()
        """What the next operation comes after: the last one, and events waited for since."""

    def record_event(self) -> EmulatedEvent:
        return self._device._record_event(self)

    def wait_event(self, event: Event) -> None:
        self._device._wait_event(self, event)

    def synchronize(self) -> None:
        self._device._synchronize("cudaStreamSynchronize_v3020", self.stream_id, _SYNC_STREAM, self._tail)


class EmulatedPinnedBuffer:
    """Page-locked host memory; a numpy view of ``array`` counts as pinned too."""

    def __init__(self, device: EmulatedDevice, array: np.ndarray, nominal_bytes: int) -> None:
        self._device = device
        self.array = array
        self.nominal_bytes = nominal_bytes

    def free(self) -> None:
        self._device._free_pinned(self)


@dataclass(eq=False)
class _PinnedBlock:
    memory: np.ndarray
    """Bytes; buffers and their views have it as their base."""
    nominal_bytes: int
    copies: tuple[Operation, ...] = ()
    """From or into it, still unfinished when the latest was submitted."""


class EmulatedDevice:
    """See the module's description. Thread-safe; made anew in each process from its arguments, never sent.

    ``log_path`` is the file that events are appended to (``repro.device.emulated_log``); ``None`` logs nothing.
    """

    kind: Literal["emulated", "cuda"] = "emulated"

    def __init__(
        self, model: DeviceModel, *, log_path: Path | None = None, clock: Clock | None = None, device_id: int = 0
    ) -> None:
        self.model = model
        self.name = f"Emulated {model.name}"
        self.device_id = device_id
        self._clock = clock or RealClock()
        self._changed = self._clock.condition()
        """Guards everything below; notified when work is submitted."""
        self._timeline = Timeline()
        self._unlogged: list[Operation] = []
        self._calls = 0
        self._closed = False
        self._pinned: dict[int, _PinnedBlock] = {}
        """By the id of their memory."""
        self._freed_blocks: list[_PinnedBlock] = []
        self._known_threads: set[int] = set()
        self._default_stream = EmulatedStream(self, _DEFAULT_STREAM_ID, "default")
        self._streams = [self._default_stream]
        self._log = LogWriter(
            log_path,
            {
                "pid": os.getpid(),
                "process_name": Path(sys.argv[0]).name or "python",
                "device_id": device_id,
                "device_name": self.name,
                "model": model.model_dump(mode="json", by_alias=True),
                "sm_count": model.sm_count.value,
                "total_memory_bytes": round(model.memory_gb.value * 1e9),
                "opened_ns": self._clock.now_ns(),
                "utc_ns": self._clock.utc_ns(),
            },
        )

    # Streams

    def default_stream(self) -> EmulatedStream:
        return self._default_stream

    def new_stream(self, name: str = "") -> EmulatedStream:
        with self._changed:
            stream_id = _FIRST_STREAM_ID + len(self._streams) - 1
            stream = EmulatedStream(self, stream_id, name or f"stream {stream_id}")
            self._streams.append(stream)
        return stream

    def _record_event(self, stream: EmulatedStream) -> EmulatedEvent:
        with self._call("cudaEventRecord_v3020"):
            return EmulatedEvent(self, stream.stream_id, stream._tail)

    def _wait_event(self, stream: EmulatedStream, event: Event) -> None:
        with self._call("cudaStreamWaitEvent_v3020") as correlation_id:
            with self._changed:
                now_ns = self._clock.now_ns()
                earlier = dict.fromkeys((*stream._tail, *_event(event)._operations))
                stream._tail = tuple(op for op in earlier if not op.finished(now_ns))
                self._log.add("sync", now_ns, now_ns + 1, stream.stream_id, correlation_id, _SYNC_STREAM_WAIT)

    # Memory

    def pin_empty(
        self, shape: tuple[int, ...], dtype: Any, *, nominal_bytes: int | None = None
    ) -> EmulatedPinnedBuffer:
        kind = np.dtype(dtype)
        size_bytes = math.prod(shape) * kind.itemsize
        nominal = size_bytes if nominal_bytes is None else nominal_bytes
        block = self._reuse_block(size_bytes, nominal)
        if block is None:
            with self._call("cudaHostAlloc_v3020", self.model.pin_ns(nominal)):
                block = _PinnedBlock(np.zeros(size_bytes, np.uint8), nominal)
        with self._changed:
            self._pinned[id(block.memory)] = block
        return EmulatedPinnedBuffer(self, block.memory.view(kind).reshape(shape), nominal)

    def _reuse_block(self, size_bytes: int, nominal_bytes: int) -> _PinnedBlock | None:
        with self._changed:
            now_ns = self._clock.now_ns()
            self._timeline.advance(now_ns)
            for block in self._freed_blocks:
                same_size = (block.memory.nbytes, block.nominal_bytes) == (size_bytes, nominal_bytes)
                if same_size and all(copy.ended(now_ns) for copy in block.copies):
                    self._freed_blocks.remove(block)
                    break
            else:
                return None
        _move(block.copies)
        block.copies = ()
        return block

    def _free_pinned(self, buffer: EmulatedPinnedBuffer) -> None:
        with self._changed:
            block = self._pinned.pop(id(_owner(buffer.array)), None)
            if block is None:
                raise UsageError("this pinned buffer was freed before, or belongs to another device.")
            self._freed_blocks.append(block)

    # Work

    def empty(self, shape: tuple[int, ...], dtype: Any, *, nominal_bytes: int | None = None) -> EmulatedArray:
        """Device memory for ``copy_h2d`` of parts."""
        array = EmulatedArray(shape, np.dtype(dtype), 0)
        array.nominal_bytes = array.nbytes if nominal_bytes is None else nominal_bytes
        return array

    def copy_h2d(
        self,
        source: np.ndarray | PinnedBuffer,
        stream: Stream,
        *,
        nominal_bytes: int | None = None,
        into: DeviceArray | None = None,
        offset: int = 0,
    ) -> EmulatedArray:
        """With ``into``, bytes are copied to that array of ``empty`` at ``offset`` (in bytes), each byte once."""
        array, block, nominal = self._host_side(source, nominal_bytes)
        if into is None:
            target = EmulatedArray(array.shape, array.dtype, nominal)
            effect = partial(target._copy_from_host, array)
        else:
            target = _array(into)
            _check_part(target, array, offset)
            effect = partial(target._copy_part_from_host, array, offset)
        self._copy(Engine.H2D, _stream(stream), block, nominal, effect)
        return target

    def copy_d2h(
        self,
        source: DeviceArray,
        stream: Stream,
        *,
        out: np.ndarray | PinnedBuffer | None = None,
        offset: int | None = None,
    ) -> np.ndarray:
        """With ``offset`` (in bytes), ``out`` takes that part of the array's bytes."""
        array = _array(source)
        target, block, _ = self._host_side(np.empty(source.shape, source.dtype) if out is None else out, None)
        nominal = source.nominal_bytes
        if offset is not None:
            _check_part(array, target, offset)
            nominal = round(nominal * target.nbytes / array.nbytes)
            effect = partial(array._copy_part_to_host, target, offset)
        elif target.shape != source.shape or target.dtype != source.dtype:
            raise UsageError(
                f"D2H of {source.shape} {source.dtype} into {target.shape} {target.dtype}: shape and dtype must agree."
            )
        else:
            effect = partial(array._copy_to_host, target)
        if not target.flags.writeable:
            raise UsageError("D2H into a read-only array.")
        self._copy(Engine.D2H, _stream(stream), block, nominal, effect)
        return target

    def matmul(self, source: DeviceArray, stream: Stream) -> EmulatedArray:
        if len(source.shape) != 2:
            raise UsageError(f"matmul takes a matrix, not an array of shape {source.shape}.")
        array = _array(source)
        cols = source.shape[1]
        rows = source.nominal_bytes / (cols * source.dtype.itemsize)
        result = EmulatedArray(source.shape, source.dtype, source.nominal_bytes)
        with self._call(LAUNCH_KERNEL) as correlation_id:
            kernel = Operation(
                Engine.COMPUTE,
                self.model.matmul_ns(rows, cols),
                stream_id=stream.stream_id,
                correlation_id=correlation_id,
                effect=lambda: result._multiply(array),
                log_fields=(KERNEL_NAME,),
            )
            self._submit(kernel, _stream(stream))
        return result

    @contextmanager
    def charge_host_copy(self, nominal_bytes: int) -> Iterator[None]:
        """Around a host-side copy of a scaled payload: makes it last what the nominal size takes one host thread.

        The time that the block itself takes counts, so the caller is held only for the rest:
        ``with device.charge_host_copy(batch_bytes): np.copyto(slot.array, batch)``.
        """
        until_ns = self._clock.now_ns() + transfer_ns(nominal_bytes, self.model.host_copy_gb_per_s.value)
        yield
        self._clock.sleep_until(until_ns)

    @contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        start_ns = self._clock.now_ns()
        try:
            with nvtx_range(name):
                yield
        finally:
            with self._changed:
                self._log.add("nvtx", start_ns, self._clock.now_ns(), self._thread_id(), name)
                self._log.flush()

    def synchronize(self) -> None:
        self._synchronize("cudaDeviceSynchronize_v3020", 0, _SYNC_CONTEXT, self._everything())

    def close(self) -> None:
        """Wait for all work and end the log; later calls are refused. Closing twice is harmless."""
        self._wait(self._everything())
        with self._changed:
            if not self._closed:
                self._closed = True
                self._log.add("close", self._clock.now_ns())
                self._log.close()

    # How it works

    def _host_side(
        self, memory: np.ndarray | PinnedBuffer, nominal_bytes: int | None
    ) -> tuple[np.ndarray, _PinnedBlock | None, int]:
        """(array, its pinned block if it has one, nominal bytes); a view of a pinned buffer has its share of those."""
        array = memory if isinstance(memory, np.ndarray) else memory.array
        if array.dtype.itemsize not in (1, 2, 4, 8) or array.dtype.hasobject:
            raise UsageError(f"the emulated device takes numbers of 1, 2, 4 or 8 bytes, not {array.dtype}.")
        with self._changed:
            block = self._pinned.get(id(_owner(array)))
        if block is None and not isinstance(memory, np.ndarray):
            raise UsageError("this pinned buffer has been freed, or belongs to another device.")
        if nominal_bytes is None and block is not None and block.memory.nbytes:
            nominal_bytes = round(block.nominal_bytes * array.nbytes / block.memory.nbytes)
        return array, block, array.nbytes if nominal_bytes is None else nominal_bytes

    def _copy(
        self,
        engine: Engine,
        stream: EmulatedStream,
        block: _PinnedBlock | None,
        nominal_bytes: int,
        effect: Callable[[], None],
    ) -> None:
        """Issue a copy on ``engine``; without a pinned ``block`` on its host side wait until it is done."""
        to_device = engine is Engine.H2D
        memory = PAGEABLE if block is None else PINNED
        kinds = (HTOD, memory, DEVICE) if to_device else (DTOH, DEVICE, memory)
        with self._call(MEMCPY_ASYNC) as correlation_id:
            copy = Operation(
                engine,
                self.model.copy_ns(nominal_bytes, to_device=to_device, pinned=block is not None),
                stream_id=stream.stream_id,
                correlation_id=correlation_id,
                effect=effect,
                log_fields=(nominal_bytes, *kinds),
            )
            self._submit(copy, stream, block)
            if block is None:
                self._wait((copy,))

    @contextmanager
    def _call(self, name: str, cost_ns: int | None = None) -> Iterator[int]:
        """A runtime API call on the host: yields its correlation id, costs ``cost_ns`` (else the launch overhead)."""
        start_ns = self._clock.now_ns()
        with self._changed:
            if self._closed:
                raise UsageError(f"{name} on a device that is closed.")
            self._calls += 1
            correlation_id = self._calls
        self._clock.sleep_until(start_ns + (self.model.launch_overhead_ns if cost_ns is None else cost_ns))
        yield correlation_id
        with self._changed:
            self._log.add("call", start_ns, self._clock.now_ns(), self._thread_id(), correlation_id, name)
            self._log.flush()

    def _submit(self, operation: Operation, stream: EmulatedStream, block: _PinnedBlock | None = None) -> None:
        with self._changed:
            now_ns = self._clock.now_ns()
            operation.after = stream._tail
            stream._tail = (operation,)
            self._timeline.submit(operation, now_ns)
            if block is not None:
                block.copies = (*(copy for copy in block.copies if not copy.finished(now_ns)), operation)
            self._unlogged.append(operation)
            self._changed.notify_all()

    def _everything(self) -> tuple[Operation, ...]:
        with self._changed:
            return tuple(dict.fromkeys(operation for stream in self._streams for operation in stream._tail))

    def _synchronize(self, call: str, stream_id: int, sync_type: int, operations: tuple[Operation, ...]) -> None:
        start_ns = self._clock.now_ns()
        with self._call(call) as correlation_id:
            self._wait(operations)
            with self._changed:
                self._log.add("sync", start_ns, self._clock.now_ns(), stream_id, correlation_id, sync_type)

    def _query(self, operations: tuple[Operation, ...]) -> bool:
        with self._call("cudaEventQuery_v3020"):
            with self._changed:
                now_ns = self._clock.now_ns()
                self._timeline.advance(now_ns)
                done = all(operation.ended(now_ns) for operation in operations)
                self._log_finished(now_ns)
            if done:
                _move(operations)
        return done

    def _wait(self, operations: tuple[Operation, ...]) -> None:
        """Block until ``operations`` have ended and their bytes have moved."""
        while True:
            with self._changed:
                now_ns = self._clock.now_ns()
                self._timeline.advance(now_ns)
                started = tuple(op for op in operations if op.fixed and not op.moved)
                if not started:
                    instants = [op.end_ns if op.fixed else op.start_ns for op in operations if not op.ended(now_ns)]
                    if not instants:
                        self._log_finished(now_ns)
                        return
                    # Work submitted meanwhile can move the instant either way; the loop looks again.
                    self._changed.wait_until(min(instants))
            _move(started)

    def _log_finished(self, now_ns: int) -> None:
        rest = []
        for operation in self._unlogged:
            if operation.ended(now_ns):
                kind = "kernel" if operation.engine is Engine.COMPUTE else "memcpy"
                self._log.add(
                    kind,
                    operation.start_ns,
                    operation.end_ns,
                    operation.stream_id,
                    operation.correlation_id,
                    *operation.log_fields,
                )
            else:
                rest.append(operation)
        self._unlogged = rest
        self._log.flush()

    def _thread_id(self) -> int:
        thread_id = threading.get_native_id()
        if thread_id not in self._known_threads:
            self._known_threads.add(thread_id)
            self._log.add("thread", thread_id, threading.current_thread().name)
        return thread_id


def open_emulated(model: str | Path, log_path: str | Path | None) -> EmulatedDevice:
    """The emulated device of a model's name or file, in real time, logging to ``log_path``."""
    return EmulatedDevice(load_model(model), log_path=None if log_path is None else Path(log_path))


def _owner(array: np.ndarray) -> np.ndarray:
    """The array that ``array`` is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _move(operations: tuple[Operation, ...]) -> None:
    """Move the bytes of ``operations``, which have started, and before them of all that they come after.

    Runs without the device's lock: copies of different threads go on at the same time.
    """
    order: list[Operation] = []
    seen: set[Operation] = set()
    stack = [(operation, False) for operation in operations]
    while stack:
        operation, entered = stack.pop()
        if entered:
            order.append(operation)
        elif operation not in seen and not operation.moved:
            seen.add(operation)
            stack.append((operation, True))
            stack.extend((earlier, False) for earlier in operation.after)
    for operation in order:
        with operation.lock:
            if not operation.moved:
                if operation.effect is not None:
                    operation.effect()
                operation.effect = None  # lets go of the arrays
                operation.after = ()
                operation.moved = True


def _stream(stream: Stream) -> EmulatedStream:
    if not isinstance(stream, EmulatedStream):
        raise UsageError("the emulated device was given the stream of another device.")
    return stream


def _event(event: Event) -> EmulatedEvent:
    if not isinstance(event, EmulatedEvent):
        raise UsageError("the emulated device was given the event of another device.")
    return event


def _array(array: DeviceArray) -> EmulatedArray:
    if not isinstance(array, EmulatedArray):
        raise UsageError("the emulated device was given the array of another device.")
    return array


def _check_part(whole: EmulatedArray, part: np.ndarray, offset: int) -> None:
    size = whole.dtype.itemsize
    if part.dtype != np.uint8 or part.ndim != 1 or offset % size or part.nbytes % size:
        raise UsageError(f"a part of a {whole.dtype} array is a row of bytes in multiples of {size}.")
    if offset < 0 or offset + part.nbytes > whole.nbytes:
        raise UsageError(f"bytes {offset} to {offset + part.nbytes} are outside an array of {whole.nbytes}.")
