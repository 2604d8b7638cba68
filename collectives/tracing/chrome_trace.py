"""Conversion of recorded batches to events of the Chrome trace format, which Perfetto and chrome://tracing open.

:class:`~hvdlab.collectives.tracing.timeline_file.TimelineFile` writes them to a file. The meaning of each event is in
``docs/reference/trace.md``. Two rules shape them: nothing is drawn at a time that was not measured, except on the one
track that is marked so; and slices of one thread track never overlap. Needs no numpy: a rank may write a timeline.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvdlab.collectives.tracing.record_format import (
    BATCH_RECORDS,
    AbortEvent,
    Alignment,
    CellBeginEvent,
    CellEndEvent,
    ClockSample,
    Event,
    Members,
    Metric,
    RecordBatch,
    Span,
    request_of,
)
from hvdlab.collectives.types import OpKind

TraceEvent = dict[str, Any]

# Thread tracks of a rank in the order they are shown. Each has room for lanes: slices that overlap need several.
LANES = 10
NOTES = "notes"
CLOCK_COMPARED = "CLOCK_COMPARED"
"""A note on a rank of another host: how well its clock is known."""
STORES = "stores"
"""Track of a rank's requests to parameter servers, and category of the servers' work for it."""
TRACKS = {
    "cells": "cells",
    "collectives": "collectives",
    STORES: "key-value stores",
    "phases": "phases: sums, order not measured",
    "cycles": "orders to execute",
    NOTES: "aborts and notes",
}
_FIRST_TID = {track: (number + 1) * LANES for number, track in enumerate(TRACKS)}
_MAIN_TID = _FIRST_TID["cells"]
# Processes that are not ranks. The marks of late ranks are apart from the ranks' own events, so that they can be
# looked through at one place (and so that every rank has as many events, by which Perfetto orders processes).
ARRIVALS_PID = 1_000_000
WRITER_PID = 2_000_000
"""Process id, in the trace, of events about the trace as a whole."""
SERVERS_PID = 3_000_000
"""Parameter servers, by their numbers from here on."""


HOLD_SECONDS = 1.0
"""Seconds for which an operation waits for the other ranks' records before it is written without them."""
UNALIGNED_BATCHES = 256
"""Batches that may wait until their host's clock has been compared."""
NAMES_LISTED = 32
"""Names of a fused operation's tensors that its slice lists at most."""
PULLS_KEPT = 64
"""Newest pulls of a value that a later push can be tied to."""

# Names that Horovod's timeline has for the same things, where it has them.
PHASES = (
    ("pack", "MEMCPY_IN_FUSION_BUFFER"),
    ("wait", "WAIT_FOR_OTHER_RANKS"),
    ("transfer", "TRANSFER"),
    ("unpack", "MEMCPY_OUT_FUSION_BUFFER"),
)

Key = tuple[int, int, int]
"""Names an operation: process set, sequence and batch."""


class OpenCell(NamedTuple):
    """Cell that has begun: when on the common axis, and the offset that was added to its time for that, in ns."""

    cell: str
    begin: int
    offset: int


def micros(nanoseconds: int) -> float:
    """Return microseconds, the unit of the format; exact to the nanosecond for 104 days."""
    return nanoseconds / 1000


