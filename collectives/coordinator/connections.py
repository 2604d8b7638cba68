"""The server's connections: sending, closing, and noticing those that are late, silent or do not read."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from hvdlab.collectives.coordinator.connection import CLOSING, OPEN, Connection
from hvdlab.collectives.coordinator.events import Event, PeerLost
from hvdlab.collectives.coordinator.options import ServerOptions
from hvdlab.collectives.coordinator.poller import READ, WRITE, Poller
from hvdlab.collectives.coordinator.strangers import TurnedAway
from hvdlab.collectives.protocol.codec import FRAME_LIMIT, encode
from hvdlab.collectives.protocol.endpoint import ConnectionLost
from hvdlab.collectives.protocol.messages import Hello, Ping

NEVER = float("inf")
STRANGERS = 256
"""Connections over the network that may owe their Hello at a time, beyond the ranks that are expected. Each costs some 80 KiB."""
_HELLO_SECONDS = 0.5
"""Seconds that a stranger has for its Hello even if others need its place."""


class Connections:
    """All accepted sockets and what watches them.

    Attributes:
        poller: Its targets are connections, or functions to call.
        listeners: Sockets that connections come from.
        open: Connections that were introduced, by peer.
        lost: Events about connections that ended while something was sent to them.
        next_sweep: When :meth:`sweep` is due.
        turned_away: Logs, for the operator, the connections that were not let in.
        excused: Whether a peer may be silent: its user looks around there, perhaps with all its threads stopped.
        met: Whether any peer was ever introduced.
    """

    def __init__(self, options: ServerOptions, log: Callable[[str], None]) -> None:
        self.poller: Poller[Connection | Callable[[], None]] = Poller()
        self.listeners: list[socket.socket] = []
        self.open: dict[int, Connection] = {}
        self.lost: list[Event] = []
        self.next_sweep = NEVER
        self.excused: Callable[[int], bool] = lambda peer: False
        self.met = False
        self._options = options
        self._log = log
        self.turned_away = TurnedAway(log, self.call_at)
        self._unsettled: dict[Connection, None] = {}  # neither introduced yet nor quite closed
        self._next_peer = 1
        self._ping = 0
        self._calls: list[tuple[float, Callable[[], None]]] = []

    @property
    def idle(self) -> bool:
        """Whether no rank or client is connected, or about to be. Observers don't count: the coordinator does not stay for them."""
        return not self._unsettled and all(connection.observer for connection in self.open.values())

    # -- beginnings -----------------------------------------------------------------------------------------------

    def add(self, sock: socket.socket) -> None:
        """Watch a new socket; it has to introduce itself in time."""
        deadline = time.monotonic() + self._options.hello_timeout
        connection = Connection(sock, self._next_peer, deadline)
        self._next_peer += 1
        self._settle_by(connection, deadline)
        self.poller.register(connection, READ, connection)

    def has_place_for_stranger(self) -> bool:
        """Return whether one more connection over the network may be accepted; the oldest that has had its time ends for it.

        Any process that reaches the port costs memory until it shows the token. A Unix socket lets in only this user.
        """
        bound = STRANGERS + (self._options.state.size or 0)
        return len(self._unsettled) < bound or self.drop_oldest_stranger()

    def introduce(self, connection: Connection, hello: Hello) -> None:
        """A connection has shown a valid token in ``hello``: it is open now."""
        del self._unsettled[connection]
        connection.phase = OPEN
        connection.client, connection.observer = hello.role == "client", hello.role == "observer"
        connection.tracked = hello.cells_tracked
        if not (connection.client or connection.observer):
            connection.members_sent = 0
        connection.name = f"rank {hello.rank}" if hello.role == "rank" else f"{hello.role} {connection.peer}"
        connection.endpoint.limit = FRAME_LIMIT
        connection.heard = time.monotonic()
        self.open[connection.peer] = connection
        self.met = True
        self.sweep_by(connection.heard + self._options.ping_after)

    def _settle_by(self, connection: Connection, deadline: float) -> None:
        connection.deadline = deadline
        self._unsettled[connection] = None
        self.sweep_by(deadline)

    # -- ends -----------------------------------------------------------------------------------------------------

    def drop(self, connection: Connection) -> None:
        """Close a connection now. Without effect if it is closed already: results of the poller's last wait may still name it."""
        if connection.endpoint.closed:
            return
        connection.phase = CLOSING
        self._unsettled.pop(connection, None)
        self.poller.unregister(connection)
        connection.endpoint.close()

    def drop_oldest_stranger(self) -> bool:
        """Close the connection that has owed its Hello for longest; false if none has had enough time to send it."""
        until = time.monotonic() + self._options.hello_timeout - _HELLO_SECONDS
        for connection in self._unsettled:
            if connection.phase != CLOSING and connection.deadline <= until:
                self.turned_away.tell(
                    f"{connection.name} is closed: it has not said Hello, and others need its place"
                )
                self.drop(connection)
                return True
        return False

    def lose(self, connection: Connection, reason: str, events: list[Event], *, faulty: bool = False) -> None:
        """Close a connection that was introduced, and append the event; ``faulty`` if the peer broke the protocol."""
        del self.open[connection.peer]
        self.drop(connection)
        silence = time.monotonic() - connection.heard
        events.append(PeerLost(connection.peer, reason, silence, faulty))

    def finish(self, connection: Connection) -> None:
        """Close a connection once its peer has read what was sent to it; the server does not read from it any more."""
        self.open.pop(connection.peer, None)
        if connection.broken or not connection.endpoint.backlog:
            self.drop(connection)
            return
        connection.phase = CLOSING
        self._settle_by(connection, time.monotonic() + self._options.hello_timeout)
        self.poller.modify(connection, WRITE)

    def close(self) -> None:
        """Close every socket, after sending what can be sent at once."""
        for target in self.poller:
            if isinstance(target, Connection):
                with contextlib.suppress(ConnectionLost):
                    target.endpoint.flush()
                target.endpoint.close()
        for listener in self.listeners:
            listener.close()
        self.open.clear()
        self._unsettled.clear()
        self.poller.close()

    # -- sending --------------------------------------------------------------------------------------------------

    def write(
        self, connection: Connection, frame: bytes, descriptor: int = -1, *, bulk: bool = False
    ) -> None:
        """Send a frame now or as soon as the peer reads; a ``bulk`` frame after all other frames that wait."""
        if connection.broken:
            return
        try:
            if connection.endpoint.send_frame(frame, descriptor, bulk=bulk):
                return
        except ConnectionLost:
            connection.broken = True  # what the peer sent before is read first; then its end of file comes
            return
        if not connection.writing:
            connection.writing = True
            self.poller.modify(connection, READ | WRITE)
        if connection.endpoint.backlog > self._options.backlog_limit and connection.phase == OPEN:
            self._log(f"{connection.name} is dropped: it does not read what it is sent")
            self.lose(connection, "it did not read what it was sent", self.lost)

    def flush(self, connection: Connection) -> None:
        """Send what waits, as far as the socket takes it; closes a connection in phase ``CLOSING`` once all is sent."""
        try:
            done = connection.endpoint.flush()
        except ConnectionLost:
            connection.broken = done = True
        if not done:
            return
        if connection.phase == CLOSING:
            self.drop(connection)
        elif connection.writing:
            connection.writing = False
            self.poller.modify(connection, READ)

    # -- time -----------------------------------------------------------------------------------------------------

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Have :meth:`sweep` call this at ``when`` (``time.monotonic()``)."""
        self._calls.append((when, call))
        self.sweep_by(when)

    def sweep_by(self, when: float) -> None:
        """Have :meth:`sweep` be due at ``when`` (``time.monotonic()``) at the latest."""
        self.next_sweep = min(self.next_sweep, when)

    def _call_due(self, now: float) -> float:
        due = [call for when, call in self._calls if now >= when]
        self._calls = [(when, call) for when, call in self._calls if now < when]
        for call in due:
            call()
        return min([when for when, _ in self._calls], default=NEVER)

    def sweep(self, now: float, events: list[Event]) -> None:
        """Ping peers that are silent, close those that are late or silent for too long, and set :attr:`next_sweep`."""
        upcoming = min(self._drop_late(now), self._call_due(now))
        options = self._options
        silent: list[Connection] = []
        for connection in list(self.open.values()):
            silence = now - connection.heard
            if silence < options.ping_after:
                upcoming = min(upcoming, connection.heard + options.ping_after)
            elif silence >= options.dead_after and not (
                self.excused(connection.peer) or connection.may_live()
            ):
                self._log(f"{connection.name} has been silent for {silence:.0f} s")
                self.lose(connection, f"no sign of life for {silence:.0f} s", events)
            else:
                silent.append(connection)
                upcoming = min(upcoming, now + options.ping_after)
        self.next_sweep = upcoming
        if silent:
            self._ping += 1
            frame = encode(Ping(self._ping))
            for connection in silent:
                self.write(connection, frame)

    def _drop_late(self, now: float) -> float:
        """Close connections that did not introduce themselves, or did not read what was left to send, in time."""
        upcoming = NEVER
        for connection in list(self._unsettled):
            if now < connection.deadline:
                upcoming = min(upcoming, connection.deadline)
                continue
            if connection.phase != CLOSING:
                self.turned_away.tell(
                    f"{connection.name} is closed: no Hello within {self._options.hello_timeout:g} s"
                )
            self.drop(connection)
        return upcoming
