"""The recording: spans of all ranks on one time axis, with cells, marks and metrics, for the views that show them.

Spans and points are there as tables of pandas and Arrow, too. Needs numpy, so neither the coordinator nor a rank imports it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.errors import ProtocolError, shown_name
from hvdlab.collectives.failures import Failures
from hvdlab.collectives.protocol.messages import MOST_RANKS
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.tracing.collective_matching import Generations, Numbering, collective_arrivals
from hvdlab.collectives.tracing.columns import (
    FAILED,
    NOT_READY,
    NOT_STARTED,
    RECORD,
    Points,
    Rows,
    RowStore,
    Series,
    SeriesStore,
    distance,
    rows_of,
)
from hvdlab.collectives.tracing.derived_series import DERIVED, DerivedSeries
from hvdlab.collectives.tracing.record_format import (
    RECORD_BYTES,
    AbortEvent,
    Alignment,
    CellBeginEvent,
    CellEndEvent,
    ClockSample,
    Definitions,
    Event,
    Head,
    Members,
    Metric,
    RecordType,
    clock_domain,
    read_head,
    read_record,
)
from hvdlab.collectives.types import DType, Membership, OpKind

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

ROWS_KEPT = 1_000_000
"""Rows of a recording, of 72 bytes each."""
UNALIGNED_KEPT = 256
"""Batches that may wait until their host's clock has been compared."""
LATEST_NS = 1 << 61
"""Times and offsets from here on are impossible."""
SERIES = "what follows from the spans (shares, lateness, bandwidth)"
ANNOTATIONS_KEPT = 2000
"""Annotations that are kept: the newest, and before all others those of cells, pauses and waits that have not ended."""
_SAME_ABORT_NS = 1_000_000_000
"""Aborts of two process sets for the same reason share a mark within this time: the coordinator sends them together."""
NAMES_KEPT = 65_536
"""Names with their sites; all further ones share :data:`OTHER_NAMES`."""
OTHER_NAMES = "(another name)"
DEFINITIONS_KEPT = 256
"""Tables of definitions that are remembered: a few for each rank, since the steps of a training are alike."""


@dataclass(slots=True)
class _Known:
    """Numbers that spans have used of a table of definitions, in order, with their meaning here.

    Attributes:
        idents: Numbers in the batches of a rank.
        numbers: The number of each in :attr:`NameTable.names`.
        matched: The number of its name at all lines, by which ranks are compared.
    """

    idents: NDArray[np.uint32]
    numbers: NDArray[np.uint32]
    matched: NDArray[np.uint32]


class NameTable:
    """Table of names and call sites by number, each pair once.

    Attributes:
        names, sites: Texts by number; 0 is the empty one. A name may have several numbers, one for each of its sites.
        definitions: Tables of definitions that were read, for ``read_head``.
    """

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self.sites: list[str] = [""]
        self.definitions = Definitions(DEFINITIONS_KEPT)
        self._numbers: dict[tuple[str, str], int] = {("", ""): 0}
        self._matched: dict[str, int] = {"": 0}  # a number for each name at all its sites
        self._known: dict[int, tuple[dict[int, str], _Known]] = {}

    def assign(self, rows: Rows, head: Head) -> NDArray[Any]:
        """Replace the numbers of a batch by those here. Return one for each row's name, the same at all its sites.

        Raises:
            ProtocolError: A row has a name that its batch does not define.
        """
        idents = rows["name"].astype(np.uint32)
        # Tables that are read again are the same object, which is kept here so that its id stays its own.
        entry = self._known.get(id(head.names))
        at = None if entry is None else _places(entry[1].idents, idents)
        if entry is None or at is None:
            known = self._learn(head, idents, entry[1].idents if entry is not None else idents[:0])
            at = np.searchsorted(known.idents, idents)
        else:
            known = entry[1]
        rows["name"] = known.numbers[at]
        found: NDArray[Any] = known.matched[at]
        return found

    def _learn(self, head: Head, idents: NDArray[np.uint32], before: NDArray[np.uint32]) -> _Known:
        used = np.union1d(idents, before)
        if missing := set(used.tolist()) - set(head.names):
            raise ProtocolError(f"event batch: name {min(missing)} is not defined")
        numbers = [self._number(head.names[one], head.sites[one]) for one in used.tolist()]
        matched = [self._matched[self.names[number]] for number in numbers]
        found = _Known(used, np.array(numbers, np.uint32), np.array(matched, np.uint32))
        self._known[id(head.names)] = (head.names, found)
        if len(self._known) > DEFINITIONS_KEPT:
            del self._known[next(iter(self._known))]
        return found

    def _number(self, name: str, site: str) -> int:
        number = self._numbers.get((name, site))
        if number is not None:
            return number
        if len(self._numbers) >= NAMES_KEPT:
            # The table is never cleared, as rows refer to it by number: a program that makes up a name for each call must not fill
            # the memory.
            name, site = OTHER_NAMES, ""
        if (name, site) not in self._numbers:
            number = self._numbers[name, site] = len(self.names)
            self._matched.setdefault(name, number)
            self.sites.append(site)  # first, so that a thread that has seen a name finds its site
            self.names.append(name)
        return self._numbers[name, site]