class Tracks:
    """Maker of events. It remembers the introduced tracks, the occupied lanes and the open cells."""

    def __init__(self) -> None:
        #: Processes and threads of the trace that have a name already.
        self._known: set[tuple[int, int]] = set()
        #: When the last slice of each lane ends, by process and track.
        self._lane_ends: dict[tuple[int, str], list[int]] = {}
        #: The open cell of each lane, by rank; ``None`` on a lane that is free.
        self._cells: dict[int, list[OpenCell | None]] = {}
        #: Latest time that was seen on each rank.
        self._latest: dict[int, int] = {}
        #: Number of the last slice that may overlap others: viewers pair its begin and end by it.
        self._next_id = 0

    # -- ranks and their places ---------------------------------------------------------------------------------------

    def introduce(self, rank: int) -> list[TraceEvent]:
        """Return the events with name and place of a rank's process, once."""
        return self._introduce_process(rank, f"rank {rank}", rank)

    def _introduce_process(self, pid: int, name: str, order: int) -> list[TraceEvent]:
        if (pid, 0) in self._known:
            return []
        self._known.add((pid, 0))
        return [
            _meta("process_name", pid, 0, name=name),
            _meta("process_sort_index", pid, 0, sort_index=order),
        ]

    def _thread(self, rank: int, track: str, lane: int, out: list[TraceEvent]) -> int:
        tid = _tid(track, lane)
        if (rank, tid) not in self._known:
            self._known.add((rank, tid))
            name = TRACKS[track] + (f" {lane + 1}" if lane else "")
            out.append(_meta("thread_name", rank, tid, name=name))
            out.append(_meta("thread_sort_index", rank, tid, sort_index=tid))
        return tid

    def _seen(self, rank: int, time_ns: int) -> None:
        if time_ns > self._latest.get(rank, 0):
            self._latest[rank] = time_ns

    # -- slices -------------------------------------------------------------------------------------------------------

    def slice_lane(
        self, rank: int, track: str, name: str, begin: int, end: int, args: dict[str, Any]
    ) -> list[TraceEvent]:
        """Return a slice on the first lane of the track that is free at ``begin``."""
        return self.slice_same_lane(rank, track, None, name, begin, end, args)[1]

    def slice_same_lane(
        self, rank: int, track: str, lane: int | None, name: str, begin: int, end: int, args: dict[str, Any]
    ) -> tuple[int, list[TraceEvent]]:
        """Return a slice as :meth:`slice_lane` does, on a given lane that the caller knows to be free, or a new choice if ``None``."""
        ends = self._lane_ends.setdefault((rank, track), [])
        if lane is None:
            lane = next((number for number, busy in enumerate(ends) if busy <= begin), len(ends))
            if lane == len(ends):
                ends.append(end)
        ends[lane] = end
        out: list[TraceEvent] = []
        tid = self._thread(rank, track, lane, out)
        times = {"ts": micros(begin), "dur": micros(end - begin)}
        out.append({"ph": "X", "name": name, "cat": track, "pid": rank, "tid": tid, **times, "args": args})
        self._seen(rank, end)
        return lane, out

    def slice_async(
        self, rank: int, category: str, name: str, begin: int, end: int, args: dict[str, Any]
    ) -> list[TraceEvent]:
        """Return a slice that may overlap others of its category."""
        self._next_id += 1
        common = {
            "cat": category,
            "name": name,
            "id2": {"local": f"0x{self._next_id:x}"},
            "pid": rank,
            "tid": _MAIN_TID,
        }
        self._seen(rank, end)
        return [
            {"ph": "b", **common, "ts": micros(begin), "args": args},
            {"ph": "e", **common, "ts": micros(end), "args": {}},
        ]

    # -- cells --------------------------------------------------------------------------------------------------------

    def begin_cell(self, rank: int, cell: str, time_ns: int, offset: int) -> list[TraceEvent]:
        """Open a slice, written at once, so that it is there even if this file ends before the cell does."""
        lanes = self._cells.setdefault(rank, [])
        ends = self._lane_ends.setdefault((rank, "cells"), [])
        begin = time_ns + offset
        free = (n for n, open_cell in enumerate(lanes) if open_cell is None and ends[n] <= begin)
        lane = next(free, len(lanes))
        if lane == len(lanes):
            lanes.append(None)
            ends.append(begin)
        lanes[lane] = OpenCell(cell, begin, offset)
        out: list[TraceEvent] = []
        tid = self._thread(rank, "cells", lane, out)
        where = {"pid": rank, "tid": tid, "ts": micros(time_ns + offset)}
        out.append({"ph": "B", "name": f"CELL {cell}", "cat": "cells", **where, "args": {"cell": cell}})
        self._seen(rank, time_ns + offset)
        return out

    def end_cell(self, rank: int, cell: str, time_ns: int, ok: bool, offset: int) -> list[TraceEvent]:
        """Close the cell's slice; if its begin is not in this file, mark when it ended."""
        for lane, open_cell in enumerate(self._cells.get(rank, ())):
            # The offset of its begin, so that a better estimate in between can't turn it around.
            if (
                open_cell is not None
                and open_cell.cell == cell
                and open_cell.begin <= time_ns + open_cell.offset
            ):
                self._cells[rank][lane] = None
                return self._end(rank, lane, cell, time_ns + open_cell.offset, "ok" if ok else "failed")
        return self.instant(rank, "cells", f"CELL {cell} END", time_ns + offset, {"cell": cell, "ok": ok})

    def end_cells(self) -> list[TraceEvent]:
        """Close cells that still run at the latest time seen on their rank, and mark them so."""
        out: list[TraceEvent] = []
        for rank, lanes in self._cells.items():
            for lane, open_cell in enumerate(lanes):
                if open_cell is not None:
                    out += self._end(
                        rank, lane, open_cell.cell, self._latest[rank], "running when the trace ended"
                    )
        self._cells.clear()
        return out

    def _end(self, rank: int, lane: int, cell: str, time_ns: int, status: str) -> list[TraceEvent]:
        where = {"pid": rank, "tid": _tid("cells", lane), "ts": micros(time_ns)}
        self._lane_ends[rank, "cells"][lane] = time_ns
        self._seen(rank, time_ns)
        return [{"ph": "E", "name": f"CELL {cell}", "cat": "cells", **where, "args": {"status": status}}]

    # -- parameter servers --------------------------------------------------------------------------------------------

    def slice_on_server(
        self, server: int, rank: int, name: str, begin: int, end: int, args: dict[str, Any]
    ) -> list[TraceEvent]:
        """Return trace events of one request that a parameter server handled for a rank."""
        pid = SERVERS_PID + server
        out = self._introduce_process(pid, f"parameter server {server}", pid)
        ends = self._lane_ends.setdefault((pid, f"rank {rank}"), [])
        lane = next((number for number, busy in enumerate(ends) if busy <= begin), len(ends))
        ends[lane:] = [end, *ends[lane + 1 :]]
        tid = (rank + 1) * LANES + (lane if lane < LANES else lane * 1_000_000)
        if (pid, tid) not in self._known:
            self._known.add((pid, tid))
            title = f"for rank {rank}" + (f" {lane + 1}" if lane else "")
            out.append(_meta("thread_name", pid, tid, name=title))
            out.append(_meta("thread_sort_index", pid, tid, sort_index=tid))
        times = {"ts": micros(begin), "dur": micros(end - begin)}
        out.append({"ph": "X", "name": name, "cat": STORES, "pid": pid, "tid": tid, **times, "args": args})
        return out

    # -- moments ------------------------------------------------------------------------------------------------------

    def instant(
        self, rank: int, track: str, name: str, time_ns: int | None, args: dict[str, Any], *, scope: str = "t"
    ) -> list[TraceEvent]:
        """Return an instant event; ``None`` means the latest time seen on this rank."""
        out = self.introduce(rank)
        tid = self._thread(rank, track, 0, out)
        at = self._latest.get(rank, 0) if time_ns is None else time_ns
        where = {"pid": rank, "tid": tid, "ts": micros(at)}
        out.append({"ph": "i", "s": scope, "name": name, "cat": track, **where, "args": args})
        self._seen(rank, at)
        return out

    def last_arrival(self, rank: int, time_ns: int, args: dict[str, Any]) -> list[TraceEvent]:
        """Return the event at which the rank that the others waited for came, on the track of that rank."""
        out = self._introduce_process(ARRIVALS_PID, "last arrivals", ARRIVALS_PID)
        tid = rank + 1
        if (ARRIVALS_PID, tid) not in self._known:
            self._known.add((ARRIVALS_PID, tid))
            out.append(_meta("thread_name", ARRIVALS_PID, tid, name=f"rank {rank} was last"))
            out.append(_meta("thread_sort_index", ARRIVALS_PID, tid, sort_index=tid))
        where = {"pid": ARRIVALS_PID, "tid": tid, "ts": micros(time_ns)}
        out.append({"ph": "i", "s": "t", "name": "LAST_ARRIVAL", "cat": "arrivals", **where, "args": args})
        return out

    def counter(self, rank: int, name: str, time_ns: int, value: float) -> list[TraceEvent]:
        """Return a counter event: a value from this moment on."""
        self._seen(rank, time_ns)
        where = {"pid": rank, "tid": _MAIN_TID, "ts": micros(time_ns)}
        return [{"ph": "C", "name": name, "cat": "metrics", **where, "args": {"value": value}}]

    def writer_note(self, name: str, args: dict[str, Any]) -> list[TraceEvent]:
        """Return an instant event of the trace as a whole."""
        out = self._introduce_process(WRITER_PID, "trace writer", WRITER_PID)
        where = {"pid": WRITER_PID, "tid": 0, "ts": micros(max(self._latest.values(), default=0))}
        out.append({"ph": "i", "s": "p", "name": name, "cat": NOTES, **where, "args": args})
        return out


