"""Sinks of a run's output: the base, and the guard that reports a failing sink at the end of the run instead of stopping it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from hvdlab.kernel_ext.wire.cells import CellDone, Chunk

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.cells.results import CellResults


class KeptOutput(Protocol):
    """Record of a run's output, as far as sinks name it to the user."""

    @property
    def label(self) -> str:
        """The name that users know the cell by, such as ``[7]``."""
        ...

    @property
    def directory(self) -> Path | None:
        """The directory of the files; None as long as all is in memory."""
        ...

    @property
    def lost(self) -> int:
        """Characters that could not be kept."""
        ...

    @property
    def why(self) -> str:
        """Why they could not be kept."""
        ...


class OutputSink:
    """Sink of one run's output. It shows nothing; a subclass overrides what it shows.

    All calls come from the one thread that drives the run.
    """

    _waiting_noted = False

    def kept(self, transcript: KeptOutput) -> None:
        """Remember where the output is kept. Called before anything else."""

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        """Show what a rank wrote."""

    def began(self, rank: int) -> None:
        """Expect output of one more rank; it may have ended before, and is another process then."""

    def done(self, rank: int, done: CellDone | None) -> None:
        """Expect nothing more from this rank; ``done`` is None if it died or was given up."""

    def note(self, text: str, *, warning: bool = False) -> None:
        """Show one line about the run itself; ``warning`` if something went wrong."""

    def status(self, text: str, *, final: bool) -> None:
        """Show what the run waits for in place of the last such text, or nothing if it is empty.

        By default notes say when the run begins to wait, and how that ends.

        Args:
            text: What it waits for.
            final: Whether the text will stay so.
        """
        if text and (final or not self._waiting_noted):
            self.note(text, warning=True)
        self._waiting_noted = not final

    def settle(self) -> None:
        """Show all that was written before, since a rank is about to ask the user something."""

    def hurry(self) -> None:
        """Shorten the output that is held back, since the user has interrupted the run."""

    def tick(self, now: float) -> float | None:
        """Write the output that is due at ``now`` (``time.monotonic()``).

        Called after each batch of events and when the returned time has come. Returns when to call again, or None if
        nothing is held back; after the run's end it is called until it returns None.
        """
        return None

    def backlog(self) -> int:
        """Return the characters that are held back; above a limit the ranks get no further credit."""
        return 0

    def finished(self, results: CellResults) -> None:
        """Show how the run ended. Called once, after all of its output was written."""


class NullSink(OutputSink):
    """Sink that shows nothing."""


class ForwardingSink(OutputSink):
    """Sink that passes everything on; a subclass overrides what it changes.

    Args:
        inner: Takes it.
    """

    def __init__(self, inner: OutputSink) -> None:
        self._inner = inner

    def kept(self, transcript: KeptOutput) -> None:
        self._inner.kept(transcript)

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self._inner.output(rank, chunks)

    def began(self, rank: int) -> None:
        self._inner.began(rank)

    def done(self, rank: int, done: CellDone | None) -> None:
        self._inner.done(rank, done)

    def note(self, text: str, *, warning: bool = False) -> None:
        self._inner.note(text, warning=warning)

    def status(self, text: str, *, final: bool) -> None:
        self._inner.status(text, final=final)

    def settle(self) -> None:
        self._inner.settle()

    def hurry(self) -> None:
        self._inner.hurry()

    def tick(self, now: float) -> float | None:
        return self._inner.tick(now)

    def backlog(self) -> int:
        return self._inner.backlog()

    def finished(self, results: CellResults) -> None:
        self._inner.finished(results)


T = TypeVar("T")


class GuardedSink(OutputSink):
    """Sink that passes everything on until the inner sink raises; from then on nothing is shown.

    A run that stopped there would never end: its ranks would wait for room for their output, and the user for the ranks.

    Args:
        sink: The inner sink.

    Attributes:
        failure: What the sink raised; None if nothing.
    """

    def __init__(self, sink: OutputSink) -> None:
        self.failure: Exception | None = None
        self._sink = sink

    def kept(self, transcript: KeptOutput) -> None:
        self._guard(lambda: self._sink.kept(transcript))

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self._guard(lambda: self._sink.output(rank, chunks))

    def began(self, rank: int) -> None:
        self._guard(lambda: self._sink.began(rank))

    def done(self, rank: int, done: CellDone | None) -> None:
        self._guard(lambda: self._sink.done(rank, done))

    def note(self, text: str, *, warning: bool = False) -> None:
        self._guard(lambda: self._sink.note(text, warning=warning))

    def status(self, text: str, *, final: bool) -> None:
        self._guard(lambda: self._sink.status(text, final=final))

    def settle(self) -> None:
        self._guard(self._sink.settle)

    def hurry(self) -> None:
        self._guard(self._sink.hurry)

    def tick(self, now: float) -> float | None:
        return self._guard(lambda: self._sink.tick(now))

    def backlog(self) -> int:
        return self._guard(self._sink.backlog) or 0

    def finished(self, results: CellResults) -> None:
        self._guard(lambda: self._sink.finished(results))

    def _guard(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # whatever a caller's sink raises
            self.failure = self.failure or error
            self._sink = NullSink()
            return None
