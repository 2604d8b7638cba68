"""A port on the loopback interface of the notebook's host, for a debugger of one rank that is no notebook.

VS Code and others attach to it as to ``debugpy.listen``. Behind it is the connection that the pool has with its rank, on
whatever host that is: the rank itself listens nowhere.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Callable

from hvdlab.collectives.client import Client
from hvdlab.kernel_ext.debugger.framing import FramingError, Unframer, frame
from hvdlab.kernel_ext.debugger.mail import Session, desk_of
from hvdlab.kernel_ext.debugger.messages import FromServer, Opened, Said
from hvdlab.kernel_ext.debugger.peers import is_mine

OPEN_WITHIN = 20.0
"""Seconds that a rank gets to start its debug server."""


class Relay:
    """Listens from its making until :meth:`close`. One debugger at a time is let in.

    Args:
        client: The pool's connection.
        rank: The rank.
        port: Where to listen; any free one by default.
        mine: Whether a connection may come in.

    Raises:
        OSError: The port is taken.

    Attributes:
        port: Where it listens, on 127.0.0.1.
    """

    def __init__(
        self, client: Client, rank: int, port: int = 0, mine: Callable[[socket.socket], bool] = is_mine
    ) -> None:
        self.rank, self._mine = rank, mine
        self._desk = desk_of(client)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1)
        self.port: int = self._listener.getsockname()[1]
        self._visit: _Visit | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="hvdlab-debug-relay", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """A debugger is attached."""
        return self._visit is not None

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                if self._mine(connection):
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        visit = _Visit(connection, self.rank)
        session = self._desk.session("another debugger", visit.heard, visit.gone)
        with self._lock:
            if self._closed:
                session.close()
                return
            self._visit = visit
        try:
            visit.serve(session)
        finally:
            with self._lock:
                self._visit = None
            session.leave(self.rank)
            session.close()

    def close(self) -> None:
        """Listen no more, and let a debugger that is attached go; the rank goes on. Idempotent."""
        with self._lock:
            self._closed = True
            if self._visit is not None:
                self._visit.end()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


class _Visit:
    """One debugger's connection."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection, self._rank = connection, rank
        self._opened = threading.Event()
        self._refused = ""
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    # -- the client's thread --------------------------------------------------------------------------------------

    def heard(self, rank: int, mail: FromServer) -> None:
        if rank != self._rank:
            return
        if isinstance(mail, Said):
            self._said.put(mail.message)
        elif isinstance(mail, Opened):
            self._refused = mail.error
            self._opened.set()

    def gone(self, rank: int, reason: str) -> None:
        if rank == self._rank:
            self._refused = reason
            self._opened.set()
            self.end()

    # -- any thread -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Let go of the debugger, which learns it from its connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    # -- the relay's thread ---------------------------------------------------------------------------------------

    def serve(self, session: Session) -> None:
        session.open(self._rank)
        if not self._opened.wait(OPEN_WITHIN):
            self._refused = "it does not answer"
        writer = threading.Thread(target=self._write, name="hvdlab-debug-relay-writer", daemon=True)
        writer.start()
        unframer = Unframer()
        with contextlib.suppress(OSError, FramingError):
            while data := self._connection.recv(1 << 16):
                for message in unframer.feed(data):
                    if self._refused:
                        self._said.put(
                            _refusal(message, f"rank {self._rank} can't be debugged: {self._refused}")
                        )
                    else:
                        session.say(self._rank, message)
        self._said.put(None)
        self.end()
        writer.join()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._said.get()) is not None:
                self._connection.sendall(frame(message))


def _refusal(message: bytes, why: str) -> bytes:
    try:
        request = json.loads(message)
        seq, command = request["seq"], request["command"]
    except (ValueError, KeyError, TypeError):
        seq, command = 0, ""
    answer = {
        "type": "response",
        "seq": seq,
        "request_seq": seq,
        "command": command,
        "success": False,
        "message": why,
    }
    error = {"id": 1, "format": why, "showUser": True}
    return json.dumps({**answer, "body": {"error": error}}).encode()
