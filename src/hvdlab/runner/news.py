"""Events that come from elsewhere than the agents: the coordinator's thread and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator

import msgspec

from hvdlab.collectives.client import Client, Membership
from hvdlab.collectives.uncaught import TOPIC, Uncaught
from hvdlab.runner import events as e
from hvdlab.runner.report import stall_line

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class News:
    """A queue that a selector can wait for.

    Attributes:
        descriptor: Readable when there is something to :meth:`take`.
        last_pid: Process id that each rank joined with last.
        stopped: The first signal that arrived, or 0.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        self.last_pid: dict[int, int] = {}
        self.stopped = 0
        self._queue: deque[e.Event | str] = deque()
        self._members: dict[int, int] = {}

    def post(self, event: e.Event | str) -> None:
        """An event from another thread or a signal; a text is to be said."""
        self._queue.append(event)
        with contextlib.suppress(BlockingIOError):  # full: it wakes as well
            os.write(self._writer, b"\0")

    def take(self) -> Iterator[e.Event | str]:
        """What has arrived."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        while self._queue:
            yield self._queue.popleft()

    def close(self) -> None:
        """Nothing may be posted any more."""
        os.close(self.descriptor)
        os.close(self._writer)

    def watch(self, client: Client) -> None:
        """Post what the coordinator knows of the ranks."""
        client.on_membership(self._on_membership)
        client.on_mail(TOPIC, self._on_uncaught)
        client.on_stall(lambda stall: self.post(stall_line(stall)))

    def coordinator_lost(self, reason: str) -> None:
        """There is no coordinator any more, and there will be none."""
        self.post(e.CoordinatorLost(reason))

    def _on_membership(self, membership: Membership) -> None:
        members = {member.rank: member.pid for member in membership.members}
        self.last_pid.update(members)
        # Who waits until elastic training lets it in is not there yet.
        now = {rank: pid for rank, pid in members.items() if rank not in membership.waiting}
        for rank, pid in self._members.items():
            if now.get(rank) != pid:
                reasons = [
                    death.reason for death in membership.deaths if (death.rank, death.pid) == (rank, pid)
                ]
                self.post(e.Disconnected(rank, next(filter(_tells, reasons), "")))
        for rank, pid in now.items():
            if self._members.get(rank) != pid:
                self.post(e.Connected(rank))
        self._members = now

    def _on_uncaught(self, rank: int, body: bytes) -> None:
        said = msgspec.json.decode(body, type=Uncaught)
        self.post(e.Reported(rank, said.error, said.culprits))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn signals into events. Only the main thread gets any; what is ignored, as under nohup, stays so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def take(number: int, frame: object) -> None:
            self.stopped = self.stopped or number
            self.post(e.Stopped(number))

        taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, take) for number in taken}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _tells(reason: str) -> bool:
    """Whether a death's reason says more than that the process has ended, of which the agent knows more."""
    return reason.startswith("no sign of life")
