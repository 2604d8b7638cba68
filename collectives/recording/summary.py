"""Each rank in a few figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
        spans: Its rows.
        times_last: Collectives to which it surely came last, as one tensor each.
        held_up_ns: How long others were waiting for it: from the first arrival to its own; what overlaps counts once.
        worst_ns: The longest wait for it.
        wait: Share of the time in which it had arrived somewhere and others had not.
        work: Share of the time in which its executor was in a collective.
        nbytes: Bytes of its tensors.
        bandwidth: These by the time in collectives, in bytes per second; 0 without any.
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


def summarize(recording: Recording, seconds: float | None = None, most: int = 200_000) -> list[RankSummary]:
    """Summaries of the ranks that have spans, by rank.

    Args:
        recording: Where they are.
        seconds: Only what ended in this time before the last span; by default everything.
        most: Rows to look at, the newest.
    """
    _, rows = recording.rows_since(recording.end - most)
    if not len(rows):
        return []
    ends = rows["arrival"] + distance(rows, "finished")
    until = int(ends.max())
    since = int(rows["arrival"].min()) if seconds is None else until - int(seconds * 1e9)
    since = max(since, int(rows["arrival"].min()))
    rows = rows[ends >= since]
    came = arrivals(rows, recording.clock_errors())
    late = came.one[came.certain[came.one]]
    found = []
    for rank in np.unique(rows["rank"]).tolist():
        own = rows[rows["rank"] == rank]
        last = late[came.last_rank[late] == rank]
        found.append(_one(rank, own, came.first_ns[last], came.last_ns[last], since, until))
    return found


def _one(
    rank: int, rows: Rows, first: NDArray[np.int64], last: NDArray[np.int64], since: int, until: int
) -> RankSummary:
    arrival, finished = rows["arrival"], rows["arrival"] + distance(rows, "finished")
    ready = np.where(rows["flags"] & NOT_READY, finished, arrival + distance(rows, "ready"))
    ran = rows["flags"] & NOT_STARTED == 0
    busy = _union(arrival[ran] + distance(rows[ran], "started"), finished[ran], since)
    length = max(1, until - since)
    nbytes = int(rows["nbytes"][ran].sum())
    return RankSummary(
        rank,
        len(rows),
        len(last),
        _union(first, last, since),
        int((last - first).max(initial=0)),
        _union(arrival, ready, since) / length,
        busy / length,
        nbytes,
        nbytes / busy * 1e9 if busy else 0.0,
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