def _tid(track: str, lane: int) -> int:
    """Return the track's thread id. Lanes of a track are neighbours, unless there are uncommonly many."""
    return _FIRST_TID[track] + (lane if lane < LANES else lane * 1000)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0.0, "args": args}


@dataclass(frozen=True, slots=True)
class Placed:
    """Span with the offset from its times to the common axis, and the offset's error, in ns."""

    span: Span
    offset_ns: int
    uncertainty_ns: int

    @property
    def arrival_ns(self) -> int:
        return self.span.submitted_ns + self.offset_ns


@dataclass(slots=True)
class MatchedOperation:
    """Spans of one operation by rank, in the order in which each rank recorded them."""

    held_since: float
    size: int | None
    ranks: dict[int, list[Placed]] = field(default_factory=dict)

    def tensors(self) -> list[dict[int, Placed]]:
        """Return each tensor's span by rank. Equal names (anonymous tensors) are matched in order."""
        found: dict[tuple[str, int], dict[int, Placed]] = {}
        for rank, spans in self.ranks.items():
            seen: dict[str, int] = {}
            for placed in spans:
                name = placed.span.name
                seen[name] = seen.get(name, -1) + 1
                found.setdefault((name, seen[name]), {})[rank] = placed
        return list(found.values())


@dataclass(frozen=True, slots=True)
class TensorArrivals:
    """When each rank came to one tensor's collective.

    Attributes:
        last: The rank that came last.
        offsets_ns: By rank, how much later than the first one it came.
        certain: Whether the last rank came later than the second last by more than the error of the clocks.
        ranks_missing: Whether records of some members are not here, so that one of them may have come later.
    """

    last: int
    offsets_ns: dict[int, int]
    certain: bool
    ranks_missing: bool

    @property
    def spread_ns(self) -> int:
        return self.offsets_ns[self.last]


