"""The shell that drives a run: threads, time limits, credit and the order of its calls."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import pytest

from hvdlab.kernel_ext.notebook.cells import driver
from hvdlab.kernel_ext.notebook.cells.cell_events import (
    DoneArrived,
    Event,
    OutputArrived,
    PoolNews,
    PromptAsked,
)
from hvdlab.kernel_ext.notebook.cells.cell_state import CellState
from hvdlab.kernel_ext.notebook.cells.driver import BACKLOG, CellHandle
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.notebook.output.transcript import GuardedSink
from hvdlab.kernel_ext.notebook.stdin import PromptDesk, Question
from hvdlab.kernel_ext.wire.cells import DEBUGGER, CellDone, CellError, Chunk, PromptRequest, Stream
from support.patience import PATIENCE


class Sink(OutputSink):
    """Sink that remembers its calls; ``held`` is its answer about output held back."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.thread: threading.Thread | None = None
        self.held = 0
        self.due: float | None = None

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self.thread = threading.current_thread()
        self.calls.append(("output", rank))

    def done(self, rank: int, done: CellDone | None) -> None:
        self.calls.append(("done", rank))

    def note(self, text: str, *, warning: bool = False) -> None:
        self.calls.append(("note", text))

    def tick(self, now: float) -> float | None:
        if self.due is not None and now >= self.due:
            self.calls.append(("due",))
            self.due, self.held = None, 0
        return self.due

    def backlog(self) -> int:
        return self.held

    def shorten(self) -> None:
        self.calls.append(("shorten",))

    def finished(self, results: CellResults) -> None:
        self.calls.append(("finished",))


class Run:
    """Handle with its effects on the outside."""

    def __init__(self, ranks: int = 2, timeout: float | None = None) -> None:
        self.sink = Sink()
        self.credits: list[tuple[int, int]] = []
        self.interrupted = threading.Event()
        self.untold: list[str] = []
        self.handle = CellHandle(
            CellState("c", range(ranks), now=time.monotonic(), timeout=timeout),
            GuardedSink(self.sink),
            self,
        )

    def acknowledge(self, rank: int, taken: int) -> None:
        self.credits.append((rank, taken))

    def interrupt(self, ranks: tuple[int, ...]) -> None:
        self.interrupted.set()

    def request_stacks(self, ranks: tuple[int, ...]) -> None: ...

    def probe_processes(self, ranks: tuple[int, ...]) -> None: ...

    def finished(self, results: CellResults) -> None:
        self.sink.calls.append(("closed",))
        self.untold = self.handle.take_undelivered_notices()

    def post(self, *events: Event) -> None:
        for event in events:
            self.handle.post(event)


def done(rank: int, error: CellError | None = None) -> DoneArrived:
    return DoneArrived(rank, CellDone("c", error, 0.1))


def wrote(rank: int, total: int) -> OutputArrived:
    return OutputArrived(rank, (Stream("stdout", "x"),), total)


def test_the_waiting_thread_writes_the_output() -> None:
    run = Run()
    run.post(wrote(0, 10), done(0), done(1))
    assert run.handle.wait().ok
    assert run.sink.thread is threading.current_thread()
    assert run.sink.calls == [("output", 0), ("done", 0), ("done", 1), ("finished",), ("closed",)]
    assert run.handle.done


def test_in_the_background_another_thread_does() -> None:
    run = Run()
    run.handle.drive_in_background()
    run.post(wrote(0, 10), done(0), done(1))
    assert run.handle.wait(PATIENCE).ok
    assert run.sink.thread is not threading.current_thread()


def test_a_sink_shows_what_is_due_though_no_rank_says_anything() -> None:
    run = Run()
    run.sink.due = time.monotonic()
    shown = threading.Event()
    tick = run.sink.tick

    def ticked(now: float) -> float | None:
        at = tick(now)
        if ("due",) in run.sink.calls:
            shown.set()
        return at

    with patch.object(run.sink, "tick", ticked):
        run.handle.drive_in_background()
        assert shown.wait(PATIENCE)
        run.post(done(0), done(1))
        assert run.handle.wait(PATIENCE).ok


