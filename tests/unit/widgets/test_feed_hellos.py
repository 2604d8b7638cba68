"""Hellos of pages to one feed: those of several pages at once, and those that come after the feed's thread has failed."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from hvdlab.collectives.tracing.recording import Recording
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

    feed = RecordingFeed(recording, send, lambda: None)
    try:
        assert begins.get(timeout=PATIENCE) == 0
        feed.view_ready(100)
        feed.view_ready(300)
        said.set()
        assert begins.get(timeout=PATIENCE) == 100
    finally:
        said.set()
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

    feed = TakingFeed(recording, lambda message, buffers: begins.put(message["from"]), lambda: None)
    try:
        assert begins.get(timeout=PATIENCE) == 0
        feed._starting = ReportingLock(second_said.set)  # type: ignore[assignment]  # as much of a lock as a feed needs
        feed.view_ready(300)
        while begins.get(timeout=PATIENCE) != 100:
            pass
        second_page.join(PATIENCE)
    finally:
        feed.close()
