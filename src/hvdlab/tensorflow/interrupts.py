"""Deadlocks and Ctrl-C while the main thread waits for collectives in TensorFlow's C++.

No thread calls ``wait`` on the handle of a kernel. So the coordinator would not learn that this rank can't continue without another
rank, which has ended its cell or waits elsewhere. The thread ``hvdlab-tensorflow-waiting``, which runs only while kernels
are executed, reports this once the process has computed nothing for a while: before that the next operation may be on its way.

Python's own signal handler runs only when the main thread is back in Python, that is, when the collectives have ended. So the
thread ``hvdlab-tensorflow-interrupts`` reads the descriptor to which Python's C handler writes each signal's number. After Ctrl-C
it withdraws all pending collectives: the collectives end with an error on all ranks, the main thread comes back to Python, and there Python
raises ``KeyboardInterrupt``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from hvdlab.bindings.handles import Handle
from hvdlab.collectives import context
from hvdlab.collectives.errors import CauseKind, NotInitializedError
from hvdlab.tensorflow.installed import tf

_GRACE = 0.2
"""Seconds within which a main thread that is in Python, or in a call that signals interrupt, has handled the signal."""

_LOOK = 0.02
"""Seconds between two looks at the main thread. Polling, since no event says that the interpreter has gone on."""

_BLOCKED_AFTER = 1.0
"""Seconds between two looks at a process with pending kernels. If it computed next to nothing in between, it waits."""

_NOTHING = 0.1
"""The most seconds of CPU time that a waiting process takes between two looks."""

_HOME = os.path.join(os.path.dirname(tf.__file__), "")


class _PendingCollectives:
    """The collectives that kernels have started, and the two threads that report and withdraw them."""

    def __init__(self) -> None:
        #: Guards the following: kernels start and end on TensorFlow's and the engine's threads.
        self._lock = threading.Lock()
        #: Process set of each handle that has not ended, the oldest first.
        self._pending: dict[Handle, int] = {}
        #: The thread that withdraws collectives after Ctrl-C; ``None`` before :meth:`begin`.
        self._thread: threading.Thread | None = None
        #: How many kernels are between :meth:`expect` and :meth:`started` or :meth:`failed`.
        self._expected = 0
        #: How many collectives kernels have started.
        self._count = 0
        #: The thread that reports a rank that waits and does not compute. It ends when no kernel is expected, none is pending and none
        #: has started since its last turn.
        self._reporter: threading.Thread | None = None

    def expect(self) -> None:
        """Begin to watch before a kernel submits a collective. :meth:`started` or :meth:`failed` must follow.

        The thread is started here and not in :meth:`started`: a kernel that fails after its collective was submitted would give
        TensorFlow the memory back while the core reads and writes it.

        Raises:
            RuntimeError: The process may not have more threads.
        """
        with self._lock:
            if self._reporter is None:
                reporter = threading.Thread(
                    target=self._report_blocked, name="hvdlab-tensorflow-waiting", daemon=True
                )
                # Stored once it has started: later kernels must not count on a thread that could not be made.
                reporter.start()
                self._reporter = reporter
            self._expected += 1

    def started(self, handle: Handle, process_set: int) -> None:
        """Record that a kernel waits for this handle."""
        with self._lock:
            # Under one lock with the counts: in between, the reporter would find neither, and end.
            self._pending[handle] = process_set
            self._expected -= 1
            self._count += 1

    def failed(self) -> None:
        """Forget a kernel that has submitted nothing."""
        with self._lock:
            self._expected -= 1

    def ended(self, handle: Handle) -> None:
        """Forget a handle that has ended."""
        with self._lock:
            self._pending.pop(handle, None)

    def idle(self) -> bool:
        """Return whether no kernel waits now; another one may a moment later."""
        return not self._pending

    def _report_blocked(self) -> None:
        """Report to the coordinator that this rank waits for its oldest handle, as long as the process does no other work."""
        reported: Handle | None = None
        end_report: Callable[[], None] | None = None
        waited = 0.0
        while True:
            with self._lock:
                oldest, count = next(iter(self._pending), None), self._count
            before, cpu = time.monotonic(), time.process_time()
            time.sleep(_BLOCKED_AFTER)
            with self._lock:
                now = next(iter(self._pending), None)
                over = now is None and count == self._count and not self._expected
                # Under the lock: expect() finds the thread either going on, or gone.
                if over:
                    self._reporter = None
            computed = time.process_time() - cpu > _NOTHING
            if end_report is not None and (computed or now is not reported):
                end_report()
                reported, end_report, waited = None, None, 0.0
            if over:
                return
            if now is not None and now is oldest and not computed:
                waited += time.monotonic() - before
                reported, end_report = now, now.tell_blocked(waited) or end_report

    def sets(self) -> set[int]:
        """Process sets with collectives that have not ended."""
        with self._lock:
            return set(self._pending.values())

    def begin(self) -> None:
        """Watch for Ctrl-C from now on. Does nothing if called on another thread than the main one: Python then refuses."""
        if self._thread is not None or threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        # Python refuses a blocking descriptor for its signals.
        os.set_blocking(writer, False)
        # No warnings of a full pipe, whose reader is awake.
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(
            target=self._watch, args=(reader, before), name="hvdlab-tensorflow-interrupts", daemon=True
        )
        self._thread.start()

    def _watch(self, reader: int, before: int) -> None:
        while numbers := os.read(reader, 64):
            # There is one descriptor for the process: its former owner, such as an event loop, still gets the
            # numbers.
            if before != -1:
                with contextlib.suppress(OSError):  # closed; or full, so its reader is awake
                    os.write(before, numbers)
            if signal.SIGINT in numbers and self.sets() and _main_thread_is_stuck(self):
                self._withdraw()

    def _withdraw(self) -> None:
        try:
            engine = context.engine()
        except NotInitializedError:
            return  # hvdlab was shut down, which has ended the collectives
        for process_set in self.sets():
            engine.withdraw(f"rank {engine.rank} was interrupted", process_set, CauseKind.INTERRUPTED)

    def after_fork(self) -> None:
        """Start afresh in a forked child: the threads and the pipe are the parent's."""
        if self._thread is not None:
            # The pipe is the parent's as well: a signal of the child would make the parent's thread withdraw
            # the parent's collectives.
            signal.set_wakeup_fd(-1)
        self.__init__()  # type: ignore[misc]


def _main_thread_is_stuck(collectives: _PendingCollectives) -> bool:
    """Return whether the main thread stays at one place in TensorFlow for :data:`_GRACE` seconds while collectives are pending."""
    before = _place()
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline:
        time.sleep(_LOOK)
        now = _place()
        if now != before or not collectives.sets():
            return False
    return before is not None


def _place() -> tuple[int, int] | None:
    """Return the frame and instruction at which the main thread is; ``None`` if that is in no module of TensorFlow's."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or -1)
    if frame is None or not os.path.abspath(frame.f_code.co_filename).startswith(_HOME):
        return None
    return id(frame), frame.f_lasti


_collectives = _PendingCollectives()
begin, idle = _collectives.begin, _collectives.idle
expect, started, failed, ended = (
    _collectives.expect,
    _collectives.started,
    _collectives.failed,
    _collectives.ended,
)
os.register_at_fork(after_in_child=_collectives.after_fork)
