"""Output on a terminal, or in anything that only reads stdout and stderr."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from hvdlab.kernel_ext.output.pieces import Cleared, LiveLines, Shown, Text, label

_ERASE = "\r\x1b[K"


class TerminalScreen:
    """Writes text as it is; of a display its text form.

    On a tty the live line of the lowest rank is redrawn in place; elsewhere only finished lines appear.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._labelled = len(ranks) > 1
        self._drawn = ""  # on screen now
        self._wanted = ""  # to be drawn again below whatever is written

    def write(self, piece: Text) -> None:
        self._erase()
        write_to_terminal(piece.name, piece.text)
        self._draw(self._wanted)

    def show(self, piece: Shown) -> None:
        text = str(piece.display.data.get("text/plain", ""))
        if piece.display.update or not text:
            return
        prefix = label(piece.ranks) if self._labelled else ""
        self.write(Text("stdout", "".join(f"{prefix}{line}\n" for line in text.splitlines())))

    def clear(self, piece: Cleared) -> None:
        self._erase()

    def live(self, piece: LiveLines) -> None:
        self._wanted = piece.text().split("\n", 1)[0]
        self._erase()
        self._draw(self._wanted)

    def tick(self, now: float) -> float | None:
        return None

    def backlog(self) -> int:
        return 0

    def hurry(self) -> None:
        pass

    def finish(self) -> None:
        self._wanted = ""
        self._erase()

    def _draw(self, text: str) -> None:
        if text and _is_tty(sys.stderr):
            self._drawn = text[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write(self._drawn)
            sys.stderr.flush()

    def _erase(self) -> None:
        if self._drawn:
            sys.stderr.write(_ERASE)
            self._drawn = ""


def write_to_terminal(name: str, text: str) -> None:
    """Write to stdout or stderr, in order."""
    stream = sys.stderr if name == "stderr" else sys.stdout
    if stream is sys.stderr:
        sys.stdout.flush()
    stream.write(text)
    stream.flush()


def _is_tty(stream: TextIO) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)())
