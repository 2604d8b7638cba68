"""A recording as the events of a trace, with the same meaning as those that a timeline file is written of."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.dtypes import DType, OpKind
from hvdlab.collectives.recording.derived import ALGORITHM, BUS, LATE, SHARES
from hvdlab.collectives.recording.recording import Mark, Recording
from hvdlab.collectives.recording.rows import DISTANCES, FAILED, NOT_READY, NOT_STARTED, Rows, distance
from hvdlab.collectives.timeline.chrome import ChromeTrace
from hvdlab.collectives.timeline.operations import Operation, Placed
from hvdlab.collectives.timeline.tracks import CLOCK_COMPARED, TraceEvent
from hvdlab.collectives.tracing.record_format import (
    FIRST_GROUP,
    AbortEvent,
    CellBeginEvent,
    CellEndEvent,
    Metric,
    Span,
)

OPERATIONS_AT_ONCE = 64
DERIVED = (LATE, *SHARES, ALGORITHM, BUS)

_KINDS = tuple(OpKind)
_DTYPES = tuple(DType)


def trace_events(recording: Recording) -> Iterator[list[TraceEvent]]:
    """Everything that a recording has now, in portions. What comes later is not in it.

    Unlike a file that is written while the job runs, this knows all rows before it begins: an operation has the rows of
    all ranks, whenever they came.
    """
    trace = ChromeTrace()
    _, rows = recording.rows_since(0)
    errors, since = recording.clock_errors(), recording.cleared_ns
    marks = [one for one in recording.marks() if since is None or one.end_ns is None or one.end_ns > since]
    yield _happenings(recording, trace, marks) + _clocks(recording, trace, rows, errors)
    for operations in _operations(recording, rows, errors):
        yield trace.operations(operations)
    yield _failures(recording, trace, rows, errors)
    end = trace.close()
    if recording.dropped:
        end += trace.note("RECORDS_LOST", {"records": recording.dropped})
    yield end


_NOTES = {
    "paused": ("PAUSED", "RESUMED"),
    "waiting": ("RANK_WAITS", "RANK_ADMITTED"),
    "joined": ("RANK_JOINED", ""),
    "left": ("RANK_LEFT", ""),
    "formed": ("GENERATION", ""),
}
"""What the beginning and the end of each kind of mark are called."""


def _happenings(recording: Recording, trace: ChromeTrace, marks: list[Mark]) -> list[TraceEvent]:
    out: list[TraceEvent] = []
    for mark in marks:
        if mark.kind == "cell":
            out += trace.introduce(mark.rank)
            out += trace.happening(mark.rank, CellBeginEvent(mark.text, mark.begin_ns))
            if mark.end_ns is not None:
                out += trace.happening(mark.rank, CellEndEvent(mark.text, mark.end_ns, mark.ok))
        elif mark.kind == "abort":
            out += trace.introduce(mark.rank)
            out += trace.happening(mark.rank, AbortEvent(0, 0, mark.begin_ns, mark.text))
        else:
            begin, end = _NOTES[mark.kind]
            out += trace.rank_note(mark.rank, begin, mark.begin_ns, {"why": mark.text})
            if end and mark.end_ns is not None:
                out += trace.rank_note(mark.rank, end, mark.end_ns, {})
    for series in recording.series():
        if series.name.startswith(DERIVED):
            continue  # that is in the spans, and nothing was measured at their times
        out += trace.introduce(series.rank)
        for point in recording.points(series.rank, series.name).tolist():
            time_ns, value, step, *_ = point
            if recording.cleared_ns is not None and time_ns <= recording.cleared_ns:
                continue
            metric = Metric(series.name, value, None if math.isnan(step) else int(step), time_ns)
            out += trace.happening(series.rank, metric)
    return out


def _clocks(recording: Recording, trace: ChromeTrace, rows: Rows, errors: dict[int, int]) -> list[TraceEvent]:
    """Of each rank whose clock had to be compared, by how much its times may be off."""
    hosts = {member.rank: member.host for member in recording.membership.members}
    out: list[TraceEvent] = []
    for rank, error_ns in sorted(errors.items()):
        own = rows["arrival"][rows["rank"] == rank]
        first = int(own.min()) if len(own) else recording.origin_ns or 0
        host = {"host": hosts[rank].split("#")[0]} if rank in hosts else {}
        out += trace.rank_note(rank, CLOCK_COMPARED, first, {"error_us": error_ns / 1000, **host})
    return out


def _operations(recording: Recording, rows: Rows, errors: dict[int, int]) -> Iterator[list[Operation]]:
    """Operations with the spans of all ranks, in the order in which they were ordered first."""
    matched = np.flatnonzero(rows["flags"] & NOT_READY == 0)
    if not len(matched):
        return
    order, begins = _grouped(rows, matched, 2 * max(errors.values(), default=0))
    ends = [*begins[1:].tolist(), len(order)]
    for first in range(0, len(begins), OPERATIONS_AT_ONCE):
        last = min(first + OPERATIONS_AT_ONCE, len(begins))
        low, high = int(begins[first]), ends[last - 1]
        own = rows[order[low:high]]
        placed = _placed(recording, own, errors)
        portion: list[Operation] = []
        for number in range(first, last):
            begin, end = int(begins[number]) - low, ends[number] - low
            operation = Operation(0.0, int(own["size"][begin]) or None)
            for rank, span in placed[begin:end]:
                operation.ranks.setdefault(rank, []).append(span)
            portion.append(operation)
        yield portion


def _grouped(
    rows: Rows, matched: NDArray[np.intp], error_ns: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices of the rows, operation after operation and in each as they came; and where each operation begins."""
    columns = [rows[name][matched] for name in ("batch", "sequence", "epoch", "set")]
    # Requests to parameter servers are for one key each, while collectives of one number are fused.
    columns.insert(0, np.where(rows["set"][matched] >= FIRST_GROUP, rows["op"][matched], 0))
    by_key = np.lexsort(columns)
    order = matched[by_key]
    new = np.zeros(len(order), np.bool_)
    for column in columns:
        ordered = column[by_key]
        new[1:] |= ordered[1:] != ordered[:-1]
    group = np.cumsum(new, dtype=np.int64)
    arrival = rows["arrival"][order]
    group = _by_causality(group, arrival, arrival + distance(rows[order], "finished") + error_ns)
    ready = _least(group, arrival + distance(rows[order], "ready"))
    final = np.lexsort((order, group, ready[group]))
    groups = group[final]
    return order[final], np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))


