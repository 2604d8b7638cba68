"""Metrics without a browser: contents of a saved notebook, and output on a terminal."""

from __future__ import annotations

import math
import re
import struct

import numpy as np
import pytest

from hvdlab.collectives.tracing.record_format import CellBeginEvent, CellEndEvent, Event, Metric, encode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.still_charts import (
    RANKS,
    _apart,
    as_html,
    as_text,
    characters,
    draw,
    quantity,
    sparks,
    title,
)
from hvdlab.widgets.still_lanes import png, seconds
from support.timeline_traces import steps

START = 5_000_000_000
SECOND = 1_000_000_000


def recorded(ranks: int, *names: str, count: int = 60, late: int = -1) -> Recording:
    """Record one point of each name and second; the values of rank ``late`` are ten times as large."""
    recording = Recording()
    for rank in range(ranks):
        events: list[Event] = [
            Metric(name, (k + 1.0) * (10 if rank == late else 1), k, START + k * SECOND)
            for k in range(count)
            for name in names
        ]
        recording.feed(rank, encode(rank, events))
    return recording


def test_a_terminal_gets_a_line_for_each_name() -> None:
    lines = as_text(recorded(2, "loss", "hvdlab/cpu", "hvdlab/threads", late=1)).split("\n")
    assert lines[0] == "Metrics: 2 ranks, 360 points, 59 s"
    # Users' own metrics come first, and threads are hidden by default. The two ranks are equally far from the median.
    assert [line.split("|")[0].strip() for line in lines[1:]] == ["loss", "CPU"]
    assert lines[1].startswith("loss |▁")
    assert "█| 330, rank 0: 60" in lines[1]
    assert as_text(Recording()) == "Metrics: nothing was measured yet"


def test_bars_are_the_medians_and_nothing_where_nothing_was_measured() -> None:
    recording = Recording()
    events: list[Event] = [Metric("x", float(k), None, START + k * SECOND) for k in (0, 1, 2, 5, 7)]
    recording.feed(0, encode(0, events))
    (one,), seconds = sparks(recording, 8)
    assert seconds == 7
    assert characters(one) == "▁▂▃  ▆ █"
    assert (one.last, one.furthest, one.bounds) == ({0: 7.0}, None, (0.0, 7.0))


def test_the_rank_that_is_furthest_from_the_others_is_named() -> None:
    (one,), _ = sparks(recorded(5, "hvdlab/step_time", late=3), 10)
    assert one.middle == 60
    assert one.furthest == (3, 600)
    assert as_text(recorded(5, "hvdlab/step_time", late=3)).endswith("| 60 s, rank 3: 600 s")


def test_values_that_are_no_numbers_are_said_and_not_drawn() -> None:
    recording = Recording()
    values = (1.0, 2.0, math.nan, 3.0, math.inf, math.nan)
    events: list[Event] = [Metric("loss", value, None, START + k) for k, value in enumerate(values)]
    recording.feed(0, encode(0, events))
    (one,), _ = sparks(recording, 6)
    assert one.bounds == (1.0, 3.0)
    assert as_text(recording).endswith("| NaN")
    assert "NaN" in as_html(recording)


@pytest.mark.parametrize("ranks", [3, 64])
def test_the_still_picture_is_small(ranks: int) -> None:
    recording = recorded(ranks, *(f"metric {i} <b>" for i in range(20)), "hvdlab/cpu", "hvdlab/rss", late=2)
    text = as_html(recording)
    assert len(text) < 60_000
    assert text.count("<img") == 14
    assert "<b>" not in text.split("</div>", 1)[1]
    assert "rank 2: " in text


def test_lines_have_their_ranks_colours_and_are_where_the_values_are() -> None:
    (one,), _ = sparks(recorded(2, "x", late=1), 60)
    picture = draw(one, 30)
    assert picture.shape == (30, 60, 4)
    rows = [np.flatnonzero((picture[:, -1, :3] == RANKS[rank]).all(1)) for rank in (0, 1)]
    assert rows[1].max() < 4, "the greatest value is on top"
    assert rows[0].min() > 20
    data = png(picture)
    assert struct.unpack(">II", data[16:24]) == (60, 30)


def test_many_ranks_are_a_band_with_a_line() -> None:
    (one,), _ = sparks(recorded(20, "x", late=1), 60)
    picture = draw(one, 30)
    filled = (picture[..., 3] > 0).sum(0)
    assert filled[-1] > 20, "the range of all"
    assert set(np.unique(picture[..., 3])) == {0, 90, 255}


