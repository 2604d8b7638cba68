"""Handles: what a user waits on."""

from __future__ import annotations

import _thread
import contextlib
import os
from typing import TYPE_CHECKING

from hvdlab.collectives.engine.entries import Entry
from hvdlab.collectives.engine.request import CompletionHook, Limit, Request, Result

if TYPE_CHECKING:
    from hvdlab.collectives.engine.engine import Engine


class Handle(Entry):
    """A collective in flight. Made by :meth:`Engine.submit`."""

    __slots__ = ("_done", "_engine", "_error", "_result", "at_once", "ended", "hook_called", "wakeup")

    def __init__(self, engine: Engine, request: Request, site: str, submitted: int) -> None:
        Entry.__init__(self, request, site, submitted)
        self._engine = engine
        self.at_once = False  # whether the thread that submitted it waits for it next, and has not begun to
        self._done = False
        self._result: Result | None = None
        self._error: Exception | None = None
        self.hook_called = False  # belongs to :class:`Hooks`
        self.wakeup = -1  # an eventfd that the waiting thread watches instead of the lock
        # A bare lock, held until the end, is the cheapest thing that a thread can wait on and Ctrl-C can break.
        self.ended = _thread.allocate_lock()
        self.ended.acquire()

    def done(self) -> bool:
        """Whether it has ended, well or badly. Never blocks."""
        return self._done

    def wait_or_withdraw(self, limit: Limit) -> Result:
        """Wait for the end; after ``limit`` give it up on all ranks, with all that is pending in its process set.

        Raises:
            MismatchError, AbortedError, KeyboardInterrupt: As :meth:`wait`; ``AbortedError`` also when the limit has passed.
        """
        if not self._done:
            self._engine.wait_for(self, limit.seconds, limit)
        return self.wait()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the collective to end and return its result; may be called again and from several threads.

        Args:
            timeout: Seconds, or ``None`` for ever.

        Raises:
            MismatchError: The ranks disagree; raised on all of them.
            AbortedError: It can't complete (a rank died, failed, left, was interrupted, …). Output is undefined.
            TimeoutError: It is still in flight; the handle stays valid.
            KeyboardInterrupt: The user interrupted; the collective is then withdrawn on all ranks.
        """
        if not self._done:
            self._engine.wait_for(self, timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self._result is not None
        return self._result

    def complete(self, result: Result | None, error: Exception | None) -> None:
        """End it; the first call counts. For the engine only."""
        if not self._done:
            self._result, self._error = result, error
            self._done = True
            try:  # noqa: SIM105  (done for each tensor of a step, and a context takes longer than all else here)
                self.ended.release()
            except RuntimeError:
                pass  # a thread that gave up waiting has seen it done, and has opened the lock for all others
            if self.wakeup >= 0:
                with contextlib.suppress(OSError):  # it was closed: no thread watches it any more
                    os.eventfd_write(self.wakeup, 1)
        # Last, and also if it had ended: the thread that completed it may have been torn away just before this.
        if self.request.on_done is not None:
            self._engine.hooks.add(self)

    def add_hook(self, hook: CompletionHook) -> bool:
        """Give a request a completion hook that it was submitted without.

        Returns:
            Whether the engine calls it, or has done so. ``False``: the collective had ended before, and the caller is to do
            what the hook would.
        """
        assert self.request.on_done is None, "a request has one completion hook"
        # complete() marks the end and then reads the hook; this sets the hook and then reads the mark. So at least one of the two
        # threads sees what the other has stored; if both do, the one that claims the hook calls it.
        self.request.on_done = hook
        return not (self._done and self._engine.hooks.claim(self))

    def tell_blocked(self, seconds: float) -> None:
        """Let the coordinator know that the user's code can't go on before this has ended, and has waited for ``seconds``.

        For a caller that waits in another way than by :meth:`wait`.
        """
        self._engine.tell_blocked(self, seconds)

    def tell_unblocked(self) -> None:
        """Let the coordinator know that the wait of :meth:`tell_blocked` is over: the user's code goes on."""
        self._engine.tell_unblocked(self)

    def outcome(self) -> tuple[Result | None, Exception | None]:
        """Result and error of a handle that is done; one of them is ``None``."""
        return (self._result, None) if self._error is None else (None, self._error)

    def open(self) -> None:
        """Let all threads through that wait. For the engine only."""
        if self.ended.locked():
            with contextlib.suppress(RuntimeError):  # another thread has just released it
                self.ended.release()
