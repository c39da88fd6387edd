"""The CUDA device where there is no GPU: its arithmetic, the choice of its matmuls, and its matmul on CPU torch."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.device.cuda import MAX_MATMULS, CudaDevice, choose_inner, expected_output, inner_sizes
from repro.device.emulated import checksum
from repro.errors import MachineError
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
