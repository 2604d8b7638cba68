"""Still picture of metrics, for a saved notebook and for a terminal: a small chart or a line of characters for each name."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.text import visible
from hvdlab.collectives.tracing.columns import Points
from hvdlab.collectives.tracing.derived_series import DERIVED
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.still_lanes import png

WIDTH, HEIGHT = 480, 34
TEXT_WIDTH = 40
WIDEST = 80
"""Characters of a name or a note in a terminal."""


def headline(recording: Recording, found: list[Spark], seconds: float) -> str:
    """Return the metrics in a sentence."""
    if not found:
        return "nothing was measured yet"
    ranks = len({one.rank for one in recording.series()})
    text = f"{'1 rank' if ranks == 1 else f'{ranks} ranks'}, {recording.points_end:,} points, {seconds:.3g} s"
    return text + (f" ({recording.points_lost:,} older ones dropped)" if recording.points_lost else "")


def as_html(recording: Recording, mark: str = "hvd-still") -> str:
    """Return the still picture; some kB for each of at most 14 names. ``mark`` is its CSS class."""
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
    """Return the still picture in characters: a line for each name."""
    found, seconds = sparks(recording, TEXT_WIDTH)
    lines = [f"Metrics: {headline(recording, found, seconds)}"]
    titles = [visible(title(one.name), WIDEST) for one in found]
    width = max(map(len, titles), default=0)
    lines += [
        f"{name:<{width}} |{characters(one)}| {visible(_note(one), WIDEST)}"
        for name, one in zip(titles, found, strict=True)
    ]
    return "\n".join(lines)


Picture = NDArray[np.uint8]
Values = NDArray[np.float64]

# Middle tones that can be seen on white and on black; the hues are those of ui/src/draw/palette.ts.
RANKS = (
    (30, 130, 196),
    (224, 160, 30),
    (10, 156, 116),
    (208, 130, 175),
    (100, 180, 230),
    (150, 122, 94),
    (128, 120, 190),
    (130, 138, 150),
)
BAND = (30, 130, 196)
LINES = len(RANKS)
_BARS = "▁▂▃▄▅▆▇█"
DERIVED_GAP_NS = 1_500_000_000
"""Between points of series that are computed for each second, nothing is drawn if they are further apart."""
_SAMPLED = ("hvdlab/cpu", "hvdlab/rss", "hvdlab/threads", "hvdlab/gpu")

# Our own series in the order in which they are shown. Those of users come before all of them; ours that are not here are not
# shown.
_ORDER = (
    "hvdlab/step_time",
    "hvdlab/samples_per_second",
    "hvdlab/share/",
    "hvdlab/lateness",
    "hvdlab/bandwidth/bus/",
    "hvdlab/gradient_norm",
    "hvdlab/loss_scale",
    "hvdlab/learning_rate",
    "hvdlab/gpu",
    "hvdlab/cpu",
    "hvdlab/rss",
)


@dataclass(frozen=True, slots=True)
class Spark:
    """Series of one name on all ranks that report it, in columns of equal time.

    Attributes:
        last: Each rank's newest value.
        low, high: Each rank's least and greatest value in each column; NaN where there was none.
        apart: Whether nothing leads to a rank's column from its column before: a cell or the rank's process ended in between.
    """

    name: str
    unit: str
    last: dict[int, float]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    apart: NDArray[np.bool_]

    @property
    def middle(self) -> float:
        """Return the median of the newest values."""
        return float(np.median([value for value in self.last.values() if not math.isnan(value)] or [np.nan]))

    @property
    def furthest(self) -> tuple[int, float] | None:
        """Return the rank whose newest value is furthest from the median, if it is 2 % of it away; and that value."""
        middle = self.middle
        known = {rank: value for rank, value in self.last.items() if not math.isnan(value)}
        if len(known) < 2:
            return None
        rank = max(known, key=lambda one: abs(known[one] - middle))
        return (rank, known[rank]) if abs(known[rank] - middle) > 0.02 * abs(middle) else None

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the least and the greatest finite value; 0 and 1 if there is none."""
        values = np.concatenate((self.low.ravel(), self.high.ravel()))
        values = values[np.isfinite(values)]
        return (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)