def _places(known: NDArray[np.uint32], idents: NDArray[np.uint32]) -> NDArray[np.intp] | None:
    """Return the place of each in the order of the known ones; ``None`` if one is not known."""
    at: NDArray[np.intp] = np.searchsorted(known, idents)
    np.minimum(at, len(known) - 1, out=at)
    return at if np.array_equal(known[at], idents) else None


@dataclass(slots=True)
class Annotation:
    """Event at one moment or, like a cell, from ``begin_ns`` to ``end_ns`` (``None`` while it runs).

    Times are on the common axis; except for cells and aborts, they are when the news came here. In a ``paused`` rank the
    user looks around. A ``waiting`` rank has joined and is admitted at the next commit of the others. ``formed`` is an
    generation of the world with other ranks than the one before; its rank is the first of these.
    """

    kind: Literal["cell", "abort", "joined", "left", "paused", "waiting", "formed"]
    rank: int
    begin_ns: int
    end_ns: int | None
    text: str
    ok: bool = True


class Annotations:
    """Newest marks by number; :meth:`changed_since` returns those that are new or have changed."""

    def __init__(self) -> None:
        self.stamp = 0
        #: The newest annotations by number, each with the stamp of its last change.
        self._annotations: OrderedDict[int, tuple[int, Annotation]] = OrderedDict()
        #: Number of the next annotation.
        self._next = 0
        #: Numbers of the annotations of cells that have not ended, by rank and cell.
        self._open: dict[tuple[int, str], int] = {}
        #: Name for users of the cell that runs on each rank.
        self._running: dict[int, str] = {}
        self._paused: dict[int, tuple[str, int]] = {}  # rank to why, and the number of the mark
        self._waiting: dict[int, int] = {}  # rank to the number of the mark
        self._formed: tuple[int, ...] = ()  # the ranks of the last generation
        #: The newest generation of each process set whose abort has a mark, and when that mark begins.
        self._aborted: dict[int, tuple[int, int]] = {}
        #: The last membership, with which the next one is compared; ``None`` before the first.
        self._membership: Membership | None = None

    def all(self) -> list[Annotation]:
        """Return all annotations, the oldest first."""
        return [mark for _, mark in self._annotations.values()]

    def running(self, rank: int) -> str:
        """Return the cell that runs on a rank; empty if none does."""
        return self._running.get(rank, "")

    def changed_since(self, stamp: int) -> list[tuple[int, Annotation]]:
        """Return the annotations that are new or have changed since a stamp, with their numbers."""
        return [(number, mark) for number, (changed, mark) in self._annotations.items() if changed > stamp]

    def _put(self, mark: Annotation) -> int:
        number, self._next = self._next, self._next + 1
        self.stamp += 1
        self._annotations[number] = (self.stamp, mark)
        if len(self._annotations) > ANNOTATIONS_KEPT:
            # A mark that has not ended stays: without it `_end()` could not tell the views that a cell has ended.
            lasting = {
                *self._open.values(),
                *self._waiting.values(),
                *(mark for _, mark in self._paused.values()),
            }
            ended = (old for old in self._annotations if old not in lasting and old != number)
            for old in list(islice(ended, len(self._annotations) - ANNOTATIONS_KEPT)):
                del self._annotations[old]
        return number

    def event(
        self,
        rank: int,
        event: CellBeginEvent | CellEndEvent | AbortEvent,
        offset_ns: int,
        labels: Mapping[str, str],
    ) -> None:
        """Add an event that a rank recorded; ``labels`` has the names of cells for users, by id."""
        at = event.time_ns + offset_ns
        if isinstance(event, CellBeginEvent):
            label = labels.get(event.cell, event.cell)
            self._running[rank] = label
            self._open[rank, event.cell] = self._put(Annotation("cell", rank, at, None, label))
        elif isinstance(event, CellEndEvent):
            self._running.pop(rank, None)
            number = self._open.pop((rank, event.cell), None)
            if number is not None:
                self._end(number, at, ok=event.ok)
        elif self._is_new_abort(event, at):
            self._put(Annotation("abort", rank, at, at, event.text, False))

    def _is_new_abort(self, event: AbortEvent, at: int) -> bool:
        """Return whether this abort has no mark yet, and remember its generation as marked."""
        generation, own = self._aborted.get(event.process_set, (-1, -1))
        alike = [
            mark.begin_ns for mark in self.all()[-64:] if mark.kind == "abort" and mark.text == event.text
        ]
        # All members record the same abort; the first one's time is shown.
        if alike and event.generation <= generation:
            return False
        # One interrupt or death aborts several process sets at once. The text alone says nothing: each interrupt has the same one.
        near = [begin for begin in alike if begin != own and abs(at - begin) < _SAME_ABORT_NS]
        self._aborted[event.process_set] = max(event.generation, generation), near[-1] if near else at
        return not near

    def membership(self, now: Membership, at_ns: int | None) -> None:
        """Add the changes from the last membership to this one.

        The first membership adds none: it is a state, and nothing has happened.

        Args:
            now: The ranks that are there.
            at_ns: The time on the common axis; ``None`` if this clock can't be compared with that of the ranks.
        """
        before, self._membership = self._membership, now
        # Empty between two generations of the world: the next one is compared with the last that there was.
        formed, self._formed = self._formed, now.formed or self._formed
        if before is None or not before.members or at_ns is None:
            return
        known = {(death.rank, death.pid) for death in before.deaths}
        here = {member.rank: member.pid for member in before.members}
        for death in now.deaths:
            if (death.rank, death.pid) not in known:
                self._end_cells(death.rank, at_ns)
                text = f"rank {death.rank} died: {death.reason}"
                self._put(Annotation("left", death.rank, at_ns, at_ns, text, False))
        died = {death.rank for death in before.deaths}
        for member in now.members:
            if here.get(member.rank) != member.pid:
                text = f"rank {member.rank} joined on {member.host.split('#')[0]}"
                text += ", in place of the one that died" if member.rank in died else ""
                self._put(Annotation("joined", member.rank, at_ns, at_ns, text))
        dead = {death.rank for death in now.deaths}
        for rank in set(here) - set(now.ranks) - dead:
            self._put(Annotation("left", rank, at_ns, at_ns, f"rank {rank} left"))
        self._let_in(now, at_ns)
        if now.formed and formed and now.formed != formed:
            text = f"{format_ranks(now.formed)} from now on"
            self._put(Annotation("formed", now.formed[0], at_ns, at_ns, text))

    def _let_in(self, now: Membership, at_ns: int) -> None:
        """Begin and end the annotations of ranks that wait to be admitted."""
        for rank in self._waiting.keys() - set(now.waiting):
            self._end(self._waiting.pop(rank), at_ns, ok=True)
        for rank in sorted(set(now.waiting) - self._waiting.keys()):
            text = f"rank {rank} waits to be let in"
            self._waiting[rank] = self._put(Annotation("waiting", rank, at_ns, None, text))

    def paused(self, now: Mapping[int, str], at_ns: int) -> None:
        """Begin and end the annotations of paused ranks; ``now`` has the reason of each."""
        for rank, (why, number) in list(self._paused.items()):
            if now.get(rank) != why:
                del self._paused[rank]
                self._end(number, at_ns, ok=True)
        for rank in sorted(now.keys() - self._paused.keys()):
            number = self._put(Annotation("paused", rank, at_ns, None, f"rank {rank} is {now[rank]}"))
            self._paused[rank] = now[rank], number

    def _end_cells(self, rank: int, at_ns: int) -> None:
        self._running.pop(rank, None)
        for key in [key for key in self._open if key[0] == rank]:
            self._end(self._open.pop(key), at_ns, ok=False)

    def _end(self, number: int, at_ns: int, *, ok: bool) -> None:
        # Otherwise it has made room for newer ones, while the cell or pause went on.
        if number in self._annotations:
            mark = self._annotations[number][1]
            mark.end_ns, mark.ok = max(at_ns, mark.begin_ns), ok
            self.stamp += 1
            self._annotations[number] = (self.stamp, mark)


