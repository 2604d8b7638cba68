"""How each rank spent a stretch of time: the last seconds for a strip under a cell, or all that was recorded.

The strip asks twice a second, so reading the newest rows must be cheap. The report is a few lines of text: which ranks hold
the others up, and in which collectives.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.errors import shown_name
from hvdlab.collectives.metrics.sampler import STEP_TIME
from hvdlab.collectives.text import visible
from hvdlab.collectives.tracing.collective_matching import collective_arrivals
from hvdlab.collectives.tracing.columns import NOT_READY, NOT_STARTED, Rows, distance
from hvdlab.collectives.tracing.derived_series import union_lengths
from hvdlab.collectives.types import OpKind

if TYPE_CHECKING:
    from hvdlab.collectives.tracing.recording import Recording

SECONDS = 5.0
"""Length of the stretch that the strip under a cell shows."""
ROWS_LOOKED_AT = 16_000
"""Newest rows that are read at most, so that the strip stays cheap at any rate of collectives."""
STEPS_LOOKED_AT = 512
"""Newest step times of each rank that are read at most."""
# The same as in ui/src/model/store.ts, so that no view names a rank that another one does not.
NOTABLE = 0.05
TIMES_THE_NEXT = 2


_RateKey = tuple[tuple[int, ...], int | None]
_Rates = dict[_RateKey, tuple[int, float | None]]
_rates: weakref.WeakKeyDictionary[Recording, _Rates] = weakref.WeakKeyDictionary()
_rating = threading.Lock()


@dataclass(frozen=True, slots=True)
class RankActivity:
    """Shares of one rank in a stretch of time that ends with its last collective; they add up to 1.

    A rank that submits a collective is not blocked in an earlier one. So the time up to its last submission counts as
    computing even if collectives were under way: those ran beside it.

    Attributes:
        rank: The rank.
        compute: Share in which it was not in collectives, or submitted further ones while earlier ones were under way.
        wait: Share in which it had submitted its last one, and other ranks had not yet.
        work: Share in which it had submitted its last one, and that was being executed.
        held_up: Share in which other ranks waited for this one, which came last. Not part of the sum.
    """

    rank: int
    compute: float
    wait: float
    work: float
    held_up: float


@dataclass(frozen=True, slots=True)
class RecentActivity:
    """Activity of all ranks over the last seconds.

    Attributes:
        ranks: The ranks that have spans, by number.
        seconds: Length of the stretch.
        collectives: How many collectives the rank with the most had, one per tensor.
    """

    ranks: tuple[RankActivity, ...] = ()
    seconds: float = 0.0
    collectives: int = 0

    @property
    def per_second(self) -> float:
        """Return the collectives per second."""
        return self.collectives / self.seconds if self.seconds else 0.0

    @property
    def slowest(self) -> RankActivity | None:
        """Return the rank that slows the others down, by :func:`slowest_rank`; ``None`` if no rank stands out."""
        rank = slowest_rank({one.rank: one.held_up for one in self.ranks}, 1.0)
        return next((one for one in self.ranks if one.rank == rank), None)


def slowest_rank(held_up: Mapping[int, float], length: float) -> int | None:
    """Return the rank that slows the others down; ``None`` if no rank stands out.

    Between equal ranks it is chance which one is waited for longest. So a rank is only named if others waited for it
    for ``NOTABLE`` of the time at least, and ``TIMES_THE_NEXT`` times as long as for any other.

    Args:
        held_up: How long others waited for each rank.
        length: Length of the stretch of time, in the same unit.
    """
    first, next_one = [*sorted(held_up, key=lambda rank: -held_up[rank]), None, None][:2]
    if first is None or held_up[first] <= 0 or held_up[first] < NOTABLE * length:
        return None
    if next_one is not None and held_up[first] < TIMES_THE_NEXT * held_up[next_one]:
        return None
    return first


def recent_activity(
    recording: Recording,
    seconds: float | None = SECONDS,
    *,
    since_ns: int | None = None,
    most: int = ROWS_LOOKED_AT,
) -> RecentActivity:
    """Return how the ranks spent the stretch before the last span.

    A collective is recorded when it ends, so one that is under way is not seen: the time after a rank's
    last span does not count.

    Args:
        recording: The recording with their spans.
        seconds: Length of the stretch at most; ``None`` for all rows that are read.
        since_ns: Nothing before this time, on the recording's axis.
        most: Number of rows to read, the newest. At a high rate these make the stretch shorter.
    """
    first, rows = recording.rows_since(recording.end - most)
    if not len(rows):
        return RecentActivity()
    ends = rows["arrival"] + distance(rows, "finished")
    until = int(ends.max())
    begin = int(rows["arrival"].min()) if since_ns is None else since_ns
    if first:
        begin = max(begin, _complete_from(rows["rank"], ends))  # spans that ended before are not known
    if seconds is not None:
        begin = max(begin, until - int(seconds * 1e9))
    inside = ends > begin
    if not inside.any():
        return RecentActivity()
    return _measured(rows[inside], ends[inside], begin, recording.clock_errors())


def _complete_from(rank: NDArray[Any], ends: NDArray[np.int64]) -> int:
    """Return the time of the first span of the rank whose first span here is the latest."""
    _, firsts = np.unique(rank, return_index=True)
    return int(ends[firsts].max())


def _measured(
    rows: Rows, ends: NDArray[np.int64], begin: int, clock_errors: dict[int, int]
) -> RecentActivity:
    ranks, index, counts = np.unique(rows["rank"], return_inverse=True, return_counts=True)
    until = np.zeros(len(ranks), np.int64)
    np.maximum.at(until, index, ends)
    length = np.maximum(until - begin, 1)
    arrival = rows["arrival"]
    # Each rank gets a stretch of its own on one axis, so that one pass does for all.
    first = int(arrival.min())
    shift = index.astype(np.int64) * (int(ends.max()) - first + 1) - first
    asked = np.sort(arrival + shift)
    ready = np.where(rows["flags"] & NOT_READY, ends, arrival + distance(rows, "ready"))
    ran = (rows["flags"] & NOT_STARTED) == 0
    started = arrival[ran] + distance(rows, "started")[ran]
    blocked = _last_before(asked, ends, shift)
    waited, worked = np.maximum(arrival, blocked), np.maximum(started, blocked[ran])
    work = union_lengths(index[ran], worked, ends[ran], begin, len(ranks))
    both = union_lengths(
        np.concatenate((index[ran], index)),
        np.concatenate((worked, waited)),
        np.concatenate((ends[ran], np.maximum(ready, waited))),
        begin,
        len(ranks),
    )
    held = _held_up(rows, ranks, begin, clock_errors)
    stretch = int(length.max())
    found = tuple(
        RankActivity(rank, 1 - b / size, (b - w) / size, w / size, late / stretch)
        for rank, w, b, size, late in zip(
            ranks.tolist(), work.tolist(), both.tolist(), length.tolist(), held.tolist(), strict=True
        )
    )
    return RecentActivity(found, stretch / 1e9, int(counts.max()))


def _last_before(
    asked: NDArray[np.int64], time: NDArray[np.int64], shift: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the last submission of the same rank before each time."""
    found: NDArray[np.int64] = asked[np.maximum(np.searchsorted(asked, time + shift) - 1, 0)] - shift
    return found


