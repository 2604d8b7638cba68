"""Messages about series to the browser: their definitions as JSON, their points as one buffer of column after column."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlab.collectives.tracing.columns import Points
from hvdlab.collectives.tracing.recording import Recording

POINT_BYTES = 32
POINTS_PER_MESSAGE = 20_000


def pack_points(points: Points, origin_ns: int, first: int) -> bytes:
    """The columns that ``readPoints`` in ``ui/src/model/series.ts`` takes apart; wide ones first, so that all are aligned.

    Times are ns since the origin; a point's number is that behind ``first``.
    """
    columns = [
        (points["time"] - origin_ns).astype("<f8"),
        points["value"].astype("<f8"),
        points["step"].astype("<f8"),
        points["series"].astype("<u4"),
        (points["number"] - np.uint64(first)).astype("<u4"),
    ]
    return b"".join(column.tobytes() for column in columns)


class SeriesNews:
    """Points of the series that one view has not got yet; each message of the publisher takes some of them along.

    A message has all points from the number ``pointsFrom`` to below ``pointsTo``, except those that were dropped to make
    room. A view that gets a message which begins behind what it has, has missed something.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._point = self._series = 0
        self.more = False

    @property
    def place(self) -> tuple[int, int]:
        """The numbers of the next point and of the next definition."""
        return self._point, self._series

    def again_from(self, point: int, series: int = 0) -> None:
        """Begin anew with the points from a number on, and with the definitions, all or from a number on."""
        self._point, self._series = point, series

    def take(self, most: int = POINTS_PER_MESSAGE) -> tuple[dict[str, Any], bytes]:
        """Fields for the next message, and its buffer. :attr:`more` says afterwards whether that was not all."""
        recording, first = self._recording, self._point
        end, points = recording.points_since(first, most)
        series = recording.series(self._series)
        fields = {
            "seriesFrom": self._series,
            "series": [{"rank": one.rank, "name": one.name, "unit": one.unit} for one in series],
            "pointsFrom": first,
            "pointsTo": end,
            "points": len(points),
            "pointsLost": recording.points_lost,
        }
        self._point, self._series = end, self._series + len(series)
        self.more = 0 < most <= len(points)
        return fields, pack_points(points, recording.origin_ns or 0, first)
