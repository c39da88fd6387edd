"""The interval code against a brute-force oracle that knows only sets of nanoseconds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.analysis.intervals import Union, total, union
from repro.analysis.metrics import measure
from repro.nsysdb.reader import Profile, Rows

INTERVAL = st.tuples(st.integers(0, 60), st.integers(1, 15)).map(lambda pair: (pair[0], pair[0] + pair[1]))
INTERVALS = st.lists(INTERVAL, max_size=12)
SOME_INTERVALS = st.lists(INTERVAL, min_size=1, max_size=12)


def arrays(intervals: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(intervals, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def points(intervals: list[tuple[int, int]]) -> set[int]:
    return {at for start, end in intervals for at in range(start, end)}


def rows(intervals: list[tuple[int, int]], **columns: int) -> Rows:
    start, end = arrays(intervals)
    full = {name: np.full(len(start), value, np.int64) for name, value in columns.items()}
    return Rows(start, end, np.zeros(len(start), np.int64), full)


@given(INTERVALS)
def test_union_covers_the_same_points_with_gaps_between(intervals: list[tuple[int, int]]) -> None:
    merged = union(*arrays(intervals))
    pairs = list(zip(merged.start.tolist(), merged.end.tolist(), strict=True))
    assert points(pairs) == points(intervals)
    assert merged.length_ns == len(points(intervals))
    assert all(end < start for (_, end), (start, _) in pairwise(pairs))


@given(INTERVALS, INTERVALS)
def test_covered_within(over: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    got = union(*arrays(over)).covered_within(*arrays(asked))
    assert got.tolist() == [len(points(over) & points([one])) for one in asked]


@given(INTERVALS, INTERVALS)
def test_touched_by(some: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    mine = union(*arrays(some))
    pairs = zip(mine.start.tolist(), mine.end.tolist(), strict=True)
    expected = [i for i, pair in enumerate(pairs) if points([pair]) & points(other)]
    assert mine.touched_by(union(*arrays(other))).tolist() == expected


@given(INTERVALS, INTERVAL)
def test_clipped(intervals: list[tuple[int, int]], window: tuple[int, int]) -> None:
    clipped: Union = union(*arrays(intervals)).clipped(*window)
    pairs = list(zip(clipped.start.tolist(), clipped.end.tolist(), strict=True))
    assert points(pairs) == points(intervals) & points([window])
    assert all(start < end for start, end in pairs)


@given(SOME_INTERVALS, INTERVALS, INTERVALS)
def test_metrics_against_the_definitions(
    kernels: list[tuple[int, int]], graphs: list[tuple[int, int]], copies: list[tuple[int, int]]
) -> None:
    profile = Profile(
        kernels=rows(kernels),
        graphs=rows(graphs),
        memcpys=rows(copies, bytes=8, copyKind=1, srcKind=0, dstKind=2),
        has_memcpy_table=True,
        device_names={},
        emulated=False,
        dropped={},
        diagnostics=[],
        notes=[],
    )
    got = measure(profile, 0)
    work = kernels + graphs
    span = points([(min(s for s, _ in work), max(e for _, e in work))])
    busy, copying = points(work), points(copies)
    assert got.span_ns == len(span)
    assert got.busy_ns == len(busy)
    assert got.idle_ns == len(span - busy)
    assert got.copy_ns == len((span - busy) & copying)
    assert got.wait_ns == len(span - busy - copying)
    assert sum(gap.copy_ms for gap in got.top_gaps) == pytest.approx(got.copy_ms)  # at most ten gaps fit
    if copies:
        total = sum(e - s for s, e in copies)
        under = sum(len(points([one]) & busy) for one in copies)
        assert got.h2d.overlapped_pct == pytest.approx(100 * under / total)
        assert got.h2d.gb_per_s == pytest.approx(8 * len(copies) / total)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9))
def test_total_is_exact(values: list[int]) -> None:
    assert total(np.array(values, np.int64)) == sum(values)
