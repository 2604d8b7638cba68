"""The listening sockets of a coordinator, made by its starter.

A starter that keeps them when the coordinator dies keeps the door open: a rank or client that connects meanwhile waits there for
the successor instead of being refused.
"""

from __future__ import annotations

import os
import socket
import weakref
from pathlib import Path

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol.handshake import TlsAddress, UnixAddress

SOCKET_NAME = "coordinator"

BACKLOG = 1024
"""Connections that can wait while no coordinator accepts them; the ranks of a lost coordinator all come at once."""


class Listeners:
    """A Unix socket, and one for ranks of other hosts if there are any.

    Args:
        directory: Where the Unix socket is made.
        tcp_host: Address to listen on for other hosts, or empty.
        local: The Unix socket, if another process has made it.

    Attributes:
        address: Address at which ranks and clients of this host connect.
        tls_address: Address at which those of other hosts connect, or ``None``.
    """

    def __init__(self, directory: Path, tcp_host: str, local: socket.socket | None = None) -> None:
        path = directory / SOCKET_NAME
        self._remote: socket.socket | None = None
        self.tls_address: str | None = None
        self._local = local or socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if local is None:
                self._local.bind(str(path))
                self._local.listen(BACKLOG)
            if tcp_host:
                family = socket.AF_INET6 if ":" in tcp_host else socket.AF_INET
                self._remote = socket.create_server((tcp_host, 0), family=family, backlog=BACKLOG)
                self.tls_address = str(TlsAddress(tcp_host, self._remote.getsockname()[1]))
        except OSError as error:
            self.close()
            raise StartError(f"The coordinator could not start: {error}") from error
        self.address = str(UnixAddress(str(path)))
        _open.add(self)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Numbers of the two sockets; -1 for one that is not there."""
        return self._local.fileno(), self._remote.fileno() if self._remote is not None else -1

    def close(self) -> None:
        """Let go of the sockets; they live on in a coordinator that has them. Idempotent."""
        self._local.close()
        if self._remote is not None:
            self._remote.close()


_open: weakref.WeakSet[Listeners] = weakref.WeakSet()


def _forked() -> None:
    # A child that outlives the starter would keep the sockets open, at which no coordinator accepts any more.
    for listeners in list(_open):
        listeners.close()


os.register_at_fork(after_in_child=_forked)
