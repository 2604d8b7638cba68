"""The interface of a screen, and the sink that feeds one with merged output."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.notebook.output.merge import Cleared, LineMerger, LiveLines, Piece, Shown, Text
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk


class Screen(Protocol):
    """Shows pieces of output, in order."""

    def write(self, piece: Text) -> None: ...
    def show(self, piece: Shown) -> None: ...
    def clear(self, piece: Cleared) -> None: ...
    def live(self, piece: LiveLines) -> None: ...

    def status(self, text: str, *, final: bool) -> None:
        """Show what the cell waits for in place of what was shown last; empty to show nothing."""
        ...

    def begin(self, rank: int) -> None:
        """One more rank writes from now on."""

    def tick(self, now: float) -> float | None:
        """Show what was held back; returns when to call again, or None."""
        ...

    def backlog(self) -> int:
        """Characters held back."""
        ...

    def hurry(self) -> None:
        """The user has interrupted the cell and does not want to wait for what is held back."""

    def finish(self) -> None:
        """Nothing more comes: erase what was shown for a while only."""


class MergingSink(OutputSink):
    """Sink of a run's output, merged and shown on a screen.

    Args:
        merger: Makes pieces of what ranks write.
        screen: Shows them.
        clock: ``time.monotonic``.
    """

    def __init__(
        self, merger: LineMerger, screen: Screen, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._merger, self._screen, self._clock = merger, screen, clock
        self._within_line = (
            False  # the last text on stdout has no end of its line: that of a rank which is alone
        )

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self._merger.feed(rank, chunks, self._clock())

    def began(self, rank: int) -> None:
        self._merger.begin(rank)
        self._screen.begin(rank)

    def done(self, rank: int, done: CellDone | None) -> None:
        self._merger.end(rank, self._clock())
        if not self._merger.running:
            self._show(self._merger.take(self._clock()))
            self._screen.finish()

    def note(self, text: str, *, warning: bool = False) -> None:
        self._show(self._merger.take(self._clock()))
        # Frontends show stderr on red, which is for what went wrong.
        begin = "\n" if self._within_line and not warning else ""
        self._show([Text("stderr" if warning else "stdout", f"{begin}{text}\n")])

    def status(self, text: str, *, final: bool) -> None:
        self._show(self._merger.take(self._clock()))
        self._screen.status(text, final=final)

    def tick(self, now: float) -> float | None:
        self._show(self._merger.take(now))
        limits = [t for t in (self._merger.deadline, self._screen.tick(now)) if t is not None]
        return min(limits, default=None)

    def settle(self) -> None:
        self._show(self._merger.take_all(self._clock()))

    def backlog(self) -> int:
        return self._screen.backlog()

    def hurry(self) -> None:
        self._screen.hurry()

    def _show(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Text():
                    if piece.name == "stdout":
                        self._within_line = not piece.text.endswith("\n")
                    self._screen.write(piece)
                case Shown():
                    self._screen.show(piece)
                case Cleared():
                    self._screen.clear(piece)
                case LiveLines():
                    self._screen.live(piece)
