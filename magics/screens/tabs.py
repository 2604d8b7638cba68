"""``--output tabs``: the output of each rank on a page of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from hvdlab.kernel_ext.cells.sink import AsNotes, ShowsStatus
from hvdlab.kernel_ext.payloads import CellDone, Chunk
from hvdlab.magics.screens.pages import Page, page_html, page_text
from hvdlab.magics.screens.publisher import Publisher

REFRESH = 0.5
"""Seconds between two updates of the pages, at least."""


class View(Protocol):
    """Shows pages; ``final`` is True the last time."""

    def show(self, pages: dict[int, Page], changed: set[int], *, final: bool) -> None: ...
    def note(self, text: str, *, warning: bool = False) -> None: ...
    @property
    def status(self) -> ShowsStatus: ...


class PagesSink:
    """Collects output by rank and shows it on a view."""

    def __init__(self, ranks: Sequence[int], view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self._pages = {rank: Page() for rank in ranks}
        self._running, self._changed = set(ranks), set(ranks)
        self._view, self._clock, self._next = view, clock, clock()

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self._pages[rank].add(chunks)
        self._changed.add(rank)

    def began(self, rank: int) -> None:
        self._pages.setdefault(rank, Page())
        self._running.add(rank)
        self._changed.add(rank)

    def done(self, rank: int, done: CellDone | None) -> None:
        self._running.discard(rank)
        self._changed.add(rank)

    def note(self, text: str, *, warning: bool = False) -> None:
        self._view.note(text, warning=warning)

    def status(self, text: str, *, final: bool) -> None:
        self._view.status(text, final=final)

    def tick(self, now: float) -> float | None:
        if not self._changed:
            return None
        if self._running and now < self._next:
            return self._next
        self._view.show(self._pages, self._changed, final=not self._running)
        self._changed = set()
        # Each update sends all pages whole: the longer that takes, the rarer are updates.
        self._next = now + max(REFRESH, 5 * (self._clock() - now))
        return None

    def backlog(self) -> int:
        return 0

    def hurry(self) -> None:
        pass


class _Area:
    """Shows what the cell waits for, in an area of its own."""

    def __init__(self, publisher: Publisher, area: str) -> None:
        self._publisher, self._area, self._made = publisher, area, False

    def __call__(self, text: str, *, final: bool) -> None:
        if text or self._made:
            data = {"text/plain": text} if text else {"text/plain": "", "text/html": ""}
            self._publisher.display(data, {}, self._area, update=self._made)
            self._made = True


class SectionsView:
    """A terminal: one section for each rank, when the cell has ended."""

    def __init__(self) -> None:
        self.status = AsNotes(self.note)

    def show(self, pages: dict[int, Page], changed: set[int], *, final: bool) -> None:
        if not final:
            return
        for rank, page in pages.items():
            text = page_text(page.outputs())
            sys.stdout.write(f"── rank {rank} ──\n{text}" + ("" if text.endswith("\n") or not text else "\n"))
        sys.stdout.flush()

    def note(self, text: str, *, warning: bool = False) -> None:
        print(text, file=sys.stderr if warning else sys.stdout)


class DetailsView:
    """A notebook without ipywidgets: parts that can be folded."""

    def __init__(self, publisher: Publisher, cell: str) -> None:
        self._publisher, self._area, self._made = publisher, f"hvdlab-{cell}-pages", False
        self.status = _Area(publisher, f"hvdlab-{cell}-status")
        self._html: dict[int, str] = {}

    def show(self, pages: dict[int, Page], changed: set[int], *, final: bool) -> None:
        for index, (rank, page) in enumerate(pages.items()):
            if rank in changed:
                self._html[rank] = page_html(rank, page.outputs(), opened=index == 0)
        text = "\n".join(f"── rank {rank} ──\n{page_text(page.outputs())}" for rank, page in pages.items())
        data = {"text/html": "".join(self._html[rank] for rank in pages), "text/plain": text}
        self._publisher.display(data, {}, self._area, update=self._made)
        self._made = True

    def note(self, text: str, *, warning: bool = False) -> None:
        self._publisher.stream("stderr" if warning else "stdout", f"{text}\n")


class TabsView:
    """A notebook with ipywidgets: one tab for each rank."""

    def __init__(self, publisher: Publisher, ranks: Sequence[int], cell: str) -> None:
        import ipywidgets  # type: ignore[import-untyped]  # it ships no types

        self._publisher = publisher
        self.status = _Area(publisher, f"hvdlab-{cell}-status")
        self._outputs: dict[int, Any] = {rank: ipywidgets.Output() for rank in ranks}
        self._tab = ipywidgets.Tab()
        self._arrange()
        data: dict[str, Any] = self._tab._repr_mimebundle_() or {}
        publisher.display(data, {}, f"hvdlab-{cell}-tabs")

    def _arrange(self) -> None:
        ranks = sorted(self._outputs)
        self._tab.children = [self._outputs[rank] for rank in ranks]
        self._tab.titles = [f"rank {rank}" for rank in ranks]

    def show(self, pages: dict[int, Page], changed: set[int], *, final: bool) -> None:
        if new := changed - self._outputs.keys():  # ranks that joined while the cell ran
            self._outputs.update({rank: type(next(iter(self._outputs.values())))() for rank in new})
            self._arrange()
        for rank in changed:
            self._outputs[rank].outputs = pages[rank].outputs()

    def note(self, text: str, *, warning: bool = False) -> None:
        self._publisher.stream("stderr" if warning else "stdout", f"{text}\n")


def notebook_view(publisher: Publisher, ranks: Sequence[int], cell: str) -> View:
    """Tabs if ipywidgets is installed, else parts that can be folded."""
    if find_spec("ipywidgets") is not None:
        return TabsView(publisher, ranks, cell)
    return DetailsView(publisher, cell)
