"""Base of the sinks of a run's output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hvdlab.kernel_ext.wire.cells import CellDone, Chunk

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.cells.results import CellResults


class KeptOutput(Protocol):
    """Record of a run's output, as far as sinks name it to the user."""

    @property
    def label(self) -> str:
        """Return the name that users know the cell by, such as ``[7]``."""
        ...

    @property
    def directory(self) -> Path | None:
        """Return the directory of the files; None as long as all is in memory."""
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

    #: Whether a line has reported a wait of which no final text has come: its updates would be a line each.
    _waiting_noted = False

    @property
    def failure(self) -> Exception | None:
        """Return the exception that kept output from being shown, for a sink that goes on after one; None if there is none."""
        return None

    def set_transcript(self, transcript: KeptOutput) -> None:
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

    def flush(self) -> None:
        """Show all that was written before, since a rank is about to ask the user something."""

    def shorten(self) -> None:
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


Sinks = OutputSink | Sequence[OutputSink] | None
"""One sink, several, each of which is called after those before it, or none."""


def each_sink(sinks: Sinks) -> tuple[OutputSink, ...]:
    """Return the sinks, in order."""
    if sinks is None:
        return ()
    return (sinks,) if isinstance(sinks, OutputSink) else tuple(sinks)


def drain(sink: OutputSink) -> None:
    """Show everything that a sink holds back, at its pace; an interrupt ends that."""
    while (at := sink.tick(time.monotonic())) is not None:
        time.sleep(max(0.0, at - time.monotonic()))