def tensor_arrivals(by_rank: dict[int, Placed], size: int | None) -> TensorArrivals | None:
    """Compare the arrivals of one tensor; ``None`` if there are not two ranks to compare."""
    if len(by_rank) < 2:
        return None
    order = sorted(by_rank, key=lambda rank: (by_rank[rank].arrival_ns, rank))
    first = by_rank[order[0]].arrival_ns
    last, second = by_rank[order[-1]], by_rank[order[-2]]
    error = last.uncertainty_ns + second.uncertainty_ns
    return TensorArrivals(
        order[-1],
        {rank: by_rank[rank].arrival_ns - first for rank in sorted(by_rank)},
        last.arrival_ns - second.arrival_ns > error,
        size is None or len(by_rank) < size,
    )


class OperationMatcher:
    """Matcher of the records that ranks made of one operation. It keeps an operation until the records of all its ranks are there.

    ``now`` is any steadily growing number of seconds.
    """

    def __init__(self, hold: float) -> None:
        self._hold = hold
        #: Operations whose records are not complete, the oldest first.
        self._open: OrderedDict[Key, MatchedOperation] = OrderedDict()
        #: Operation that each rank recorded last, of which more spans may follow.
        self._current: dict[int, Key] = {}
        #: Operations that a rank has gone on from since the last completed().
        self._left: set[Key] = set()
        #: Generation and number of members, by process set.
        self._sizes: dict[int, tuple[int, int]] = {}

    def members(self, event: Members) -> None:
        """Record the size of a process set; news of an older generation is ignored."""
        if event.size and event.generation >= self._sizes.get(event.process_set, (0, 0))[0]:
            self._sizes[event.process_set] = (event.generation, event.size)

    def introduce(self, event: Members) -> None:
        """Record the size of a process set that is not known yet: its record may come behind the spans that it is for."""
        if event.size:
            self._sizes.setdefault(event.process_set, (event.generation, event.size))

    def add(self, rank: int, placed: Placed, now: float) -> MatchedOperation | None:
        """Add a span. Return an older operation that must be given out because this one has its name."""
        span = placed.span
        key = (span.process_set, span.sequence, span.batch)
        if span.kind.asks_server:  # such a span is of one key; collectives with equal numbers are fused
            key = (span.process_set, span.sequence, span.batch << 32 | zlib.crc32(span.name.encode()))
        operation = self._open.get(key)
        stale = None
        if operation is not None and _recorded_another(operation.ranks.get(rank), span):
            stale = self._open.pop(key)
            operation = None
        if operation is None:
            size = self._sizes.get(span.process_set)
            if span.kind is OpKind.SENDRECV:
                size = (0, 2)
            operation = self._open[key] = MatchedOperation(now, size[1] if size else None)
        operation.ranks.setdefault(rank, []).append(placed)
        previous = self._current.get(rank)
        if previous is not None and previous != key:
            self._left.add(previous)
        self._current[rank] = key
        return stale

    def pause(self, rank: int) -> None:
        """Close a rank's last operation: the rank has recorded nothing more for now, so it is whole."""
        previous = self._current.pop(rank, None)
        if previous is not None:
            self._left.add(previous)

    def completed(self) -> list[MatchedOperation]:
        """Remove the operations that are complete, and return them."""
        done = [key for key in self._left if self._is_complete(key)]
        self._left.clear()
        return [self._open.pop(key) for key in sorted(done)]

    def _is_complete(self, key: Key) -> bool:
        operation = self._open.get(key)
        if operation is None or operation.size is None or len(operation.ranks) < operation.size:
            return False
        # A rank that has recorded nothing behind it can still have further tensors of the same operation.
        return all(self._current.get(rank) != key for rank in operation.ranks)

    def expired(self, now: float) -> list[MatchedOperation]:
        """Remove the operations that were held for too long, and return them."""
        done = []
        while self._open and now >= next(iter(self._open.values())).held_since + self._hold:
            done.append(self._open.popitem(last=False)[1])
        return done

    def deadline(self) -> float | None:
        """Return when :meth:`expired` has operations to return next."""
        return next(iter(self._open.values())).held_since + self._hold if self._open else None

    def flush(self) -> list[MatchedOperation]:
        """Remove all operations, and return them."""
        done = list(self._open.values())
        self._open.clear()
        return done


