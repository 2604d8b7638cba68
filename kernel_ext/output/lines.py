"""Cuts what one rank writes into lines, and follows the line that is being written."""

from __future__ import annotations


class LineSplitter:
    """One stream of one rank.

    A carriage return goes back to the start of the line, so of a progress bar only the last state counts.
    """

    def __init__(self) -> None:
        self.partial = ""
        self.since = 0.0

    def feed(self, text: str, now: float) -> list[str]:
        """Returns the lines that are complete now, without their newlines."""
        if not self.partial:
            self.since = now
        lines = (self.partial + text).split("\n")
        self.partial = _last_state(lines.pop())
        if lines and self.partial:
            self.since = now
        return [current(line) if "\r" in line else line for line in lines]

    def flush(self) -> list[str]:
        """The unfinished line, if there is one; nothing is left afterwards."""
        rest, self.partial = current(self.partial), ""
        return [rest] if rest.strip() else []

    @property
    def rewrites(self) -> bool:
        """Whether the unfinished line was begun anew by a carriage return, as progress bars do."""
        return "\r" in self.partial


def current(line: str) -> str:
    """What a line with carriage returns shows."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def _last_state(partial: str) -> str:
    """Drop the overwritten states; a final carriage return is kept, since nothing was overwritten yet."""
    if "\r" not in partial:
        return partial
    return "\r" + current(partial) + ("\r" if partial.endswith("\r") else "")
