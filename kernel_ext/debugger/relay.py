"""A port on the loopback interface of the notebook's host, by which another program than the notebook debugs one rank.

VS Code and others attach to it as to ``debugpy.listen``. Behind it is the connection that the pool has with its rank, on
whatever host that is: the rank itself listens nowhere.

The protocol knows no password, and a program that speaks it to a rank runs code there. So the port lets in processes of the
same user only, refuses what is no message of the protocol at its first wrong byte (a web page can have the user's browser
send HTTP to any port), and passes nothing on until the debugger has introduced itself and waited for the answer.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import json
import queue
import socket
import threading
from collections.abc import Callable

import msgspec

from hvdlab.collectives.client import Client
from hvdlab.collectives.deadline import Deadline
from hvdlab.kernel_ext.debugger.framing import MOST, FramingError, Unframer, frame
from hvdlab.kernel_ext.debugger.mail import Session, desk_of
from hvdlab.kernel_ext.debugger.messages import FromServer, Opened, Said
from hvdlab.kernel_ext.debugger.peers import is_mine

OPEN_WITHIN = 20.0
"""Seconds that a rank has to start its debug server, and again to answer ``initialize``."""
HANDSHAKE_WITHIN = 10.0
"""Seconds that a debugger has for each of its first two requests."""
HANDSHAKE_MOST = 256 << 10
"""Bytes of each of these two requests at most."""
UNUSED_FOR = 600.0
"""Seconds without a session after which the port closes, unless the relay was made with ``keep``."""


class HandshakeError(Exception):
    """The other end is no debugger, or none that keeps to the protocol."""


class Phase(enum.Enum):
    """How far a handshake has come."""

    INITIALIZE = enum.auto()
    """The debugger has to send ``initialize``."""
    ANSWER = enum.auto()
    """The rank has to answer. The protocol forbids the debugger to send anything before it has the answer."""
    ATTACH = enum.auto()
    """The debugger has to send ``attach`` or ``launch``."""
    DONE = enum.auto()


class _Head(msgspec.Struct):
    """The fields of a message that the handshake looks at."""

    type: str
    seq: int
    command: str = ""
    arguments: dict[str, msgspec.Raw] | None = None


class Handshake:
    """What a debugger has to send before its messages reach the rank.

    Attributes:
        phase: What has to come next.
    """

    def __init__(self) -> None:
        self.phase = Phase.INITIALIZE

    def from_debugger(self, message: bytes) -> None:
        """A message came from the debugger.

        Raises:
            HandshakeError: It is not the one that has to come now.
        """
        expected = {Phase.INITIALIZE: ("initialize",), Phase.ATTACH: ("attach", "launch")}.get(self.phase, ())
        try:
            request = msgspec.json.decode(message, type=_Head)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise HandshakeError("no request") from error
        if request.type != "request" or request.command not in expected:
            raise HandshakeError(f"{request.command!r} instead of {' or '.join(expected) or 'waiting'}")
        self.phase = Phase.ANSWER if self.phase is Phase.INITIALIZE else Phase.DONE

    def from_rank(self, message: bytes) -> bool:
        """A message came from the rank. Returns whether it is the answer that the debugger has to wait for."""
        try:
            said = msgspec.json.decode(message, type=_Answer)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        return self.phase is Phase.ANSWER and (said.type, said.command) == ("response", "initialize")

    def answered(self) -> None:
        """The debugger, which has sent nothing more meanwhile, gets the answer now."""
        self.phase = Phase.ATTACH


class _Answer(msgspec.Struct):
    type: str
    command: str = ""


class Relay:
    """Listens from its making until :meth:`close`, or until it has let a debugger in. It lets in one at a time.

    A program that is refused, or never introduces itself, does not close the port.

    Args:
        client: The pool's connection.
        rank: The rank.
        port: Where to listen; any free one by default.
        keep: Listen until :meth:`close`, for any number of debuggers one after the other.
        mine: Whether a connection may come in.
        unused_for: Seconds without a session after which the port closes, unless ``keep``.
        handshake_within: Seconds that a debugger has for each request of its handshake.

    Raises:
        OSError: The port is taken.

    Attributes:
        port: Where it listens, on 127.0.0.1.
        keep: As it was given.
    """

    def __init__(
        self,
        client: Client,
        rank: int,
        port: int = 0,
        *,
        keep: bool = False,
        mine: Callable[[socket.socket], bool] = is_mine,
        unused_for: float = UNUSED_FOR,
        handshake_within: float = HANDSHAKE_WITHIN,
    ) -> None:
        self.rank, self.keep, self._mine, self._handshake_within = rank, keep, mine, handshake_within
        self._desk = desk_of(client)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1)
        self.port: int = self._listener.getsockname()[1]
        self._unused = Deadline(None if keep else unused_for)
        #: The connection that is served, from its first byte on, so that close() can end it.
        self._visit: _Visit | None = None
        self._busy = False
        self._listening = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="hvdlab-debug-relay", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a debugger is attached."""
        return self._busy

    @property
    def listening(self) -> bool:
        """Whether debuggers can still come."""
        return self._listening

    @property
    def over(self) -> bool:
        """Whether no debugger is attached, and none can come any more."""
        return not self._thread.is_alive()

    def _listen(self) -> None:
        try:
            while (connection := self._accept()) is not None:
                with connection:
                    self._serve(connection)
        finally:
            self._shut()

    def _accept(self) -> socket.socket | None:
        try:
            while True:
                self._listener.settimeout(self._unused.remaining())
                with contextlib.suppress(ConnectionAbortedError):
                    return self._listener.accept()[0]
        except OSError:  # closed, or unused for too long
            return None

    def _serve(self, connection: socket.socket) -> None:
        visit = _Visit(connection, self.rank, self._desk.session, self._handshake_within)
        with self._lock:
            if not self._listening:
                return
            self._visit = visit
        try:
            if self._mine(connection) and visit.shake_hands():
                self._busy = True
                if not self.keep:
                    self._shut()
                visit.serve()
        finally:
            self._busy = False
            with self._lock:
                self._visit = None
            visit.leave()

    def _shut(self) -> None:
        with self._lock:
            self._listening = False
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def end(self) -> None:
        """Listen no more, and let a debugger that is attached go, without waiting for it. Any thread; idempotent."""
        self._shut()
        with self._lock:
            if self._visit is not None:
                self._visit.end()

    def close(self) -> None:
        """:meth:`end`, and wait until it is done. The rank goes on. Idempotent."""
        self.end()
        if self._thread is not threading.current_thread():
            self._thread.join()


