"""A recording in a few lines of text: which ranks hold the others up, and in which collectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlab.collectives.errors import shown_name
from hvdlab.collectives.text import visible
from hvdlab.collectives.tracing.collective_matching import collective_arrivals
from hvdlab.collectives.tracing.columns import NOT_STARTED, distance
from hvdlab.collectives.tracing.rank_activity import summarize
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import OpKind

WIDEST = 120
"""Characters of a column."""

_LABELS = [kind.label for kind in OpKind]


def head(recording: Recording) -> str:
    """Return one line: how much is here, of how many ranks and how long a time; and one for each other clock."""
    _, rows = recording.rows_since(0)
    if not len(rows):
        return "nothing was recorded"
    ends = rows["arrival"] + distance(rows, "finished")
    length = (int(ends.max()) - int(rows["arrival"].min())) / 1e9
    lost = f", {recording.dropped:,} more are not here" if recording.dropped else ""
    ranks = len(np.unique(rows["rank"]))
    found = f"{len(rows):,} spans of {ranks} rank{'s' * (ranks != 1)} in {length:,.3f} s{lost}"
    return found + "".join(f"\n{line}" for line in clocks(recording))


def clocks(recording: Recording) -> list[str]:
    """Return a line for each host whose clock had to be compared: by how much its ranks' times may be off."""
    hosts = {member.rank: member.host.split("#")[0] for member in recording.membership.members}
    groups: dict[tuple[str, int], list[str]] = {}
    for rank, error_ns in sorted(recording.clock_errors().items()):
        groups.setdefault((hosts.get(rank, ""), error_ns), []).append(str(rank))
    return [
        f"clock of rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}{f' ({visible(host, WIDEST)})' if host else ''}: "
        f"known to within {time(error_ns)}"
        for (host, error_ns), ranks in groups.items()
    ]


def ranks(recording: Recording, seconds: float | None = None) -> str:
    """Return a line per rank, the rank that held the others up for longest first.

    Args:
        recording: The recording.
        seconds: Only the last seconds of it, this many; ``None`` for all.
    """
    found = summarize(recording, seconds, most=recording.count)
    found.sort(key=lambda one: (-one.held_up_ns, one.rank))
    lines = [("rank", "spans", "last", "held up", "longest", "waits", "works", "bytes", "bytes/s")]
    for one in found:
        share = (f"{one.wait:.0%}", f"{one.work:.0%}", size(one.nbytes), size(one.bandwidth))
        held = (time(one.held_up_ns), time(one.worst_ns))
        lines.append((str(one.rank), f"{one.spans:,}", f"{one.times_last:,}", *held, *share))
    return table(lines, "rrrrrrrrr")


def collectives(recording: Recording, most: int = 20) -> str:
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
        figures = (time(int(waits.sum())), time(int(waits.max(initial=0))), time(p50), time(p99))
        nbytes = int(rows["nbytes"][own].sum())
        found.append(
            (int(waits.sum()), (*where, f"{int((keys == key).sum()):,}", *figures, size(nbytes), who))
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
    text = table([titles, *(line for _, line in found[:most])], "lllrrrrrrl")
    return text + (f"\nand {len(found) - most:,} more" if len(found) > most else "")


def table(lines: Sequence[tuple[str, ...]], align: str) -> str:
    """Return the lines as columns; ``align`` has an ``l`` or ``r`` for each. Their text may come from other processes."""
    lines = [tuple(visible(cell, WIDEST) for cell in line) for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(align))]
    text = []
    for line in lines:
        cells = zip(line, widths, align, strict=True)
        text.append("  ".join(c.ljust(w) if side == "l" else c.rjust(w) for c, w, side in cells).rstrip())
    return "\n".join(text)


def time(ns: float) -> str:
    """Return a duration with three digits."""
    for unit, name in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if ns >= unit:
            return f"{ns / unit:,.3g} {name}" if ns < 1000 * unit else f"{ns / unit:,.0f} {name}"
    return f"{ns:.0f} ns" if ns else "0"


def size(nbytes: float) -> str:
    """Return an amount of bytes with three digits."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.3g} {name}"
    return f"{nbytes:.0f} B"
