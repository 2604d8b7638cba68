"""The timeline as a widget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from hvdlab.collectives.failures import Failures
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.download import Downloads
from hvdlab.widgets.output import Output, Publish, text_of
from hvdlab.widgets.picture import as_html, as_text
from hvdlab.widgets.publisher import Publisher
from hvdlab.widgets.unparented import unparented

STATIC = Path(__file__).parent / "static"


class TimelineWidget(anywidget.AnyWidget):
    """Lanes of all ranks, live. Made by :func:`hvdlab.widgets.views.timeline`.

    Attributes:
        recording: The recording that is shown.
        failures: Errors of the widget, which it shows itself.
    """

    _esm = (STATIC / "timeline.js").read_text(encoding="utf-8")
    _css = (STATIC / "views.css").read_text(encoding="utf-8")
    limit = traitlets.Int(1_000_000).tag(sync=True)
    height = traitlets.Int(420).tag(sync=True)
    still = traitlets.Unicode("").tag(sync=True)

    def __init__(self, recording: Recording, *, height: int = 420, limit: int = 1_000_000) -> None:
        self.recording = recording
        self.failures = Failures(recording.failures)
        self._output = Output("timeline", self._still, self.failures)
        unparented(super().__init__, height=height, limit=limit, still=self._output.name)
        self._downloads = Downloads(recording, self._send_rows, self.failures)
        self.on_msg(self._receive)
        self._publisher = Publisher(recording, self._send_rows, self._output.refresh, failures=self.failures)

    def _send_rows(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        if self.comm is not None:
            unparented(self.send, message, buffers)

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        with self.failures.guard("what the page asked for"):
            if not isinstance(content, dict):
                return
            if content.get("type") == "save":
                self._downloads.start()
            elif content.get("type") == "hello":
                since, points = (max(0, int(content.get(name, 0))) for name in ("since", "points"))
                self._publisher.hello(since, points=points)

    def _still(self) -> dict[str, Any]:
        return {
            "text/html": as_html(self.recording, self._output.name),
            "text/plain": as_text(self.recording),
        }

    def show_with(self, publish: Publish) -> None:
        """Show the timeline elsewhere than under the cell that runs; ``publish`` as :attr:`Output.publish`."""
        self._output.publish = publish
        self._ipython_display_()

    def _ipython_display_(self) -> None:
        self._output.show(self._repr_mimebundle_())

    def close(self) -> None:
        """End the widget; the still picture remains."""
        self._publisher.close()
        self._downloads.close()
        super().close()

    def __repr__(self) -> str:
        with self.failures.guard("the still picture"):
            return as_text(self.recording)
        return "Timeline" + text_of(self.failures.all())
