"""Waits of ranks for each other outside of collectives: for a message of any of several ranks, or for a push of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from hvdlab.collectives.coordinator.cells import Absence
from hvdlab.collectives.coordinator.membership import Awaited, RankPeer
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState

LIMIT = 64
"""Waits of one rank that the coordinator keeps. It does not look after more, which last until their own time limit."""


def on_await(state: CoordinatorState, rank: RankPeer, message: m.Await, now: float) -> None:
    """A wait begins, goes on or is over."""
    before = rank.awaits.pop(message.number, None)
    if message.ranks and len(rank.awaits) < LIMIT:
        confirmed = before is not None and before.asked
        rank.awaits[message.number] = Awaited(message, confirmed, confirmed)
        state.check_blocked = True
    if rank.awaits:
        state.awaiting.add(rank.rank)
    else:
        state.awaiting.discard(rank.rank)


def on_mail(state: CoordinatorState, ranks: Iterable[int]) -> None:
    """Mail is sent to these ranks, and may be what they wait for: that they confirmed a wait before counts no more."""
    for rank in state.awaiting.intersection(ranks):
        for each in state.membership.ranks[rank].awaits.values():
            each.asked = each.confirmed = False


def free_from_idle(state: CoordinatorState, idle: AbstractSet[int]) -> None:
    """End waits for ranks without a cell: for any of several ranks once all are without one."""
    for rank in sorted(state.awaiting):
        for each in list(state.membership.ranks[rank].awaits.values()):
            wanted = each.message.ranks
            absent = [r for r in wanted if r in idle]
            if absent and (not each.message.any or len(absent) == len(wanted)):
                end(state, rank, each.message.number, state.cells.absence(absent, (rank,)))


def are_confirmed(state: CoordinatorState, ranks: Iterable[int]) -> bool:
    """Whether these ranks, which seem to wait for each other, have all confirmed it after the last mail to them; asks those that have not."""
    confirmed = True
    for rank in state.awaiting.intersection(ranks):
        peer = state.membership.ranks[rank]
        for each in peer.awaits.values():
            confirmed = confirmed and each.confirmed
            if not each.asked:
                each.asked = True
                state.outbox.send((peer.peer,), m.AwaitStill(each.message.number))
    return confirmed


def end(state: CoordinatorState, rank: int, number: int, why: Absence) -> None:
    """Let a rank know that it waits in vain."""
    peer = state.membership.ranks[rank]
    del peer.awaits[number]
    if not peer.awaits:
        state.awaiting.discard(rank)
    state.outbox.send((peer.peer,), m.Absent(number, why.kind.value, why.ranks, why.text))
