"""Text of the strip under a running cell, without a browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("anywidget")

from hvdlab.collectives.protocol.messages import Member
from hvdlab.collectives.tracing.record_format import (
    CellBeginEvent,
    CellEndEvent,
    Metric,
    clock_domain,
    encode,
)
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import Membership
from hvdlab.widgets.strip import StripWidget, cell_begin, summary_html
from support.patience import PATIENCE
from support.timeline_traces import START_NS, steps

LABELS = {"7": "[7]", "8": "[8]"}

shown: list[Any] = []


def show(*arguments: Any) -> None:
    shown.append(arguments)


@pytest.fixture
def strip() -> Iterator[StripWidget]:
    shown.clear()
    recording = Recording()
    recording.labels = LABELS
    recording.feed(0, encode(0, [CellBeginEvent("7", START_NS - 5000)]))
    widget = StripWidget(recording, range(4), "[7]", time.monotonic(), show)
    yield widget
    widget.close()


def test_who_is_at_a_prompt_is_said_also_while_the_cell_s_thread_waits(strip: StripWidget) -> None:
    recording = strip._recording
    recording.take_paused({2: "at a prompt", 9: "at a prompt"})
    assert strip.pace["paused"] == "rank 2 is at a prompt", "rank 9 is not of this cell"
    assert [one["paused"] for one in strip.pace["ranks"]] == ["", "", "at a prompt", ""]
    assert "rank 2 is at a prompt" in strip.text()
    recording.take_paused({})
    assert strip.pace["paused"] == ""
    strip.close()
    assert recording.when_paused == []


def feed(strip: StripWidget, count: int = 20, slow_rank: int | None = None) -> None:
    for rank, batch in steps(4, count, seed=1, slow_rank=slow_rank):
        strip._recording.feed(rank, batch)


def test_before_the_first_collective_no_share_is_claimed(strip: StripWidget) -> None:
    assert [one["known"] for one in strip.pace["ranks"]] == [False] * 4
    assert strip.pace["silent"] == -1
    assert strip.text() == "4 ranks · running [7]"
    assert strip.summary(time.monotonic()) == ""


def test_it_follows_the_recording(strip: StripWidget) -> None:
    feed(strip, slow_rank=2)
    strip.refresh(strip._begun + 3, "rank 2 is late\nand more")
    now = strip.pace
    assert all(one["known"] for one in now["ranks"])
    assert all(
        one["compute"] + one["wait"] + one["work"] == pytest.approx(1, abs=0.02) for one in now["ranks"]
    )
    assert [one["slowest"] for one in now["ranks"]] == [False, False, True, False]
    assert now["note"].startswith("others wait for rank 2 (")
    assert now["rate"].endswith("collectives/s")
    assert now["stalled"] == "rank 2 is late"
    assert now["elapsed"] == 3
    assert now["silent"] == 0


def test_no_rank_is_named_where_any_is_slow_at_times(strip: StripWidget) -> None:
    feed(strip)
    strip.refresh(strip._begun + 3, "")
    assert not any(one["slowest"] for one in strip.pace["ranks"])
    assert strip.pace["note"] == ""
    assert "others waited" not in strip.summary(strip._begun + 3)


def test_nothing_is_sent_while_nothing_changes(strip: StripWidget) -> None:
    feed(strip)
    strip.refresh(time.monotonic(), "")
    sent: list[Any] = []
    strip.observe(sent.append, "pace")
    strip._sent = float("inf")  # no heartbeat is due
    for later in range(1, 20):
        strip.refresh(time.monotonic() + later, "")
    assert sent == []


def test_while_nothing_changes_a_heartbeat_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the thread that drives the cell waits for its user's answer."""
    monkeypatch.setattr("hvdlab.widgets.strip.HEARTBEAT", 0.01)
    widget = StripWidget(Recording(), range(2), "[7]", time.monotonic() - 60, show)
    try:
        beats: list[Any] = []
        three = threading.Event()

        def count(change: Any) -> None:
            beats.append(change["new"])
            if len(beats) == 3:
                three.set()

        widget.observe(count, "pace")
        assert three.wait(PATIENCE)
        assert beats[-1]["elapsed"] >= 60
        assert {**beats[-1], "elapsed": 0} == {**widget.pace, "elapsed": 0}
    finally:
        widget.close()


def test_the_last_state_says_that_the_cell_has_ended_and_stays(strip: StripWidget) -> None:
    feed(strip)
    strip.finish(strip._begun + 27)
    strip.refresh(time.monotonic(), "rank 1 waits")
    assert strip.pace["ended"]
    assert strip.pace["elapsed"] == 27
    assert strip.pace["title"] == "4 ranks · [7]"
    assert strip.pace["elsewhere"] == "`%hvd_output 7` shows all that it wrote"
    assert strip.pace["ranks"] == []


def test_the_end_of_the_pool_ends_the_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlab.widgets.strip.HEARTBEAT", 0.01)
    recording = Recording()
    widget = StripWidget(recording, range(2), "[7]", time.monotonic(), show)
    try:
        recording.close()
        widget._beating.join(PATIENCE)
        assert widget.pace["ended"]
    finally:
        widget.close()


