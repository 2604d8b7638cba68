"""The kernel's side of the panel: messages to pages, their lifetime, and the effects of pools that come and go."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.protocol.messages import Member
from hvdlab.collectives.tracing.record_format import CellBeginEvent, CellEndEvent, encode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import Membership
from hvdlab.widgets import panel as panel_module
from hvdlab.widgets import recording_feed
from hvdlab.widgets.panel import Panel
from hvdlab.widgets.recording_feed import RecordingFeed
from support.effort import examples
from support.fuzz.protocol import run
from support.patience import HOUR, PATIENCE
from support.threads import ReportingLock
from support.timeline_traces import START_NS, steps


class Desk:
    """Desk that knows the recordings that a test gives it."""

    def __init__(self) -> None:
        self.recordings: dict[str, Recording | None] = {"": None}

    def recording(self, pool: str) -> Recording | None:
        if pool not in self.recordings:
            raise InvalidRequestError(f"there is no pool `{pool}`")
        return self.recordings[pool]

    def changeable(self, pool: str) -> None:
        return None

    def pools(self) -> list[dict[str, Any]]:
        return [{"id": name} for name in self.recordings]

    def run_command(self, what: str, content: Mapping[str, Any]) -> dict[str, Any]:
        raise InvalidRequestError(f"can't {what}")


class Page:
    """All that was sent."""

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

    def rows(self, pool: str = "", since: int = 0) -> int:
        return sum(m["count"] for m in self.messages[since:] if m["type"] == "rows" and m["pool"] == pool)

    def headings(self) -> list[str]:
        return [message["heading"] for message in self.messages if "heading" in message]


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture
def panel(desk: Desk, page: Page, monkeypatch: pytest.MonkeyPatch) -> Iterator[Panel]:
    monkeypatch.setattr(recording_feed, "INTERVAL", 0.005)
    monkeypatch.setattr(recording_feed, "QUIET", 0.05)
    monkeypatch.setattr(recording_feed, "ACTIVITY_INTERVAL", 0.01)
    one = Panel(page.send, desk)
    yield one
    one.close()


def feed(recording: Recording, count: int = 5, **more: Any) -> None:
    for rank, batch in steps(2, count, **more):
        recording.feed(rank, batch)


def hello(pool: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "hello", "pool": pool, "recording": "", "since": 0, "rows": True} | more


def test_a_page_is_told_that_there_are_no_ranks_and_gets_them_once_they_are_there(
    panel: Panel, desk: Desk, page: Page
) -> None:
    panel.receive(hello())
    assert page.messages == [{"type": "nothing", "pool": ""}]
    desk.recordings[""] = recording = Recording()
    feed(recording)
    panel.pool_changed()
    page.wait(lambda: page.rows() == recording.end)


def test_who_does_not_want_rows_gets_only_the_ranks(panel: Panel, desk: Desk, page: Page) -> None:
    desk.recordings[""] = recording = Recording()
    recording.take_membership(Membership(expected=(0, 1)))
    feed(recording)
    panel.receive(hello(rows=False))
    page.wait(lambda: page.headings() == ["0/2 ranks · idle"])
    assert page.rows() == 0
    panel.receive(hello())
    page.wait(lambda: page.rows() == recording.end)


def test_a_page_that_comes_back_gets_what_it_has_not(panel: Panel, desk: Desk, page: Page) -> None:
    desk.recordings[""] = recording = Recording()
    feed(recording)
    panel.receive(hello())
    page.wait(lambda: page.rows() == recording.end)
    name, before = page.messages[-1]["recording"], len(page.messages)
    panel.receive(hello(recording=name, since=recording.end - 7))
    page.wait(lambda: page.rows(since=before) == 7)
    # Its state of another recording is worth nothing.
    before = len(page.messages)
    panel.receive(hello(recording="another", since=recording.end - 7))
    page.wait(lambda: page.rows(since=before) == recording.end)


def test_another_pool_has_another_recording(panel: Panel, desk: Desk, page: Page) -> None:
    desk.recordings[""] = first = Recording()
    feed(first)
    panel.receive(hello())
    page.wait(lambda: page.rows() == first.end)
    name, before = page.messages[-1]["recording"], len(page.messages)
    desk.recordings[""] = second = Recording()
    feed(second, count=2)
    panel.pool_changed()
    page.wait(lambda: page.rows(since=before) == second.end)
    assert page.messages[-1]["recording"] != name


def test_pool_stopped_with_its_recording_is_not_sent_again(
    panel: Panel, desk: Desk, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.recordings[""] = recording = Recording()
    feed(recording)
    panel.receive(hello())
    page.wait(lambda: page.rows() == recording.end)
    hellos: list[int] = []
    monkeypatch.setattr(RecordingFeed, "view_ready", lambda feed, row, **more: hellos.append(row))
    recording.close()
    panel.pool_changed()
    assert hellos == []
    desk.recordings[""] = Recording()
    panel.pool_changed()
    assert hellos == [0]


def test_earlier_pool_that_no_page_shows_frees_its_recording(panel: Panel, desk: Desk, page: Page) -> None:
    desk.recordings[""] = Recording()
    panel.receive(hello())
    page.wait(lambda: page.messages)
    panel.receive(hello(), lease=1e-9)
    earlier = weakref.ref(desk.recordings[""])
    desk.recordings[""] = Recording()
    panel.pool_changed()
    gc.collect()
    assert earlier() is None


@pytest.mark.parametrize("has_ended", [False, True])
def test_other_pool_that_no_page_shows_frees_its_recording(
    panel: Panel, desk: Desk, page: Page, has_ended: bool
) -> None:
    desk.recordings["kept:mine"] = recording = Recording()
    panel.receive(hello("kept:mine"))
    page.wait(lambda: page.headings())
    feed_thread = panel._shown["kept:mine"].publisher._thread
    if has_ended:
        recording.close()
        feed_thread.join(PATIENCE)
    panel.receive(hello("kept:mine"), lease=1e-9)
    if not has_ended:
        feed(recording)  # the feed finds out with the next message
        feed_thread.join(PATIENCE)
    earlier = weakref.ref(recording)
    del recording, desk.recordings["kept:mine"]
    panel.receive(hello())
    gc.collect()
    assert earlier() is None


def test_the_end_of_the_ranks_is_told(panel: Panel, desk: Desk, page: Page) -> None:
    desk.recordings[""] = recording = Recording()
    feed(recording)
    panel.receive(hello())
    page.wait(lambda: page.rows() == recording.end)
    recording.close()
    page.wait(lambda: page.headings()[-1:] == ["stopped"])
    before = len(page.messages)
    panel.receive(hello())  # a page that is loaded then sees it all
    page.wait(lambda: page.rows(since=before) == recording.end)


def test_who_falls_silent_gets_nothing_any_more(desk: Desk, page: Page) -> None:
    desk.recordings[""] = recording = Recording()
    feed(recording)
    panel = Panel(page.send, desk, lease=0.0)
    try:
        panel.receive(hello())
        for thread in [t for t in threading.enumerate() if t.name == "hvdlab-timeline"]:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert page.rows() == 0
        panel.receive(hello(), lease=100.0)
        page.wait(lambda: page.rows() == recording.end)
    finally:
        panel.close()


def test_page_that_can_not_renew_is_served_while_a_cell_runs(panel: Panel, desk: Desk, page: Page) -> None:
    desk.recordings[""] = recording = Recording()
    recording.take_membership(Membership(members=(Member(5, pid=100, host="host"),)))
    recording.feed(5, encode(5, [CellBeginEvent("8", START_NS)]))
    feed(recording)
    panel.receive(hello(), lease=panel_module.LONG_LEASE)
    shown = panel._shown[""]
    page.wait(lambda: page.rows() == recording.end)
    before, shown.until, shown.rows_until = recording.end, 0.0, 0.0  # hours later
    feed(recording)
    page.wait(lambda: page.rows() == recording.end > before)
    recording.feed(5, encode(5, [CellEndEvent("8", START_NS + 1, True)]))
    shown.publisher._thread.join(PATIENCE)
    assert shown.ended


def test_pages_that_say_hello_at_once_share_one_feed(
    panel: Panel, desk: Desk, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.recordings[""] = recording = Recording()
    feed(recording)
    made: list[object] = []

    def make(*arguments: Any, **more: Any) -> RecordingFeed:
        made.append(one := RecordingFeed(*arguments, **more))
        return one

    # Both have found no feed when either of them makes one.
    both = threading.Barrier(2, timeout=PATIENCE)

    def changeable(pool: str) -> None:
        both.wait()

    monkeypatch.setattr(desk, "changeable", changeable)
    monkeypatch.setattr(panel_module, "RecordingFeed", make)
    pages = [threading.Thread(target=panel.receive, args=(hello(),)) for _ in range(2)]
    for thread in pages:
        thread.start()
    for thread in pages:
        thread.join()
    page.wait(lambda: page.rows() >= recording.end)
    assert [message for message in page.messages if message["type"] == "nothing"] == []
    assert len(made) == 1


def test_page_that_renews_while_its_lease_ends_is_served_on(
    panel: Panel, desk: Desk, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.recordings[""] = recording = Recording()
    feed(recording)
    renewed = threading.Event()

    def renew() -> None:
        panel.receive(hello(), lease=HOUR)
        renewed.set()

    page_thread = threading.Thread(target=renew)

    class EndingPool(panel_module.ShownPool):
        """Pool whose page renews its subscription when the feed has found it over."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "ended" and value and page_thread.ident is None:
                page_thread.start()
                assert renewed.wait(PATIENCE)
            super().__setattr__(name, value)

    monkeypatch.setattr(panel, "_changing", ReportingLock(renewed.set))
    monkeypatch.setattr(panel_module, "ShownPool", EndingPool)
    panel.receive(hello(), lease=HOUR)
    page.wait(lambda: page.rows() == recording.end)
    name, before = page.messages[-1]["recording"], len(page.messages)
    panel.receive(hello(recording=name, since=None), lease=1e-9)
    feed(recording)
    page.wait(lambda: page.rows(since=before) == recording.end)
    page_thread.join()


