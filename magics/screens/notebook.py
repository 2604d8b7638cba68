"""Output in a Jupyter notebook."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hvdlab.collectives.errors import format_ranks
from hvdlab.kernel_ext.output.pieces import Cleared, LiveLines, Shown, Text, label
from hvdlab.kernel_ext.output.values import label_html
from hvdlab.kernel_ext.payloads import Display
from hvdlab.magics.screens.areas import Areas
from hvdlab.magics.screens.pacing import Pacer
from hvdlab.magics.screens.publisher import Publisher

MESSAGE_CHARACTERS = 256 * 1024
"""Longest text of one message."""

HURRIED_CHARACTERS = 300 * 1024
"""What is still shown of a backlog after an interrupt."""

_EMPTY = {"text/plain": "", "text/html": ""}


@dataclass(slots=True)
class _Message:
    """A message that waits for its turn; ``text`` is what may be left out after an interrupt."""

    send: Callable[[], None]
    size: int = 0
    text: str = ""


class NotebookScreen:
    """Writes text in few large messages, gives each display its area and the live lines one area of their own.

    Args:
        publisher: Where messages go.
        ranks: The ranks of the cell; a single rank gets no labels.
        cell: Unique id, for names of areas.
        clock: ``time.monotonic``.
    """

    def __init__(
        self,
        publisher: Publisher,
        ranks: Sequence[int],
        cell: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publisher, self._ranks, self._clock = publisher, set(ranks), clock
        self._labelled = len(self._ranks) > 1
        self._areas = Areas(f"hvdlab-{cell}")
        self._pacer = Pacer(clock())
        self._outbox: deque[_Message] = deque()
        self._backlog = 0
        self._hurried = False
        self._skipped = 0
        self._live_area = f"hvdlab-{cell}-live"
        self._live_made = self._live_filled = False

    # -- pieces -------------------------------------------------------------------------------------------------------

    def write(self, piece: Text) -> None:
        for part in _parts(piece.text):
            send = partial(self._publisher.stream, piece.name, part)
            self._send(_Message(send, len(part.encode("utf-8", "replace")), part))

    def show(self, piece: Shown) -> None:
        display, rank = piece.display, piece.ranks[0]
        known = self._areas.find(rank, display.display_id) if display.update else None
        if known is not None:
            self._display(self._labelled_data(piece), display.metadata, known, update=True)
            return
        area, exists = self._areas.place(piece.ranks, display.display_id)
        if self._labelled and not exists and not _is_text(display):
            heading = {"text/html": label_html(piece.ranks), "text/plain": f"{format_ranks(piece.ranks)}:"}
            self._display(heading, {}, f"{area}-label")
        self._display(self._labelled_data(piece), display.metadata, area, update=exists)

    def clear(self, piece: Cleared) -> None:
        if set(piece.ranks) == self._ranks:
            self._areas.forget()
            self._live_made = False
            self._send(_Message(partial(self._publisher.clear, piece.wait)))
            return
        for rank in piece.ranks:
            stale = self._areas.clear(rank)
            for area in stale if piece.wait else [*stale, *self._areas.free(rank)]:
                self._display(_EMPTY, {}, area, update=True)

    def live(self, piece: LiveLines) -> None:
        if piece.lines:
            self._display({"text/plain": piece.text()}, {}, self._live_area, update=self._live_made)
            self._live_made = True
        elif self._live_filled:
            self._display(_EMPTY, {}, self._live_area, update=self._live_made)
        self._live_filled = bool(piece.lines)

    def finish(self) -> None:
        self._tell_skipped()
        for area in self._areas.leftover():
            self._display(_EMPTY, {}, area, update=True)

    # -- sending ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        while self._outbox:
            message = self._outbox[0]
            if not self._pacer.take(message.size, now):
                return self._pacer.ready_at(message.size, now)
            self._outbox.popleft()
            self._backlog -= message.size
            self._tell_skipped()
            message.send()
        return None

    def backlog(self) -> int:
        return self._backlog

    def hurry(self) -> None:
        """The user has interrupted the cell: of what waits show the end only."""
        self._hurried = True
        self._shorten()

    def _send(self, message: _Message) -> None:
        self._outbox.append(message)
        self._backlog += message.size
        self._shorten()
        self.tick(self._clock())

    def _shorten(self) -> None:
        if not self._hurried or self._backlog <= HURRIED_CHARACTERS:
            return
        kept: deque[_Message] = deque()
        while self._outbox:
            message = self._outbox.pop()
            if message.text and sum(m.size for m in kept) + message.size > HURRIED_CHARACTERS:
                self._skipped += message.text.count("\n")
                self._backlog -= message.size
            else:
                kept.appendleft(message)
        self._outbox = kept

    def _tell_skipped(self) -> None:
        if self._skipped:
            self._publisher.stream(
                "stderr", f"({self._skipped} lines are not shown: the cell was interrupted)\n"
            )
            self._skipped = 0

    def _display(
        self, data: dict[str, Any], metadata: dict[str, Any], area: str, *, update: bool = False
    ) -> None:
        self._send(_Message(partial(self._publisher.display, data, metadata, area, update=update)))

    def _labelled_data(self, piece: Shown) -> dict[str, Any]:
        data = piece.display.data
        if not self._labelled or not _is_text(piece.display):
            return data
        prefix = label(piece.ranks)
        return {"text/plain": "\n".join(prefix + line for line in str(data["text/plain"]).split("\n"))}


def _is_text(display: Display) -> bool:
    return set(display.data) == {"text/plain"}


def _parts(text: str) -> Iterator[str]:
    """Cut at line ends where possible."""
    begin = 0
    while begin < len(text):
        end = begin + MESSAGE_CHARACTERS
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or end
        yield text[begin:end]
        begin = end
