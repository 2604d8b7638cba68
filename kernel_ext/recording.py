"""A timeline of all ranks, written by the notebook's process: it goes on whatever the ranks do."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.collectives.engine.timeline import LAST_EVENTS
from hvdlab.collectives.timeline.file import TimelineFile

DISK_WITHIN = 10.0
"""Seconds that a slow disk gets to take what is left."""


class Recording:
    """Writes to a file until :meth:`stop`. Raises ``OSError`` if it can't be created.

    Args:
        client: Brings the ranks' events.
        path: The file.
    """

    def __init__(self, client: Client, path: Path) -> None:
        self.path = path
        self._client = client
        self._file = TimelineFile.start(path)
        try:
            client.on_events(self._file.feed, history=False)
        except BaseException:
            self._file.close(DISK_WITHIN)
            raise

    def stop(self) -> None:
        """Complete the file, with what every rank has recorded by now. Raises ``OSError`` if the disk failed."""
        if not self._client.closed:
            threading.Event().wait(LAST_EVENTS)  # ranks send what they have recorded every so often
        with contextlib.suppress(CoordinatorLostError):
            self._client.off_events(self._file.feed)
        self._file.close(DISK_WITHIN)
