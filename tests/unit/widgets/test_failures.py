"""A view that can't be drawn reports it in itself, continues to draw, and never prints under the user's cell."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("anywidget")

from hvdlab.collectives.tracing.record_format import CellBeginEvent, encode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets import metrics, rank_tables, recording_feed, still_charts, still_lanes, strip, timeline
from hvdlab.widgets.panel import Panel
from hvdlab.widgets.recording_feed import RecordingFeed
from support.patience import PATIENCE
from support.timeline_traces import START_NS, steps

TEXT = "IndexError: index 0 is out of bounds"


def broken(*_: object, **__: object) -> Any:
    raise IndexError("index 0 is out of bounds")


class Page:
    """Page that keeps the messages sent."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE), self.messages

    @property
    def rows(self) -> int:
        """Rows before this number have come; some of them twice, if they were sent before the page listened."""
        return max((message["from"] + message["count"] for message in self.messages), default=0)

    @property
    def points(self) -> int:
        return max((message["pointsTo"] for message in self.messages), default=0)

    @property
    def failures(self) -> list[str]:
        told = [message["failures"] for message in self.messages if "failures" in message]
        return [failure["text"] for failure in told[-1]] if told else []


class Desk:
    def __init__(self, recording: Recording) -> None:
        self.known = recording

    def recording(self, pool: str) -> Recording | None:
        return self.known

    def changeable(self, pool: str) -> None:
        return None

    def pools(self) -> list[dict[str, Any]]:
        return []

    def run_command(self, what: str, content: Mapping[str, Any]) -> dict[str, Any]:
        return broken()  # type: ignore[no-any-return]  # it returns nothing


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    monkeypatch.setattr(recording_feed, "INTERVAL", 0.005)
    monkeypatch.setattr(recording_feed, "QUIET", 0.05)
    monkeypatch.setattr(rank_tables, "RANKS_INTERVAL", 0.005)
    monkeypatch.setattr(recording_feed, "ACTIVITY_INTERVAL", 0.005)
    return Recording()