def cells(kind: str) -> Recording:
    """A rank with two cells, ten seconds apart, of which each has three points; then it is idle for long."""
    recording = Recording()
    recording.labels = {"1": "[1]", "2": "[2]"}
    events: list[Event] = []
    for cell, begin in ((1, 0), (2, 13)):
        events.append(CellBeginEvent(str(cell), START + begin * SECOND - 1))
        events += [Metric(kind, float(k), None, START + (begin + k) * SECOND) for k in range(3)]
        events.append(CellEndEvent(str(cell), START + (begin + 2) * SECOND + 1, True))
    events += [Metric("hvdlab/rss", 1.0, None, START + k * SECOND) for k in range(60)]
    recording.feed(0, encode(0, events))
    return recording


def test_no_line_goes_on_from_one_cell_to_the_next_and_pictures_end_with_the_last_event() -> None:
    found, seconds = sparks(cells("loss"), 160)
    assert 15 <= seconds < 16, "not the idle minute after it"
    column = 160 / seconds
    drawn = {one.name: np.any(draw(one, 30)[..., 3] > 0, axis=0) for one in found}
    assert drawn["loss"][: int(2 * column)].all()
    assert not drawn["loss"][int(2 * column) + 2 : int(13 * column) - 1].any()
    assert drawn["loss"][int(13 * column) + 1 : int(15 * column)].all()
    # Memory is measured at all times.
    assert drawn["hvdlab/rss"][: int(15 * column)].all()


def test_a_line_ends_where_a_process_does() -> None:
    recording = Recording()
    events: list[Event] = [Metric("hvdlab/rss", 1.0, None, START + k * SECOND) for k in range(20)]
    recording.feed(0, encode(0, events))
    (one,), _ = sparks(recording, 200)
    assert not one.apart.any()
    breaks = [START + 5 * SECOND + SECOND // 2]
    found = _apart(recording.points(0, "hvdlab/rss"), breaks, one.name, START, START + 19 * SECOND, 200)
    assert np.flatnonzero(found).tolist() == [6 * 200 // 19]


def test_constant_values_are_a_line_in_the_middle() -> None:
    recording = Recording()
    events: list[Event] = [Metric("lr", 0.1, k, START + k * SECOND) for k in range(10)]
    recording.feed(0, encode(0, events))
    (one,), _ = sparks(recording, 10)
    rows = np.flatnonzero(draw(one, 30)[:, 5, 3])
    assert rows.tolist() == [15, 16]
    assert len(set(characters(one))) == 1


def test_derived_series_are_there_too() -> None:
    recording = Recording()
    for rank, batch in steps(4, 200):
        recording.feed(rank, batch)
    text = as_text(recording)
    assert re.search(r"^compute +\|", text, re.MULTILINE)
    assert re.search(r"^allreduce bus +\|.*\| [\d.]+ [kMG]B/s", text, re.MULTILINE)


def test_names_and_values_read_well() -> None:
    names = ("hvdlab/gpu1/utilisation", "hvdlab/bandwidth/bus/allreduce", "hvdlab/rss", "val/loss")
    assert [title(name) for name in names] == ["GPU 1 utilisation", "allreduce bus", "memory", "val/loss"]
    values = [(0.0241, "s"), (3 * 2**30, "B"), (1.2e9, "B/s"), (0.374, "1"), (37.0, "%"), (12.5, "1/s")]
    assert [quantity(*one) for one in values] == ["24.1 ms", "3 GiB", "1.2 GB/s", "37%", "37%", "12.5/s"]
    assert quantity(-math.inf, "s") == "-∞"
    rates = (0, 600, 10_000, 999_800, 1.2e9)
    assert [quantity(one, "B/s") for one in rates] == ["0 B/s", "600 B/s", "10 kB/s", "1 MB/s", "1.2 GB/s"]
    assert [quantity(1020, "B"), quantity(12345, "s")] == ["1,020 B", "12,345 s"]
    assert [seconds(999.9e6), seconds(12345e9), seconds(0.5e3)] == ["1 s", "12,345 s", "500 ns"]


def test_the_widget_ends_and_knows_its_table() -> None:
    pytest.importorskip("anywidget")
    from hvdlab.widgets.views import metrics

    recording = recorded(2, "loss")
    view = metrics(recording)
    try:
        assert repr(view).startswith("Metrics: 2 ranks")
        assert len(view.table()) == 120
        assert "data:image/png" in view.still_picture()["text/html"]
    finally:
        view.close()
    assert not view._feed._thread.is_alive()
