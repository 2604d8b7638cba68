"""Still picture of a recording, for a saved notebook and for a terminal: a lane of the newest spans for each rank."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.tracing.collective_matching import collective_arrivals
from hvdlab.collectives.tracing.columns import NOT_READY, NOT_STARTED, Rows, distance
from hvdlab.collectives.tracing.rank_activity import RankSummary, summarize
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import OpKind
from hvdlab.widgets.recording_feed import slowest_of

ROWS_DRAWN = 200_000
RANKS_DRAWN = 16
WIDTH, HEIGHT = 640, 18
TEXT_WIDTH = 48

# Middle tones that can be seen on white and on black; the hues are those of ui/src/draw/palette.ts.
WAIT, LATE = (148, 158, 176), (224, 104, 20)
KINDS = ((30, 130, 196), (10, 166, 122), (208, 130, 175), (86, 180, 233), (232, 166, 30), (124, 116, 168))
OTHER = (140, 130, 120)

Picture = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Lane:
    """Shares of each column of a rank's lane, 0 to 1."""

    rank: int
    wait: NDArray[np.float64]
    late: NDArray[np.float64]
    kinds: dict[int, NDArray[np.float64]]

    @property
    def work(self) -> NDArray[np.float64]:
        return np.minimum(1, sum(self.kinds.values(), np.zeros(len(self.wait))))


def lanes(recording: Recording, columns: int) -> tuple[list[Lane], float]:
    """Return the newest spans of each rank in a number of columns, and the seconds that all columns show together."""
    _, rows = recording.rows_since(recording.end - ROWS_DRAWN)
    if not len(rows):
        return [], 0.0
    came = collective_arrivals(rows, recording.clock_errors())
    finished = rows["arrival"] + distance(rows, "finished")
    edges = np.linspace(rows["arrival"].min(), finished.max(), columns + 1)
    last = came.one[came.certain[came.one]]
    found = []
    for rank in np.unique(rows["rank"]).tolist():
        mine = last[came.last_rank[last] == rank]
        late = _covered(came.first_ns[mine], came.last_ns[mine], edges)
        found.append(_lane(rank, rows[rows["rank"] == rank], late, edges))
    return found, float(edges[-1] - edges[0]) / 1e9


def _lane(rank: int, rows: Rows, late: NDArray[np.float64], edges: NDArray[np.float64]) -> Lane:
    arrival, finished = rows["arrival"], rows["arrival"] + distance(rows, "finished")
    ready = np.where(rows["flags"] & NOT_READY, finished, arrival + distance(rows, "ready"))
    ran = rows["flags"] & NOT_STARTED == 0
    started = arrival + distance(rows, "started")
    kinds = {}
    for kind in np.unique(rows["kind"][ran]).tolist():
        own = ran & (rows["kind"] == kind)
        kinds[kind] = _covered(started[own], finished[own], edges)
    return Lane(rank, _covered(arrival, ready, edges), late, kinds)


