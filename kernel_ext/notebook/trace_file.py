"""Trace files, written by the notebook's process, so that writing goes on whatever the ranks do."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.collectives.tracing.timeline_file import TimelineFile

DISK_WITHIN = 10.0
"""Seconds that a slow disk gets to take what is left."""


class TraceFileWriter:
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
            _take_history(client)
            client.on_events(self._file.feed)
        except BaseException:
            self._file.close(DISK_WITHIN)
            raise

    def stop(self) -> None:
        """Complete the file, with what every rank has recorded by now. Raises ``OSError`` if the disk failed."""
        self._client.gathered()
        with contextlib.suppress(CoordinatorLostError):
            self._client.off_events(self._file.feed)
        self._file.close(DISK_WITHIN)


def save_trace(client: Client, path: str | os.PathLike[str], format: str | None = None) -> Path:
    """Write what the client's recording has, with what every rank has recorded by now.

    Raises:
        InvalidRequestError: There is no such format.
        OSError: It could not be written.
    """
    from hvdlab.collectives.tracing.trace_file import format_of, save_recording

    chosen = format_of(path, format)
    return save_recording(client.gathered(), path, chosen)


def _take_history(client: Client) -> None:
    """Let the recording have what the coordinator has of the past; only the first listener gets that.

    Raises ``CoordinatorLostError``, or ``TimeoutError`` if the coordinator does not answer.
    """
    assert client.recording is not None  # the first access makes it
    client.flush()
