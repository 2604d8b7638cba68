"""The shell around :class:`~hvdlab.kernel_ext.notebook.cells.cell_state.CellState`: a queue, a clock and the calls to the outside.

The thread that waits for a run drives it, so that a notebook cell's output is written by the thread that
runs the cell. A run in the background is driven by a thread of its own. There is nothing to poll: the driver sleeps
in the queue until an event comes or the next time limit is reached.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Protocol

from hvdlab.collectives.system import SignalHandler, set_signal_handler
from hvdlab.collectives.text import visible_lines
from hvdlab.collectives.time_limits import MOST_WAIT, Deadline
from hvdlab.kernel_ext.notebook.cells.cell_events import (
    AskStacks,
    AtPrompts,
    DeadlineReached,
    Deliver,
    DoneArrived,
    Effect,
    Event,
    Finished,
    InterruptCell,
    InterruptRequested,
    LookAt,
    Note,
    PoolNews,
    PromptAsked,
    PromptCancelled,
    RankBegan,
    RankDied,
    RankEnded,
    RanksJoined,
    SendAcknowledge,
    ShowStatus,
)
from hvdlab.kernel_ext.notebook.cells.cell_state import CellState
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.notebook.stdin import IN_BACKGROUND, PromptDesk, Question, drive_meanwhile

BACKLOG = 4 << 20
"""Characters a sink may hold back before ranks get no more credit."""

_BATCH = 256
"""Events taken between two ticks of the sink."""


class CellLink(Protocol):
    """Link of a run to its ranks, and to the dispatcher that began it. The driving thread calls it; only `finished` may block."""

    def acknowledge(self, rank: int, taken: int) -> None:
        """Send a rank the acknowledgement of ``taken`` bytes of its output, so that it can write on."""
        ...

    def interrupt(self, ranks: tuple[int, ...]) -> None:
        """Raise KeyboardInterrupt on these ranks."""
        ...

    def request_stacks(self, ranks: tuple[int, ...]) -> None:
        """Ask these ranks for their stacks, which come as :class:`StackArrived`."""
        ...

    def probe_processes(self, ranks: tuple[int, ...]) -> None:
        """Look at the processes of these ranks; the findings come as :class:`ProcessSeen`."""
        ...

    def finished(self, results: CellResults) -> None:
        """Take the results; called once, before :meth:`CellHandle.wait` returns."""
        ...


class CellHandle:
    """Handle of a run that was dispatched.

    Args:
        run: Its state machine.
        sink: Takes the output; called from the driving thread only. It must not raise but keep the exception as its ``failure``,
            which :meth:`wait` raises: a run that stopped in the middle would never end.
        link: Reaches the ranks.
        interrupt_delay: Seconds from a SIGINT to this process until the ranks are interrupted.
        desk: Asks the user for ranks; by default no rank gets an answer.
    """

    def __init__(
        self,
        run: CellState,
        sink: OutputSink,
        link: CellLink,
        *,
        desk: PromptDesk | None = None,
        interrupt_delay: float = 0.0,
    ) -> None:
        self._on_signal = InterruptRequested(interrupt_delay)
        self._desk = desk or PromptDesk(None, None)
        # Ranks at a prompt, as the state machine last learned of them.
        self._at_prompts: tuple[int, ...] = ()
        self.cell, self.label, self.ranks = run.cell, run.label, run.ranks
        self.results: CellResults | None = None
        self._run, self._sink = run, sink
        self._link = link
        # A `SimpleQueue`, whose `put` is reentrant: the handler of SIGINT posts on a thread that may
        # be inside of `put`.
        self._events: SimpleQueue[Event | None] = SimpleQueue()  # None only wakes the driver
        # Acknowledgements that wait until the sink's backlog is small enough.
        self._held: list[SendAcknowledge] = []
        #: Lines that came behind the event that ended the run, when it had nothing more to show.
        self._untold: list[str] = []
        # When the sink asked to be called again (time.monotonic()).
        self._sink_at: float | None = None
        # Held by the thread that drives the run.
        self._driver = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Return whether the run is over and all its output was written."""
        return self._ended.is_set()

    def post(self, event: Event) -> None:
        """Report an event. Any thread, also a signal handler; never blocks."""
        self._events.put(event)
        if not self._desk.in_use:
            return
        # Behind the event: the main thread, which this wakes from its question, finds it in the queue.
        match event:
            case RankDied(rank) | DoneArrived(rank):
                self._desk.withdraw(rank)
            case PromptCancelled(rank, number):
                self._desk.withdraw(rank, number)

    def join(self, ranks: tuple[int, ...]) -> None:
        """Expect these ranks, which are about to get the cell as well. Any thread; the cell must be elastic."""
        self.ranks = tuple(sorted({*self.ranks, *ranks}))
        self.post(RanksJoined(ranks))

    def interrupt(self) -> None:
        """Ask the ranks to stop. Any thread; the second call soon gives up those that don't answer."""
        self.post(InterruptRequested())

    def wait(self, timeout: float | None = None) -> CellResults:
        """Wait for the end, driving the run if no other thread does.

        Ctrl-C (or a notebook's stop button) interrupts the ranks, not the wait; ``results.interrupted`` is True then.

        Raises:
            TimeoutError: The run is not over after ``timeout`` seconds; it goes on.
            Exception: The sink's exception. The run is over nevertheless, and :attr:`results` has its results.
        """
        deadline = Deadline(timeout)
        previous = self._catch_sigint()
        try:
            if self._thread is not None:
                while not (self._ended.is_set() or deadline.expired):
                    left = deadline.remaining()
                    self._ended.wait(MOST_WAIT if left is None else min(left, MOST_WAIT))
            elif self._driver.acquire(timeout=-1 if timeout is None else timeout):
                try:
                    # After a waiter's time limit the lock is free: another thread that waits for the same
                    # run drives it on.
                    self._drive(None if timeout is None else time.monotonic() + (deadline.remaining() or 0.0))
                finally:
                    self._driver.release()
        finally:
            if previous is not None:
                set_signal_handler(signal.SIGINT, previous)
        if self.results is None or not self.done:
            raise TimeoutError(
                f"the cell still runs after {timeout:g} s" if timeout is not None else "the cell still runs"
            )
        if self._sink.failure is not None:
            raise self._sink.failure
        return self.results

    def drive_in_background(self) -> None:
        """Drive the run on a thread of its own; :meth:`wait` then only waits."""
        # Before the thread starts: the desk's queue has no lock, and is used by that thread alone from then on.
        self._desk.refuse(IN_BACKGROUND)
        self._thread = threading.Thread(target=self._drive, name=f"hvdlab-cell-{self.cell}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started: the thread that waits drives the run
            self._thread = None
            raise

    def take_undelivered_notices(self) -> list[str]:
        """Return lines that have come too late to be shown under the cell. Call it in :meth:`CellLink.finished`: no more can come then."""
        lines, self._untold = self._untold, []
        while not self._events.empty():  # no other thread takes events out
            if isinstance(event := self._events.get_nowait(), PoolNews):
                lines.append(event.text)
        return lines

    # -- the driver ---------------------------------------------------------------------------------------------------

    def _drive(self, until: float | None = None) -> None:
        self._tick(time.monotonic())  # a sink may want to show something though nothing happens
        while not self._ended.is_set():
            # A sink that has asked to be called again has something left to show.
            if self._run.finished and self._sink_at is None:
                self._finish()
            elif (question := self._desk.next_prompt(time.monotonic())) is not None:
                self._ask_user(question)
                self._step(time.monotonic())  # handle what came meanwhile before the next question
            elif not self._step(self._desk.deadline, until) and _passed(until):
                return

    def _step(self, *limits: float | None) -> bool:
        """Wait for the next event, at most until these times, and handle it. Returns whether there was one, or a time limit."""
        event = self._next_event(*limits)
        now = time.monotonic()
        if event is not None:
            self._take(event, now)
        # A None that only wakes may be left over from a wait that ended by itself: the events are behind it.
        # Before the time limit is looked at: an end that is in the queue already came in time.
        taken = self._drain(now)
        late = self._run.deadline is not None and now >= self._run.deadline
        if late:
            self._take(DeadlineReached(), now)
        self._tick(time.monotonic())
        return late or taken or event is not None

    def _next_event(self, *others: float | None) -> Event | None:
        now = time.monotonic()
        limits = [t for t in (self._run.deadline, self._sink_at, *others) if t is not None]
        try:
            return self._events.get(timeout=max(0.0, min([now + MOST_WAIT, *limits]) - now))
        except Empty:
            return None

    def _drain(self, now: float) -> bool:
        """Handle the events that have queued up meanwhile, so that a burst is written in few pieces. Returns whether there were any."""
        taken = False
        # Never to the end of the queue: ranks that write without a pause would keep it full, and neither the time limit nor
        # the sink's clock would get a turn.
        for _ in range(_BATCH):
            try:
                event = self._events.get_nowait()
            except Empty:
                break
            if event is not None:
                self._take(event, now)
                taken = True
        return taken

    def _take(self, event: Event, now: float) -> None:
        if self._run.finished and isinstance(event, PoolNews):
            self._untold.append(event.text)
        for effect in self._run.handle(event, now):
            self._perform(effect)
        match event:
            case PromptAsked(rank, request):
                self._desk.prompt_asked(rank, request, now)
            case PromptCancelled(rank, number):
                self._desk.prompt_withdrawn(rank, number)
            case RankDied(rank) | DoneArrived(rank) if self._desk.in_use:
                self._desk.rank_gone(rank)
            case InterruptRequested():
                self._desk.interrupted()
                self._sink.shorten()
        if self._desk.in_use and (asking := self._desk.ranks) != self._at_prompts:
            # Before the event, whose handling comes back to this line: otherwise it would not end.
            self._at_prompts = asking
            self._take(AtPrompts(asking), now)
            if self._desk.asking:
                self._sink.status(visible_lines(self._desk.status()), final=False)

    def _ask_user(self, question: Question) -> None:
        """Let the user answer a rank, on this thread; if output can be shown beside the prompt, another drives the run."""
        self._sink.flush()
        if self._desk.shows_beside:
            self._sink.status(visible_lines(self._desk.status()), final=False)
        self._tick(time.monotonic())
        try:
            reply = self._desk.ask(question, self._meanwhile if self._desk.shows_beside else nullcontext)
        except KeyboardInterrupt:
            # The desk's handler replaced that of `_catch_sigint` while the user was asked, so no event was posted yet.
            self.post(self._on_signal)
            reply = ""
        if reply:
            self._sink.note(visible_lines(reply))
        if self._desk.shows_beside:
            self._sink.status("", final=True)
        # No event reports that a rank got its answer, and the cell's clocks stand as long as one is at a prompt.
        if self._desk.ranks != self._at_prompts:
            self._at_prompts = self._desk.ranks
            self._take(AtPrompts(self._at_prompts), time.monotonic())

    def _meanwhile(self) -> AbstractContextManager[None]:
        return drive_meanwhile(self._step, lambda: self._events.put(None), self._desk.cancel_current)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Deliver(rank, chunks):
                self._sink.output(rank, chunks)
            case SendAcknowledge():
                self._held.append(effect)
            case InterruptCell(ranks):
                self._link.interrupt(ranks)
            case RankBegan(rank):
                self._sink.began(rank)
            case RankEnded(rank, done):
                self._sink.done(rank, done)
            case Note(text, warning):
                self._sink.note(visible_lines(text), warning=warning)
            case AskStacks(ranks):
                self._link.request_stacks(ranks)
            case LookAt(ranks):
                self._link.probe_processes(ranks)
            case ShowStatus(text, final):
                self._sink.status(visible_lines(text), final=final)
            case Finished(results):
                self.results = results

    def _tick(self, now: float) -> None:
        self._sink_at = self._sink.tick(now)
        # While the sink is behind, ranks get no acknowledgement, and stop writing before this process's memory fills.
        if self._held and self._sink.backlog() <= BACKLOG:
            held, self._held = self._held, []
            for credit in held:
                self._link.acknowledge(credit.rank, credit.taken)

    def _finish(self) -> None:
        assert self.results is not None
        try:
            # The sink first: a line that is posted meanwhile is in the queue, from which the link has it
            # for the next cell.
            self._sink.finished(self.results)
            self._link.finished(self.results)
        finally:
            self._ended.set()  # also if the sink raised: other threads wait for it

    def _catch_sigint(self) -> SignalHandler | None:
        """Turn SIGINT into an event while the main thread waits: an exception could hit anywhere and lose output.

        Returns:
            The handler of before, for :func:`~hvdlab.collectives.system.set_signal_handler`; None on any other thread.
        """
        # Python lets the main thread alone set handlers, and runs them there.
        if threading.current_thread() is not threading.main_thread():
            return None

        def on_sigint(signum: int, frame: FrameType | None) -> None:
            self.post(self._on_signal)

        before = set_signal_handler(signal.SIGINT, on_sigint)
        return signal.SIG_DFL if before is None else before  # one that Python has not set can't be set again


def _passed(until: float | None) -> bool:
    return until is not None and time.monotonic() >= until
