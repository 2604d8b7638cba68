"""Death pipe of children: they end when neither the pool's process nor the fork server is left, even if they are stopped, or stuck in C code.

These two hold the writing end of one pipe, into which nothing is ever written. Each child has the kernel send SIGKILL
to its process group when the last writer is gone. So a child outlives either of the two, never both; and neither needs
to act for that, nor the child to run.
"""

from __future__ import annotations

import fcntl
import os
import signal
import weakref


class DeathPipe:
    """The pool's writing end of the pipe. Programs that the pool's process executes don't inherit it, and its forks give it up.

    Attributes:
        descriptor: The writing end.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        _open_pipes.add(self)

    @classmethod
    def make(cls) -> DeathPipe:
        """Return a new death pipe."""
        reader, death_pipe = cls.with_reader()
        os.close(reader)
        return death_pipe

    @classmethod
    def with_reader(cls) -> tuple[int, DeathPipe]:
        """Return the reading end of a new pipe, which the caller closes, and the death pipe."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        return reader, cls(writer)

    def close(self) -> None:
        """Release the pipe: children end, unless the fork server holds it too. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def depend_on(descriptor: int) -> None:
    """End a child that leads its process group, with the group, when the pipe loses its last other writer.

    Args:
        descriptor: The writing end, which is closed.
    """
    # Opened again, since owner and signal belong to the open file, which an inherited descriptor would share.
    reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    # Negative for the process group: workers that a rank has forked end with the rank.
    fcntl.fcntl(reader, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
    # O_ASYNC after owner and signal: a hang-up before F_SETSIG would send SIGIO, which a program may catch.
    # The reading end stays open for good: the kernel sends nothing for a closed descriptor.
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    os.close(descriptor)  # last: if no other writer is left, this ends the child


def wake_on_hangup(descriptor: int) -> None:
    """Have SIGCONT sent to this process, in case it is stopped, when the other end of this pipe is closed."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)


_open_pipes: weakref.WeakSet[DeathPipe] = weakref.WeakSet()


def _close_in_fork() -> None:
    """Close all death pipes in a fork of the pool's process (multiprocessing, say), which must not keep the children alive."""
    for death_pipe in list(_open_pipes):
        death_pipe.close()


os.register_at_fork(after_in_child=_close_in_fork)
