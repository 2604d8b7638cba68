"""Charts of metrics as a widget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.live_view import STATIC, FeedView
from hvdlab.widgets.still_charts import as_html, as_text

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types


class MetricsWidget(FeedView):
    """Lines of the measurements of all ranks, live. Made by :func:`hvdlab.widgets.views.metrics`."""

    _title = "Metrics"
    _esm = (STATIC / "metrics.js").read_text(encoding="utf-8")

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self._start_feed(rows=False)

    def table(self) -> DataFrame:
        """Return all points as a pandas table.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        return self.recording.metrics()

    def _still_html(self) -> str:
        return as_html(self.recording, self._output.name)

    def _still_text(self) -> str:
        return as_text(self.recording)