def _recorded_another(own: list[Placed] | None, span: Span) -> bool:
    if not own:
        return False
    first = own[0].span
    return (first.started_ns, first.finished_ns) != (span.started_ns, span.finished_ns)


class ChromeTrace:
    """Converter of all ranks' batches. No I/O, no clock: ``now`` is any steadily growing number of seconds.

    Args:
        mark_cycles: Mark each order to execute with an instant event, as Horovod's ``mark_cycles`` does.
        hold: Seconds to wait for the other ranks' records of an operation before it is written without them.
    """

    def __init__(self, *, mark_cycles: bool = False, hold: float = HOLD_SECONDS) -> None:
        self._mark_cycles = mark_cycles
        self._alignment = Alignment()
        self._operations = OperationMatcher(hold)
        self._tracks = Tracks()
        #: Batches of hosts whose clock has not been compared yet, by clock.
        self._unaligned: dict[int, list[RecordBatch]] = {}
        #: Records for which there was no room among these, by rank.
        self._unaligned_lost: dict[int, int] = {}
        #: Records that were dropped and refused, by rank, as its last batch counts them.
        self._lost: dict[tuple[int, str], int] = {}
        self._cycles: dict[int, tuple[int, int]] = {}
        #: Number of the last arrow.
        self._flows = 0
        #: When pulls ended that no push has followed yet, and their arrows; by rank, store, server and key.
        self._pulled: dict[tuple[int, int, int, str], deque[tuple[int, int]]] = {}

    # -- in -----------------------------------------------------------------------------------------------------------

    def feed(self, batch: RecordBatch, now: float) -> list[TraceEvent]:
        """Add a batch. Return the events that can be written."""
        self._alignment.observe(batch.clock)
        for event in batch.events:
            if isinstance(event, ClockSample):
                self._alignment.observe(batch.clock, event)
            elif isinstance(event, Members):
                self._operations.introduce(event)
        if self._alignment.offset(batch.clock) is None:
            self._hold_unaligned(batch)
            return []
        out: list[TraceEvent] = []
        for domain in [d for d in self._unaligned if self._alignment.offset(d) is not None]:
            for held in self._unaligned.pop(domain):
                out += self._convert(held, now)
        return out + self._convert(batch, now) + self.operations(self._operations.completed())

    def _hold_unaligned(self, batch: RecordBatch) -> None:
        held = self._unaligned.setdefault(batch.clock, [])
        if len(held) < UNALIGNED_BATCHES:
            held.append(batch)
        else:
            self._unaligned_lost[batch.rank] = self._unaligned_lost.get(batch.rank, 0) + len(batch.events)

    def expire(self, now: float) -> list[TraceEvent]:
        """Return the events of operations that were held for ``hold`` seconds; call it at :meth:`deadline`."""
        return self.operations(self._operations.expired(now))

    def deadline(self) -> float | None:
        """Return when :meth:`expire` is due, or ``None`` if nothing is held."""
        return self._operations.deadline()

    def close(self) -> list[TraceEvent]:
        """Return the events of all operations that are held, and end the open slices."""
        out = self.operations(self._operations.flush())
        # Only after the operations that were held: these batches have times of clocks that were never compared, and must not be
        # matched with those.
        for batches in self._unaligned.values():
            for batch in batches:
                out += self._convert(batch, 0.0, aligned=False)
        self._unaligned.clear()
        out += self.operations(self._operations.flush())
        for rank, count in self._unaligned_lost.items():
            text = f"{count} records not written: the clock of this host was never compared with the others'"
            out += self._tracks.instant(rank, NOTES, "RECORDS_LOST", None, {"records": count, "why": text})
        return out + self._tracks.end_cells()

    def introduce(self, rank: int) -> list[TraceEvent]:
        """Return the events that name a rank's process, at the first call for it."""
        return self._tracks.introduce(rank)

    def rank_note(self, rank: int, name: str, time_ns: int, args: dict[str, Any]) -> list[TraceEvent]:
        """Return an instant event on the track of a rank."""
        return self._tracks.introduce(rank) + self._tracks.instant(rank, NOTES, name, time_ns, args)

    def note(self, name: str, args: dict[str, Any]) -> list[TraceEvent]:
        """Return an instant event about the trace itself, at the latest time seen."""
        return self._tracks.writer_note(name, args)

    # -- one batch ----------------------------------------------------------------------------------------------------

    def _convert(self, batch: RecordBatch, now: float, *, aligned: bool = True) -> list[TraceEvent]:
        rank = batch.rank
        offset, error = (self._alignment.offset(batch.clock) if aligned else None) or (0, 0)
        out = self._tracks.introduce(rank)
        out += [] if aligned else self._tracks.instant(rank, NOTES, "CLOCK_NOT_ALIGNED", None, {})
        out += self._report_lost(batch)
        for event in batch.events:
            if isinstance(event, Span):
                out += self._span(rank, Placed(event, offset, error), now)
            else:
                out += self.happening(rank, event, offset)
        # A full batch can be cut between the spans of a fused operation: the others come with the next one.
        if len(batch.events) < BATCH_RECORDS:
            self._operations.pause(rank)
        return out

    def happening(self, rank: int, event: Event, offset: int = 0) -> list[TraceEvent]:
        """Return trace events of a record that is not a span; ``offset`` ns are added to its time."""
        match event:
            case CellBeginEvent():
                return self._tracks.begin_cell(rank, event.cell, event.time_ns, offset)
            case CellEndEvent():
                return self._tracks.end_cell(rank, event.cell, event.time_ns, event.ok, offset)
            case Metric():
                return self._metric(rank, event, offset)
            case AbortEvent():
                args = {"process_set": event.process_set, "generation": event.generation, "why": event.text}
                return self._tracks.instant(rank, NOTES, "ABORT", event.time_ns + offset, args, scope="p")
            case Members():
                self._operations.members(event)
        return []

    def _report_lost(self, batch: RecordBatch) -> list[TraceEvent]:
        out: list[TraceEvent] = []
        for what, count in (("dropped", batch.dropped), ("refused", batch.refused)):
            key = (batch.rank, what)
            more = count - self._lost.get(key, 0)
            # Counts are sums since the recorder began. They begin at 0 again with another process of the rank, so `more` can be
            # negative.
            self._lost[key] = count
            if more > 0:
                name = "RECORDS_LOST" if what == "dropped" else "RECORDS_REFUSED"
                out += self._tracks.instant(batch.rank, NOTES, name, None, {"records": more, "in_all": count})
        return out

    def _metric(self, rank: int, event: Metric, offset: int) -> list[TraceEvent]:
        if math.isfinite(event.value):
            return self._tracks.counter(rank, event.name, event.time_ns + offset, event.value)
        # JSON has no word for these, and a counter would silently skip them.
        args = {"metric": event.name, "value": str(event.value), "step": event.step}
        return self._tracks.instant(rank, NOTES, "METRIC_NOT_FINITE", event.time_ns + offset, args)

    def _span(self, rank: int, placed: Placed, now: float) -> list[TraceEvent]:
        span = placed.span
        if span.ready_ns is None:
            return self.failed(rank, placed)
        stale = self._operations.add(rank, placed, now)
        return [] if stale is None else self.operations([stale])

    def failed(self, rank: int, placed: Placed) -> list[TraceEvent]:
        """Return the events of a span that never became an operation, so that nothing matches it."""
        if placed.span.kind.asks_server:
            return self._request(rank, placed)
        return self._negotiation(rank, placed, None)

    # -- one operation ------------------------------------------------------------------------------------------------

    def operations(self, operations: Iterable[MatchedOperation]) -> list[TraceEvent]:
        """Return the events of operations, with all that is known of them."""
        out: list[TraceEvent] = []
        requests: list[tuple[int, int, Placed]] = []
        for operation in operations:
            for rank in operation.ranks:
                out += self._tracks.introduce(rank)
            for by_rank in operation.tensors():
                came = tensor_arrivals(by_rank, operation.size)
                for rank, placed in by_rank.items():
                    if placed.span.kind.asks_server:
                        requests.append((placed.arrival_ns, rank, placed))
                    else:
                        out += self._negotiation(rank, placed, came)
                if came is not None and came.spread_ns and not (operation.size and came.ranks_missing):
                    out += self._last(by_rank[came.last], came)
            for rank, spans in operation.ranks.items():
                if not spans[0].span.kind.asks_server:
                    out += self._operation(rank, spans)
        for _, rank, placed in sorted(requests, key=lambda one: one[:2]):
            out += self._request(rank, placed)
        return out

    def _request(self, rank: int, placed: Placed) -> list[TraceEvent]:
        """Return the events of a push or a pull: a slice on its rank, and one on the server; arrows tie the slices that follow from each other.

        A value goes from the server to the rank that pulls it, on to the push that was computed from it, and to the server again: one
        chain of arrows.
        """
        span, offset = placed.span, placed.offset_ns
        asked = request_of(span)
        args: dict[str, Any] = {"tensor": span.name, "bytes": span.nbytes, "dtype": span.dtype.label}
        args |= {"store": asked.store, "server": asked.server, "process_set": span.process_set}
        if span.site:
            args["site"] = span.site
        args["status"] = "ok" if span.ok else "failed"
        if span.started_ns is None:
            times = (placed.arrival_ns, span.finished_ns + offset)
            return self._tracks.slice_lane(rank, STORES, span.kind.name, *times, args)
        args |= {"version": asked.version, "sequence": span.sequence, "batch": span.batch}
        args |= {"waited_us": micros(span.started_ns - span.submitted_ns)}
        args |= {"transfer_us": micros(span.transfer_ns)}
        if span.kind is OpKind.PUSH:
            args["staleness"] = asked.staleness
        own = self._tracks.slice_lane(
            rank, STORES, span.kind.name, placed.arrival_ns, span.finished_ns + offset, args
        )
        began = span.started_ns + offset
        also = {"tensor": span.name, "store": asked.store, "rank": rank, "version": asked.version}
        there = self._tracks.slice_on_server(
            asked.server, rank, span.kind.name, began, began + span.transfer_ns, also
        )
        self._tie(own[-1], there[-1], placed, (rank, asked.store, asked.server, span.name))
        return own + there

    def _tie(
        self, own: TraceEvent, there: TraceEvent, placed: Placed, value: tuple[int, int, int, str]
    ) -> None:
        pulled = self._pulled.setdefault(value, deque(maxlen=PULLS_KEPT))
        self._flows += 1
        number = self._flows
        if placed.span.kind is OpKind.PULL:
            pulled.append((placed.span.finished_ns, number))
            there["flow_out"] = own["flow_in"] = own["flow_out"] = True
        else:
            own["flow_out"] = there["flow_in"] = True
            # A gradient was not computed from a value that came only after it was pushed.
            while pulled and pulled[0][0] <= placed.span.submitted_ns:
                number = pulled.popleft()[1]
                own["flow_in"] = True
        own["bind_id"] = there["bind_id"] = f"0x{number:x}"

    def _negotiation(self, rank: int, placed: Placed, came: TensorArrivals | None) -> list[TraceEvent]:
        span = placed.span
        end = span.finished_ns if span.ready_ns is None else span.ready_ns
        args: dict[str, Any] = {"tensor": span.name, "bytes": span.nbytes, "dtype": span.dtype.label}
        args |= {"process_set": span.process_set, "horovod": _horovod_name(span)}
        if span.site:
            args["site"] = span.site
        if span.ready_ns is None:
            args["status"] = "failed"
        if came is not None:
            args["arrival_offset_us"] = micros(came.offsets_ns[rank])
            args |= _who_was_last(came)
        name = f"NEGOTIATE_{span.kind.name}"
        return self._tracks.slice_async(
            rank, "negotiate", name, placed.arrival_ns, end + placed.offset_ns, args
        )

    def _last(self, placed: Placed, came: TensorArrivals) -> list[TraceEvent]:
        args = {
            "tensor": placed.span.name,
            "spread_us": micros(came.spread_ns),
            "arrival_offset_us": {f"rank {rank}": micros(ns) for rank, ns in came.offsets_ns.items()},
            **_who_was_last(came),
        }
        return self._tracks.last_arrival(came.last, placed.arrival_ns, args)

    def _operation(self, rank: int, spans: list[Placed]) -> list[TraceEvent]:
        span, offset = spans[0].span, spans[0].offset_ns
        assert span.ready_ns is not None
        args = _describe([placed.span for placed in spans])
        out = self._cycle(rank, span, offset)
        queue_end = span.finished_ns if span.started_ns is None else span.started_ns
        times = (span.ready_ns + offset, queue_end + offset)
        out += self._tracks.slice_async(
            rank, "queue", "QUEUE", *times, args if span.started_ns is None else {}
        )
        if span.started_ns is None:
            return out
        args |= {f"{phase}_us": micros(getattr(span, f"{phase}_ns")) for phase, _ in PHASES}
        seconds = (span.finished_ns - span.started_ns) / 1e9
        if span.ok and seconds > 0:
            args["bytes_per_second"] = round(args["bytes"] / seconds)
        times = (span.started_ns + offset, span.finished_ns + offset)
        out += self._tracks.slice_lane(rank, "collectives", span.kind.name, *times, args)
        return out + self._phases(rank, span, offset)

    def _phases(self, rank: int, span: Span, offset: int) -> list[TraceEvent]:
        """Return slices of the measured sums, side by side. Where in the operation each piece was is not known: the track's name shows it."""
        assert span.started_ns is not None
        lengths = [(name, getattr(span, f"{phase}_ns")) for phase, name in PHASES]
        if sum(length for _, length in lengths) > span.finished_ns - span.started_ns:
            # Phases that ran at the same time (several threads) can't be laid side by side; they stay in the args.
            return []
        out: list[TraceEvent] = []
        at = span.started_ns + offset
        lane = None
        for name, length in lengths:
            if not length:
                continue
            args = {"sum_us": micros(length), "position": "not measured"}
            lane, events = self._tracks.slice_same_lane(
                rank, "phases", lane, f"{name} (sum)", at, at + length, args
            )
            out += events
            at += length
        return out

    def _cycle(self, rank: int, span: Span, offset: int) -> list[TraceEvent]:
        assert span.ready_ns is not None
        cycle = (span.process_set, span.ready_ns)
        if not self._mark_cycles or self._cycles.get(rank) == cycle:
            return []
        self._cycles[rank] = cycle
        args = {"process_set": span.process_set, "sequence": span.sequence}
        return self._tracks.instant(rank, "cycles", "CYCLE_START", span.ready_ns + offset, args)


