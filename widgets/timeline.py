"""The timeline as a widget, and its recording as a file that the user's browser saves."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping
from typing import Any

import traitlets

from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.failures import Failures
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.live_view import STATIC, FeedView, Publish
from hvdlab.widgets.still_lanes import as_html, as_text

NAME = "hvdlab-timeline.json.gz"

Send = Callable[[dict[str, Any], list[bytes]], None]


class TimelineWidget(FeedView):
    """Lanes of all ranks, live. Made by :func:`hvdlab.widgets.views.timeline`.

    Args:
        recording: The recording to show.
        height: Height of the drawing at most, in pixels.
        limit: Number of rows that the page keeps at most.
    """

    _title = "Timeline"
    _esm = (STATIC / "timeline.js").read_text(encoding="utf-8")
    limit = traitlets.Int(1_000_000).tag(sync=True)
    height = traitlets.Int(420).tag(sync=True)

    def __init__(self, recording: Recording, *, height: int = 420, limit: int = 1_000_000) -> None:
        super().__init__(recording, height=height, limit=limit)
        self._downloads = Downloads(recording, self._send_to_page, self.failures)
        self._start_feed()

    def _handle(self, content: Mapping[str, Any]) -> None:
        if content.get("type") == "save":
            self._downloads.start()
        super()._handle(content)

    def _still_html(self) -> str:
        return as_html(self.recording, self._output.name)

    def _still_text(self) -> str:
        return as_text(self.recording)

    def show_with(self, publish: Publish) -> None:
        """Show the timeline elsewhere than under the cell that runs; ``publish`` as :attr:`LiveOutput.publish`."""
        self._output.publish = publish
        self._ipython_display_()

    def close(self) -> None:
        """End the widget; the still picture remains."""
        self._feed.close()
        self._downloads.close()
        super().close()


class Downloads:
    """Writer of a recording for the browser: one file at a time, on a thread of its own, since a full one takes seconds.

    Args:
        recording: The recording to write.
        send: Sends the file, or a problem in a sentence; called on that thread.
        failures: Collection of other errors.
    """

    def __init__(self, recording: Recording, send: Send, failures: Failures) -> None:
        self._recording, self._send_to_page, self._failures = recording, send, failures
        self._starting = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to write a file, unless one is being written. Any thread."""
        with self._starting:
            if self._closed or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._write, name="hvdlab-download", daemon=True)
            self._thread.start()

    def close(self, timeout: float = 5) -> None:
        """Wait for the file that is being written, ``timeout`` seconds at most. Idempotent."""
        with self._starting:
            self._closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _write(self) -> None:
        from hvdlab.collectives.tracing.trace_file import trace_events, write_trace

        file = io.BytesIO()
        with self._failures.guard("the file to be saved"):
            try:
                write_trace(trace_events(self._recording), file, "json.gz")
            except (HvdlabError, OSError) as error:
                self._send_to_page({"type": "problem", "text": str(error)}, [])
                return
            self._send_to_page({"type": "file", "name": NAME}, [file.getvalue()])
            return
        self._send_to_page({"type": "problem", "text": str(self._failures.all()[-1])}, [])
