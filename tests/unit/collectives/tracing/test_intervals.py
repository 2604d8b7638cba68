"""Unions of intervals, against counting each moment."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.tracing.intervals import union_lengths

INTERVALS = st.lists(st.tuples(st.integers(0, 3), st.integers(-20, 40), st.integers(0, 15)), max_size=20)


@given(INTERVALS, st.integers(-25, 45))
def test_each_moment_of_a_group_counts_once(intervals: list[tuple[int, int, int]], since: int) -> None:
    moments: list[set[int]] = [set() for _ in range(4)]
    for group, begin, length in intervals:
        moments[group].update(range(max(begin, since), begin + length))
    columns = np.array(intervals, np.int64).reshape(-1, 3).T
    found = union_lengths(columns[0], columns[1], columns[1] + columns[2], since, 4)
    assert found.tolist() == [len(group) for group in moments]
