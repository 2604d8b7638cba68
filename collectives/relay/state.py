"""A relay as a pure state machine: events in, effects out.

A relay numbers the ranks below it; the numbers are never used again. What these ranks send goes up as :class:`From`, and what comes down as
:class:`To` is written to each of them. Below may be other relays: what such a relay says of its own numbers is
translated into this one's, and the other way round.

Equal announcements of all ranks become one. Everything else goes on at once, behind what is held of the same ranks. What a rank says is
checked, so that it can't be the relay's fault above, and goes on as it came: a relay knows no rank, epoch or tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import (
    decode_from_rank,
    decode_from_relay,
    decode_hello,
    decode_to_relay,
    encode_payload,
)
from hvdlab.collectives.protocol.rosters import pack, unpack_known
from hvdlab.collectives.relay.events import (
    CloseConnection,
    Effect,
    Ended,
    Event,
    Heard,
    Opened,
    SendDown,
    SendUp,
    Told,
)
from hvdlab.collectives.relay.holding import Held, Holding

_TAG = slice(1, 10)
_ANNOUNCE = b"\xa8Announce"
"""Where the name of a message is in its payload, and that of an announcement: a string of eight bytes."""


class Below:
    """A connection from below.

    Attributes:
        relays: Whether another relay is at its other end.
        numbers: This relay's numbers of the ranks behind it, by the other relay's; a rank's own connection has one, as 0.
        newest: The highest of the other relay's numbers so far.
    """

    __slots__ = ("newest", "numbers", "relays")

    def __init__(self, *, relays: bool) -> None:
        self.relays = relays
        self.numbers: dict[int, int] = {}
        self.newest = -1


class RelayState:
    """What a relay knows.

    Raises:
        ProtocolError: By :meth:`handle`, for a frame that makes no sense. The connection that it came over is to be closed; one from below
            has :class:`Ended` then.
    """

    def __init__(self) -> None:
        self._below: dict[int, Below] = {}
        self._places: dict[int, tuple[int, int]] = {}  # connection, and number there, of each living rank
        self._next = 0
        self._holding = Holding()

    def next_deadline(self) -> float | None:
        """When a :class:`Tick` is due at the latest (monotonic seconds), or ``None`` for never."""
        return self._holding.due

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event at ``now`` (monotonic seconds), and return the effects to carry out, in order."""
        if isinstance(event, Heard):
            return self._heard(event.connection, event.payload, now)
        if isinstance(event, Told):
            return list(self._told(decode_to_relay(event.payload)))
        if isinstance(event, Opened):
            self._below[event.connection] = Below(relays=event.relays)
            return []
        if isinstance(event, Ended):
            below = self._below.pop(event.connection, Below(relays=False))
            return self._lose(tuple(below.numbers.values()), event.reason, faulty=event.faulty)
        return _sent(self._holding.take_due(now))

    # -- up -------------------------------------------------------------------------------------------------------

    def _heard(self, connection: int, payload: bytes, now: float) -> list[Effect]:
        below = self._below.get(connection)
        if below is None:
            return []  # closed
        if not below.relays:
            if below.numbers:
                decode_from_rank(
                    payload
                )  # what makes no sense ends here, with the connection of its rank alone
            else:
                decode_hello(payload)
                self._add(connection, below, 0)  # in the order in which those above hear of them
            return self._take(tuple(below.numbers.values()), payload, now)
        message = decode_from_relay(payload)
        if isinstance(message, m.From):
            return self._take(self._numbers_of(connection, below, message.peers), message.message, now)
        if isinstance(message, m.Lost | m.Faulty):
            numbers = self._numbers_of(connection, below, message.peers)
            for number in numbers:
                del below.numbers[self._places[number][1]]
            return self._lose(numbers, message.reason, faulty=isinstance(message, m.Faulty))
        raise ProtocolError(f"a {type(message).__name__} of a relay out of place")

    def _numbers_of(self, connection: int, below: Below, packed: tuple[int, ...]) -> tuple[int, ...]:
        """This relay's numbers of ranks behind another one. A rank that was closed meanwhile has none any more."""
        found: dict[int, None] = {}
        for inner in unpack_known(packed, below.newest + 1):
            if inner > below.newest:
                below.newest = inner
                self._add(connection, below, inner)
            number = below.numbers.get(inner)
            if number is not None:
                found[number] = None
        return tuple(found)

    def _add(self, connection: int, below: Below, inner: int) -> None:
        below.numbers[inner] = self._next
        self._places[self._next] = connection, inner
        self._next += 1

    def _take(self, numbers: tuple[int, ...], payload: bytes, now: float) -> list[Effect]:
        if not numbers:
            return []
        if payload[_TAG] == _ANNOUNCE:
            self._holding.put(numbers, payload, now)
            return _sent(self._holding.take_complete(len(self._places)))
        return [*_sent(self._holding.take_of(numbers)), SendUp(m.From(pack(numbers), payload))]

    def _lose(self, numbers: tuple[int, ...], reason: str, *, faulty: bool) -> list[Effect]:
        """Ranks are gone: what they have sent goes before that, and what the others have sent may be complete without them."""
        if not numbers:
            return []
        lost = (m.Faulty if faulty else m.Lost)(pack(numbers), reason)
        effects = [*_sent(self._holding.take_of(numbers)), SendUp(lost)]
        return effects + self._forget(numbers)

    def _forget(self, numbers: Iterable[int]) -> list[Effect]:
        for number in numbers:
            del self._places[number]
        return _sent(self._holding.take_complete(len(self._places)))

    # -- down -----------------------------------------------------------------------------------------------------

    def _told(self, message: m.ToRelay) -> Iterable[Effect]:
        if isinstance(message, m.Ping):
            yield SendUp(m.Pong(message.number))
        elif isinstance(message, m.To):
            ranks, relayed = self._routes(message.peers)
            if ranks:
                yield SendDown(tuple(ranks), message.message)
            for connection, inner in relayed.items():
                yield SendDown((connection,), encode_payload(m.To(pack(inner), message.message)))
        elif isinstance(message, m.Close):
            yield from self._close(message)
        else:
            raise ProtocolError(f"a {type(message).__name__} for a relay out of place")

    def _close(self, message: m.Close) -> Iterable[Effect]:
        ranks, relayed = self._routes(message.peers)
        gone = [self._below.pop(connection).numbers[0] for connection in ranks]
        for connection, inner in relayed.items():
            numbers = self._below[connection].numbers
            gone += [numbers.pop(each) for each in inner]
            yield SendDown((connection,), encode_payload(m.Close(pack(inner))))
        # What they have sent goes up all the same; the coordinator drops it.
        yield from _sent(self._holding.take_of(gone))
        for connection in ranks:
            yield CloseConnection(connection)
        yield from self._forget(gone)

    def _routes(self, packed: tuple[int, ...]) -> tuple[list[int], dict[int, list[int]]]:
        """The connections of those of these ranks that have their own, and the others' numbers by the connection of their relay."""
        ranks: list[int] = []
        relayed: dict[int, list[int]] = {}
        for number in dict.fromkeys(unpack_known(packed, self._next - 1)):
            place = self._places.get(number)
            if place is None:
                continue  # it is gone, and the coordinator does not know yet
            connection, inner = place
            if self._below[connection].relays:
                relayed.setdefault(connection, []).append(inner)
            else:
                ranks.append(connection)
        return ranks, relayed


def _sent(taken: Iterable[Held]) -> list[Effect]:
    return [SendUp(m.From(pack(sorted(held.peers)), held.payload)) for held in taken]
