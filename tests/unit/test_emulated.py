"""CUDA's rules, one test each, on a model with round figures: a launch costs 1 ns, a matmul of a 4 x 10 float32
array 1000 ns, its 160 bytes travel in 160 ns pageable and 16 ns pinned."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.device.clock import FakeClock
from repro.device.emulated import POISON, EmulatedDevice, _move, checksum, expected_output
from repro.device.emulated_log import read_log
from repro.device.emulated_timeline import Engine, Operation
from repro.device.model import DeviceModel, load_model
from repro.device.protocol import Device, PinnedBuffer
from repro.errors import UsageError
from repro.nsysdb.model import DEVICE, DTOH, HTOD, PAGEABLE, PINNED, Capture, Kernel, Memcpy


def round_model() -> DeviceModel:
    values = {
        "matmul_total_ms": 0.001,
        "matmul_count": 1,
        "matmul_rows": 4,
        "matmul_cols": 10,
        "pageable_h2d_gb_per_s": 1.0,
        "pageable_d2h_gb_per_s": 1.0,
        "pinned_h2d_gb_per_s": 10.0,
        "pinned_d2h_gb_per_s": 10.0,
        "host_copy_gb_per_s": 2.0,
        "pin_gb_per_s": 4.0,
        "pin_latency_us": 0.5,
        "launch_overhead_us": 0.001,
    }
    fields = load_model("b200").model_dump(by_alias=True)
    return DeviceModel.model_validate(fields | {key: {"value": v, "source": "test"} for key, v in values.items()})


@pytest.fixture
def model() -> DeviceModel:
    return round_model()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(start_ns=0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "device.jsonl"


@pytest.fixture
def device(model: DeviceModel, clock: FakeClock, log: Path) -> EmulatedDevice:
    return EmulatedDevice(model, log_path=log, clock=clock)


def batch(first: int = 0) -> np.ndarray:
    return np.arange(first, first + 40, dtype=np.float32).reshape(4, 10)


def captured(device: EmulatedDevice, log: Path) -> Capture:
    device.close()
    return read_log([log])


def overlap_ns(a: Kernel | Memcpy, b: Kernel | Memcpy) -> int:
    return min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)


def test_is_a_device(device: EmulatedDevice) -> None:
    typed: Device = device
    assert (typed.kind, typed.name) == ("emulated", "Emulated NVIDIA B200")


def assert_engines_exclusive(capture: Capture) -> None:
    engines = [
        capture.kernels,
        [copy for copy in capture.memcpys if copy.copy_kind == HTOD],
        [copy for copy in capture.memcpys if copy.copy_kind == DTOH],
    ]
    for rows in engines:
        assert all(later.start_ns >= earlier.end_ns for earlier, later in pairwise(rows))


# Blocking and overlap


def test_pageable_h2d_blocks_the_caller_until_it_is_done(device: EmulatedDevice, clock: FakeClock) -> None:
    device.copy_h2d(batch(), device.default_stream())
    assert clock.now_ns() == 1 + 160


def test_pageable_copies_wait_for_the_earlier_work_of_their_stream(device: EmulatedDevice, clock: FakeClock) -> None:
    stream = device.new_stream()
    on_device = device.copy_h2d(batch(), stream)
    device.matmul(on_device, stream)
    device.copy_h2d(batch(), stream)
    assert clock.now_ns() == 161 + 1 + 1000 + 160
    device.matmul(on_device, stream)
    device.copy_d2h(on_device, stream)
    assert clock.now_ns() == 1322 + 1 + 1000 + 160


def test_a_pageable_copy_does_not_wait_for_other_streams(device: EmulatedDevice, clock: FakeClock) -> None:
    on_device = device.copy_h2d(batch(), device.default_stream())
    device.matmul(on_device, device.default_stream())
    device.copy_h2d(batch(), device.new_stream())
    assert clock.now_ns() == 161 + 1 + 1 + 160


def test_pinned_copies_return_at_once_and_run_at_the_pinned_rate(device: EmulatedDevice, log: Path) -> None:
    stream = device.new_stream()
    pinned = device.pin_empty((4, 10), np.float32)
    clock = device._clock
    before_ns = clock.now_ns()
    on_device = device.copy_h2d(pinned, stream)
    device.copy_d2h(on_device, stream, out=pinned)
    assert clock.now_ns() == before_ns + 2
    copies = captured(device, log).memcpys
    assert [(c.end_ns - c.start_ns, c.src_kind, c.dst_kind) for c in copies] == [
        (16, PINNED, DEVICE),
        (16, DEVICE, PINNED),
    ]


def test_pinned_copies_on_side_streams_overlap_compute_in_both_directions(device: EmulatedDevice, log: Path) -> None:
    main, up, down = device.default_stream(), device.new_stream(), device.new_stream()
    pinned = device.pin_empty((4, 10), np.float32)
    on_device = device.copy_h2d(batch(), main)
    device.matmul(on_device, main)
    device.copy_h2d(pinned, up)
    device.copy_d2h(on_device, down, out=pinned)
    capture = captured(device, log)
    (kernel,) = capture.kernels
    h2d, d2h = capture.memcpys[1:]
    assert (h2d.copy_kind, d2h.copy_kind) == (HTOD, DTOH)
    assert overlap_ns(kernel, h2d) == overlap_ns(kernel, d2h) == 16
    assert overlap_ns(h2d, d2h) == 15


def test_copies_in_one_direction_share_their_engine(device: EmulatedDevice, log: Path) -> None:
    pinned = device.pin_empty((4, 10), np.float32)
    for _ in range(3):
        device.copy_h2d(pinned, device.new_stream())
    first, second, third = captured(device, log).memcpys
    assert (second.start_ns, third.start_ns) == (first.end_ns, second.end_ns)


def test_kernels_of_two_streams_share_the_compute_engine(device: EmulatedDevice, log: Path) -> None:
    streams = [device.new_stream(), device.new_stream()]
    on_device = device.copy_h2d(batch(), streams[0])
    for stream in (streams[0], streams[0], streams[1], streams[1]):
        device.matmul(on_device, stream)
    kernels = captured(device, log).kernels
    assert [kernel.stream_id for kernel in kernels] == [13, 14, 13, 14]
    assert all(later.start_ns == earlier.end_ns for earlier, later in pairwise(kernels))


def test_work_of_one_stream_runs_in_order(device: EmulatedDevice, log: Path) -> None:
    stream = device.new_stream()
    pinned = device.pin_empty((4, 10), np.float32)
    device.copy_d2h(device.matmul(device.copy_h2d(pinned, stream), stream), stream, out=pinned)
    capture = captured(device, log)
    h2d, d2h = capture.memcpys
    assert h2d.end_ns <= capture.kernels[0].start_ns < capture.kernels[0].end_ns <= d2h.start_ns


def test_an_event_orders_two_streams(device: EmulatedDevice, log: Path) -> None:
    up, compute = device.new_stream(), device.new_stream()
    pinned = device.pin_empty((4, 10), np.float32, nominal_bytes=50_000)
    on_device = device.copy_h2d(pinned, up)
    compute.wait_event(up.record_event())
    device.matmul(on_device, compute)
    capture = captured(device, log)
    assert capture.kernels[0].start_ns == capture.memcpys[0].end_ns


def test_an_event_covers_only_what_was_recorded_before_it(device: EmulatedDevice, clock: FakeClock) -> None:
    stream = device.new_stream()
    on_device = device.copy_h2d(batch(), stream)
    device.matmul(on_device, stream)
    event = stream.record_event()
    device.matmul(on_device, stream)
    event.synchronize()
    assert clock.now_ns() == 162 + 1000
    stream.synchronize()
    assert clock.now_ns() == 162 + 2000


def test_a_kernel_that_waits_for_an_event_does_not_block_other_streams(device: EmulatedDevice, log: Path) -> None:
    up, waits, free = device.new_stream(), device.new_stream(), device.new_stream()
    ready = device.copy_h2d(batch(), free)
    pinned = device.pin_empty((4, 10), np.float32, nominal_bytes=50_000)
    on_device = device.copy_h2d(pinned, up)
    waits.wait_event(up.record_event())
    device.matmul(on_device, waits)
    device.matmul(ready, free)
    first, second = captured(device, log).kernels
    assert (first.stream_id, second.stream_id) == (free.stream_id, waits.stream_id)
    assert first.end_ns < second.start_ns


def test_new_streams_do_not_synchronise_with_the_default_stream(device: EmulatedDevice, log: Path) -> None:
    pinned = device.pin_empty((4, 10), np.float32)
    on_device = device.copy_h2d(batch(), device.default_stream())
    device.matmul(on_device, device.default_stream())
    device.copy_h2d(pinned, device.new_stream())
    capture = captured(device, log)
    assert overlap_ns(capture.kernels[0], capture.memcpys[1]) == 16


def test_launches_cost_host_time(device: EmulatedDevice, clock: FakeClock) -> None:
    on_device = device.copy_h2d(batch(), device.default_stream())
    before_ns = clock.now_ns()
    for _ in range(7):
        device.matmul(on_device, device.default_stream())
    assert clock.now_ns() == before_ns + 7


def test_an_event_does_not_cover_other_streams(device: EmulatedDevice, clock: FakeClock) -> None:
    busy, idle = device.new_stream(), device.new_stream()
    device.matmul(device.copy_h2d(batch(), busy), busy)
    before_ns = clock.now_ns()
    idle.record_event().synchronize()
    idle.synchronize()
    assert clock.now_ns() == before_ns + 3


def test_query_does_not_block_and_says_when_it_is_done(device: EmulatedDevice, clock: FakeClock) -> None:
    stream = device.new_stream()
    assert stream.record_event().query()
    device.matmul(device.copy_h2d(batch(), stream), stream)
    event = stream.record_event()
    before_ns = clock.now_ns()
    assert not event.query()
    assert clock.now_ns() == before_ns + 1
    clock.advance(1000)
    assert event.query()


def test_synchronize_waits_for_all_streams(device: EmulatedDevice, clock: FakeClock) -> None:
    streams = [device.new_stream(), device.new_stream()]
    on_device = device.copy_h2d(batch(), streams[0])
    for stream in streams:
        device.matmul(on_device, stream)
    device.synchronize()
    assert clock.now_ns() == 162 + 2000


def test_threads_block_on_their_own_stream_only(device: EmulatedDevice, clock: FakeClock) -> None:
    ends: dict[str, int] = {}

    def body(name: str, matmuls: int) -> None:
        stream = device.new_stream(name)
        on_device = device.copy_h2d(batch(), stream)
        for _ in range(matmuls):
            on_device = device.matmul(on_device, stream)
        assert (device.copy_d2h(on_device, stream) == expected_output(batch(), matmuls)).all()
        ends[name] = clock.now_ns()

    clock.run(lambda: body("long", 3), lambda: body("short", 1))
    # H2D one after the other; the short thread's kernel runs second, then the rest of the long one's.
    assert ends == {"short": 1 + 160 + 1 + 2000 + 160, "long": 1 + 160 + 1 + 4000 + 160}


# Pinning


def test_pinning_blocks_the_caller(device: EmulatedDevice, clock: FakeClock) -> None:
    device.pin_empty((4, 10), np.float32)
    assert clock.now_ns() == 500 + 40
    device.pin_empty((4, 10), np.float32, nominal_bytes=4000)
    assert clock.now_ns() == 540 + 500 + 1000


def test_freed_pinned_memory_is_reused_without_pinning(device: EmulatedDevice, clock: FakeClock) -> None:
    device.pin_empty((4, 10), np.float32).free()
    before_ns = clock.now_ns()
    again = device.pin_empty((10, 4), np.int32)
    assert clock.now_ns() == before_ns
    assert (again.array.shape, again.array.dtype) == ((10, 4), np.dtype(np.int32))
    device.pin_empty((4, 10), np.float32)
    assert clock.now_ns() == before_ns + 540


def test_freed_pinned_memory_is_not_reused_before_its_copies_have_ended(
    device: EmulatedDevice, clock: FakeClock
) -> None:
    stream = device.new_stream()
    pinned = device.pin_empty((4, 10), np.float32, nominal_bytes=50_000)
    pinned.array[:] = batch()
    on_device = device.copy_h2d(pinned, stream)
    pinned.free()
    other = device.pin_empty((4, 10), np.float32, nominal_bytes=50_000)
    other.array[:] = -1
    clock.advance(10_000)
    reused = device.pin_empty((4, 10), np.float32, nominal_bytes=50_000)
    assert np.shares_memory(reused.array, pinned.array)
    reused.array[:] = -2
    assert (device.copy_d2h(on_device, stream) == batch()).all()


def test_a_view_of_pinned_memory_is_pinned_and_has_its_share_of_the_nominal_size(
    device: EmulatedDevice, log: Path
) -> None:
    pinned = device.pin_empty((4, 10), np.float32, nominal_bytes=1600)
    device.copy_h2d(pinned.array[1:2], device.new_stream())
    (copy,) = captured(device, log).memcpys
    assert (copy.bytes, copy.src_kind) == (400, PINNED)


def test_freed_pinned_memory_is_refused(device: EmulatedDevice) -> None:
    pinned = device.pin_empty((4, 10), np.float32)
    pinned.free()
    with pytest.raises(UsageError, match="freed"):
        device.copy_h2d(pinned, device.new_stream())
    with pytest.raises(UsageError, match="freed"):
        pinned.free()


def test_a_host_copy_lasts_what_the_nominal_size_takes(device: EmulatedDevice, clock: FakeClock) -> None:
    with device.charge_host_copy(2000):
        clock.advance(300)
    assert clock.now_ns() == 1000
    with device.charge_host_copy(2000):
        clock.advance(3000)
    assert clock.now_ns() == 4000


# Data


@pytest.mark.parametrize("matmuls", [0, 1, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int16])
def test_what_comes_out_is_what_is_expected(device: EmulatedDevice, matmuls: int, dtype: type) -> None:
    stream = device.new_stream()
    source = batch().astype(dtype)
    on_device = device.copy_h2d(source, stream)
    for _ in range(matmuls):
        on_device = device.matmul(on_device, stream)
    out = device.copy_d2h(on_device, stream)
    assert out.dtype == source.dtype
    assert out.tobytes() == expected_output(source, matmuls).tobytes()
    assert checksum(out) == checksum(expected_output(source, matmuls))
    assert (out.tobytes() == source.tobytes()) == (matmuls == 0)


def test_checksum_tells_batches_matmuls_and_lost_bytes_apart() -> None:
    sums = {checksum(expected_output(batch(first), matmuls)) for first in range(5) for matmuls in range(3)}
    assert len(sums) == 15
    assert checksum(batch()[:3]) != checksum(batch())
    assert checksum(np.arange(11, dtype=np.uint8)) == 0x0706050403020100 + 0x0A0908


def test_nominal_bytes_are_accounted_while_fewer_travel(device: EmulatedDevice, clock: FakeClock, log: Path) -> None:
    stream = device.new_stream()
    on_device = device.matmul(device.copy_h2d(batch(), stream, nominal_bytes=1600), stream)
    out = device.copy_d2h(on_device, stream)
    assert clock.now_ns() == 1 + 1600 + 1 + 10_000 + 1600
    assert checksum(out) == checksum(expected_output(batch(), 1))
    assert [copy.bytes for copy in captured(device, log).memcpys] == [1600, 1600]


def test_the_source_of_a_pageable_copy_may_be_overwritten_after_it(device: EmulatedDevice) -> None:
    source = batch()
    on_device = device.copy_h2d(source, device.default_stream())
    source[:] = -1
    assert (device.copy_d2h(on_device, device.default_stream()) == batch()).all()


def test_refilling_a_pinned_buffer_before_its_copy_is_done_corrupts_the_copy(device: EmulatedDevice) -> None:
    stream = device.new_stream()
    pinned = device.pin_empty((4, 10), np.float32)
    pinned.array[:] = batch()
    on_device = device.copy_h2d(pinned, stream)
    stream.record_event()
    pinned.array[:] = -1
    assert (device.copy_d2h(on_device, stream) == -1).all()


@pytest.mark.parametrize("observe", ["synchronize", "query"])
def test_refilling_a_pinned_buffer_after_its_event_is_safe(
    device: EmulatedDevice, clock: FakeClock, observe: str
) -> None:
    stream = device.new_stream()
    pinned = device.pin_empty((4, 10), np.float32)
    pinned.array[:] = batch()
    on_device = device.copy_h2d(pinned, stream)
    event = stream.record_event()
    if observe == "synchronize":
        event.synchronize()
    else:
        clock.advance(100)
        assert event.query()
    pinned.array[:] = -1
    assert (device.copy_d2h(on_device, stream) == batch()).all()


def test_an_event_of_another_copy_does_not_make_a_buffer_free(device: EmulatedDevice) -> None:
    first, second = device.new_stream(), device.new_stream()
    pinned = device.pin_empty((4, 10), np.float32)
    pinned.array[:] = batch()
    device.copy_h2d(device.pin_empty((1, 1), np.float32), first)
    early = first.record_event()
    on_device = device.copy_h2d(pinned, second)
    early.synchronize()
    pinned.array[:] = -1
    assert (device.copy_d2h(on_device, second) == -1).all()


def test_reading_a_pinned_result_early_yields_stale_bytes(device: EmulatedDevice) -> None:
    stream = device.new_stream()
    pinned = device.pin_empty((4, 10), np.float32)
    pinned.array[:] = -1
    out = device.copy_d2h(device.copy_h2d(batch(), stream), stream, out=pinned)
    assert (out == -1).all()
    stream.synchronize()
    assert (out == batch()).all()


def test_work_without_order_reads_poison(device: EmulatedDevice) -> None:
    up, compute = device.new_stream(), device.new_stream()
    pinned = device.pin_empty((4, 10), np.float32, nominal_bytes=50_000)
    on_device = device.copy_h2d(pinned, up)
    out = device.copy_d2h(device.matmul(on_device, compute), compute)
    assert set(out.tobytes()) == {POISON}


def test_one_pinned_buffer_serves_as_source_and_result_in_stream_order(device: EmulatedDevice) -> None:
    stream = device.new_stream()
    pinned = device.pin_empty((4, 10), np.float32)
    pinned.array[:] = batch()
    first = device.matmul(device.copy_h2d(pinned, stream), stream)
    device.copy_d2h(first, stream, out=pinned)
    second = device.matmul(device.copy_h2d(pinned, stream), stream)
    assert checksum(device.copy_d2h(second, stream)) == checksum(expected_output(batch(), 2))


def test_bytes_move_once_and_a_second_observer_waits_for_them() -> None:
    entered, leave = threading.Event(), threading.Event()
    moves: list[str] = []

    def slow_effect() -> None:
        entered.set()
        leave.wait(30)
        moves.append("moved")

    copy = Operation(Engine.H2D, 1, effect=slow_effect)
    observers = [threading.Thread(target=_move, args=((copy,),), daemon=True) for _ in range(2)]
    observers[0].start()
    entered.wait(30)
    observers[1].start()
    observers[1].join(0.05)
    assert observers[1].is_alive()
    leave.set()
    for observer in observers:
        observer.join(30)
    assert moves == ["moved"]


def test_parts_of_an_array_are_copied_one_by_one(device: EmulatedDevice, log: Path) -> None:
    stream = device.new_stream()
    source = batch()
    data = source.reshape(-1).view(np.uint8)
    on_device = device.empty(source.shape, source.dtype, nominal_bytes=1600)
    for offset in (0, 80):
        device.copy_h2d(data[offset : offset + 80], stream, nominal_bytes=800, into=on_device, offset=offset)
    on_device = device.matmul(on_device, stream)
    out = np.empty_like(source)
    for offset in (0, 80):
        part = out.reshape(-1).view(np.uint8)[offset : offset + 80]
        device.copy_d2h(on_device, stream, out=part, offset=offset)
    assert checksum(out) == checksum(expected_output(source, 1))
    assert [copy.bytes for copy in captured(device, log).memcpys] == [800] * 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.integers(0, 2)] * 3, st.booleans(), st.integers(1, 3), st.integers(0, 3000)),
        min_size=1,
        max_size=8,
    )
)
def test_any_program_ordered_by_events_yields_what_is_expected(
    tmp_path_factory: pytest.TempPathFactory, program: list[tuple[int, int, int, bool, int, int]]
) -> None:
    """Batches through random streams for H2D, compute and D2H, pinned or not, at random intervals."""
    clock = FakeClock()
    log = tmp_path_factory.mktemp("program") / "device.jsonl"
    device = EmulatedDevice(round_model(), log_path=log, clock=clock)
    streams = [device.new_stream() for _ in range(3)]
    results: list[tuple[np.ndarray, int]] = []
    for number, (up, compute, down, is_pinned, matmuls, pause_ns) in enumerate(program):
        clock.advance(pause_ns)
        source: np.ndarray | PinnedBuffer = batch(100 * number)
        out: PinnedBuffer | None = None
        if is_pinned:
            source, out = (device.pin_empty((4, 10), np.float32) for _ in range(2))
            source.array[:] = batch(100 * number)
        on_device = device.copy_h2d(source, streams[up])
        streams[compute].wait_event(streams[up].record_event())
        for _ in range(matmuls):
            on_device = device.matmul(on_device, streams[compute])
        streams[down].wait_event(streams[compute].record_event())
        results.append((device.copy_d2h(on_device, streams[down], out=out), matmuls))
    capture = captured(device, log)
    for number, (result, matmuls) in enumerate(results):
        assert checksum(result) == checksum(expected_output(batch(100 * number), matmuls))
    assert len(capture.kernels) == sum(matmuls for _, matmuls in results)
    assert_engines_exclusive(capture)


# Refusals


def test_refuses_what_it_cannot_do(device: EmulatedDevice, model: DeviceModel) -> None:
    stream = device.new_stream()
    on_device = device.copy_h2d(batch(), stream)
    with pytest.raises(UsageError, match="shape and dtype"):
        device.copy_d2h(on_device, stream, out=np.empty((4, 9), np.float32))
    read_only = np.empty((4, 10), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        device.copy_d2h(on_device, stream, out=read_only)
    with pytest.raises(UsageError, match="takes a matrix"):
        device.matmul(device.copy_h2d(np.zeros(4, np.float32), stream), stream)
    with pytest.raises(UsageError, match="not object"):
        device.copy_h2d(np.array([object()]), stream)
    with pytest.raises(UsageError, match="another device"):
        device.copy_h2d(EmulatedDevice(model).pin_empty((1,), np.float32), stream)


# Log and capture


def test_the_capture_says_what_the_engines_and_the_host_did(device: EmulatedDevice, log: Path) -> None:
    stream = device.new_stream()
    with device.annotate("batch 0"):
        out = device.copy_d2h(device.matmul(device.copy_h2d(batch(), stream), stream), stream)
    stream.synchronize()
    assert out.any()
    capture = captured(device, log)
    assert capture.device_name == "Emulated NVIDIA B200"
    assert (capture.sm_count, capture.total_memory_bytes) == (148, 179_000_000_000)
    assert [(kernel.start_ns, kernel.end_ns) for kernel in capture.kernels] == [(162, 1162)]
    assert [(c.copy_kind, c.src_kind, c.dst_kind, c.bytes) for c in capture.memcpys] == [
        (HTOD, PAGEABLE, DEVICE, 160),
        (DTOH, DEVICE, PAGEABLE, 160),
    ]
    calls = {call.correlation_id: call for call in capture.runtime_calls}
    assert [call.name for call in capture.runtime_calls] == [
        "cudaMemcpyAsync_v3020",
        "cudaLaunchKernel_v7000",
        "cudaMemcpyAsync_v3020",
        "cudaStreamSynchronize_v3020",
    ]
    for work in (*capture.kernels, *capture.memcpys):
        assert calls[work.correlation_id].start_ns <= work.start_ns
    assert calls[capture.memcpys[0].correlation_id].end_ns == capture.memcpys[0].end_ns
    (sync,) = capture.syncs
    assert (sync.stream_id, sync.sync_type) == (stream.stream_id, 3)
    (nvtx,) = capture.nvtx
    assert (nvtx.text, nvtx.start_ns, nvtx.end_ns) == ("batch 0", 0, capture.memcpys[1].end_ns)
    assert capture.thread_names[(nvtx.pid, nvtx.tid)] == threading.current_thread().name
    assert capture.metadata["emulated"] == "true"
    assert capture.metadata["unfinished_operations"] == capture.metadata["instances_not_closed"] == "0"


def test_a_device_without_a_log_works(model: DeviceModel, clock: FakeClock) -> None:
    device = EmulatedDevice(model, clock=clock)
    device.copy_h2d(batch(), device.default_stream())
    device.close()
    device.close()
    with pytest.raises(UsageError, match="closed"):
        device.synchronize()


def test_threads_in_real_time_keep_the_engines_exclusive_and_the_data_right(log: Path) -> None:
    """Eight threads, real clock, a model so fast that the test takes a fraction of a second."""
    fields = load_model("b200").model_dump(by_alias=True)
    fields["matmul_total_ms"]["value"] = 0.05
    device = EmulatedDevice(DeviceModel.model_validate(fields), log_path=log)
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            stream = device.new_stream()
            pinned = device.pin_empty((4, 10), np.float32)
            for turn in range(10):
                pinned.array[:] = batch(number * 100 + turn)
                on_device = device.copy_h2d(pinned, stream)
                for _ in range(3):
                    on_device = device.matmul(on_device, stream)
                out = device.copy_d2h(on_device, stream)
                assert checksum(out) == checksum(expected_output(batch(number * 100 + turn), 3))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    capture = captured(device, log)
    assert (len(capture.kernels), len(capture.memcpys)) == (240, 160)
    assert capture.metadata["unfinished_operations"] == capture.metadata["torn_lines"] == "0"
    assert_engines_exclusive(capture)
