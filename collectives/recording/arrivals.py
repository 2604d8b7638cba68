"""Which rank came last to each collective, from rows of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.recording.rows import Rows


@dataclass(frozen=True, slots=True)
class Arrivals:
    """For each row, what is known of its collective.

    Attributes:
        ranks: Ranks whose rows are here; 0 for rows that never became an operation.
        last_rank: The rank that came last; -1 if there are not two ranks to compare.
        first_ns, last_ns: Arrivals of the first and the last rank, on the common axis.
        certain: Whether the last rank came later than the second last by more than the error of their clocks, and all
            members' rows are here.
        one: Index of one row of each collective that has two ranks or more.
    """

    ranks: NDArray[np.int64]
    last_rank: NDArray[np.int64]
    first_ns: NDArray[np.int64]
    last_ns: NDArray[np.int64]
    certain: NDArray[np.bool_]
    one: NDArray[np.intp]


def arrivals(rows: Rows, clock_errors: Mapping[int, int]) -> Arrivals:
    """Compare the ranks' arrivals."""
    count = len(rows)
    ranks = np.zeros(count, np.int64)
    last_rank = np.full(count, -1, np.int64)
    first_ns, last_ns = rows["arrival"].copy(), rows["arrival"].copy()
    certain = np.zeros(count, np.bool_)
    matched = np.flatnonzero(rows["op"])
    if not len(matched):
        return Arrivals(ranks, last_rank, first_ns, last_ns, certain, matched)
    # Copies of the columns first: indexing the columns of a structured array is several times slower.
    all_ops, all_arrivals = rows["op"].copy(), first_ns
    order = matched[np.lexsort((all_arrivals[matched], all_ops[matched]))]
    ops, arrival, rank = all_ops[order], all_arrivals[order], rows["rank"].astype(np.int64)[order]
    begins = np.flatnonzero(np.concatenate(([True], ops[1:] != ops[:-1])))
    ends = np.concatenate((begins[1:], [len(ops)])) - 1
    sizes = ends - begins + 1
    seconds = np.maximum(ends - 1, begins)
    several = sizes > 1
    errors = _errors(rank, clock_errors)
    lead = arrival[ends] - arrival[seconds]
    complete = sizes >= np.maximum(rows["size"][order[begins]], 1)
    sure = several & complete & (lead > errors[ends] + errors[seconds])
    ranks[order] = np.repeat(sizes, sizes)
    last_rank[order] = np.repeat(np.where(several, rank[ends], -1), sizes)
    first_ns[order] = np.repeat(arrival[begins], sizes)
    last_ns[order] = np.repeat(arrival[ends], sizes)
    certain[order] = np.repeat(sure, sizes)
    return Arrivals(ranks, last_rank, first_ns, last_ns, certain, order[ends[several]])


def _errors(rank: NDArray[np.int64], clock_errors: Mapping[int, int]) -> NDArray[Any]:
    if not clock_errors:
        return np.zeros(len(rank), np.int64)
    found = np.zeros(int(rank.max()) + 1, np.int64)
    for one, error in clock_errors.items():
        if one < len(found):
            found[one] = error
    return found[rank]
