"""Charts of metrics as a widget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from hvdlab.collectives.failures import Failures
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.metrics_picture import as_html, as_text
from hvdlab.widgets.output import Output, text_of
from hvdlab.widgets.publisher import Publisher
from hvdlab.widgets.unparented import unparented

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

STATIC = Path(__file__).parent / "static"


class MetricsWidget(anywidget.AnyWidget):
    """Lines of what all ranks measured, live. Made by :func:`hvdlab.widgets.views.metrics`.

    Attributes:
        recording: The recording that is shown.
        failures: Errors of the widget, which it shows itself.
    """

    _esm = (STATIC / "metrics.js").read_text(encoding="utf-8")
    _css = (STATIC / "views.css").read_text(encoding="utf-8")
    still = traitlets.Unicode("").tag(sync=True)

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.failures = Failures(recording.failures)
        self._output = Output("metrics", self._still, self.failures)
        unparented(super().__init__, still=self._output.name)
        self.on_msg(self._receive)
        self._publisher = Publisher(
            recording, self._send_points, self._output.refresh, rows=False, failures=self.failures
        )

    def _send_points(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        if self.comm is not None:
            unparented(self.send, message, buffers)

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        with self.failures.guard("what the page asked for"):
            if isinstance(content, dict) and content.get("type") == "hello":
                since, points = (max(0, int(content.get(name, 0))) for name in ("since", "points"))
                self._publisher.hello(since, rows=False, points=points)

    def table(self) -> DataFrame:
        """All points as a pandas table. Raises ``ModuleNotFoundError`` without pandas."""
        return self.recording.metrics()

    def _still(self) -> dict[str, Any]:
        return {
            "text/html": as_html(self.recording, self._output.name),
            "text/plain": as_text(self.recording),
        }

    def _ipython_display_(self) -> None:
        self._output.show(self._repr_mimebundle_())

    def close(self) -> None:
        """End the widget; the still picture remains."""
        self._publisher.close()
        super().close()

    def __repr__(self) -> str:
        with self.failures.guard("the still picture"):
            return as_text(self.recording)
        return "Metrics" + text_of(self.failures.all())
