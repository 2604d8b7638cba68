"""The shell around the coordinator's state: sockets, clock and one selector.

Everything waits in one ``select``; its timeout is the next thing that is due, so an idle job wakes up for
heartbeats only.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hvdlab.collectives.coordinator.connection import CLOSING, OPEN, SHAKING, Connection
from hvdlab.collectives.coordinator.events import (
    CloseConnection,
    Effect,
    Event,
    Log,
    PeerConnected,
    PeerLost,
    Received,
    Send,
    SendConfigure,
    Tick,
)
from hvdlab.collectives.coordinator.memory import create_memory
from hvdlab.collectives.coordinator.state import CoordinatorOptions, CoordinatorState
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.codec import decode_hello, encode
from hvdlab.collectives.protocol.endpoint import ConnectionLost
from hvdlab.collectives.protocol.frames import FRAME_LIMIT
from hvdlab.collectives.protocol.messages import PROTOCOL_VERSION, Hello, Ping, Refused

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the server. Times are in seconds, sizes in bytes.

    Attributes:
        token: What every Hello must show.
        hello_timeout: Time for a stranger to introduce itself, and for a closing one to take what is left.
        ping_after: Silence after which a peer is asked for a sign of life.
        dead_after: Silence after which it counts as lost.
        backlog_limit: How much may wait for a peer that does not read.
    """

    token: str
    hello_timeout: float = 10.0
    ping_after: float = 5.0
    dead_after: float = 30.0
    backlog_limit: int = 256 * 1024 * 1024
    state: CoordinatorOptions = field(default_factory=CoordinatorOptions)


def log_to_stderr(text: str) -> None:
    """One line for the operator."""
    print(f"hvdlab coordinator: {text}", file=sys.stderr, flush=True)


