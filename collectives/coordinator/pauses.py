"""Ranks whose user looks around there: nobody is late who waits for them, and no clock of a wait runs meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlab.collectives.coordinator.common import put_off
from hvdlab.collectives.coordinator.membership import RankPeer
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState


class Pauses:
    """Who is paused, and since when somebody is.

    Attributes:
        reasons: Why, by rank; empty if nobody is.
    """

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self._since = 0.0

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __contains__(self, rank: int) -> bool:
        return rank in self.reasons

    def begin(self, rank: int, reason: str, now: float) -> None:
        """A rank is paused."""
        if not self.reasons:
            self._since = now
        self.reasons[rank] = reason

    def end(self, rank: int, now: float) -> float | None:
        """A rank goes on. Returns when the first one was paused if this was the last, else ``None``."""
        if self.reasons.pop(rank, None) is None or self.reasons:
            return None
        return self._since


def on_paused(state: CoordinatorState, rank: RankPeer, message: m.Paused, now: float) -> None:
    """A rank stops for its user, or does so for another reason."""
    state.pauses.begin(rank.rank, message.reason, now)
    _tell(state)


def on_resumed(state: CoordinatorState, rank: RankPeer, message: m.Resumed, now: float) -> None:
    """A rank goes on."""
    end(state, rank.rank, now)


def end(state: CoordinatorState, rank: int, now: float) -> None:
    """A rank is not paused, or not there any more."""
    if rank not in state.pauses:
        return
    since = state.pauses.end(rank, now)
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
    state.check_blocked = bool(state.blocked or state.awaiting)


def told(state: CoordinatorState) -> m.PausedRanks:
    """Who is paused, as clients are told."""
    reasons = state.pauses.reasons
    ranks = tuple(sorted(reasons))
    return m.PausedRanks(ranks, tuple(reasons[rank] for rank in ranks))


def _tell(state: CoordinatorState) -> None:
    state.outbox.send(tuple(state.membership.clients), told(state))
