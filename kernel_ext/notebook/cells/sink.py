"""Sinks of a run's output, and the guard by which a failing sink is reported at the end of the run instead of stopping it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from hvdlab.kernel_ext.wire.cells import CellDone, Chunk

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.cells.results import CellResults


@runtime_checkable
class OutputSink(Protocol):
    """Takes what the ranks of one run write. All calls come from the one thread that drives the run."""

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        """A rank wrote."""

    def done(self, rank: int, done: CellDone | None) -> None:
        """Nothing more comes from this rank; ``done`` is None if it died or was given up."""

    def note(self, text: str, *, warning: bool = False) -> None:
        """Show one line about the run itself; ``warning`` if it tells of something that went wrong."""


@runtime_checkable
class TimedSink(OutputSink, Protocol):
    """A sink that holds output back for a moment, to merge it or to pace it."""

    def tick(self, now: float) -> float | None:
        """Write what is due at ``now`` (``time.monotonic()``).

        Called after each batch of events and when the returned time has come. Returns when to call again, or None if
        nothing is held back; after the run's end it is called until it returns None.
        """
        ...

    def backlog(self) -> int:
        """Characters that were taken but not written yet; above a limit the ranks get no further credit."""
        ...

    def hurry(self) -> None:
        """The user has interrupted the run: what is held back may be shortened."""


@runtime_checkable
class StatusSink(OutputSink, Protocol):
    """A sink that shows what the run waits for; others get it as notes, when it begins and when it ends."""

    def status(self, text: str, *, final: bool) -> None:
        """Show ``text`` in place of the last one, or nothing if it is empty; ``final`` if it will stay so."""


@runtime_checkable
class EndingSink(OutputSink, Protocol):
    """A sink that wants to know how the run ended."""

    def finished(self, results: CellResults) -> None:
        """The run is over; called once, after all of its output was written."""


@runtime_checkable
class GrowingSink(OutputSink, Protocol):
    """A sink that knows the ranks of the run, and can take others."""

    def began(self, rank: int) -> None:
        """This rank writes from now on, too; it may have ended before, and is another process then."""


def began(sink: OutputSink, rank: int) -> None:
    """Tell a sink of one more rank, if it wants to know."""
    if isinstance(sink, GrowingSink):
        sink.began(rank)


@runtime_checkable
class SettlingSink(OutputSink, Protocol):
    """A sink that holds output back, and can show all of it at once."""

    def settle(self) -> None:
        """A rank is about to ask the user something: show all that was written before."""


def settle(sink: OutputSink) -> None:
    """Have a sink show what it holds back, if it is one that holds output back."""
    if isinstance(sink, SettlingSink):
        sink.settle()


class ShowsNote(Protocol):
    """``note`` of :class:`OutputSink`."""

    def __call__(self, text: str, *, warning: bool = False) -> None: ...


class AsNotes:
    """Adapter for a sink that only knows notes: notes say when the run begins to wait for something, and how that ends."""

    def __init__(self, note: ShowsNote) -> None:
        self._note, self._noted = note, False

    def __call__(self, text: str, *, final: bool) -> None:
        if text and (final or not self._noted):
            self._note(text, warning=True)
        self._noted = not final


class ShowsStatus(Protocol):
    """``status`` of :class:`StatusSink`."""

    def __call__(self, text: str, *, final: bool) -> None: ...


def status_of(sink: OutputSink) -> ShowsStatus:
    """How to tell this sink what the run waits for."""
    return sink.status if isinstance(sink, StatusSink) else AsNotes(sink.note)


class NullSink:
    """Takes everything and shows nothing."""

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        pass

    def done(self, rank: int, done: CellDone | None) -> None:
        pass

    def note(self, text: str, *, warning: bool = False) -> None:
        pass

    def status(self, text: str, *, final: bool) -> None:
        pass


T = TypeVar("T")


class GuardedSink:
    """Does what ``sink`` does, until that raises; from then on nothing is shown.

    A run that stopped there would never end: its ranks would wait for room for their output, and the user for the ranks.

    Attributes:
        failure: What the sink raised; None if nothing.
    """

    def __init__(self, sink: OutputSink) -> None:
        self.failure: Exception | None = None
        self._use(sink)

    def _use(self, sink: OutputSink) -> None:
        self._sink = sink
        self._timed = sink if isinstance(sink, TimedSink) else None
        self._status = status_of(sink)

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self._guard(lambda: self._sink.output(rank, chunks))

    def began(self, rank: int) -> None:
        self._guard(lambda: began(self._sink, rank))

    def done(self, rank: int, done: CellDone | None) -> None:
        self._guard(lambda: self._sink.done(rank, done))

    def note(self, text: str, *, warning: bool = False) -> None:
        self._guard(lambda: self._sink.note(text, warning=warning))

    def status(self, text: str, *, final: bool) -> None:
        self._guard(lambda: self._status(text, final=final))

    def tick(self, now: float) -> float | None:
        timed = self._timed
        return self._guard(lambda: timed.tick(now)) if timed is not None else None

    def backlog(self) -> int:
        timed = self._timed
        return (self._guard(timed.backlog) or 0) if timed is not None else 0

    def hurry(self) -> None:
        if self._timed is not None:
            self._guard(self._timed.hurry)

    def settle(self) -> None:
        self._guard(lambda: settle(self._sink))

    def finished(self, results: CellResults) -> None:
        if isinstance(sink := self._sink, EndingSink):
            self._guard(lambda: sink.finished(results))

    def _guard(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # whatever a caller's sink raises
            self.failure = self.failure or error
            self._use(NullSink())
            return None
