"""Ranks behind relays, as the coordinator's connections see them: each is a peer like one with a connection of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hvdlab.collectives.coordinator.events import Event, PeerConnected, PeerLost, Received, ReceivedTogether
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.codec import decode_from_rank, decode_hello
from hvdlab.collectives.protocol.messages import Announce, Faulty, From, Lost
from hvdlab.collectives.protocol.rosters import pack, unpack_known

_KEPT = 64
"""Audiences whose routes are kept: all members of a process set are sent to again and again."""


class _Relay:
    """A relay's connection.

    Attributes:
        peers: The peers behind it, by the relay's numbers of them.
        newest: The highest of these numbers so far.
    """

    __slots__ = ("newest", "peers")

    def __init__(self) -> None:
        self.peers: dict[int, int] = {}
        self.newest = -1


class Relays:
    """What the coordinator knows of the relays that are connected to it.

    Args:
        next_peer: Gives the number of a new peer.
    """

    def __init__(self, next_peer: Callable[[], int]) -> None:
        self._next_peer = next_peer
        self._relays: dict[int, _Relay] = {}
        self._places: dict[int, tuple[int, int]] = {}  # relay, and number there, by peer
        self._routes: dict[tuple[int, ...], tuple[tuple[int, ...], dict[int, tuple[int, ...]]]] = {}

    # -- up -------------------------------------------------------------------------------------------------------

    def open(self, relay: int) -> None:
        """A relay is connected. ``relay`` is not 0, and never used again."""
        self._relays[relay] = _Relay()

    def received(self, relay: int, message: From | Lost | Faulty) -> list[Event]:
        """What has happened, from what a relay says. The caller checks that the tokens of those that introduce themselves are valid.

        Raises:
            ProtocolError: It makes no sense. The relay's connection is to be closed, and then lost.
        """
        there = self._relays[relay]
        numbers = unpack_known(message.peers, there.newest + 1)
        if isinstance(message, Lost | Faulty):
            gone = [there.peers.pop(number) for number in numbers if number in there.peers]
            self._forget(gone)
            faulty = isinstance(message, Faulty)
            return [PeerLost(peer, message.reason, faulty=faulty) for peer in gone]
        if numbers and max(numbers) > there.newest:
            return [self._introduce(relay, there, numbers, message.message)]
        peers = tuple(dict.fromkeys([there.peers[number] for number in numbers if number in there.peers]))
        said = decode_from_rank(message.message)
        if len(peers) > 1 and isinstance(said, Announce):
            return [ReceivedTogether(peers, said)]
        return [Received(peer, said) for peer in peers]

    def _introduce(self, relay: int, there: _Relay, numbers: Sequence[int], payload: bytes) -> PeerConnected:
        if len(numbers) > 1:
            raise ProtocolError("several ranks introduced themselves as one")
        hello = decode_hello(payload)
        peer = self._next_peer()
        there.newest = numbers[0]
        there.peers[there.newest] = peer
        self._places[peer] = relay, there.newest
        return PeerConnected(peer, hello, relay)

    def lose(self, relay: int, reason: str) -> list[Event]:
        """A relay's connection has ended, and so have those of all peers behind it."""
        peers = list(self._relays.pop(relay).peers.values())
        self._forget(peers)
        return [PeerLost(peer, reason) for peer in peers]

    # -- down -----------------------------------------------------------------------------------------------------

    def routes(self, peers: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
        """How to reach these peers.

        Returns:
            Those with a connection of their own; and, by relay, the relay's numbers of the others, packed as messages have them.
        """
        routes = self._routes.get(peers)
        if routes is None:
            direct: list[int] = []
            relayed: dict[int, list[int]] = {}
            for peer in peers:
                place = self._places.get(peer)
                if place is None:
                    direct.append(peer)
                else:
                    relayed.setdefault(place[0], []).append(place[1])
            routes = tuple(direct), {relay: pack(sorted(numbers)) for relay, numbers in relayed.items()}
            if len(self._routes) == _KEPT:
                self._routes.clear()
            self._routes[peers] = routes
        return routes

    def close(self, peer: int) -> tuple[int, int] | None:
        """A peer is to be closed: forget it. Returns its relay, and the relay's number of it; ``None`` if it has its own connection."""
        place = self._places.get(peer)
        if place is not None:
            relay, number = place
            del self._relays[relay].peers[number]
            self._forget((peer,))
        return place

    def _forget(self, peers: Iterable[int]) -> None:
        for peer in peers:
            del self._places[peer]
        self._routes.clear()