@pytest.fixture(autouse=True)
def silence(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> Any:
    """Nothing that a notebook would show under the cell that runs."""
    yield
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert capsys.readouterr() == ("", "")


def feed(recording: Recording, seed: int = 1) -> None:
    for rank, batch in steps(2, 20, seed=seed):
        recording.feed(rank, batch)


def shown(recording: Recording, page: Page, kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return one of the views that a publisher feeds, on a page that listens."""
    if kind == "panel":
        panel = Panel(page.send, Desk(recording))
        panel.receive({"type": "hello", "rows": True, "since": 0})
        return panel
    cls: Any = {"timeline": timeline.TimelineWidget, "metrics": metrics.MetricsWidget}[kind]
    monkeypatch.setattr(cls, "send", lambda self, message, buffers: page.send(message, buffers))
    widget = cls(recording)
    widget._receive(widget, {"type": "hello", "since": 0, "points": 0}, [])
    return widget


@pytest.mark.parametrize("kind", ["timeline", "metrics", "panel"])
def test_a_view_says_what_failed_and_draws_on(
    kind: str, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page()
    monkeypatch.setattr(recording_feed, "summarize", broken)
    view = shown(recording, page, kind, monkeypatch)
    feed(recording)
    page.wait(lambda: any(TEXT in failure for failure in page.failures))
    if kind != "metrics":
        page.wait(lambda: page.rows == recording.end)
    page.wait(lambda: page.points == recording.points_end)
    monkeypatch.undo()
    monkeypatch.setattr(
        type(view), "send", lambda self, message, buffers: page.send(message, buffers), raising=False
    )
    feed(recording, seed=2)
    page.wait(lambda: [message["ranks"] for message in page.messages if "ranks" in message])
    view.close()


@pytest.mark.parametrize("times", [1, 10**9])
def test_rows_that_can_not_be_packed_come_again_and_are_passed_over_at_last(
    times: int, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, pack = [times], recording_feed.pack_rows

    def pack_rows(rows: Any, origin: int) -> bytes:
        if len(rows) and rows["op"].max() and left[0] > 0 and recording.end == first:
            left[0] -= 1
            broken()
        return pack(rows, origin)

    monkeypatch.setattr(recording_feed, "pack_rows", pack_rows)
    feed(recording)
    first, page = recording.end, Page()
    view = RecordingFeed(recording, page.send)
    view.view_ready(0)
    page.wait(lambda: any(TEXT in failure for failure in page.failures))
    if times == 1:
        page.wait(lambda: page.rows == first)
    else:
        page.wait(lambda: page.messages[-1]["lost"] == first)
        feed(recording, seed=2)
        page.wait(lambda: page.rows == recording.end)
    view.close()


def test_what_could_not_be_sent_is_sent_again(recording: Recording) -> None:
    feed(recording)
    page, left = Page(), [2]

    def send(message: dict[str, Any], buffers: list[bytes]) -> None:
        if left[0] > 0:
            left[0] -= 1
            broken()
        page.send(message, buffers)

    view = RecordingFeed(recording, send)
    view.view_ready(0)
    feed(recording, seed=2)
    page.wait(lambda: page.rows == recording.end)
    page.wait(lambda: page.points == recording.points_end)
    assert page.messages[-1]["lost"] == 0
    view.close()


def test_the_table_of_ranks_says_what_failed_and_goes_on(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = threading.Event()
    monkeypatch.setattr(recording_feed, "summarize", broken)
    table = rank_tables.RanksWidget(recording)
    assert TEXT in table.failed[0]["text"]
    assert "broken" in table.failed[0]["trace"]
    monkeypatch.undo()
    table.observe(lambda _: changed.set(), "rows")
    feed(recording)
    assert changed.wait(PATIENCE)
    assert [row["rank"] for row in table.rows] == [0, 1]
    table.close()


@pytest.mark.parametrize("kind", ["timeline", "metrics", "ranks"])
def test_a_picture_that_can_not_be_drawn_says_so(
    kind: str, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(recording)
    if kind == "ranks":
        monkeypatch.setattr(rank_tables.RanksWidget, "_lines", broken)
        widget: Any = rank_tables.RanksWidget(recording)
    elif kind == "metrics":
        monkeypatch.setattr(still_charts, "sparks", broken)
        widget = metrics.MetricsWidget(recording)
    else:
        monkeypatch.setattr(still_lanes, "lanes", broken)
        widget = timeline.TimelineWidget(recording)
    sent: list[Any] = []
    widget._output.publish = lambda *arguments: sent.append(arguments)
    widget._ipython_display_()
    assert TEXT in sent[0][0]["text/plain"]
    assert TEXT in sent[0][0]["text/html"]
    assert widget._output.name in sent[0][0]["text/html"]
    widget.close()


def test_the_strip_says_what_failed_and_goes_on(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strip, "recent_activity", broken)
    recording.feed(0, encode(0, [CellBeginEvent("[7]", START_NS)]))
    feed(recording)
    one = strip.StripWidget(recording, range(2), "[7]", time.monotonic(), lambda *_: None)
    feed(recording, seed=2)
    one.refresh(time.monotonic(), "")
    assert TEXT in one.pace["failed"]
    assert TEXT in one.text()
    assert TEXT in one.summary(time.monotonic())
    recording.take_paused({1: "at a prompt"})
    monkeypatch.undo()
    feed(recording, seed=3)
    one.refresh(time.monotonic(), "")
    assert [rank["known"] for rank in one.pace["ranks"]] == [True, True]
    one.close()


@pytest.mark.parametrize("kind", ["timeline", "metrics"])
def test_nonsense_from_a_page_is_kept_in_the_view(
    kind: str, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = shown(recording, Page(), kind, monkeypatch)
    view._receive(view, {"type": "hello", "since": "x"}, [])
    assert "ValueError" in view.failures.all()[0].text
    view.close()


def test_what_the_panel_can_not_do_is_answered(recording: Recording) -> None:
    page = Page()
    panel = Panel(page.send, Desk(recording))
    panel.receive({"type": "save", "request": 7})
    assert page.messages == [{"type": "answer", "request": 7, "error": "index 0 is out of bounds"}]
    panel.receive({"type": "hello", "since": 0, "points": "x"})
    assert page.messages[-1]["type"] == "nothing"
    panel.close()
