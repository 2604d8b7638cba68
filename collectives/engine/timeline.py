"""Writing a timeline file from a rank: it subscribes to the events of all ranks while the file is open."""

from __future__ import annotations

import atexit
import os
import threading

from hvdlab.collectives.engine.subscribing import LAST_EVENTS, Subscription
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.tracing.timeline_file import TimelineFile

__all__ = ["LAST_EVENTS", "TimelineTap"]


class TimelineTap:
    """The timeline file of a rank, if one is open. Any thread."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
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
            # At exit this runs before the file closes by itself, which would not wait for events that have not arrived yet.
            atexit.register(self.stop)
            self._subscription.add(self._file.feed)

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
        if settle:
            self._subscription.settle()
        self._subscription.remove(file.feed)
        file.close()
