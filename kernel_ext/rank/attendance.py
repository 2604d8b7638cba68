"""Whether a process is there that takes what a rank of a kept pool writes."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable

from hvdlab.launch.processes import open_process


class Attendance:
    """The pool's process, watched by the thread that sends.

    Attributes:
        absent: Nobody takes anything now. Never true where nobody was named: such a rank ends with its pool.
    """

    def __init__(self) -> None:
        self.absent = False
        self._lock = threading.Lock()
        self._named: tuple[int, int] | None = None
        self._descriptor = -1

    def name(self, pid: int, started: int) -> None:
        """This process takes it from now on; nobody if ``pid`` is 0. Any thread; :meth:`update` is to follow."""
        with self._lock:
            self._named = (pid, started)

    def update(self, selector: selectors.BaseSelector) -> None:
        """Watch who was named last. The thread that sends, as for what follows."""
        with self._lock:
            named, self._named = self._named, None
        if named is None:
            return
        self.close(selector)
        self._descriptor = open_process(*named) if named[0] else -1
        self.absent = self._descriptor < 0
        if not self.absent:
            selector.register(self._descriptor, selectors.EVENT_READ)

    def is_it(self, descriptor: int) -> bool:
        """Whether this, which the selector has found readable, is the process."""
        return descriptor == self._descriptor

    def has_ended(self, selector: selectors.BaseSelector, then: Callable[[], None]) -> None:
        """The process has. Nothing happens if another one has been named, which :meth:`update` then watches.

        Who is named next comes after what ``then`` does: it can't take back what was done for that one.
        """
        with self._lock:
            if self._named is None:
                self.close(selector)
                self.absent = True
                then()

    def close(self, selector: selectors.BaseSelector) -> None:
        """Watch nobody."""
        if self._descriptor >= 0:
            selector.unregister(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
