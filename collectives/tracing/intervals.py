"""Unions of intervals: of some at once, of one group for each rank, and one that grows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


def union(begin: NDArray[Any], end: NDArray[Any]) -> tuple[Times, Times]:
    """Return intervals, in order, that don't touch each other and cover the same as the given ones."""
    if not len(begin):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.argsort(begin, kind="stable")
    begin, reached = begin[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.concatenate(([True], begin[1:] > reached[:-1])))
    last = np.concatenate((first[1:] - 1, [len(begin) - 1]))
    return begin[first].astype(np.int64), reached[last].astype(np.int64)


def union_lengths(
    group: NDArray[Any], begin: NDArray[Any], end: NDArray[Any], since: int, groups: int
) -> Times:
    """Return, for each group, the length of the union of its intervals.

    Args:
        group: The group of each interval, a number below ``groups``.
        begin, end: The intervals.
        since: The time at which to begin; the parts of intervals before it do not count.
        groups: How many groups there are.
    """
    if not len(begin):
        return np.zeros(groups, np.int64)
    begin = np.maximum(begin, since) - since
    end = np.maximum(begin, end - since)
    # Each group gets a stretch of its own on one axis, so that one pass does for all.
    stretch = int(end.max()) + 1
    shift = group.astype(np.int64) * stretch
    first, last = union(begin + shift, end + shift)
    found: Times = np.bincount(first // stretch, last - first, groups).astype(np.int64)
    return found


class Union:
    """Union of intervals that grows as intervals are added; old ones can be forgotten."""

    def __init__(self) -> None:
        self.begin: Times = np.empty(0, np.int64)
        self.end: Times = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.begin)

    def add(self, begin: NDArray[Any], end: NDArray[Any]) -> None:
        """Add intervals; they may overlap each other and those that are here."""
        if not len(begin):
            return
        # Intervals that end before all new ones stay as they are; those are most of them.
        tail = int(np.searchsorted(self.end, begin.min()))
        more = union(np.concatenate((self.begin[tail:], begin)), np.concatenate((self.end[tail:], end)))
        self.begin = np.concatenate((self.begin[:tail], more[0]))
        self.end = np.concatenate((self.end[:tail], more[1]))

    def covered(self, edges: Times) -> Times:
        """Return how much of each stretch between two edges is covered."""
        if not len(self.begin):
            return np.zeros(len(edges) - 1, np.int64)
        sums = np.concatenate(([0], np.cumsum(self.end - self.begin)))
        begun = np.searchsorted(self.begin, edges, "right")
        to_come = np.where(begun > 0, np.maximum(0, self.end[begun - 1] - edges), 0)
        lengths: Times = np.diff(sums[begun] - to_come)
        return lengths

    def forget(self, before: int) -> None:
        """Forget the intervals that ended before a time."""
        first = int(np.searchsorted(self.end, before))
        if first:
            self.begin, self.end = self.begin[first:].copy(), self.end[first:].copy()