def sparks(recording: Recording, columns: int, most: int = 14) -> tuple[list[Spark], float]:
    """Return the first ``most`` names, and the seconds that all columns show together.

    While no cell runs, they end with the last thing that happened: the ranks' memory is measured when they are idle, too,
    and would push the training out of the picture.
    """
    recording.points_since(recording.points_end)  # brings the series up to date that are computed from spans
    series = [one for one in recording.series() if _place(one.name) < len(_ORDER)]
    points = {(one.rank, one.name): recording.points(one.rank, one.name) for one in series}
    newest = newest_event(recording, points)
    if newest is not None:
        points = {key: found[found["time"] <= newest] for key, found in points.items()}
    points = {key: found for key, found in points.items() if len(found)}
    if not points:
        return [], 0.0
    edges = np.array([f(found["time"][i]) for f, i in ((int, 0), (int, -1)) for found in points.values()])
    begin, end = int(edges.min()), max(int(edges.max()), int(edges.min()) + 1)
    names = dict.fromkeys(one.name for one in series if (one.rank, one.name) in points)
    units = {one.name: one.unit for one in series}
    found = []
    for name in sorted(names, key=_place)[:most]:
        mine = {rank: points[rank, key] for rank, key in sorted(points) if key == name}
        spans = [_columns(one, begin, end, columns) for one in mine.values()]
        last = {rank: float(one["value"][-1]) for rank, one in mine.items()}
        low, high = np.stack([one[0] for one in spans]), np.stack([one[1] for one in spans])
        breaks = _breaks(recording, name)
        apart = np.stack(
            [_apart(one, breaks.get(rank, []), name, begin, end, columns) for rank, one in mine.items()]
        )
        found.append(Spark(name, units[name], last, low, high, apart))
    return found, (end - begin) / 1e9


def _place(name: str) -> int:
    if not name.startswith("hvdlab/"):
        return -1
    return next((i for i, start in enumerate(_ORDER) if name.startswith(start)), len(_ORDER))


def is_sampled(name: str) -> bool:
    """Return whether a name is of a series that ranks measure all the time, also while they are idle."""
    return name.startswith(_SAMPLED)


def newest_event(recording: Recording, points: Mapping[tuple[int, str], Points]) -> int | None:
    """Return the time of the last thing that happened, on the recording's axis; ``None`` where pictures end with the last point.

    Args:
        recording: The recording with the ranks' marks.
        points: Points of each rank and name.
    """
    marks = recording.annotations()
    running = not recording.closed and any(mark.kind == "cell" and mark.end_ns is None for mark in marks)
    ends = [
        int(found["time"][-1]) for (_, name), found in points.items() if len(found) and not is_sampled(name)
    ]
    ends += [mark.end_ns or mark.begin_ns for mark in marks if mark.kind not in ("joined", "formed")]
    return None if running else max(ends, default=None)


def _breaks(recording: Recording, name: str) -> dict[int, list[int]]:
    """Return the times at which lines of each rank are interrupted, in order."""
    found: dict[int, list[int]] = {}
    for mark in recording.annotations():
        if mark.kind in ("left", "joined"):
            found.setdefault(mark.rank, []).append(mark.begin_ns)
        elif mark.kind == "cell" and not is_sampled(name):
            found.setdefault(mark.rank, []).extend(filter(None, (mark.begin_ns, mark.end_ns)))
    return {rank: sorted(times) for rank, times in found.items()}


def _apart(
    points: Points, breaks: Sequence[int], name: str, begin: int, end: int, columns: int
) -> NDArray[np.bool_]:
    """Return the columns to which nothing leads from the column before that has a point."""
    found = np.zeros(columns, np.bool_)
    points = points[np.isfinite(points["value"])]
    if len(points) < 2:
        return found
    at, times = _places(points, begin, end, columns), points["time"].astype(np.int64)
    border = np.diff(np.searchsorted(np.array(breaks, np.int64), times, "right")) > 0
    if name.startswith(DERIVED):
        border |= np.diff(times) > DERIVED_GAP_NS
    found[at[1:][border & (np.diff(at) > 0)]] = True
    return found


def _places(points: Points, begin: int, end: int, columns: int) -> NDArray[np.intp]:
    """Return the column of each point."""
    at = (points["time"] - begin) * columns // (end - begin)
    found: NDArray[np.intp] = np.minimum(at, columns - 1).astype(np.intp)
    return found


def _columns(points: Points, begin: int, end: int, columns: int) -> tuple[Values, Values]:
    low, high = np.full(columns, np.inf), np.full(columns, -np.inf)
    points = points[np.isfinite(points["value"])]
    at = _places(points, begin, end, columns)
    np.minimum.at(low, at, points["value"])
    np.maximum.at(high, at, points["value"])
    none = low > high
    low[none] = high[none] = np.nan
    return low, high


