"""When an interrupt may hit the main thread, and which run of a cell it is meant for.

A signal can arrive at any instruction of the main thread. It must become a KeyboardInterrupt in the user's code of the
very cell that was meant, never in the code around it (which would end the rank's loop), never in the next cell.

For an interrupt of the pool the control thread notes which run is meant and then sends :data:`INTERRUPT_SIGNAL`, so that the handler
recognises a late one. The handler runs on the main thread and looks at the stack that it interrupted: if a frame of
guarded code is on it, raising is safe, since the exception passes through that frame to the runner, which waits for it.
Otherwise the interrupt is remembered until the next guarded code begins, and forgotten when the cell ends.

A signal that comes after Python's last check for signals and before a blocking system call is noted but does not break the
call. That is not as rare as it sounds: the main thread gives the interpreter's lock away just there, and the thread that
sends the signal waited for it. So that thread sends the signal again until the handler has run.

The exception may be raised and yet be lost: the interpreter drops whatever a finalizer or a weak reference's callback
raises, and those run in the middle of any code that the collector happens to stop. This is not as rare as it sounds
either: during a long collection the thread that sends the signal waits for the interpreter's lock, and gets it in the
first finalizer. The interpreter passes such an exception to ``sys.unraisablehook``; if it is the one that the handler
raised, our hook requests the interrupt again.

Where a framework's native code has called the guarded code in the middle of its own work, such as DDP in a backward pass, an
exception would leave that work half done for all later cells. The interrupt is held there: the engine withdraws what the
native code waits for, so that it ends by itself, and the interrupt is requested again until it can be raised.

A cell's own calls send messages to the coordinator on the main thread. An exception between the removal of messages from
their queue and the end of the system call would lose them, or cut the stream in the middle of a frame. So an interrupt
in :meth:`LockedState.flush`, which never blocks, is requested again until that has returned.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import CodeType, FrameType, coroutine
from typing import TYPE_CHECKING, Any, Protocol

from hvdlab.bindings.framework_hooks import must_return
from hvdlab.collectives.engine.locked_state import LockedState
from hvdlab.collectives.system import SignalHandler, set_signal_handler, signal_handler

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPT_SIGNAL = signal.SIGURG
"""By default it is ignored, so it can do no harm to code that does not expect it; SIGINT stays free for senders from outside."""
FIRST_RETRY = 0.005
LAST_RETRY = 1.0
HELD_AT_MOST = 1.0
"""Seconds after which an interrupt is raised wherever it is held."""


class HoldsInterrupts(Protocol):
    """The part of the engine that the gate needs."""

    def hold_interrupt(self) -> None: ...
    def end_native_waits(self) -> None: ...


class InterruptDelivery:
    """Turns interrupts of the pool into KeyboardInterrupt of the running cell.

    :meth:`request` is for any thread; everything else belongs to the main thread.

    Args:
        loop: The main thread's.
        engine: Ends the waits of native code while an interrupt is held.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: HoldsInterrupts) -> None:
        self._loop, self._engine = loop, engine
        #: For pthread_kill(): a signal that is sent to the process may be delivered to another thread, and
        #: then leaves a system call unbroken in which the main thread waits.
        self._main = threading.main_thread().ident or 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._insist = threading.Thread(target=self._send_again, name="hvdlab-interrupts", daemon=True)
        self._run = 0  # number of the cell that is running or ran last
        self._running = False
        self._requested: int | None = None  # run that the signal under way is meant for
        self._awaited = 0  # cells that have come and not begun
        self._early = 0  # how many of them an interrupt is meant for
        self.pending = False  # an interrupt came when it could not be raised
        self._guarded: list[CodeType] = []
        #: The task of a cell that awaits something; None while the cell's own code is on the stack.
        self._suspended: asyncio.Task[Any] | None = None
        self.suspended_in: Coroutine[Any, Any, Any] | None = (
            None  # the cell's code, while it awaits something
        )
        #: Whether we have cancelled the suspended task: in the cell that becomes a KeyboardInterrupt.
        self._cancelled = False
        #: Handlers that the process had before install(); uninstall() puts them back.
        self._previous: dict[int, SignalHandler] = {}
        self._raised = (
            0  # id() of the last KeyboardInterrupt; the exception itself would keep the user's frames alive
        )
        #: Our hook with the one before it, so that a hook which user code installed since is not overwritten.
        self._hook: partial[None] | None = None
        #: When the interrupt of this cell was held first; 0 if it was not.
        self._held_since = 0.0

    # -- any thread ---------------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """Count a cell that has come and will begin."""
        with self._lock:
            self._awaited += 1

    def request(self) -> bool:
        """Interrupt the cells that have come: the running one, or the one that is about to begin.

        Returns False (and nothing happens) if there is none.
        """
        with self._lock:  # the cell can't end between the look and the signal
            if not self._running:
                # Under load a rank may begin a cell after the user has interrupted it. If that interrupt were
                # dropped here, the cell would run for ever.
                self._early = self._awaited
                return self._early > 0
            self._requested = self._run
            signal.pthread_kill(self._main, INTERRUPT_SIGNAL)
            self._changed.notify_all()
            return True

    def _under_way(self) -> bool:
        return self._running and self._requested == self._run

    def _send_again(self) -> None:
        delay = FIRST_RETRY
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._under_way():
                    delay = FIRST_RETRY
                    self._changed.wait()
                    continue
                self._changed.wait(delay)
                # Once more after the wait, in which the handler may have run or the cell ended; and under the lock, since the cell
                # must not end between the look and the signal.
                sent = self._under_way()
                if sent:
                    signal.pthread_kill(self._main, INTERRUPT_SIGNAL)
            if sent:
                delay = min(2 * delay, LAST_RETRY)
                # Without the lock, which the handler takes on the main thread, perhaps while that holds one of the engine's.
                if self._held_since:
                    self._engine.end_native_waits()

    # -- main thread --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Take the signals over."""
        self._take_signals()
        self._take_hook()
        self._insist.start()

    def uninstall(self) -> None:
        """Give the signals back."""
        with self._changed:
            self._closed, self._running = True, False
            self._changed.notify_all()
        # Without the lock, which that thread needs to see that it has to end; and before the handlers are given back, so that
        # the last signal that it sends finds ours.
        self._insist.join()
        for number, previous in self._previous.items():
            # The user's code may have installed a handler of its own since, which stays.
            if signal_handler(number) == self._on_signal:
                set_signal_handler(number, previous)
        if self._hook is not None and sys.unraisablehook is self._hook:
            sys.unraisablehook = self._hook.args[0]

    def _take_signals(self) -> None:
        for number in (signal.SIGINT, INTERRUPT_SIGNAL):
            current = signal_handler(number)
            if current != self._on_signal:
                self._previous.setdefault(number, current if current is not None else signal.SIG_DFL)
                set_signal_handler(number, self._on_signal)

    def _take_hook(self) -> None:
        if self._hook is None or sys.unraisablehook is not self._hook:
            # A new object each time: a hook that calls the one it replaced must not end up in a circle.
            self._hook = partial(self._on_unraisable, sys.unraisablehook)
            sys.unraisablehook = self._hook

    def begin(self) -> None:
        """Begin a cell: interrupts from now on are for it."""
        self._take_signals()  # an earlier cell may have changed them
        self._take_hook()
        with self._lock:
            self._run += 1
            self._raised = 0
            self._held_since = 0.0
            self._cancelled = False
            self.pending = self._early > 0
            self._early = max(0, self._early - 1)
            self._awaited = max(0, self._awaited - 1)
            # Last: the handler runs between any two of these lines, and does not take the lock. If it took the cell for a running
            # one any sooner, the interrupt that it leaves in `pending` would be overwritten above.
            self._running = True

    def skip(self) -> None:
        """Count down a cell that has come and will not begin, with the interrupt that is meant for it."""
        with self._lock:
            self._early = max(0, self._early - 1)
            self._awaited = max(0, self._awaited - 1)

    def end(self) -> None:
        """End the cell: interrupts that arrive from now on are dropped."""
        with self._lock:
            # In this order: the handler may run between the two lines, and for a running cell it would set `pending` again.
            self._running = False
            self.pending = False
        # A debugger keeps SIGINT when it lets the cell go on; between cells it would trace the rank's own loop from then on.
        self._take_signals()

    @property
    def interrupted(self) -> bool:
        """Return whether the running cell has been interrupted."""
        return bool(self._raised or self.pending or self._held_since)

    @property
    def held(self) -> bool:
        """Return whether an interrupt of the running cell was held, and has not been raised since."""
        return bool(self._held_since and not self._raised)

    def guard(self, code: CodeType) -> None:
        """Interrupts may raise wherever a frame of ``code`` is on the stack."""
        # By its code, since the frame does not exist yet: there must be no moment in which the code runs
        # unguarded, and an interrupt stays pending.
        self._guarded.append(code)

    def unguard(self) -> None:
        """Undo the last :meth:`guard`."""
        self._guarded.pop()

    @coroutine
    def drive(self, coro: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Await ``coro``; an interrupt while it is suspended is raised in it as KeyboardInterrupt."""
        step: Callable[[Any], Any] = coro.send
        value: Any = None
        while True:
            try:
                waited_for = step(value)
            except StopIteration as stop:
                return stop.value
            self._suspended, self.suspended_in = asyncio.current_task(self._loop), coro
            # After `_suspended` is set: from then on the handler wakes the cell itself, and an interrupt before that is in `pending`.
            if self.pending:
                self.pending = False
                # With the cell's number: when the loop gets to it, the next cell may be suspended in place of this one.
                self._loop.call_soon(self._cancel, self._run)
            try:
                step, value = coro.send, (yield waited_for)
            except asyncio.CancelledError as error:
                step, value = coro.throw, self._translated(error)
            except GeneratorExit:
                coro.close()
                raise
            except BaseException as error:  # noqa: BLE001  # whatever the awaited raised belongs to the coroutine
                step, value = coro.throw, error
            finally:
                # Before the coroutine goes on: while it runs, an interrupt is raised in it, and must not cancel its next wait.
                self._suspended = self.suspended_in = None

    def _translated(self, error: asyncio.CancelledError) -> BaseException:
        task = asyncio.current_task(self._loop)
        if not self._cancelled:
            return error
        self._cancelled = False
        if task is not None:
            # The request ends as a KeyboardInterrupt: `Task.cancelling()` would otherwise go on to count it.
            task.uncancel()
        return KeyboardInterrupt()

    def _cancel(self, run: int) -> None:
        """On the loop: wake the suspended cell."""
        if self._suspended is not None and run == self._run and not self._cancelled:
            self._cancelled = True
            self._suspended.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if frame is not None and (frame.f_code is _HOOK or _is_on_stack(frame, [_REPEAT])):
            return  # raised in our hook it would be lost as well; _send_again() repeats what was requested
        # Without the lock: this thread may hold it, stopped by the signal in the middle of `begin` or `end`.
        if number == INTERRUPT_SIGNAL:
            # Only signals of the pool name a run. A SIGINT comes from outside, and is meant for whichever
            # cell runs now.
            requested, self._requested = self._requested, None
            if requested != self._run:
                return  # meant for a cell that has ended since, or sent once too often
        if not self._running:
            return  # a rank without a cell has nothing to interrupt, and its loop must live
        if _is_on_stack(frame, self._guarded):
            if _is_on_stack(frame, [_FLUSH]):
                self._repeat()
                return
            if frame is not None and self._is_to_be_held(frame):
                self._engine.hold_interrupt()
                self._repeat()
                return
            interrupt = KeyboardInterrupt()
            self._raised = id(interrupt)
            raise interrupt
        if self._suspended is not None:
            # On the loop's own thread, yet `call_soon` would not do: the loop may be asleep in its selector, and has to wake up.
            self._loop.call_soon_threadsafe(self._cancel, self._run)
        else:
            self.pending = True

    def _is_to_be_held(self, frame: FrameType) -> bool:
        now = time.monotonic()
        if (self._held_since and now > self._held_since + HELD_AT_MOST) or not must_return(frame):
            return False
        # The first time counts: each repetition of the interrupt would otherwise begin the limit again.
        self._held_since = self._held_since or now
        return True

    def _on_unraisable(
        self, previous: Callable[[UnraisableHookArgs], object], lost: UnraisableHookArgs
    ) -> None:
        """Handle an exception that the interpreter has dropped, on any thread."""
        # The type, too: memory, and with it the id, may have come to belong to another exception since.
        if type(lost.exc_value) is KeyboardInterrupt and id(lost.exc_value) == self._raised:
            self._repeat()
        else:
            previous(lost)  # without the lock, which this thread may hold already

    def _repeat(self) -> None:
        """Request once more an interrupt that was dropped or held. It hit guarded code, so this thread does not hold the lock."""
        with self._changed:
            # The thread of _send_again() sends the signal, after a moment: sent from here, it would be raised in this hook.
            self._requested = self._run
            self._changed.notify_all()


_FLUSH = LockedState.flush.__code__
_HOOK, _REPEAT = InterruptDelivery._on_unraisable.__code__, InterruptDelivery._repeat.__code__


def _is_on_stack(frame: FrameType | None, codes: list[CodeType]) -> bool:
    while frame is not None:
        if any(frame.f_code is code for code in codes):
            return True
        frame = frame.f_back
    return False
