"""Series that no rank sends: they follow from the spans of all ranks, second by second."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.recording.rows import FAILED, NOT_STARTED, Rows, distance, joined
from hvdlab.collectives.recording.series import SeriesStore
from hvdlab.collectives.recording.shares import SECOND, SECONDS_KEPT, Shares, first_of_each

LATE = "hvdlab/lateness"
SHARES = ("hvdlab/share/compute", "hvdlab/share/wait", "hvdlab/share/transfer")
DERIVED = (LATE, "hvdlab/share/", "hvdlab/bandwidth/")
"""With these the names of all such series begin."""
ALGORITHM, BUS = "hvdlab/bandwidth/algorithm/", "hvdlab/bandwidth/bus/"

Floats = NDArray[np.float64]

ROWS_AT_ONCE = 8192
ROWS_UNMATCHED = 65_536

# By the definitions of nccl-tests: what part of the algorithm's bytes goes over the bus, with n members.
_BUS: dict[OpKind, Callable[[Floats], Floats]] = {
    OpKind.ALLREDUCE: lambda n: 2 * (n - 1) / n,
    OpKind.ALLGATHER: lambda n: (n - 1) / n,
    OpKind.REDUCESCATTER: lambda n: (n - 1) / n,
    OpKind.ALLTOALL: lambda n: (n - 1) / n,
    OpKind.BROADCAST: np.ones_like,
    OpKind.SENDRECV: np.ones_like,
}


class Bandwidths:
    """Bytes by time of one rank's operations that ended in each second, by kind of collective."""

    def __init__(self) -> None:
        self._new: list[Rows] = []
        self._operation: tuple[int, ...] = ()
        # By kind and second: bytes of the algorithm, bytes on the bus and ns. The bus's are NaN if a size is not known.
        self._sums: dict[tuple[int, int], Floats] = {}
        self._changed: set[tuple[int, int]] = set()

    def add(self, rows: Rows) -> None:
        """Take in rows, in the order in which the rank recorded them."""
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
            amounts = np.stack((nbytes, on_bus, np.where(fresh, length, 0)[own]), 1)
            for one in np.unique(second[own]).tolist():
                key = (int(kind), one)
                self._sums[key] = self._sums.get(key, np.zeros(3)) + amounts[second[own] == one].sum(0)
                self._changed.add(key)

    def say(self, rank: int, store: SeriesStore, origin: int, over: int) -> None:
        """Say what has changed of the seconds before ``over``."""
        if self._new:
            self._digest(origin)
        for key in sorted(self._changed):
            kind, second = key
            nbytes, on_bus, ns = self._sums[key].tolist()
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


class _Came(NamedTuple):
    """Columns of rows: what it takes to compare arrivals."""

    op: NDArray[np.uint32]
    arrival: NDArray[np.int64]
    rank: NDArray[np.uint16]
    size: NDArray[np.uint16]


class Lateness:
    """By how much each rank came later than the first one, at most, in each second."""

    def __init__(self) -> None:
        self._new: list[_Came] = []
        self._rest: _Came | None = None
        self._most: dict[tuple[int, int], int] = {}  # by rank and second, ns
        self._changed: set[tuple[int, int]] = set()

    def add(self, rows: Rows) -> None:
        matched = rows["op"] > 0
        self._new.append(_Came(*(rows[name][matched] for name in _Came._fields)))

    def digest(self, origin: int) -> None:
        """Compare the arrivals at collectives of which all members' are here."""
        if not self._new:
            return
        parts = self._new if self._rest is None else [self._rest, *self._new]
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
        # What never becomes complete makes room: numbers grow.
        left = np.flatnonzero(~done & ~np.repeat(size[begins] == 1, counts))[-ROWS_UNMATCHED:]
        self._rest = _Came(op[left], arrival[left], rank[left], size[left])
        seconds = (arrival[done] - origin) // SECOND
        ranks = rank[done].astype(np.int64)
        order = np.lexsort((late, seconds, ranks))
        keys = np.stack((ranks, seconds), 1)[order]
        other = np.any(keys[1:] != keys[:-1], axis=1)
        for i in np.flatnonzero(np.concatenate((other, [len(keys) > 0]))).tolist():
            key = (int(keys[i, 0]), int(keys[i, 1]))
            if late[order[i]] > self._most.get(key, -1):
                self._most[key] = int(late[order[i]])
                self._changed.add(key)

    def say(self, store: SeriesStore, origin: int, over: dict[int, int]) -> None:
        """Say what has changed of the seconds before the one that each rank is in now."""
        for key in sorted(self._changed):
            rank, second = key
            if second < over.get(rank, second):
                self._changed.discard(key)
                at = origin + second * SECOND + SECOND // 2
                store.amend(rank, LATE, at, self._most[key] / SECOND)
        for rank, second in [key for key in self._most if key[1] < over.get(key[0], key[1]) - SECONDS_KEPT]:
            del self._most[rank, second]
            self._changed.discard((rank, second))


class Derived:
    """Takes in what the recording gets, and amends its series. A point is in the middle of its second."""

    def __init__(self, store: SeriesStore) -> None:
        self._store = store
        self._shares: dict[int, Shares] = {}
        self._bandwidths: dict[int, Bandwidths] = {}
        self._lateness = Lateness()
        self._rows = 0

    def _of(self, rank: int) -> Shares:
        if rank not in self._shares:
            self._shares[rank], self._bandwidths[rank] = Shares(), Bandwidths()
        return self._shares[rank]

    def cell_began(self, rank: int, at: int) -> None:
        self._of(rank).cell_began(at)

    def cell_ended(self, rank: int, at: int, origin: int) -> None:
        self._of(rank).cell_ended(at, origin)

    def add(self, rank: int, rows: Rows, origin: int) -> None:
        """Take in rows of one rank, in the order in which it recorded them."""
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
            for second, shares in self._shares[rank].take(origin):
                for name, share in zip(SHARES, shares, strict=True):
                    self._store.amend(rank, name, origin + second * SECOND + SECOND // 2, share)
            self._bandwidths[rank].say(rank, self._store, origin, self._shares[rank].over)
        self._lateness.say(self._store, origin, {rank: one.over for rank, one in self._shares.items()})
