"""Strangers at what listens while a pool trains: each speaks a protocol of its own, or nearly that of the port."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from hvdlab.kernel_ext.debugger.framing import frame

FLOOD = 8 << 20
"""Bytes of a flood, at most: what a port does not read stays with the stranger."""


def evaluation(mark: Path) -> bytes:
    """A debugger's request that creates a file where it is evaluated."""
    arguments = {"expression": f"open({str(mark)!r}, 'w')", "context": "repl"}
    return json.dumps({"type": "request", "seq": 1, "command": "evaluate", "arguments": arguments}).encode()


def web_page(sock: socket.socket, mark: Path) -> None:
    """What a page has the user's browser send to any port."""
    body = evaluation(mark)
    head = f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://evil.example\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)


def hasty_debugger(sock: socket.socket, mark: Path) -> None:
    """A debugger that does not introduce itself."""
    sock.sendall(frame(evaluation(mark)))


def deaf_debugger(sock: socket.socket, mark: Path) -> None:
    """One that introduces itself and does not listen."""
    begin = [
        {"type": "request", "seq": 1, "command": one, "arguments": {}} for one in ("initialize", "attach")
    ]
    sock.sendall(b"".join(frame(json.dumps(one).encode()) for one in begin) + frame(evaluation(mark)))


def flood(sock: socket.socket, mark: Path) -> None:
    """More than anybody wants, in frames of the control plane."""
    sock.sendall((65_000).to_bytes(4, "little") + bytes(FLOOD))


def secure_flood(sock: socket.socket, mark: Path) -> None:
    """The same over TLS, where the port speaks that."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(sock) as secure:
        flood(secure, mark)


def slow_browser(sock: socket.socket, mark: Path) -> None:
    """A request that does not end."""
    sock.sendall(b"GET / HTTP/1.1\r\nHost: 127")


STRANGERS: tuple[Callable[[socket.socket, Path], None], ...] = (
    web_page,
    hasty_debugger,
    deaf_debugger,
    flood,
    secure_flood,
    slow_browser,
)


def visit(sockets: contextlib.ExitStack, port: int, mark: Path) -> None:
    """All of them come to a port of the loopback interface, one after the other; who is let stay stays."""
    for stranger in STRANGERS:
        sock = sockets.enter_context(socket.socket())
        sock.settimeout(0.2)  # a port that lets no stranger in does not answer, nor read
        with contextlib.suppress(OSError):
            sock.connect(("127.0.0.1", port))
            stranger(sock, mark)
