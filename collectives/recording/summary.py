"""Each rank in a few figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.recording.arrivals import arrivals
from hvdlab.collectives.recording.rows import NOT_READY, NOT_STARTED, Rows, distance

if TYPE_CHECKING:
    from hvdlab.collectives.recording.recording import Recording


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank in a stretch of time; times in ns.

    Attributes:
        rank: The rank.
        spans: How many rows it has.
        times_last: Collectives to which it surely came last, counted once per tensor.
        held_up_ns: How long other ranks waited for it: from the first arrival to its own; waits that overlap count once.
        worst_ns: The longest wait for it.
        wait: Share of the time in which it had arrived at a collective and other ranks had not.
        work: Share of the time in which its executor was in a collective.
        nbytes: Bytes of its tensors.
        bandwidth: ``nbytes`` divided by the time in collectives, in bytes per second; 0 without any.
        length_ns: Length of the stretch.
    """

    rank: int
    spans: int = 0
    times_last: int = 0
    held_up_ns: int = 0
    worst_ns: int = 0
    wait: float = 0.0
    work: float = 0.0
    nbytes: int = 0
    bandwidth: float = 0.0
    length_ns: int = 0


def summarize(recording: Recording, seconds: float | None = None, most: int = 200_000) -> list[RankSummary]:
    """Summaries of the ranks that have spans, by rank.

    Args:
        recording: The recording with their spans.
        seconds: Only spans that ended in this time before the end of the last one; by default all.
        most: How many of the newest rows to look at.
    """
    _, rows = recording.rows_since(recording.end - most)
    if not len(rows):
        return []
    ends = rows["arrival"] + distance(rows, "finished")
    until = int(ends.max())
    since = int(rows["arrival"].min()) if seconds is None else until - int(seconds * 1e9)
    since = max(since, int(rows["arrival"].min()))
    inside = ends >= since
    if not inside.all():
        rows, ends = rows[inside], ends[inside]
    came = arrivals(rows, recording.clock_errors())
    late = came.one[came.certain[came.one]]
    late_rank, first, last = came.last_rank[late], came.first_ns[late], came.last_ns[late]
    spans = _Spans.of(rows, ends)
    found = []
    for rank, own in _by_rank(rows["rank"].copy()):
        held = late_rank == rank
        found.append(_one(rank, spans.only(own), first[held], last[held], since, until))
    return found


class _Spans(NamedTuple):
    """Columns of rows, times in ns: indexing these is much quicker than indexing rows."""

    arrival: NDArray[np.int64]
    ready: NDArray[np.int64]
    started: NDArray[np.int64]
    finished: NDArray[np.int64]
    ran: NDArray[np.bool_]
    nbytes: NDArray[np.uint64]

    @classmethod
    def of(cls, rows: Rows, ends: NDArray[np.int64]) -> _Spans:
        arrival, flags = rows["arrival"].copy(), rows["flags"].copy()
        ready = np.where(flags & NOT_READY, ends, arrival + distance(rows, "ready"))
        started = arrival + distance(rows, "started")
        return cls(arrival, ready, started, ends, flags & NOT_STARTED == 0, rows["nbytes"].copy())

    def only(self, chosen: NDArray[np.intp]) -> _Spans:
        arrival, ready, started, finished, ran, nbytes = (column[chosen] for column in self)
        return _Spans(arrival, ready, started, finished, ran, nbytes)  # type: ignore[arg-type]  # of different kinds


def _by_rank(ranks: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Each rank, and which rows are its own, in order."""
    order = np.argsort(ranks, kind="stable")
    found, begins = np.unique(ranks[order], return_index=True)
    for rank, begin, end in zip(found.tolist(), begins, [*begins[1:], len(order)], strict=True):
        yield rank, order[begin:end]


def _one(
    rank: int, spans: _Spans, first: NDArray[np.int64], last: NDArray[np.int64], since: int, until: int
) -> RankSummary:
    ran = spans.ran
    busy = _union(spans.started[ran], spans.finished[ran], since)
    length = max(1, until - since)
    nbytes = int(spans.nbytes[ran].sum())
    return RankSummary(
        rank,
        len(spans.arrival),
        len(last),
        _union(first, last, since),
        int((last - first).max(initial=0)),
        _union(spans.arrival, spans.ready, since) / length,
        busy / length,
        nbytes,
        nbytes / busy * 1e9 if busy else 0.0,
        length,
    )


def _union(begin: NDArray[Any], end: NDArray[Any], since: int) -> int:
    """Length of the union of intervals, from ``since`` on."""
    if not len(begin):
        return 0
    order = np.argsort(begin, kind="stable")
    begin, end = np.maximum(begin[order], since), np.maximum(end[order], since)
    reached = np.maximum.accumulate(end)
    before = np.concatenate(([begin[0]], reached[:-1]))
    return int(np.maximum(0, end - np.maximum(begin, before)).sum())
