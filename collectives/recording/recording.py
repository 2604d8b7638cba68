"""The recording: takes the ranks' batches in, keeps their spans as rows, and wakes the views that show them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.dtypes import DType, OpKind
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.failures import Failures
from hvdlab.collectives.membership import Membership
from hvdlab.collectives.protocol.messages import MOST_RANKS
from hvdlab.collectives.recording.derived import DERIVED, Derived
from hvdlab.collectives.recording.marks import Mark, Marks
from hvdlab.collectives.recording.names import Names
from hvdlab.collectives.recording.numbering import Epochs, Numbering
from hvdlab.collectives.recording.planes import Planes
from hvdlab.collectives.recording.rows import RECORD, Rows, RowStore, distance, rows_of
from hvdlab.collectives.recording.series import Points, Series, SeriesStore
from hvdlab.collectives.tracing.clocks import Alignment, clock_domain
from hvdlab.collectives.tracing.record_format import (
    RECORD_BYTES,
    AbortEvent,
    CellBeginEvent,
    CellEndEvent,
    ClockSample,
    Event,
    Head,
    Members,
    Metric,
    RecordType,
    read_head,
    read_record,
)

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

ROWS_KEPT = 1_000_000
UNALIGNED_KEPT = 256
LATEST_NS = 1 << 61
SERIES = "what follows from the spans (shares, lateness, bandwidth)"

__all__ = ["Mark", "Recording"]


class Recording:
    """The newest spans of all ranks on one time axis, and what happened besides. All methods: any thread.

    Args:
        limit: Rows to keep: one per tensor, collective and rank, 72 bytes each.
        label: What users call a cell, from its id.

    Attributes:
        label: As above.
        origin_ns: Where the time axis begins; ``None`` until something came. Times elsewhere are on the clock of the
            host that was heard first.
        names, sites: Names of tensors, and the lines that they were used at (``cell [7] line 4``, empty if not known), by
            number; 0 is the empty one. A name that several lines use has several numbers.
        refused: How many batches could not be read.
        failures: Failures to compute something from it; the views show them.
        paused: Ranks in which the user looks around, and why, as it reads after ``rank 3 is``.
        when_paused: Called, on any thread, when that has changed.
        cleared, cleared_ns: Rows that :meth:`clear` has dropped, and when the last of them ended.
        cleared_end: Number of the first row after the last :meth:`clear`.
    """

    def __init__(self, limit: int = ROWS_KEPT, *, label: Callable[[str], str] = str) -> None:
        self.origin_ns: int | None = None
        self._names = Names()
        self.names = self._names.names
        self.sites = self._names.sites
        self.refused = 0
        self.failures = Failures()
        self.paused: Mapping[int, str] = {}
        self.when_paused: list[Callable[[], None]] = []
        self.cleared = self.cleared_end = 0
        self.cleared_ns: int | None = None
        self.label = label
        self._rows = RowStore(limit)
        self._marks = Marks()
        self._series = SeriesStore()
        self._derived = Derived(self._series)
        self._epochs = Epochs()
        self._planes = Planes()
        self._numbering = Numbering()
        self._alignment = Alignment()
        self._unaligned: list[tuple[bytes, Head]] = []
        self._unaligned_dropped = 0
        self._lost: dict[int, int] = {}
        self._domains: dict[int, int] = {}
        self._told_errors: dict[int, int] = {}
        self._membership = Membership()
        self._changed = threading.Condition()
        self._version = 0
        self._closed = False

    # -- in -----------------------------------------------------------------------------------------------------------

    def feed(self, rank: int, batch: bytes) -> None:
        """Take a batch in. One that can't be read is counted, not raised: the others go on."""
        with self._changed:
            try:
                self._feed(batch, read_head(batch, self._names.definitions))
            except ProtocolError:
                self.refused += 1
            self._wake()

    def _feed(self, batch: bytes, head: Head) -> None:
        records = np.frombuffer(batch, RECORD, offset=head.start)
        small = [
            (place, read_record(batch, head.start + place * RECORD_BYTES, head))
            for place in np.flatnonzero(records["type"] != RecordType.SPAN).tolist()
        ]
        _check_times(records, [event for _, event in small])
        self._alignment.observe(head.clock)
        self._domains[head.rank] = head.clock
        for _, event in small:
            if isinstance(event, ClockSample):
                self._alignment.observe(head.clock, event)
        offset = self._alignment.offset(head.clock)
        if offset is None:
            self._hold(batch, head)
            return
        held, self._unaligned = self._unaligned, []
        for earlier, its_head in held:
            self._feed(earlier, its_head)
        self._lost[head.rank] = head.dropped + head.refused
        news = [(at, event) for at, event in small if isinstance(event, Members)]
        self._planes.take(head.rank, [event for _, event in news])
        self._spans(records, head, offset[0], [(at, event) for at, event in news if event.size])
        for _, event in small:
            self._small(head.rank, event, offset[0])

    def _hold(self, batch: bytes, head: Head) -> None:
        if len(self._unaligned) < UNALIGNED_KEPT:
            self._unaligned.append((batch, head))
        else:
            self._unaligned_dropped += (len(batch) - head.start) // RECORD_BYTES

    def _spans(
        self, records: NDArray[Any], head: Head, offset_ns: int, members: list[tuple[int, Members]]
    ) -> None:
        places = np.flatnonzero(records["type"] == RecordType.SPAN)
        spans = records[places]
        _check(head.rank, spans, members)
        rows = rows_of(spans, head.rank, offset_ns)
        matched = self._names.assign(rows, head) if len(rows) else rows["name"]
        if len(rows):
            self._see(int(rows["arrival"].min()))
        self._epochs.assign(rows, head.rank, places, members)
        if len(rows):
            self._numbering.assign(rows, head.rank, matched)
            self._rows.append(rows)
            with self.failures.guard(SERIES):
                self._derived.add(head.rank, rows, self.origin_ns or 0)

    def _small(self, rank: int, event: object, offset_ns: int) -> None:
        if isinstance(event, CellBeginEvent | CellEndEvent | AbortEvent):
            self._see(event.time_ns + offset_ns)
            self._marks.event(rank, event, offset_ns, self.label)
            with self.failures.guard(SERIES):
                if isinstance(event, CellBeginEvent):
                    self._derived.cell_began(rank, event.time_ns + offset_ns)
                elif isinstance(event, CellEndEvent):
                    self._derived.cell_ended(rank, event.time_ns + offset_ns, self.origin_ns or 0)
        elif isinstance(event, Metric):
            self._see(event.time_ns + offset_ns)
            self._series.append(rank, event.name, event.time_ns + offset_ns, event.value, event.step)

    def _see(self, time_ns: int) -> None:
        if self.origin_ns is None:
            self.origin_ns = time_ns

    def take_membership(self, membership: Membership) -> None:
        """Take in which ranks are there now."""
        with self._changed:
            self._membership = membership
            offset = self.clock_offset_ns()
            self._marks.membership(membership, None if offset is None else time.monotonic_ns() + offset)
            self._wake()

    def take_paused(self, paused: Mapping[int, str]) -> None:
        """Take in which ranks are paused now, and why."""
        with self._changed:
            if paused == self.paused:
                return
            self.paused = dict(paused)
            if (offset := self.clock_offset_ns()) is not None:
                self._marks.paused(self.paused, time.monotonic_ns() + offset)
            self._wake()
        for act in list(self.when_paused):
            act()

    def close(self) -> None:
        """Nothing comes any more; what was recorded stays readable. Idempotent."""
        with self._changed:
            self._closed = True
            self._wake()

    def announce(self) -> None:
        """Something has changed that views show beside what is recorded: those in :meth:`wait` look again. Any thread."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self._version += 1
        self._changed.notify_all()

    # -- out ----------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def version(self) -> int:
        """Grows with each change."""
        return self._version

    @property
    def count(self) -> int:
        """Rows that are here."""
        return len(self._rows)

    @property
    def end(self) -> int:
        """Number of the next row."""
        return self._rows.end

    @property
    def lost(self) -> int:
        """Spans that never came here: they made room in the ranks' rings, or their clock could not be compared."""
        return self._unaligned_dropped + sum(self._lost.values())

    @property
    def dropped(self) -> int:
        """Spans that are not here: those that never came, and those that have made room."""
        return self._rows.begin - self.cleared + self.lost

    def wait(self, version: int, wanted: Callable[[], bool] = bool, timeout: float | None = None) -> bool:
        """Wait until something came after ``version``, the recording is closed, or ``wanted()`` (see :meth:`poke`).

        Returns whether that happened within ``timeout`` seconds.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self._version != version or self._closed or wanted(), timeout
            )

    def poke(self) -> None:
        """Let all threads in :meth:`wait` look again."""
        with self._changed:
            self._changed.notify_all()

    def rows_since(self, number: int, most: int | None = None) -> tuple[int, Rows]:
        """Rows from ``number`` on (those before may have been dropped): the number of the first, and a copy."""
        with self._changed:
            return self._rows.since(number, most)

    def clear(self) -> int:
        """Forget the rows, and in what is saved all that happened before now. Returns how many rows there were.

        Views that show them forget them, too; points of series stay.
        """
        with self._changed:
            last = self._rows.since(self._rows.end - 1)[1]
            if len(last):
                self.cleared_ns = int((last["arrival"] + distance(last, "finished"))[0])
            count = self._rows.clear()
            self.cleared += count
            self.cleared_end = self._rows.end
            self._wake()
            return count

    def marks_since(self, stamp: int) -> tuple[int, list[tuple[int, Mark]]]:
        """Marks that are new or have changed, with their numbers, and the stamp to ask with next time."""
        with self._changed:
            return self._marks.stamp, self._marks.changed_since(stamp)

    def marks(self) -> list[Mark]:
        with self._changed:
            return self._marks.all()

    def series(self, number: int = 0) -> list[Series]:
        """The series from a number on; points name them by these numbers."""
        with self._changed:
            return self._series.series[number:]

    def points_since(self, number: int, most: int | None = None) -> tuple[int, Points]:
        """Points of all series from ``number`` on that are kept, and the number to ask with next time."""
        with self._changed:
            self._advance(force=most is None)
            points = self._series.since(number, most)
            if most is None or len(points) < most:
                return self._series.end, points
            return int(points["number"][-1]) + 1 if most else number, points

    def points(self, rank: int, name: str) -> Points:
        """A copy of the points of one series, by time; none if there is no such series."""
        with self._changed:
            if name.startswith(DERIVED):
                self._advance(force=True)
            return self._series.of(rank, name)

    def newest(self, name: str, most: int = 16) -> dict[int, Points]:
        """The last points under a name, by rank; those of ranks that have any."""
        with self._changed:
            if name.startswith(DERIVED):
                self._advance()
            return self._series.newest(name, most)

    def _advance(self, *, force: bool = False) -> None:
        """Derive the series that follow from the spans. If that fails, the measured series are still there."""
        with self.failures.guard(SERIES):
            self._derived.advance(self.origin_ns or 0, force=force)

    @property
    def points_end(self) -> int:
        """Number of the next point."""
        return self._series.end

    @property
    def points_lost(self) -> int:
        """Points that are not here: those dropped to make room, and those of series beyond the most that are kept."""
        return self._series.dropped + self._series.refused

    def clock_offset_ns(self) -> int | None:
        """What to add to this process's ``CLOCK_MONOTONIC`` for times on the axis; ``None`` if they can't be compared."""
        with self._changed:
            offset = self._alignment.offset(clock_domain())
        return None if offset is None else offset[0]

    def running(self, rank: int) -> str:
        """The cell that runs on a rank; empty if none does."""
        return self._marks.running(rank)

    def planes(self, rank: int) -> dict[int, str]:
        """The data plane of each process set that a rank is in, by the set's number, as far as it has told."""
        with self._changed:
            return self._planes.of(rank)

    @property
    def membership(self) -> Membership:
        return self._membership

    def clock_errors(self) -> dict[int, int]:
        """By how many ns a rank's clock may be off, by rank; of ranks whose clock had to be compared with the first host's."""
        with self._changed:
            found = {rank: self._alignment.offset(domain) for rank, domain in self._domains.items()}
        measured = {rank: offset[1] for rank, offset in found.items() if offset is not None and offset[1]}
        return self._told_errors | measured

    def take_clock_error(self, rank: int, error_ns: int) -> None:
        """A trace says by how much the times of a rank may be off that were compared when it was written."""
        self._told_errors[rank] = error_ns

    def table(self) -> DataFrame:
        """All spans as a pandas table; the columns are in ``docs/reference/trace.md``.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        from hvdlab.collectives.recording.table import table

        return table(self)

    def arrow(self) -> Any:
        """All spans as a ``pyarrow.Table`` with the same columns.

        Raises:
            ModuleNotFoundError: pyarrow is not installed.
        """
        from hvdlab.collectives.recording.arrow_table import arrow_table

        return arrow_table(self)

    def metrics(self) -> DataFrame:
        """All points of all series as a pandas table; the columns are in ``docs/reference/metrics.md``.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        from hvdlab.collectives.recording.metric_table import metric_table

        return metric_table(self)


def _check_times(records: NDArray[Any], small: list[Event]) -> None:
    """Refuse times of 73 years and more, which no clock shows; sums of two smaller ones fit 64 bits."""
    spans = records["type"] == RecordType.SPAN
    late = (records["submitted"][spans] >= LATEST_NS).any() or any(
        getattr(event, "time_ns", 0) >= LATEST_NS for event in small
    )
    if late or any(isinstance(event, ClockSample) and abs(event.offset_ns) >= LATEST_NS for event in small):
        raise ProtocolError("event batch: a time is impossible")


def _check(rank: int, spans: NDArray[Any], members: list[tuple[int, Members]]) -> None:
    if rank >= MOST_RANKS:
        raise ProtocolError(f"event batch: there is no rank {rank}")
    if any(event.size > MOST_RANKS for _, event in members):
        raise ProtocolError("event batch: a process set has more ranks than there can be")
    if not len(spans):
        return
    if spans["kind"].max() >= len(OpKind) or spans["dtype"].max() >= len(DType):
        raise ProtocolError("event batch: a span has an unknown kind or element type")
    if ((spans["ready"] > spans["started"]) | (spans["started"] > spans["finished"])).any():
        raise ProtocolError("event batch: the times of a span are out of order")
