"""A recording as a file that the user's browser saves."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.failures import Failures
from hvdlab.collectives.tracing.recording import Recording

NAME = "hvdlab-timeline.json.gz"

Send = Callable[[dict[str, Any], list[bytes]], None]


class Downloads:
    """Writes a recording when a view asks for it, one at a time, on a thread of its own: a full one takes seconds.

    Args:
        recording: The recording that is written.
        send: Sends the file, or a problem in a sentence; called on that thread.
        failures: Where other errors are kept.
    """

    def __init__(self, recording: Recording, send: Send, failures: Failures) -> None:
        self._recording, self._send, self._failures = recording, send, failures
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
                self._send({"type": "problem", "text": str(error)}, [])
                return
            self._send({"type": "file", "name": NAME}, [file.getvalue()])
            return
        self._send({"type": "problem", "text": str(self._failures.all()[-1])}, [])
