"""Ranks behind relays, as the coordinator's server sees them: their place in a relay's connection, and when they were heard last."""

from __future__ import annotations

from collections.abc import Callable

from hvdlab.collectives.coordinator.connection import Connection
from hvdlab.collectives.coordinator.connections import NEVER, Connections
from hvdlab.collectives.coordinator.events import (
    Event,
    PeerConnected,
    PeerLost,
    Received,
    ReceivedTogether,
)
from hvdlab.collectives.coordinator.options import ServerOptions
from hvdlab.collectives.coordinator.relays import Relays
from hvdlab.collectives.coordinator.watchers import Watcher
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.codec import encode
from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.protocol.messages import (
    Bye,
    Close,
    Faulty,
    From,
    FromRelay,
    Hello,
    Lost,
    Ping,
    Pong,
    Refused,
    To,
)

_HEAD = 4
"""Bytes of a frame before its payload."""


class RelayedPeer:
    """A rank behind a relay: what a :class:`~hvdlab.collectives.coordinator.connection.Connection` is for another rank.

    Attributes:
        relay: The relay's connection.
        name: For log lines.
        heard: When its last message came.
        members_sent, watcher: As of a connection.
    """

    __slots__ = ("heard", "members_sent", "name", "relay", "watcher")

    def __init__(self, relay: Connection, name: str, heard: float) -> None:
        self.relay = relay
        self.name = name
        self.heard = heard
        self.members_sent = 0
        self.watcher: Watcher | None = None

    @property
    def endpoint(self) -> Endpoint:
        """The relay's, where what is sent to this rank waits."""
        return self.relay.endpoint


class BehindRelays:
    """The relays that are connected, and the ranks behind them.

    Args:
        connections: The server's connections; a relay's is one of them.
        options: The server's settings.
        refusal: Why the Hello of a rank is not accepted; empty if it is.
        log: Takes lines for the operator.

    Attributes:
        peers: The ranks, by peer.
    """

    def __init__(
        self,
        connections: Connections,
        options: ServerOptions,
        refusal: Callable[[Hello], str],
        log: Callable[[str], None],
    ) -> None:
        self.peers: dict[int, RelayedPeer] = {}
        self._connections, self._options = connections, options
        self._refusal, self._log = refusal, log
        self._relays = Relays(connections.next_peer)
        self._ping = 0

    # -- up -------------------------------------------------------------------------------------------------------

    def open(self, relay: Connection) -> None:
        """A relay has introduced itself, and was let in."""
        self._relays.open(relay.peer)

    def take(self, relay: Connection, message: FromRelay, now: float, events: list[Event]) -> None:
        """Append what has happened, from what a relay says.

        Raises:
            ProtocolError: It makes no sense. The relay's connection is to be closed.
        """
        if isinstance(message, From | Lost | Faulty):
            for event in self._relays.received(relay.peer, message):
                self._append(event, relay, now, events)
        elif not isinstance(message, Pong | Bye):
            raise ProtocolError(f"a {type(message).__name__} of a relay out of place")

    def _append(self, event: Event, relay: Connection, now: float, events: list[Event]) -> None:
        if isinstance(event, PeerConnected):
            reason = self._refusal(event.hello)
            self.peers[event.peer] = RelayedPeer(relay, f"rank {event.hello.rank} behind {relay.name}", now)
            if reason:
                self._connections.turned_away.tell(f"{self.peers[event.peer].name} is refused: {reason}")
                self.write((event.peer,), encode(Refused(reason)))
                self.close(event.peer)
                return
            self._connections.sweep_by(now + self._options.ping_after)
        elif isinstance(event, PeerLost):
            heard = self.peers.pop(event.peer).heard
            event = event._replace(silence=now - heard)
        elif isinstance(event, ReceivedTogether):
            for peer in event.peers:
                self.peers[peer].heard = now
        elif isinstance(event, Received):
            self.peers[event.peer].heard = now
        events.append(event)

    def lose(self, relay: Connection, reason: str, now: float) -> list[Event]:
        """A relay's connection has ended. Returns that those of all ranks behind it have."""
        events: list[Event] = []
        for event in self._relays.lose(relay.peer, reason):
            self._append(event, relay, now, events)
        return events

    # -- down -----------------------------------------------------------------------------------------------------

    def write(self, peers: tuple[int, ...], frame: bytes, *, bulk: bool = False) -> tuple[int, ...]:
        """Send a frame to those of these peers that are behind relays. Returns the others."""
        direct, relayed = self._relays.routes(peers)
        for relay, numbers in relayed.items():
            self._tell(relay, To(numbers, frame[_HEAD:]), bulk=bulk)
        return direct

    def close(self, peer: int) -> bool:
        """Have the relay close a rank's connection, once the rank has got what was sent to it. Returns whether it is behind a relay."""
        if self.peers.pop(peer, None) is None:
            return False
        place = self._relays.close(peer)
        if place is not None:
            self._tell(place[0], Close((place[1],)))
        return True

    def _tell(self, relay: int, message: To | Close, *, bulk: bool = False) -> None:
        connection = self._connections.open.get(relay)
        if connection is None:
            return
        try:
            frame = encode(message)
        except ProtocolError as error:  # what is sent to a rank is as long as a frame can be
            self._log(str(error))
            return
        self._connections.write(connection, frame, bulk=bulk)

    # -- time -----------------------------------------------------------------------------------------------------

    def sweep(self, now: float, events: list[Event]) -> None:
        """Ping ranks that are silent, and give up those that are for too long, as :meth:`Connections.sweep` does with connections."""
        options = self._options
        upcoming = NEVER
        silent: list[int] = []
        for peer, rank in list(self.peers.items()):
            silence = now - rank.heard
            if silence < options.ping_after:
                upcoming = min(upcoming, rank.heard + options.ping_after)
            elif silence >= options.dead_after and not self._connections.excused(peer):
                self._log(f"{rank.name} has been silent for {silence:.0f} s")
                self.close(peer)
                events.append(PeerLost(peer, f"no sign of life for {silence:.0f} s", silence))
            else:
                silent.append(peer)
                upcoming = min(upcoming, now + options.ping_after)
        if silent:
            self._ping += 1
            self.write(tuple(silent), encode(Ping(self._ping)))
        self._connections.sweep_by(upcoming)
