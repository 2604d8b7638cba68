"""The lines that ranks are writing now: progress bars, and anything without a newline yet."""

from __future__ import annotations

from collections.abc import Mapping

from hvdlab.kernel_ext.output.lines import LineSplitter
from hvdlab.kernel_ext.output.pieces import LiveLines, group_equal

LONGEST_LIVE_LINE = 400
"""Characters shown of a line that is not complete yet: it is shown again and again while it grows."""

Source = tuple[int, str]
"""Rank and stream."""


class LiveView:
    """Decides when the unfinished lines are shown again, at most once per ``refresh`` seconds.

    A line that carriage returns rewrite is shown at once, another unfinished one after ``hold`` seconds, since its
    newline mostly follows soon. Nested bars are shown by position: the outer ones of all ranks, then the inner ones.
    """

    def __init__(self, splitters: Mapping[Source, LineSplitter], *, hold: float, refresh: float) -> None:
        self._splitters = splitters
        self._hold, self._refresh = hold, refresh
        self._shown: dict[Source, tuple[str, ...]] = {}
        self._at = float("-inf")

    @property
    def deadline(self) -> float | None:
        """When :meth:`take` will have a new state although nothing was written; None if it won't."""
        texts = {
            source: self._due_at(splitter) for source, splitter in self._splitters.items() if _text(splitter)
        }
        changed = [
            due for source, due in texts.items() if self._shown.get(source) != _text(self._splitters[source])
        ]
        changed += [self._at for source in self._shown if source not in texts]
        return max(min(changed), self._at + self._refresh) if changed else None

    def take(self, now: float) -> LiveLines | None:
        """The new state, or None if it is the same or was shown only just now."""
        texts = {s: _text(p) for s, p in self._splitters.items() if _text(p) and self._due_at(p) <= now}
        if texts == self._shown or (texts and now < self._at + self._refresh):
            return None
        self._shown, self._at = texts, now
        return LiveLines(
            tuple(
                line
                for position in range(max(map(len, texts.values()), default=0))
                for line in group_equal(
                    [(rank, lines[position]) for (rank, _), lines in texts.items() if position < len(lines)]
                )
            )
        )

    def _due_at(self, splitter: LineSplitter) -> float:
        return splitter.since if splitter.rewrites else splitter.since + self._hold


def _text(splitter: LineSplitter) -> tuple[str, ...]:
    return tuple(
        line if len(line) <= LONGEST_LIVE_LINE else f"{line[:LONGEST_LIVE_LINE]}…"
        for line in splitter.unfinished
    )
