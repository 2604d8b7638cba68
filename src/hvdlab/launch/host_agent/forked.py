"""A fork server of an agent's host: it imports the modules that the host's ranks share, once, and forks the ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator

from hvdlab.collectives.errors import StartError
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.forkserver.messages import Exited, Fork, Forked, ForkFailed, FromServer, Signal
from hvdlab.launch.host_agent import wire
from hvdlab.launch.processes import describe, detail

CLOSING = 5.0
"""Seconds that a fork server has to end, in addition to those of its ranks."""


class ForkedRanks:
    """The fork server, as the agent's one thread sees it.

    The fork server has the agent's environment, and ends with the agent, however that ends, and the ranks with it. If
    the fork server dies alone, another one takes its place around the ranks.

    Args:
        program: The ranks' program, as ``module:attribute``.

    Attributes:
        descriptor: Readable when there is something in :meth:`reports`, or :attr:`lost` has changed.
        lost: Why there is no fork server any more, once it is lost; otherwise empty.

    Raises:
        StartError: The fork server can't be started.
    """

    def __init__(self, program: str) -> None:
        self.descriptor, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.lost = ""
        #: Reports for the agent's loop, which the fork server's thread appends.
        self._reports: deque[wire.AgentMessage] = deque()
        #: Ranks whose fork was ordered and not reported yet; guarded by the lock.
        self._pending: set[int] = set()
        #: Whether a rank was forked; guarded by the lock.
        self._useful = False
        self._lock = threading.Lock()
        self._server = ForkServer.start(program)
        self._server.listen(self._hear, self._server_lost)

    @property
    def pid(self) -> int:
        """Return the fork server's process."""
        return self._server.pid

    def fork(self, spec: wire.RankSpec) -> None:
        """Have a rank forked, in the agent's working directory and environment, once the imports are done."""
        directory = os.getcwd()
        path = (directory, *sys.path)  # as for `python -m`
        with self._lock:
            # Before the order: its answer can come on the other thread at once.
            self._pending.add(spec.rank)
        try:
            order = Fork.of(spec.rank, {**os.environ, **spec.environment}, directory, path)
            self._server.send(order)
        except StartError as error:
            self._not_started(spec.rank, str(error))

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, if it lives."""
        with contextlib.suppress(StartError):
            self._server.send(Signal(rank, number))

    def reports(self) -> Iterator[wire.AgentMessage]:
        """Yield the fork server's reports since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        while self._reports:
            yield self._reports.popleft()

    def close(self, grace: float) -> None:
        """End the fork server and its ranks, which get ``grace`` seconds to end by themselves."""
        self._server.close(grace, CLOSING)

    # -- the thread that listens to the fork server -----------------------------------------------------------------

    def _report(self, message: wire.AgentMessage) -> None:
        self._reports.append(message)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, which wakes the agent as well
            os.write(self._writer, b"\0")

    def _hear(self, event: FromServer) -> None:
        match event:
            case Forked(rank, pid):
                with self._lock:
                    self._pending.discard(rank)
                    self._useful = True
                self._report(wire.RankStarted(rank, pid))
            case ForkFailed(rank, text):
                self._not_started(rank, f"it could not be forked: {text}")
            case Exited(rank, _, code, number):
                said = (describe(event), event.tail, detail(event), event.left)
                self._report(wire.RankExited(rank, code, number, *said))

    def _not_started(self, rank: int, text: str) -> None:
        with self._lock:
            self._pending.discard(rank)
        self._report(wire.RankNotStarted(rank, 1, text))

    def _server_lost(self, reason: str) -> None:
        with self._lock:
            useful = self._useful
        if not useful:  # most likely it crashed in an import, and so would another one
            self._give_up(reason)
            return
        try:
            self._server.respawn()
        except StartError as error:
            self._give_up(f"{reason}; no other one starts: {error}")
        self._wake()  # the agent has left it to this thread to reap the fork server, and goes on reaping once it is woken

    def _give_up(self, reason: str) -> None:
        with self._lock:
            pending, self._pending = self._pending, set()
        for rank in sorted(pending):
            self._report(wire.RankNotStarted(rank, 1, f"the fork server of its host ended: {reason}"))
        # Last: the agent ends when it sees this, and has all reports by then.
        self.lost = reason
        self._wake()
