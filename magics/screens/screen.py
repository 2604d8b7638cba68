"""Screen of a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from hvdlab.kernel_ext.notebook.output.merge import Cleared, LiveLines, Shown, Text, label

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

    def shorten(self) -> None:
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
