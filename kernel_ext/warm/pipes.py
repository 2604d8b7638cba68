"""The warm process's ends of a child's pipes; for a process that it adopted, what can still be had of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from hvdlab.kernel_ext.warm.messages import Forked
from hvdlab.kernel_ext.warm.processes import (
    exit_status,
    kill_session,
    open_process,
    peak_memory,
    readable,
)

READ_SIZE = 64 * 1024


@dataclass(slots=True)
class ChildPipes:
    """One child.

    Attributes:
        number, pid: Which.
        log: Reading end of its log, or -1.
        err: Reading end of its captured standard error, or -1. Read only when it has ended: while it lives it does so.
        channel: The controller's connection.
        pidfd: Becomes readable when it ends; only for an adopted process, else -1.
        peak: The most memory that an adopted process was seen to have had, in bytes.
    """

    number: int
    pid: int
    log: int
    err: int
    channel: socket.socket | None = None
    pidfd: int = -1
    peak: int = 0

    @classmethod
    def adopt(cls, child: Forked) -> ChildPipes | None:
        """Of a process that somebody else has forked; ``None`` if it has ended."""
        pidfd = open_process(child.pid, child.started)
        if pidfd < 0:
            return None
        log, err = (_reopen(child.pid, descriptor) for descriptor in (child.log, child.err))
        return cls(child.number, child.pid, log, err, pidfd=pidfd, peak=peak_memory(child.pid))

    def last_words(self) -> Iterator[bytes]:
        """What is left in the pipes."""
        for pipe in (self.log, self.err):
            with contextlib.suppress(BlockingIOError):
                while pipe >= 0 and (data := os.read(pipe, READ_SIZE)):
                    yield data

    # -- adopted processes ----------------------------------------------------------------------------------------

    def send_signal(self, number: int, group: bool) -> None:
        """Raises ``ProcessLookupError`` if it has ended, even if its number belongs to another process by now."""
        if group and os.getpgid(self.pid) == self.pid and not readable(self.pidfd, 0):
            os.killpg(self.pid, number)
        else:
            signal.pidfd_send_signal(self.pidfd, number)

    def look(self) -> None:
        """See how much memory it has had: when it has ended, nobody but its parent can tell."""
        self.peak = max(self.peak, peak_memory(self.pid))

    def bury(self) -> int | None:
        """After its end: end what it has left in its session. Returns how it ended, as ``waitpid`` does, if known."""
        status = exit_status(self.pidfd, self.pid)
        kill_session(self.pid)
        return status

    # -- end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """In the warm process or in a child: let go of them without telling the other side."""
        for descriptor in (self.log, self.err, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        if self.channel is not None:
            os.close(self.channel.detach())


def _reopen(pid: int, descriptor: int) -> int:
    """Another process's reading end of a pipe; -1 if it can't be had."""
    try:
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
