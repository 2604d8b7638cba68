"""The end of an operation that a plane has begun and that goes on without the thread that began it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

Ended = Callable[[Exception | None], None]


class Completion(Protocol):
    """An operation on its way. What was begun on one plane ends in the order in which it was begun."""

    def on_end(self, ended: Ended, /) -> None:
        """Call ``ended(error)`` once the operation has ended, at once if it has; at most one may be given.

        It is called exactly once, on any thread, under no lock that an operation of the plane takes, with ``None`` if the outputs
        are there, :class:`PlaneAborted` after an abort, and whatever else went wrong.
        """


class Pending:
    """A completion that a thread of the plane ends. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_ended = False
        self._error: Exception | None = None
        self._ended: Ended | None = None

    def on_end(self, ended: Ended, /) -> None:
        """See :class:`Completion`."""
        with self._lock:
            self._ended = ended
            if not self._has_ended:
                return
        ended(self._error)

    def end(self, error: Exception | None = None) -> None:
        """The operation has ended; the first call counts."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended, self._error = True, error
            ended = self._ended
        if ended is not None:
            ended(error)
