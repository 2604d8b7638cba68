"""Output below Python, of subprocesses and C code, on the file descriptors 1 and 2.

Each descriptor becomes the writing end of a pipe that the rank reads itself. Children inherit it, so their output
arrives too, and keeps arriving after a fork. The process that starts the rank may make the pipes (``StdPipes.make``) before
it forks and keep the reading ends: what the rank had not read when it died is then still in them, such as the last
words of a library that aborts.
"""

from __future__ import annotations

import codecs
import ctypes
import fcntl
import os
import termios
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hvdlab.launch.forkserver.program import StdPipes

_CHUNK = 64 << 10


class PipeText(NamedTuple):
    """Text from a pipe.

    Attributes:
        stream: ``stdout`` or ``stderr``.
        text: The bytes as text; empty if they are only the beginning of a character.
        size: Bytes that were read.
        cut: Bytes at the end, with those of earlier reads, that are the beginning of a character and not in the text.
    """

    stream: str
    text: str
    size: int
    cut: bytes


Receive = Callable[[str, int, int], bytes]
"""Takes bytes out of a stream's pipe: the stream, the pipe's reading end, and how many at most."""


def receive(stream: str, pipe: int, limit: int) -> bytes:
    """Take bytes out of a pipe into this process's memory alone: they are lost if it is killed."""
    return os.read(pipe, limit)


class FdCapture:
    """Redirects fd 1 and 2 into pipes until :meth:`close`; fd 0 reads from nothing.

    Attributes:
        originals: Copies of fd 1 and 2 as they were, by name: where logs and last words belong.
        readers: The reading ends.
        lock: Held while reading, so that two threads can't tear the order apart.
    """

    def __init__(self, pipes: StdPipes | None = None) -> None:
        pipes = pipes or StdPipes.make()
        self.lock = threading.RLock()
        self.originals = {"stdout": _duplicate(1), "stderr": _duplicate(2)}
        self._stdin = _duplicate(0)
        self.readers = (pipes.out[0], pipes.err[0])
        # Kept open, so that a user who closes fd 1 does not make an end of file of it.
        self._writers = (pipes.out[1], pipes.err[1])
        self._names = {pipes.out[0]: "stdout", pipes.err[0]: "stderr"}
        #: How many bytes were read from each pipe.
        self._read = dict.fromkeys(self.readers, 0)
        #: Where the system writes the answer of :meth:`written`, which two calls for each cell need.
        self._sizes = array("i", [0])
        self._decoders = {fd: codecs.getincrementaldecoder("utf-8")(errors="replace") for fd in self.readers}
        for target, (_, writer) in ((1, pipes.out), (2, pipes.err)):
            os.dup2(writer, target, inheritable=True)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0, inheritable=True)
        os.close(null)

    def read(self, limit: int, receive: Receive = receive) -> Iterator[PipeText]:
        """Yield the content of the pipes, up to ``limit`` bytes; never blocks. The caller holds :attr:`lock`."""
        for fd in self.readers:
            for piece in self._read_pipe(fd, limit, receive):
                limit -= piece.size
                yield piece

    def read_available(self, receive: Receive = receive) -> Iterator[PipeText]:
        """Yield from each pipe the bytes that are in it when its turn comes; never blocks. The caller holds :attr:`lock`."""
        for fd in self.readers:
            yield from self._read_pipe(fd, _available(fd), receive)

    def _read_pipe(self, fd: int, limit: int, receive: Receive) -> Iterator[PipeText]:
        name, decoder = self._names[fd], self._decoders[fd]
        while limit > 0:
            try:
                raw = receive(name, fd, min(limit, _CHUNK))
            except BlockingIOError:
                return
            if not raw:
                return
            limit -= len(raw)
            self._read[fd] += len(raw)
            yield PipeText(name, decoder.decode(raw), len(raw), decoder.getstate()[0])
            if len(raw) < _CHUNK:
                return

    def written(self) -> tuple[int, int]:
        """Return the number of bytes written to each pipe by now. The caller holds :attr:`lock`."""
        out, err = self.readers
        sizes = self._sizes
        fcntl.ioctl(out, termios.FIONREAD, sizes)
        size_of_out = sizes[0]
        fcntl.ioctl(err, termios.FIONREAD, sizes)
        return self._read[out] + size_of_out, self._read[err] + sizes[0]

    def has_read(self, written: tuple[int, int]) -> bool:
        """Return whether so many bytes, as :meth:`written` said, have been read from each pipe. The caller holds :attr:`lock`."""
        out, err = self.readers
        return self._read[out] >= written[0] and self._read[err] >= written[1]

    def close(self) -> None:
        """Give fd 0, 1 and 2 back and close the pipes."""
        for target, saved in ((0, self._stdin), (1, self.originals["stdout"]), (2, self.originals["stderr"])):
            os.dup2(saved, target, inheritable=True)
            os.close(saved)
        for fd in (*self.readers, *self._writers):
            os.close(fd)


class CStdout:
    """C's own stdout buffer, which is flushed at the end of a cell so that ``printf`` shows up in its cell."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._fflush = libc.fflush
        self._fflush.argtypes = [ctypes.c_void_p]
        self._stdout = ctypes.c_void_p.in_dll(libc, "stdout")

    def flush(self) -> None:
        """Flush stdout; not all streams, since another thread may hold one of those (reading stdin) for ever."""
        self._fflush(self._stdout)


def _available(pipe: int) -> int:
    """Return the number of bytes that are in a pipe."""
    count = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def _duplicate(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
