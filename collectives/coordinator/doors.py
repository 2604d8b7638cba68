"""Accepting connections in a server's loop, until no descriptor is left for one, and again after that."""

from __future__ import annotations

import socket
import ssl
import time

from hvdlab.collectives.coordinator.connections import Connections
from hvdlab.collectives.coordinator.poller import READ
from hvdlab.collectives.linux import require_own_peer

_ACCEPT_AGAIN = 0.2
"""Seconds until the server accepts again after it had no descriptor left for a new connection."""


class Doors:
    """The listening sockets of a server.

    Args:
        connections: Takes the connections; its poller watches the sockets, and it closes them.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def open(self, sock: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Accept connections on a listening socket, over TLS if a context is given. Takes the socket over."""
        sock.setblocking(False)
        self._connections.listeners.append(sock)
        self._watch(sock, context)

    def _watch(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        self._connections.poller.register(listener, READ, lambda: self._accept(listener, context))

    def _accept(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._make_room(listener, context, error)
            return
        try:
            sock.setblocking(False)
            if sock.family == socket.AF_UNIX:
                require_own_peer(sock)
            if context is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.getpeername()  # a connection that ended before it was accepted can't be wrapped
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError as error:
            self._connections.turned_away.tell(f"a connection is closed: {error}")
            sock.close()
            return
        self._connections.add(sock)

    def _make_room(self, listener: socket.socket, context: ssl.SSLContext | None, error: OSError) -> None:
        """No descriptor is left: close the oldest stranger that has not said Hello; if there is none, newcomers have to wait."""
        if self._connections.drop_oldest_stranger():
            return
        self._connections.turned_away.tell(f"could not accept a connection: {error}")
        self._connections.poller.unregister(listener)
        self._connections.call_at(time.monotonic() + _ACCEPT_AGAIN, lambda: self._watch(listener, context))
