"""The CUDA device where there is no GPU: its arithmetic, the choice of its matmuls, and its matmul on CPU torch."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.device.cuda import MAX_MATMULS, CudaDevice, choose_inner, expected_output, inner_sizes
from repro.device.emulated import checksum
from repro.errors import MachineError, UsageError
from repro.workload import calibrate
from repro.workload.gpu_stage import STAGES, StagedStage
from repro.workload.graph import verify
from repro.workload.plan import DevicePlan, WorkloadPlan
from repro.workload.prep import PrepPlan, expected


def batch(rows: int = 8, cols: int = 16, number: int = 3) -> np.ndarray:
    return expected(number, PrepPlan(rows, cols, 0.0))


def multiplied(data: np.ndarray, matmuls: int, inner: int) -> np.ndarray:
    """By numpy, in float32, as the GPU does it."""
    weights = np.roll(2 * np.eye(inner, dtype=np.float32), 1, axis=1)
    matrix = data.reshape(-1, inner)
    for _ in range(matmuls):
        matrix = matrix @ weights
    return matrix.reshape(data.shape)


@pytest.mark.parametrize("inner", [4, 16, 64])
@pytest.mark.parametrize("matmuls", [0, 1, 9, 17])
def test_expected_output_is_what_multiplying_gives_bit_for_bit(inner: int, matmuls: int) -> None:
    out = expected_output(batch(), matmuls, inner)
    assert out.dtype == np.float32
    assert out.tobytes() == multiplied(batch(), matmuls, inner).tobytes()


def test_every_number_of_matmuls_has_another_checksum() -> None:
    sums = [checksum(expected_output(batch(), matmuls, 16)) for matmuls in range(MAX_MATMULS + 1)]
    assert len(set(sums)) == len(sums)
    assert np.isfinite(expected_output(batch(), MAX_MATMULS, 16)).all()


def test_the_batch_itself_is_not_changed() -> None:
    data = batch()
    before = data.copy()
    expected_output(data, 0, 16)[...] = 1
    np.testing.assert_array_equal(data, before)


def test_the_published_batch_can_be_multiplied_at_its_own_size() -> None:
    sizes = inner_sizes(2048, 8192)
    assert sizes == [256, 512, 1024, 2048, 4096, 8192, 16384]


@given(rows=st.integers(1, 300), cols=st.integers(1, 3000))
@settings(deadline=None)
def test_inner_sizes_divide_the_batch(rows: int, cols: int) -> None:
    sizes = inner_sizes(rows, cols)
    assert cols in sizes
    assert sizes == sorted(set(sizes))
    assert all(rows * cols % size == 0 and size >= 1 for size in sizes)


@pytest.mark.parametrize(
    ("speed", "inner"), [(1.0, 8192), (1.2, 8192), (0.3, 2048), (0.45, 4096), (1.9, 16384), (30.0, 16384)]
)
def test_the_size_closest_to_the_wanted_time_is_chosen(speed: float, inner: int) -> None:
    """``speed`` is the GPU's beside a B200; a matmul takes time proportional to its inner size."""
    times = {size: 39 / 9 * size / 8192 / speed for size in inner_sizes(2048, 8192)}
    assert choose_inner(times, 39 / 9) == inner


def test_without_a_gpu_the_device_says_so() -> None:
    reason = "finds no CUDA device" if importlib.util.find_spec("torch") else "PyTorch is not installed"
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    with pytest.raises(MachineError, match=reason) as caught:
        CudaDevice(inner=8192)
    assert caught.value.exit_status == 3


@pytest.mark.needs("torch")
def test_torch_multiplies_as_expected() -> None:
    import torch

    weights = torch.roll(2 * torch.eye(64), 1, dims=1)
    matrix = torch.from_numpy(batch(64, 64)).view(-1, 64)
    for _ in range(9):
        matrix = torch.mm(matrix, weights)
    assert matrix.numpy().tobytes() == expected_output(batch(64, 64), 9, 64).tobytes()


