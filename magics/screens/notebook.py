"""Output in a Jupyter notebook."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from hvdlab.collectives.errors import format_ranks
from hvdlab.kernel_ext.notebook.output.merge import Cleared, LiveLines, Shown, Text, label
from hvdlab.kernel_ext.notebook.output.values import label_html
from hvdlab.kernel_ext.wire.cells import Display
from hvdlab.magics.screens.areas import Areas, KnownAreas
from hvdlab.magics.screens.outbox import Outbox
from hvdlab.magics.screens.publisher import Publisher

_EMPTY = {"text/plain": "", "text/html": ""}
_NO_TEXT = re.compile(r"(?:\s|</?(?:pre|code|span)\b[^<>]*>)*")


class NotebookScreen:
    """Writes text in few large messages, gives each display its area and the live lines one area of their own.

    Args:
        publisher: Where messages go.
        ranks: The ranks of the cell; a single rank gets no labels.
        cell: Unique id, for names of areas.
        clock: ``time.monotonic``.
        plain: Whether displays that all ranks have made alike get no label, as in a notebook without ranks.
        known: Areas of displays of other cells, which this one may update.
    """

    def __init__(
        self,
        publisher: Publisher,
        ranks: Sequence[int],
        cell: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        plain: bool = False,
        known: KnownAreas | None = None,
    ) -> None:
        self._publisher, self._ranks, self._plain = publisher, set(ranks), plain
        self._labelled = len(self._ranks) > 1
        self._areas = Areas(f"hvdlab-{cell}", known)
        self._outbox = Outbox(publisher, clock)
        self._live_area = f"hvdlab-{cell}-live"
        self._live_made = self._live_filled = False
        self._status = _StatusArea(f"hvdlab-{cell}-status")

    def begin(self, rank: int) -> None:
        self._ranks.add(rank)
        self._labelled = len(self._ranks) > 1

    # -- pieces -------------------------------------------------------------------------------------------------------

    def write(self, piece: Text) -> None:
        self._status.passed()
        self._outbox.text(piece.name, piece.text)

    def show(self, piece: Shown) -> None:
        self._status.passed()
        display, rank = piece.display, piece.ranks[0]
        known = self._areas.find(rank, display.display_id) if display.update else None
        if known is not None:
            self._display(self._labelled_data(piece), display.metadata, known, update=True)
            return
        if _is_blank(display):
            return
        area, exists = self._areas.place(piece.ranks, display.display_id)
        if self._gets_label(piece) and not exists and not _is_text(display):
            heading = {"text/html": label_html(piece.ranks), "text/plain": f"{format_ranks(piece.ranks)}:"}
            self._display(heading, {}, f"{area}-label")
        self._display(self._labelled_data(piece), display.metadata, area, update=exists)

    def clear(self, piece: Cleared) -> None:
        if set(piece.ranks) == self._ranks:
            self._areas.forget()
            self._live_made = False
            self._status.forget()
            self._outbox.call(partial(self._publisher.clear, piece.wait))
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

    def status(self, text: str, *, final: bool) -> None:
        for area, shown, update in self._status.place(text, final):
            self._display({"text/plain": shown} if shown else _EMPTY, {}, area, update=update)

    def finish(self) -> None:
        for area in self._areas.leftover():
            self._display(_EMPTY, {}, area, update=True)

    # -- sending ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        return self._outbox.tick(now)

    def backlog(self) -> int:
        return self._outbox.backlog

    def hurry(self) -> None:
        self._outbox.hurry()

    def _display(
        self, data: dict[str, Any], metadata: dict[str, Any], area: str, *, update: bool = False
    ) -> None:
        self._outbox.call(partial(self._publisher.display, data, metadata, area, update=update))

    def _gets_label(self, piece: Shown) -> bool:
        return self._labelled and not (self._plain and set(piece.ranks) == self._ranks)

    def _labelled_data(self, piece: Shown) -> dict[str, Any]:
        data = piece.display.data
        if not self._gets_label(piece) or not _is_text(piece.display):
            return data
        prefix = label(piece.ranks)
        return {"text/plain": "\n".join(prefix + line for line in str(data["text/plain"]).split("\n"))}


def _is_text(display: Display) -> bool:
    return set(display.data) == {"text/plain"}


def _is_blank(display: Display) -> bool:
    """Whether a display shows nothing and never will, as the last one of rich's live displays: only its label would be seen."""
    if display.display_id or not display.data or set(display.data) - {"text/plain", "text/html"}:
        return False
    markup = str(display.data.get("text/html", ""))
    return not str(display.data.get("text/plain", "")).strip() and _NO_TEXT.fullmatch(markup) is not None


class _StatusArea:
    """Where a line shows what the cell waits for: in place while it lasts, and the next time below what came in between."""

    def __init__(self, name: str) -> None:
        self._name, self._number = name, 0
        self._made = self._settled = self._passed = False

    def passed(self) -> None:
        """Other output was shown."""
        self._passed = True

    def forget(self) -> None:
        """All output is gone, the area too."""
        self._made = False

    def place(self, text: str, final: bool) -> Iterator[tuple[str, str, bool]]:
        """Areas to show, with their text, and whether they exist."""
        if self._made and self._settled and self._passed and text:
            yield f"{self._name}-{self._number}", "", True
            self._made = False
            self._number += 1
        if text or self._made:
            yield f"{self._name}-{self._number}", text, self._made
            self._passed = self._passed and self._made
            self._made, self._settled = True, final
