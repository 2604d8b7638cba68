"""Matching of collectives over all ranks: a number for each, the generation of each span, and the rank that came last.

Spans are matched once, when they come in, so that the views that show them need not match them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.tracing.columns import NOT_READY, Rows
from hvdlab.collectives.tracing.record_format import Members
from hvdlab.collectives.types import OpKind

_PRIME = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_KEPT = 1 << 16


class Generations:
    """Generations of process sets, by span: sequence numbers begin again with each generation."""

    def __init__(self) -> None:
        #: The present generation, by rank and process set.
        self._generations: dict[tuple[int, int], int] = {}
        #: The number of members, by process set and generation.
        self._sizes: dict[tuple[int, int], int] = {}

    def assign(
        self, rows: Rows, rank: int, places: NDArray[np.intp], news: Sequence[tuple[int, Members]]
    ) -> None:
        """Set ``generation`` and ``size`` of one rank's rows.

        Args:
            rows: The rows.
            rank: The rank that recorded them.
            places: Each row's place among all records of the batch.
            news: The batch's records of members, each with its place.
        """
        for _, event in news:
            self._sizes[event.process_set, event.generation] = event.size
        for process_set in np.unique(rows["set"]).tolist():
            own = rows["set"] == process_set
            changes = [(place, event.generation) for place, event in news if event.process_set == process_set]
            # The first spans of a rank may come before its first record of members: that one's generation is theirs, too.
            first = changes[0][1] if changes else 0
            rows["generation"][own] = self._generations.get((rank, process_set), first)
            for place, generation in changes:
                rows["generation"][own & (places > place)] = generation
            for generation in np.unique(rows["generation"][own]).tolist():
                rows["size"][own & (rows["generation"] == generation)] = self._sizes.get(
                    (process_set, generation), 0
                )
        # A message has two members: with the size of its process set it would never count as complete.
        rows["size"][rows["kind"] == OpKind.SENDRECV] = 2
        for _, event in news:
            # Only now: rows before the first change in the batch belong to the generation that was known before.
            self._generations[rank, event.process_set] = event.generation


class Numbering:
    """Numbers of collectives, one for each tensor, the same on all ranks that took part. They grow.

    The newest ``2 * _KEPT`` are remembered; records of a rank that come later than that are matched with no other rank's.
    """

    def __init__(self) -> None:
        #: The next number.
        self._next = 1
        #: Each collective by a digest of its names: its number in the low 32 bits, a bit per rank above them. Once
        #: ``_new`` is full it becomes ``_old``, and the former ``_old`` is forgotten.
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def assign(self, rows: Rows, rank: int, names: NDArray[Any]) -> None:
        """Set ``op`` of one rank's rows, in the order in which it recorded them.

        Args:
            rows: The rows.
            rank: The rank that recorded them.
            names: A number for each row's name, the same at all lines that use it: ranks may use it at different ones.
        """
        operations = (rows["flags"] & NOT_READY) == 0
        if not operations.any():
            return
        keys = _digest(rows[operations], names[operations])
        rows["op"][operations] = self._numbers(keys, 1 << (rank + 32))
        if len(self._new) > _KEPT:
            self._new, self._old = {}, self._new

    def _numbers(self, keys: list[int], bit: int) -> list[int]:
        return self._alike(keys, bit) or self._each(keys, bit)

    def _alike(self, keys: list[int], bit: int) -> list[int] | None:
        """Return the numbers if other ranks have recorded either all of these or none, as usually; otherwise ``None``."""
        if len(set(keys)) < len(keys):
            return None
        known = [number for number in map(self._new.get, keys) if number is not None]
        if len(known) == len(keys):
            # This rank has recorded one of them before, so its number is used again for another collective.
            if any(number & bit for number in known):
                return None
            self._new.update(zip(keys, [number | bit for number in known], strict=True))
            return [number & 0xFFFFFFFF for number in known]
        following = self._next + len(keys)
        if known or following > 0xFFFFFFFF or not self._old.keys().isdisjoint(keys):
            return None
        found = list(range(self._next, following))
        self._new.update(zip(keys, (number | bit for number in found), strict=True))
        self._next = following
        return found

    def _each(self, keys: list[int], bit: int) -> list[int]:
        # Called for every tensor of every collective on every rank: names that are local are found quicker.
        new, following = self._new, self._next
        find, find_old = new.get, self._old.get
        found = []
        for key in keys:
            known = find(key) or find_old(key)
            if known is None or known & bit:
                known = following
                # Never 0, which stands for rows that became no collective.
                following = following % 0xFFFFFFFF + 1
            # Also one that was found in `_old`: records of its other ranks can still come, so it is remembered for longer.
            new[key] = known | bit
            found.append(known & 0xFFFFFFFF)
        self._next = following
        return found


def _digest(rows: Rows, names: NDArray[Any]) -> list[int]:
    """Return 64 bits for each row, equal for the same tensor of the same operation."""
    mixed: NDArray[Any] = np.zeros(len(rows), np.uint64)
    for column in (*(rows[name] for name in ("set", "generation", "sequence", "batch")), names, rows["kind"]):
        mixed = (mixed ^ column.astype(np.uint64)) * _PRIME
        mixed ^= mixed >> _HALF
    keys: list[int] = mixed.tolist()
    if len(set(keys)) == len(keys):
        return keys
    # Tensors without a name that are fused into one operation: matched in order.
    seen: dict[int, int] = {}
    for i, key in enumerate(keys):
        seen[key] = seen.get(key, -1) + 1
        keys[i] = (key + seen[key] * int(_PRIME)) & 0xFFFFFFFFFFFFFFFF
    return keys


@dataclass(frozen=True, slots=True)
class CollectiveArrivals:
    """Arrivals at the collective of each row.

    Attributes:
        ranks: Ranks whose rows are here; 0 for rows that never became an operation.
        last_rank: The rank that came last; -1 if there are not two ranks to compare.
        first_ns, last_ns: CollectiveArrivals of the first and the last rank, on the common axis.
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


def collective_arrivals(rows: Rows, clock_errors: Mapping[int, int]) -> CollectiveArrivals:
    """Compare the arrivals of ranks at each collective.

    Args:
        rows: Rows of all ranks.
        clock_errors: By how many ns the clock of a rank may be off, of ranks whose clock had to be compared.
    """
    count = len(rows)
    ranks = np.zeros(count, np.int64)
    last_rank = np.full(count, -1, np.int64)
    first_ns, last_ns = rows["arrival"].copy(), rows["arrival"].copy()
    certain = np.zeros(count, np.bool_)
    matched = np.flatnonzero(rows["op"])
    if not len(matched):
        return CollectiveArrivals(ranks, last_rank, first_ns, last_ns, certain, matched)
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
    return CollectiveArrivals(ranks, last_rank, first_ns, last_ns, certain, order[ends[several]])


def _errors(rank: NDArray[np.int64], clock_errors: Mapping[int, int]) -> NDArray[Any]:
    if not clock_errors:
        return np.zeros(len(rank), np.int64)
    found = np.zeros(int(rank.max()) + 1, np.int64)
    for one, error in clock_errors.items():
        if one < len(found):
            found[one] = error
    return found[rank]
