"""The live strip under a running cell: which cells get one, and when it is shown, updated and removed."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hvdlab.collectives.failures import Failures
from hvdlab.collectives.settings import read_variable
from hvdlab.collectives.time_limits import Clock
from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.notebook.output_channels import FixedCellChannel, LineTracking
from hvdlab.kernel_ext.wire.cells import CellDone

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from hvdlab.kernel_ext.notebook.cells.results import CellResults
    from hvdlab.kernel_ext.notebook.pool import Pool
    from hvdlab.widgets.strip import StripWidget

DELAY = 0.5
"""Seconds that a cell runs without a strip."""
INTERVAL = 0.5
"""Seconds between two updates, at least."""
LOADING = 0.1
"""Seconds between two checks whether the strip's code is loaded."""
AGAIN = 5.0
"""Seconds after which a strip that could not be shown is tried again."""
COST = 50
"""An update is followed by a pause of this many times its duration: updates take at most 2 % of the time."""

_EMPTY = {"text/plain": "", "text/html": ""}


class StripView(Protocol):
    """View of one cell's strip."""

    def bundle(self) -> dict[str, Any]:
        """Return the mime bundle that the notebook shows."""
        ...

    def still(self) -> dict[str, str]:
        """Return the mime bundle that a notebook shows where there is no kernel."""
        ...

    def began(self, rank: int) -> None:
        """Add a rank that has begun the cell later."""
        ...

    def refresh(self, now: float, stalled: str) -> None:
        """Bring the view up to date; ``stalled`` describes the collectives that the cell waits for."""
        ...

    def summary(self, now: float) -> dict[str, str] | None:
        """Return the mime bundle that stays in the notebook; None for none."""
        ...

    def cell_ended(self, now: float) -> None:
        """Show that the cell has ended."""
        ...


Loader = Callable[[], Callable[[], StripView] | None]
"""Imports the view's packages, on a thread of its own, and returns a factory of views; None if a package is missing."""


class Strip:
    """Strip of one cell. The thread that drives the cell calls it.

    Args:
        publisher: Channel of the cell's output.
        load: Imports the view's packages.
        area: Name of its display area.
        now: When the cell began, by ``time.monotonic()``.
    """

    def __init__(self, publisher: LineTracking, load: Loader, area: str, now: float) -> None:
        self._publisher, self._load, self._name = publisher, load, area
        #: When `tick` acts next; None if it never does again.
        self._at: float | None = now + DELAY
        self._loading: threading.Thread | None = None
        self._make: Callable[[], StripView] | None = None
        self._view: StripView | None = None
        #: Display area of the widget; empty as long as it is not shown.
        self._area = ""
        #: Number of areas so far, and of the channel's clears at the last one: a clear removes the
        #: strip from the page.
        self._number = self._cleared = 0
        self.stalled = ""
        #: Ranks that began the cell when there was no view yet, or since its last update.
        self._newcomers: list[int] = []
        self._failures = Failures()
        #: The failures as shown last, and whether they are shown in an area of their own.
        self._shown_failures, self._displayed = "", False

    def tick(self, now: float) -> float | None:
        """Load, show or update the strip if that is due, and return the time of the next call; None for no further one."""
        if self._at is None or now < self._at:
            return self._at
        # Before the step: the time of the next try, if this one fails.
        self._at = now + AGAIN
        with self._failures.guard("the strip under the cell"):
            self._at = self._step(now)
        self._show_failures()
        return self._at

    def _show_failures(self) -> None:
        """Show failures in the strip's place: they must not be silent, but don't concern the cell, as a strip only shows."""
        if not (found := self._failures.all()):
            return
        text = "\n".join(map(str, found))
        # Not within a line of output, which a display would cut in two; the next tick tries again.
        if text == self._shown_failures or self._publisher.in_line:
            return
        self._shown_failures = text
        data = {
            "text/plain": text,
            "text/html": f'<div class="hvd-output" style="opacity:.7">{html.escape(text)}</div>',
        }
        with self._failures.guard("the strip under the cell"):
            self._publisher.display(data, {}, f"{self._name}-failures", update=self._displayed)
            self._displayed = True

    def began(self, rank: int) -> None:
        """Show one more rank."""
        self._newcomers.append(rank)

    def refresh_at_next_tick(self) -> None:
        """Update the strip at the next tick, since no other tick may come for a while."""
        if self._view is not None and self._at is not None:
            self._at = float("-inf")

    def _step(self, now: float) -> float | None:
        if self._loading is None:
            self._loading = threading.Thread(target=self._import, name="hvdlab-strip", daemon=True)
            self._loading.start()
        if self._loading.is_alive():
            return now + LOADING
        if self._view is None:
            if self._make is None:
                return None
            self._view = self._make()
        begin = time.monotonic()
        self._introduce(self._view)
        self._view.refresh(now, self.stalled)
        self._place(self._view)
        return now + max(INTERVAL, COST * (time.monotonic() - begin))

    def _introduce(self, view: StripView) -> None:
        newcomers, self._newcomers = self._newcomers, []
        for rank in newcomers:
            view.began(rank)

    def _import(self) -> None:
        with self._failures.guard("the strip under the cell"):
            self._make = self._load()

    def _place(self, view: StripView) -> None:
        """Show the view unless it is shown already, but not between the parts of a line."""
        if (self._area and self._cleared == self._publisher.clears) or self._publisher.in_line:
            return
        self._cleared = self._publisher.clears
        self._area = f"{self._name}-{self._number}"
        self._number += 1
        # Two outputs: with both in one bundle JupyterLab shows the widget, also where no kernel has it.
        self._publisher.display(view.still(), {}, self._still)
        self._publisher.display(view.bundle(), {}, self._area)

    @property
    def _still(self) -> str:
        return f"{self._area}-still"

    def end(self, now: float, *, ok: bool) -> None:
        """Remove the strip once the cell has ended and its output was shown; after a cell without errors a line takes its place."""
        view, self._view, self._at = self._view, None, None
        if view is None:
            return
        with self._failures.guard("the summary of the cell"):
            self._introduce(view)
            if self._area:
                if self._cleared == self._publisher.clears:
                    self._publisher.display(_EMPTY, {}, self._still, update=True)
                    self._publisher.display(_EMPTY, {}, self._area, update=True)
                if ok and (data := view.summary(now)):
                    self._publisher.display(data, {}, f"{self._name}-summary")
        self._show_failures()
        view.cell_ended(now)