def _held_up(rows: Rows, ranks: NDArray[Any], begin: int, clock_errors: dict[int, int]) -> NDArray[np.int64]:
    """Return for how many ns other ranks waited for each rank; waits that overlap count once."""
    came = collective_arrivals(rows, clock_errors)
    late = came.one[came.certain[came.one]]
    where = np.searchsorted(ranks, came.last_rank[late])
    return union_lengths(where, came.first_ns[late], came.last_ns[late], begin, len(ranks))


def steps_per_second(recording: Recording, ranks: Iterable[int], since_ns: int | None = None) -> float | None:
    """Return how fast steps of training follow each other, by the step times of each rank's last :data:`SECONDS`.

    Args:
        recording: The recording with their metrics.
        ranks: The ranks to read.
        since_ns: Nothing before this time, on the recording's axis.

    Returns:
        The median of the ranks; ``None`` if none has reported any.
    """
    wanted, found = set(ranks), []
    for rank, points in recording.newest(STEP_TIME, STEPS_LOOKED_AT).items():
        if rank not in wanted:
            continue
        if since_ns is not None:
            points = points[points["time"] >= since_ns]
        if len(points):
            # The last step counts however long it lasted, so that slow ones have a rate, too.
            recent = points["time"] > points["time"][-1] - int(SECONDS * 1e9)
            points = points[recent]
        if len(points) and (total := float(points["value"].sum())) > 0:
            found.append(len(points) / total)
    return statistics.median(found) if found else None


