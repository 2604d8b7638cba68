"""The pipes of a child, and the fork server's ends of them; for a process that it adopted, what can still be had of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdlab.launch.forkserver.messages import Forked
from hvdlab.launch.processes import (
    exit_status,
    kill_session,
    open_process,
    peak_memory,
    readable,
)

if TYPE_CHECKING:  # which needs StdPipes
    from hvdlab.launch.forkserver.program import ForkedProgram

READ_SIZE = 64 * 1024
PIPE_SIZE = 1 << 20
"""Bytes that fit into a pipe, at most."""


@dataclass(frozen=True, slots=True)
class StdPipes:
    """Two pipes, for stdout and stderr: ``(reading end, writing end)``."""

    out: tuple[int, int]
    err: tuple[int, int]

    @classmethod
    def make(cls) -> StdPipes:
        """New pipes, close-on-exec, with the reading ends non-blocking and as much capacity as the system gives."""
        pairs = []
        for _ in range(2):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reader, False)
            # C code may print while it holds the interpreter's lock, and then no thread reads: the more fits, the better.
            with contextlib.suppress(OSError):
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
            pairs.append((reader, writer))
        return cls(*pairs)


@dataclass(slots=True)
class ChildPipes:
    """One child.

    Attributes:
        number, pid: The child's number and process.
        log: Reading end of its log, or -1.
        err, out: Reading ends of its captured output, or -1. Read here only when it has ended: while it lives it reads them.
        unsent: Memory with output that it has not sent, or -1. Read only when it has ended, too.
        channel: The controller's connection.
        pidfd: Becomes readable when it ends; only for an adopted process, else -1.
        peak: The most memory that an adopted process was seen to have had, in bytes.
        unread: What was read of its standard error after its end and belongs to nothing that it left.
    """

    number: int
    pid: int
    log: int
    err: int
    out: int = -1
    unsent: int = -1
    channel: socket.socket | None = None
    pidfd: int = -1
    peak: int = 0
    unread: bytes = b""

    @classmethod
    def adopt(cls, child: Forked) -> ChildPipes | None:
        """The pipes of a process that another fork server has forked; ``None`` if it has ended."""
        pidfd = open_process(child.pid, child.started)
        if pidfd < 0:
            return None
        theirs = (child.log, child.err, child.out, child.unsent)
        log, err, out, unsent = (_reopen(child.pid, descriptor) for descriptor in theirs)
        return cls(child.number, child.pid, log, err, out, unsent, pidfd=pidfd, peak=peak_memory(child.pid))

    def left(self, program: ForkedProgram) -> bytes | None:
        """What it wrote and may not have sent, as the program reads it; ``None`` if there is nothing."""
        if self.unsent < 0:
            return None
        out, err = (b"".join(_contents(pipe)) for pipe in (self.out, self.err))
        left = program.read_area(self.unsent, out, err)
        if left is None:
            self.unread = err
        return left

    def last_words(self) -> Iterator[bytes]:
        """What is left in its log and, unless :meth:`left` was asked for it, in its standard error."""
        yield from _contents(self.log)
        if self.unread:
            yield self.unread
        yield from _contents(self.err)

    # -- adopted processes ----------------------------------------------------------------------------------------

    def send_signal(self, number: int, group: bool) -> None:
        """Raises ``ProcessLookupError`` if it has ended, even if its number belongs to another process by now."""
        if group and os.getpgid(self.pid) == self.pid and not readable(self.pidfd, 0):
            os.killpg(self.pid, number)
        else:
            signal.pidfd_send_signal(self.pidfd, number)

    def look(self) -> None:
        """Note how much memory it has had: once it has ended, only its parent can find that out."""
        self.peak = max(self.peak, peak_memory(self.pid))

    def bury(self) -> int | None:
        """After its end: kill what it has left in its session. Returns its status as ``waitpid`` does; ``None`` if unknown."""
        status = exit_status(self.pidfd, self.pid)
        kill_session(self.pid)
        return status

    # -- end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """In the fork server or in a child: close them without shutting the connection down for the other side."""
        for descriptor in (self.log, self.err, self.out, self.unsent, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        if self.channel is not None:
            os.close(self.channel.detach())


def _contents(pipe: int) -> Iterator[bytes]:
    """What is in a pipe now, and no more than fits into it, as another process may go on writing."""
    rest = PIPE_SIZE
    with contextlib.suppress(BlockingIOError):
        while pipe >= 0 and rest > 0 and (data := os.read(pipe, min(rest, READ_SIZE))):
            rest -= len(data)
            yield data


def _reopen(pid: int, descriptor: int) -> int:
    """Another process's reading end of a pipe; -1 if it can't be had."""
    try:
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
