"""Admission: which peers may connect, which ranks make up the world, and when newcomers enter it.

Elastic training decides at which point the world changes, and its ranks begin again together. A rank in training keeps newcomers
out, since its collectives would wait for them. When it is at a point where the world can change, after a failure or because a
newcomer waits to enter, it reports so (*regroups*) and submits nothing more. Collectives in which other ranks wait for it are aborted
at once, so that they come, too. Once no rank of the world is in training any more, the world gets a new generation, with the newcomers.

Once training has ended on a rank of a script, newcomers wait until that rank trains again or leaves. Otherwise they would begin to
train from the start, without a rank that could give them its state. (A pool's ranks only run cells that their notebook sends.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from hvdlab.collectives.coordinator.deadlock import RunningCells
from hvdlab.collectives.coordinator.decision_log import DecisionEntry, DecisionKind
from hvdlab.collectives.coordinator.events import CloseConnection, Log, Send
from hvdlab.collectives.coordinator.membership import MembershipTable, RankPeer
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.process_sets import (
    OPEN,
    Decisions,
    GenerationAbort,
    MemberChange,
    ProcessSets,
)
from hvdlab.collectives.errors import CauseKind
from hvdlab.collectives.protocol import handshake
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.text import format_ranks


class WorldRestoration(Protocol):
    """Restoration of the world that a dead coordinator had, as far as admission depends on it.

    Attributes:
        active: Whether it still lasts: which ranks train and are in the world is not known yet.
        released: Ranks to release once it is over.
    """

    active: bool
    released: set[int]


class Admission:
    """Rules by which ranks get into the world and out of it.

    Args:
        options: Settings of the state.
        membership: Ranks that live, are expected, or have died.
        sets: Process sets, whose members and phases decide.
        cells: Cells that run.
        elastic: Ranks in elastic training.
        restoring: Restoration of the world that a dead coordinator had.

    Attributes:
        due: Whether to consider newcomers at the end of this batch of events.
        refusals: Reasons why ranks were refused, the last few: a rank that is started again and again is logged once.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        membership: MembershipTable,
        sets: ProcessSets,
        cells: RunningCells,
        elastic: ElasticRanks,
        restoring: WorldRestoration,
    ) -> None:
        self.due = False
        self.refusals: deque[str] = deque(maxlen=32)
        self._options = options
        self._membership = membership
        self._sets = sets
        self._cells = cells
        self._elastic = elastic
        self._restoring = restoring

    def refusal(self, rank: int, hello: m.Hello) -> str:
        """Return why a peer may not come as this rank, or an empty text."""
        reason = (
            self._membership.refusal(rank) if hello.role == "rank" else f"there is no role {hello.role!r}"
        )
        return reason or self._too_late(rank, hello) or self._differs(rank, hello)

    def _differs(self, rank: int, hello: m.Hello) -> str:
        """Return why a rank does not fit those in the world, or an empty text.

        They are compared one by one only for the text, which names the one that differs.
        """
        membership = self._membership
        members = (living.member for living in membership.ranks.values())
        required, hosts = self._options.require_encryption, membership.hosts.keys()
        reason = handshake.encryption_refusal(required, rank, hello, members, hosts)
        # The coordinator's own version of hvdlab counts: of two ranks that differ, the first one to come need not be right.
        others = [("the coordinator", {"hvdlab": handshake.own_versions()["hvdlab"]})]
        if not membership.versions.fit(hello.versions):
            others += [(f"rank {living.rank}", living.versions) for living in membership.ranks.values()]
        return reason or handshake.version_mismatch(rank, hello.versions, others)

    def _too_late(self, rank: int, hello: m.Hello) -> str:
        """Return why a rank that has lost its connection can't come back, since the others continue without it; empty if it can."""
        death = self._membership.deaths.get(rank)
        if hello.incarnation < 0:
            return ""
        # Its connection was to this coordinator, not to one before, so its generations were aborted when that ended; or a successor
        # has recorded its death.
        if hello.incarnation >= self._options.incarnation or (death is not None and death.pid == hello.pid):
            cut_off = self._membership.cut_off_since(rank, hello.pid) is not None
            if cut_off and hello.returns and not self._restoring.active:
                return ""
            return f"the connection of rank {rank} was lost, and the others have gone on without it"
        return ""

    def refuse(self, peer: int, rank: int, hello: m.Hello, reason: str) -> Decisions[None]:
        """Refuse a peer, for the reason that :meth:`refusal` has returned, and close its connection."""
        early = self._is_early(rank, hello)
        # A rank that is too early tries again several times a second, which is no news for the operator.
        if not early and reason not in self.refusals:
            self.refusals.append(reason)
            entry = DecisionEntry(DecisionKind.REFUSED, ranks=(rank,), facts={"reason": reason})
            yield entry
            yield Log(f"refused: {reason}", decision=entry.number)
        yield Send((peer,), m.Refused(reason, early))
        yield CloseConnection(peer)

    def _is_early(self, rank: int, hello: m.Hello) -> bool:
        """Return whether a rank that was refused comes back too soon.

        Its old connection is not given up yet, or the world is not restored yet, before which no rank is known to live.
        """
        if hello.incarnation < 0 or not hello.returns:
            return False
        living = self._membership.ranks.get(rank)
        if living is not None:
            return living.pid == hello.pid
        return self._restoring.active and self._membership.cut_off_since(rank, hello.pid) is not None

    def become_outdated(self, rank: RankPeer) -> Decisions[None]:
        """Inform a rank that has come back with its memory that the others have continued without it; it waits to be admitted."""
        rank.outdated = True
        text = f"rank {rank.rank} was cut off, and the others have gone on without it"
        yield Send((rank.peer,), m.Outdated(text))

    def resize(self, ranks: tuple[int, ...]) -> Decisions[None]:
        """Set the expected ranks; members that are not among them leave."""
        wanted = tuple(sorted(set(ranks)))
        entry = DecisionEntry(DecisionKind.RESIZED, ranks=wanted)
        if self._membership.expected != wanted:
            yield entry
        decision = entry.number  # 0 where nothing changes
        dropped = self._membership.set_expected(ranks)
        # Ranks that have to leave still run their cells, which decides below how their generations end.
        self._cells.discard_all_but({*ranks, *self._membership.ranks})
        for rank in dropped:
            yield Send((rank.peer,), m.Leave("the world was resized", decision))
        leaving = {rank.rank for rank in dropped}
        busy = any(self._cells.is_running(rank) for rank in leaving)
        for ps in list(self._sets):
            going = leaving & (set(ps.members) - ps.gone)
            if not going:
                continue
            # An orderly change only if nothing is under way: a rank that leaves at once would let the others wait in their collective.
            if busy or (ps.phase == OPEN and ps.negotiation.pending):
                text = f"{format_ranks(sorted(going))} left, because the world was resized"
                yield GenerationAbort(ps, CauseKind.MEMBERSHIP, tuple(sorted(going)), text, cause=decision)
            else:
                staying = tuple(rank for rank in ps.members if rank not in going)
                yield MemberChange(ps, staying, decision)

    def scale_down(self, ranks: tuple[int, ...]) -> Decisions[None]:
        """Remove ranks where elastic training lets the world change; at once if no rank trains, or if they are not in the world."""
        if (
            self._restoring.active
        ):  # which ranks train, and are in the world, is known once the ranks have resumed
            self._restoring.released.update(ranks)
            return
        expected = set(self._membership.expected or ())
        going = expected & set(ranks)
        later = going & set(self._sets.world.current) & self._membership.ranks.keys()
        # Without training there is no later point to wait for.
        if not self._elastic.active:
            later = set()
        if going - later:
            yield from self.resize(tuple(sorted(expected - (going - later))))
        if later:
            self._membership.release(later)
            self.due = True

    def _remove_released(self, going: set[int]) -> Decisions[None]:
        """Remove released ranks at a point where the world can change; the others continue without them, and nothing fails."""
        entry = DecisionEntry(DecisionKind.RELEASED, ranks=sorted(going))
        yield entry
        left = [rank for rank in self._membership.expected or () if rank not in going]
        for rank in self._membership.set_expected(left):
            # `resume()` answers all ranks that have regrouped, and a released one must not begin again with
            # the others.
            self._elastic.drop(rank.rank)
            yield Send((rank.peer,), m.Leave("its host is not part of the job any more", entry.number))
        for ps in list(self._sets):
            if going & (set(ps.members) - ps.gone):
                staying = tuple(rank for rank in ps.members if rank not in going)
                yield MemberChange(ps, staying, entry.number)

    def reject_left_out(self, rank: RankPeer, message: m.Announce) -> Decisions[None]:
        """Fail the submissions of a rank that was asked to leave: the others continue without it, and no generation of its own will end.

        The generation is not aborted: operations that it still executes with the others complete.
        """
        text = f"rank {rank.rank} was let go, and the others go on without it"
        submitted = [
            defined for local in message.locals if (defined := rank.definitions.get(local)) is not None
        ]
        entry = DecisionEntry(
            DecisionKind.REJECTED,
            process_set=message.process_set,
            generation=message.generation,
            names=[defined.info.name for defined in submitted],
            ranks=(rank.rank,),
            facts={"reason": text},
        )
        if submitted:
            yield entry
        for local in message.locals:
            defined = rank.definitions.get(local)
            if defined is not None:
                info, site = defined.info, defined.site
                pending = m.AbortedCollective(int(info.kind), info.name, (rank.rank,), (), (site,))
                scope = message.process_set, message.generation
                kind = CauseKind.MEMBERSHIP.value
                refusal = m.Cancelled(
                    *scope, (local,), kind, (rank.rank,), text, "", pending, decision=entry.number
                )
                yield Send((rank.peer,), refusal)

    def is_needed(self) -> bool:
        """Return whether :meth:`admit_newcomers` may change anything: mostly the world is as it should be when a cell ends."""
        if self._membership.waiting or self._elastic.active:
            return True
        return not self._has_all_that_are_expected()

    def admit_newcomers(self) -> Decisions[list[tuple[int, m.Regrouped]]]:
        """Form a larger world once all expected ranks have come (or died).

        A tracked newcomer without a cell waits until no member runs one. It would not submit that cell's
        collectives, and the ranks that run it would fail for no reason of their own. Ranks that train elastically admit
        newcomers when they regroup; then not all expected ranks need have come. An outdated rank waits until its own training has
        gone back to its last commit, or the cells of the members have ended.

        Returns:
            Answers to the ranks that have regrouped, by connection: they go out after all messages about the new generation.
        """
        membership, world, cells = self._membership, self._sets.world, self._cells
        if membership.expected is None or not (membership.complete or self._elastic.active):
            return []
        if self._restoring.active:
            return []
        there = [r for r in membership.expected if r in membership.ranks and not membership.ranks[r].leaving]
        current = world.current
        gone = world.gone | membership.returning
        outdated = {rank for rank in there if membership.ranks[rank].outdated}
        stay = [rank for rank in there if rank in current and rank not in gone | outdated]
        new = [
            rank
            for rank in there
            if rank not in stay and (rank not in outdated or self._may_enter(rank, stay))
        ]
        if any(cells.is_running(rank) for rank in current):
            new = [rank for rank in new if rank not in cells.idle]
        # A script's rank that has shut down and comes back waits for the others to do the same.
        if any(not membership.ranks[rank].tracked for rank in stay):
            new = [rank for rank in new if rank not in membership.returning]
        if membership.kept and self._elastic.spares(stay, new) >= len(membership.kept | membership.leaving):
            membership.release(tuple(membership.kept))
        going = membership.leaving.intersection(stay)
        change = self._elastic.consider(stay, new, len(going))
        if going and change is WorldChange.LATER and self._elastic.training.isdisjoint(stay):
            # All have stopped, and too few would be left. Without some of those that were to leave none could go on, for as long as no other comes.
            staying = sorted(going)[: max(0, len(going) - self._elastic.spares(stay, new))]
            if self._elastic.consider(stay, new, len(going) - len(staying)) is WorldChange.NOW:
                membership.keep(staying)
                going = going.difference(staying)
                change = WorldChange.NOW
        if going and change is not WorldChange.LATER:
            yield from self._remove_released(going)
            stay = [rank for rank in stay if rank not in going]
        # Ranks in training learn from this list that newcomers wait, and regroup at their next commit.
        membership.set_waiting(tuple(new) if change is WorldChange.LATER else ())
        # Without training the world waits for all that are expected, so that ranks which start at different times form one
        # generation, not many.
        if change is WorldChange.NOW or (change is WorldChange.FREE and new and membership.complete):
            membership.returning.difference_update(new)
            for rank in new:
                membership.ranks[rank].outdated = False
            # The members keep their order: a restored world has no other record of which rank came first.
            entry = DecisionEntry(DecisionKind.ADMITTED, ranks=sorted(new), facts={"world": change.value})
            yield entry
            members = (*(rank for rank in current if rank in stay), *sorted(new))
            yield MemberChange(world, members, entry.number)
            return [
                (membership.ranks[rank].peer, m.Regrouped(ticket)) for rank, ticket in self._elastic.resume()
            ]
        return []

    def _has_all_that_are_expected(self) -> bool:
        """Return whether the world has each expected rank, and none of them leaves, has left or is outdated."""
        membership, world = self._membership, self._sets.world
        if world.gone or membership.returning or membership.leaving:
            return False
        for rank in membership.ranks.values():
            if rank.outdated:
                return False
        return {*world.current}.issuperset(membership.expected or ())

    def _may_enter(self, rank: int, members: Sequence[int]) -> bool:
        """Return whether an outdated rank can be admitted now, beside these members.

        It can't while the members are inside a cell or training that it did not start with them:

        * A rank that is still training itself waits for its reset; its own submissions fail until then
          (:class:`~hvdlab.collectives.protocol.messages.Outdated`).
        * A rank at a reset point is admitted if a member trains elastically too, or no member runs a cell.
        * Any other one must be a pool's, and enters between cells.
        """
        training, ready = self._elastic.training, self._elastic.ready
        if rank in training:
            return False
        busy = any(self._cells.is_running(member) for member in members)
        if rank in ready:
            return not busy or any(member in training or member in ready for member in members)
        return self._membership.ranks[rank].tracked and not busy

    def set_training(self, rank: RankPeer, *, on: bool) -> None:
        """Record that elastic training begins, or ends, on a rank."""
        self.due = True
        if on and not self._elastic.active:
            self._membership.changed = True  # ranks that wait for the world to be complete need not any more
        # A rank can train again after it has finished, and must be in one of the three states only.
        self._elastic.drop(rank.rank)
        if on:
            self._elastic.training.add(rank.rank)
        elif not rank.tracked:
            self._elastic.finished.add(rank.rank)

    def add_regrouped(self, rank: RankPeer, message: m.Regroup) -> None:
        """Record that a rank in elastic training is where the world can change."""
        self.due = True
        self._elastic.training.discard(rank.rank)
        self._elastic.ready[rank.rank] = message

    def abort_waits_on_regrouped(self) -> Decisions[None]:
        """Abort the generations in which other ranks wait for a collective that a regrouped rank will not submit."""
        ready = self._elastic.ready
        for ps in self._sets:
            if ps.phase != OPEN or not ps.negotiation.pending:
                continue
            absent = sorted(ps.negotiation.members & ready.keys())
            if absent:
                whose = "its" if len(absent) == 1 else "their"
                why = ready[absent[0]].reason
                text = f"{format_ranks(absent)} went back to {whose} last commit" + (
                    f" ({why})" if why else ""
                )
                yield GenerationAbort(ps, CauseKind.WITHDRAWN, tuple(absent), text)


