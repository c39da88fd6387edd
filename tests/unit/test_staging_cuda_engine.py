"""The CUDA engine against a recording stand-in for torch: which stream each call is made on, and in what order.

``tests/gpu/test_staging_gpu.py`` runs the engine on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from staging_fakes import load, patched_source

staging = load(patched_source())


class FakeTorch:
    """Just enough of torch. ``calls`` holds (stream, what) in order."""

    class Tensor:
        is_cuda = True

    def __init__(self, *, available: bool = True) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._streams = ["default"]
        made = iter(["h2d", "d2h"])
        self.uint8 = "uint8"
        self.device = lambda kind, index: f"{kind}:{index}"
        self._C = SimpleNamespace(_host_emptyCache=lambda: self._note("host cache emptied"))
        self.cuda = SimpleNamespace(
            is_available=lambda: available,
            current_device=lambda: 0,
            Stream=lambda device: SimpleNamespace(name=next(made)),
            Event=self._event,
            stream=self._on,
            current_stream=lambda device: SimpleNamespace(
                name="udf", wait_event=lambda event: self.calls.append(("udf", f"wait {event.name}"))
            ),
        )

    def _note(self, what: Any) -> None:
        self.calls.append((self._streams[-1], what))

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        self._streams.append(stream.name)
        yield
        self._streams.pop()

    def _event(self, blocking: bool) -> Any:
        event = SimpleNamespace(name="event")
        event.record = lambda stream: self.calls.append((stream.name, "record"))
        assert blocking, "a waiting thread must not spin"
        return event

    def empty(self, *size: Any, **options: Any) -> Any:
        self._note(f"empty on {options.get('device', 'host')}")
        return self.tensor()

    def from_numpy(self, array: np.ndarray) -> Any:
        if array.dtype == np.longdouble:
            raise TypeError("no such dtype")
        return self.tensor()

    def tensor(self) -> Any:
        tensor = MagicMock()
        tensor.view.return_value = tensor
        tensor.__getitem__.return_value = tensor
        tensor.device = "cuda:0"
        tensor.copy_.side_effect = lambda source, non_blocking: self._note(f"copy non_blocking={non_blocking}")
        tensor.record_stream.side_effect = lambda stream: self.calls.append((stream.name, "record_stream"))
        return tensor


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    return fake


def test_copies_to_the_device_are_asynchronous_on_their_own_stream(torch: FakeTorch) -> None:
    engine = staging.CudaCopyEngine()
    assert engine.supports(np.dtype("f4")) and not engine.supports(np.dtype(np.longdouble))
    array = engine.empty((4,), np.dtype("f4"))
    engine.copy_h2d(np.zeros(16, np.uint8), array, 0)
    assert torch.calls == [("h2d", "empty on cuda:0"), ("h2d", "copy non_blocking=True"), ("h2d", "record")]


def test_the_udfs_stream_waits_for_the_copies_and_keeps_their_memory(torch: FakeTorch) -> None:
    engine = staging.CudaCopyEngine()
    engine.begin_use([torch.tensor(), torch.tensor()], SimpleNamespace(name="ready"))
    assert torch.calls == [("udf", "wait ready"), ("udf", "record_stream"), ("udf", "record_stream")]


def test_the_end_of_the_udf_is_recorded_behind_its_last_work(torch: FakeTorch) -> None:
    engine = staging.CudaCopyEngine()
    tensor = torch.tensor()
    contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous
    contiguous.side_effect = lambda: torch._note("contiguous")
    engine.end_use([tensor])
    assert torch.calls == [("default", "contiguous"), ("udf", "record")]


def test_copies_to_the_host_have_a_stream_of_their_own(torch: FakeTorch) -> None:
    engine = staging.CudaCopyEngine()
    engine.copy_d2h(torch.tensor(), 0, np.zeros(16, np.uint8))
    assert torch.calls == [("d2h", "copy non_blocking=True"), ("d2h", "record")]


def test_a_tensor_of_another_device_is_refused(torch: FakeTorch) -> None:
    engine = staging.CudaCopyEngine()
    tensor = torch.tensor()
    tensor.device = "cuda:1"
    with pytest.raises(staging.PinnedStagingError, match="a tensor on cuda:1, but its actor stages on cuda:0"):
        engine.end_use([tensor])


def test_close_gives_the_pinned_cache_back(torch: FakeTorch) -> None:
    staging.CudaCopyEngine().close()
    assert torch.calls == [("default", "host cache emptied")]


def test_no_device_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(available=False))  # type: ignore[arg-type]
    with pytest.raises(staging.PinnedStagingError, match=r"needs a GPU, but this actor sees none\. Pass `num_gpus`"):
        staging.CudaCopyEngine()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(staging.PinnedStagingError, match="the cuda engine needs PyTorch"):
        staging.CudaCopyEngine()
