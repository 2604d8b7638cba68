"""Lists of ranks and members, made short for the wire: a description that was sent over a connection is not sent there again.

A member's description has some 70 bytes. A death in a world of 16,384 ranks concerns all of them. The coordinator would send each
a megabyte twice, in :class:`~hvdlab.collectives.protocol.messages.Configure` and
:class:`~hvdlab.collectives.protocol.messages.World`, to report that one is gone: 34 GB in all. So each description goes over a
connection once. After that a message names the rank, and consecutive ranks as one run; equal call sites in a row are sent once, with
their number. The coordinator's server shortens messages (:class:`SentMembers`), the rank's engine restores them
(:class:`KnownMembers`); the state machines on both sides see whole messages. Clients and observers get whole messages, too: there are
few of them.

Both sides see the messages of a connection in the same order, so that one side knows exactly the descriptions that the other has sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import msgspec

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.messages import Abort, AbortedCollective, Configure, Member, Message, World

SHORTENED = frozenset({Abort, Configure, World})
"""Messages that are shortened."""

Ranks = tuple[int, ...]


def pack(ranks: Iterable[int]) -> Ranks:
    """Return the same ranks, in order, with each run of consecutive ones as its first rank and the negative of its last one."""
    packed: list[int] = []
    first = last = -1
    for rank in ranks:
        if rank == last + 1 and last >= 0:
            last = rank
            continue
        _close_run(packed, first, last)
        packed.append(rank)
        first = last = rank
    _close_run(packed, first, last)
    return tuple(packed)


def _close_run(packed: list[int], first: int, last: int) -> None:
    if last > first:
        # It is above `first`, hence never 0, whose negative is the same number.
        packed.append(-last)


def unpack(packed: Ranks) -> Ranks:
    """Return the ranks that :func:`pack` was given. Raises ``ProtocolError`` for numbers that begin in the middle of a run."""
    if not packed or min(packed) >= 0:
        return packed
    if packed[0] < 0:
        raise ProtocolError("a run of ranks without its first one")
    ranks: list[int] = []
    for number in packed:
        if number >= 0:
            ranks.append(number)
        else:
            ranks.extend(range(ranks[-1] + 1, 1 - number))
    return tuple(ranks)


class SentMembers:
    """Member descriptions on the coordinator's side: the newest one of each rank, numbered in the order in which they came up.

    Attributes:
        newest: The highest number. A connection over which all descriptions up to some number went gets those above it with the next
            message that is shortened.
    """

    def __init__(self) -> None:
        self.newest = 0
        self._by_number: dict[int, Member] = {}  # in order
        self._numbers: dict[int, int] = {}  # of ranks

    def add(self, message: Message) -> None:
        """Number the new descriptions in a message, before it is shortened for any connection."""
        if isinstance(message, Configure | World):
            for member in message.members:
                number = self._numbers.get(member.rank, 0)
                if not number or self._by_number[number] != member:
                    # Removed and added again: the dict stays in the order of numbers.
                    self._by_number.pop(number, None)
                    self.newest += 1
                    self._numbers[member.rank] = self.newest
                    self._by_number[self.newest] = member

    def shorten(self, message: Message, known: int) -> tuple[Message, int]:
        """Shorten a message for one connection.

        Args:
            message: One of :data:`SHORTENED` that was given to :meth:`add`.
            known: The number up to which all descriptions went over the connection; 0 for a new one.

        Returns:
            The short message, and the number up to which all descriptions will have gone over the connection with it.
        """
        if isinstance(message, Configure | World) and message.members:
            new = tuple(self._since(known))
            listed = pack(member.rank for member in message.members)
            message, known = msgspec.structs.replace(message, members=new, listed=listed), self.newest
        return _each_list(message, pack, _pack_sites), known

    def _since(self, known: int) -> Iterable[Member]:
        found: list[Member] = []
        # Backwards up to the first known one: a connection lacks few descriptions, or none.
        for number, member in reversed(self._by_number.items()):
            if number <= known:
                break
            found.append(member)
        return reversed(found)


class KnownMembers:
    """Member descriptions on a rank's side, of one connection."""

    def __init__(self) -> None:
        #: The newest description of each rank, those that have left included: the coordinator sends a description again only if it changed.
        self._known: dict[int, Member] = {}

    def restore(self, message: Message) -> Message:
        """Return the message as it was before it was shortened; one that was not is returned as it is.

        Raises:
            ProtocolError: It names a rank that was never described on this connection.
        """
        message = _each_list(message, unpack, _unpack_sites)
        if isinstance(message, Configure | World) and message.listed:
            self._known |= {member.rank: member for member in message.members}
            known = self._known
            try:
                members = tuple([known[rank] for rank in unpack(message.listed)])
            except KeyError as error:
                raise ProtocolError(
                    f"a {type(message).__name__} with rank {error}, of which nothing was said"
                ) from error
            message = msgspec.structs.replace(message, members=members, listed=())
        return message


def _pack_sites(collective: AbortedCollective) -> AbortedCollective:
    runs = [(site, len(list(same))) for site, same in itertools.groupby(collective.sites)]
    return msgspec.structs.replace(
        collective, sites=tuple([site for site, _ in runs]), repeats=tuple([count for _, count in runs])
    )


def _unpack_sites(collective: AbortedCollective) -> AbortedCollective:
    if not collective.repeats:
        return collective
    runs = zip(collective.sites, collective.repeats, strict=False)
    sites = tuple(itertools.chain.from_iterable(itertools.repeat(site, count) for site, count in runs))
    return msgspec.structs.replace(collective, sites=sites, repeats=())


def _each_list(
    message: Message,
    ranks: Callable[[Ranks], Ranks],
    sites: Callable[[AbortedCollective], AbortedCollective],
) -> Message:
    """Return the message with its lists of ranks changed by ``ranks``, and its lists of call sites by ``sites``."""
    if isinstance(message, World):
        return msgspec.structs.replace(
            message,
            expected=ranks(message.expected),
            waiting=ranks(message.waiting),
            leaving=ranks(message.leaving),
            formed=ranks(message.formed),
            kept=ranks(message.kept),
        )
    if isinstance(message, Abort):
        pending = tuple([_each_list_of(sites(collective), ranks) for collective in message.pending])
        return msgspec.structs.replace(message, ranks=ranks(message.ranks), pending=pending)
    return message


def _each_list_of(collective: AbortedCollective, ranks: Callable[[Ranks], Ranks]) -> AbortedCollective:
    return msgspec.structs.replace(
        collective,
        waited=ranks(collective.waited),
        missing=ranks(collective.missing),
        joined=ranks(collective.joined),
    )
