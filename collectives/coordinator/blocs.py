"""Ranks that announce together: those behind one relay, as long as they say the same.

The ranks of a bloc share one table of local ids, so that what all of them define is entered once. Where all of them wait for nothing
when they announce together, their submissions from then on are one head of a round
(:class:`~hvdlab.collectives.coordinator.pending.PendingRounds`), until one of them announces something alone. That costs a bloc
nothing but its heads. A rank that alone defines something, or is gone, ends the bloc; the same ranks, or others, can be one again
as soon as their tables say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlab.collectives.coordinator.events import ReceivedTogether
from hvdlab.collectives.coordinator.signatures import Defined
from hvdlab.collectives.protocol.messages import Announce

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.membership import RankPeer
    from hvdlab.collectives.coordinator.state import CoordinatorState


class Bloc:
    """Ranks that announce together.

    Attributes:
        peers: The ranks, lowest first.
        ranks: Their numbers.
        first: The lowest one, under which their submissions are entered.
        definitions: What the local ids of each of them stand for.
    """

    __slots__ = ("definitions", "first", "peers", "ranks")

    def __init__(self, peers: Sequence[RankPeer]) -> None:
        self.peers = tuple(sorted(peers, key=lambda peer: peer.rank))
        self.ranks = tuple([peer.rank for peer in self.peers])
        self.first = self.ranks[0]
        self.definitions = self.peers[0].definitions

    def consists_of(self, peers: Sequence[RankPeer]) -> bool:
        """Whether these ranks, none of them twice, are those of the bloc."""
        return len(peers) == len(self.peers) and all(peer.bloc is self for peer in peers)


def announces_alone(state: CoordinatorState, rank: RankPeer, message: Announce) -> None:
    """A rank of a bloc is about to announce something by itself, or with only some of the others."""
    if message.definitions:
        take_apart(state, rank)
        return
    ps = state.sets.by_id.get(message.process_set)
    if ps is not None and ps.epoch == message.epoch and rank.rank in ps.matcher.firsts:
        ps.matcher.take_apart(ps.matcher.firsts[rank.rank])


def find(state: CoordinatorState, ranks: Sequence[RankPeer], message: Announce) -> Bloc | None:
    """The bloc of ranks that have announced the same, which they may have become by that; else ``None``, and each announces alone."""
    bloc = ranks[0].bloc
    if bloc is not None and bloc.consists_of(ranks):
        return bloc
    part = bloc is not None and not message.definitions and all(rank.bloc is bloc for rank in ranks)
    if part or not _are_alike(ranks):
        for rank in ranks:
            announces_alone(state, rank, message)
        return None
    for rank in ranks:
        take_apart(state, rank)
    bloc = Bloc(ranks)
    for peer in bloc.peers:
        if peer.definitions is not bloc.definitions:
            state.signatures.forget(peer.definitions)
            peer.definitions = bloc.definitions
        peer.bloc = bloc
    return bloc


def enter(state: CoordinatorState, bloc: Bloc, event: ReceivedTogether) -> bool:
    """Enter the definitions of what a whole bloc announces, and make it one submitter for that if it can be.

    Returns:
        Whether the bloc's first rank can announce it for all. Otherwise each of them has to; nothing else is left to define.
    """
    message = event.message
    for definition in message.definitions:
        state.signatures.define(bloc.definitions, definition)
    ps = state.open_set(bloc.peers[0], message)
    if ps is None or not ps.matcher.members.issuperset(bloc.ranks):
        return False
    matcher, definitions = ps.matcher, bloc.definitions
    submitted = [definitions[local] for local in message.locals if local in definitions]
    sound = len(submitted) == len(message.locals) and len(message.extra) in (0, len(submitted))
    united = bloc.first in matcher.blocs
    if sound and (united or matcher.wait_for_nothing(bloc.ranks)) and matcher.fits(bloc.first, submitted):
        if not united:
            matcher.unite(bloc.ranks)
        return True
    if united:
        matcher.take_apart(bloc.first)
    return False


def take_apart(state: CoordinatorState, rank: RankPeer) -> None:
    """End the bloc of a rank, if it is in one: each of its ranks goes on as if it had never been in it."""
    bloc = rank.bloc
    if bloc is None:
        return
    for ps in state.sets:
        if bloc.first in ps.matcher.blocs:
            ps.matcher.take_apart(bloc.first)
    for peer in bloc.peers:
        peer.bloc = None
        if peer is not bloc.peers[0]:
            peer.definitions = state.signatures.copy(bloc.definitions)


def _are_alike(ranks: Sequence[RankPeer]) -> bool:
    """Whether several ranks are behind one relay, and their local ids stand for the same."""
    relay, table = ranks[0].relay, ranks[0].definitions
    if not relay or len(ranks) < 2:
        return False
    others = {id(rank.definitions): rank.definitions for rank in ranks}.values()
    if any(rank.relay != relay for rank in ranks) or any(len(other) != len(table) for other in others):
        return False
    # What was defined last tells most tables apart.
    return all(_last(other) == _last(table) for other in others) and all(
        _meaning(other) == _meaning(table) for other in others if other is not table
    )


def _last(definitions: dict[int, Defined]) -> object:
    return next(reversed(definitions.values())).meaning if definitions else None


def _meaning(definitions: dict[int, Defined]) -> list[object]:
    return [defined.meaning for defined in definitions.values()]