def test_pools_are_shown_side_by_side(panel: Panel, desk: Desk, page: Page) -> None:
    desk.recordings[""], desk.recordings["kept:night"] = own, other = Recording(), Recording()
    feed(own)
    feed(other, count=3)
    panel.receive(hello())
    panel.receive(hello("kept:night"))
    page.wait(lambda: page.rows() == own.end and page.rows("kept:night") == other.end)


def test_questions_are_answered(panel: Panel, page: Page) -> None:
    panel.receive({"type": "pools", "request": "7"})
    panel.receive({"type": "save", "request": "8"})
    panel.receive(hello("nowhere"))
    assert page.messages == [
        {"type": "answer", "request": "7", "pools": [{"id": ""}]},
        {"type": "answer", "request": "8", "error": "can't save"},
        {"type": "nothing", "pool": "nowhere", "text": "there is no pool `nowhere`"},
    ]


def test_a_hidden_page_may_be_silent_for_a_minute() -> None:
    # Browsers let hidden pages act once a minute.
    assert panel_module.LEASE > 60


def test_a_failure_without_a_text_is_answered_with_its_kind(
    panel: Panel, desk: Desk, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pool: str) -> None:
        raise MemoryError

    monkeypatch.setattr(desk, "recording", fail)
    panel.receive(hello())
    assert page.messages == [{"type": "nothing", "pool": "", "text": "MemoryError"}]


def test_whatever_a_page_asks_for_it_is_answered(panel: Panel, desk: Desk, page: Page) -> None:
    values: tuple[Any, ...] = (
        None,
        "",
        "a",
        -1,
        1 << 70,
        0.5,
        float("nan"),
        [],
        [1, "x"],
        {},
        {"a": 1},
        True,
    )
    kinds: tuple[Any, ...] = ("hello", "pools", "change", "save", 7, None, [], {})
    desk.recordings[""] = Recording()

    def one(chance: random.Random) -> None:
        content = {
            name: chance.choice(values)
            for name in ("pool", "recording", "since", "points", "rows", "what", "np", "ranks", "ends")
            if chance.random() < 0.5
        }
        kind, request = chance.choice(kinds), chance.randrange(1 << 30)
        before = len(page.messages)
        panel.receive(content | {"type": kind, "request": request})
        if kind != "hello":
            answers = [m for m in page.messages[before:] if m.get("request") == request]
            assert len(answers) == 1

    run(one, examples(300))