def _by_causality(
    group: NDArray[np.int64], arrival: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Divide groups of which a rank asked for something when another was done with it: the number was used again."""
    while True:
        late = arrival > _least(group, end)[group]
        if not late.any():
            return group
        group = np.unique(group * 2 + late, return_inverse=True)[1]


def _least(group: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(found, group, values)
    return found


def _placed(recording: Recording, rows: Rows, errors: dict[int, int]) -> list[tuple[int, Placed]]:
    names, sites = recording.names, recording.sites
    found = []
    columns = [distance(rows, name).tolist() for name in DISTANCES]
    plain = [rows[name].tolist() for name in ("set", "sequence", "batch", "nbytes", "arrival")]
    kinds = zip(*(rows[name].tolist() for name in ("name", "kind", "dtype", "flags", "rank")), strict=True)
    for (name, kind, dtype, flags, rank), rest, times in zip(
        kinds, zip(*plain, strict=True), zip(*columns, strict=True), strict=True
    ):
        process_set, sequence, batch, nbytes, arrival = rest
        ready, started, finished, pack, transfer, wait, unpack = times
        span = Span(
            names[name],
            _KINDS[kind],
            _DTYPES[dtype],
            process_set,
            sequence,
            batch,
            nbytes,
            arrival,
            None if flags & NOT_READY else arrival + ready,
            None if flags & NOT_STARTED else arrival + started,
            arrival + finished,
            pack,
            transfer,
            wait,
            unpack,
            not flags & FAILED,
            site=sites[name],
        )
        found.append((rank, Placed(span, 0, errors.get(rank, 0))))
    return found


def _failures(
    recording: Recording, trace: ChromeTrace, rows: Rows, errors: dict[int, int]
) -> list[TraceEvent]:
    out: list[TraceEvent] = []
    for rank, placed in _placed(recording, rows[rows["flags"] & NOT_READY != 0], errors):
        out += trace.introduce(rank) + trace.failed(rank, placed)
    return out
