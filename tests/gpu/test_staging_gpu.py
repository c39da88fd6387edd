"""Pinned staging's CUDA engine on a GPU: values under long kernels, overlap that the profiler sees, memory."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from staging_fakes import load, patched_source

pytestmark = pytest.mark.needs("gpu")
MIB = 1 << 20


@pytest.fixture(scope="module")
def staging() -> Any:
    return load(patched_source())


def run(staging: Any, udf: type, batches: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    """All batches through an actor's worth of threads; a hang is a failure."""
    chosen = staging.PinnedStagingOptions(**{"slot_bytes": MIB, "max_pinned_bytes": 8 * MIB, **options})
    actor = staging.make_callable_class_staged(udf, chosen)()
    todo = deque(enumerate(batches))
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def task_thread() -> None:
        while todo and not errors:
            try:
                number, batch = todo.popleft()
                results[number] = actor(batch)
            except IndexError:
                return
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=task_thread, daemon=True) for _ in range(chosen.depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a task thread hangs"
    return [results[number] for number in range(len(batches))]


class SlowDouble:
    """A long kernel before and after the work, so that every copy has the chance to be early."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import torch

        assert batch["x"].is_cuda
        torch.cuda._sleep(20_000_000)
        doubled = batch["x"] * 2
        torch.cuda._sleep(20_000_000)
        return {"x": doubled, "text": batch["text"]}


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i8", "u1"])
def test_values_under_long_kernels(staging: Any, dtype: str) -> None:
    random = np.random.default_rng(0)
    batches = [
        {"x": random.integers(0, 100, (rows, 1024)).astype(dtype), "text": np.array(["a"] * rows)}
        for rows in (2000, 1, 3000, 0, 777, 2000, 2000, 5)
    ]
    for batch, result in zip(batches, run(staging, SlowDouble, batches), strict=True):
        np.testing.assert_array_equal(result["x"], batch["x"] * 2)
        assert result["x"].dtype == batch["x"].dtype
        assert result["text"] is batch["text"]


def test_slots_are_pinned(staging: Any) -> None:
    import torch

    engine = staging.CudaCopyEngine()
    assert torch.from_numpy(engine.pin(MIB)).is_pinned()


class Matmuls:
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = batch["x"]
        for _ in range(20):
            x = (x @ x) / x.shape[0]
        return {"x": x}


def test_the_profiler_sees_copies_under_kernels(staging: Any, tmp_path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    batches = [{"x": np.random.default_rng(i).random((4096, 4096), np.float32)} for i in range(12)]
    run(staging, Matmuls, batches[:2])  # libraries load
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(staging, Matmuls, batches, slot_bytes=8 * MIB, max_pinned_bytes=128 * MIB)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = _union([(one["ts"], one["ts"] + one["dur"]) for one in events if one.get("cat") == "kernel"])
    for direction in ("HtoD", "DtoH"):
        copies = [
            (one["ts"], one["ts"] + one["dur"])
            for one in events
            if one.get("cat") == "gpu_memcpy" and direction in one["name"]
        ]
        assert all(
            "Pinned" in one["name"] for one in events if one.get("cat") == "gpu_memcpy" and direction in one["name"]
        )
        hidden = sum(max(0.0, min(end, k_end) - max(start, k)) for start, end in copies for k, k_end in kernels)
        total = sum(end - start for start, end in copies)
        # The first batch's way in and the last one's way out have nothing to hide behind.
        assert hidden / total > 0.6, f"{direction}: {hidden:.0f} of {total:.0f} us under kernels"


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def test_memory_reaches_a_plateau(staging: Any) -> None:
    import torch

    batches = [{"x": np.ones((1024 + 256 * (i % 3), 4096), np.float32), "text": np.array(["a"])} for i in range(30)]
    torch.cuda.empty_cache()
    seen: list[int] = []
    for _ in range(4):
        run(staging, SlowDouble, batches)
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_reserved())
        assert torch.cuda.memory_allocated() < 4 * MIB, "tensors outlive their batches"
    assert seen[-1] <= seen[1], f"reserved memory grows: {seen}"


def test_a_result_that_numpy_cannot_hold_is_refused(staging: Any) -> None:
    class Half:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            import torch

            return {"x": batch["x"].to(torch.bfloat16)}

    with pytest.raises(staging.PinnedStagingError, match="bfloat16 tensor, which NumPy has no dtype for"):
        run(staging, Half, [{"x": np.ones(8, np.float32)}])


def test_views_come_back_as_their_values(staging: Any) -> None:
    class Views:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"t": batch["x"].T, "s": batch["x"][::2], "c": (batch["x"] + 1j).conj()}

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    (result,) = run(staging, Views, [{"x": x}])
    np.testing.assert_array_equal(result["t"], x.T)
    np.testing.assert_array_equal(result["s"], x[::2])
    np.testing.assert_array_equal(result["c"], (x + 1j).conj())
