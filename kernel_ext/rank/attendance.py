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
        absent: Whether no process takes output now. Never true where none was named: such a rank ends with its pool.
    """

    def __init__(self) -> None:
        self.absent = False
        self._lock = threading.Lock()
        self._named: tuple[int, int, bool] | None = None
        self._descriptor = -1

    def name(self, pid: int, started: int, near: bool = True) -> None:
        """This process takes the output from now on; none does if ``pid`` is 0. Any thread; call :meth:`update` afterwards.

        One that is not ``near`` is not watched: it counts as there until another one is named, or none.
        """
        with self._lock:
            self._named = (pid, started, near)

    def update(self, selector: selectors.BaseSelector) -> None:
        """Watch the process that was named last. Only for the thread that sends, like the methods below."""
        with self._lock:
            named, self._named = self._named, None
        if named is None:
            return
        self.close(selector)
        pid, started, near = named
        self._descriptor = open_process(pid, started) if pid and near else -1
        self.absent = self._descriptor < 0 and (near or not pid)
        if self._descriptor >= 0:
            selector.register(self._descriptor, selectors.EVENT_READ)

    def is_it(self, descriptor: int) -> bool:
        """Whether this descriptor, which the selector has found readable, is the process's."""
        return descriptor == self._descriptor

    def has_ended(self, selector: selectors.BaseSelector, then: Callable[[], None]) -> None:
        """The process has ended: call ``then``. If another one has been named, do nothing; :meth:`update` watches that one.

        ``then`` runs with the lock held, so it is over before the next process can be named, and can't take back what is
        done for that one.
        """
        with self._lock:
            if self._named is None:
                self.close(selector)
                self.absent = True
                then()

    def close(self, selector: selectors.BaseSelector) -> None:
        """Watch no process any more."""
        if self._descriptor >= 0:
            selector.unregister(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
