"""Metrics as single points with the time of day, for those who keep them elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.timeline.alignment import Alignment
from hvdlab.collectives.timeline.clock import clock_domain
from hvdlab.collectives.timeline.events import ClockSample, Metric
from hvdlab.collectives.timeline.records import RECORD_BYTES, RecordType, read_head, read_record


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric.

    Attributes:
        rank: Whose it is.
        name: As given to ``hvd.metric()``, or one of hvdlab's own.
        value: May be NaN or infinite.
        step: The training step, if it belongs to one.
        time: When it was measured, in seconds since 1970.
    """

    rank: int
    name: str
    value: float
    step: int | None
    time: float


def time_of_day() -> float:
    """What has to be added to seconds of this host's ``CLOCK_MONOTONIC`` for seconds since 1970, now."""
    return time.time() - time.monotonic()


class PointReader:
    """Finds the metrics in batches of ranks.

    Args:
        offset: Seconds from ``CLOCK_MONOTONIC`` to the time of day.

    Attributes:
        refused: Batches that could not be read.
        unaligned: Metrics of hosts whose clock has not been compared with this one's yet; they are left out.
    """

    def __init__(self, offset: Callable[[], float] = time_of_day) -> None:
        self.refused = 0
        self.unaligned = 0
        self._offset = offset
        self._alignment = Alignment()
        self._alignment.observe(clock_domain())

    def read(self, batch: bytes) -> list[Point]:
        """The metrics of a batch, in the order in which they were recorded."""
        try:
            return list(self._read(batch))
        except ProtocolError:
            self.refused += 1
            return []

    def _read(self, batch: bytes) -> Iterator[Point]:
        head = read_head(batch)
        types = batch[head.start :: RECORD_BYTES]
        for sample in _records(types, RecordType.CLOCK):
            event = read_record(batch, head.start + sample * RECORD_BYTES, head)
            assert isinstance(event, ClockSample)
            self._alignment.observe(head.clock, event)
        if RecordType.METRIC not in types:
            return
        aligned = self._alignment.offset(head.clock)
        if aligned is None:
            self.unaligned += types.count(RecordType.METRIC)
            return
        offset = self._offset() + aligned[0] / 1e9
        for place in _records(types, RecordType.METRIC):
            event = read_record(batch, head.start + place * RECORD_BYTES, head)
            assert isinstance(event, Metric)
            yield Point(head.rank, event.name, event.value, event.step, event.time_ns / 1e9 + offset)


def _records(types: bytes, kind: RecordType) -> Iterator[int]:
    place = types.find(kind)
    while place >= 0:
        yield place
        place = types.find(kind, place + 1)
