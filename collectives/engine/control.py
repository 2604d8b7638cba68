"""The control thread: reads the coordinator's messages, sends what is queued, keeps timers. It never blocks on work."""

from __future__ import annotations

import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint

Call = Callable[[], object]

PARTING = 2.0
"""Seconds that the coordinator has to read the rank's goodbye."""


class Shell(Protocol):
    """What the control thread calls."""

    def flush(self) -> None: ...

    def run_hooks(self) -> None: ...

    def receive(self) -> None: ...

    def leader_torn(self) -> None: ...

    def connection_lost(self, reason: str) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Control:
    """One thread, one epoll: the coordinator's socket and a wake-up.

    Attributes:
        place: Held by the thread that leads (see :mod:`~hvdlab.collectives.engine.leading`), from before :meth:`cede` until
            after :meth:`reclaim`.
        reading: Held by the thread that reads from the connection.
    """

    def __init__(self, endpoint: Endpoint, shell: Shell, label: str) -> None:
        self._endpoint = endpoint
        self._shell = shell
        self._fd = endpoint.fileno()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._fd, select.EPOLLIN)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._calls: deque[Call] = deque()
        self._timers: list[tuple[float, int, Call]] = []
        self._order = itertools.count()
        self._stopping = False
        self._lost = False
        self._writable = False
        self.place = threading.Lock()
        self.reading = threading.Lock()
        # How often the control thread's place at the socket was ceded, and the last of these times that was taken back.
        self._ceded = self._reclaimed = 0
        self._closing = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"hvdlab-control-{label}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the thread flush. Any thread; one write."""
        # Under a lock: after close() the descriptor's number may belong to another file of this process.
        with self._closing:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def call(self, call: Call) -> None:
        """Run this on the control thread."""
        self._calls.append(call)
        self.wake()

    def stop(self, timeout: float) -> None:
        """Flush, end the thread and close what it owns."""
        self._stopping = True
        self.wake()
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout)

    def close(self) -> None:
        """Free the descriptors, after the thread has ended. Wake-ups have no effect from then on."""
        with self._closing:
            wakeup, self._wakeup = self._wakeup, -1
        if wakeup >= 0:
            self._epoll.close()
            os.close(wakeup)

    def after_fork(self) -> None:
        """In a forked child: let go of copies of the parent's descriptors; closing them does not end anything."""
        self._closing = threading.Lock()
        self.close()
        self._endpoint.forget()

    def cede(self) -> bool:
        """Let the calling thread watch for messages instead of the control thread. False if there is no connection to watch."""
        # First, so that the control thread notices if Ctrl-C tears the caller away anywhere behind it.
        self._ceded += 1
        try:
            self._epoll.modify(self._fd, select.EPOLLOUT if self._writable else 0)
        except (OSError, ValueError):  # unregistered or closed
            return False
        return True

    def reclaim(self) -> None:
        """Let the control thread watch for messages again, and handle what the leader has read ahead."""
        ceded = self._ceded
        try:
            self._epoll.modify(self._fd, select.EPOLLIN | (select.EPOLLOUT if self._writable else 0))
        except (OSError, ValueError):
            return
        finally:
            self._reclaimed = ceded
        if self._endpoint.early:
            self.wake()

    # -- the control thread ---------------------------------------------------------------------------------------

    def renewed(self) -> None:
        """Watch the new connection of the endpoint, whose old one was lost."""
        self._fd = self._endpoint.fileno()
        self._writable = False
        self._epoll.register(self._fd, select.EPOLLIN)
        self._lost = False
        self._guard(self._receive)  # what came along with the handshake does not make the socket readable

    def call_later(self, seconds: float, call: Call) -> None:
        """Run this on the control thread after some time. Control thread only."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), call))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
            self._run_calls()  # the goodbye is one, and must not depend on where this thread was when stop() was called
            self._guard(self._flush)
            self._part()
        except BaseException as error:
            # A fault of ours. Without this thread nothing else would end what the rank's other threads wait for.
            self._lost = True
            self._shell.fail(error)
            raise
        finally:
            self._endpoint.close()

    def _step(self) -> None:
        for fd, _events in self._epoll.poll(self._timeout()):
            if fd == self._fd:
                self._guard(self._receive)
            else:
                os.eventfd_read(self._wakeup)
        if self._ceded != self._reclaimed and not self.place.locked():
            self._take_back()
        if self._endpoint.early:
            self._guard(self._receive)
        self._run_calls()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        self._shell.run_hooks()
        self._guard(self._flush)

    def _take_back(self) -> None:
        """Take back the place of a leader that Ctrl-C tore away before it had reclaimed it for this thread.

        The leader has woken this thread on its way out, or the end of what it ran does. If another thread begins to lead right
        now, both watch the socket; that does no harm.
        """
        self.reclaim()
        self._guard(self._receive)
        self._shell.leader_torn()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _receive(self) -> None:
        with self.reading:
            self._shell.receive()

    def _timeout(self) -> float:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1

    def _flush(self) -> None:
        self._shell.flush()
        waiting = self._endpoint.backlog > 0 and not self._endpoint.flush()
        if waiting != self._writable:
            self._writable = waiting
            self._epoll.modify(self._fd, select.EPOLLIN | (select.EPOLLOUT if waiting else 0))

    def _part(self) -> None:
        """Wait until the coordinator has closed the connection: it has read the goodbye then.

        A process that connects again right away under the same rank would else find that rank taken.
        """
        deadline = time.monotonic() + PARTING
        watch = select.poll()
        if not self._lost:
            watch.register(self._fd, select.POLLIN)
        while not self._lost and (left := deadline - time.monotonic()) > 0:
            waiting = self._endpoint.backlog > 0
            watch.modify(self._fd, select.POLLIN | (select.POLLOUT if waiting else 0))
            try:
                watch.poll(left * 1000)
                if waiting:
                    self._endpoint.flush()
                with self.reading:
                    self._endpoint.receive()  # messages to a rank that has left are dropped
            except (ConnectionLost, ProtocolError):
                return

    def _guard(self, step: Call) -> None:
        """Run a step that uses the connection; if that is lost, tell the shell once and go on without it."""
        if self._lost:
            return
        try:
            step()
        except (ConnectionLost, ProtocolError) as error:
            self._lost = True
            self._epoll.unregister(self._fd)
            self._fd = -1  # no thread may watch it any more: the number may become another file's
            self._shell.connection_lost(str(error))
