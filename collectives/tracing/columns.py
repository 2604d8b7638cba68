"""Fixed columns in bounded memory: rows (one tensor in one collective on one rank) and points of series over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.tracing.record_format import (
    FLAG_FAILED,
    FLAG_NOT_READY,
    FLAG_NOT_STARTED,
    RECORD_BYTES,
    SHIFT_MASK,
)

Rows = NDArray[Any]
"""A structured array of ``ROW``."""

FAILED, NOT_READY, NOT_STARTED = 1, 2, 4

# A span as it travels; see hvdlab.collectives.tracing.record_format.
RECORD = np.dtype(
    [
        ("type", "u1"),
        ("kind", "u1"),
        ("dtype", "u1"),
        ("flags", "u1"),
        ("name", "<u4"),
        ("set", "<u4"),
        ("sequence", "<u4"),
        ("batch", "<u4"),
        ("nbytes", "<u8"),
        ("submitted", "<u8"),
        ("ready", "<u4"),
        ("started", "<u4"),
        ("finished", "<u4"),
        ("pack", "<u4"),
        ("transfer", "<u4"),
        ("wait", "<u4"),
        ("unpack", "<u4"),
    ]
)
assert RECORD.itemsize == RECORD_BYTES

DISTANCES = ("ready", "started", "finished", "pack", "transfer", "wait", "unpack")

ROW = np.dtype(
    [
        ("arrival", "<i8"),  # ns on the common axis
        ("nbytes", "<u8"),
        *((name, "<u4") for name in DISTANCES),  # ns >> shift
        ("name", "<u4"),  # number in Recording.names
        ("op", "<u4"),  # number of the tensor's collective on all ranks; 0 if it never became one
        ("set", "<u4"),
        ("generation", "<u4"),
        ("sequence", "<u4"),
        ("batch", "<u4"),
        ("rank", "<u2"),
        ("size", "<u2"),  # members of the process set; 0 if not known
        ("kind", "u1"),
        ("dtype", "u1"),
        ("flags", "u1"),
        ("shift", "u1"),
    ]
)


_WHOLE = np.dtype((np.void, ROW.itemsize))


Points = NDArray[Any]
"""A structured array of ``POINT``."""

POINT = np.dtype(
    [
        ("time", "<i8"),  # ns on the common axis
        ("value", "<f8"),
        ("step", "<f8"),  # NaN: none
        ("number", "<u8"),  # of the point among all, from 0 since the beginning
        ("series", "<u4"),  # number in SeriesStore.series
    ]
)

POINTS_KEPT = 1_000_000
"""Points of all series together, as long as each has more than the least."""
MOST_PER_SERIES = 20_000
"""Points of one series at most."""
LEAST_PER_SERIES = 512
"""Points that a series may keep however many series there are."""
SERIES_KEPT = 4096
"""Series at most; points of further ones are refused and counted."""

_UNITS = {
    "hvdlab/cpu": "%",
    "hvdlab/rss": "B",
    "hvdlab/step_time": "s",
    "hvdlab/lateness": "s",
    "hvdlab/samples_per_second": "1/s",
}
_UNITS_OF_ENDS = {"utilisation": "%", "memory": "B"}


def joined(parts: Sequence[Rows]) -> Rows:
    """Return rows one after the other, copied as opaque bytes: otherwise numpy would handle each column by itself."""
    return np.concatenate([part.view(_WHOLE) for part in parts]).view(ROW) if parts else np.empty(0, ROW)


def rows_of(records: NDArray[Any], rank: int, offset_ns: int) -> Rows:
    """Make rows from records of spans. The caller still has to set the names and the numbers of operations."""
    rows = np.zeros(len(records), ROW)
    for name in ("nbytes", *DISTANCES, "name", "set", "sequence", "batch", "kind", "dtype"):
        rows[name] = records[name]
    rows["arrival"] = records["submitted"].astype(np.int64) + offset_ns
    rows["rank"] = rank
    flags = records["flags"]
    rows["shift"] = flags & SHIFT_MASK
    rows["flags"] = (
        (flags & FLAG_FAILED != 0) * FAILED
        + (flags & FLAG_NOT_READY != 0) * NOT_READY
        + (flags & FLAG_NOT_STARTED != 0) * NOT_STARTED
    )
    return rows


def distance(rows: Rows, name: str) -> NDArray[np.int64]:
    """Return one of ``DISTANCES`` in ns."""
    shifted: NDArray[np.int64] = rows[name].astype(np.int64) << rows["shift"]
    return shifted


class RowStore:
    """Store of the newest rows, numbered from 0 since the beginning.

    Args:
        limit: Number of rows to keep, give or take a chunk.

    Attributes:
        begin: Number of the oldest row that is kept: how many were dropped.
        end: Number of the next row.
    """

    CHUNK = 16384

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.begin = self.end = 0
        self._chunks: deque[Rows] = deque()
        #: A dropped chunk to use again: memory that is freed and allocated once more gets fragmented.
        self._spare: Rows | None = None
        #: Rows in the last chunk.
        self._filled = 0

    def __len__(self) -> int:
        return self.end - self.begin

    def append(self, rows: Rows) -> None:
        """Add rows at the end; the oldest make room."""
        taken = 0
        while taken < len(rows):
            if not self._chunks or self._filled == self.CHUNK:
                self._chunks.append(np.empty(self.CHUNK, ROW) if self._spare is None else self._spare)
                self._spare, self._filled = None, 0
            count = min(self.CHUNK - self._filled, len(rows) - taken)
            self._chunks[-1][self._filled : self._filled + count] = rows[taken : taken + count]
            self._filled += count
            taken += count
        self.end += len(rows)
        while len(self) > self.limit and len(self._chunks) > 1:
            # No reader has a view of it: `since()` and `newest_of()` return copies.
            self._spare = self._chunks.popleft()
            self.begin += self.CHUNK

    def clear(self) -> int:
        """Drop all rows and return how many there were; the next row has the number after theirs."""
        count = len(self)
        self._chunks.clear()
        self._filled = 0
        self.begin = self.end
        return count

    def newest_of(self, rank: int) -> Rows:
        """Return a copy of the newest row of a rank that is kept; no row if there is none."""
        filled = self._filled
        for chunk in reversed(self._chunks):
            places = np.flatnonzero(chunk["rank"][:filled] == rank)
            if len(places):
                newest: Rows = chunk[places[-1:]].copy()
                return newest
            # All chunks but the last are full.
            filled = self.CHUNK
        return np.empty(0, ROW)

    def since(self, number: int, most: int | None = None) -> tuple[int, Rows]:
        """Return the number of the first row from ``number`` on that is kept, and a copy of the rows from there."""
        first = min(max(number, self.begin), self.end)
        last = self.end if most is None else min(self.end, first + most)
        parts = []
        at = self.begin
        for chunk in self._chunks:
            lo, hi = max(first - at, 0), min(last - at, self.CHUNK)
            if lo < hi:
                parts.append(chunk[lo:hi])
            at += self.CHUNK
        return first, joined(parts)


def unit_of(name: str) -> str:
    """Return the unit of a metric that hvdlab itself measures; empty for other metrics, whose unit is not known."""
    if name.startswith("hvdlab/gpu"):
        return _UNITS_OF_ENDS.get(name.rsplit("/", 1)[1], "")
    if name.startswith("hvdlab/share/"):
        return "1"
    if name.startswith("hvdlab/bandwidth/"):
        return "B/s"
    return _UNITS.get(name, "")


@dataclass(frozen=True, slots=True)
class Series:
    """Series of the numbers that one rank reports under one name.

    Attributes:
        unit: ``s``, ``B``, ``B/s``, ``1/s``, ``%``, ``1`` for shares, or empty if it is not known.
    """

    rank: int
    name: str
    unit: str


class _Kept:
    """Newest points of one series, by time."""

    __slots__ = ("begin", "newest", "points", "size")

    def __init__(self) -> None:
        self.points: Points = np.empty(64, POINT)
        #: The points that are kept lie from ``begin`` to ``begin + size``.
        self.begin = self.size = 0
        #: The greatest number among them.
        self.newest = -1

    def view(self) -> Points:
        return self.points[self.begin : self.begin + self.size]

    def place(self, point: tuple[int, float, float, int, int]) -> None:
        """Put a point where its time belongs; those of one time stay in the order in which they came."""
        if self.begin + self.size == len(self.points):
            self._make_room()
        times = self.view()["time"]
        at = self.begin + self.size
        if self.size and point[0] < times[-1]:
            at = self.begin + int(np.searchsorted(times, point[0], "right"))
            end = self.begin + self.size
            self.points[at + 1 : end + 1] = self.points[at:end].copy()
        self.points[at] = point
        self.size += 1
        self.newest = point[3]

    def replace(self, point: tuple[int, float, float, int, int]) -> bool:
        """Replace the point of the same time; return false if there is none."""
        times = self.view()["time"]
        at = int(np.searchsorted(times, point[0]))
        if at == self.size or times[at] != point[0]:
            return False
        self.points[self.begin + at] = point
        # The number is a new one: a view that has the old value gets the point once more.
        self.newest = point[3]
        return True

    def _make_room(self) -> None:
        kept = self.view()
        # More than half of it is in use. Otherwise moving the points to the front makes room enough.
        if self.begin < len(self.points) // 2:
            self.points = np.empty(len(self.points) * 2, POINT)
        self.points[: self.size] = kept.copy()
        self.begin = 0

    def drop(self, count: int) -> None:
        self.begin += count
        self.size -= count


class SeriesStore:
    """Store of the newest points of all series. Not thread-safe.

    A series keeps :data:`MOST_PER_SERIES` points, fewer if there are many series, so that a series with many points
    takes no room from one with few.

    Args:
        limit: How many points to keep of all series together.

    Attributes:
        series: All series, by number.
        end: Number of the next point.
        dropped: How many points were dropped for newer ones.
        refused: How many points were refused, of series for which there was no room any more.
    """

    def __init__(self, limit: int = POINTS_KEPT) -> None:
        self.limit = limit
        self.series: list[Series] = []
        self.end = 0
        self.dropped = 0
        self.refused = 0
        #: Number of each series, by rank and name.
        self._numbers: dict[tuple[int, str], int] = {}
        #: The points of each series, by its number.
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return sum(one.size for one in self._kept)

    @property
    def room(self) -> int:
        """Return the number of points that each series may keep now."""
        return min(MOST_PER_SERIES, max(LEAST_PER_SERIES, self.limit // max(1, len(self.series))))

    def append(self, rank: int, name: str, time_ns: int, value: float, step: float | None = None) -> None:
        """Add a point; the oldest of its series makes room."""
        self._put(rank, name, time_ns, value, float("nan") if step is None else float(step), False)

    def amend(self, rank: int, name: str, time_ns: int, value: float) -> None:
        """Set the value of a series at a time, in place of the one that it had there, if any."""
        self._put(rank, name, time_ns, value, float("nan"), True)

    def _put(self, rank: int, name: str, time_ns: int, value: float, step: float, replace: bool) -> None:
        number = self._numbers.get((rank, name))
        if number is None:
            if len(self.series) >= SERIES_KEPT:
                self.refused += 1
                return
            number = self._numbers[rank, name] = len(self.series)
            self.series.append(Series(rank, name, unit_of(name)))
            self._kept.append(_Kept())
        kept = self._kept[number]
        point = (time_ns, value, step, self.end, number)
        self.end += 1
        if replace and kept.replace(point):
            return
        kept.place(point)
        if kept.size > (room := self.room):
            # Drop several at once, so that this happens seldom.
            fewer = kept.size - room + (room >> 4)
            kept.drop(fewer)
            self.dropped += fewer

    def of(self, rank: int, name: str) -> Points:
        """Return a copy of the points of one series, by time; none if there is no such series."""
        number = self._numbers.get((rank, name))
        return np.empty(0, POINT) if number is None else self._kept[number].view().copy()

    def newest(self, name: str, most: int) -> dict[int, Points]:
        """Return copies of the last points under a name, by rank."""
        found = {
            one.rank: self._kept[i].view()[-most:].copy()
            for i, one in enumerate(self.series)
            if one.name == name
        }
        return {rank: points for rank, points in found.items() if len(points)}

    def since(self, number: int, most: int | None = None) -> Points:
        """Return the points from ``number`` on that are kept, in the order in which they came; at most the first ``most``."""
        if most == 0:
            # A view without points asks about once a second, under the recording's lock: it must not copy and sort them all.
            return np.empty(0, POINT)
        parts = []
        for kept in self._kept:
            if kept.newest >= number and kept.size:
                points = kept.view()
                parts.append(points[points["number"] >= number])
        found = np.concatenate(parts) if parts else np.empty(0, POINT)
        order = np.argsort(found["number"])
        return found[order if most is None else order[:most]]
