"""Elastic training: its ranks decide at which point the world changes, and begin again together.

A rank in training keeps newcomers out, since its collectives would wait for them. When it is at a point where the world
may change, after a failure or because a newcomer waits to enter, it says so (*regroups*) and submits nothing more. What other
ranks wait for it to submit is aborted at once, so that they come, too. Once no rank of the world is in training any more, the
world gets a new epoch, with the newcomers.

Once training has ended on a rank of a script, newcomers wait until that rank trains again or leaves: they would begin to
train from the start, with no rank whose state they could take over. (A pool's ranks only run what their notebook sends.)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from hvdlab.collectives.coordinator.membership import RankPeer
from hvdlab.collectives.coordinator.process_sets import OPEN
from hvdlab.collectives.errors import CauseKind, format_ranks
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState


class Change(Enum):
    """Whether the world may change."""

    FREE = "nobody trains"
    LATER = "when the ranks in training have come"
    NOW = "they have, and begin again"


class Elastic:
    """What the living ranks have said of their elastic training.

    Attributes:
        training: Ranks in the middle of training.
        ready: Ranks that have regrouped, and what they said.
        finished: Ranks of scripts whose training has ended.
    """

    def __init__(self) -> None:
        self.training: set[int] = set()
        self.ready: dict[int, m.Regroup] = {}
        self.finished: set[int] = set()

    @property
    def active(self) -> bool:
        """Whether elastic training decides which ranks come in."""
        return bool(self.training or self.ready or self.finished)

    def drop(self, rank: int) -> None:
        """A rank is gone."""
        self.training.discard(rank)
        self.ready.pop(rank, None)
        self.finished.discard(rank)

    def consider(self, stay: Sequence[int], new: Sequence[int], leaving: int = 0) -> Change:
        """Whether the world may change.

        Args:
            stay: Members of the world that stay there.
            new: Newcomers that are there.
            leaving: How many of ``stay`` leave with the change.
        """
        if not self.training.isdisjoint(stay):
            return Change.LATER
        # If no member is left, those that come back begin again by themselves, as soon as there are enough.
        wanted = [self.ready[rank].at_least for rank in stay or new if rank in self.ready]
        if not wanted:
            return Change.FREE if self.finished.isdisjoint(stay) else Change.LATER
        return Change.NOW if len(stay) + len(new) - leaving >= max(wanted) else Change.LATER

    def resume(self) -> list[tuple[int, int]]:
        """Put all ranks that have regrouped into training again; returns them with their tickets."""
        answered = [(rank, said.ticket) for rank, said in self.ready.items()]
        self.training.update(self.ready)
        self.ready.clear()
        return answered


def regroup(state: CoordinatorState) -> None:
    """The world has been changed: answer the ranks that have regrouped, after the messages about the new epoch."""
    for rank, ticket in state.elastic.resume():
        state.answers.append((state.membership.ranks[rank].peer, m.Regrouped(ticket)))


def end_waits(state: CoordinatorState) -> None:
    """End the collectives that other ranks wait in and that a rank which has regrouped will not submit."""
    ready = state.elastic.ready
    for ps in list(state.sets):
        if ps.phase != OPEN or not ps.matcher.pending:
            continue
        absent = sorted(ps.matcher.members & ready.keys())
        if absent:
            whose = "its" if len(absent) == 1 else "their"
            why = ready[absent[0]].reason
            text = f"{format_ranks(absent)} went back to {whose} last commit" + (f" ({why})" if why else "")
            state.sets.abort(ps, CauseKind.WITHDRAWN, absent, text)


def on_elastic(state: CoordinatorState, rank: RankPeer, message: m.Elastic, now: float) -> None:
    state.check_admission = True
    if message.on and not state.elastic.active:
        state.membership.changed = True  # those that wait for the world to be complete need not any more
    state.elastic.drop(rank.rank)
    if message.on:
        state.elastic.training.add(rank.rank)
    elif not rank.tracked:
        state.elastic.finished.add(rank.rank)


def on_regroup(state: CoordinatorState, rank: RankPeer, message: m.Regroup, now: float) -> None:
    state.check_admission = True
    state.elastic.training.discard(rank.rank)
    state.elastic.ready[rank.rank] = message
