"""Forking a child with its pipes."""

from __future__ import annotations

import errno
import gc
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from hvdlab.launch.forkserver.messages import CONTROLLER, Fork, Forked
from hvdlab.launch.forkserver.pipes import ChildPipes, StdPipes
from hvdlab.launch.forkserver.program import ForkedProgram
from hvdlab.launch.processes import start_time

REMEDIES = {
    errno.EAGAIN: "no more processes are allowed here (`ulimit -u`, or the container's limit)",
    errno.EMFILE: "too many files are open (`ulimit -n`)",
    errno.ENFILE: "too many files are open on this host",
    errno.ENOMEM: "there is no memory left for another process",
}


@dataclass(frozen=True, slots=True)
class Role:
    """What a forked child has to become.

    Attributes:
        order: The pool's order.
        log: Pipe for descriptors 1 and 2 at the start, whose last lines are reported when the child ends.
        pipes: The pipes that a rank captures its output with; the fork server reads what is left in them at its end.
        unsent: Memory for output that the rank has not sent, which the fork server reads likewise; -1 for none.
        channel: The controller's connection to the fork server, else -1.
        parent: Process id of the fork server.
        lifeline: The writing end of the pipe that children depend on.
        leave_to_live: A pipe that gives one byte when the pool knows of the child, or ends if the fork server died before
            that.
    """

    order: Fork
    log: int
    pipes: StdPipes
    unsent: int
    channel: int
    parent: int
    lifeline: int
    leave_to_live: int


@dataclass(frozen=True, slots=True)
class Birth:
    """A child, in the fork server.

    Attributes:
        record: The message to the pool about it.
        pipes: Our ends of its pipes.
        announced: Where to write a byte once the pool was sent ``record``, and then to close.
    """

    record: Forked
    pipes: ChildPipes
    announced: int


def fork(order: Fork, program: ForkedProgram, lifeline: int, forget: Callable[[], None]) -> Role | Birth:
    """Fork. Returns a :class:`Role` in the child, where ``forget`` is called first.

    Raises:
        OSError: There is no room for a process or its pipes; nothing is left behind.
    """
    parent = os.getpid()
    opened: list[int] = []
    try:
        log, log_child = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        opened += [log, log_child]
        pipes = StdPipes.make()
        opened += [*pipes.out, *pipes.err]
        leave_to_live, announced = os.pipe2(os.O_CLOEXEC)
        opened += [leave_to_live, announced]
        ours = theirs = unsent = -1
        if order.number == CONTROLLER:
            ours, theirs = (end.detach() for end in socket.socketpair())
            opened += [ours, theirs]
        elif (unsent := program.make_area()) >= 0:
            opened.append(unsent)
        gc.freeze()
        pid = os.fork()
    except OSError:
        for descriptor in opened:
            os.close(descriptor)
        raise
    if pid == 0:
        forget()
        os.set_blocking(log_child, True)
        # The log's reading end stays open in the child: writing must not fail when the fork server is gone.
        for descriptor in (announced, ours):
            if descriptor >= 0:
                os.close(descriptor)
        return Role(order, log_child, pipes, unsent, theirs, parent, lifeline, leave_to_live)
    for descriptor in (log_child, pipes.out[1], pipes.err[1], leave_to_live, theirs):
        if descriptor >= 0:
            os.close(descriptor)
    channel = socket.socket(fileno=ours) if ours >= 0 else None
    out, err = pipes.out[0], pipes.err[0]
    record = Forked(order.number, pid, start_time(pid), log, err, out, unsent)
    return Birth(record, ChildPipes(order.number, pid, log, err, out, unsent, channel), announced)


def why_not(error: OSError) -> str:
    """Why there could be no child, and what to do about it."""
    text = error.strerror or str(error)
    return f"{text}: {REMEDIES[error.errno]}" if error.errno in REMEDIES else text