def _horovod_name(span: Span) -> str:
    """Return the name of a tensor in Horovod's timeline. A tensor without a name already has its name in that form."""
    prefix = f"{span.kind.label}."
    return span.name if span.name.startswith(f"{prefix}noname") else prefix + span.name


def _who_was_last(came: TensorArrivals) -> dict[str, Any]:
    if came.ranks_missing:
        return {"last_rank_of_those_recorded": came.last}
    return (
        {"last_rank": came.last}
        if came.certain
        else {"last_rank": came.last, "last_rank_within_clock_error": True}
    )


def _describe(spans: list[Span]) -> dict[str, Any]:
    first = spans[0]
    args: dict[str, Any] = {"tensor": first.name} if len(spans) == 1 else {"tensors": len(spans)}
    if len(spans) > 1:
        args["names"] = [span.name for span in spans[:NAMES_LISTED]]
        if len(spans) > NAMES_LISTED:
            args["names_not_listed"] = len(spans) - NAMES_LISTED
    args |= {"bytes": sum(span.nbytes for span in spans), "dtype": first.dtype.label}
    if first.site and all(span.site == first.site for span in spans):
        args["site"] = first.site
    args |= {"process_set": first.process_set, "sequence": first.sequence, "batch": first.batch}
    args["status"] = "ok" if all(span.ok for span in spans) else "failed"
    return args
