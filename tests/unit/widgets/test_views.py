"""Views without a browser: messages to the browser, contents of a saved notebook, and output on a terminal."""

from __future__ import annotations

import queue
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.protocol.messages import Member
from hvdlab.collectives.tracing.record_format import (
    CellBeginEvent,
    CellEndEvent,
    Event,
    Members,
    Metric,
    Span,
    clock_domain,
    encode,
)
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import DType, Membership, OpKind
from hvdlab.widgets import recording_feed, still_lanes, views
from hvdlab.widgets.recording_feed import ROW_BYTES, RecordingFeed
from support.patience import PATIENCE
from support.timeline_traces import START_NS, steps

COLUMNS = [
    ("arrival", "<f8"),
    ("nbytes", "<f8"),
    *((n, "<f4") for n in ("ready", "started", "finished", "wait")),
]
COLUMNS += [("name", "<u4"), ("op", "<u4"), ("rank", "<u2"), ("size", "<u2"), ("kind", "u1"), ("flags", "u1")]


def feed(recording: Recording, ranks: int = 4, count: int = 20, **more: Any) -> None:
    for rank, batch in steps(ranks, count, **more):
        recording.feed(rank, batch)


def unpack(message: dict[str, Any], buffer: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Return the columns, as the script in the browser takes them apart."""
    found, at = {}, 0
    for name, kind in COLUMNS:
        found[name] = np.frombuffer(buffer, kind, message["count"], at)
        at += found[name].nbytes
    assert at == len(buffer) == message["count"] * ROW_BYTES
    return found


class Browser:
    """Receiver of messages in order, like the script; deaf until :meth:`listen`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.listening = False
        self.names: list[str] = []
        self.rows: list[tuple[int, int, float]] = []
        self.marks: dict[int, dict[str, Any]] = {}
        self.lost = self.gaps = self.cleared = 0
        self.quiet = 0
        self.drawn = (0, 0)  # rows, and rows that were cleared, at the last silence
        self.messages = 0

    def send(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        columns = unpack(message, buffers[0])
        with self.changed:
            self.messages += 1
            self.changed.notify_all()
            if not self.listening:
                return
            if message["after"] > len(self.rows):
                return  # the script asks for missed messages: not answered while a cell runs
            self.gaps += max(0, message["from"] - max(len(self.rows), message["cleared"]))
            self.lost = message["lost"] + self.gaps
            if message["cleared"] > self.cleared:
                self.cleared = message["cleared"]
                self.marks = {}
            self.names[message["namesFrom"] :] = message["names"]
            self.marks |= dict(message["marks"])
            known = len(self.rows) - message["from"]
            self.rows += [(-1, 0, 0.0)] * -known  # removed rows
            both = zip(
                columns["rank"].tolist(), columns["op"].tolist(), columns["arrival"].tolist(), strict=True
            )
            self.rows += list(both)[max(0, known) :]

    def refresh(self) -> None:
        with self.changed:
            self.quiet += 1
            self.drawn = len(self.rows), self.cleared
            self.changed.notify_all()

    def wait(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE)


@pytest.fixture
def recording() -> Recording:
    return Recording()


@pytest.fixture
def browser() -> Browser:
    return Browser()


@pytest.fixture
def sender(
    recording: Recording, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RecordingFeed]:
    monkeypatch.setattr(recording_feed, "ROWS_PER_MESSAGE", 1000)
    monkeypatch.setattr(recording_feed, "INTERVAL", 0.005)
    monkeypatch.setattr(recording_feed, "QUIET", 0.1)
    one = RecordingFeed(recording, browser.send, browser)
    yield one
    one.close()


def test_a_view_gets_all_rows_once_and_in_order(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    browser.listening = True
    sender.view_ready(0)
    feed(recording)
    browser.wait(lambda: len(browser.rows) == 4 * 20 * 40)
    _, rows = recording.rows_since(0)
    assert [row[0] for row in browser.rows] == rows["rank"].tolist()
    assert [row[1] for row in browser.rows] == rows["op"].tolist()
    origin = recording.origin_ns
    assert origin is not None
    assert [row[2] for row in browser.rows] == (rows["arrival"] - origin).tolist()
    assert browser.names == recording.names
    browser.wait(lambda: browser.drawn == (3200, 0))


def test_a_view_that_listens_late_gets_it_again(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    feed(recording, count=5)
    browser.wait(lambda: browser.messages)
    with browser.changed:
        browser.listening = True  # its hello waits as long as a cell runs
    browser.wait(lambda: len(browser.rows) == 4 * 5 * 40)
    feed(recording, count=5, seed=1)
    browser.wait(lambda: len(browser.rows) == 2 * 4 * 5 * 40)


def test_a_view_that_comes_back_gets_what_it_has_not(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    browser.listening = True
    sender.view_ready(0)
    feed(recording, count=5)
    browser.wait(lambda: len(browser.rows) == 800)
    with browser.changed:
        del browser.rows[300:]
    sender.view_ready(300)
    browser.wait(lambda: len(browser.rows) == 800)
    assert [row[1] for row in browser.rows] == recording.rows_since(0)[1]["op"].tolist()


def test_cells_are_told_when_they_begin_and_again_when_they_end(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    browser.listening = True
    sender.view_ready(0)
    recording.feed(0, encode(0, [CellBeginEvent("7", START_NS)]))
    browser.wait(lambda: 0 in browser.marks)
    assert browser.marks[0]["end"] is None
    recording.feed(0, encode(0, [CellEndEvent("7", START_NS + 500, True)]))
    browser.wait(lambda: browser.marks[0]["end"] == 500)


def test_what_was_cleared_is_told_to_open_views_and_not_sent_to_others(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    browser.listening = True
    sender.view_ready(0)
    recording.feed(0, encode(0, [CellBeginEvent("6", START_NS), CellEndEvent("6", START_NS + 500, True)]))
    feed(recording, count=5)
    browser.wait(lambda: len(browser.rows) == 800 and len(browser.marks) == 5)
    browser.wait(lambda: browser.drawn == (800, 0))
    recording.clear()
    browser.wait(lambda: browser.cleared == 800)
    assert {mark["text"] for mark in browser.marks.values()} == {"7"}, "cell [7] runs, [6] is forgotten"
    browser.wait(lambda: browser.drawn == (800, 800))
    feed(recording, count=1, seed=1)
    browser.wait(lambda: len(browser.rows) == 960)
    assert browser.lost == 0
    with browser.changed:
        browser.rows, browser.marks = [], {}
    sender.view_ready(0)  # the page was loaded again
    browser.wait(lambda: len(browser.rows) == 960)
    assert [row[0] for row in browser.rows].count(-1) == 800
    assert {mark["text"] for mark in browser.marks.values()} == {"7"}
    assert browser.lost == 0


def test_the_end_of_the_recording_ends_the_thread_after_all_is_sent(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    browser.listening = True
    sender.view_ready(0)
    feed(recording, count=5)
    recording.close()
    browser.wait(lambda: browser.drawn == (800, 0))
    sender._thread.join(PATIENCE)
    assert not sender._thread.is_alive()
    browser.rows.clear()
    sender.view_ready(0)  # the page was loaded again
    browser.wait(lambda: len(browser.rows) == 800)


def test_a_page_that_says_hello_while_the_thread_ends_gets_all(
    recording: Recording, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing, goes_on = threading.Event(), threading.Event()

    class SlowPicture:
        def refresh(self) -> None:
            drawing.set()
            assert goes_on.wait(PATIENCE)

    monkeypatch.setattr(recording_feed, "INTERVAL", 0.005)
    feed(recording)
    sender = RecordingFeed(recording, browser.send, SlowPicture())
    recording.close()
    try:
        assert drawing.wait(PATIENCE)  # the last picture, after all rows
        browser.listening = True
        sender.view_ready(0)
        goes_on.set()
        browser.wait(lambda: len(browser.rows) == 4 * 20 * 40)
    finally:
        goes_on.set()
        sender.close()


def test_the_picture_is_renewed_while_ranks_only_say_how_they_are(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    browser.listening = True
    sender.view_ready(0)
    feed(recording, count=5)
    browser.wait(lambda: len(browser.rows) == 800)
    deadline, at = time.monotonic() + PATIENCE, START_NS
    with browser.changed:
        while not browser.quiet and time.monotonic() < deadline:
            at += 10**7
            recording.feed(0, encode(0, [Metric("hvdlab/cpu", 3.0, None, at)]))
            browser.changed.wait(0.02)  # far less than it takes for silence
    assert browser.quiet


def test_what_was_dropped_before_it_could_be_sent_is_told(browser: Browser) -> None:
    recording = Recording(limit=16384)
    feed(recording, count=150)
    assert recording.dropped
    with_all = RecordingFeed(recording, browser.send, browser)
    browser.listening = True
    with_all.view_ready(0)
    browser.wait(lambda: len(browser.rows) == recording.end)
    assert browser.lost == recording.dropped == [row[0] for row in browser.rows].count(-1)
    with_all.close()


def test_rows_that_one_page_lacks_are_lost_to_no_other(browser: Browser) -> None:
    recording = Recording(limit=16384)
    feed(recording, count=150)
    assert recording.dropped > 10
    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    to_both = RecordingFeed(recording, lambda message, _: messages.put(message), browser)
    try:
        for since in (10, 0):
            to_both.view_ready(since)
            while (message := messages.get(timeout=PATIENCE))["after"] != since or not message["count"]:
                pass
            assert message["lost"] == recording.lost
    finally:
        to_both.close()


def test_a_tensor_that_was_given_no_name_has_none_in_views(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    names = ["barrier.noname", "grouped_allreduce.noname.3", "loss", "my.noname.net"]
    spans: list[Event] = [
        Span(name, OpKind.ALLREDUCE, DType.F32, 0, number, 0, 8, *(START_NS + number,) * 4, 0, 0, 0, 0)
        for number, name in enumerate(names)
    ]
    browser.listening = True
    sender.view_ready(0)
    recording.feed(0, encode(0, spans))
    browser.wait(lambda: len(browser.rows) == len(names))
    assert browser.names == ["", "", "tensor 3", "loss", "my.noname.net"]


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_the_still_picture_is_small_and_names_the_slow_rank() -> None:
    recording = Recording()
    feed(recording, ranks=64, count=8, slow_rank=5)
    text = still_lanes.as_html(recording)
    assert len(text) < 100_000
    assert text.count("<img") == still_lanes.RANKS_DRAWN
    assert "48 more ranks" in text
    assert re.search(r"others waited .* for rank 5, last in", text)
    assert [row["rank"] for row in recording_feed.rank_rows(recording) if row["slowest"]] == [5]


def test_no_rank_is_named_where_any_is_slow_at_times() -> None:
    recording = Recording()
    feed(recording)
    assert still_lanes.as_text(recording).split("\n")[0] == "Timeline: 4 ranks, 3,200 spans"
    assert not any(row["slowest"] for row in recording_feed.rank_rows(recording))


def test_pictures_are_valid_png_files() -> None:
    recording = Recording()
    feed(recording)
    lane = still_lanes.lanes(recording, 100)[0][0]
    drawn = still_lanes.draw(lane)
    data = still_lanes.png(drawn)
    width, height = struct.unpack(">II", data[16:24])
    length = struct.unpack(">I", data[33:37])[0]
    lines = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8).reshape(height, 1 + 4 * width)
    assert (lines[:, 0] == 2).all()
    assert (np.cumsum(lines[:, 1:], 0, dtype=np.uint8).reshape(height, width, 4) == drawn).all()


def test_shares_of_columns_are_those_of_the_intervals() -> None:
    begin, end = np.array([10, 12, 30, 95]), np.array([20, 15, 55, 100])
    edges = np.linspace(0, 100, 11)
    covered = np.zeros(100)
    for a, b in zip(begin, end, strict=True):
        covered[a:b] = 1
    assert still_lanes._covered(begin, end, edges).tolist() == covered.reshape(10, 10).mean(1).tolist()


def test_a_terminal_gets_text() -> None:
    recording = Recording()
    assert still_lanes.as_text(recording) == "Timeline: no collectives were recorded yet"
    feed(recording, slow_rank=1)
    lines = still_lanes.as_text(recording).split("\n")
    assert lines[0].startswith("Timeline: 4 ranks, 3,200 spans; others waited ")
    assert [line[:10] for line in lines[1:5]] == [f"rank   {rank} |" for rank in range(4)]


# -- where the data comes from ----------------------------------------------------------------------------------------


def test_without_ranks_it_says_how_to_start_some() -> None:
    with pytest.raises(InvalidRequestError, match="%hvd_pool start"):
        views.recording_of()
    with pytest.raises(TypeError, match="not str"):
        views.recording_of("pool")


def test_the_pool_that_the_notebook_knows_is_found() -> None:
    recording = Recording()

    def finder() -> Recording:
        return recording

    views.add_finder(finder)
    try:
        assert views.recording_of() is recording
    finally:
        views.remove_finder(finder)


def test_widgets_end_with_their_recording() -> None:
    pytest.importorskip("anywidget")
    from hvdlab.widgets.views import ranks, timeline

    recording = Recording()
    feed(recording)
    recording.feed(0, encode(0, [CellBeginEvent("7", START_NS)]))
    line, table = timeline(recording), ranks(recording)
    assert "rank   0 |" in repr(line)
    assert repr(table).startswith("Ranks: ")
    recording.close()
    line.close()
    table.close()


def test_a_view_is_told_about_the_ranks_when_they_change(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_feed, "QUIET", 0.05)
    monkeypatch.setattr(recording_feed, "ACTIVITY_INTERVAL", 0.02)
    changed, told = threading.Condition(), []

    def take(message: dict[str, Any], buffers: list[bytes]) -> None:
        with changed:
            told.append(message)
            changed.notify_all()

    def wait(condition: Any) -> None:
        with changed:
            assert changed.wait_for(condition, PATIENCE)

    recording.take_membership(Membership(expected=(0, 1)))
    one = RecordingFeed(recording, take)
    try:
        one.view_ready(0)
        wait(lambda: any("ranks" in message for message in told))
        first = next(message for message in told if "ranks" in message)
        assert first["heading"] == "0/2 ranks · idle"
        assert [(row["rank"], row["state"]) for row in first["ranks"]] == [(0, "starting"), (1, "starting")]
        feed(recording, ranks=2, count=1)
        # Also without further rows: the rest is sent when it is quiet.
        wait(lambda: sum(row["spans"] for message in told for row in message.get("ranks", ())) > 0)
        before = len(told)
        one.view_ready(0)
        wait(lambda: any("ranks" in message for message in told[before:]))
    finally:
        one.close()


def test_the_plane_in_use_is_shown_and_not_the_one_asked_for(recording: Recording) -> None:
    pytest.importorskip("anywidget")
    from hvdlab.widgets.views import ranks

    members = tuple(Member(rank, pid=100 + rank, host="host", plane="auto") for rank in range(3))
    recording.take_membership(Membership(members=members, expected=(0, 1, 2, 3)))
    assert [row["plane"] for row in recording_feed.rank_rows(recording)] == [""] * 4
    for rank in range(2):
        sets = [Members(number, 1, 2, START_NS, plane) for number, plane in enumerate(("shm", "shm", "gloo"))]
        recording.feed(rank, encode(rank, [*sets, Members(7, 1, 2, START_NS, "gloo")][: 4 - rank]))
    recording.feed(3, encode(3, [Members(0, 1, 2, START_NS, "shm")]))
    planes = [row["plane"] for row in recording_feed.rank_rows(recording)]
    assert planes == ["shm; sets 2, 7: gloo", "shm; set 2: gloo", "", ""]
    table = ranks(recording)
    table.close()
    assert "shm; set 2: gloo" in repr(table)


def test_a_rank_that_was_released_is_said_to_leave_while_it_still_runs(recording: Recording) -> None:
    members = tuple(Member(rank, pid=100 + rank, host="host") for rank in range(2))
    recording.take_membership(Membership((0, 1), members, leaving=(1,)))
    rows = recording_feed.rank_rows(recording)
    assert [(row["state"], row["reason"]) for row in rows] == [
        ("idle", ""),
        ("idle", "leaves at the next commit"),
    ]


def test_a_rank_that_waits_for_its_user_is_said_to(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    browser.listening = True
    sender.view_ready(0)
    # The first ranks of all are on this machine.
    recording.feed(0, encode(0, [Metric("hvdlab/cpu", 3.0, None, time.monotonic_ns())], clock=clock_domain()))
    members = tuple(Member(rank, pid=100 + rank, host="host") for rank in range(3))
    recording.take_membership(Membership(members=members, expected=(0, 1, 2)))
    recording.take_paused({1: "at a prompt", 2: "at a prompt"})
    rows = recording_feed.rank_rows(recording)
    assert [row["paused"] for row in rows] == ["", "at a prompt", "at a prompt"]
    assert recording_feed.heading(rows) == "3/3 ranks · idle · ranks 1, 2 are at a prompt"
    recording.take_paused({2: "stopped by the debugger"})
    assert recording_feed.heading(recording_feed.rank_rows(recording)).endswith(
        "rank 2 is stopped by the debugger"
    )
    browser.wait(
        lambda: (
            [m["text"] for m in browser.marks.values() if m["kind"] == "paused" and m["end"] is None]
            == ["rank 2 is stopped by the debugger"]
        )
    )
    assert [m["text"] for m in browser.marks.values() if m["kind"] == "paused" and m["end"] is not None] == [
        "rank 1 is at a prompt",
        "rank 2 is at a prompt",
    ]


def test_while_a_cell_runs_and_nothing_is_recorded_a_view_hears_that_the_kernel_lives(
    recording: Recording, browser: Browser, sender: RecordingFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_feed, "HEARTBEAT", 0.02)
    recording.take_membership(Membership(members=(Member(0, pid=100, host="host"),)))
    browser.listening = True
    sender.view_ready(0)
    recording.feed(0, encode(0, [CellBeginEvent("7", START_NS)]))
    browser.wait(lambda: browser.quiet >= 1)
    before = browser.messages
    browser.wait(lambda: browser.messages >= before + 3)
    drawn = browser.quiet
    before = browser.messages
    browser.wait(lambda: browser.messages >= before + 3)
    assert browser.quiet == drawn, "nothing is new, so that the picture stays"
    recording.feed(0, encode(0, [CellEndEvent("7", START_NS + 500, True)]))
    browser.wait(lambda: browser.quiet > drawn)
    assert not recording_feed.cell_runs(recording)


def test_a_page_that_was_loaded_again_gets_a_new_picture(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    sender.view_ready(0)
    feed(recording, count=1)
    browser.wait(lambda: browser.quiet >= 1)
    drawn = browser.quiet
    sender.view_ready(0)
    browser.wait(lambda: browser.quiet > drawn)


def test_the_table_of_ranks_is_alive_while_a_cell_runs_and_ended_with_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("anywidget")
    from hvdlab.widgets import rank_tables as ranks_widget

    monkeypatch.setattr(ranks_widget, "HEARTBEAT", 0.02)
    monkeypatch.setattr(ranks_widget, "RANKS_INTERVAL", 0.01)
    recording, sent = Recording(), threading.Semaphore(0)
    recording.labels = {"7": "[7]"}
    recording.take_membership(Membership(members=(Member(0, pid=100, host="host"),)))
    recording.feed(0, encode(0, [CellBeginEvent("7", START_NS)]))
    monkeypatch.setattr(ranks_widget.RanksWidget, "send", lambda *_: sent.release())
    widget = ranks_widget.RanksWidget(recording)
    try:
        for _ in range(3):
            assert sent.acquire(timeout=PATIENCE)
        assert widget.heading == "1/1 ranks · running [7]"
        recording.close()
        widget._thread.join(PATIENCE)
        assert widget.heading == "stopped"
        assert [row["state"] for row in widget.rows] == ["ended"]
    finally:
        widget.close()


def test_page_loaded_while_table_ends_gets_new_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget")
    from hvdlab.widgets import rank_tables as ranks_widget

    ending, goes_on, drawn = threading.Event(), threading.Event(), threading.Event()

    class EndingTable(ranks_widget.RanksWidget):
        def _run(self) -> None:
            super()._run()
            ending.set()
            assert goes_on.wait(PATIENCE)

    monkeypatch.setattr(ranks_widget, "RANKS_INTERVAL", 0.01)
    recording = Recording()
    widget = EndingTable(recording)
    try:
        recording.close()
        assert ending.wait(PATIENCE)
        monkeypatch.setattr(widget._output, "refresh", drawn.set)
        widget._receive(widget, {"type": "hello"}, [])
        goes_on.set()
        widget._thread.join(PATIENCE)
        assert drawn.is_set()
        drawn.clear()
        widget._receive(widget, {"type": "hello"}, [])
        assert drawn.is_set()
    finally:
        goes_on.set()
        widget.close()


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("name", ["RanksWidget", "MembershipWidget"])
def test_page_that_missed_news_of_table_gets_all_traits(
    name: str, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("anywidget")
    from hvdlab.widgets import rank_tables

    sent: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(rank_tables, "RANKS_INTERVAL", 0.01)
    monkeypatch.setattr(rank_tables, "MEMBERSHIP_INTERVAL", 0.01)
    recording = Recording()
    others = () if name == "RanksWidget" else (lambda: None,)
    widget = getattr(rank_tables, name)(recording, *others)
    try:
        if ended:
            recording.close()
            widget._thread.join(PATIENCE)
        monkeypatch.setattr(widget, "send_state", sent.put)
        widget._receive(widget, {"type": "hello"}, [])
        # Updates by the view itself send single traits.
        while "still" not in (traits := sent.get(timeout=PATIENCE)):
            pass
        assert {"rows", "membership"} & set(traits)
        assert "failed" in traits
        assert "_esm" not in traits
    finally:
        widget.close()