class HostCuda:
    """torch with its CPU in the place of CUDA: what is asked of streams and events, in order, and where arrays live."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.said: list[str] = []
        self._numbers = itertools.count(1)
        cuda = SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            get_device_name=lambda device: "Host in CUDA's place",
            default_stream=lambda device: self.Stream(0),
            Stream=lambda device: self.Stream(next(self._numbers)),
            Event=self._event,
            stream=self._on,
            synchronize=lambda device=None: self.said.append("synchronize"),
        )
        self.cuda = cuda
        self.backends = SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)))

    class Stream:
        def __init__(self, number: int) -> None:
            self.cuda_stream = number
            self.waited: list[object] = []

        def wait_event(self, event: object) -> None:
            self.waited.append(event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, shape: Any, *, dtype: Any, device: str = "cpu", pin_memory: bool = False) -> Any:
        self.said.append(f"empty {'pinned' if pin_memory else device}")
        return self._torch.empty(shape, dtype=dtype)

    def eye(self, size: int, *, dtype: Any, device: str) -> Any:
        assert device == "cuda"
        return self._torch.eye(size, dtype=dtype)

    def _event(self, *, blocking: bool) -> Any:
        assert blocking, "a waiting thread must sleep"
        return SimpleNamespace(
            record=lambda stream: self.said.append(f"record on {stream.cuda_stream}"),
            query=lambda: True,
            synchronize=lambda: self.said.append("wait"),
        )

    @contextmanager
    def _on(self, stream: HostCuda.Stream) -> Iterator[None]:
        self.said.append(f"on {stream.cuda_stream}")
        yield


@pytest.fixture
def host_cuda(monkeypatch: pytest.MonkeyPatch) -> HostCuda:
    fake = HostCuda()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.mark.needs("torch")
def test_a_batch_through_the_device(host_cuda: HostCuda) -> None:
    device = CudaDevice(inner=16)
    assert host_cuda.backends.cuda.matmul.allow_tf32 is False
    assert host_cuda.said == ["synchronize"], "the weights are complete before any stream works"
    stream = device.new_stream("stage")
    host_cuda.said.clear()
    data = batch()
    data.setflags(write=False)
    with device.annotate("batch 3"):
        array = device.copy_h2d(data, stream, nominal_bytes=data.nbytes)
        for _ in range(9):
            array = device.matmul(array, stream)
        out = device.copy_d2h(array, stream)
    assert set(host_cuda.said) == {"on 1", "empty cuda"}
    assert (array.shape, array.dtype, array.nbytes) == (data.shape, data.dtype, data.nbytes)
    assert out.tobytes() == expected_output(data, 9, 16).tobytes()


@pytest.mark.needs("torch")
def test_pinned_memory_and_events(host_cuda: HostCuda) -> None:
    device = CudaDevice(inner=16)
    stream, other = device.new_stream(), device.new_stream()
    pinned = device.pin_empty((8, 16), np.float32)
    assert host_cuda.said[-1] == "empty pinned"
    pinned.array[...] = batch()
    array = device.copy_h2d(pinned, stream)
    event = stream.record_event()
    other.wait_event(event)
    assert event.query()
    stream.synchronize()
    assert host_cuda.said[-2:] == [f"record on {stream.stream_id}", "wait"]
    back = device.copy_d2h(array, stream, out=pinned)
    assert back is pinned.array
    pinned.free()
    with pytest.raises(UsageError, match="freed"):
        pinned.free()
    with pytest.raises(UsageError, match="freed"):
        device.copy_h2d(pinned, stream)


@pytest.mark.needs("torch")
def test_what_does_not_fit_is_refused(host_cuda: HostCuda) -> None:
    device = CudaDevice(inner=16)
    stream = device.default_stream()
    array = device.copy_h2d(batch(), stream)
    with pytest.raises(UsageError, match="cannot be accounted at 1024"):
        device.copy_h2d(batch(), stream, nominal_bytes=1024)
    with pytest.raises(UsageError, match="D2H of"):
        device.copy_d2h(array, stream, out=np.empty((4, 4), np.float32))
    with pytest.raises(UsageError, match="array of another device"):
        device.matmul(batch(), stream)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="stream of another device"):
        device.matmul(array, object())  # type: ignore[arg-type]


@pytest.mark.needs("torch")
@pytest.mark.parametrize("mode", ["inline", "split", "pinned", "overlap"])
def test_the_stages_run_on_it(host_cuda: HostCuda, mode: str) -> None:
    prep = PrepPlan(8, 16, 0.0)
    device = DevicePlan(kind="cuda", model="", log="", inner=16)
    plan = WorkloadPlan(mode, "single-operator", 2, 1, 9, 8 * 16 * 4, prep, 0.0, device)  # type: ignore[arg-type]
    stage = STAGES[mode](plan)
    sums = {}
    for number in range(3):
        out = stage({"id": np.full(8, number), "data": expected(number, prep), "prep_ns": np.zeros(8)})
        sums[number] = [checksum(out["data"])]
    assert verify(plan, sums).wrong is None


@pytest.mark.needs("torch")
def test_a_staged_batch_is_a_tensor_on_both_sides(host_cuda: HostCuda) -> None:
    import torch

    prep = PrepPlan(8, 16, 0.0)
    device = DevicePlan(kind="cuda", model="", log="", inner=16)
    plan = WorkloadPlan("staged", "producer-bound", 1, 0, 9, 8 * 16 * 4, prep, 0.0, device)
    tensor = host_cuda.from_numpy(expected(5, prep))
    tensor.record_stream = lambda stream: None
    out = StagedStage(plan)({"id": np.full(8, 5), "data": tensor, "prep_ns": np.zeros(8)})
    assert isinstance(out["data"], torch.Tensor)
    assert out["data"].numpy().tobytes() == expected_output(expected(5, prep), 9, 16).tobytes()


@pytest.mark.needs("torch")
def test_calibration_chooses_a_size_and_measures_copies(host_cuda: HostCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "COPY_BYTES", 1 << 16)
    host_cuda.cuda.empty_cache = lambda: None
    facts = calibrate.calibrate(calibrate.GpuRequest(rows=64, cols=512, matmul_ms=1e-6))
    assert facts.name == "Host in CUDA's place"
    assert facts.inner == 256, "the cheapest where all take longer than wanted"
    assert facts.matmul_ms > 0
    assert min(facts.copies.model_dump().values()) > 0
