"""Where the output of a run goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hvdlab.kernel_ext.payloads import CellDone, Chunk

if TYPE_CHECKING:
    from hvdlab.kernel_ext.cells.results import CellResults


@runtime_checkable
class OutputSink(Protocol):
    """Takes what the ranks of one run write. All calls come from the one thread that drives the run."""

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        """A rank wrote."""

    def done(self, rank: int, done: CellDone | None) -> None:
        """Nothing more comes from this rank; ``done`` is None if it died or is no longer waited for."""

    def note(self, text: str) -> None:
        """One line about the run itself."""


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
class EndingSink(OutputSink, Protocol):
    """A sink that wants to know how the run ended."""

    def finished(self, results: CellResults) -> None:
        """The run is over; called once, after all of its output was written."""


class NullSink:
    """Takes everything and shows nothing."""

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        pass

    def done(self, rank: int, done: CellDone | None) -> None:
        pass

    def note(self, text: str) -> None:
        pass
