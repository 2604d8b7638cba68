"""Server: the shell around the coordinator's state, with sockets, clock and one event loop.

The server waits for all descriptors in one call, until the next deadline. So the coordinator of an idle job wakes up for heartbeats
only.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable

from hvdlab.collectives.coordinator.connections import (
    CLOSING,
    EVERYTHING,
    OPEN,
    SHAKING,
    Connection,
    Connections,
)
from hvdlab.collectives.coordinator.event_history import LaggingSubscriber
from hvdlab.collectives.coordinator.events import (
    CloseConnection,
    Effect,
    Event,
    Log,
    PeerConnected,
    Send,
    SendConfigure,
    Tick,
    Tuned,
)
from hvdlab.collectives.coordinator.liveness import Liveness
from hvdlab.collectives.coordinator.process import ServerOptions
from hvdlab.collectives.coordinator.state import CoordinatorState
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.event_loop import NEVER, READ, WRITE
from hvdlab.collectives.protocol.codec import decode_hello, encode
from hvdlab.collectives.protocol.endpoint import ConnectionLost
from hvdlab.collectives.protocol.member_lists import SHORTENED, SentMembers
from hvdlab.collectives.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    Pong,
    RankEvents,
    Refused,
)
from hvdlab.collectives.system import create_memory, require_own_peer
from hvdlab.collectives.text import operator_log
from hvdlab.collectives.time_limits import wall_offset

_ACCEPT_AGAIN = 0.2
"""Seconds until the server accepts again after it had no descriptor or no place left for a new connection."""


class UnsoundStateError(Exception):
    """A handler's failure has left the coordinator's state broken; the process must end."""


class CoordinatorServer:
    """Event loop that serves the coordinator's listeners until it is stopped.

    Args:
        options: Settings.
        log: Receives warnings for the operator and, at level INFO, ordinary events, deaths included, which peers learn anyway.
            By default warnings go to stderr.

    Attributes:
        options: The settings.
        state: The state machine that decides.
        connections: The accepted sockets.
        alone: Whether the starter is gone.
        on_alone: Called once when the starter is gone.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        log: logging.Logger | None = None,
    ) -> None:
        self.options = options
        log = log or operator_log("coordinator")
        self.state = CoordinatorState(options.state, wall_offset=wall_offset(), clock=time.monotonic_ns)
        self.connections = Connections(options, log)
        #: Detection of dead peers; it reads from all that are introduced.
        self._liveness = Liveness(self.connections, self.state, options, log)
        #: The loop of the connections, which watches the listeners as well.
        self._loop = self.connections.loop
        self._log = log
        #: Descriptions of members that were sent to any rank; each connection has the number of the last one that it got.
        self._members = SentMembers()
        #: File of the tuner's log, empty once it can't be written.
        self._tuning_log = options.tuning_log
        #: Whether this process has begun that file.
        self._tuning_begun = False
        self._due = NEVER  # of the state
        #: Whether :meth:`serve` continues; see :meth:`stop`.
        self._running = True
        self.on_alone: Callable[[], None] = lambda: None
        self.alone = False

    # -- set-up ---------------------------------------------------------------------------------------------------

    def listen(self, sock: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Accept connections on a listening socket, over TLS if a context is given. The server owns the socket from now on."""
        # accept() must not wait either: the connection that made the listener readable can be gone again.
        sock.setblocking(False)
        self.connections.listeners.append(sock)
        self._watch(sock, context)

    def _watch(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        self._loop.register(listener, READ, lambda: self._accept(listener, context))

    def stop_at_end_of(self, descriptor: int, *, linger: bool = False) -> None:
        """Stop once this descriptor reports end of file: the starter has ended.

        Args:
            descriptor: The starter's lifeline, or its process descriptor.
            linger: Whether to serve until no rank or client is connected.
        """
        self._loop.register(descriptor, READ, lambda: self._read_lifeline(descriptor, linger))

    def stop_when_readable(self, descriptor: int) -> None:
        """Stop once this descriptor is readable (a process descriptor, a signal's wake-up)."""
        self._loop.register(descriptor, READ, self.stop)

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call this when a descriptor is readable. It must not block."""
        self._loop.register(descriptor, READ, callback)

    def stop(self) -> None:
        """Leave :meth:`serve` after the present batch of events."""
        self._running = False

    def _read_lifeline(self, descriptor: int, linger: bool) -> None:
        with contextlib.suppress(
            OSError
        ):  # a process descriptor has nothing to read; that it is readable means that the process has ended
            if os.read(descriptor, 4096):
                return
        if not linger:
            self.stop()
        self.alone = True
        try:
            self.on_alone()
        # No descriptor is left, as a rule. The ranks need this service more than the starter's end needs the callback.
        except OSError as error:
            self._log.warning("the end of the starter is not quite followed: %s", error)
        # A pipe at its end stays readable: watched further, it would keep the loop awake while the coordinator lingers.
        self._loop.unregister(descriptor)

    # -- the loop -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until stopped; closes every socket before it returns.

        Raises:
            UnsoundStateError: A handler failed and left a state that can't be used any more.
        """
        try:
            while self._running and not (self.alone and self.connections.idle):
                self.serve_once(self.timeout())
        finally:
            self.connections.close()

    def timeout(self) -> float | None:
        """Return the seconds until the next deadline, or ``None`` for never."""
        due = min(self._due, self.connections.next_check, self._loop.next_call)
        return None if due == NEVER else max(0.0, due - time.monotonic())

    def serve_once(self, timeout: float | None) -> None:
        """Wait at most ``timeout`` seconds for descriptors, and handle a batch of events."""
        connections = self.connections
        ready = self._loop.wait(timeout)
        # After the wait, and once: all events of the batch count as simultaneous, so that no deadline passes between two of them.
        now = time.monotonic()
        events: list[Event] = []
        later: list[Connection] = []
        for target, mask in ready:
            if type(target) is not Connection:
                target()  # type: ignore[operator]  # the other kind of target
                continue
            if mask & WRITE:
                connections.flush(target)
            if mask & READ and target.phase != CLOSING:
                if target.phase != OPEN:
                    self._read_stranger(target, events)
                elif target.client:
                    # Clients first: the pool's message about a cell comes before those of the cell's ranks.
                    self._liveness.read(target, events, now)
                else:
                    later.append(target)
        for connection in later:
            self._liveness.read(connection, events, now)
        if now >= connections.next_check:
            # In this order: the first replaces the time of the next check, the second only moves it forward.
            connections.check_timeouts(now)
            self._liveness.check(now, events)
        self._loop.call_due(now)
        # Behind the messages: those that came in time are handled before the deadlines that they can lift.
        if now >= self._due:
            events.append(Tick())
        # Perhaps the pings of the check were too much for a peer that does not read.
        events, connections.lost = events + connections.lost, []
        # Sending can lose further peers: their ends are the next batch, before the server waits again.
        while events:
            self._perform(self.state.handle_all(events, now))
            if self.state.unsound:
                # Further service could decide wrongly, or leave ranks waiting for ever. The ranks keep all they know, so a
                # successor begins from that; the starter bounds the number of successors. The effects above have ended the
                # sender's connection. Without a successor the ranks learn of the end by their connections.
                raise UnsoundStateError(
                    f"the coordinator's state can't be used any more: {self.state.unsound}. Its log says which message failed"
                )
            due = self.state.next_deadline()
            self._due = NEVER if due is None else due
            events, connections.lost = connections.lost, []

    # -- receiving ------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        if listener.family != socket.AF_UNIX and not self.connections.has_place_for_stranger():
            self._accept_later(listener, "too many have not said Hello yet")
            return
        try:
            sock, _ = listener.accept()
        # The stranger has gone again before it was accepted.
        except (BlockingIOError, ConnectionAbortedError):
            return
        # As a rule no descriptor is left: a stranger that owes its Hello can end for the newcomer, which is
        # perhaps a rank.
        except OSError as error:
            self._make_room(listener, error)
            return
        try:
            sock.setblocking(False)
            if sock.family == socket.AF_UNIX:
                require_own_peer(sock)
            if context is not None:
                # Orders are small: the kernel would otherwise keep one back until the peer has acknowledged
                # the one before.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.getpeername()  # a connection that ended before it was accepted can't be wrapped
                # The loop continues the handshake as bytes come: a stranger that sends none must not stop the service.
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            self.connections.add(sock)
        except OSError as error:
            self.connections.rejections.add(f"a connection is closed: {error}")
            sock.close()

    def _make_room(self, listener: socket.socket, error: OSError) -> None:
        """Close the oldest stranger that has not sent its Hello, as no descriptor is left; otherwise newcomers have to wait."""
        if self.connections.close_oldest_stranger():
            return
        self._accept_later(listener, str(error))

    def _accept_later(self, listener: socket.socket, reason: str) -> None:
        """Stop watching the listener for a while, since it would be readable all the time; newcomers wait at it."""
        self.connections.rejections.add(f"new connections have to wait: {reason}")
        # Not unregistered: perhaps the kernel would watch no further socket when its time comes.
        self._loop.modify(listener, 0)
        self._loop.call_at(time.monotonic() + _ACCEPT_AGAIN, lambda: self._loop.modify(listener, READ))

    def _read_stranger(self, connection: Connection, events: list[Event]) -> None:
        try:
            if connection.phase == SHAKING and not connection.shake():
                return
            payloads = connection.endpoint.receive()
            if payloads:
                self._introduce(connection, payloads, events)
        except ConnectionLost:
            self.connections.close_now(connection)
        except (OSError, ProtocolError) as error:
            self.connections.rejections.add(f"{connection.name} is closed: {error}")
            self.connections.close_now(connection)

    def _introduce(self, connection: Connection, payloads: list[memoryview], events: list[Event]) -> None:
        hello = decode_hello(payloads[0])
        reason = self._refusal(hello)
        if reason:
            self.connections.rejections.add(f"{connection.name} is refused: {reason}")
            self.connections.write(connection, encode(Refused(reason)))
            self.connections.close_after_flush(connection)
            return
        if len(payloads) > 1:
            raise ProtocolError("it did not wait for the answer to its Hello")
        self.connections.introduce(connection, hello)
        events.append(PeerConnected(connection.peer, hello))

    def _refusal(self, hello: Hello) -> str:
        if not (role := self._role_of(hello.token)):
            return "the token is wrong"
        if hello.role != role and not (
            role == "rank" and hello.role == "observer"
        ):  # otherwise a rank, and any process that sees its environment, could post cells
            return f"its token is that of a {role}, and it wants to be a {hello.role[:20]!r}"
        if hello.version != PROTOCOL_VERSION:
            return f"version {hello.version} of the protocol is not spoken here, but {PROTOCOL_VERSION}"
        return ""

    def _role_of(self, token: str) -> str:
        """Return the role of a peer with this token: ``rank``, ``client``, or an empty text."""
        # Compared in constant time: a stranger could otherwise find the token byte by byte.
        for role, expected in (("rank", self.options.token), ("client", self.options.client_token)):
            # As bytes: compare_digest() refuses text that is not ASCII, which a stranger can send.
            if expected and hmac.compare_digest(token.encode(), expected.encode()):
                return role
        return ""

    # -- effects --------------------------------------------------------------------------------------------------

    def _perform(self, effects: Iterable[Effect]) -> None:
        connections = self.connections
        by_peer = connections.open
        for effect in effects:
            if type(effect) is Send:
                if type(effect.message) in SHORTENED:
                    self._send_roster(effect.message, effect.peers)
                    continue
                try:
                    frame = encode(effect.message)
                # A message too large for a frame is dropped with a line for the operator: raised, the error
                # would end the coordinator.
                except ProtocolError as error:
                    self._log.warning("%s", error)
                    continue
                if type(effect.message) is RankEvents:
                    self._pass_events_on(effect.message, frame, effect.peers)
                    continue
                # Such an answer proves that the events before it have arrived, so it waits behind them.
                bulk = type(effect.message) is Pong and effect.message.after_events
                for peer in effect.peers:
                    connection = by_peer.get(peer)
                    # Otherwise the peer was lost while an earlier effect was carried out; its end is in the next batch.
                    if connection is not None:
                        connections.write(connection, frame, bulk=bulk)
            elif type(effect) is SendConfigure:
                self._configure(effect)
            elif type(effect) is CloseConnection:
                closing = by_peer.get(effect.peer)
                if closing is not None:
                    connections.close_after_flush(closing)
            elif type(effect) is Log:
                decision = f" [decision {effect.decision}]" if effect.decision else ""
                self._log.log(
                    logging.WARNING if effect.warning else logging.INFO, "%s%s", effect.text, decision
                )
            elif type(effect) is Tuned:
                self._write_tuning(effect.line)

    def _send_roster(self, message: Message, peers: Iterable[int], descriptor: int = -1) -> None:
        """Send a message with lists of members, without the descriptions that each of these peers has got before."""
        # First: this numbers the new descriptions, and `shorten()` counts all that have a number as known to the receiver.
        self._members.add(message)
        # Connections that have got the same descriptions share a frame.
        frames: dict[int, tuple[bytes, int]] = {}  # by ``members_sent`` of a connection
        for peer in peers:
            connection = self.connections.open.get(peer)
            if connection is None:
                continue
            known = connection.members_sent
            if known not in frames:
                short, after = (
                    (message, known) if known == EVERYTHING else self._members.shorten(message, known)
                )
                try:
                    frames[known] = encode(short), after
                except ProtocolError as error:
                    self._log.warning("%s", error)
                    return
            frame, connection.members_sent = frames[known]
            self.connections.write(connection, frame, descriptor)

    def _pass_events_on(self, message: RankEvents, frame: bytes, peers: Iterable[int]) -> None:
        for peer in peers:
            connection = self.connections.open.get(peer)
            if connection is None:
                continue
            if connection.subscriber is None:
                connection.subscriber = LaggingSubscriber()
            batch = connection.subscriber.next_batch(message, connection.endpoint.backlog)
            # The common batch has a frame that all subscribers share. Only for one that has missed events is it encoded again, with
            # their number.
            if batch is not None:
                self.connections.write(connection, frame if batch is message else encode(batch), bulk=True)

    def _write_tuning(self, line: str) -> None:
        if not self._tuning_log:
            return
        mode = "a" if self._tuning_begun else "w"
        self._tuning_begun = True
        try:
            with open(self._tuning_log, mode, encoding="utf-8") as file:
                print(line, file=file)
        except OSError as error:
            self._log.warning("the tuner's log can't be written: %s", error)
            self._tuning_log = ""

    def _configure(self, effect: SendConfigure) -> None:
        found = [self.connections.open.get(peer) for peer in effect.peers]
        descriptor = -1
        message = effect.message
        try:
            if any(connection is not None and connection.tls for connection in found):
                # TLS carries no descriptors: the ranks of each host make the memory themselves.
                message = effect.fallback
            else:
                descriptor = create_memory(
                    f"hvdlab-{message.process_set}-{message.generation}", effect.memory
                )
        except OSError as error:
            self._log.warning("process set %d goes without shared memory: %s", message.process_set, error)
            message = effect.fallback
        try:
            self._send_roster(message, effect.peers, descriptor)
        finally:
            if descriptor >= 0:
                # Each connection has sent it or holds a copy in its backlog. The ranks keep the memory alive; here it would last for
                # the whole job.
                os.close(descriptor)