class WorldChange(Enum):
    """Answer to the question whether the world can change now."""

    FREE = "no rank trains"
    LATER = "when the ranks in training have come"
    NOW = "they have, and begin again"


class ElasticRanks:
    """Progress of the living ranks in elastic training, as they report it.

    Attributes:
        training: Ranks in the middle of training.
        ready: Ranks that have regrouped, with their messages.
        finished: Ranks of scripts whose training has ended.
        least: How many ranks training needs, as those have said that regrouped last; 0 before.
    """

    def __init__(self) -> None:
        self.least = 0
        self.training: set[int] = set()
        self.ready: dict[int, m.Regroup] = {}
        self.finished: set[int] = set()

    @property
    def active(self) -> bool:
        """Return whether elastic training decides when ranks are admitted."""
        return bool(self.training or self.ready or self.finished)

    def drop(self, rank: int) -> None:
        """Forget a rank that is gone."""
        self.training.discard(rank)
        self.ready.pop(rank, None)
        self.finished.discard(rank)

    def consider(self, stay: Sequence[int], new: Sequence[int], leaving: int = 0) -> WorldChange:
        """Return whether the world can change now.

        Args:
            stay: Members of the world that stay.
            new: Newcomers.
            leaving: How many of ``stay`` leave with the change.
        """
        if not self.training.isdisjoint(stay):
            return WorldChange.LATER
        # If no member is left, those that come back begin again by themselves, as soon as there are enough.
        wanted = [self.ready[rank].at_least for rank in stay or new if rank in self.ready]
        if not wanted:
            return WorldChange.FREE if self.finished.isdisjoint(stay) else WorldChange.LATER
        self.least = max(wanted)
        return WorldChange.NOW if len(stay) + len(new) - leaving >= max(wanted) else WorldChange.LATER

    def spares(self, stay: Sequence[int], new: Sequence[int]) -> int:
        """Return how many of the ranks that would be there are more than training needs; negative if there are too few."""
        return len(stay) + len(new) - self.least

    def resume(self) -> list[tuple[int, int]]:
        """Return all ranks that have regrouped, with their tickets; they are in training again from now on."""
        # All of them live: `drop()` has removed those that have died since.
        answered = [(rank, said.ticket) for rank, said in self.ready.items()]
        self.training.update(self.ready)
        self.ready.clear()
        return answered