def test_where_no_kernel_is_it_says_where_the_output_is(strip: StripWidget) -> None:
    still = strip.still()
    assert still["text/plain"] == "4 ranks · [7] · `%hvd_output 7` shows all that it wrote"
    assert f'class="hvd-still {strip.pace["still"]}"' in still["text/html"]


def test_ranks_that_join_and_die_are_known(strip: StripWidget) -> None:
    feed(strip)
    there = tuple(Member(rank, pid=100 + rank, host="host") for rank in (0, 2, 3, 4))
    strip._recording.take_membership(Membership(members=there))
    strip.began(4)
    strip.refresh(time.monotonic(), "")
    assert [one["rank"] for one in strip.pace["ranks"]] == [0, 2, 3, 4]
    assert strip.pace["heading"] == "4 ranks · running [7]"
    assert strip.summary(strip._begun + 2).startswith("5 ranks, rank 1 is gone · 2")


def test_steps_are_told_if_ranks_report_them(strip: StripWidget) -> None:
    feed(strip)
    for step in range(5):
        strip._recording.feed(1, encode(1, [Metric("hvdlab/step_time", 0.08, step, START_NS + step)]))
    strip.refresh(time.monotonic(), "")
    assert strip.pace["rate"] == "12.5 steps/s"


def test_the_summary_is_one_short_line(strip: StripWidget) -> None:
    feed(strip)
    text = strip.summary(strip._begun + 2)
    assert "steps" not in text
    assert text.startswith("4 ranks · 2")
    assert "waiting for others" in text
    assert "\n" not in text
    assert len(text) < 250
    assert "<script>" not in summary_html("<script>")


def test_the_summary_s_rate_is_of_the_whole_cell(strip: StripWidget) -> None:
    """Three steps, of which the first takes long, have two step times, both of quick ones."""
    feed(strip)
    for step in (11, 12):
        strip._recording.feed(
            1, encode(1, [Metric("hvdlab/step_time", 0.015, step, START_NS + step * 15_000_000)])
        )
    text = strip.summary(strip._begun + 8.57)
    assert "8.57 s · 3 steps, 0.35/s (66.7/s at the end) · " in text


def test_only_the_cell_itself_counts() -> None:
    recording = Recording()
    for rank, batch in steps(2, 5):
        recording.feed(rank, batch)
    assert cell_begin(recording, [0, 1], "7") is None, "that cell has ended"
    end = int(recording.rows_since(0)[1]["arrival"].max()) + 10**9
    recording.feed(0, encode(0, [CellBeginEvent("8", end)]))
    assert cell_begin(recording, [0, 1], "8") == end
    assert cell_begin(recording, [1], "8") is None


def test_nothing_of_earlier_cells_is_claimed_where_the_cell_s_begin_comes_late() -> None:
    """Ranks that call no collective report the begin of their cell late, or after its end."""
    recording = Recording()
    recording.labels = LABELS
    for rank, batch in steps(2, 5):
        recording.feed(rank, batch)
    widget = StripWidget(recording, range(2), "[8]", time.monotonic(), show)
    try:
        widget.refresh(widget._begun + 1, "")
        assert widget.text() == "2 ranks · running [8]"
        assert widget.summary(widget._begun + 1) == ""
        end = int(recording.rows_since(0)[1]["arrival"].max()) + 10**9
        recording.feed(0, encode(0, [CellBeginEvent("8", end)]))
        assert widget.summary(widget._begun + 1) == ""
    finally:
        widget.close()


def test_a_cell_that_has_ended_is_told_from_an_earlier_one_by_this_clock() -> None:
    recording = Recording()
    begun = time.monotonic_ns()
    for at in (begun - 10**9, begun + 1000):
        recording.feed(
            0,
            encode(0, [CellBeginEvent("8", at), CellEndEvent("8", at + 500, ok=True)], clock=clock_domain()),
        )
    assert recording.clock_offset_ns() == 0
    assert cell_begin(recording, [0], "8") is None
    assert cell_begin(recording, [0], "8", begun) == begun + 1000


def test_page_that_missed_news_of_strip_gets_state(
    strip: StripWidget, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(strip, "send_state", sent.append)
    strip._receive(strip, {"type": "hello"}, [])
    assert sent == ["pace"]


def test_a_click_shows_the_timeline_under_the_cell(strip: StripWidget) -> None:
    feed(strip)
    strip._handle_custom_msg({"type": "something"}, [])
    assert not shown
    strip._handle_custom_msg({"type": "open"}, [])
    (still, _, name, update), (view, _, nowhere, _) = shown
    assert "Timeline: 4 ranks" in still["text/plain"]
    assert name.startswith("hvdlab-timeline-")
    assert not update
    assert "application/vnd.jupyter.widget-view+json" in view
    assert nowhere == ""
    assert strip.opened == 1
    strip._timeline.close()