class StripSink(OutputSink):
    """Sink of a cell that shows its strip, beside the sink that shows its output and is called before.

    Args:
        ranks: The ranks of the cell.
        strip: The strip.
        clock: ``time.monotonic``.
        elastic: Whether the cell goes on without ranks that die or leave: it has not failed by that.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        strip: Strip,
        clock: Clock = time.monotonic,
        *,
        elastic: bool = False,
    ) -> None:
        self._strip, self._clock = strip, clock
        self._running = set(ranks)
        self._elastic, self._ok = elastic, True

    def began(self, rank: int) -> None:
        self._running.add(rank)
        self._strip.began(rank)

    def done(self, rank: int, done: CellDone | None) -> None:
        self._running.discard(rank)
        self._ok = self._ok and (self._elastic if done is None else done.error is None)

    def status(self, text: str, *, final: bool) -> None:
        self._strip.stalled = "" if final else text

    def flush(self) -> None:
        self._strip.refresh_at_next_tick()

    def tick(self, now: float) -> float | None:
        return self._strip.tick(now) if self._running else None

    def finished(self, results: CellResults) -> None:
        self._strip.end(self._clock(), ok=self._ok)


def strips_enabled(environ: Mapping[str, str]) -> bool:
    """Return whether cells get a strip by the settings; one whose packages are missing is never shown.

    Raises:
        InvalidRequestError: A variable's value is not valid.
    """
    return read_variable("HVDLAB_STRIP", environ) is not False


class Strips:
    """Strips of one notebook's cells.

    A strip's widget outlives its cell until the next cell gets one, since a click may arrive only when the cell has ended.
    """

    def __init__(self) -> None:
        self._ended: list[StripWidget] = []

    def strip(
        self,
        shell: InteractiveShell,
        pool: Pool,
        label: str,
        ranks: Sequence[int],
        publisher: LineTracking,
        area: str,
    ) -> Strip:
        """Return the strip of a cell that begins now."""
        begun = time.monotonic()
        later = FixedCellChannel(shell)

        def show(data: dict[str, Any], metadata: dict[str, Any], area: str, update: bool) -> None:
            later.display(data, metadata, area, update=update)

        def load() -> Callable[[], StripView] | None:
            try:
                from hvdlab.widgets.strip import StripWidget
            except ModuleNotFoundError:
                return None
            recording = pool.client.recording
            return lambda: _WidgetView(StripWidget(recording, ranks, label, begun, show), self)

        return Strip(publisher, load, area, begun)

    def ended(self, widget: StripWidget) -> None:
        """Keep the widget of a cell that has ended until the next one."""
        self._ended.append(widget)

    def close(self) -> None:
        """Forget the widgets of cells that have ended."""
        ended, self._ended = self._ended, []
        for widget in ended:
            widget.close()


class _WidgetView:
    """Widget as the view of a strip."""

    def __init__(self, widget: StripWidget, strips: Strips) -> None:
        self._widget, self._strips = widget, strips
        self.bundle, self.refresh = widget.bundle, widget.refresh
        self.still, self.began = widget.still, widget.began
        strips.close()

    def summary(self, now: float) -> dict[str, str] | None:
        from hvdlab.widgets.strip import summary_html

        text = self._widget.summary(now)
        return {"text/html": summary_html(text), "text/plain": text} if text else None

    def cell_ended(self, now: float) -> None:
        self._widget.finish(now)
        self._strips.ended(self._widget)
