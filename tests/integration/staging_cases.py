"""What ``test_staging_ray.py`` runs inside a process whose Ray may have the pinned-staging patch.

``python staging_cases.py ANSWER_FD`` reads one case a line on stdin (a name, or a name and an argument) and answers
with one JSON object a line: ``{"value": ...}`` or ``{"error": traceback}``. All cases share one Ray, which is started
by the first that needs it. Importing this file needs no patched Ray.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

Batch = dict[str, Any]


def start_ray() -> None:
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=1 << 30,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )
        ray.data.DataContext.get_current().enable_progress_bars = False


def options(engine: Any = "host", **changes: Any) -> Any:
    import ray

    return ray.data.PinnedStagingOptions(**{"slot_bytes": 4096, "max_pinned_bytes": 16384, "engine": engine, **changes})


def strategy(staging: Any = None, **changes: Any) -> Any:
    import ray

    arguments = {"size": 1, **changes}
    return ray.data.ActorPoolStrategy(**arguments, **({} if staging is None else {"pinned_staging": staging}))


# UDFs


class Double:
    """Doubles every number. ``saw`` says what kind of array the UDF got."""

    def __call__(self, batch: Batch) -> Batch:
        numbers = {name: column for name, column in batch.items() if getattr(column, "dtype", "O").kind in "iuf"}
        kinds = {type(column).__name__ for column in numbers.values()}
        rows = len(next(iter(batch.values())))
        return {
            **batch,
            **{name: column + column for name, column in numbers.items()},
            "saw": np.array(["/".join(sorted(kinds))] * rows),
        }


class Raises:
    def __call__(self, batch: Batch) -> Batch:
        raise ValueError("bad row")


class Async:
    async def __call__(self, batch: Batch) -> Batch:
        return batch


class AsyncGenerator:
    async def __call__(self, batch: Batch) -> Any:
        yield batch


class Generator:
    def __call__(self, batch: Batch) -> Any:
        yield batch


class ReturnsGenerator:
    def __call__(self, batch: Batch) -> Any:
        return (batch for _ in range(1))


class DiesOnce:
    """Ends its process in the middle of a batch, the first time."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __call__(self, batch: Batch) -> Batch:
        if 5 in np.asarray(batch["id"]) and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"id": batch["id"] + batch["id"]}


class Slow:
    """Says when each call ran."""

    def __init__(self, log: str) -> None:
        self.log = log

    def __call__(self, batch: Batch) -> Batch:
        start = time.monotonic_ns()
        time.sleep(0.1)
        _append(self.log, {"udf": [start, time.monotonic_ns()], "batch": int(batch["id"][0])})
        return {"id": batch["id"]}


