"""When an interrupt may hit the main thread, and whom it is for.

SIGINT can arrive at any instruction of the main thread. It must become a KeyboardInterrupt in the user's code of the
very cell that was meant, never in the code around it (which would end the rank's loop), never in the next cell.

The control thread notes which run it means before it sends the signal, so a late signal is recognised. The handler runs
on the main thread and looks at the stack that it interrupted: if a frame of guarded code is on it, raising is safe,
since the exception passes through that frame to the runner, which waits for it. Otherwise the interrupt is remembered
until the next guarded code begins, and forgotten when the cell ends.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from types import CodeType, FrameType, coroutine
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None


class InterruptGate:
    """Turns interrupts of the pool into KeyboardInterrupt of the running cell.

    :meth:`request` is for any thread; everything else belongs to the main thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._main = threading.main_thread().ident or 0
        self._lock = threading.Lock()
        self._run = 0  # number of the cell that is running or ran last
        self._running = False
        self._requested: int | None = None  # run that the signal under way is meant for
        self.pending = False  # an interrupt came when it could not be raised
        self._guarded: list[CodeType] = []
        self._suspended: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._previous: Handler = None

    # -- any thread ---------------------------------------------------------------------------------------------------

    def request(self) -> bool:
        """Interrupt the running cell; False (and nothing happens) if none is running."""
        with self._lock:  # the cell can't end between the look and the signal
            if not self._running:
                return False
            self._requested = self._run
            signal.pthread_kill(self._main, signal.SIGINT)
            return True

    # -- main thread --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Take SIGINT over; user code may have changed the handler since, so this is done for each cell."""
        previous = signal.getsignal(signal.SIGINT)
        if previous != self._on_signal:
            self._previous = previous
            signal.signal(signal.SIGINT, self._on_signal)

    def uninstall(self) -> None:
        """Give SIGINT back."""
        if signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.signal(signal.SIGINT, self._previous if self._previous is not None else signal.SIG_DFL)

    def begin(self) -> None:
        """A cell begins: interrupts from now on are for it."""
        self.install()
        with self._lock:
            self._run += 1
            self.pending = False
            self._running = True

    def end(self) -> None:
        """The cell has ended: what arrives from now on is dropped."""
        with self._lock:
            self._running = False
            self.pending = False

    def guard(self, code: CodeType) -> None:
        """Interrupts may raise wherever a frame of ``code`` is on the stack."""
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
            self._suspended = asyncio.current_task(self._loop)
            if self.pending:
                self.pending = False
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
                self._suspended = None

    def _translated(self, error: asyncio.CancelledError) -> BaseException:
        task = asyncio.current_task(self._loop)
        if not self._cancelled:
            return error
        self._cancelled = False
        if task is not None:
            task.uncancel()
        return KeyboardInterrupt()

    def _cancel(self, run: int) -> None:
        """On the loop: wake the suspended cell."""
        if self._suspended is not None and run == self._run and not self._cancelled:
            self._cancelled = True
            self._suspended.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        requested, self._requested = self._requested, None
        if not self._running:
            if requested is None and callable(self._previous):
                self._previous(number, frame)
            return
        if requested is not None and requested != self._run:
            return  # meant for a cell that has ended since
        if self._is_guarded(frame):
            raise KeyboardInterrupt
        if self._suspended is not None:
            self._loop.call_soon_threadsafe(self._cancel, self._run)
        else:
            self.pending = True

    def _is_guarded(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code in self._guarded:
                return True
            frame = frame.f_back
        return False
