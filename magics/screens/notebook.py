"""Screen of a Jupyter notebook, and the display areas that ranks' displays have there."""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from hvdlab.collectives.errors import format_ranks
from hvdlab.collectives.time_limits import Clock
from hvdlab.kernel_ext.notebook.cells.results import label_html
from hvdlab.kernel_ext.notebook.output.merge import Cleared, LiveLines, Shown, Text, label
from hvdlab.kernel_ext.wire.cells import Display
from hvdlab.magics.screens.outbox import PacedOutbox
from hvdlab.magics.screens.publishers import OutputChannel


class DisplayIds:
    """Areas of ranks' display ids in all cells of a notebook: a handle may be updated in a later cell than its own."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[int, str], str] = {}

    def get(self, rank: int, display_id: str) -> str | None:
        """Return the newest area of this rank's display id; None if it has none."""
        return self._by_id.get((rank, display_id))

    def put(self, rank: int, display_id: str, area: str) -> None:
        """Give this rank's display id this area from now on."""
        self._by_id[rank, display_id] = area

    def drop(self, rank: int, display_id: str, area: str) -> None:
        """Forget this area, which is gone, unless the display id has another one by now."""
        if self._by_id.get((rank, display_id)) == area:
            del self._by_id[rank, display_id]

    def clear(self) -> None:
        """Forget all areas: the ranks are gone."""
        self._by_id.clear()


class CellAreas:
    """Display areas of one cell, by rank and display id.

    Ranks choose display ids without knowing of each other, so each rank's id gets an area of its own. After a rank
    alone has cleared its output, its next displays take the areas of the cleared ones: a plot that is redrawn in a
    loop stays in its place while the other ranks' output stays untouched.

    Args:
        prefix: Prefix of the areas' names.
        known: The areas of all cells, which this one's are added to.
    """

    def __init__(self, prefix: str, known: DisplayIds | None = None) -> None:
        self._known = known or DisplayIds()
        self._names = (f"{prefix}-{n}" for n in count())
        self._by_id: dict[tuple[int, str], str] = {}
        self._used: defaultdict[int, list[str]] = defaultdict(list)
        self._free: defaultdict[int, deque[str]] = defaultdict(deque)

    def find(self, rank: int, display_id: str) -> str | None:
        """Return the area that an update goes to, or None if there is none."""
        return self._by_id.get((rank, display_id)) or self._known.get(rank, display_id)

    def place(self, ranks: tuple[int, ...], display_id: str) -> tuple[str, bool]:
        """Return an area for a display, and whether it exists already."""
        reuse = len(ranks) == 1 and bool(self._free[ranks[0]])
        area = self._free[ranks[0]].popleft() if reuse else next(self._names)
        for rank in ranks:
            if display_id:
                self._by_id[rank, display_id] = area
                self._known.put(rank, display_id, area)
            if len(ranks) == 1:
                self._used[rank].append(area)
        return area, reuse

    def clear(self, rank: int) -> list[str]:
        """Free the areas of a rank that has cleared its output. Return those that an earlier clear freed and no display reused."""
        stale = list(self._free[rank])
        self._free[rank] = deque(self._used.pop(rank, ()))
        return stale

    def free(self, rank: int) -> list[str]:
        """Return the areas that wait for the rank's next display."""
        return list(self._free[rank])

    def forget(self) -> None:
        """Forget all areas of this cell: its output is gone."""
        for (rank, display_id), area in self._by_id.items():
            self._known.drop(rank, display_id, area)
        self._by_id.clear()
        self._used.clear()
        self._free.clear()

    def leftover(self) -> list[str]:
        """Return the areas of all ranks that were freed and not reused."""
        return [area for areas in self._free.values() for area in areas]


_EMPTY = {"text/plain": "", "text/html": ""}
_NO_TEXT = re.compile(r"(?:\s|</?(?:pre|code|span)\b[^<>]*>)*")


class NotebookScreen:
    """Screen of a notebook: text in few large messages, an area for each display, and one for all live lines.

    Args:
        publisher: Channel of the cell's messages.
        ranks: The ranks of the cell; a single rank gets no labels.
        cell: Unique id, for names of areas.
        clock: ``time.monotonic``.
        plain: Whether displays that all ranks have made alike get no label, as in a notebook without ranks.
        known: Areas of displays of other cells, which this one may update.
    """

    def __init__(
        self,
        publisher: OutputChannel,
        ranks: Sequence[int],
        cell: str,
        clock: Clock = time.monotonic,
        *,
        plain: bool = False,
        known: DisplayIds | None = None,
    ) -> None:
        self._publisher, self._ranks, self._plain = publisher, set(ranks), plain
        self._labelled = len(self._ranks) > 1
        self._areas = CellAreas(f"hvdlab-{cell}", known)
        self._outbox = PacedOutbox(publisher, clock)
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

    def shorten(self) -> None:
        self._outbox.shorten()

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
    """Return whether a display shows nothing and never will, as the last one of rich's live displays: only its label would be seen."""
    if display.display_id or not display.data or set(display.data) - {"text/plain", "text/html"}:
        return False
    markup = str(display.data.get("text/html", ""))
    return not str(display.data.get("text/plain", "")).strip() and _NO_TEXT.fullmatch(markup) is not None


class _StatusArea:
    """Areas of the line about the ranks that a cell waits for: one while the wait lasts, and the next below the output after it."""

    def __init__(self, name: str) -> None:
        self._name, self._number = name, 0
        self._made = self._settled = self._passed = False

    def passed(self) -> None:
        """Remember that other output was shown."""
        self._passed = True

    def forget(self) -> None:
        """Forget the area: all output is gone."""
        self._made = False

    def place(self, text: str, final: bool) -> Iterator[tuple[str, str, bool]]:
        """Yield areas to show, with their text, and whether they exist."""
        if self._made and self._settled and self._passed and text:
            yield f"{self._name}-{self._number}", "", True
            self._made = False
            self._number += 1
        if text or self._made:
            yield f"{self._name}-{self._number}", text, self._made
            self._passed = self._passed and self._made
            self._made, self._settled = True, final