def _append(path: str, record: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _read(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


# Engines


def engine_class() -> Any:
    """The host engine with a log of host copies, a count of pinned bytes, and errors on demand."""
    from ray.data._internal.pinned_staging import HostCopyEngine

    class Engine(HostCopyEngine):
        def __init__(self, log: str, fail: str, after: int) -> None:
            super().__init__()
            self.log, self.fail, self.left = log, fail, after
            self.pinned = 0

        def _count_down(self, method: str) -> None:
            if method == self.fail:
                self.left -= 1
                if self.left < 0:
                    raise OSError(f"{method} failed")

        def pin(self, nbytes: int) -> np.ndarray:
            self._count_down("pin")
            self.pinned += nbytes
            return super().pin(nbytes)

        def unpin(self, buffer: np.ndarray) -> None:
            self.pinned -= buffer.nbytes
            super().unpin(buffer)

        def copy_h2d(self, source: np.ndarray, target: Any, offset: int) -> Any:
            self._count_down("copy_h2d")
            if source.nbytes == 8:
                _append(self.log, {"staged": time.monotonic_ns(), "batch": int(source.view(np.int64)[0])})
            return super().copy_h2d(source, target, offset)

        def copy_d2h(self, source: Any, offset: int, target: np.ndarray) -> Any:
            self._count_down("copy_d2h")
            return super().copy_d2h(source, offset, target)

        def close(self) -> None:
            _append(self.log, {"closed": self.pinned})
            super().close()

    return Engine


class EngineFactory:
    def __init__(self, log: str | Path, fail: str = "", after: int = 0) -> None:
        self.arguments = (str(log), fail, after)

    def __call__(self) -> Any:
        return engine_class()(*self.arguments)


# Cases: each returns something JSON can carry


def plan_without_staging() -> dict[str, Any]:
    """The planned actor operator, in words that do not depend on the process. Runs on any Ray."""
    import ray
    from ray.data._internal.logical.optimizers import get_execution_plan

    start_ray()
    described = {}
    for name, remote_args in {"plain": {}, "threads": {"max_concurrency": 2}}.items():
        dataset = ray.data.range(8).map_batches(Double, compute=strategy(), num_cpus=1, **remote_args)
        plan, _ = get_execution_plan(dataset._logical_plan)
        operator = plan.dag
        init_fn = operator.get_map_transformer()._init_fn
        cells = [cell.cell_contents for function in _closures(init_fn) for cell in function.__closure__ or ()]
        classes = {udf.instantiation_class for cell in cells if isinstance(cell, list) for udf in cell}
        described[name] = {
            "plan": [str(one) for one in operator.post_order_iter()],
            "remote args": {key: str(value) for key, value in operator._ray_remote_args.items()},
            "in flight": operator._actor_pool.max_tasks_in_flight_per_actor(),
            "concurrency": operator._actor_pool.max_actor_concurrency(),
            "transforms": [type(one).__name__ for one in operator.get_map_transformer().get_transform_fns()],
            "UDF classes": sorted(cls.__qualname__ for cls in classes),
            "UDF bases": sorted(base.__name__ for cls in classes for base in cls.__mro__),
            "strategy": repr(strategy()),
        }
    return described


def _closures(function: Any) -> list[Any]:
    """``function`` and the functions that its closure holds (fused operators chain their init functions)."""
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return [
        function,
        *(inner for one in held if callable(one) and hasattr(one, "__closure__") for inner in _closures(one)),
    ]


def plan_with_staging() -> dict[str, Any]:
    import ray
    from ray.data._internal.logical.optimizers import get_execution_plan

    start_ray()
    described = {}
    for name, compute in {
        "default": strategy(options()),
        "depth 2": strategy(options(depth=2)),
        "in flight 9": strategy(options(), max_tasks_in_flight_per_actor=9),
    }.items():
        dataset = ray.data.range(8).map_batches(Double, compute=compute, num_cpus=1)
        pool = get_execution_plan(dataset._logical_plan)[0].dag._actor_pool
        described[name] = [pool.max_actor_concurrency(), pool.max_tasks_in_flight_per_actor()]
    return described


def compare_and_pickle() -> None:
    import ray.cloudpickle

    plain, staged, other = strategy(), strategy(options()), strategy(options(depth=2))
    assert plain == strategy() and plain.pinned_staging is None
    assert strategy(True) == strategy(True) != plain and strategy(False) == plain
    assert staged == strategy(options()) and staged != other and staged != plain
    assert "pinned_staging" not in repr(plain)
    assert repr(staged).endswith(f", pinned_staging={options()!r})")
    for dumps in (pickle.dumps, ray.cloudpickle.dumps):
        assert pickle.loads(dumps(staged)) == staged
    old = strategy()
    del old.__dict__["_pinned_staging"]  # as pickled by a Ray without the patch
    assert old.pinned_staging is None and pickle.loads(pickle.dumps(old)) == plain


REJECTIONS: dict[str, str] = {
    "async": "doesn't support async UDFs: `Async.__call__` is async",
    "async generator": "doesn't support async UDFs: `AsyncGenerator.__call__` is async",
    "generator": "doesn't support generator UDFs, which run outside the UDF thread: `Generator.__call__` yields",
    "returned generator": "doesn't support UDFs that return generators",
    "true multithreading": "pinned_staging and enable_true_multi_threading cannot both be set",
    "pandas": "`pinned_staging` needs `batch_format='numpy'`, got: 'pandas'",
    "pyarrow": "`pinned_staging` needs `batch_format='numpy'`, got: 'pyarrow'",
    "map": "`pinned_staging` works with `map_batches`, not with",
    "filter": "`pinned_staging` works with `map_batches`, not with",
    "flat_map": "`pinned_staging` works with `map_batches`, not with",
    "max_concurrency": "max_concurrency (1) conflicts with the `depth` of pinned_staging (3)",
    "in flight": "max_tasks_in_flight_per_actor (2) must be >= the depth of pinned_staging (3)",
    "no device": "`pinned_staging` with the cuda engine needs",
    "missing column": "The batch has no column ['x'], only ['id']",
    "nonsense": "pinned_staging must be a bool, None or PinnedStagingOptions: 'yes'",
}


def rejection(kind: str) -> str:
    """Everything the driver's error says."""
    import ray

    start_ray()
    udf: Any = {
        "async": Async,
        "async generator": AsyncGenerator,
        "generator": Generator,
        "returned generator": ReturnsGenerator,
    }.get(kind, Double)
    data = ray.data.range(8)
    try:
        if kind == "true multithreading":
            strategy(options(), enable_true_multi_threading=True)
        elif kind == "in flight":
            strategy(options(), max_tasks_in_flight_per_actor=2)
        elif kind == "nonsense":
            strategy("yes")
        elif kind in ("map", "filter", "flat_map"):
            getattr(data, kind)(Double, compute=strategy(options())).materialize()
        else:
            compute = strategy(
                options("cuda") if kind == "no device" else options(columns=["x"] if kind == "missing column" else None)
            )
            more: Any = {"batch_format": kind} if kind in ("pandas", "pyarrow") else {}
            more |= {"max_concurrency": 1} if kind == "max_concurrency" else {}
            data.map_batches(udf, compute=compute, num_cpus=1, **more).materialize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{kind} was not rejected")


def _table(rows: int) -> pa.Table:
    """Every kind of column, in rows ``0 .. rows - 1``."""
    from ray.data._internal.tensor_extensions.arrow import ArrowTensorArray, ArrowVariableShapedTensorArray

    number = np.arange(rows)
    tensors = ArrowTensorArray.from_numpy(np.arange(rows * 6, dtype=np.float32).reshape(rows, 2, 3))
    ragged = ArrowVariableShapedTensorArray.from_numpy([np.full(1 + i % 3, i, np.int64) for i in range(rows)])
    return pa.table(
        {
            "id": number,
            "half": pa.array((number % 11).astype(np.float16)),
            "byte": pa.array((number % 100).astype(np.uint8)),
            "flag": pa.array(number % 2 == 0),
            "tensor": tensors,
            "ragged": ragged,
            "text": [f"r{i}" for i in range(rows)],
            "blob": [b"x" * (i % 4) for i in range(rows)],
            "when": pa.array(number, pa.timestamp("us")),
            "span": pa.array(number, pa.duration("s")),
            "list": [[i] * (i % 3) for i in range(rows)],
            "nested": [{"a": i} for i in range(rows)],
            "some": [None if i % 5 == 0 else i for i in range(rows)],
            "nothing": pa.nulls(rows),
        }
    )


def columns(arguments: str) -> dict[str, Any]:
    """The same rows with and without staging, for a batch size and a number of blocks."""
    import ray

    start_ray()
    batch_size, blocks = json.loads(arguments)
    table = _table(97)
    parts = [table.slice(i * 97 // blocks, (i + 1) * 97 // blocks - i * 97 // blocks) for i in range(blocks)]
    results = {}
    for name, compute in {"stock": strategy(), "staged": strategy(options())}.items():
        data = ray.data.from_blocks(parts).map_batches(Double, batch_size=batch_size, compute=compute, num_cpus=1)
        results[name] = sorted(data.take_all(), key=lambda row: row["id"])
    assert len(results["staged"]) == 97
    for stock, staged in zip(results["stock"], results["staged"], strict=True):
        assert stock.pop("saw") == "ndarray" and staged.pop("saw") == "HostArray"
        assert list(stock) == list(staged)
        for column, value in stock.items():
            assert type(value) is type(staged[column]), column
            np.testing.assert_equal(staged[column], value, err_msg=column)
    return {"columns": list(results["stock"][0])}


def udf_error() -> dict[str, list[str]]:
    """The chain of exceptions, without and with staging."""
    import ray

    start_ray()
    return {
        name: _chain(ray.data.range(8).map_batches(Raises, compute=compute, num_cpus=1))
        for name, compute in {"stock": strategy(), "staged": strategy(options())}.items()
    }


def _chain(dataset: Any) -> list[str]:
    try:
        dataset.materialize()
    except Exception as error:
        chain: list[str] = []
        one: BaseException | None = error
        while one is not None:
            # The text of a task's error holds the traceback in the worker: keep what names exceptions.
            chain += [f"{type(one).__name__}: {line}" for line in str(one).splitlines() if re.match(r"[\w.]+: ", line)]
            one = one.__cause__
        return chain
    raise AssertionError("nothing was raised")


def engine_error(method: str) -> list[str]:
    import ray

    start_ray()
    with tempfile.TemporaryDirectory() as folder:
        engine = EngineFactory(Path(folder) / "log", method, 3)
        return _chain(
            ray.data.range(64, override_num_blocks=8).map_batches(Double, compute=strategy(options(engine)), num_cpus=1)
        )


def pinning_fails() -> dict[str, Any]:
    import ray

    start_ray()
    with tempfile.TemporaryDirectory() as folder:
        log, seen = str(Path(folder) / "log"), str(Path(folder) / "stats")

        def keep(stats: Any) -> None:
            _append(seen, vars(stats))

        engine = EngineFactory(log, "pin", 1)
        data = ray.data.range(64, override_num_blocks=8).map_batches(
            Double, compute=strategy(options(engine, stats_callback=keep)), num_cpus=1
        )
        numbers = sorted(row["id"] for row in data.take_all())
        assert numbers == [2 * i for i in range(64)]
        return max(_read(seen), key=lambda stats: stats["batches"])


def actor_dies() -> list[int]:
    import ray

    start_ray()
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder) / "died"
        data = ray.data.range(40, override_num_blocks=10).map_batches(
            DiesOnce, compute=strategy(options()), fn_constructor_args=[str(marker)], num_cpus=1
        )
        numbers = sorted(int(row["id"]) for row in data.take_all())
        assert marker.exists()
        return numbers


def memory_is_freed() -> list[dict[str, Any]]:
    """What the engine says at its end, which comes after the dataset's: wait for it."""
    import ray

    start_ray()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()  # an engine's first word is its last: there may be none yet when the dataset is done
        ray.data.range(64, override_num_blocks=8).map_batches(
            Double, compute=strategy(options(EngineFactory(log)), size=2), num_cpus=0.5
        ).materialize()
        deadline = time.monotonic() + 60
        while (closed := [one for one in _read(log) if "closed" in one]) != [{"closed": 0}] * 2:
            assert time.monotonic() < deadline, f"the engines did not close: {closed}"
            time.sleep(0.1)
        return closed


def overlap() -> dict[str, int]:
    """How many batches were staged while the UDF worked on another one."""
    import ray

    start_ray()
    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "log")
        ray.data.range(12, override_num_blocks=12).map_batches(
            Slow, compute=strategy(options(EngineFactory(log))), fn_constructor_args=[log], num_cpus=1
        ).materialize()
        records = _read(log)
        calls = {one["batch"]: one["udf"] for one in records if "udf" in one}
        inside = {
            staged["batch"]
            for staged in records
            if "staged" in staged
            for batch, (start, end) in calls.items()
            if batch != staged["batch"] and start < staged["staged"] < end
        }
        intervals = sorted(calls.values())
        serial = all(a[1] <= b[0] for a, b in pairwise(intervals))
        return {"batches": len(calls), "staged during another call": len(inside), "serial": int(serial)}


def main() -> None:
    # The classes pickle by value, as those of a user's script do.
    with open(int(sys.argv[1]), "w", encoding="utf-8") as answers:
        for line in sys.stdin:
            name, _, argument = line.rstrip("\n").partition(" ")
            try:
                answer = {"value": globals()[name](*([argument] if argument else []))}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


if __name__ == "__main__":
    main()
