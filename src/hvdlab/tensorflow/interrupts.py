"""Ctrl-C while the main thread waits in TensorFlow's C++ for collectives.

Python's own handler runs only once that thread is back in Python, which it is when the collectives end. So a thread of its own
watches the descriptor to which Python's C handler writes each signal's number, and withdraws what is pending: it ends with
an error on all ranks, the main thread comes back, and there Python raises ``KeyboardInterrupt``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType

from hvdlab.bindings.handles import Handle
from hvdlab.collectives import context
from hvdlab.collectives.errors import CauseKind, NotInitializedError
from hvdlab.tensorflow.installed import tf

_GRACE = 0.2
"""Seconds in which a main thread that is in Python, or in a call which signals break, has handled the signal."""

_LOOK = 0.02
"""Seconds between two looks at the main thread: there is no event for an interpreter that goes on."""

_HOME = os.path.join(os.path.dirname(tf.__file__), "")


class _Watch:
    """Collectives that kernels have started, and the thread that withdraws them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Process set of each handle that has not ended.
        self._pending: dict[Handle, int] = {}
        self._thread: threading.Thread | None = None

    def started(self, handle: Handle, process_set: int) -> None:
        with self._lock:
            self._pending[handle] = process_set

    def ended(self, handle: Handle) -> None:
        with self._lock:
            self._pending.pop(handle, None)

    def sets(self) -> set[int]:
        """Process sets with collectives that have not ended."""
        with self._lock:
            return set(self._pending.values())

    def begin(self) -> None:
        """Watch from now on. Does nothing on another thread than the main one, which alone may ask for the signals."""
        if self._thread is not None or threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(
            target=self._watch, args=(reader, before), name="hvdlab-tensorflow-interrupts", daemon=True
        )
        self._thread.start()

    def _watch(self, reader: int, before: int) -> None:
        while numbers := os.read(reader, 64):
            if before != -1:
                with contextlib.suppress(OSError):  # closed, or full: whoever watches it has been woken
                    os.write(before, numbers)
            if signal.SIGINT in numbers and self.sets() and _main_thread_is_stuck(self):
                self._withdraw()

    def _withdraw(self) -> None:
        try:
            engine = context.engine()
        except NotInitializedError:
            return  # it was shut down, which ended them
        for process_set in self.sets():
            engine.withdraw(f"rank {engine.rank} was interrupted", process_set, CauseKind.INTERRUPTED)

    def after_fork(self) -> None:
        """In a forked child: the thread and its pipe are the parent's."""
        if self._thread is not None:
            signal.set_wakeup_fd(-1)
        self.__init__()  # type: ignore[misc]


def _main_thread_is_stuck(watch: _Watch) -> bool:
    """Whether the main thread stays within a call of TensorFlow's while collectives are pending."""
    before = _place()
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline:
        time.sleep(_LOOK)
        now = _place()
        if now != before or not watch.sets():
            return False
    return before is not None


def _place() -> tuple[int, int] | None:
    """Where the main thread is, if that is in a module of TensorFlow's."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or -1)
    if frame is None or not os.path.abspath(frame.f_code.co_filename).startswith(_HOME):
        return None
    return id(frame), frame.f_lasti


_watch = _Watch()
begin, started, ended = _watch.begin, _watch.started, _watch.ended
os.register_at_fork(after_in_child=_watch.after_fork)
