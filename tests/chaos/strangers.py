"""Strangers at all listeners while a pool trains: each speaks a protocol of its own, or nearly that of the port."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable

FLOOD = 8 << 20
"""Bytes of a flood, at most: what a port does not read stays with the stranger."""


def web_page(sock: socket.socket) -> None:
    """Send the bytes that a page has the user's browser send to any port."""
    body = b'{"type": "request"}'
    head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://evil.example\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)


def flood(sock: socket.socket) -> None:
    """Send too much, in frames of the control plane."""
    sock.sendall((65_000).to_bytes(4, "little") + bytes(FLOOD))


def secure_flood(sock: socket.socket) -> None:
    """The same over TLS, where the port speaks that."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(sock) as secure:
        flood(secure)


def slow_browser(sock: socket.socket) -> None:
    """Send a request that does not end."""
    sock.sendall(b"GET / HTTP/1.1\r\nHost: 127")


STRANGERS: tuple[Callable[[socket.socket], None], ...] = (
    web_page,
    flood,
    secure_flood,
    slow_browser,
)


def visit(sockets: contextlib.ExitStack, port: int) -> None:
    """Connect all of them to a port of the loopback interface, one after the other; a connection that is not closed
    stays."""
    for stranger in STRANGERS:
        sock = sockets.enter_context(socket.socket())
        sock.settimeout(0.2)  # a port that lets no stranger in does not answer, nor read
        # A port may refuse it, or close the connection before all is sent.
        with contextlib.suppress(OSError):
            sock.connect(("127.0.0.1", port))
            stranger(sock)