class Planes:
    """Data plane of each process set on each of its ranks, as they have recorded it.

    The user often asked for another one, or for ``auto``.
    """

    def __init__(self) -> None:
        #: Generation and plane, by rank and process set.
        self._planes: dict[int, dict[int, tuple[int, str]]] = {}
        #: The newest generation of each process set that any rank has recorded.
        self._generations: dict[int, int] = {}

    def update(self, rank: int, news: Iterable[Members]) -> None:
        """Update the planes of a rank by its records of members."""
        for event in news:
            own = self._planes.setdefault(rank, {})
            if event.generation < own.get(event.process_set, (0, ""))[0]:
                continue
            own[event.process_set] = event.generation, event.plane
            self._generations[event.process_set] = max(
                event.generation, self._generations.get(event.process_set, 0)
            )

    def of(self, rank: int) -> dict[int, str]:
        """Return the planes of the process sets that a rank is in, by set; one that continues without it is left out."""
        planes = sorted(self._planes.get(rank, {}).items())
        return {
            number: plane
            for number, (generation, plane) in planes
            if plane and (not number or generation == self._generations[number])
        }


class Recording:
    """Newest spans of all ranks on one time axis, with cells, marks and metrics. All methods: any thread.

    Args:
        limit: Rows to keep: one per tensor, collective and rank, 72 bytes each.

    Attributes:
        labels: Names of cells for users, by id; a cell without one is shown by its id.
        origin_ns: Where the time axis begins; ``None`` until something came. Times elsewhere are on the clock of the
            host that was heard first.
        names, sites: NameTable of tensors, and the lines that they were used at (``cell [7] line 4``, empty if not known), by
            number; 0 is the empty one. A name that several lines use has several numbers.
        refused: How many batches could not be read.
        silent: Ranks that did not answer when all that ranks have recorded was gathered last: their newest records are missing.
        failures: Failures to compute something from it; the views show them.
        paused: Ranks in which the user looks around, and why, as it reads after ``rank 3 is``.
        when_paused: Called, on any thread, when that has changed.
        cleared, cleared_ns: Rows that :meth:`clear` has dropped, and when the last of them ended.
        cleared_end: Number of the first row after the last :meth:`clear`.
    """

    def __init__(self, limit: int = ROWS_KEPT) -> None:
        self.origin_ns: int | None = None
        self._names = NameTable()
        self.names = self._names.names
        self.sites = self._names.sites
        self.refused = 0
        self.silent: tuple[int, ...] = ()
        self.failures = Failures()
        self.paused: Mapping[int, str] = {}
        self.when_paused: list[Callable[[], None]] = []
        self.cleared = self.cleared_end = 0
        self.cleared_ns: int | None = None
        self.labels: Mapping[str, str] = {}
        self._rows = RowStore(limit)
        self._annotations = Annotations()
        self._series = SeriesStore()
        self._derived = DerivedSeries(self._series)
        self._generations = Generations()
        self._planes = Planes()
        self._numbering = Numbering()
        self._alignment = Alignment()
        #: Batches of hosts whose clock has not been compared yet.
        self._unaligned: list[tuple[bytes, Head]] = []
        #: Records of batches for which there was no room among these.
        self._unaligned_dropped = 0
        #: Records that each rank has dropped or refused, by its last batch.
        self._lost: dict[int, int] = {}
        #: Clock of each rank.
        self._domains: dict[int, int] = {}
        #: Errors of the ranks' clocks that a trace file gives, in ns.
        self._given_errors: dict[int, int] = {}
        self._membership = Membership()
        #: Guards all of this; notified of each change.
        self._changed = threading.Condition()
        self._version = 0
        self._closed = False

    # -- in -----------------------------------------------------------------------------------------------------------

    def feed(self, rank: int, batch: bytes) -> None:
        """Add a batch of a rank. One that can't be read is counted, not raised: those of other ranks are still shown."""
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
        # Before the clocks are compared: one impossible sample would move the times of a whole host.
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
        # Replaced before they are fed: a batch whose clock still can't be compared is held again.
        held, self._unaligned = self._unaligned, []
        for earlier, its_head in held:
            # Each by itself: their spans are checked only now, and a bad one must not take along the others and this batch.
            try:
                self._feed(earlier, its_head)
            except ProtocolError:
                self.refused += 1
        self._lost[head.rank] = head.dropped + head.refused
        news = [(at, event) for at, event in small if isinstance(event, Members)]
        self._planes.update(head.rank, [event for _, event in news])
        self._spans(records, head, offset[0], [(at, event) for at, event in news if event.size])
        for _, event in small:
            self._add_event(head.rank, event, offset[0])

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
            self._set_origin(int(rows["arrival"].min()))
        self._generations.assign(rows, head.rank, places, members)
        if len(rows):
            self._numbering.assign(rows, head.rank, matched)
            self._rows.append(rows)
            with self.failures.guard(SERIES):
                self._derived.add(head.rank, rows, self.origin_ns or 0)

    def _add_event(self, rank: int, event: object, offset_ns: int) -> None:
        if isinstance(event, CellBeginEvent | CellEndEvent | AbortEvent):
            self._set_origin(event.time_ns + offset_ns)
            self._annotations.event(rank, event, offset_ns, self.labels)
            with self.failures.guard(SERIES):
                if isinstance(event, CellBeginEvent):
                    self._derived.cell_began(rank, event.time_ns + offset_ns)
                elif isinstance(event, CellEndEvent):
                    self._derived.cell_ended(rank, event.time_ns + offset_ns, self.origin_ns or 0)
        elif isinstance(event, Metric):
            self._set_origin(event.time_ns + offset_ns)
            self._series.append(rank, event.name, event.time_ns + offset_ns, event.value, event.step)

    def _set_origin(self, time_ns: int) -> None:
        if self.origin_ns is None:
            self.origin_ns = time_ns

    def take_membership(self, membership: Membership) -> None:
        """Set which ranks are there now."""
        with self._changed:
            self._membership = membership
            offset = self.clock_offset_ns()
            self._annotations.membership(membership, None if offset is None else time.monotonic_ns() + offset)
            self._wake()

    def take_paused(self, paused: Mapping[int, str]) -> None:
        """Set which ranks are paused now, and the reason of each."""
        with self._changed:
            if paused == self.paused:
                return
            self.paused = dict(paused)
            if (offset := self.clock_offset_ns()) is not None:
                self._annotations.paused(self.paused, time.monotonic_ns() + offset)
            self._wake()
        for act in list(self.when_paused):
            act()

    def close(self) -> None:
        """End the recording: nothing is added any more, and all that was recorded stays readable. Idempotent."""
        with self._changed:
            self._closed = True
            self._wake()

    def notify(self) -> None:
        """Wake threads in :meth:`wait`, as data has changed that views show beside the recording. Any thread."""
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
        """Return a number that grows with each change."""
        return self._version

    @property
    def count(self) -> int:
        """Return how many rows are kept."""
        return len(self._rows)

    @property
    def end(self) -> int:
        """Return the number of the next row."""
        return self._rows.end

    @property
    def lost(self) -> int:
        """Return the number of spans that never came here: they made room in the ranks' rings, or their clock could not be compared."""
        return self._unaligned_dropped + sum(self._lost.values())

    @property
    def dropped(self) -> int:
        """Return the number of spans that are not here: those that never came, and those that have made room."""
        return self._rows.begin - self.cleared + self.lost

    def wait(self, version: int, wanted: Callable[[], bool] = bool, timeout: float | None = None) -> bool:
        """Wait until something came after ``version``, the recording is closed, or ``wanted()`` (see :meth:`wake_waiters`).

        Returns whether that happened within ``timeout`` seconds.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self._version != version or self._closed or wanted(), timeout
            )

    def wake_waiters(self) -> None:
        """Let all threads in :meth:`wait` ask their ``wanted`` again."""
        with self._changed:
            self._changed.notify_all()

    def rows_since(self, number: int, most: int | None = None) -> tuple[int, Rows]:
        """Return the rows from ``number`` on that are kept: the number of the first, and a copy."""
        with self._changed:
            return self._rows.since(number, most)

    def last_seen(self, rank: int, since_ns: int) -> str:
        """Return where a rank was seen last: in which collective, and at which line that was called.

        Args:
            rank: The rank.
            since_ns: When its process was ready, by this process's ``CLOCK_MONOTONIC``. An earlier process may have had
                the same rank.

        Returns:
            ``allreduce `grad`, cell [7] line 4``. It is empty if this process of the rank ended no collective whose record
            is kept here, or if its clock can't be compared.
        """
        with self._changed:
            rows = self._rows.newest_of(rank)
            offset = self._alignment.offset(clock_domain())
        if not len(rows) or offset is None or int(rows["arrival"][0]) < since_ns + offset[0]:
            return ""
        row = rows[0]
        name, site = shown_name(self.names[row["name"]]), self.sites[row["name"]]
        called = f"{OpKind(row['kind']).label} `{name}`" if name else OpKind(row["kind"]).label
        return f"{called}, {site}" if site else called

    def clear(self) -> int:
        """Forget the rows, and leave all that happened before now out of files. Return how many rows there were.

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

    def annotations_since(self, stamp: int) -> tuple[int, list[tuple[int, Annotation]]]:
        """Return annotations that are new or have changed, with their numbers, and the stamp to ask with next time."""
        with self._changed:
            return self._annotations.stamp, self._annotations.changed_since(stamp)

    def annotations(self) -> list[Annotation]:
        """Return all annotations, the oldest first."""
        with self._changed:
            return self._annotations.all()

    def series(self, number: int = 0) -> list[Series]:
        """Return the series from a number on; points name them by these numbers."""
        with self._changed:
            return self._series.series[number:]

    def points_since(self, number: int, most: int | None = None) -> tuple[int, Points]:
        """Return the number to ask with next time, and the points of all series from ``number`` on that are kept."""
        with self._changed:
            self._advance(force=most is None)
            points = self._series.since(number, most)
            if most is None or len(points) < most:
                return self._series.end, points
            return int(points["number"][-1]) + 1 if most else number, points

    def points(self, rank: int, name: str) -> Points:
        """Return a copy of the points of one series, by time; none if there is no such series."""
        with self._changed:
            if name.startswith(DERIVED):
                self._advance(force=True)
            return self._series.of(rank, name)

    def newest(self, name: str, most: int = 16) -> dict[int, Points]:
        """Return the last points under a name, by rank; those of ranks that have any."""
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
        """Return the number of the next point."""
        return self._series.end

    @property
    def points_lost(self) -> int:
        """Return the number of points that are not here: those dropped to make room, and those of series beyond the most that are kept."""
        return self._series.dropped + self._series.refused

    def clock_offset_ns(self) -> int | None:
        """Return the ns to add to this process's ``CLOCK_MONOTONIC`` for times on the axis; ``None`` if they can't be compared."""
        with self._changed:
            offset = self._alignment.offset(clock_domain())
        return None if offset is None else offset[0]

    def running(self, rank: int) -> str:
        """Return the cell that runs on a rank; empty if none does."""
        return self._annotations.running(rank)

    def planes(self, rank: int) -> dict[int, str]:
        """Return the data plane of each process set that a rank is in, by the set's number, as far as it has recorded it."""
        with self._changed:
            return self._planes.of(rank)

    @property
    def membership(self) -> Membership:
        return self._membership

    def clock_errors(self) -> dict[int, int]:
        """Return by how many ns a rank's clock may be off, of ranks whose clock had to be compared with the first host's."""
        with self._changed:
            found = {rank: self._alignment.offset(domain) for rank, domain in self._domains.items()}
        measured = {rank: offset[1] for rank, offset in found.items() if offset is not None and offset[1]}
        return self._given_errors | measured

    def take_clock_error(self, rank: int, error_ns: int) -> None:
        """Set by how many ns the times of a rank may be off, as a trace file gives it."""
        self._given_errors[rank] = error_ns

    def table(self) -> DataFrame:
        """Return all spans as a pandas table; the columns are in ``docs/reference/trace.md``.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        return span_table(self)

    def arrow(self) -> Any:
        """Return all spans as a ``pyarrow.Table`` with the same columns.

        Raises:
            ModuleNotFoundError: pyarrow is not installed.
        """
        return arrow_table(self)

    def metrics(self) -> DataFrame:
        """Return all points of all series as a pandas table; the columns are in ``docs/reference/metrics.md``.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
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


