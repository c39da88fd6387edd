"""Pinned staging on a device that is late on purpose: values, order of the copies, budget, errors.

The module under test comes out of ``patches/pinned-staging.patch``. ``test_staging_mutations.py`` checks that these
scenarios fail when a wait or a lock is taken out.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staging_fakes import FakeArray, FakeEngine, load, patched_source
from staging_scenarios import Scenario, check_ring, check_stage_order, doubled, run_scenario

staging = load(patched_source())


def options(engine: FakeEngine, **changes: object) -> object:
    return staging.PinnedStagingOptions(
        **{"engine": lambda: engine, "slot_bytes": 64, "max_pinned_bytes": 256, **changes}
    )


@given(
    seed=st.integers(0, 2**16),
    eager=st.sampled_from([0.0, 0.3, 0.9]),
    slot_bytes=st.sampled_from([1, 7, 64, 300]),
    slots=st.integers(2, 5),
    depth=st.integers(2, 4),
    rows=st.lists(st.integers(0, 12), min_size=1, max_size=8),
)
@settings(max_examples=30, deadline=None)
def test_values_survive_any_order_of_completion(
    seed: int, eager: float, slot_bytes: int, slots: int, depth: int, rows: list[int]
) -> None:
    run_scenario(staging, Scenario(seed, eager, slot_bytes, slots, depth, tuple(rows)))


def test_threads_never_share_a_slot() -> None:
    check_ring(staging)


def test_batches_are_staged_one_after_the_other() -> None:
    check_stage_order(staging)


DTYPES = ["?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (3, 0), (4, 3, 2), (129,)])
def test_every_number_and_shape_travels(dtype: str, shape: tuple[int, ...]) -> None:
    column = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    stager = staging.BatchStager(options(FakeEngine(1, eager=0.0)))
    columns = stager.enter(stager.stage({"x": column}))
    assert isinstance(columns["x"], FakeArray)
    result = stager.collect(stager.leave(columns))["x"]
    assert result.dtype == column.dtype and result.shape == column.shape
    np.testing.assert_array_equal(result, column)
    stager.close()


def test_a_column_that_is_not_contiguous_travels() -> None:
    column = np.arange(60, dtype=np.int32).reshape(6, 10)[::2, ::3]
    stager = staging.BatchStager(options(FakeEngine(2)))
    result = stager.collect(stager.leave(stager.enter(stager.stage({"x": column}))))
    np.testing.assert_array_equal(result["x"], column)


UNTOUCHED = {
    "strings": np.array(["a", "bc"]),
    "bytes": np.array([b"a", b"bc"]),
    "objects": np.array([{"a": 1}, None], dtype=object),
    "ragged": np.array([np.zeros(2), np.zeros(3)], dtype=object),
    "datetimes": np.array(["2026-01-01", "NaT"], dtype="M8[ns]"),
    "durations": np.array([1, 2], dtype="m8[s]"),
    "swapped": np.array([1, 2], dtype=np.dtype("i4").newbyteorder()),
    "long double": np.array([1, 2], dtype=np.longdouble),
    "records": np.zeros(2, dtype=[("a", "i4")]),
    "list": [1, 2],
}


@pytest.mark.parametrize("kind", UNTOUCHED)
def test_other_columns_pass_untouched(kind: str) -> None:
    engine = FakeEngine(3)
    stager = staging.BatchStager(options(engine))
    batch = {"other": UNTOUCHED[kind]}
    columns = stager.enter(stager.stage(batch))
    assert columns["other"] is batch["other"]
    assert stager.collect(stager.leave(columns))["other"] is batch["other"]
    assert not engine.host_copies


def test_only_the_named_columns_are_staged() -> None:
    stager = staging.BatchStager(options(FakeEngine(3), columns=["x"]))
    columns = stager.enter(stager.stage({"x": np.ones(3), "id": np.ones(3)}))
    assert isinstance(columns["x"], FakeArray) and isinstance(columns["id"], np.ndarray)
    with pytest.raises(staging.PinnedStagingError, match=r"no column \['x'\], only \['id'\]"):
        stager.stage({"id": np.ones(3)})


def test_results_that_are_no_mapping_pass_untouched() -> None:
    stager = staging.BatchStager(options(FakeEngine(3)))
    result = object()
    assert stager.collect(stager.leave(result)) is result


def test_pinned_memory_stays_within_the_limit_and_is_freed() -> None:
    engine = FakeEngine(4, eager=0.0)
    stager = staging.BatchStager(options(engine, max_pinned_bytes=300))
    assert engine.most_pinned_bytes == stager.stats().pinned_bytes == 256
    for rows in (1, 1000, 7):
        stager.collect(stager.leave(stager.enter(stager.stage({"x": np.ones(rows)}))))
    assert engine.most_pinned_bytes == 256
    stager.stage({"x": np.ones(20)})  # its copies have not run yet
    stager.close()
    assert (engine.pinned, engine.faults, engine.closed) == ([], [], True)


def test_pageable_copies_with_one_warning_when_pinning_fails(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(5, eager=0.0, pin_limit=130)
    with caplog.at_level("WARNING"):
        stager = staging.BatchStager(options(engine))
        for _ in range(3):
            result = stager.collect(stager.leave(stager.enter(stager.stage({"x": np.arange(99.0)}))))
            np.testing.assert_array_equal(result["x"], np.arange(99.0))
    assert engine.pinned == [], "what could be pinned is given back"
    (record,) = caplog.records
    assert "pinning 4 slots of 64 bytes failed (MemoryError: cannot pin 64 bytes)" in record.getMessage()
    stats = stager.stats()
    assert (stats.pinned_bytes, stats.fallback) == (0, "MemoryError: cannot pin 64 bytes")
    stager.close()


def test_stats_count_bytes_batches_and_host_time() -> None:
    seen = []
    stager = staging.BatchStager(options(FakeEngine(6), stats_callback=seen.append))
    for _ in range(2):
        columns = stager.enter(stager.stage({"x": np.ones(50), "s": np.array(["a"] * 50)}))
        stager.collect(stager.leave({"y": columns["x"], "z": columns["x"]}))
    assert [stats.batches for stats in seen] == [1, 2]
    last = seen[-1]
    assert (last.h2d_bytes, last.d2h_bytes, last.slots, last.fallback) == (800, 1600, 4, None)
    assert last.host_copy_s > seen[0].host_copy_s > 0


@pytest.mark.parametrize("method", ["empty", "host_copy", "copy_h2d", "begin_use", "end_use", "copy_d2h"])
def test_an_engine_error_is_a_staging_error_and_loses_no_slot(method: str) -> None:
    engine = FakeEngine(7, eager=0.0)
    stager = staging.BatchStager(options(engine, max_pinned_bytes=128))
    for _ in range(5):
        engine.fail = method
        with pytest.raises(staging.PinnedStagingError, match=f"OSError: {method} failed") as caught:
            stager.collect(stager.leave(stager.enter(stager.stage({"x": np.arange(50.0)}))))
        assert isinstance(caught.value.__cause__, OSError)
    engine.fail = ""
    result = stager.collect(stager.leave(stager.enter(stager.stage({"x": np.arange(50.0)}))))
    np.testing.assert_array_equal(result["x"], np.arange(50.0))
    stager.close()
    assert engine.pinned == []


def test_an_error_of_the_udf_is_the_udfs_own() -> None:
    class Broken:
        def __call__(self, batch: dict) -> dict:
            raise ValueError("bad row")

    engine = FakeEngine(8)
    udf = staging.make_callable_class_staged(Broken, options(engine))()
    for _ in range(9):
        with pytest.raises(ValueError, match="bad row"):
            udf({"x": np.arange(50.0)})


def test_a_udf_that_returns_a_generator_is_refused() -> None:
    class Sneaky:
        def __call__(self, batch: dict) -> object:
            return (batch for _ in range(2))

    udf = staging.make_callable_class_staged(Sneaky, options(FakeEngine(8)))()
    with pytest.raises(staging.PinnedStagingError, match="doesn't support UDFs that return generators"):
        udf({"x": np.arange(5.0)})


def test_memory_is_freed_with_the_udf_and_when_its_constructor_fails() -> None:
    class Fine:
        def __call__(self, batch: dict) -> dict:
            return batch

    class Broken(Fine):
        def __init__(self) -> None:
            raise ValueError("no weights")

    engine = FakeEngine(9)
    udf = staging.make_callable_class_staged(Fine, options(engine))()
    udf({"x": np.arange(5.0)})
    assert len(engine.pinned) == 4
    del udf
    assert (engine.pinned, engine.closed) == ([], True)

    engine = FakeEngine(9)
    with pytest.raises(ValueError, match="no weights"):
        staging.make_callable_class_staged(Broken, options(engine))()
    assert (engine.pinned, engine.closed) == ([], True)


def test_a_thread_that_waits_for_a_slot_is_woken_by_close() -> None:
    ring = staging.SlotRing([np.zeros(8, np.uint8)])
    ring.acquire()
    ring.close()
    with pytest.raises(staging.PinnedStagingError, match="closed while in use"):
        ring.acquire()
    assert ring.try_acquire() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 1}, "`depth` must be an int >= 2, got: 1"),
        ({"depth": True}, "`depth` must be an int >= 2, got: True"),
        ({"slot_bytes": 0}, "`slot_bytes` must be an int >= 1, got: 0"),
        ({"max_pinned_bytes": 1.5}, "`max_pinned_bytes` must be an int >= 2"),
        ({"slot_bytes": 65, "max_pinned_bytes": 129}, "must hold at least two slots"),
        ({"engine": "rocm"}, r"`engine` must be one of \['cuda', 'host'\], an import path"),
        ({"engine": 3}, "`engine` must be a str or a callable: 3"),
        ({"columns": "x"}, "`columns` must be a sequence of names: 'x'"),
    ],
)
def test_options_that_make_no_sense(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        staging.PinnedStagingOptions(**changes)


def test_options_compare_and_print() -> None:
    plain = staging.PinnedStagingOptions()
    assert plain == staging.PinnedStagingOptions.resolve(True) != staging.PinnedStagingOptions(depth=2)
    assert hash(plain) == hash(staging.PinnedStagingOptions())
    assert staging.PinnedStagingOptions.resolve(False) is staging.PinnedStagingOptions.resolve(None) is None
    assert repr(plain) == (
        "PinnedStagingOptions(depth=3, max_pinned_bytes=134217728, slot_bytes=8388608, columns=None, "
        "engine='cuda', stats_callback=None)"
    )
    with pytest.raises(ValueError, match="pinned_staging must be a bool, None or PinnedStagingOptions: 3"):
        staging.PinnedStagingOptions.resolve(3)


def test_engines_by_import_path() -> None:
    assert isinstance(staging.PinnedStagingOptions(engine="staging_fakes:FakeEngine").create_engine(), FakeEngine)
    with pytest.raises(staging.PinnedStagingError, match="Cannot import the copy engine 'staging_fakes:Missing'"):
        staging.PinnedStagingOptions(engine="staging_fakes:Missing").create_engine()
    with pytest.raises(staging.PinnedStagingError, match="Cannot import the copy engine 'no_such_module:x'"):
        staging.PinnedStagingOptions(engine="no_such_module:x").create_engine()


def test_host_engine_copies_in_order_and_reports_errors() -> None:
    engine = staging.HostCopyEngine()
    array = engine.empty((4,), np.dtype("f4"))
    source = np.arange(4, dtype="f4")
    engine.copy_h2d(source.view(np.uint8), array, 0).synchronize()
    np.testing.assert_array_equal(array, source)
    # A view of a device array is one too, a plain array is none, and neither is an array of objects.
    assert engine.is_device_array(array * 2) and not engine.is_device_array(source)
    assert not engine.is_device_array(array.astype(object))
    bad = engine.copy_h2d(np.zeros(3, np.uint8), array[:0], 0)
    with pytest.raises(staging.PinnedStagingError, match="A copy failed"):
        bad.synchronize()
    with pytest.raises(staging.PinnedStagingError, match="A copy failed"):
        engine.copy_h2d(source.view(np.uint8), array, 0).synchronize()
    engine.close()


def test_doubled_is_what_the_scenarios_expect() -> None:
    np.testing.assert_array_equal(doubled(np.array([1, 2])), [2, 4])


def test_stats_pickle() -> None:
    # By reference to its module, which only a patched Ray has: compare the fields.
    stats = staging.PinnedStagingStats(batches=2, fallback="no")
    assert pickle.loads(pickle.dumps(vars(stats))) == vars(stats)
