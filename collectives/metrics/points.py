"""Metrics as single points with the time of day, for exporters that keep them elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.tracing.clocks import Alignment, clock_domain
from hvdlab.collectives.tracing.record_format import (
    RECORD_BYTES,
    ClockSample,
    Event,
    Head,
    Metric,
    RecordType,
    read_head,
    read_record,
)

BATCHES_HELD = 256


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric.

    Attributes:
        rank: The rank that recorded it.
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
    """The difference to add to seconds of this host's ``CLOCK_MONOTONIC`` to get seconds since 1970, as it is now."""
    return time.time() - time.monotonic()


class PointReader:
    """Finds the metrics in batches of ranks.

    Batches of hosts whose clock has not been compared with this host's yet are held until it has been.

    Args:
        offset: Seconds from ``CLOCK_MONOTONIC`` to the time of day.

    Attributes:
        refused: How many batches could not be read.
        dropped: How many metrics were dropped because too many batches were held.
    """

    def __init__(self, offset: Callable[[], float] = time_of_day) -> None:
        self.refused = 0
        self.dropped = 0
        self._offset = offset
        self._alignment = Alignment()
        self._alignment.observe(clock_domain())
        self._held: deque[bytes] = deque()

    def read(self, batch: bytes) -> list[Point]:
        """The metrics of a batch, in the order in which they were recorded, after those that were held until now."""
        try:
            return self._read(batch, read_head(batch))
        except ProtocolError:
            self.refused += 1
            return []

    def _read(self, batch: bytes, head: Head) -> list[Point]:
        types = batch[head.start :: RECORD_BYTES]
        found: list[Point] = []
        samples = list(_events(batch, head, types, RecordType.CLOCK))
        for sample in samples:
            assert isinstance(sample, ClockSample)
            self._alignment.observe(head.clock, sample)
        if samples and self._held:
            held, self._held = self._held, deque()
            for earlier in held:
                found += self._metrics(earlier, read_head(earlier))
        return found + self._metrics(batch, head)

    def _metrics(self, batch: bytes, head: Head) -> list[Point]:
        types = batch[head.start :: RECORD_BYTES]
        if RecordType.METRIC not in types:
            return []
        aligned = self._alignment.offset(head.clock)
        if aligned is None:
            self._hold(batch)
            return []
        offset = self._offset() + aligned[0] / 1e9
        return [
            Point(head.rank, event.name, event.value, event.step, event.time_ns / 1e9 + offset)
            for event in _events(batch, head, types, RecordType.METRIC)
            if isinstance(event, Metric)
        ]

    def _hold(self, batch: bytes) -> None:
        self._held.append(batch)
        if len(self._held) > BATCHES_HELD:
            oldest = self._held.popleft()
            self.dropped += oldest[read_head(oldest).start :: RECORD_BYTES].count(RecordType.METRIC)


def _events(batch: bytes, head: Head, types: bytes, kind: RecordType) -> Iterator[Event]:
    place = types.find(kind)
    while place >= 0:
        yield read_record(batch, head.start + place * RECORD_BYTES, head)
        place = types.find(kind, place + 1)