def span_columns(recording: Recording) -> dict[str, NDArray[Any]]:
    """Return the columns of the table of spans as arrays, for users without pandas. Times in seconds since the recording's origin."""
    _, rows = recording.rows_since(0)
    origin = recording.origin_ns or 0
    came = collective_arrivals(rows, recording.clock_errors())
    begin = (rows["arrival"] - origin).astype(np.float64)
    at = {name: (distance(rows, name)).astype(np.float64) for name in ("ready", "started", "finished")}
    at["ready"][rows["flags"] & NOT_READY != 0] = np.nan
    at["started"][rows["flags"] & NOT_STARTED != 0] = np.nan
    seconds: dict[str, NDArray[Any]] = {
        "arrival": begin,
        "ready": begin + at["ready"],
        "start": begin + at["started"],
        "end": begin + at["finished"],
        "waiting": np.where(np.isnan(at["ready"]), at["finished"], at["ready"]),
        "queued": at["started"] - at["ready"],
        "duration": at["finished"] - at["started"],
        **{f"{name}_sum": distance(rows, name) for name in ("pack", "transfer", "wait", "unpack")},
        "lateness": np.where(came.ranks > 1, rows["arrival"] - came.first_ns, np.nan),
        "held_up": np.where(came.ranks > 1, came.last_ns - came.first_ns, np.nan),
    }
    return {
        "rank": rows["rank"],
        "name": _texts(recording.names)[rows["name"]],
        "site": _texts(recording.sites)[rows["name"]],
        "kind": _texts([kind.label for kind in OpKind])[rows["kind"]],
        "dtype": _texts([dtype.label for dtype in DType])[rows["dtype"]],
        "set": rows["set"],
        "operation": rows["op"],
        "sequence": rows["sequence"],
        "batch": rows["batch"],
        "bytes": rows["nbytes"],
        **{name: values / 1e9 for name, values in seconds.items()},
        "ok": (rows["flags"] & FAILED) == 0,
        "ranks": came.ranks,
        "size": rows["size"],
        "last_rank": came.last_rank,
        "certain": came.certain,
    }


