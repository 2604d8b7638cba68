"""A pool that is being started in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.pool import Pool

LEAVE_WITHIN = 5.0
"""Seconds that :meth:`Coming.close` waits for a start that is under way. The start ends with this process in any case."""


class Coming:
    """Starts a pool on a thread of its own.

    Args:
        start: Starts the pool; called with a function that it calls with a short text at each step.
        done: Called with the pool, on that thread.
    """

    def __init__(
        self, start: Callable[[Callable[[str], None]], Pool], done: Callable[[Coming, Pool], None]
    ) -> None:
        self._start, self._done = start, done
        self._steps: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hvdlab-coming", daemon=True)
        self._thread.start()

    def wait(self, show: Callable[[str], None]) -> None:
        """Wait until the pool is there, and raise what its start raised. An interrupt ends the wait, not the start.

        Args:
            show: Called with a short text at each step.
        """
        for text in iter(self._steps.get, None):
            show(text)
        self._steps.put(None)  # for the next call
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Give the pool up: it ends as soon as it has started."""
        with self._lock:
            self._closed = True
        self._thread.join(LEAVE_WITHIN)

    def _run(self) -> None:
        try:
            pool = self._start(self._steps.put)
            with self._lock:
                wanted = not self._closed
                if wanted:
                    self._done(self, pool)
            if not wanted:
                pool.stop()
        except BaseException as error:  # noqa: BLE001  # raised again where it is waited for
            self._error = error
        finally:
            self._steps.put(None)
