"""Waits of users' threads, and inline execution, by which a waiting thread polls the coordinator's socket and executes the order itself.

Without inline execution an order wakes the control thread, which wakes the executor, which wakes the user's thread. While a
user's thread polls, the control thread does not watch the socket. It watches again as soon as that thread is done, begins to
execute, or reads anything but an order to execute.

Ctrl-C can interrupt the thread between any two instructions. The protocol with the control thread, step by step:

* I1  ``Control.pause_reading`` counts up, then unwatches the socket.
* I2  The thread polls, and moves raw bytes from the socket into ``endpoint.early`` in one step of the interpreter.
* I3  It handles an order under the mark of :class:`LockedState`, and removes the order from ``endpoint.early`` under it.
* I4  ``Control.resume_reading`` watches the socket again, and records the count of I1.

I4 also runs after an interrupt in I1 to I3. If an interrupt hits I4 itself, the socket stays unwatched and the counts differ.
The interrupted wait wakes the control thread (``InlineExecutor.interrupted``), which compares the counts whenever it wakes, and
does I4 in place of the thread. Interrupted in I2, the thread has read no bytes or left them all in ``endpoint.early``, where
the control thread finds them. Interrupted in I3, it leaves the mark set, and the next thread that locks the state recovers.
"""

from __future__ import annotations

import os
import select
import time

from hvdlab.collectives.engine.control_thread import Control
from hvdlab.collectives.engine.coordinator_bypass import CoordinatorBypass
from hvdlab.collectives.engine.entries import CompletionHooks, Entry, Handle
from hvdlab.collectives.engine.executor import Executor
from hvdlab.collectives.engine.locked_state import LockedState
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Limit
from hvdlab.collectives.errors import CauseKind
from hvdlab.collectives.protocol.codec import decode_to_peer
from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.protocol.messages import Execute

BLOCKED_AFTER = 0.5
"""Seconds of waiting after which the rank reports to the coordinator that the user's thread is blocked. Shorter waits, nearly all of
them, cost no message."""

# The bytes with which an encoded order begins, behind the array's header: msgpack's header of a text of 7 bytes, and the tag. The thread
# that waits recognises an order by them without decoding the message.
_EXECUTE = b"\xa7Execute"
_TAG = slice(1, 1 + len(_EXECUTE))  # after the header of the array


class HandleWaiter:
    """Waits of one rank's user threads: interruptible, and reported to the coordinator when they are long."""

    def __init__(
        self,
        rank: int,
        locked: LockedState,
        inline: InlineExecutor,
        executor: Executor,
        hooks: CompletionHooks,
        bypass: CoordinatorBypass,
    ) -> None:
        self._rank = rank
        self._locked = locked
        self._inline = inline
        self._executor = executor
        self._hooks = hooks
        self._bypass = bypass

    def wait_for(self, handle: Handle, timeout: float | None, limit: Limit | None = None) -> None:
        """Wait until the handle has ended, or withdraw it once the limit has passed; see :meth:`Handle.wait`.

        Raises ``InvalidRequestError`` in a completion hook.
        """
        self._hooks.refuse_to_wait()
        try:
            if handle.at_once:
                handle.at_once = False
                # Not with a mere timeout, after which the handle stays in flight: a wait at the board ends with the request, or by a limit that
                # gives it up.
                if timeout is None or limit is not None:
                    self._bypass.run(handle, queued=True, limit=limit)
            if not handle.done():
                self._wait_indirectly(handle, timeout)
        except TimeoutError:
            if limit is None:
                raise
            self._locked.withdraw(handle, CauseKind.TIMEOUT, limit.text)
        except KeyboardInterrupt:
            self._interrupted(handle)
            raise
        finally:
            if handle.done():
                handle.release_waiters()  # an interrupt can come between acquire and release below, while other threads wait, too

    def _wait_indirectly(self, handle: Handle, timeout: float | None) -> None:
        if timeout is None:
            left = self._inline.wait_and_execute(handle, BLOCKED_AFTER)
        else:
            # Not inline: this thread could be in the middle of an operation, which does not check the time.
            self._locked.flush_direct()
            left = min(BLOCKED_AFTER, max(timeout, 0.0))
        if not handle.done_lock.acquire(timeout=left) and not self._wait_long(handle, timeout):
            raise TimeoutError(
                f"{handle.request.kind.label} `{handle.name}` ({handle.site}) is still in flight after {timeout:g} s"
            )
        # Opened again: complete() opens it once, and other threads can wait for the same handle.
        handle.done_lock.release()

    def _wait_long(self, handle: Handle, timeout: float | None) -> bool:
        """Report to the coordinator that this thread is blocked, so that it finds deadlocks, and wait on."""
        if timeout is not None and timeout <= BLOCKED_AFTER:
            return False
        self._locked.update(RankState.report_waiting, handle, BLOCKED_AFTER)
        try:
            return handle.done_lock.acquire(timeout=-1 if timeout is None else timeout - BLOCKED_AFTER)
        finally:
            self._locked.update(RankState.report_done_waiting, handle)

    def withdraw_after_interrupt(self, entry: Entry) -> None:
        """Withdraw an entry of :meth:`Engine.run` or :meth:`Engine.allreduce` after an interrupt: no other thread waits for it."""
        if not entry.given_up:
            self._interrupted(entry)

    def _interrupted(self, entry: Entry) -> None:
        # First, so that the control thread reads again even if a second interrupt ends this method.
        self._inline.interrupted()
        text = f"rank {self._rank} was interrupted"
        self._locked.withdraw(entry, CauseKind.INTERRUPTED, text)
        # Perhaps this thread was executing an operation of another process set.
        for set_id, generation in self._executor.pop_interrupted():
            self._locked.update(_withdraw, set_id, generation, text, entry.site)


