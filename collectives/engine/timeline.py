"""Writing a timeline file from a rank: it subscribes to the events of all ranks while the file is open."""

from __future__ import annotations

import atexit
import os
import threading

from hvdlab.collectives.engine.dispatch import Dispatcher
from hvdlab.collectives.engine.spans import SpanLog
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.timeline.file import TimelineFile

LAST_EVENTS = 2.5 * SpanLog.INTERVAL
"""Seconds until what every rank has recorded by now has arrived here."""


class TimelineTap:
    """The timeline file of a rank, if one is open. Any thread."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._lock = threading.Lock()
        self._file: TimelineFile | None = None

    def start(self, path: str | os.PathLike[str], mark_cycles: bool) -> None:
        """Begin to write. Raises ``InvalidRequestError`` if a file is open, ``OSError`` if it can't be created."""
        with self._lock:
            if self._file is not None:
                raise InvalidRequestError(
                    f"a timeline is being written to {self._file.path}; stop_timeline() it first."
                )
            self._file = TimelineFile.start(path, mark_cycles=mark_cycles)
            # At exit this comes before the file closes by itself, without what has not arrived yet.
            atexit.register(self.stop)
            self._dispatcher.mailbox.event_sinks.append(self._file.feed)
            self._dispatcher.mailbox.reconnections.append(self._subscribe)
        self._subscribe()

    def _subscribe(self) -> None:
        self._dispatcher.send(m.Subscribe(True, history=False))

    def stop(self, *, settle: bool = True) -> None:
        """Complete the file. Raises ``OSError`` if it could not be written.

        Args:
            settle: Wait a moment for what other ranks have recorded but not sent yet.
        """
        with self._lock:
            file, self._file = self._file, None
        if file is None:
            return
        atexit.unregister(self.stop)
        control = self._dispatcher.control
        if settle and control is not None and control.thread.is_alive():
            arrived = threading.Event()
            control.call(lambda: control.call_later(LAST_EVENTS, arrived.set))
            arrived.wait(4 * LAST_EVENTS)
        self._dispatcher.mailbox.event_sinks.remove(file.feed)
        self._dispatcher.mailbox.reconnections.remove(self._subscribe)
        self._dispatcher.send(m.Subscribe(False))
        file.close()
