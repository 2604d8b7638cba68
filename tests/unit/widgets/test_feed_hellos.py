"""Hellos of pages to one feed: those of several pages at once, and those that come after the feed's thread has failed."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets import recording_feed
from hvdlab.widgets.recording_feed import RecordingFeed
from support.patience import PATIENCE
from support.threads import ReportingLock
from support.timeline_traces import steps


@pytest.fixture
def recording() -> Recording:
    made = Recording()
    for rank, batch in steps(4, 5):
        made.feed(rank, batch)
    return made


def test_two_pages_said_hello_at_once_feed_begins_at_lower_row(recording: Recording) -> None:
    begins: queue.Queue[int] = queue.Queue()
    said = threading.Event()

    def send(message: dict[str, Any], buffers: list[bytes]) -> None:
        begins.put(message["from"])
        assert said.wait(PATIENCE)

    feed = RecordingFeed(recording, send)
    try:
        assert begins.get(timeout=PATIENCE) == 0
        feed.view_ready(100)
        feed.view_ready(300)
        said.set()
        assert begins.get(timeout=PATIENCE) == 100
    finally:
        said.set()
        feed.close()


def test_quiet_feed_shows_page_the_end_of_what_was_sent(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_feed, "QUIET", 0.05)
    numbers: queue.Queue[tuple[int, int]] = queue.Queue()
    feed = RecordingFeed(recording, lambda message, _: numbers.put((message["after"], message["count"])))
    try:
        feed.view_ready(0)
        while numbers.get(timeout=PATIENCE) != (0, recording.end):
            pass
        for rank, batch in steps(4, 1):
            recording.feed(rank, batch)
        # A page that missed these rows finds out by this message.
        while numbers.get(timeout=PATIENCE) != (recording.end, 0):
            pass
    finally:
        feed.close()


def test_hello_while_another_one_is_taken_is_served_too(recording: Recording) -> None:
    begins: queue.Queue[int] = queue.Queue()
    second_said = threading.Event()

    def say_hello() -> None:
        feed.view_ready(100)
        second_said.set()

    second_page = threading.Thread(target=say_hello)

    class TakingFeed(RecordingFeed):
        """Feed that takes a page's hello while a second page says its own."""

        def __setattr__(self, name: str, value: Any) -> None:
            taken = name == "_since" and value is None and self.__dict__.get("_since") is not None
            if taken and second_page.ident is None:
                second_page.start()
                assert second_said.wait(PATIENCE)
            super().__setattr__(name, value)

    feed = TakingFeed(recording, lambda message, buffers: begins.put(message["from"]))
    try:
        assert begins.get(timeout=PATIENCE) == 0
        feed._starting = ReportingLock(second_said.set)  # type: ignore[assignment]  # as much of a lock as a feed needs
        feed.view_ready(300)
        while begins.get(timeout=PATIENCE) != 100:
            pass
        second_page.join(PATIENCE)
    finally:
        feed.close()


def test_hello_after_a_thread_could_not_start_starts_one(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins: queue.Queue[int] = queue.Queue()
    recording.close()
    feed = RecordingFeed(recording, lambda message, buffers: begins.put(message["count"]))
    try:
        feed._thread.join(PATIENCE)

        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="can't start"):
                feed.view_ready(0)
        while not begins.empty():
            begins.get()
        feed.view_ready(0)
        assert begins.get(timeout=PATIENCE) == recording.end
    finally:
        feed.close()


def test_hello_after_the_thread_has_died_starts_another(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: queue.Queue[int] = queue.Queue()
    died = threading.Event()

    def fail(*_: object) -> None:
        raise MemoryError

    feed = RecordingFeed(recording, lambda message, buffers: counts.put(message["count"]))
    try:
        assert counts.get(timeout=PATIENCE) == recording.end
        with monkeypatch.context() as broken:
            broken.setattr(threading, "excepthook", lambda arguments: died.set())
            broken.setattr(feed, "_again_from", fail)
            thread = feed._thread
            feed.view_ready(0)
            thread.join(PATIENCE)
            assert died.is_set()
        feed.view_ready(0)
        assert counts.get(timeout=PATIENCE) == recording.end
    finally:
        feed.close()


def test_rows_that_can_not_be_read_come_with_the_next_news(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: queue.Queue[int] = queue.Queue()
    reads, failed = 0, threading.Event()
    rows_since = recording.rows_since

    def fail_thrice(number: int, most: int | None = None) -> Any:
        nonlocal reads
        if most is None:  # it is for the table of ranks
            return rows_since(number)
        reads += 1
        if reads > 3:
            return rows_since(number, most)
        if reads == 3:
            failed.set()
        raise MemoryError

    monkeypatch.setattr(recording, "rows_since", fail_thrice)
    feed = RecordingFeed(recording, lambda message, buffers: counts.put(message["count"]))
    try:
        assert failed.wait(PATIENCE)
        feed.view_ready(0)
        while counts.get(timeout=PATIENCE) != recording.end:
            pass
    finally:
        feed.close()
