"""Unions of half-open time intervals, vectorised. All arrays are int64 nanoseconds of shape (n,)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Union:
    """Disjoint intervals in ascending order that do not touch: ``start[i] < end[i] < start[i + 1]``."""

    start: np.ndarray
    end: np.ndarray

    @property
    def length_ns(self) -> int:
        return int((self.end - self.start).sum())

    def clipped(self, first_ns: int, last_ns: int) -> Union:
        """The part inside [first_ns, last_ns)."""
        keep = slice(np.searchsorted(self.end, first_ns, "right"), np.searchsorted(self.start, last_ns, "left"))
        return Union(np.maximum(self.start[keep], first_ns), np.minimum(self.end[keep], last_ns))

    def touched_by(self, other: Union) -> np.ndarray:
        """Indexes of the intervals that ``other`` overlaps, ascending."""
        first = np.searchsorted(self.end, other.start, "right")
        count = np.searchsorted(self.start, other.end, "left") - first
        before = np.cumsum(count) - count
        return np.unique(np.repeat(first - before, count) + np.arange(count.sum()))

    def covered_within(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """How much of each interval [start[i], end[i]) the union covers; those intervals may overlap."""
        if not len(self.start):
            return np.zeros(len(start), np.int64)
        before = np.cumsum(self.end - self.start)
        return self._covered_until(end, before) - self._covered_until(start, before)

    def _covered_until(self, at: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Length of the union left of each point, given the lengths summed up."""
        last = np.searchsorted(self.start, at, "right") - 1  # the interval that began last, -1 for none
        part = before[last]
        part -= np.maximum(self.end[last] - at, 0)
        part[last < 0] = 0
        return part


def union(start: np.ndarray, end: np.ndarray) -> Union:
    """The union of intervals in any order, each with ``start < end``.

    Starts and ends are sorted on their own: the union has a gap after the i-th smallest end exactly where that end
    lies before the (i + 1)-th smallest start, because then as many intervals have ended as have begun.
    """
    start, end = _sorted(start), _sorted(end)
    gap = start[1:] > end[:-1]
    first = np.ones(len(start), bool)
    first[1:] = gap
    last = np.ones(len(end), bool)
    last[:-1] = gap
    return Union(start[first], end[last])


def total(values: np.ndarray) -> int:
    """The exact sum of up to 2**31 int64 values; ``sum`` would wrap around where it leaves int64."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFF_FFFF).sum())


def _sorted(values: np.ndarray) -> np.ndarray:
    return values if (values[1:] >= values[:-1]).all() else np.sort(values)
