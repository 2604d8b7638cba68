"""Another thread goes on while one waits for the user."""

from __future__ import annotations

import contextvars
import threading
from queue import SimpleQueue

import pytest

from hvdlab.kernel_ext.notebook.stdin import drive_meanwhile

LONG = 30.0  # seconds until a wait for the other thread fails


def test_it_goes_on_on_another_thread_and_ends_with_the_block() -> None:
    events: SimpleQueue[str | None] = SimpleQueue()
    taken: list[str | None] = []
    both = threading.Event()

    def step() -> None:
        taken.append(events.get())
        if len(taken) == 2:
            both.set()

    with drive_meanwhile(step, lambda: events.put(None), lambda: None):
        events.put("a")
        events.put("b")
        assert both.wait(LONG)
    events.put("c")
    assert taken == ["a", "b", None]
    assert events.get() == "c"


def test_it_has_what_the_context_says() -> None:
    cell = contextvars.ContextVar[str]("cell", default="none")
    cell.set("mine")
    seen: SimpleQueue[str] = SimpleQueue()
    go = threading.Semaphore(1)

    def step() -> None:
        go.acquire()
        seen.put(cell.get())

    with drive_meanwhile(step, go.release, lambda: None):
        assert seen.get(timeout=LONG) == "mine"


def test_an_error_ends_the_wait_and_is_raised_where_the_work_is() -> None:
    failed = threading.Event()

    def step() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"), drive_meanwhile(step, lambda: None, failed.set):
        assert failed.wait(LONG)
