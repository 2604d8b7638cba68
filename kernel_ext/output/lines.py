"""Cuts what one rank writes into lines, and follows the line that is being written."""

from __future__ import annotations

LONGEST_LINE = 1 << 16
"""Characters of a line after which it is broken: browsers take seconds for lines that are much longer."""


class LineSplitter:
    """One stream of one rank.

    A carriage return goes back to the start of the line, so of a progress bar only the last state counts. Lines that
    are longer than :data:`LONGEST_LINE` are broken into several.
    """

    def __init__(self) -> None:
        self.partial = ""
        self.since = 0.0

    def feed(self, text: str, now: float) -> list[str]:
        """Returns the lines that are complete now, without their newlines."""
        if not self.partial:
            self.since = now
        lines = (self.partial + text).split("\n")
        partial = _last_state(lines.pop())
        lines = [current(line) if "\r" in line else line for line in lines]
        if len(partial) > LONGEST_LINE or (
            len(text) > LONGEST_LINE and max(map(len, lines), default=0) > LONGEST_LINE
        ):
            *whole, partial = _broken([*lines, partial])
            lines = whole
        self.partial = partial
        if lines and self.partial:
            self.since = now
        return lines

    def flush(self) -> list[str]:
        """The unfinished line, if there is one; nothing is left afterwards."""
        rest, self.partial = current(self.partial), ""
        return [rest] if rest.strip() else []

    @property
    def rewrites(self) -> bool:
        """Whether the unfinished line was begun anew by a carriage return, as progress bars do."""
        return "\r" in self.partial


def _broken(lines: list[str]) -> list[str]:
    return [
        line[at : at + LONGEST_LINE] for line in lines for at in range(0, max(1, len(line)), LONGEST_LINE)
    ]


def current(line: str) -> str:
    """What a line with carriage returns shows."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def _last_state(partial: str) -> str:
    """Drop the overwritten states; a final carriage return is kept, since nothing was overwritten yet."""
    if "\r" not in partial:
        return partial
    return "\r" + current(partial) + ("\r" if partial.endswith("\r") else "")
