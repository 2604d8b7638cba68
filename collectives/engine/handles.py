"""Handles, on which users wait, and completion hooks, which the engine calls when a request is finished.

A handle is completed under the rank's lock, on whichever thread brings its end, and its hook is only queued there. A thread
of the engine calls it once it holds no lock any more; it releases the work queue's lock before. A user's thread, which
executes while it waits, wakes the control thread instead. Ctrl-C can interrupt that thread between any two steps, and a hook
has to run once and to its end. Every thread finds the hooks that are due in one queue, and the control thread checks it
whenever it wakes. So no hook is forgotten if a thread is interrupted before it could wake the control thread.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from collections import deque
from typing import Protocol

from hvdlab.collectives.engine.entries import Entry
from hvdlab.collectives.engine.requests import CompletionHook, Limit, Request, Result
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.logs import LOG


class HandleOwner(Protocol):
    """Part of an engine that its handles use."""

    hooks: CompletionHooks

    def wait_for(self, handle: Handle, timeout: float | None, limit: Limit | None = None, /) -> None: ...

    def tell_blocked(self, handle: Handle, seconds: float, /) -> None: ...

    def tell_unblocked(self, handle: Handle, /) -> None: ...


class Wakeable(Protocol):
    """Thread that other threads wake. The control thread then sends queued messages, recovers the state, and calls hooks."""

    def wake(self) -> None:
        """Wake it. Any thread; does not wait."""
        ...


class Handle(Entry):
    """Handle of a collective in flight; threads can wait for its end. Made by :meth:`Engine.submit`.

    Attributes:
        at_once: Whether the thread that submitted it waits for it next, and has not begun to.
        hook_called: Whether its completion hook was called; belongs to :class:`CompletionHooks`.
        wakeup: Eventfd that the waiting thread polls instead of the lock, or -1.
        done_lock: Lock that is held until the end, on which threads wait.
    """

    __slots__ = ("_done", "_engine", "_error", "_result", "at_once", "done_lock", "hook_called", "wakeup")

    def __init__(self, engine: HandleOwner, request: Request, site: str, submitted: int) -> None:
        Entry.__init__(self, request, site, submitted)
        self._engine = engine
        self.at_once = False
        #: Whether it has ended; stored after the outcome, which is in the next two.
        self._done = False
        self._result: Result | None = None
        self._error: Exception | None = None
        self.hook_called = False
        self.wakeup = -1
        # A bare lock, held until the end, is the cheapest object on which a thread can wait and Ctrl-C can break the wait.
        self.done_lock = _thread.allocate_lock()
        self.done_lock.acquire()

    def done(self) -> bool:
        """Return whether it has ended, well or badly. Never blocks."""
        return self._done

    def wait_or_withdraw(self, limit: Limit) -> Result:
        """Wait for the end; after ``limit`` give it up on all ranks, with everything pending in its process set.

        Raises:
            MismatchError, AbortedError, KeyboardInterrupt: As :meth:`wait`; ``AbortedError`` also when the limit has passed.
        """
        if not self._done:
            self._engine.wait_for(self, limit.seconds, limit)
        return self.wait()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the collective to end and return its result. Can be called again and from several threads.

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
            # Without the last traceback: each wait() would add its frames to that of the same exception.
            raise self._error.with_traceback(None)
        assert self._result is not None
        return self._result

    def complete(self, result: Result | None, error: Exception | None) -> None:
        """End it; the first call counts. For the engine only."""
        if not self._done:
            # The result before the mark: a thread that sees the mark reads the result without a lock.
            self._result, self._error = result, error
            self._done = True
            try:  # noqa: SIM105  (done for each tensor of a step, and a context costs more time than the other statements)
                self.done_lock.release()
            except RuntimeError:
                pass  # a thread that gave up waiting has seen it done, and has opened the lock for all others
            # A thread that polls stores the descriptor and then reads the mark; here the mark is stored before the descriptor is read.
            if self.wakeup >= 0:
                with contextlib.suppress(OSError):  # it was closed: no thread watches it any more
                    os.eventfd_write(self.wakeup, 1)
        # Last, and also if it had ended: perhaps the thread that completed it was interrupted just before this.
        if self.request.on_done is not None:
            self._engine.hooks.add(self)

    def add_hook(self, hook: CompletionHook) -> bool:
        """Add a completion hook to a request that was submitted without one.

        Returns:
            Whether the engine calls it, or has done so. ``False``: the collective had ended before, and the caller has to do
            the hook's work.
        """
        assert self.request.on_done is None, "a request has one completion hook"
        # complete() marks the end and then reads the hook; this sets the hook and then reads the mark. So at least one of the two
        # threads sees the other's store; if both do, the one that claims the hook calls it.
        self.request.on_done = hook
        return not (self._done and self._engine.hooks.try_claim(self))

    def tell_blocked(self, seconds: float) -> None:
        """Report to the coordinator that the user's code can't continue before this has ended, and has waited for ``seconds``.

        For a caller that waits in another way than by :meth:`wait`.
        """
        self._engine.tell_blocked(self, seconds)

    def tell_unblocked(self) -> None:
        """Report to the coordinator that the wait of :meth:`tell_blocked` is over."""
        self._engine.tell_unblocked(self)

    def outcome(self) -> tuple[Result | None, Exception | None]:
        """Return result and error of a handle that is done; one of them is ``None``."""
        return (self._result, None) if self._error is None else (None, self._error)

    def release_waiters(self) -> None:
        """Wake all threads that wait. For the engine only."""
        if self.done_lock.locked():
            with contextlib.suppress(RuntimeError):  # another thread has just released it
                self.done_lock.release()


class BoardEntry(Entry):
    """Entry of a collective that a thread posts on the board and waits for there. It gets a handle only if it goes to the coordinator.

    Attributes:
        handle: The handle in its place; ``None`` before :meth:`hand_over`.
    """

    __slots__ = ("_error", "handle")

    def __init__(self, request: Request, name: str, site: str, submitted: int) -> None:
        Entry.__init__(self, request, site, submitted)
        self.name = name
        self._error: Exception | None = None
        self.handle: Handle | None = None

    def complete(self, result: Result | None, error: Exception | None) -> None:
        """End it with an error. For the engine only; without an error it ends on its own thread, which needs no call for that."""
        self._error = error
        if self.handle is not None:
            self.handle.complete(result, error)

    def hand_over(self, handle: Handle) -> None:
        """Let ``handle`` end in place of this entry, also if an error has ended this one already."""
        # complete() stores the error and then reads the handle; this stores the handle and then reads the error. So at least one of the
        # two threads completes the handle; if both do, the first call counts.
        self.handle = handle
        if self._error is not None:
            handle.complete(None, self._error)


class CompletionHooks:
    """Queue of completion hooks of one rank that are due. Any thread.

    Args:
        rank: This rank.
        control: The control thread, which calls :meth:`run` when it is woken.

    Attributes:
        inside: Threads that are in the middle of a hook.
    """

    def __init__(self, rank: int, control: Wakeable) -> None:
        self._rank = rank
        self._wake = control.wake
        #: Completed handles whose hooks no thread has claimed; a handle can be in it twice.
        self._due: deque[Handle] = deque()
        # Held while a handle is removed from ``_due`` and marked, so that this is one step for other threads. No hook runs under it.
        self._claiming = threading.Lock()
        self.inside: set[int] = set()

    def add(self, handle: Handle) -> None:
        """Queue the hook of a completed handle. A thread that recovers from an interrupt can call this again."""
        self._due.append(handle)

    @property
    def due(self) -> bool:
        """Return whether there is a hook to call."""
        return bool(self._due)

    def defer_to_control(self) -> None:
        """Wake the control thread for the hooks that are due, if there are any."""
        if self._due:
            self._wake()

    def run(self) -> None:
        """Call the hooks that are due, on this thread. The caller holds no lock, and is a thread of the engine or closes it."""
        while (handle := self._next()) is not None:
            self._call(handle)

    def try_claim(self, handle: Handle) -> bool:
        """Return whether the caller has to call this handle's hook, since no other thread has claimed it; true once per handle."""
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
        # Where hooks are nested, only the outermost one ends this thread's stay.
        me = threading.get_ident()
        nested = me in self.inside
        self.inside.add(me)
        try:
            hook(*handle.outcome())
        except BaseException as error:  # for any error the engine's thread continues
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
                self.inside.discard(me)

    def refuse_to_wait(self) -> None:
        """Raise if the calling thread is in a hook: the awaited collective can need this very thread.

        Raises:
            InvalidRequestError: The calling thread is in a hook.
        """
        if self.inside and threading.get_ident() in self.inside:
            raise InvalidRequestError(
                "A completion hook must neither wait for a collective nor close the engine: the thread that calls it may be the "
                "one that is waited for. Submit the next collective with a hook of its own, or let another thread wait."
            )

    def after_fork(self) -> None:
        """Drop the hooks in a forked child; the parent calls them."""
        self._due.clear()
        self.inside.clear()
        self._claiming = threading.Lock()
