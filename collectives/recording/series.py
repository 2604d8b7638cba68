"""Series: numbers over time, one series per rank and name, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
MOST_PER_SERIES = 20_000
LEAST_PER_SERIES = 512
SERIES_KEPT = 4096

_UNITS = {
    "hvdlab/cpu": "%",
    "hvdlab/rss": "B",
    "hvdlab/step_time": "s",
    "hvdlab/lateness": "s",
    "hvdlab/samples_per_second": "1/s",
}
_UNITS_OF_ENDS = {"utilisation": "%", "memory": "B"}


def unit_of(name: str) -> str:
    """The unit of a metric that hvdlab itself measures; empty for other metrics, whose unit is not known."""
    if name.startswith("hvdlab/gpu"):
        return _UNITS_OF_ENDS.get(name.rsplit("/", 1)[1], "")
    if name.startswith("hvdlab/share/"):
        return "1"
    if name.startswith("hvdlab/bandwidth/"):
        return "B/s"
    return _UNITS.get(name, "")


@dataclass(frozen=True, slots=True)
class Series:
    """The numbers that one rank reports under one name.

    Attributes:
        unit: ``s``, ``B``, ``B/s``, ``1/s``, ``%``, ``1`` for shares, or empty if it is not known.
    """

    rank: int
    name: str
    unit: str


class _Kept:
    """The newest points of one series, by time."""

    __slots__ = ("begin", "newest", "points", "size")

    def __init__(self) -> None:
        self.points: Points = np.empty(64, POINT)
        self.begin = self.size = 0  # those that are kept lie from begin to begin + size
        self.newest = -1  # the greatest number among them

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
        """Put a point in the place of the one with the same time; false if there is none."""
        times = self.view()["time"]
        at = int(np.searchsorted(times, point[0]))
        if at == self.size or times[at] != point[0]:
            return False
        self.points[self.begin + at] = point
        self.newest = point[3]
        return True

    def _make_room(self) -> None:
        kept = self.view()
        if self.begin < len(self.points) // 2:
            self.points = np.empty(len(self.points) * 2, POINT)
        self.points[: self.size] = kept.copy()
        self.begin = 0

    def drop(self, count: int) -> None:
        self.begin += count
        self.size -= count


class SeriesStore:
    """The newest points of all series. Not thread-safe.

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
        self._numbers: dict[tuple[int, str], int] = {}
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return sum(one.size for one in self._kept)

    @property
    def room(self) -> int:
        """Points that each series may keep now."""
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
        """A copy of the points of one series, by time; none if there is no such series."""
        number = self._numbers.get((rank, name))
        return np.empty(0, POINT) if number is None else self._kept[number].view().copy()

    def newest(self, name: str, most: int) -> dict[int, Points]:
        """Copies of the last points under a name, by rank."""
        found = {
            one.rank: self._kept[i].view()[-most:].copy()
            for i, one in enumerate(self.series)
            if one.name == name
        }
        return {rank: points for rank, points in found.items() if len(points)}

    def since(self, number: int, most: int | None = None) -> Points:
        """Points from ``number`` on that are kept, in the order in which they came; at most the first ``most``."""
        parts = []
        for kept in self._kept:
            if kept.newest >= number and kept.size:
                points = kept.view()
                parts.append(points[points["number"] >= number])
        found = np.concatenate(parts) if parts else np.empty(0, POINT)
        found.sort(order="number")
        return found if most is None else found[:most]
