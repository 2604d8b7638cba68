"""A still picture of metrics: what a saved notebook keeps, and what a terminal shows."""

from __future__ import annotations

import base64
import html

from hvdlab.collectives.text import visible
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.picture import png
from hvdlab.widgets.sparklines import LINES, RANKS, Spark, characters, draw, quantity, sparks, title

WIDTH, HEIGHT = 480, 34
TEXT_WIDTH = 40
WIDEST = 80
"""Characters of a name or a note in a terminal."""


def headline(recording: Recording, found: list[Spark], seconds: float) -> str:
    """The metrics in a sentence."""
    if not found:
        return "nothing was measured yet"
    ranks = len({one.rank for one in recording.series()})
    text = f"{'1 rank' if ranks == 1 else f'{ranks} ranks'}, {recording.points_end:,} points, {seconds:.3g} s"
    return text + (f" ({recording.points_lost:,} older ones dropped)" if recording.points_lost else "")


def as_html(recording: Recording, mark: str = "hvd-still") -> str:
    """The still picture; some kB for each of at most 14 names. ``mark`` is its CSS class."""
    found, seconds = sparks(recording, WIDTH)
    rows = []
    for one in found:
        data = base64.b64encode(png(draw(one, HEIGHT))).decode()
        rows.append(
            f'<tr><th style="text-align:left">{html.escape(title(one.name))}</th>'
            f'<td><img alt="" width="{WIDTH}" height="{HEIGHT}" src="data:image/png;base64,{data}"></td>'
            f'<td style="text-align:left">{html.escape(_note(one))}</td></tr>'
        )
    text = html.escape(headline(recording, found, seconds))
    foot = f"<div>{_legend(found)}</div>" if found else ""
    return f'<div class="hvd-still {mark}"><div><b>Metrics</b>: {text}</div><table>{"".join(rows)}</table>{foot}</div>'


def _note(one: Spark) -> str:
    note = quantity(one.middle, one.unit)
    far = one.furthest
    return note if far is None else f"{note}, rank {far[0]}: {quantity(far[1], one.unit)}"


def _legend(found: list[Spark]) -> str:
    ranks = sorted({rank for one in found for rank in one.last})
    if len(ranks) > LINES:
        return "median and range of all ranks"
    return " · ".join(
        f'<span style="color:rgb({c[0]},{c[1]},{c[2]})">■</span> rank {rank}'
        for rank, c in zip(ranks, RANKS, strict=False)
    )


def as_text(recording: Recording) -> str:
    """The still picture in characters: a line for each name."""
    found, seconds = sparks(recording, TEXT_WIDTH)
    lines = [f"Metrics: {headline(recording, found, seconds)}"]
    titles = [visible(title(one.name), WIDEST) for one in found]
    width = max(map(len, titles), default=0)
    lines += [
        f"{name:<{width}} |{characters(one)}| {visible(_note(one), WIDEST)}"
        for name, one in zip(titles, found, strict=True)
    ]
    return "\n".join(lines)
