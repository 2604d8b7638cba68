"""Restoration of the world of a coordinator that died, by its successor, from the facts that ranks and the client send.

The successor decides nothing before all ranks have come that lived when the other one died: otherwise collectives of some would wait for
ranks that are on their way, or fail for their absence. A rank that has not come after a while counts as dead. Process sets keep their
ids. Generations continue above all that were, so that no message to or from the dead coordinator can be mistaken for a new one.
"""

from __future__ import annotations

from collections import OrderedDict

from hvdlab.collectives.coordinator.admission import Admission, ElasticRanks
from hvdlab.collectives.coordinator.deadlock import RunningCells
from hvdlab.collectives.coordinator.decision_log import DecisionEntry, DecisionKind
from hvdlab.collectives.coordinator.events import Log, Send
from hvdlab.collectives.coordinator.membership import MembershipTable, RankPeer
from hvdlab.collectives.coordinator.process_sets import Decisions, ProcessSets
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.text import format_ranks

GENERATIONS = 1 << 20
"""Distance between the first generations of two incarnations of the coordinator: more than one incarnation ever has."""

REMEMBERED = 4096
"""Ends of cells that are remembered, in case the client reports that they still run."""


class Restoring:
    """Facts from ranks and the client so far, from which a successor restores its world.

    Args:
        incarnation: How many coordinators have died before this one.
        seconds: Seconds to wait for the ranks that lived then.

    Attributes:
        active: Whether the world is still being restored. Until the end of that, no process set has a generation.
        due: Time at which waiting is over at the latest, as ``now``; ``None`` until the first event.
        recalled: Whether a client has sent its facts.
        released: Ranks to release where elastic training lets the world change, once it is restored.
        resumed: Facts of the ranks that have come, by rank.
        alive: Process ids, or 0, of the ranks that lived, as ranks and the client report them.
        cells: Cells that the client reports to run, each with its ranks; empty once they count as running.
        ran_in: Process ids of the ranks that the client knew.
        renewed: Ranks that another process has replaced meanwhile.
        ended: Newest ends of cells, as (cell, rank), that the ranks have reported.
        mail: Mail for ranks that have not come yet, by rank.
    """

    def __init__(self, incarnation: int, seconds: float) -> None:
        self.incarnation = incarnation
        self.active = incarnation > 0
        self.due: float | None = None
        self.recalled = False
        self.released: set[int] = set()
        self.seconds = seconds
        self.resumed: dict[int, m.Resume] = {}
        self.alive: dict[int, int] = {}
        self.cells: tuple[tuple[str, tuple[int, ...]], ...] = ()
        self.ran_in: dict[int, int] = {}
        self.renewed: set[int] = set()
        # Ordered: of a plain dict, the first key is found behind the places of all that were removed before it.
        self.ended: OrderedDict[tuple[str, int], None] = OrderedDict()
        self.mail: dict[int, list[m.Mail]] = {}

    def begin(self, now: float) -> None:
        """Start the clock at the first event."""
        if self.active and self.due is None:
            self.due = now + self.seconds

    def add(self, rank: int, facts: m.Resume) -> None:
        """Add the facts of a rank that has come."""
        self.resumed[rank] = facts
        for other in facts.alive:
            self.alive.setdefault(other, 0)  # the client's process id, if it has named one, stays

    def cell_ended(self, cell: str, rank: int) -> None:
        """Record that a cell has ended on a rank. Perhaps the client does not know that yet, even if it has sent its facts already.

        The coordinator can first read a connection that the client has given up, so that the client sends its facts twice. A report of
        the end can be lost together with a connection while the coordinator lives.
        """
        self.ended[cell, rank] = None
        if len(self.ended) > REMEMBERED:
            self.ended.popitem(last=False)

    def keep_mail(self, rank: int, mail: m.Mail) -> None:
        """Keep mail for a rank that is perhaps on its way: the sender has only come earlier."""
        self.mail.setdefault(rank, []).append(mail)

    def drop(self, rank: int) -> None:
        """Forget a rank that has come, and is gone again."""
        self.resumed.pop(rank, None)
        # A rank that has sent Bye has no death in the table: `awaited()` would wait for it once more.
        self.alive.pop(rank, None)

    def awaited(self, membership: MembershipTable) -> list[int]:
        """Return the ranks that lived and have not come, and that still have a place in the world."""
        known = self.resumed.keys() | membership.deaths.keys() | self.renewed
        expected = membership.expected
        return sorted(r for r in self.alive if r not in known and (expected is None or r in expected))


