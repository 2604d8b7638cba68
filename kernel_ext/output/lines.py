"""Cuts the output of one rank into lines, and follows the lines that are being written.

Progress bars overwrite their line after a carriage return. Nested ones write a newline to reach the line below, and the
sequence *cursor up* to return: such a newline ends no line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_LINE = 1 << 16
"""Characters of a line after which it is broken: browsers take seconds for lines that are much longer."""

MOST_ROWS = 100
"""Lines that one stream can have unfinished; no screen shows more bars."""

_UP = re.compile(r"\x1b\[(\d{0,3})A")
_MOVE = re.compile(r"(\n|\x1b\[\d{0,3}A)")
_BEGUN_SEQUENCE = re.compile(r"\x1b(?:\[\d{0,3})?")
_LONGEST_BEGUN = len("\x1b[999")
_AFTER_ERASED = re.compile(r"(?:\A|\r)[ \t]+\r([^\r]+)\Z")
"""Matches text where a bar was erased, such as that of ``tqdm.write``; a bar brings a carriage return of its own."""


@dataclass(slots=True)
class _Row:
    """A line to which the cursor can still return."""

    text: str = ""
    written: bool = True  # False for a line that exists only because the cursor went above all others
    left: float = 0.0  # when a newline moved the cursor below it

    @property
    def rewritten(self) -> bool:
        """Whether it is the line of a bar, as far as is known."""
        return not self.written or "\r" in self.text.rstrip("\r")


class LineSplitter:
    """One stream of one rank.

    A carriage return goes back to the start of the line, so of a progress bar only the last state counts. A newline
    after such a line may only lead to a nested bar below it: the line is complete when other text follows, or when
    :meth:`expire` finds that the cursor has not come back. Lines longer than :data:`LONGEST_LINE` are broken into several.

    Attributes:
        since: When the first unfinished line was begun.
        moved_up: Whether the cursor has ever gone up.
    """

    def __init__(self) -> None:
        self.since = 0.0
        self.moved_up = False
        self._rows = [_Row()]
        self._at = 0  # the row of the cursor; those above it may be complete
        self._fresh = False  # a newline has led to this row, and nothing was written since
        self._begun = ""  # the beginning of a sequence of which the rest has not come

    def feed(self, text: str, now: float) -> list[str]:
        """Return the lines that are complete now, without their newlines."""
        if not self._unfinished:
            self.since = now
        text = self._begun + text
        self._begun = _begun_sequence(text)
        if self._begun:
            text = text[: -len(self._begun)]
        if len(self._rows) == 1 and "\r" not in text and "\r" not in self.partial and not _has_moves(text):
            lines = self._feed_plain(text)
        else:
            lines = self._feed_moves(text, now)
        if lines and self._unfinished:
            self.since = now
        return lines

    def flush(self) -> list[str]:
        """Return all lines that are left, and forget them."""
        self._rows[self._at].text += self._begun
        lines = self._release(self._at)
        lines += [line for row in self._rows if (line := current(row.text)).strip()]
        self._rows, self._at, self._fresh, self._begun = [_Row()], 0, False, ""
        return lines

    def expire(self, limit: float) -> list[str]:
        """Return the lines that the cursor left at ``limit`` or before: it does not come back to them."""
        return self._release(next((i for i in range(self._at) if self._rows[i].left > limit), self._at))

    def leave(self) -> list[str]:
        """Return the lines above the cursor: the rank has written elsewhere, so they are complete."""
        return self._release(self._at)

    @property
    def left_at(self) -> float | None:
        """When the cursor left the first line to which it could return; None without such a line."""
        return self._rows[0].left if self._at else None

    @property
    def partial(self) -> str:
        """The line of the cursor, with its carriage returns."""
        return self._rows[self._at].text

    @property
    def unfinished(self) -> tuple[str, ...]:
        """What the unfinished lines show, without blank ones."""
        return tuple(line for row in self._rows if (line := current(row.text)).strip())

    @property
    def rewrites(self) -> bool:
        """Whether an unfinished line was overwritten after a carriage return, as progress bars do."""
        return any("\r" in row.text for row in self._rows)

    @property
    def _unfinished(self) -> bool:
        return any(row.text.strip() for row in self._rows)

    def _feed_plain(self, text: str) -> list[str]:
        """Follow text without moves of the cursor: most output, which must cost little."""
        row = self._rows[0]
        lines = (row.text + text).split("\n")
        if len(lines[-1]) > LONGEST_LINE or (
            len(text) > LONGEST_LINE and max(map(len, lines)) > LONGEST_LINE
        ):
            lines = _broken(lines)
        row.text = lines.pop()
        return lines

    def _feed_moves(self, text: str, now: float) -> list[str]:
        lines: list[str] = []
        for part in _MOVE.split(text):
            if part == "\n":
                lines += self._move_down(now)
            elif up := _UP.fullmatch(part):
                self._move_up(int(up[1] or 1))
            elif part:
                lines += self._write(part)
        return lines

    def _write(self, text: str) -> list[str]:
        # Each state of a nested bar begins with a carriage return. Any other text below a bar is not of bars.
        lines = self._release(self._at) if self._fresh and text[0] != "\r" else []
        self._fresh = False
        row = self._rows[self._at]
        ordinary = _AFTER_ERASED.search(row.text + text)
        row.text, row.written = ordinary[1] if ordinary else _last_state(row.text + text), True
        if len(row.text) > LONGEST_LINE:
            lines += self._release(self._at)
            *whole, row.text = _broken([row.text])
            lines += whole
        return lines

    def _move_down(self, now: float) -> list[str]:
        row, lines = self._rows[self._at], []
        row.left = now
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(_Row())
        else:
            # The newline leads to the start of a line that exists: text overwrites it.
            below = self._rows[self._at]
            if below.text and not below.text.endswith("\r"):
                below.text = _last_state(f"{below.text}\r")
        bars_below = self._at + 1 < len(self._rows) or bool(self._rows[self._at].text)
        complete = not row.rewritten and (bool(row.text) or not bars_below)
        if (self._at == 1 and complete) or self._at >= MOST_ROWS:
            lines = self._release(1)
        self._fresh = True
        return lines

    def _move_up(self, count: int) -> None:
        self.moved_up = True
        if count > self._at:
            # The lines above are complete, so those that are written now are new ones.
            added = min(count - self._at, max(0, MOST_ROWS - len(self._rows)))
            self._rows[:0] = [_Row(written=False) for _ in range(added)]
            self._at += added
        self._at = max(0, self._at - count)
        self._fresh = False

    def _release(self, count: int) -> list[str]:
        """Return the first lines, and forget them."""
        if not count:
            return []
        lines = [current(row.text) for row in self._rows[:count] if row.written]
        del self._rows[:count]
        self._at -= count
        return lines


def shown_lines(text: str) -> list[str]:
    """Return the lines that a text leaves on a screen: progress bars once, in their last state."""
    splitter = LineSplitter()
    return splitter.feed(text, 0.0) + splitter.flush()


def lasting(text: str) -> int:
    """Return how many characters of a text stay on a screen: overwritten ones and moves to other lines do not count."""
    moves = _UP.findall(text) if "\x1b" in text else []
    if "\r" not in text and not moves:
        return len(text)
    *lines, last = text.split("\n")
    # A nested bar leaves with as many moves up as it has written newlines, so the one outweighs the other.
    stays = sum(len(current(_MOVE.split(line)[-1] if moves else line)) + 1 for line in lines)
    stays = max(0, stays - sum(int(count or 1) for count in moves))
    return stays + (0 if "\r" in last or moves else len(last))


def current(line: str) -> str:
    """Return the text that a line with carriage returns shows."""
    return next((part for part in reversed(line.split("\r")) if part), "") if "\r" in line else line


def _has_moves(text: str) -> bool:
    return "\x1b" in text and _UP.search(text) is not None


def _begun_sequence(text: str) -> str:
    """Return the end of a text that may be the beginning of *cursor up*."""
    at = text.rfind("\x1b", max(0, len(text) - _LONGEST_BEGUN))
    return text[at:] if at >= 0 and _BEGUN_SEQUENCE.fullmatch(text, at) else ""


def _broken(lines: Sequence[str]) -> list[str]:
    return [
        line[at : at + LONGEST_LINE] for line in lines for at in range(0, max(1, len(line)), LONGEST_LINE)
    ]


def _last_state(line: str) -> str:
    """Drop the overwritten states; a final carriage return is kept, since nothing was overwritten yet."""
    if "\r" not in line[:-1]:
        return line
    shown = current(line)
    if line.endswith("\r\r") and not shown.strip():
        return "\r"  # the next state of a bar that was erased
    return f"\r{shown}\r" if line.endswith("\r") else f"\r{shown}"
