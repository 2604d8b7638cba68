"""Series that follow from the spans of all ranks, second by second: shares of time, bandwidths and lateness.

Shares are measured on unions of intervals: of some at once, of one group for each rank, and one that grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.tracing.columns import FAILED, NOT_STARTED, Rows, SeriesStore, distance, joined
from hvdlab.collectives.types import OpKind

SECOND = 1_000_000_000
"""In nanoseconds, the unit of all times here."""
SECONDS_KEPT = 600
"""Spans that come later than this are not added to their seconds."""
INTERVALS_KEPT = 65_536
"""Intervals of each kind that a rank keeps at most; older ones are forgotten before their seconds are."""
ARRIVALS_KEPT = 16_384
"""Collectives whose time of submission is remembered; only seconds with recent ones can still turn out differently."""


LATE = "hvdlab/lateness"
SHARES = ("hvdlab/share/compute", "hvdlab/share/wait", "hvdlab/share/transfer")
DERIVED = (LATE, "hvdlab/share/", "hvdlab/bandwidth/")
"""The names of all derived series begin with one of these."""
ALGORITHM, BUS = "hvdlab/bandwidth/algorithm/", "hvdlab/bandwidth/bus/"

Floats = NDArray[np.float64]
Times = NDArray[np.int64]

ROWS_AT_ONCE = 8192
"""Rows that wait at most before the series are amended."""
ROWS_UNMATCHED = 65_536
"""Rows of incomplete collectives that are kept at most, the newest."""

# By the definitions of nccl-tests: the part of the algorithm's bytes that goes over the bus, with n members.
_BUS: dict[OpKind, Callable[[Floats], Floats]] = {
    OpKind.ALLREDUCE: lambda n: 2 * (n - 1) / n,
    OpKind.ALLGATHER: lambda n: (n - 1) / n,
    OpKind.REDUCESCATTER: lambda n: (n - 1) / n,
    OpKind.ALLTOALL: lambda n: (n - 1) / n,
    OpKind.BROADCAST: np.ones_like,
    OpKind.SENDRECV: np.ones_like,
}


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


class TimeShares:
    """Shares of one rank's time.

    A second is reported once a span or a cell of the rank has ended behind it, which shows that it is over. It is reported again
    if a span comes that reaches back into it.

    At each moment the rank is in one of these states; the rest of a second is time in which no cell ran:

    * *compute*: no collective is under way, or the rank submitted another one later, while this was still under way.
      So the rank was not blocked. A transfer meanwhile costs no time, and is not counted;
    * *transfer*: its executor is in a collective, minus the time that it was blocked there on other members;
    * *wait*: the rest. The collectives that it submitted have not begun, or are blocked on other members.
    """

    def __init__(self) -> None:
        #: Rows that came since the last digest, in the order in which the rank recorded them.
        self._new: list[Rows] = []
        #: The latest time that the rank is known to have reached.
        self._reached: int | None = None
        #: The first second that was never reported.
        self._next: int | None = None
        #: The earliest time from which on something has changed since the last report.
        self._dirty: int | None = None
        #: Times in which cells ran that have ended.
        self._cells = Union()
        #: When the cell began that runs now.
        self._cell: int | None = None
        #: Whether the rank reports its cells at all; if not, it counts as running from its first collective on.
        self._tracked = False
        #: When its first collective was submitted.
        self._began: int | None = None
        #: Of the seconds before this one, not everything is remembered.
        self._floor = -(1 << 62)
        #: Submission and end of the newest collectives, by submission.
        self._arrival: Times = np.empty(0, np.int64)
        self._finish: Times = np.empty(0, np.int64)
        #: Times with a collective between its submission and its end.
        self._under_way = Union()
        #: Times with a collective in the executor.
        self._work = Union()
        #: Times in which collectives were under way and did not block the rank.
        self._active = Union()
        #: The union of ``_active`` and ``_work``.
        self._busy = Union()
        #: By second, for how many ns operations were blocked on other members.
        self._blocked: dict[int, float] = {}
        #: The operation of the last row that was digested.
        self._operation: tuple[int, ...] = ()
        #: The shares of each second as they were reported last.
        self._reported: dict[int, tuple[float, float, float]] = {}

    # -- in -----------------------------------------------------------------------------------------------------------

    def cell_began(self, at: int) -> None:
        """Begin a cell."""
        if self._cell is not None and self._reached is not None:
            self._add_cell(self._cell, self._reached)  # the rank was replaced, or the cell's end was lost
        self._tracked = True
        self._cell = at
        self._mark_dirty(at)

    def cell_ended(self, at: int, origin: int) -> None:
        """End the cell, which also ends the second that has begun."""
        if self._cell is not None:
            self._add_cell(self._cell, max(at, self._cell))
        self._cell = None
        # No span comes until the next cell, so the second that has begun counts as over.
        self._advance_to(origin + -((origin - at) // SECOND) * SECOND)

    def _add_cell(self, begin: int, end: int) -> None:
        self._cells.add(np.array([begin], np.int64), np.array([end], np.int64))
        self._mark_dirty(begin)

    def add(self, rows: Rows) -> None:
        """Add rows, in the order in which the rank recorded them."""
        self._new.append(rows)
        self._advance_to(int((rows["arrival"] + distance(rows, "finished")).max()))
        self._mark_dirty(int(rows["arrival"].min()))

    def _advance_to(self, at: int) -> None:
        self._reached = at if self._reached is None else max(self._reached, at)

    def _mark_dirty(self, at: int) -> None:
        self._dirty = at if self._dirty is None else min(self._dirty, at)

    # -- out ----------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> int:
        """Return the first second that was not reported yet."""
        return 0 if self._next is None else self._next

    def due(self, origin: int) -> bool:
        """Return whether a second is over that was never reported."""
        if self._reached is None or self._dirty is None:
            return False
        over = (self._reached - origin) // SECOND
        return over > ((self._dirty - origin) // SECOND if self._next is None else self._next)

    def pop_changed(self, origin: int) -> Iterator[tuple[int, tuple[float, float, float]]]:
        """Yield the seconds since the origin that are new or have changed: compute, wait and transfer, 0 to 1 each."""
        self._digest(origin)
        if self._reached is None or self._dirty is None:
            return
        over = (self._reached - origin) // SECOND
        first = (self._dirty - origin) // SECOND
        if self._next is not None:
            first = min(first, self._next)
        first = max(first, over - SECONDS_KEPT, self._floor)
        if over <= first:
            return
        self._next, self._dirty = over, self._reached
        found = self._between(origin + np.arange(first, over + 1) * SECOND)
        blocked = np.array([self._blocked.get(second, 0.0) for second in range(first, over)])
        for second, shares in enumerate(_shares(found, blocked).tolist(), first):
            compute, wait, transfer = shares
            shares = (compute, wait, transfer)
            if any(shares) and self._reported.get(second) != shares:
                self._reported[second] = shares
                yield second, shares
        self._forget(origin, over)

    def _between(self, edges: Times) -> tuple[Times, ...]:
        """Return lengths between edges: in cells or collectives, under way, active, busy, and work."""
        running = Union()
        running.add(self._cells.begin, self._cells.end)
        if self._cell is not None:
            running.add(np.array([self._cell], np.int64), np.array([max(self._cell, edges[-1])], np.int64))
        elif not self._tracked and self._began is not None and len(self._under_way):
            running.add(np.array([self._began], np.int64), self._under_way.end[-1:])
        running.add(self._under_way.begin, self._under_way.end)
        each = (running, self._under_way, self._active, self._busy, self._work)
        return tuple(one.covered(edges) for one in each)

    def _digest(self, origin: int) -> None:
        if not self._new:
            return
        rows = joined(self._new)
        self._new = []
        arrival = rows["arrival"].astype(np.int64)
        finish = arrival + distance(rows, "finished")
        if self._began is None:
            self._began = int(arrival.min())
        self._under_way.add(arrival, finish)
        ran = (rows["flags"] & NOT_STARTED) == 0
        started = arrival + distance(rows, "started")
        self._work.add(started[ran], finish[ran])
        self._busy.add(started[ran], finish[ran])
        self._mark_overlapped(arrival, finish)
        self._block(rows[ran], started[ran], finish[ran], origin)

    def _mark_overlapped(self, arrival: Times, finish: Times) -> None:
        """Mark the time from each arrival to the last one before that collective's end: it did not block the rank then."""
        earliest = arrival.min()
        arrival = np.concatenate((self._arrival, arrival))
        order = np.argsort(arrival, kind="stable")
        self._arrival, self._finish = arrival[order], np.concatenate((self._finish, finish))[order]
        changed = np.flatnonzero(self._finish > earliest)
        if not len(changed):
            return
        self._mark_dirty(int(self._arrival[changed[0]]))
        last = self._arrival[np.searchsorted(self._arrival, self._finish[changed]) - 1]
        for one in (self._active, self._busy):
            one.add(self._arrival[changed], last)

    def _block(self, rows: Rows, started: Times, finish: Times, origin: int) -> None:
        """Spread the time for which operations were blocked over their seconds; fused tensors share that time, which counts once."""
        if not len(rows):
            return
        fresh, self._operation = first_of_each(rows, self._operation)
        blocked = distance(rows, "wait")
        some = np.flatnonzero(fresh & (blocked > 0) & (finish > started))
        begin, end = started[some] - origin, finish[some] - origin
        share = np.minimum(1.0, blocked[some] / (end - begin))
        inside = begin // SECOND == end // SECOND
        for second, amount in _summed(
            begin[inside] // SECOND, ((end - begin) * share)[inside].astype(np.float64)
        ):
            self._blocked[second] = self._blocked.get(second, 0.0) + amount
        for i in np.flatnonzero(~inside).tolist():
            # Earlier seconds are not reported any more, and an operation can have been blocked for hours.
            for second in range(int(begin[i]) // SECOND, int(end[i]) // SECOND + 1)[-SECONDS_KEPT:]:
                length = min(int(end[i]), (second + 1) * SECOND) - max(int(begin[i]), second * SECOND)
                self._blocked[second] = self._blocked.get(second, 0.0) + length * float(share[i])

    def _forget(self, origin: int, over: int) -> None:
        every = (self._under_way, self._work, self._active, self._busy, self._cells)
        before = origin + (over - SECONDS_KEPT) * SECOND
        limits = [int(one.end[-INTERVALS_KEPT]) for one in every if len(one) > INTERVALS_KEPT]
        before = max([before, *limits])
        # Rounded up: only a part of the second with that time in it is remembered.
        self._floor = max(self._floor, -((origin - before) // SECOND))
        for one in every:
            one.forget(before)
        kept = self._finish >= before
        if len(kept) > ARRIVALS_KEPT:
            kept[:-ARRIVALS_KEPT] = False
        if not kept.all():
            self._arrival, self._finish = self._arrival[kept], self._finish[kept]
        for known in (self._blocked, self._reported):
            for second in [second for second in known if second < self._floor]:
                del known[second]


def _shares(lengths: tuple[Times, ...], blocked: NDArray[np.float64]) -> NDArray[np.float64]:
    running, under_way, active, busy, work = lengths
    moved = busy - active
    # Work that ran beside the rank's computing does not count, and neither does the time that it was blocked meanwhile.
    stalled = np.minimum(1.0, blocked / np.maximum(work, 1)) * moved
    compute = running - under_way + active
    return np.stack((compute, under_way - busy + stalled, moved - stalled), 1) / SECOND


def first_of_each(rows: Rows, before: tuple[int, ...]) -> tuple[NDArray[np.bool_], tuple[int, ...]]:
    """Return which rows begin another operation than the row before them, and the operation of the last row.

    Args:
        rows: The rows, in the order in which a rank recorded them.
        before: The operation of the row before all.
    """
    names = [rows[name].astype(np.int64) for name in ("set", "generation", "sequence", "batch")]
    other = np.ones(len(rows), np.bool_)
    if len(rows):
        other[1:] = False
        for column in names:
            other[1:] |= column[1:] != column[:-1]
        other[0] = tuple(int(column[0]) for column in names) != before
        before = tuple(int(column[-1]) for column in names)
    return other, before


def _summed(keys: Times, values: NDArray[np.float64]) -> Iterator[tuple[int, float]]:
    each, which = np.unique(keys, return_inverse=True)
    sums = np.bincount(which, values, len(each))
    yield from zip(each.tolist(), sums.tolist(), strict=True)


class Bandwidths:
    """Bytes by time of one rank's operations that ended in each second, by kind of collective."""

    def __init__(self) -> None:
        #: Rows that came since the last digest.
        self._new: list[Rows] = []
        #: The operation of the last row that was digested.
        self._operation: tuple[int, ...] = ()
        #: By kind and second: bytes of the algorithm, bytes on the bus and ns. The bus's are NaN if a size is not known.
        self._sums: dict[tuple[int, int], Floats] = {}
        #: The kinds and seconds whose sums were not emitted yet.
        self._changed: set[tuple[int, int]] = set()

    def add(self, rows: Rows) -> None:
        """Add rows, in the order in which the rank recorded them."""
        self._new.append(rows)

    def _digest(self, origin: int) -> None:
        rows = joined(self._new)
        self._new = []
        # In a broadcast only the root sends a tensor, so only its span has bytes; a barrier has none on any rank.
        rows = rows[((rows["flags"] & (FAILED | NOT_STARTED)) == 0) & (rows["nbytes"] > 0)]
        fresh, self._operation = first_of_each(rows, self._operation)
        finish = rows["arrival"] + distance(rows, "finished")
        length = finish - rows["arrival"] - distance(rows, "started")
        second = (finish - origin) // SECOND
        size = rows["size"].astype(np.float64)
        kinds = rows["kind"].copy()
        for kind, bus in _BUS.items():
            own = kinds == kind
            if not own.any():
                continue
            with np.errstate(divide="ignore", invalid="ignore"):
                nbytes = rows["nbytes"][own].astype(np.float64)
                if kind is OpKind.ALLGATHER:
                    nbytes *= size[own]  # the algorithm's are those of the result
                on_bus = np.where(size[own] > 0, nbytes * bus(size[own]), np.nan)
            # The tensors of a fused operation share its time, which counts once, while the bytes of each count.
            amounts = np.stack((nbytes, on_bus, np.where(fresh, length, 0)[own]), 1)
            for one in np.unique(second[own]).tolist():
                key = (int(kind), one)
                self._sums[key] = self._sums.get(key, np.zeros(3)) + amounts[second[own] == one].sum(0)
                self._changed.add(key)

    def emit(self, rank: int, store: SeriesStore, origin: int, over: int) -> None:
        """Amend the points of the seconds before ``over`` that have changed."""
        if self._new:
            self._digest(origin)
        for key in sorted(self._changed):
            kind, second = key
            nbytes, on_bus, ns = self._sums[key].tolist()
            # It stays among the changed ones: this rank is still in that second.
            if second >= over:
                continue
            self._changed.discard(key)
            if ns <= 0 or nbytes <= 0:
                continue
            at, label = origin + second * SECOND + SECOND // 2, OpKind(kind).label
            store.amend(rank, ALGORITHM + label, at, nbytes / ns * SECOND)
            if on_bus > 0:
                store.amend(rank, BUS + label, at, on_bus / ns * SECOND)
        for key in [key for key in self._sums if key[1] < over - SECONDS_KEPT]:
            del self._sums[key]
            self._changed.discard(key)


class _ArrivalColumns(NamedTuple):
    """Columns of rows that a comparison of arrivals needs."""

    op: NDArray[np.uint32]
    arrival: NDArray[np.int64]
    rank: NDArray[np.uint16]
    size: NDArray[np.uint16]


class Lateness:
    """Greatest delay of each rank behind the first one to arrive, in each second."""

    def __init__(self) -> None:
        #: Arrivals that came since the last digest.
        self._new: list[_ArrivalColumns] = []
        #: Arrivals at collectives of which some members' are missing.
        self._incomplete: _ArrivalColumns | None = None
        #: The greatest delay by rank and second, in ns.
        self._lateness_ns: dict[tuple[int, int], int] = {}
        #: The ranks and seconds whose delay was not emitted yet.
        self._changed: set[tuple[int, int]] = set()

    def add(self, rows: Rows) -> None:
        """Add rows of any rank."""
        matched = rows["op"] > 0
        self._new.append(_ArrivalColumns(*(rows[name][matched] for name in _ArrivalColumns._fields)))

    def digest(self, origin: int) -> None:
        """Compare the arrivals at each collective that all of its members have recorded."""
        if not self._new:
            return
        parts = self._new if self._incomplete is None else [self._incomplete, *self._new]
        op, arrival, rank, size = (np.concatenate(column) for column in zip(*parts, strict=True))
        self._new = []
        if not len(op):
            return  # nothing was matched yet: a cell has failed before its first collective was
        order = np.lexsort((arrival, op))
        op, arrival, rank, size = op[order], arrival[order], rank[order], size[order]
        begins = np.flatnonzero(np.concatenate(([True], op[1:] != op[:-1])))
        counts = np.diff(np.concatenate((begins, [len(op)])))
        whole = (counts >= size[begins]) & (size[begins] > 1)
        done = np.repeat(whole, counts)
        late = (arrival - np.repeat(arrival[begins], counts))[done]
        # Collectives that never become complete make room, the oldest first: numbers grow.
        left = np.flatnonzero(~done & ~np.repeat(size[begins] == 1, counts))[-ROWS_UNMATCHED:]
        self._incomplete = _ArrivalColumns(op[left], arrival[left], rank[left], size[left])
        seconds = (arrival[done] - origin) // SECOND
        ranks = rank[done].astype(np.int64)
        order = np.lexsort((late, seconds, ranks))
        keys = np.stack((ranks, seconds), 1)[order]
        other = np.any(keys[1:] != keys[:-1], axis=1)
        # The last of each rank and second: they are sorted by their delay within these, so that it is the greatest.
        for i in np.flatnonzero(np.concatenate((other, [len(keys) > 0]))).tolist():
            key = (int(keys[i, 0]), int(keys[i, 1]))
            if late[order[i]] > self._lateness_ns.get(key, -1):
                self._lateness_ns[key] = int(late[order[i]])
                self._changed.add(key)

    def emit(self, store: SeriesStore, origin: int, over: dict[int, int]) -> None:
        """Amend the points that have changed, of the seconds before the one that each rank is in now."""
        for key in sorted(self._changed):
            rank, second = key
            if second < over.get(rank, second):
                self._changed.discard(key)
                at = origin + second * SECOND + SECOND // 2
                store.amend(rank, LATE, at, self._lateness_ns[key] / SECOND)
        for rank, second in [
            key for key in self._lateness_ns if key[1] < over.get(key[0], key[1]) - SECONDS_KEPT
        ]:
            del self._lateness_ns[rank, second]
            self._changed.discard((rank, second))


class DerivedSeries:
    """Series that are amended as the rows of a recording come. A point is in the middle of its second.

    Args:
        store: The series to amend.
    """

    def __init__(self, store: SeriesStore) -> None:
        self._store = store
        #: By rank; a rank that has shares has bandwidths.
        self._shares: dict[int, TimeShares] = {}
        self._bandwidths: dict[int, Bandwidths] = {}
        self._lateness = Lateness()
        #: How many rows came since points were added.
        self._rows = 0

    def _of(self, rank: int) -> TimeShares:
        if rank not in self._shares:
            self._shares[rank], self._bandwidths[rank] = TimeShares(), Bandwidths()
        return self._shares[rank]

    def cell_began(self, rank: int, at: int) -> None:
        """Begin a cell of a rank."""
        self._of(rank).cell_began(at)

    def cell_ended(self, rank: int, at: int, origin: int) -> None:
        """End the cell of a rank."""
        self._of(rank).cell_ended(at, origin)

    def add(self, rank: int, rows: Rows, origin: int) -> None:
        """Add rows of one rank, in the order in which it recorded them."""
        self._of(rank).add(rows)
        self._bandwidths[rank].add(rows)
        self._lateness.add(rows)
        self._rows += len(rows)
        if self._rows >= ROWS_AT_ONCE:
            self.advance(origin, force=True)

    def advance(self, origin: int, *, force: bool = False) -> None:
        """Add the points of each second that is over; with ``force`` also if no new second is over."""
        due = [rank for rank, one in self._shares.items() if force or one.due(origin)]
        if not due:
            return
        self._rows = 0
        self._lateness.digest(origin)
        for rank in due:
            for second, shares in self._shares[rank].pop_changed(origin):
                for name, share in zip(SHARES, shares, strict=True):
                    self._store.amend(rank, name, origin + second * SECOND + SECOND // 2, share)
            self._bandwidths[rank].emit(rank, self._store, origin, self._shares[rank].over)
        self._lateness.emit(self._store, origin, {rank: one.over for rank, one in self._shares.items()})
