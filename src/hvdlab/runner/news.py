"""What other threads report to a job's loop: what ranks write, starts and ends of ranks, the coordinator's news, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from hvdlab.collectives.client import Client, Membership
from hvdlab.collectives.uncaught import TOPIC, Uncaught
from hvdlab.launch.host_table import HostEvent
from hvdlab.runner import events as e
from hvdlab.runner.report import stall_line

MOST_HELD = 4 << 20
"""Bytes of output that may wait for the loop; while there are more, the threads that read from ranks wait."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Written:
    """A rank wrote to stdout (1) or stderr (2)."""

    rank: int
    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ResultPiece:
    """The next piece of what a rank's function returned."""

    rank: int
    data: bytes


Posted = e.Event | Written | ResultPiece | HostEvent | str
"""What other threads post to the loop; a ``str`` is a line that the loop passes to ``say``."""


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
        self._queue: deque[Posted] = deque()
        self._room = threading.Condition()
        #: Bytes of output in the queue, and whether :meth:`stop` was called; guarded by ``_room``.
        self._held, self._closed = 0, False
        self._members: dict[int, int] = {}
        self._formed = False
        #: Ranks that were cut off, have connected again, and are not in the world yet.
        self._back: set[int] = set()
        #: Newcomers that wait to be let in, with their processes.
        self._arrived: set[tuple[int, int]] = set()

    def post(self, event: Posted) -> None:
        """Queue an event, from another thread or a signal handler. The loop may never take what comes after :meth:`stop`."""
        self._queue.append(event)
        with contextlib.suppress(BlockingIOError):  # the pipe is full, which wakes the loop as well
            os.write(self._writer, b"\0")

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Post what a rank wrote. Waits while ``MOST_HELD`` bytes are queued, so that a slow reader holds the rank up."""
        with self._room:
            self._room.wait_for(lambda: self._held < MOST_HELD or self._closed)
            self._held += len(data)
        self.post(Written(rank, stream, data))

    def returned(self, rank: int, data: bytes) -> None:
        """Post a piece of a rank's result."""
        self.post(ResultPiece(rank, data))

    def take(self) -> Iterator[Posted]:
        """Yield what has arrived, in the order in which it was posted."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        while self._queue:
            posted = self._queue.popleft()
            yield posted
            if isinstance(posted, Written):
                with self._room:
                    self._held -= len(posted.data)
                    self._room.notify_all()

    def stop(self) -> None:
        """The loop takes nothing any more: wake the threads that wait in :meth:`write`, and let none wait again."""
        with self._room:
            self._closed = True
            self._room.notify_all()

    def close(self) -> None:
        """Close the pipe. Nothing may be posted after that."""
        os.close(self.descriptor)
        os.close(self._writer)

    def watch(self, client: Client) -> None:
        """Post what the coordinator knows of the ranks."""
        client.on_membership(self._on_membership)
        client.on_mail(TOPIC, self._on_uncaught)
        client.on_returned(self._on_returned)
        client.on_stall(lambda stall: self.post(stall_line(stall)))

    def coordinator_lost(self, reason: str) -> None:
        """There is no coordinator any more, and there will be none."""
        self.post(e.CoordinatorLost(reason))

    def _on_membership(self, membership: Membership) -> None:
        members = {member.rank: member.pid for member in membership.members}
        self.last_pid.update(members)
        self._back &= members.keys() - set(membership.formed)
        # One that waits until elastic training lets it in has not joined yet, nor has one that goes back to its last commit before that.
        out = self._back.union(membership.waiting)
        now = {rank: pid for rank, pid in members.items() if rank not in out}
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
        if membership.formed and not self._formed:
            self._formed = True
            self.post(e.Formed())
        arrived = {
            (rank, members[rank]) for rank in membership.waiting if rank in members.keys() - self._back
        }
        for rank, _ in sorted(arrived - self._arrived):
            self.post(e.Arrived(rank))
        self._arrived = arrived

    def _on_returned(self, rank: int, pid: int, seconds: float) -> None:
        self._back.add(rank)
        self.post(e.Returned(rank, seconds))

    def _on_uncaught(self, rank: int, body: bytes) -> None:
        said = msgspec.json.decode(body, type=Uncaught)
        self.post(e.Reported(rank, said.error, said.culprits))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn signals into events. Does nothing on other threads than the main one.

        A signal that is ignored, as SIGHUP is under nohup, stays ignored.
        """
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
    """Whether a death's reason says more than that the process has ended: on ends, the host's agent knows more."""
    return reason.startswith("no sign of life")