def draw(spark: Spark, height: int) -> Picture:
    """Return the lines of the ranks as red, green, blue and opacity; of many ranks their range and their median."""
    width = spark.low.shape[1]
    picture = np.zeros((height, width, 4), np.uint8)
    least, most = spark.bounds
    scale = (height - 3) / (most - least) if most > least else 0.0

    def rows(values: Values) -> NDArray[np.float64]:
        return (
            np.rint(height - 2 - (values - least) * scale)
            if scale
            else np.full(width, height // 2) + 0 * values
        )

    if len(spark.low) > LINES:
        _fill(picture, *_range(spark, rows), (*BAND, 90))
        middle = rows(_median((spark.low + spark.high) / 2))
        apart: NDArray[np.bool_] = np.logical_or.reduce(spark.apart, axis=0)
        _line(picture, middle, middle, apart, (*BAND, 255))
        return picture
    for low, high, apart, colour in reversed(
        list(zip(spark.low, spark.high, spark.apart, RANKS, strict=False))
    ):
        _line(picture, rows(high), rows(low), apart, (*colour, 255))
    return picture


def _range(spark: Spark, rows: Callable[[Values], Values]) -> tuple[Values, Values]:
    none = np.isnan(spark.low).all(0)
    low = np.where(none, np.nan, np.fmin.reduce(spark.low, axis=0))
    high = np.where(none, np.nan, np.fmax.reduce(spark.high, axis=0))
    return rows(high), rows(low)


def _median(values: Values) -> Values:
    found = np.full(values.shape[1], np.nan)
    some = ~np.isnan(values).all(0)
    found[some] = np.nanmedian(values[:, some], axis=0)
    return found


def _fill(picture: Picture, top: Values, bottom: Values, colour: tuple[int, ...]) -> None:
    for x in np.flatnonzero(~np.isnan(top)).tolist():
        picture[max(0, int(top[x])) : int(bottom[x]) + 1, x] = colour


def _line(
    picture: Picture, top: Values, bottom: Values, apart: NDArray[np.bool_], colour: tuple[int, ...]
) -> None:
    """Join the columns that have a value, two pixels thick, but for those that are apart."""
    some = np.flatnonzero(~np.isnan(top)).tolist()
    for i, x in enumerate(some):
        begin, end = int(top[x]), int(bottom[x])
        picture[max(0, begin) : end + 2, x] = colour
        if i == 0 or apart[x]:
            continue
        before = some[i - 1]
        last = float(top[before] + bottom[before]) / 2
        now = float(top[x] + bottom[x]) / 2
        for between in range(before + 1, x + 1):
            share = (between - before) / (x - before)
            here = round(last + (now - last) * share)
            step = round(last + (now - last) * max(0.0, share - 1 / (x - before)))
            picture[max(0, min(here, step)) : max(here, step) + 2, between] = colour


def characters(spark: Spark) -> str:
    """Return the median of the ranks in each column as a bar of one to eight eighths; a space where nothing was measured."""
    values = _median((spark.low + spark.high) / 2)
    known = values[~np.isnan(values)]
    least, most = (known.min(), known.max()) if len(known) else (0.0, 1.0)
    scale = (len(_BARS) - 1) / (most - least) if most > least else 0.0
    return "".join(
        " " if math.isnan(value) else _BARS[round((value - least) * scale)] for value in values.tolist()
    )


def title(name: str) -> str:
    """Return the name that is shown for a series: our own by their meaning, those of users as they are."""
    if not name.startswith("hvdlab/"):
        return name
    words = {"rss": "memory", "cpu": "CPU", "samples_per_second": "samples/s"}
    short = name.removeprefix("hvdlab/").removeprefix("share/").removeprefix("bandwidth/")
    if "/" in short and name.startswith("hvdlab/bandwidth/"):
        what, kind = short.split("/", 1)
        return f"{kind} {what}"
    return words.get(short, short.replace("_", " ").replace("gpu", "GPU ").replace("/", " "))


def quantity(value: float, unit: str) -> str:
    """Return a value with its unit and three digits."""
    if not np.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if unit == "s":
        return _scaled(value, ((1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")))
    if unit == "B":
        return _scaled(value, ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))
    if unit == "B/s":
        return _scaled(value, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")))
    if unit == "1":
        return f"{value:.0%}"
    if unit == "%":
        return f"{value:.0f}%"
    return f"{value:.4g}{'/s' if unit == '1/s' else ''}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    # A value that rounds up to the next unit is shown in that one: 1 MB/s, not 1e+03 kB/s.
    size, unit = next((one for one in units if abs(value) >= 0.9995 * one[0]), units[-1])
    scaled = value / size
    return f"{scaled:.3g} {unit}" if abs(scaled) < 999.5 else f"{scaled:,.0f} {unit}"
