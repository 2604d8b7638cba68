"""Handing the metrics of a recording, those of all ranks, to exporters, from the process that keeps the recording."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.metrics.exporting import Export, Exporter, same_target
from hvdlab.collectives.metrics.points import Point, time_of_day

if TYPE_CHECKING:
    from hvdlab.collectives.recording import Recording

INTERVAL = 1.0
EXIT_WITHIN = 5.0
SETTLED = 3.0
"""Seconds after which what is derived from spans, second by second, counts as final: late spans may still change it."""


class RecordingExport(Export):
    """An export of all points of a recording, from its beginning, and of those that come until the recording or this is closed.

    It replaces another export of the same recording with the same target, and goes on where that one ended if it
    is about the same metrics.

    Args:
        recording: The recording.
        exporter: Gets the points.
        names: Patterns of the metrics that are wanted.
        amended: Whether the points of a series may be changed after they came.
        interval: Seconds between two looks.
    """

    def __init__(
        self,
        recording: Recording,
        exporter: Exporter,
        names: Iterable[str],
        amended: Callable[[str], bool],
        interval: float = INTERVAL,
    ) -> None:
        super().__init__(exporter, names)
        self._recording: Recording = recording
        self._amended = amended
        self._interval = interval
        self._next = self._replace()
        self._unsettled: dict[tuple[int, str, int], Point] = {}
        self._newest_ns = 0
        self._stopping = threading.Event()
        self._reader = threading.Thread(target=self._read, name="hvdlab-export-reader", daemon=True)
        atexit.register(self.close, EXIT_WITHIN)
        _open.add(self)
        self._reader.start()

    def close(self, timeout: float | None = None) -> bool:
        """Hand over what is there by now, close the exporter and end the threads. Idempotent.

        Returns:
            Whether that was done within ``timeout`` seconds; otherwise it goes on.
        """
        deadline = Deadline(timeout)
        self._stopping.set()
        self._recording.poke()
        if threading.current_thread() is not self._reader:
            self._reader.join(deadline.remaining())
        self._ended()
        return super().close(deadline.remaining())

    def _replace(self) -> int:
        """End the export that this one replaces. Returns the number of the first point that it has not exported."""
        following = 0
        for other in list(_open):
            if other._recording is self._recording and same_target(other.exporter, self.exporter):
                other.close(EXIT_WITHIN)
                if other.names == self.names:
                    following = max(following, other._next)
        return following

    def _ended(self) -> None:
        atexit.unregister(self.close)
        _open.discard(self)

    # -- the reader ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        version, recording = -1, self._recording
        while not self._stopping.is_set() and not (recording.closed and version == recording.version):
            recording.wait(version, self._stopping.is_set)
            version = recording.version
            self._look(last=False)
            if not recording.closed:
                self._stopping.wait(self._interval)
        self._look(last=True)
        self._ended()
        super().close(0)  # without a wait: the export's own thread writes the rest and ends

    def _look(self, *, last: bool) -> None:
        """Hand over new points that are final; the ``last`` time also those that might still have changed."""
        recording = self._recording
        self._next, points = recording.points_since(self._next)
        if len(points):
            self._newest_ns = max(self._newest_ns, int(points["time"].max()))
        series, offset = recording.series(), self._offset()
        ready = []
        for time_ns, value, step, number in zip(
            points["time"].tolist(),
            points["value"].tolist(),
            points["step"].tolist(),
            points["series"].tolist(),
            strict=True,
        ):
            one = series[number]
            when = time_ns / 1e9 + offset
            point = Point(one.rank, one.name, value, None if math.isnan(step) else int(step), when)
            if self._amended(one.name):
                self._unsettled[one.rank, one.name, time_ns] = point
            else:
                ready.append(point)
        self.put([*ready, *self._settled(last)])

    def _settled(self, everything: bool) -> list[Point]:
        until = math.inf if everything else self._newest_ns - SETTLED * 1e9
        found = [key for key in self._unsettled if key[2] <= until]
        return [self._unsettled.pop(key) for key in found]

    def _offset(self) -> float:
        """Seconds from the recording's axis to the time of day.

        If this host's clock can't be compared with the ranks', the newest point counts as measured now: it was, but for the
        fraction of a second that it took to come here.
        """
        ahead = self._recording.clock_offset_ns()
        if ahead is None:
            return time.time() - self._newest_ns / 1e9
        return time_of_day() - ahead / 1e9


_open: weakref.WeakSet[RecordingExport] = weakref.WeakSet()
