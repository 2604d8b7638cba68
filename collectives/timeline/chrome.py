"""From recorded batches to events of the Chrome trace format, which Perfetto and chrome://tracing open.

This module only converts; :class:`~hvdlab.collectives.timeline.file.TimelineFile` owns the file. What each event
means is in ``docs/reference/trace.md``. Two rules shape it: nothing is drawn at a time that was not measured, except
on the one track that says so; and slices of one thread track never overlap.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.timeline.operations import Arrivals, Operation, Operations, Placed, arrivals
from hvdlab.collectives.timeline.tracks import NOTES, STORES, TraceEvent, Tracks, micros
from hvdlab.collectives.tracing.clocks import Alignment
from hvdlab.collectives.tracing.record_format import (
    BATCH_RECORDS,
    AbortEvent,
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

HOLD_SECONDS = 1.0
UNALIGNED_BATCHES = 256
NAMES_LISTED = 32
PULLS_KEPT = 64

# Names that Horovod's timeline has for the same things, where it has them.
PHASES = (
    ("pack", "MEMCPY_IN_FUSION_BUFFER"),
    ("wait", "WAIT_FOR_OTHER_RANKS"),
    ("transfer", "TRANSFER"),
    ("unpack", "MEMCPY_OUT_FUSION_BUFFER"),
)


class ChromeTrace:
    """Converts batches of all ranks. No I/O, no clock: ``now`` is any steadily growing number of seconds.

    Args:
        mark_cycles: Mark each order to execute with an instant event, as Horovod's ``mark_cycles`` does.
        hold: Seconds to wait for the other ranks' records of an operation before it is written without them.
    """

    def __init__(self, *, mark_cycles: bool = False, hold: float = HOLD_SECONDS) -> None:
        self._mark_cycles = mark_cycles
        self._alignment = Alignment()
        self._operations = Operations(hold)
        self._tracks = Tracks()
        self._unaligned: dict[int, list[RecordBatch]] = {}
        self._unaligned_lost: dict[int, int] = {}
        self._lost: dict[tuple[int, str], int] = {}
        self._cycles: dict[int, tuple[int, int]] = {}
        self._flows = 0
        #: When pulls ended that no push has followed yet, and their arrows; by rank, store, server and key.
        self._pulled: dict[tuple[int, int, int, str], deque[tuple[int, int]]] = {}

    # -- in -----------------------------------------------------------------------------------------------------------

    def feed(self, batch: RecordBatch, now: float) -> list[TraceEvent]:
        """Take a batch in; returns what can be written."""
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
        """Give out what was held for ``hold`` seconds; call it at :meth:`deadline`."""
        return self.operations(self._operations.expired(now))

    def deadline(self) -> float | None:
        """When :meth:`expire` is due, or ``None`` if nothing is held."""
        return self._operations.deadline()

    def close(self) -> list[TraceEvent]:
        """Give out everything that is held, and end what is open."""
        out = self.operations(self._operations.flush())
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
        """The events that name a rank's process, the first time that this is called for it."""
        return self._tracks.introduce(rank)

    def rank_note(self, rank: int, name: str, time_ns: int, args: dict[str, Any]) -> list[TraceEvent]:
        """Something that happened to a rank."""
        return self._tracks.introduce(rank) + self._tracks.instant(rank, NOTES, name, time_ns, args)

    def note(self, name: str, args: dict[str, Any]) -> list[TraceEvent]:
        """An instant event about the trace itself, at the latest time seen."""
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
        if len(batch.events) < BATCH_RECORDS:
            self._operations.pause(rank)
        return out

    def happening(self, rank: int, event: Event, offset: int = 0) -> list[TraceEvent]:
        """Trace events of a record that is not a span; ``offset`` ns are added to its time."""
        match event:
            case CellBeginEvent():
                return self._tracks.begin_cell(rank, event.cell, event.time_ns, offset)
            case CellEndEvent():
                return self._tracks.end_cell(rank, event.cell, event.time_ns, event.ok, offset)
            case Metric():
                return self._metric(rank, event, offset)
            case AbortEvent():
                args = {"process_set": event.process_set, "epoch": event.epoch, "why": event.text}
                return self._tracks.instant(rank, NOTES, "ABORT", event.time_ns + offset, args, scope="p")
            case Members():
                self._operations.members(event)
        return []

    def _report_lost(self, batch: RecordBatch) -> list[TraceEvent]:
        out: list[TraceEvent] = []
        for what, count in (("dropped", batch.dropped), ("refused", batch.refused)):
            key = (batch.rank, what)
            more = count - self._lost.get(key, 0)
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
        """A span that never became an operation, so that there is nothing to match it with."""
        if placed.span.kind.asks_server:
            return self._request(rank, placed)
        return self._negotiation(rank, placed, None)

    # -- one operation ------------------------------------------------------------------------------------------------

    def operations(self, operations: Iterable[Operation]) -> list[TraceEvent]:
        """Operations with all that is known of them."""
        out: list[TraceEvent] = []
        requests: list[tuple[int, int, Placed]] = []
        for operation in operations:
            for rank in operation.ranks:
                out += self._tracks.introduce(rank)
            for by_rank in operation.tensors():
                came = arrivals(by_rank, operation.size)
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
        """A push or a pull: a slice on its rank, and one on the server; arrows tie what follows from each other.

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
            while pulled and pulled[0][0] <= placed.span.submitted_ns:
                number = pulled.popleft()[1]
                own["flow_in"] = True
        own["bind_id"] = there["bind_id"] = f"0x{number:x}"

    def _negotiation(self, rank: int, placed: Placed, came: Arrivals | None) -> list[TraceEvent]:
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

    def _last(self, placed: Placed, came: Arrivals) -> list[TraceEvent]:
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
        """The measured sums side by side. Where in the operation each piece was is not known: the track says so."""
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
    """The name of a tensor in Horovod's timeline. A tensor without a name already has its name in that form."""
    prefix = f"{span.kind.label}."
    return span.name if span.name.startswith(f"{prefix}noname") else prefix + span.name


def _who_was_last(came: Arrivals) -> dict[str, Any]:
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
