"""Completion hooks: functions that the engine calls when a request is finished.

A handle is completed under the rank's lock, on whichever thread brings its end; its hook is only put aside there. A thread
of the engine calls it once it holds no lock any more: it lays down the lane's baton for that. A user's thread, which executes while
it waits, wakes the control thread instead: Ctrl-C may tear it away between any two steps, and a hook has to run once
and to its end. Every thread finds the hooks that are due in one queue, and the control thread looks into it whenever it
wakes. So no hook is forgotten if a thread is torn away before it could wake the control thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.logs import LOG

if TYPE_CHECKING:
    from hvdlab.collectives.engine.handle import Handle


class Hooks:
    """The hooks of one rank that are due. Any thread.

    Args:
        rank: This rank.
        wake: Has :meth:`run` called by the control thread.
    """

    def __init__(self, rank: int, wake: Callable[[], None]) -> None:
        self._rank = rank
        self._wake = wake
        self._due: deque[Handle] = deque()
        # Held while a handle is taken out of ``_due`` and marked, so that this is one step for other threads. No hook runs under it.
        self._claiming = threading.Lock()
        #: Threads that are in the middle of a hook.
        self._inside: set[int] = set()

    def add(self, handle: Handle) -> None:
        """The hook of a completed handle is due. May be called again, by a thread that mends what another one left undone."""
        self._due.append(handle)

    @property
    def due(self) -> bool:
        """Whether there is something to be called."""
        return bool(self._due)

    def leave(self) -> None:
        """If something is due, leave it to the control thread."""
        if self._due:
            self._wake()

    def run(self) -> None:
        """Call what is due, on this thread. The caller holds no lock, and is a thread of the engine or closes it."""
        while (handle := self._next()) is not None:
            self._call(handle)

    def claim(self, handle: Handle) -> bool:
        """Whether the caller has to call this handle's hook, since no thread has done so or will; true once for each handle."""
        with self._claiming:
            if handle.hook_called:
                return False
            handle.hook_called = True
            return True

    def _next(self) -> Handle | None:
        while self._due:
            with self._claiming:
                handle = self._due.popleft() if self._due else None
                if handle is not None and not handle.hook_called:
                    handle.hook_called = True
                    return handle
        return None

    def _call(self, handle: Handle) -> None:
        hook = handle.request.on_done
        assert hook is not None
        me = threading.get_ident()
        nested = me in self._inside
        self._inside.add(me)
        try:
            hook(*handle.outcome())
        except BaseException as error:  # whatever it is, the engine's thread goes on
            if threading.current_thread() is threading.main_thread() and not isinstance(error, Exception):
                raise  # Ctrl-C while the engine is closed
            LOG.exception(
                "rank %d: the completion hook of %s `%s` (%s) failed; the collective itself did not",
                self._rank,
                handle.request.kind.label,
                handle.name,
                handle.site,
            )
        finally:
            if not nested:
                self._inside.discard(me)

    def refuse_to_wait(self) -> None:
        """Raise if the calling thread is in a hook: what it would wait for may need this very thread.

        Raises:
            InvalidRequestError: The calling thread is in a hook.
        """
        if self._inside and threading.get_ident() in self._inside:
            raise InvalidRequestError(
                "A completion hook must neither wait for a collective nor close the engine: the thread that calls it may be the "
                "one that is waited for. Submit the next collective with a hook of its own, or let another thread wait."
            )

    def after_fork(self) -> None:
        """In a forked child: drop the hooks, which are the parent's to call."""
        self._due.clear()
        self._inside.clear()
        self._claiming = threading.Lock()