class _Visit:
    """One connection, of a debugger or a stranger.

    Args:
        begin: Makes the session with the rank, once the debugger has introduced itself.
    """

    def __init__(
        self,
        connection: socket.socket,
        rank: int,
        begin: Callable[[str, Callable[[int, FromServer], None], Callable[[int, str], None]], Session],
        handshake_within: float,
    ) -> None:
        self._connection, self._rank, self._begin = connection, rank, begin
        self._handshake_within = handshake_within
        self._unframer = Unframer(HANDSHAKE_MOST)
        #: Complete messages of the debugger that were not handled yet.
        self._received: collections.deque[bytes] = collections.deque()
        self._session: Session | None = None
        self._opened = threading.Event()
        self._refused = ""
        self._ended = False
        #: Messages of the rank's debug server; None when nothing more comes.
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
            self.end()

    # -- any thread -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Shut the connection down, from which the debugger learns that its session is over."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._opened.set()
        self._said.put(None)

    # -- the relay's thread ---------------------------------------------------------------------------------------

    def shake_hands(self) -> bool:
        """Exchange the handshake between the debugger and the rank. Returns whether the debugger may stay."""
        handshake = Handshake()
        try:
            request = self._next()
            handshake.from_debugger(request)
            if self._received or self._unframer.pending:
                return False  # it does not wait for the answer
            self._session = self._begin("another debugger", self.heard, self.gone)
            self._session.open(self._rank)
            if not self._opened.wait(OPEN_WITHIN):
                self._refused = "it does not answer"
            if self._refused:
                self._connection.sendall(
                    frame(_refusal(request, f"rank {self._rank} can't be debugged: {self._refused}"))
                )
                return False
            self._session.say(self._rank, request)
            deadline = Deadline(OPEN_WITHIN)
            while handshake.phase is Phase.ANSWER:
                message = self._said.get(timeout=deadline.remaining())
                if message is None:
                    return False
                if handshake.from_rank(message):
                    self._check_silent()
                    handshake.answered()
                self._connection.sendall(frame(message))
            request = self._next()
            handshake.from_debugger(request)
        except (OSError, FramingError, HandshakeError, queue.Empty):
            return False
        self._session.say(self._rank, request)
        return True

    def _next(self) -> bytes:
        """The next message.

        Raises:
            FramingError: The bytes are no message.
            OSError: The connection has ended, or the message took too long.
        """
        deadline = Deadline(self._handshake_within)
        while not self._received:
            self._connection.settimeout(deadline.remaining() or 1e-3)
            data = self._connection.recv(1 << 16)
            if not data or self._ended:  # after a shutdown, what had come before can still be read
                raise ConnectionAbortedError
            self._received += self._unframer.feed(data)
        return self._received.popleft()

    def _check_silent(self) -> None:
        """Raises ``HandshakeError`` if the other end has sent more before the answer: then it is no debugger."""
        self._connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._connection.recv(1, socket.MSG_PEEK)
            raise HandshakeError("it did not wait for the answer")
        self._connection.settimeout(self._handshake_within)

    def serve(self) -> None:
        """Carry messages to and fro until one side ends."""
        assert self._session is not None
        self._connection.settimeout(None)
        self._unframer.most = MOST
        writer = threading.Thread(target=self._write, name="hvdlab-debug-relay-writer", daemon=True)
        writer.start()
        try:
            with contextlib.suppress(OSError, FramingError):
                while True:
                    while self._received:
                        self._session.say(self._rank, self._received.popleft())
                    data = self._connection.recv(1 << 16)
                    if not data:
                        break
                    self._received += self._unframer.feed(data)
        finally:
            self.end()
            writer.join()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._said.get()) is not None:
                self._connection.sendall(frame(message))

    def leave(self) -> None:
        """End the session, if there was one: what has stopped goes on."""
        if self._session is not None:
            self._session.leave(self._rank)
            self._session.close()


def _refusal(request: bytes, why: str) -> bytes:
    seq = msgspec.json.decode(request, type=_Head).seq
    answer = {
        "type": "response",
        "seq": seq,
        "request_seq": seq,
        "command": "initialize",
        "success": False,
        "message": why,
    }
    error = {"id": 1, "format": why, "showUser": True}
    return json.dumps({**answer, "body": {"error": error}}).encode()