class Server:
    """Serves listeners until told to stop.

    Args:
        options: Settings.
        log: Takes lines for the operator.
        memory: Creates shared memory; tests let it fail.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        log: Callable[[str], None] = log_to_stderr,
        memory: Callable[[str, int], int] = create_memory,
    ) -> None:
        self.options = options
        offset = time.time() - time.monotonic()
        self.state = CoordinatorState(options.state, wall=lambda now: now + offset)
        self._log = log
        self._memory = memory
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, Connection] = {}
        self._unsettled: dict[Connection, None] = {}  # neither welcomed yet nor quite closed
        self._lost: list[Event] = []
        self._next_peer = 1
        self._ping = 0
        self._next_sweep = float("inf")
        self._running = True

    # -- set-up ---------------------------------------------------------------------------------------------------

    def listen(self, sock: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Accept connections on a listening socket, over TLS if a context is given. Takes the socket over."""
        sock.setblocking(False)
        self._selector.register(sock, READ, lambda: self._accept(sock, context))

    def stop_at_end_of(self, descriptor: int) -> None:
        """Stop once this descriptor reports end of file: the one who started us is gone."""
        self._selector.register(descriptor, READ, lambda: self._read_lifeline(descriptor))

    def stop_when_readable(self, descriptor: int) -> None:
        """Stop once this descriptor is readable (a process descriptor, a signal's wake-up)."""
        self._selector.register(descriptor, READ, self.stop)

    def stop(self) -> None:
        self._running = False

    def _read_lifeline(self, descriptor: int) -> None:
        if not os.read(descriptor, 4096):
            self.stop()

    # -- the loop -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until stopped; closes every socket before it returns."""
        try:
            while self._running:
                self.serve_once(self._timeout())
        finally:
            self._close()

    def serve_once(self, timeout: float | None) -> None:
        """Wait at most ``timeout`` seconds for something to happen, and handle what has."""
        events: list[Event] = []
        later: list[Connection] = []
        for key, mask in self._selector.select(timeout):
            target = key.data
            if type(target) is not Connection:
                target()
            elif target.phase != OPEN:
                self._serve_unsettled(target, mask, events)
            else:
                if mask & WRITE:
                    self._flush(target)
                if mask & READ:
                    # What the pool says about a cell comes before what the cell's ranks say.
                    if target.client:
                        self._read(target, events)
                    else:
                        later.append(target)
        for connection in later:
            self._read(connection, events)
        now = time.monotonic()
        if now >= self._next_sweep:
            self._sweep(now, events)
        due = self.state.next_deadline()
        if due is not None and now >= due:
            events.append(Tick())
        while events:
            self._perform(self.state.handle_all(events, now))
            events, self._lost = self._lost, []

    def _timeout(self) -> float | None:
        due = self.state.next_deadline()
        if due is None or due > self._next_sweep:
            due = self._next_sweep
        return None if due == float("inf") else max(0.0, due - time.monotonic())

    # -- connections ----------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._log(f"could not accept a connection: {error}")
            return
        sock.setblocking(False)
        if context is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        deadline = time.monotonic() + self.options.hello_timeout
        connection = Connection(sock, self._next_peer, deadline)
        self._next_peer += 1
        self._unsettled[connection] = None
        self._next_sweep = min(self._next_sweep, deadline)
        self._selector.register(connection, READ, connection)

    def _serve_unsettled(self, connection: Connection, mask: int, events: list[Event]) -> None:
        if connection.phase == CLOSING:
            if mask & WRITE:
                self._flush(connection)
            if connection.broken or not connection.endpoint.backlog:
                self._drop(connection)
            return
        try:
            if connection.phase == SHAKING and not connection.shake():
                return
            payloads = connection.endpoint.receive()
            if payloads:
                self._introduce(connection, payloads, events)
        except ConnectionLost:
            self._drop(connection)
        except (OSError, ProtocolError) as error:
            self._log(f"{connection.name} is closed: {error}")
            self._drop(connection)

    def _introduce(self, connection: Connection, payloads: list[memoryview], events: list[Event]) -> None:
        hello = decode_hello(payloads[0])
        reason = self._refusal(hello)
        if reason:
            self._log(f"{connection.name} is refused: {reason}")
            self._write(connection, encode(Refused(reason)))
            self._finish(connection)
            return
        del self._unsettled[connection]
        connection.phase = OPEN
        connection.client = hello.role == "client"
        connection.name = f"{hello.role} {connection.peer}" if connection.client else f"rank {hello.rank}"
        connection.endpoint.limit = FRAME_LIMIT
        connection.heard = time.monotonic()
        self._connections[connection.peer] = connection
        self._next_sweep = min(self._next_sweep, connection.heard + self.options.ping_after)
        events.append(PeerConnected(connection.peer, hello))
        for payload in payloads[1:]:
            events.append(Received(connection.peer, connection.decode(payload)))

    def _refusal(self, hello: Hello) -> str:
        if not hmac.compare_digest(hello.token.encode(), self.options.token.encode()):
            return "the token is wrong"
        if hello.version != PROTOCOL_VERSION:
            return f"version {hello.version} of the protocol is not spoken here, but {PROTOCOL_VERSION}"
        return ""

    def _read(self, connection: Connection, events: list[Event]) -> None:
        peer = connection.peer
        if peer not in self._connections:
            return
        try:
            for payload in connection.endpoint.receive():
                events.append(Received(peer, connection.decode(payload)))
            connection.heard = time.monotonic()
        except ConnectionLost as error:
            detail = f" ({error})" if connection.tls else ""
            self._lose(connection, f"its connection ended without a goodbye{detail}", events)
        except ProtocolError as error:
            self._log(f"{connection.name} is closed: {error}")
            self._lose(connection, f"it sent {error}", events)

    def _lose(self, connection: Connection, reason: str, events: list[Event]) -> None:
        del self._connections[connection.peer]
        self._drop(connection)
        events.append(PeerLost(connection.peer, reason))

    def _drop(self, connection: Connection) -> None:
        self._unsettled.pop(connection, None)
        self._selector.unregister(connection)
        connection.endpoint.close()

    def _finish(self, connection: Connection) -> None:
        """Close a connection once it has taken what was sent to it."""
        if connection.broken or not connection.endpoint.backlog:
            self._drop(connection)
            return
        connection.phase = CLOSING
        connection.deadline = time.monotonic() + self.options.hello_timeout
        self._unsettled[connection] = None
        self._next_sweep = min(self._next_sweep, connection.deadline)
        self._selector.modify(connection, WRITE, connection)

    # -- sending --------------------------------------------------------------------------------------------------

    def _write(self, connection: Connection, frame: bytes, descriptor: int = -1) -> None:
        if connection.broken:
            return
        try:
            if connection.endpoint.send_frame(frame, descriptor):
                return
        except ConnectionLost:
            connection.broken = True  # what it sent before is still to be read; then comes its end of file
            return
        if not connection.writing:
            connection.writing = True
            self._selector.modify(connection, READ | WRITE, connection)
        if connection.endpoint.backlog > self.options.backlog_limit and connection.phase == OPEN:
            self._log(f"{connection.name} is dropped: it does not read what it is sent")
            self._lose(connection, "it did not read what it was sent", self._lost)

    def _flush(self, connection: Connection) -> None:
        try:
            done = connection.endpoint.flush()
        except ConnectionLost:
            connection.broken = done = True
        if done and connection.writing:
            connection.writing = False
            if connection.phase == OPEN:
                self._selector.modify(connection, READ, connection)

    def _perform(self, effects: Iterable[Effect]) -> None:
        connections = self._connections
        for effect in effects:
            if type(effect) is Send:
                try:
                    frame = encode(effect.message)
                except ProtocolError as error:
                    self._log(str(error))
                    continue
                for peer in effect.peers:
                    connection = connections.get(peer)
                    if connection is not None:
                        self._write(connection, frame)
            elif type(effect) is SendConfigure:
                self._configure(effect)
            elif type(effect) is CloseConnection:
                closing = connections.pop(effect.peer, None)
                if closing is not None:
                    self._finish(closing)
            elif type(effect) is Log:
                self._log(effect.text)

    def _configure(self, effect: SendConfigure) -> None:
        told = [self._connections[peer] for peer in effect.peers if peer in self._connections]
        descriptor = -1
        message = effect.message
        try:
            if any(connection.tls for connection in told):
                raise OSError("a rank of this host is connected over TLS, which carries no descriptors")
            descriptor = self._memory(f"hvdlab-{message.process_set}-{message.epoch}", effect.memory)
        except OSError as error:
            self._log(f"process set {message.process_set} goes without shared memory: {error}")
            message = effect.fallback
        try:
            frame = encode(message)
            for connection in told:
                self._write(connection, frame, descriptor)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    # -- time -----------------------------------------------------------------------------------------------------

    def _sweep(self, now: float, events: list[Event]) -> None:
        """Look for peers that are late or silent, and find out when to look again."""
        options = self.options
        upcoming = float("inf")
        for connection in list(self._unsettled):
            if now >= connection.deadline:
                if connection.phase != CLOSING:
                    self._log(f"{connection.name} is closed: no Hello within {options.hello_timeout:g} s")
                self._drop(connection)
            else:
                upcoming = min(upcoming, connection.deadline)
        silent: list[Connection] = []
        for connection in list(self._connections.values()):
            silence = now - connection.heard
            if silence >= options.dead_after and not connection.may_live():
                self._log(f"{connection.name} has been silent for {silence:.0f} s")
                self._lose(connection, f"no sign of life for {silence:.0f} s", events)
            elif silence >= options.ping_after:
                silent.append(connection)
                upcoming = min(upcoming, now + options.ping_after)
            else:
                upcoming = min(upcoming, connection.heard + options.ping_after)
        self._next_sweep = upcoming
        if silent:
            self._ping += 1
            frame = encode(Ping(self._ping))
            for connection in silent:
                self._write(connection, frame)

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Connection):
                with contextlib.suppress(ConnectionLost):
                    key.data.endpoint.flush()
                key.data.endpoint.close()
            elif isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._connections.clear()
        self._unsettled.clear()
        self._selector.close()