def shown_rate(recording: Recording, ranks: Iterable[int], since_ns: int | None = None) -> float | None:
    """Return :func:`steps_per_second`, computed once in a second for all views, so that they show the same number.

    Args:
        recording: The recording with their metrics.
        ranks: The ranks to read.
        since_ns: Nothing before this time, on the recording's axis.
    """
    key, second = (tuple(sorted(ranks)), since_ns), int(time.monotonic())
    with _rating:
        rates = _rates.setdefault(recording, {})
        at, rate = rates.get(key, (-1, None))
        # A first number is shown at once; from then on it changes once in a second.
        if at == second and rate is not None:
            return rate
    # Without the lock, for which views that only read a known rate would wait.
    rate = steps_per_second(recording, key[0], since_ns)
    with _rating:
        rates = _rates.setdefault(recording, {})
        for stale in [one for one, (at, _) in rates.items() if at < second - 1]:
            del rates[stale]
        at, first = rates.get(key, (-1, None))
        if at == second and first is not None:
            return first  # another view was first
        rates[key] = second, rate
    return rate


def step_count(recording: Recording, ranks: Iterable[int], since_ns: int) -> int | None:
    """Return how many steps of training the rank with the most has ended since a time at which a cell began.

    Args:
        recording: The recording with their metrics.
        ranks: The ranks to read.
        since_ns: The time, on the recording's axis.

    Returns:
        The number; ``None`` if no rank has reported steps, or if reports were dropped that may have been of the cell.
    """
    if recording.points_lost:
        return None
    counts = []
    for rank in ranks:
        points = recording.points(rank, STEP_TIME)
        steps = points["step"][(points["time"] >= since_ns) & np.isfinite(points["step"])]
        if len(steps):
            # Step times are measured from step to step, so the first step of a cell has none.
            counts.append(round(float(steps[-1] - steps[0])) + 2)
    return max(counts, default=None)


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Summary of one rank in a stretch of time; times in ns.

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
    """Return the summaries of the ranks that have spans, by rank.

    Args:
        recording: The recording with their spans.
        seconds: Only spans that ended in this time before the end of the last one; by default all.
        most: Number of the newest rows to read.
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
    came = collective_arrivals(rows, recording.clock_errors())
    late = came.one[came.certain[came.one]]
    first, last = came.first_ns[late], came.last_ns[late]
    # Copies of the columns first: indexing the columns of a structured array is several times slower.
    arrival, flags = rows["arrival"].copy(), rows["flags"].copy()
    ready = np.where(flags & NOT_READY, ends, arrival + distance(rows, "ready"))
    started = arrival + distance(rows, "started")
    # Rank after rank, so that the unions sort columns that are nearly in order.
    rank = rows["rank"].copy()
    order = np.argsort(rank, kind="stable")
    ranks, counts = np.unique(rank[order], return_counts=True)
    index = np.repeat(np.arange(len(ranks)), counts)
    arrival, ready, started, ends = arrival[order], ready[order], started[order], ends[order]
    ran, sizes = flags[order] & NOT_STARTED == 0, rows["nbytes"].copy()[order]
    where = np.searchsorted(ranks, came.last_rank[late])
    worst = np.zeros(len(ranks), np.int64)
    np.maximum.at(worst, where, last - first)
    nbytes = np.zeros(len(ranks), np.uint64)
    np.add.at(nbytes, index[ran], sizes[ran])
    times_last = np.bincount(where, minlength=len(ranks))
    held_up = union_lengths(where, first, last, since, len(ranks))
    waited = union_lengths(index, arrival, ready, since, len(ranks))
    worked = union_lengths(index[ran], started[ran], ends[ran], since, len(ranks))
    length = max(1, until - since)
    return [
        RankSummary(
            rank=rank,
            spans=int(counts[i]),
            times_last=int(times_last[i]),
            held_up_ns=int(held_up[i]),
            worst_ns=int(worst[i]),
            wait=int(waited[i]) / length,
            work=int(worked[i]) / length,
            nbytes=int(nbytes[i]),
            bandwidth=int(nbytes[i]) / int(worked[i]) * 1e9 if worked[i] else 0.0,
            length_ns=length,
        )
        for i, rank in enumerate(ranks.tolist())
    ]


WIDEST = 120
"""Characters of a column."""

_LABELS = [kind.label for kind in OpKind]


def report_head(recording: Recording) -> str:
    """Return one line: how much is here, of how many ranks and how long a time; and one for each other clock."""
    _, rows = recording.rows_since(0)
    if not len(rows):
        return "nothing was recorded"
    ends = rows["arrival"] + distance(rows, "finished")
    length = (int(ends.max()) - int(rows["arrival"].min())) / 1e9
    lost = f", {recording.dropped:,} more are not here" if recording.dropped else ""
    ranks = len(np.unique(rows["rank"]))
    found = f"{len(rows):,} spans of {ranks} rank{'s' * (ranks != 1)} in {length:,.3f} s{lost}"
    return found + "".join(f"\n{line}" for line in report_clocks(recording))


def report_clocks(recording: Recording) -> list[str]:
    """Return a line for each host whose clock had to be compared: by how much its ranks' times may be off."""
    hosts = {member.rank: member.host.split("#")[0] for member in recording.membership.members}
    groups: dict[tuple[str, int], list[str]] = {}
    for rank, error_ns in sorted(recording.clock_errors().items()):
        groups.setdefault((hosts.get(rank, ""), error_ns), []).append(str(rank))
    return [
        f"clock of rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}{f' ({visible(host, WIDEST)})' if host else ''}: "
        f"known to within {format_duration(error_ns)}"
        for (host, error_ns), ranks in groups.items()
    ]


