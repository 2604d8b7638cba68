"""A pool that is started in the background, while the user still types."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.error import UsageError

from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.kernel.pool_defaults import PoolDefaults
from hvdlab.magics.notebook_pool import Interrupted, NotebookPool
from support.fakes.notebook import FakePool, Notebook


class SlowStart:
    """``Pool.start`` that reports a step and waits until it may go on."""

    def __init__(self) -> None:
        self.go, self.error = threading.Event(), None
        self.pools: list[FakePool] = []
        self.asked: list[dict[str, Any]] = []

    def __call__(self, *, on_progress: Callable[[str], None], **arguments: Any) -> FakePool:
        self.asked.append(arguments)
        on_progress("starting slowly")
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        self.pools.append(FakePool(**arguments))
        return self.pools[-1]


@pytest.fixture
def start() -> Iterator[SlowStart]:
    slow = SlowStart()
    yield slow
    slow.go.set()


@pytest.fixture
def session(notebook: Notebook, start: SlowStart, monkeypatch: pytest.MonkeyPatch) -> Iterator[NotebookPool]:
    session = NotebookPool(notebook.shell)
    monkeypatch.setattr(session, "start_pool", start)
    yield session
    start.go.set()
    session.close()


def test_it_is_there_without_being_asked_for(session: NotebookPool, start: SlowStart) -> None:
    there = threading.Event()
    session.watchers.append(there.set)
    start.go.set()
    session.start_in_background(lambda: PoolDefaults(np=3, launcher="mpi"))
    assert there.wait(20)
    pool = session.pool_unchecked
    assert pool is start.pools[0]
    assert pool is not None
    assert (pool.size, pool.launcher) == (3, "mpi")


def test_who_needs_it_waits_and_later_pools_are_like_it(session: NotebookPool, start: SlowStart) -> None:
    session.start_in_background(lambda: PoolDefaults(np=3))
    threading.Timer(0.05, start.go.set).start()
    pool = session.need_pool("%hvd_pool")
    assert pool.size == 3
    pool.stop()
    assert session.pool_for(None).size == 3
    session.need_pool("%hvd_pool").stop()
    assert session.pool_for(2).size == 2


def test_what_went_wrong_is_told_once_and_the_next_try_starts_anew(
    session: NotebookPool, start: SlowStart
) -> None:
    start.error = StartError("no room")  # type: ignore[assignment]
    start.go.set()
    session.start_in_background(lambda: PoolDefaults(np=3))
    with pytest.raises(UsageError, match="no room"):
        session.pool_for(None)
    start.error = None
    assert session.pool_for(None).size == 3


def test_wishes_that_are_not_understood_are_told_in_a_sentence(session: NotebookPool) -> None:
    def wishes() -> PoolDefaults:
        raise StartError("that is no number")

    session.start_in_background(wishes)
    with pytest.raises(UsageError, match="that is no number"):
        session.pool_for(None)


def test_after_an_interrupt_it_goes_on_starting(session: NotebookPool, start: SlowStart) -> None:
    session.start_in_background(lambda: PoolDefaults(np=2))
    main, over = threading.main_thread().ident or 0, threading.Event()

    def press() -> None:
        while not over.is_set() and not _waits_in(main, "pool_for"):
            time.sleep(0.001)
        # Python does not notice one that comes in the moment in which it begins to wait.
        while not over.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            over.wait(5)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(Interrupted, match="the ranks go on starting"):
            session.pool_for(None)
    finally:
        over.set()
        thread.join()
    start.go.set()
    assert session.pool_for(None) is start.pools[0]
    assert len(start.asked) == 1


def _waits_in(thread: int, function: str) -> bool:
    names = [frame.name for frame in traceback.extract_stack(sys._current_frames()[thread])]
    return function in names and names[-1] == "wait"


def test_one_that_nobody_wants_any_more_ends_when_it_is_there(
    session: NotebookPool, start: SlowStart
) -> None:
    session.start_in_background(lambda: PoolDefaults(np=2))
    threading.Timer(0.05, start.go.set).start()
    session.close()
    assert start.pools[0].state == "stopped"
    assert session.pool_unchecked is None
