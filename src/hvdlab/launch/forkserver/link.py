"""The fork server's connection to the pool's process, and where a successor of that process connects."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket

from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.system import require_own_peer


class PoolLink:
    """A connection, and what else shows that the process at its other end has ended.

    Args:
        sock: The connection.
        pid: The pool's process.
        pulse: A pipe whose other end only the pool's process holds, or -1.
    """

    def __init__(self, sock: socket.socket, pid: int, pulse: int = -1) -> None:
        self.pid = pid
        self._sock = sock
        self.endpoint = Endpoint(sock)
        self.signs = [pulse] if pulse >= 0 else []
        # The pipe alone would miss the pool's end while a forked child of the pool's process keeps a copy of it.
        with contextlib.suppress(OSError):
            self.signs.append(os.pidfd_open(pid))

    @property
    def alive(self) -> bool:
        """Whether the pool's process lives and has not hung up."""
        if self.endpoint.closed:
            return False
        hangup = select.poll()
        hangup.register(self._sock, 0)
        for sign in self.signs:
            hangup.register(sign, select.POLLIN)
        return not hangup.poll(0)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.endpoint.close()
        self._close_signs()

    def forget(self) -> None:
        """In a forked child: close it without shutting the connection down for the other side."""
        if not self.endpoint.closed:
            os.close(self._sock.detach())
        self._close_signs()

    def _close_signs(self) -> None:
        signs, self.signs = self.signs, []
        for descriptor in signs:
            os.close(descriptor)


class Listener:
    """A socket at which a successor of the pool's process connects.

    Args:
        path: Where, in a directory that no other user may enter.

    Raises:
        OSError: It can't be made there.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.setblocking(False)
            _clear(path)
            self.sock.bind(path)
            self.sock.listen(8)
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except BaseException:
            self.sock.close()
            raise

    def accept(self) -> tuple[socket.socket, int] | None:
        """The connection of a process that has come, and its id; ``None`` if it may not come, or has gone."""
        try:
            sock, _ = self.sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return None
        try:
            return sock, require_own_peer(sock)
        except OSError:  # it is another user's
            sock.close()
            return None

    def _turn_away(self) -> None:
        """Drop one connection: without a descriptor for it, the listener would stay readable for ever."""
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self.sock.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        """Remove the socket and stop listening: no process can connect any more."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self.forget()

    def forget(self) -> None:
        """In a forked child: close the descriptors."""
        self.sock.close()
        os.close(self._spare)


def _clear(path: str) -> None:
    """Remove the socket of a process that has ended without doing so."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(FileNotFoundError):
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
