"""Whether a process is there that takes what a rank of a kept pool writes."""

from __future__ import annotations

import os
import selectors

from hvdlab.kernel_ext.warm.processes import open_process


class Attendance:
    """The pool's process, watched by the thread that sends.

    Attributes:
        absent: Nobody takes anything now. Never true where nobody was named: such a rank ends with its pool.
    """

    def __init__(self) -> None:
        self.absent = False
        self._named: tuple[int, int] | None = None
        self._descriptor = -1

    def name(self, pid: int, started: int) -> None:
        """This process takes it from now on; nobody if ``pid`` is 0. Any thread; :meth:`update` is to follow."""
        self._named = (pid, started)

    def update(self, selector: selectors.BaseSelector) -> None:
        """Watch who was named last. The thread that sends, as for what follows."""
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

    def has_ended(self, selector: selectors.BaseSelector) -> bool:
        """The process has. Returns false if another one has been named, which :meth:`update` then watches."""
        if self._named is not None:
            return False
        self.close(selector)
        self.absent = True
        return True

    def close(self, selector: selectors.BaseSelector) -> None:
        """Watch nobody."""
        if self._descriptor >= 0:
            selector.unregister(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
