"""Which cells get a live strip, and what it needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hvdlab.collectives.variables import read_variables
from hvdlab.magics.screens.publisher import ParentPublisher, Watched
from hvdlab.magics.screens.strip import Strip, View

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from hvdlab.kernel_ext.notebook.pool import Pool
    from hvdlab.widgets.strip import StripWidget


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether cells get a strip, as far as settings and what is installed go.

    Raises:
        InvalidRequestError: A variable's value is not valid.
    """
    return (
        read_variables(environ).get("HVDLAB_STRIP", True) is not False and find_spec("anywidget") is not None
    )


class Strips:
    """Makes the strips of one notebook.

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
        publisher: Watched,
        area: str,
    ) -> Strip:
        """The strip of a cell that begins now."""
        begun = time.monotonic()
        later = ParentPublisher(shell)

        def show(data: dict[str, Any], metadata: dict[str, Any], area: str, update: bool) -> None:
            later.display(data, metadata, area, update=update)

        def load() -> Callable[[], View] | None:
            try:
                from hvdlab.widgets.strip import StripWidget
            except ModuleNotFoundError:
                return None
            recording = pool.client.recording
            return lambda: _Shown(StripWidget(recording, ranks, label, begun, show), self)

        return Strip(publisher, load, area, begun)

    def ended(self, widget: StripWidget) -> None:
        """The cell of this widget has ended: keep the widget until the next one."""
        self._ended.append(widget)

    def close(self) -> None:
        """Forget the widgets of cells that have ended."""
        ended, self._ended = self._ended, []
        for widget in ended:
            widget.close()


class _Shown:
    """A widget as the view of a strip."""

    def __init__(self, widget: StripWidget, strips: Strips) -> None:
        self._widget, self._strips = widget, strips
        self.bundle, self.refresh = widget.bundle, widget.refresh
        self.still, self.began = widget.still, widget.began
        strips.close()

    def summary(self, now: float) -> dict[str, str] | None:
        from hvdlab.widgets.strip import summary_html

        text = self._widget.summary(now)
        return {"text/html": summary_html(text), "text/plain": text} if text else None

    def release(self, now: float) -> None:
        self._widget.finish(now)
        self._strips.ended(self._widget)
