"""How a plane reports the end of an operation that goes on without the thread that began it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

Ended = Callable[[Exception | None], None]


class Completion(Protocol):
    """An operation on its way. The operations of one plane end in the order in which they were begun."""

    def on_end(self, ended: Ended, /) -> None:
        """Have ``ended(error)`` called once the operation has ended, at once if it has already. May be called once only.

        The plane calls it exactly once, on any thread, under no lock that an operation of the plane takes: with ``None`` if the outputs
        are there, with :class:`PlaneAborted` after an abort, or with any other error that ended the operation.
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