def test_wait_without_events_returns_to_python_for_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C that comes just before the thread blocks is handled after the wait alone."""
    monkeypatch.setattr(driver, "MOST_WAIT", 0.01)
    run = Run()

    class Events(SimpleQueue[Event | None]):
        waits = 0

        def get(self, block: bool = True, timeout: float | None = None) -> Event | None:
            assert timeout is not None
            self.waits += 1
            if self.waits == 3:
                run.post(done(0), done(1))
            return super().get(block, timeout)

    with patch.object(run.handle, "_events", Events()):
        assert run.handle.wait().ok


def test_wait_for_another_thread_returns_to_python_for_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MOST_WAIT", 0.01)
    run = Run()

    class Ended(threading.Event):
        waits = 0

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            self.waits += 1
            if self.waits == 3:
                run.post(done(0), done(1))
            return super().wait(timeout)

    with patch.object(run.handle, "_ended", Ended()):
        run.handle.drive_in_background()
        assert run.handle.wait().ok


def test_a_wait_that_is_too_short_can_be_repeated() -> None:
    run = Run()
    run.post(done(0))
    with pytest.raises(TimeoutError, match="still runs after"):
        run.handle.wait(0.05)
    run.post(done(1))
    assert run.handle.wait().ok
    assert run.handle.wait().ok


def test_the_time_limit_needs_no_event() -> None:
    run = Run(timeout=0.05)

    def end_once_interrupted() -> None:
        run.interrupted.wait(PATIENCE)
        run.post(done(0), done(1))

    answer = threading.Thread(target=end_once_interrupted)
    answer.start()
    results = run.handle.wait()
    answer.join()
    assert results.timed_out == (0, 1)


def test_credit_waits_until_the_sink_has_written() -> None:
    run = Run()
    run.sink.held = BACKLOG + 1
    run.post(wrote(0, 2 << 20))
    with pytest.raises(TimeoutError):
        run.handle.wait(0.001)
    assert run.credits == []
    run.sink.due = time.monotonic()
    run.post(done(0), done(1))
    run.handle.wait()
    assert run.credits == [(0, 2 << 20)]
    assert run.sink.calls.index(("due",)) < run.sink.calls.index(("finished",))


@pytest.mark.parametrize("call", ["output", "done", "tick", "finished"])
@pytest.mark.parametrize("background", [True, False])
def test_a_sink_that_fails_does_not_keep_the_run_from_its_end(call: str, background: bool) -> None:
    run = Run()

    def fail(*_: object) -> None:
        raise RuntimeError("the disk is full")

    setattr(run.sink, call, fail)
    if background:
        run.handle.drive_in_background()
    run.post(wrote(0, 2 << 20), done(0), done(1))
    with pytest.raises(RuntimeError, match="disk is full"):
        run.handle.wait(PATIENCE)
    assert run.handle.results is not None
    assert run.handle.results.ok
    assert run.credits == [(0, 2 << 20)]
    assert ("closed",) in run.sink.calls


def test_an_interrupt_from_any_thread_reaches_the_ranks_and_the_sink() -> None:
    run = Run()
    run.handle.drive_in_background()
    run.handle.interrupt()
    assert run.interrupted.wait(PATIENCE)
    run.post(done(0), done(1))
    assert run.handle.wait(PATIENCE).interrupted
    assert ("shorten",) in run.sink.calls


@pytest.mark.parametrize("held_back", [False, True])
def test_a_line_behind_the_end_of_the_run_is_not_lost(held_back: bool) -> None:
    """It can come in one burst with the last rank's end, and while the sink still shows the output that it has held
    back."""
    run = Run()
    if held_back:
        run.sink.due = time.monotonic() + 0.05
    run.post(PoolNews("in time"), done(0), done(1), PoolNews("too late"))
    assert run.handle.wait().ok
    notes = [call[1] for call in run.sink.calls if call[0] == "note"]
    assert (notes, run.untold) == (["in time"], ["too late"])


def test_who_waits_longer_drives_on() -> None:
    run = Run()

    def give_up() -> None:
        with pytest.raises(TimeoutError):
            run.handle.wait(0.05)
        run.post(done(0), done(1))

    short = threading.Thread(target=give_up)
    short.start()
    assert run.handle.wait(PATIENCE).ok
    short.join()


def test_two_threads_may_wait() -> None:
    run = Run()
    found: list[CellResults] = []
    threads = [threading.Thread(target=lambda: found.append(run.handle.wait(PATIENCE))) for _ in range(2)]
    for thread in threads:
        thread.start()
    run.post(done(0), done(1))
    for thread in threads:
        thread.join()
    assert len(found) == 2


class InterruptingUser:
    """User that interrupts the cell instead of answering, while another thread, which drives it meanwhile, is about to
    sleep."""

    shows_beside = True

    def __init__(self, run: Run) -> None:
        self.run = run

    def ask(self, prompt: str, *, hidden: bool) -> str:
        sink = self.run.handle._sink
        tick, ticks, over = sink.tick, threading.Event(), threading.Event()

        def slow(now: float) -> float | None:
            if threading.current_thread() is not threading.main_thread():
                ticks.set()
                assert over.wait(PATIENCE)
            return tick(now)

        class Events(SimpleQueue[Event | None]):
            def put(self, item: Event | None, *_: object) -> None:
                super().put(item)
                if item is None:  # the main thread wakes the other one, whose last step is over then
                    over.set()

        events = Events()
        self.run.handle._events.put(wrote(0, 10))
        with patch.object(sink, "tick", slow):
            assert ticks.wait(PATIENCE)
            self.run.handle._events = events
            raise KeyboardInterrupt


def test_the_user_is_asked_no_more_after_an_interrupt() -> None:
    class Obeying(Run):
        def interrupt(self, ranks: tuple[int, ...]) -> None:
            self.post(done(0), done(1))

    run = Obeying()
    asked: list[Question] = []

    class Desk(PromptDesk):
        def ask(self, question: Question, *args: Any) -> str:
            asked.append(question)
            return super().ask(question, *args)

    run.handle._desk = Desk(InterruptingUser(run), None)
    run.post(PromptAsked(0, PromptRequest("c", 1, DEBUGGER, "ipdb> ")))
    run.handle.wait(PATIENCE)
    # A notebook's frontend keeps a second box, and runs no cell as long as it is there.
    assert len(asked) == 1
