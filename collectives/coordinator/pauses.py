"""Ranks in which the user looks around: no rank that waits for them is late, and no clock of a wait runs meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlab.collectives.coordinator.common import put_off
from hvdlab.collectives.coordinator.membership import RankPeer
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState


class Pauses:
    """Which ranks are paused, and since when at least one is.

    Attributes:
        reasons: Why each of them is paused, by rank; empty if none is.
    """

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self._since = 0.0

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __contains__(self, rank: int) -> bool:
        return rank in self.reasons

    def begin(self, rank: int, reason: str, now: float) -> None:
        """A rank is paused, for this reason."""
        if not self.reasons:
            self._since = now
        self.reasons[rank] = reason

    def end(self, rank: int) -> float | None:
        """A rank goes on. Returns when the first one was paused if this was the last, else ``None``."""
        if self.reasons.pop(rank, None) is None or self.reasons:
            return None
        return self._since


def on_paused(state: CoordinatorState, rank: RankPeer, message: m.Paused, now: float) -> None:
    """A rank is paused for its user, or goes on to be for another reason."""
    state.pauses.begin(rank.rank, message.reason, now)
    _tell(state)


def on_resumed(state: CoordinatorState, rank: RankPeer, message: m.Resumed, now: float) -> None:
    """A rank goes on."""
    end(state, rank.rank, now)


def end(state: CoordinatorState, rank: int, now: float) -> None:
    """A rank is not paused any more, or gone."""
    if rank not in state.pauses:
        return
    since = state.pauses.end(rank)
    _tell(state)
    if since is None:
        return
    for peer in state.membership.ranks.values():
        if peer.wait is not None:
            peer.wait = peer.wait._replace(since=put_off(peer.wait.since, since, now))
        if peer.executing is not None:
            peer.executing = peer.executing._replace(since=put_off(peer.executing.since, since, now))
    for ps in state.sets:
        for current, _ in ps.matcher.waiting():
            current.since = put_off(current.since, since, now)
    state.stalls.put_off(since, now)
    state.check_blocked = bool(state.blocked)


def paused_ranks(state: CoordinatorState) -> m.PausedRanks:
    """The message that tells clients which ranks are paused."""
    reasons = state.pauses.reasons
    ranks = tuple(sorted(reasons))
    return m.PausedRanks(ranks, tuple(reasons[rank] for rank in ranks))


def _tell(state: CoordinatorState) -> None:
    state.outbox.send(tuple(state.membership.clients), paused_ranks(state))