def report_ranks(recording: Recording, seconds: float | None = None) -> str:
    """Return a line per rank, the rank that held the others up for longest first.

    Args:
        recording: The recording.
        seconds: Only the last seconds of it, this many; ``None`` for all.
    """
    found = summarize(recording, seconds, most=recording.count)
    found.sort(key=lambda one: (-one.held_up_ns, one.rank))
    lines = [("rank", "spans", "last", "held up", "longest", "waits", "works", "bytes", "bytes/s")]
    for one in found:
        share = (f"{one.wait:.0%}", f"{one.work:.0%}", format_size(one.nbytes), format_size(one.bandwidth))
        held = (format_duration(one.held_up_ns), format_duration(one.worst_ns))
        lines.append((str(one.rank), f"{one.spans:,}", f"{one.times_last:,}", *held, *share))
    return format_table(lines, "rrrrrrrrr")


def report_collectives(recording: Recording, most: int = 20) -> str:
    """Return a line per tensor and line of code, the one in which ranks waited for longest first; ``most`` lines at most.

    Only waiting that surely was for the last rank counts, for each tensor by itself: a wait for several tensors at the same time,
    or for fused ones, counts for each.
    """
    _, rows = recording.rows_since(0)
    came = collective_arrivals(rows, recording.clock_errors())
    ran = rows["flags"] & NOT_STARTED == 0
    ended = came.one[came.certain[came.one]]
    keys = rows["name"].astype(np.int64) * len(_LABELS) + rows["kind"]
    lost = (came.last_ns - came.first_ns)[ended]
    found = []
    for key in np.unique(keys).tolist():
        own, last = (keys == key) & ran, keys[ended] == key
        waits, by = lost[last], came.last_rank[ended][last]
        who = f"rank {(counts := np.bincount(by)).argmax()} ({counts.max() / len(by):.0%})" if len(by) else ""
        took = (distance(rows[own], "finished") - distance(rows[own], "started")).astype(np.float64)
        p50, p99 = np.percentile(took, (50, 99)).tolist() if len(took) else (0.0, 0.0)
        number, kind = divmod(key, len(_LABELS))
        where = (shown_name(recording.names[number]), _LABELS[kind], recording.sites[number])
        figures = (
            format_duration(int(waits.sum())),
            format_duration(int(waits.max(initial=0))),
            format_duration(p50),
            format_duration(p99),
        )
        nbytes = int(rows["nbytes"][own].sum())
        found.append(
            (int(waits.sum()), (*where, f"{int((keys == key).sum()):,}", *figures, format_size(nbytes), who))
        )
    found.sort(key=lambda one: -one[0])
    titles = (
        "tensor",
        "collective",
        "line",
        "spans",
        "waited",
        "longest",
        "p50",
        "p99",
        "bytes",
        "mostly for",
    )
    text = format_table([titles, *(line for _, line in found[:most])], "lllrrrrrrl")
    return text + (f"\nand {len(found) - most:,} more" if len(found) > most else "")


def format_table(lines: Sequence[tuple[str, ...]], align: str) -> str:
    """Return the lines as columns; ``align`` has an ``l`` or ``r`` for each. Their text may come from other processes."""
    lines = [tuple(visible(cell, WIDEST) for cell in line) for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(align))]
    text = []
    for line in lines:
        cells = zip(line, widths, align, strict=True)
        text.append("  ".join(c.ljust(w) if side == "l" else c.rjust(w) for c, w, side in cells).rstrip())
    return "\n".join(text)


def format_duration(ns: float) -> str:
    """Return a duration with three digits."""
    for unit, name in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if ns >= unit:
            return f"{ns / unit:,.3g} {name}" if ns < 1000 * unit else f"{ns / unit:,.0f} {name}"
    return f"{ns:.0f} ns" if ns else "0"


def format_size(nbytes: float) -> str:
    """Return an amount of bytes with three digits."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.3g} {name}"
    return f"{nbytes:.0f} B"