class InlineExecutor:
    """Executor of orders on users' threads, at most one at a time.

    Args:
        locked: The rank's state.
        endpoint: The connection.
        control: The control thread, which pauses reading meanwhile.
        executor: The executor, whose queued jobs the thread runs.
    """

    def __init__(self, locked: LockedState, endpoint: Endpoint, control: Control, executor: Executor) -> None:
        self._locked = locked
        self._endpoint = endpoint
        self._control = control
        self._executor = executor
        #: Eventfd by which the end of a handle wakes the polling thread; -1 if this rank never executes inline.
        self._wakeup = -1
        #: Polls the wake-up and the socket.
        self._poll = select.poll()
        #: The socket that is polled, or -1.
        self._fd = -1
        # Not over TLS, whose bytes read_ahead() can't move in one step of the interpreter.
        if not endpoint.secure:
            self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._poll.register(self._wakeup, select.POLLIN)

    def wait_and_execute(self, handle: Handle, seconds: float) -> float:
        """Announce queued entries and try to bring ``handle`` to its end on this thread, for ``seconds`` at most.

        Returns:
            The seconds that are left. The handle is perhaps still in flight then, if this thread could not execute, or not any longer.
        """
        # Locks are acquired by ``with`` only: no interrupt comes between acquiring one and the duty to release it.
        if self._wakeup < 0 or self._control.socket_owner.locked() or self._endpoint.backlog:
            self._locked.flush_direct()
            return seconds
        with self._control.socket_owner:
            deadline = time.monotonic() + seconds
            left = seconds
            try:
                while left > 0 and self._watch(handle, left):
                    # Outside _watch(), whose `finally` lets the control thread read again: an operation can last long.
                    self._executor.run_pending()
                    if handle.done():
                        return left
                    left = deadline - time.monotonic()
            finally:
                # Orders that this thread has enqueued and does not run: it has woken no other thread for them.
                if self._executor.queue.jobs:
                    self._executor.wake()
        return max(0.0, deadline - time.monotonic())

    def _watch(self, handle: Handle, seconds: float) -> bool:
        """Wait for an order and handle it. Return false if this thread can't continue to execute inline."""
        control = self._control
        try:
            if not control.pause_reading():
                self._locked.flush_direct()
                return False
            # The endpoint can have another connection since the last poll.
            if self._endpoint.fileno() != self._fd and not self._watch_socket():
                return False
            # Only after pause_reading(): otherwise the answer might wake the control thread before this thread polls.
            self._locked.flush_direct()
            # Stored before done() is read; complete() marks the end before it reads this. So the poll below can't miss the end.
            handle.wakeup = self._wakeup
            if handle.done():
                return True
            for fd, _ in self._poll.poll(seconds * 1000):
                if fd == self._wakeup:
                    os.eventfd_read(self._wakeup)
                elif not self._read():
                    return False
            return True
        finally:
            handle.wakeup = -1
            control.resume_reading()

    def _watch_socket(self) -> bool:
        """Watch the endpoint's new socket instead of the old one. Return false if the connection is lost."""
        if self._fd >= 0:
            self._poll.unregister(self._fd)
        self._fd = self._endpoint.fileno()
        if self._fd >= 0:
            self._poll.register(self._fd, select.POLLIN)
        return self._fd >= 0

    def _read(self) -> bool:
        endpoint, reading = self._endpoint, self._control.reading
        # The control thread is in the middle of messages, so the next order is its own to read.
        if reading.locked():
            return False
        with reading:
            try:
                endpoint.read_ahead()
            except BlockingIOError:
                return True  # the control thread has read the bytes already
            except OSError:
                return False  # the control thread meets the same error, and handles it
            payload = endpoint.early_frame()
            # All other messages are the control thread's, which finds them in ``early``.
            if payload is None or payload[_TAG] != _EXECUTE:
                return False
            message = decode_to_peer(payload)
            assert isinstance(message, Execute)
            self._locked.execute(message, time.monotonic_ns(), endpoint.early, self._executor.enqueue)
        return True

    def interrupted(self) -> None:
        """Wake the control thread after an interrupt of this thread, since reading is perhaps still paused."""
        self._control.wake()

    def close(self) -> None:
        """Free the wake-up descriptor; no thread can execute inline afterwards."""
        # Under the lock: a thread that polls the descriptor finishes first.
        with self._control.socket_owner:
            wakeup, self._wakeup = self._wakeup, -1
            if wakeup >= 0:
                os.close(wakeup)


def _withdraw(state: RankState, set_id: int, generation: int, text: str, site: str) -> None:
    group = state.sets.get(set_id)
    # Otherwise the generation has ended, perhaps because the handle was given up just before.
    if group is not None and group.generation == generation:
        state.withdraw(set_id, CauseKind.INTERRUPTED, text, site)