def _covered(begin: NDArray[Any], end: NDArray[Any], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of each column that the union of intervals covers."""
    if not len(begin):
        return np.zeros(len(edges) - 1)
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order].astype(np.float64), end[order].astype(np.float64)
    reached = np.maximum.accumulate(end)
    begin = np.maximum(begin, np.concatenate(([-np.inf], reached[:-1])))
    end = np.maximum(begin, end)
    # Covered length before each edge: all of the intervals that have begun, less the part of them that lies behind the edge.
    sums = np.concatenate(([0.0], np.cumsum(end - begin)))
    started = np.searchsorted(begin, edges, "right")
    running = np.maximum(started - 1, 0)
    excess = np.where(started > 0, np.maximum(0, end[running] - np.maximum(edges, begin[running])), 0)
    shares: NDArray[np.float64] = np.diff(sums[started] - excess) / np.diff(edges)
    return np.clip(shares, 0, 1)


def draw(lane: Lane) -> Picture:
    """Return a lane as red, green, blue and opacity."""
    width = len(lane.wait)
    body = np.zeros((width, 4))
    _over(body, WAIT, lane.wait * 0.75)
    _over(body, LATE, lane.late * 0.5)
    for kind, share in lane.kinds.items():
        _over(body, KINDS[kind] if kind < len(KINDS) else OTHER, share)
    bar = body.copy()
    _over(bar, LATE, lane.late)
    rows = np.concatenate((np.repeat(bar[None], 3, 0), np.repeat(body[None], HEIGHT - 3, 0)))
    return np.rint(rows).astype(np.uint8)


def _over(pixels: NDArray[np.float64], colour: tuple[int, int, int], share: NDArray[np.float64]) -> None:
    under = pixels[:, 3] / 255
    alpha = share + under * (1 - share)
    safe = np.where(alpha > 0, alpha, 1)
    for i, value in enumerate(colour):
        pixels[:, i] = (value * share + pixels[:, i] * under * (1 - share)) / safe
    pixels[:, 3] = alpha * 255


def png(picture: Picture) -> bytes:
    """Return a picture as a PNG file."""
    height, width = picture.shape[:2]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    # Each line begins with the number of its filter: 2, the difference to the line above; lanes repeat their lines.
    above = np.concatenate((np.zeros((1, width, 4), np.uint8), picture[:-1]))
    lines = np.concatenate((np.full((height, 1), 2, np.uint8), (picture - above).reshape(height, -1)), 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def headline(recording: Recording, summaries: list[RankSummary]) -> str:
    """Return the recording in a sentence."""
    if not summaries:
        return "no collectives were recorded yet"
    ranks = "1 rank" if len(summaries) == 1 else f"{len(summaries)} ranks"
    text = f"{ranks}, {recording.count:,} spans"
    if recording.dropped:
        text += f" ({recording.dropped:,} older ones dropped)"
    rank = slowest_of(summaries)
    if rank is None:
        return text
    slowest = next(one for one in summaries if one.rank == rank)
    share = slowest.times_last / sum(one.times_last for one in summaries)
    return text + f"; others waited {seconds(slowest.held_up_ns)} for rank {rank}, last in {share:.0%}"


def seconds(ns: float) -> str:
    """Return a length of time with three digits, in whole seconds if it is longer."""
    for unit, name in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if ns >= 0.9995 * unit:
            return f"{ns / unit:.3g} {name}" if ns < 999.5 * unit else f"{ns / unit:,.0f} {name}"
    return f"{ns:.0f} ns"


def as_html(recording: Recording, mark: str = "hvd-still") -> str:
    """Return the still picture; some 2 kB for each of at most ``RANKS_DRAWN`` ranks. ``mark`` is its CSS class."""
    drawn, length = lanes(recording, WIDTH)
    summaries = {one.rank: one for one in summarize(recording, most=ROWS_DRAWN)}
    text = html.escape(headline(recording, list(summaries.values())))
    shown = sorted(drawn, key=lambda lane: -summaries[lane.rank].held_up_ns)[:RANKS_DRAWN]
    rows = []
    for lane in sorted(shown, key=lambda lane: lane.rank):
        one = summaries[lane.rank]
        data = base64.b64encode(png(draw(lane))).decode()
        note = f"{_last_in(one)}, {seconds(one.held_up_ns)}" if one.times_last else "never last"
        rows.append(
            f'<tr><th style="text-align:left">rank {lane.rank}</th>'
            f'<td><img alt="" width="{WIDTH}" height="{HEIGHT}" src="data:image/png;base64,{data}"></td>'
            f'<td style="text-align:left">{note}</td></tr>'
        )
    more = len(drawn) - len(shown)
    legend = f"{length:.3g} s · " + " · ".join(_legend(drawn)) + (f" · {more} more ranks" if more else "")
    foot = f"<div>{legend}</div>" if drawn else ""
    return f'<div class="hvd-still {mark}"><div><b>Timeline</b>: {text}</div><table>{"".join(rows)}</table>{foot}</div>'


def _last_in(one: RankSummary) -> str:
    """Return to how many collectives a rank came last. Each tensor counts, also of those that were fused."""
    return f"last in {one.times_last:,} collective{'s' * (one.times_last != 1)}"


def _legend(drawn: list[Lane]) -> list[str]:
    kinds = sorted({kind for lane in drawn for kind in lane.kinds})
    entries = [(KINDS[k] if k < len(KINDS) else OTHER, OpKind(k).label) for k in kinds]
    entries += [(WAIT, "waits for others"), (LATE, "others wait for this rank")]
    return [
        f'<span style="color:rgb({c[0]},{c[1]},{c[2]})">■</span> {html.escape(name)}' for c, name in entries
    ]


def as_text(recording: Recording) -> str:
    """Return the still picture in characters."""
    drawn, length = lanes(recording, TEXT_WIDTH)
    summaries = {one.rank: one for one in summarize(recording, most=ROWS_DRAWN)}
    lines = [f"Timeline: {headline(recording, list(summaries.values()))}"]
    for lane in drawn:
        one = summaries[lane.rank]
        note = f"{_last_in(one)}, held others up {seconds(one.held_up_ns)}" if one.times_last else ""
        lines.append(f"rank {lane.rank:>3} |{_characters(lane)}| {note}".rstrip())
    if drawn:
        lines.append(
            f"{'':9}{length:.3g} s; █ in a collective, ░ waits for others, ▒ others wait for this rank"
        )
    return "\n".join(lines)


def _characters(lane: Lane) -> str:
    found = []
    for work, late, wait in zip(lane.work, lane.late, lane.wait, strict=True):
        share, character = max((work, "█"), (late, "▒"), (wait, "░"), key=lambda one: one[0])
        found.append(character if share >= 0.15 else " ")
    return "".join(found)