class Successor:
    """Restoration of the world of a coordinator that died: facts come in, and end the wait for the ranks that lived.

    Args:
        facts: Facts of ranks and the client; inactive in a first coordinator.
        sized: Whether the number of ranks is known, so that no client need come.
        membership: Ranks that have come, and deaths.
        sets: Process sets, to restore.
        cells: Cells that run.
        elastic: Ranks in elastic training.
        admission: Rules by which ranks get into the world.
    """

    def __init__(
        self,
        facts: Restoring,
        membership: MembershipTable,
        sets: ProcessSets,
        cells: RunningCells,
        elastic: ElasticRanks,
        admission: Admission,
        *,
        sized: bool,
    ) -> None:
        self._facts = facts
        self._sized = sized
        self._membership = membership
        self._sets = sets
        self._cells = cells
        self._elastic = elastic
        self._admission = admission

    def add_resumed(self, rank: RankPeer, message: m.Resume) -> Decisions[None]:
        """Add the facts of a rank that knew an earlier coordinator. If the world is restored already, the rank is like any newcomer."""
        # Ends before begins: a cell that ended and the one after it arrive in one message.
        facts = self._facts
        for cell, error in message.ended:
            if rank.tracked:
                facts.cell_ended(cell, rank.rank)
                self._cells.end(cell, rank.rank, error)
        for cell in message.cells:
            if rank.tracked:
                self._cells.begin(cell, rank.rank)
        if message.elastic:
            self._elastic.training.add(rank.rank)
        self._admission.due = True
        if facts.active:
            if message.released:
                facts.released.add(rank.rank)
            facts.add(rank.rank, message)
            return
        # Too late: the sets have been restored without this rank.
        for known in message.sets:
            if known.id > 0:
                yield Send((rank.peer,), m.Dissolve(known.id))

    def add_recalled(self, message: m.Recall) -> Decisions[None]:
        """Add the facts of a client, from the coordinator before or from this one over another connection."""
        yield from self._admission.resize(message.expected)
        # Behind the resize, which sets the expected ranks: deaths of other ranks are not restored.
        self._membership.restore_deaths(message.deaths)
        facts = self._facts
        facts.recalled = True
        facts.cells = message.cells
        facts.ran_in = {member.rank: member.pid for member in message.members}
        if facts.active:
            for member in message.members:
                facts.alive[member.rank] = member.pid
        else:
            self._begin_cells()
        yield from self._admission.scale_down(message.released)
        self._admission.due = True

    def end_wait(self, now: float) -> Decisions[None]:
        """Restore the world if all awaited ranks have come, or waiting has lasted long enough."""
        facts, membership = self._facts, self._membership
        missing = facts.awaited(membership)
        if facts.due is None or now < facts.due:
            # Earlier than that only if no facts can be on their way: the client has sent its own, or none need come, and a rank has
            # named those that lived.
            known = facts.recalled or (self._sized and facts.resumed)
            if missing or not known:
                return
        # First: `scale_down()` below only collects the released ranks as long as the restoration lasts.
        facts.active = False
        count = len(facts.resumed)
        entry = self._end_entry(missing)
        yield entry
        decision = entry.number
        for rank in missing:
            yield from self._record_missing(rank, now, decision)
        if membership.expected is None and self._elastic.active:
            # Perhaps no client comes for long, if the notebook of a kept pool has ended together with the coordinator: the ranks train on.
            membership.set_expected({*membership.ranks, *membership.deaths})
            membership.awaited -= membership.deaths.keys()
        yield from self._restore_sets(decision)
        self._begin_cells()
        # A rank that has not resumed is dead, or another process than the one that was to be let go.
        yield from self._admission.scale_down(tuple(facts.resumed.keys() & facts.released))
        # Without delay: ranks ignore each report of a world that is still being restored, so they wait for this one.
        membership.changed = membership.urgent = self._admission.due = True
        text = f"took over from coordinator {facts.incarnation - 1} with {count} ranks"
        yield Log(text, warning=False, decision=decision)
        # Mail that is left is for ranks that have not come in time and count as dead.
        facts.resumed, facts.alive, facts.mail = {}, {}, {}

    def _end_entry(self, missing: list[int]) -> DecisionEntry:
        resumed = self._facts.resumed
        facts = {"coordinator": str(self._facts.incarnation - 1), "resumed": str(len(resumed))}
        facts["missing"] = format_ranks(missing) if missing else ""
        return DecisionEntry(DecisionKind.TOOK_OVER, ranks=sorted(resumed), facts=facts)

    def _record_missing(self, rank: int, now: float, decision: int) -> Decisions[None]:
        reason = (
            f"it did not come back within {self._facts.seconds:g} s after the coordinator had died and a new one "
            "had taken over"
        )
        yield DecisionEntry(DecisionKind.DIED, cause=decision, ranks=(rank,), facts={"reason": reason})
        pid = self._facts.alive[rank]
        self._membership.record_death(rank, pid, reason, now, explained=False, admitted=True)

    def _restore_sets(self, decision: int) -> Decisions[None]:
        facts, ranks = self._facts, self._membership.ranks
        # The newest generation's members: a rank that was cut off reports those of an older one.
        newest: dict[int, m.KnownSet] = {}
        for resumed in facts.resumed.values():
            for known in resumed.sets:
                if known.id not in newest or newest[known.id].generation < known.generation:
                    newest[known.id] = known
        kept: dict[int, tuple[int, ...]] = {}
        for id, known in sorted(newest.items()):
            members = tuple(rank for rank in known.ranks if rank in facts.resumed)
            if id == 0:
                members = self._same_processes(known, members)
            if members and _stands(known, members, facts):
                kept[id] = members
                yield from self._leave_out(id, members)
            else:
                knowing = [r for r, resumed in facts.resumed.items() if any(k.id == id for k in resumed.sets)]
                yield Send(tuple(ranks[r].peer for r in knowing), m.Dissolve(id))
        last_set = max((resumed.last_set for resumed in facts.resumed.values()), default=0)
        generation = max((known.generation for known in newest.values()), default=0) + 1
        self._sets.restore(kept, last_set, generation, decision)
        if newest and not facts.recalled:
            # An expected rank that did not live when the coordinator died is not on its way.
            self._membership.awaited &= facts.alive.keys()

    def _leave_out(self, id: int, members: tuple[int, ...]) -> Decisions[None]:
        """Inform the ranks that were cut off when the others continued without them: they must not wait to be members."""
        resumed, ranks = self._facts.resumed, self._membership.ranks
        former = [r for r, facts in resumed.items() if r not in members and _is_in(facts, id, r)]
        yield Send(tuple(ranks[r].peer for r in former if id > 0), m.Dissolve(id))
        for rank in (ranks[r] for r in former if id == 0):
            if rank.tracked or resumed[rank.rank].elastic:
                yield from self._admission.become_outdated(rank)

    def _same_processes(self, known: m.KnownSet, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of these members of the world that are still the same processes.

        A process in the place of a dead one can have come to a coordinator that died before it had restored the world: such a
        process resumes like the others, but is a newcomer. As a member it would have the place of the dead one, before ranks
        that have been in the world for longer.
        """
        # Not strict: lists of unequal lengths come from a faulty rank, and an error at the end of a batch
        # ends the coordinator.
        processes = {*zip(known.ranks, known.pids, strict=False)}
        ranks = self._membership.ranks
        return tuple(rank for rank in members if (rank, ranks[rank].pid) in processes)

    def _begin_cells(self) -> None:
        """Count the cells that the client reported to run as running, on the ranks that have not reported their end."""
        facts, ranks = self._facts, self._membership.ranks
        for cell, on in facts.cells:
            for rank in on:
                there = rank in ranks and ranks[rank].tracked and rank not in facts.renewed
                # A connection that the client has given up can be read late, and name a process that has died since then.
                same = there and facts.ran_in.get(rank, ranks[rank].pid) == ranks[rank].pid
                if same and (cell, rank) not in facts.ended:
                    self._cells.begin(cell, rank)
        # Once for each report: a client that sends its facts again has its cells in them, too.
        facts.cells = ()


def _is_in(facts: m.Resume, id: int, rank: int) -> bool:
    return any(known.id == id and rank in known.ranks for known in facts.sets)


def _stands(known: m.KnownSet, members: tuple[int, ...], facts: Restoring) -> bool:
    """Return whether all members of a process set have it, and no rank was about to add or remove it."""
    if known.id == 0:
        return True
    resumed = facts.resumed
    having = {rank for rank, sent in resumed.items() if any(k.id == known.id for k in sent.sets)}
    if not having.issuperset(members):
        return False
    return not any(
        known.id in sent.removing or (known.ranks in sent.adding and rank not in having)
        for rank, sent in resumed.items()
    )
