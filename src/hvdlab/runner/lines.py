"""From what ranks write to whole lines with their rank in front. No I/O here."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST = 1 << 20
"""Bytes of a line without an end that are held before they are passed on as a line."""
REDRAW_TERMINAL, REDRAW_PLAIN = 0.1, 10.0
"""Seconds between two states of a progress bar that are shown, on a terminal and elsewhere."""


class LineAssembler:
    """Cuts one stream of one rank into lines.

    A line that carriage returns overwrite, as progress bars do, is passed on in its last state when it ends, and in
    between at most every ``redraw`` seconds.

    Args:
        emit: Takes a line without its end, and whether it is a passing state.
        redraw: Seconds between passing states.
        clock: Source of monotonic seconds.
    """

    __slots__ = ("_clock", "_emit", "_held", "_redraw", "_shown_at")

    def __init__(
        self,
        emit: Callable[[bytes, bool], None],
        redraw: float = REDRAW_PLAIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit, self._redraw, self._clock = emit, redraw, clock
        self._held = b""
        self._shown_at = -redraw

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        data = self._held + data
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._emit(_visible(line.removesuffix(b"\r")), False)
        if b"\r" in rest[:-1] or (rest.endswith(b"\r") and len(rest) > 1):
            rest = self._passing(rest)
        while len(rest) > LONGEST:
            self._emit(rest[:LONGEST], False)
            rest = rest[LONGEST:]
        self._held = rest

    def finish(self) -> None:
        """The stream has ended: what is left is a line, too."""
        rest, self._held = _visible(self._held.rstrip(b"\r")), b""
        if rest:
            self._emit(rest, False)

    def _passing(self, rest: bytes) -> bytes:
        """Drop what was overwritten; show the present state from time to time."""
        # A carriage return at the end may be the first half of a line's end, so it stays.
        state = _visible(rest.rstrip(b"\r"))
        now = self._clock()
        if now - self._shown_at >= self._redraw:
            self._shown_at = now
            self._emit(state, True)
        return state + b"\r" if rest.endswith(b"\r") else b"\r" + state


def _visible(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns, roughly: its last state."""
    if b"\r" not in line:
        return line
    return next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")


def prefix(rank: int, stream: int, timestamp: str = "") -> bytes:
    """``[3]<stdout>:`` as horovodrun writes it."""
    return f"{timestamp}[{rank}]<{'stdout' if stream == 1 else 'stderr'}>:".encode()


class Tail:
    """The last lines of a stream, for the report of a failure."""

    __slots__ = ("_data",)
    LIMIT = 16 << 10

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._data = (self._data + data)[-self.LIMIT :]

    def lines(self, most: int) -> list[str]:
        """The last ``most`` lines that are not empty."""
        text = self._data.decode("utf-8", "backslashreplace")
        shown = (_visible(line.encode()).decode().rstrip() for line in text.splitlines())
        return [line for line in shown if line][-most:]
