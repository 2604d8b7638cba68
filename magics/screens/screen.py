"""Interface of a screen, the sink that writes merged output to one, and the screen of a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.notebook.output.merge import Cleared, LineMerger, LiveLines, Piece, Shown, Text, label
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk


class Screen(Protocol):
    """Screen for pieces of output, in order."""

    def write(self, piece: Text) -> None: ...
    def show(self, piece: Shown) -> None: ...
    def clear(self, piece: Cleared) -> None: ...
    def live(self, piece: LiveLines) -> None: ...

    def status(self, text: str, *, final: bool) -> None:
        """Show the cause of a wait in place of the previous one; empty to show nothing."""
        ...

    def begin(self, rank: int) -> None:
        """Add a rank that writes from now on."""

    def tick(self, now: float) -> float | None:
        """Show output that was held back. Return the time of the next call, or None."""
        ...

    def backlog(self) -> int:
        """Return the number of characters that are held back."""
        ...

    def hurry(self) -> None:
        """Shorten the output that is held back: the user has interrupted the cell."""

    def finish(self) -> None:
        """Erase the live lines and the status: no further output comes."""


class MergingSink(OutputSink):
    """Sink that merges the output of a run and shows it on a screen.

    Args:
        merger: Turns the ranks' output into pieces.
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
        # Frontends show stderr on red, which is for failures.
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


_ERASE = "\r\x1b[K"
_UP = "\x1b[1A"


class TerminalScreen:
    """Screen of a terminal: text as it is, and the text form of displays.

    On a tty the live lines of the lowest rank that has some, and the cause of a wait, are redrawn in place below it;
    otherwise only finished lines appear.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = set(ranks)
        self._drawn = 0  # lines on screen now that have to be erased before anything is written
        self._live: list[str] = []
        self._status: list[str] = []
        self._waiting_noted = False

    def write(self, piece: Text) -> None:
        self._erase()
        write_to_terminal(piece.name, piece.text)
        self._draw()

    def show(self, piece: Shown) -> None:
        text = str(piece.display.data.get("text/plain", ""))
        if piece.display.update or not text:
            return
        prefix = label(piece.ranks) if len(self._ranks) > 1 else ""
        self.write(Text("stdout", "".join(f"{prefix}{line}\n" for line in text.splitlines())))

    def clear(self, piece: Cleared) -> None:
        self._erase()

    def live(self, piece: LiveLines) -> None:
        lowest = min((ranks[:1] for ranks, _ in piece.lines), default=())
        self._live = [label(ranks) + text for ranks, text in piece.lines if set(lowest) <= set(ranks)]
        self._erase()
        self._draw()

    def status(self, text: str, *, final: bool) -> None:
        if not _is_tty(sys.stderr):
            if text and (final or not self._waiting_noted):
                self.write(Text("stderr", f"{text}\n"))
            self._waiting_noted = not final
            return
        self._status = [] if final else text.split("\n")
        self._erase()
        if final and text:
            write_to_terminal("stderr", f"{text}\n")
        self._draw()

    def begin(self, rank: int) -> None:
        self._ranks.add(rank)

    def tick(self, now: float) -> float | None:
        return None

    def backlog(self) -> int:
        return 0

    def hurry(self) -> None:
        pass

    def finish(self) -> None:
        self._live, self._status = [], []
        self._erase()

    def _draw(self) -> None:
        lines = [line for line in (*self._live, *self._status) if line]
        if lines and _is_tty(sys.stderr):
            # Cut to the width: lines that wrapped could not be erased.
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\n".join(line[:width] for line in lines))
            sys.stderr.flush()
            self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            sys.stderr.write(_ERASE + f"{_UP}{_ERASE}" * (self._drawn - 1))
            self._drawn = 0


def write_to_terminal(name: str, text: str) -> None:
    """Write to stdout or stderr, in order."""
    stream = sys.stderr if name == "stderr" else sys.stdout
    if stream is sys.stderr:
        sys.stdout.flush()
    stream.write(text)
    stream.flush()


def _is_tty(stream: TextIO) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)())