def span_table(recording: Recording) -> DataFrame:
    """Return the columns as a table; ``last_rank`` is missing where it is not known which rank came last."""
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a table of the trace needs pandas; `pip install pandas` adds it", name="pandas"
        ) from None
    frame = pd.DataFrame(span_columns(recording))
    for name in ("name", "site", "kind", "dtype"):
        frame[name] = frame[name].astype("category")
    frame["last_rank"] = frame["last_rank"].astype("Int64").mask(frame["last_rank"] < 0)
    frame.attrs.update(dropped=recording.dropped, silent=list(recording.silent))
    return frame


def arrow_table(recording: Recording) -> Any:
    """Return a ``pyarrow.Table``; missing values are null, and the schema's metadata has the number of dropped rows."""
    try:
        import pyarrow as pa  # type: ignore[import-not-found,import-untyped,unused-ignore]  # need not be installed
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "an Arrow table of the trace needs pyarrow; `pip install pyarrow` adds it", name="pyarrow"
        ) from None
    found = {}
    for name, values in span_columns(recording).items():
        if values.dtype == object:
            found[name] = pa.array(values, pa.string()).dictionary_encode()
        elif name == "last_rank":
            found[name] = pa.array(values, mask=values < 0)
        else:
            found[name] = pa.array(values, from_pandas=True)
    return pa.table(found, metadata={"dropped": str(recording.dropped)})


def metric_columns(recording: Recording) -> dict[str, NDArray[Any]]:
    """Return the columns of the table of points as arrays, by time. Times in seconds since the recording's origin."""
    _, points = recording.points_since(0)
    series = recording.series()
    points = points[np.argsort(points["time"], kind="stable")]
    of = points["series"]

    def texts(each: list[str]) -> NDArray[Any]:
        return np.array(each, object)[of] if each else np.empty(0, object)

    return {
        "rank": np.array([one.rank for one in series], np.int64)[of],
        "name": texts([one.name for one in series]),
        "time": (points["time"] - (recording.origin_ns or 0)) / 1e9,
        "value": points["value"],
        "step": points["step"],
        "unit": texts([one.unit for one in series]),
    }


def metric_table(recording: Recording) -> DataFrame:
    """Return the columns as a table; ``step`` is missing where none was given."""
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a table of metrics needs pandas; `pip install pandas` adds it", name="pandas"
        ) from None
    frame = pd.DataFrame(metric_columns(recording))
    for name in ("name", "unit"):
        frame[name] = frame[name].astype("category")
    frame["step"] = frame["step"].astype("Int64")
    frame.attrs.update(dropped=recording.points_lost, silent=list(recording.silent))
    return frame


def _texts(texts: list[str]) -> NDArray[Any]:
    return np.array(texts, object)
