"""The ranks of a pool, from the order to start one to its end: a state machine without I/O.

A rank belongs to the pool's size or not, and is *starting*, *ready*, *leaving* or *lost*. A change of some ranks never touches those
that stay. A lost rank keeps its number until it is replaced (*repair*) or the pool is made smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from hvdlab.launch.processes import describe_exit
from hvdlab.launch.starter import Ended, Started

IN_ORDER = describe_exit(0, 0)
"""Exit, in words, of a rank's process that has obeyed the coordinator's order to leave."""


class RankPhase(StrEnum):
    """Phase of a rank's life."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    LOST = "lost"


@dataclass(slots=True)
class RankRecord:
    """Record of one rank.

    Attributes:
        rank: Its number.
        pid: Its process id, or 0 as long as it has none.
        state: Its phase.
        at_commit: Whether it leaves at the next commit of the elastic training, and is a rank of the world until then.
        reason: The reason of its loss; empty if it is not lost.
        tail: The last lines of its standard error, if it is lost.
        detail: More that the starter reported of its end, such as its peak memory.
    """

    rank: int
    pid: int = 0
    state: RankPhase = RankPhase.STARTING
    at_commit: bool = False
    reason: str = ""
    tail: str = ""
    detail: str = ""


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolSizeSet:
    """Request of the caller that the pool consist of these ranks.

    Attributes:
        ranks: The ranks.
        replace_lost: Whether lost ones among them are started again.
        at_commit: Whether the pool only shrinks: all other ranks leave at the next commit of the elastic training.
    """

    ranks: tuple[int, ...]
    replace_lost: bool = False
    at_commit: bool = False


@dataclass(frozen=True, slots=True)
class RanksAdopted:
    """Takeover of ranks that another process has started.

    Attributes:
        ranks: The ranks of the pool.
        pids: Process ids of the ranks that live.
        let_go: Further ranks, which that process has let go, and which have not come to a commit yet.
    """

    ranks: tuple[int, ...]
    pids: Mapping[int, int]
    let_go: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentReady:
    """Report that the rank's agent takes mail."""

    rank: int


@dataclass(frozen=True, slots=True)
class Reconnected:
    """Report of another connection to the coordinator or to its successor: messages of the last connection may be lost."""


Event = PoolSizeSet | RanksAdopted | Started | AgentReady | Ended | Reconnected


# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpectRanks:
    """Order to send the coordinator the ranks of the world."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpawnRanks:
    """Order to start these ranks, in a pool of ``size``."""

    ranks: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class AwaitLeaving:
    """Order to see that this rank leaves: by :class:`ExpectRanks` the coordinator orders it to."""

    rank: int


@dataclass(frozen=True, slots=True)
class LeaveAtCommit:
    """Order to send the coordinator the ranks that leave at the next commit of the elastic training.

    An :class:`ExpectRanks` has them until they have left: one without them would send them away at once, in the middle of a step.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resized:
    """Order to send these ranks, which stay, the pool's new ``size``."""

    ranks: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class AskReady:
    """Order to ask these ranks to report again that they take mail."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReportRankLost:
    """Report that a rank that was ready is lost."""

    rank: int
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReportRankLeft:
    """Report that a rank that was to leave has left.

    Attributes:
        rank, pid: The rank and its process.
        died: The reason of its end, if it was to leave at a commit and died before: its work since its last commit is lost.
    """

    rank: int
    pid: int
    died: str = ""


Effect = (
    ExpectRanks
    | LeaveAtCommit
    | SpawnRanks
    | AwaitLeaving
    | Resized
    | AskReady
    | ReportRankLost
    | ReportRankLeft
)


class RankStates:
    """State of all ranks that belong to a pool's size or are still alive, as ``handle(event) -> [effect]``."""

    def __init__(self) -> None:
        # Rank to its record; also ranks that leave, until their processes have ended.
        self._members: dict[int, RankRecord] = {}
        # The pool's ranks as last set, ascending.
        self._wanted: tuple[int, ...] = ()
        # Ranks that belong to the pool again while the process of that number is still leaving: they start after its end.
        self._again: set[int] = set()

    # -- queries --------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> tuple[int, ...]:
        """Return the ranks that the pool was set to consist of, ascending."""
        return self._wanted

    def get(self, rank: int) -> RankRecord | None:
        """Return the record of a rank that belongs to the pool, or is still alive; None for any other."""
        return self._members.get(rank)

    def losses(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return those of these ranks that have ended or do not belong to the pool, with the reasons."""
        found = {}
        for rank in ranks:
            record = self._members.get(rank)
            if record is None:
                found[rank] = "it left the pool"
            elif record.reason:
                found[rank] = record.reason
        return found

    def in_state(self, *states: RankPhase) -> tuple[int, ...]:
        """Return the pool's ranks in one of these phases."""
        return tuple([rank for rank in self._wanted if self._members[rank].state in states])

    @property
    def ready(self) -> tuple[int, ...]:
        """Return the pool's ranks that take cells."""
        return self.in_state(RankPhase.READY)

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the pool's ranks that have ended."""
        return self.in_state(RankPhase.LOST)

    @property
    def let_go(self) -> tuple[int, ...]:
        """Return the ranks that leave at the next commit and have not left yet."""
        return tuple(sorted(member.rank for member in self._members.values() if member.at_commit))

    def living(self) -> dict[int, int]:
        """Return rank to process id of every rank that has a process, leaving ones included."""
        return {m.rank: m.pid for m in self._members.values() if m.pid and m.state is not RankPhase.LOST}

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; returns the effects that the pool must carry out, in order."""
        match event:
            case PoolSizeSet():
                return self._want(event)
            case RanksAdopted():
                return self._found(event)
            case Started(rank, pid):
                member = self._members.get(rank)
                # A rank that is lost has no process, also if the report of its start comes late.
                if member is not None and member.state is not RankPhase.LOST:
                    member.pid = pid
                return []
            case AgentReady(rank):
                member = self._members.get(rank)
                # Comes twice if the rank was asked once more, after a reconnection.
                if member is not None and member.state is RankPhase.STARTING:
                    member.state = RankPhase.READY
                return []
            case Ended():
                return self._ended(event)
            case Reconnected():
                starting = self.in_state(RankPhase.STARTING)
                again: list[Effect] = [Resized(self.ready, len(self._wanted))]
                return self._world() + again + ([AskReady(starting)] if starting else [])

    def _found(self, event: RanksAdopted) -> list[Effect]:
        self._wanted = tuple(sorted(event.ranks))
        self._members = {rank: RankRecord(rank, event.pids.get(rank, 0)) for rank in self._wanted}
        for rank in event.let_go:
            if pid := event.pids.get(rank, 0):
                self._members[rank] = RankRecord(rank, pid, RankPhase.LEAVING, at_commit=True)
        return []

    def _world(self) -> list[Effect]:
        """Return the effects that send the coordinator the ranks of the world, and those of them that leave."""
        going = self.let_go
        expected = tuple(sorted({*self._wanted, *going}))
        # A rank that has come to its commit already is no part of the world any more: LeaveAtCommit takes it out of it again.
        return [ExpectRanks(expected), LeaveAtCommit(going)] if going else [ExpectRanks(expected)]

    def _want(self, event: PoolSizeSet) -> list[Effect]:
        before, self._wanted = self._wanted, tuple(sorted(set(event.ranks)))
        starting: list[int] = []
        left = tuple(rank for rank in before if rank not in self._wanted)
        effects: list[Effect] = []
        for rank in self._wanted:
            member = self._members.get(rank)
            if member is None or (member.state is RankPhase.LOST and event.replace_lost):
                self._members[rank] = RankRecord(rank)
                starting.append(rank)
            elif member.state is RankPhase.LEAVING:
                self._again.add(rank)
        for rank in set(self._members) - set(self._wanted):
            effects += self._drop(self._members[rank], at_commit=event.at_commit)
        # The coordinator's list of ranks goes in front: it expects a new rank before that is started.
        if not event.at_commit:
            effects = self._world() + effects
        elif left:
            effects.insert(0, LeaveAtCommit(left))
        size = len(self._wanted)
        staying = self.ready
        if staying and size != len(before):
            effects.append(Resized(staying, size))
        if starting:
            effects.append(SpawnRanks(tuple(starting), size))
        return effects

    def _drop(self, member: RankRecord, *, at_commit: bool) -> list[Effect]:
        self._again.discard(member.rank)
        if member.state is RankPhase.LOST:
            del self._members[member.rank]
            return []
        if member.state is RankPhase.LEAVING:
            return []
        member.state, member.at_commit = RankPhase.LEAVING, at_commit
        return [AwaitLeaving(member.rank)]

    def _ended(self, event: Ended) -> list[Effect]:
        member = self._members.get(event.rank)
        # The end of an earlier process with this number is no end of the one that has it now.
        if member is None or (event.pid and member.pid not in (0, event.pid)):
            return []
        if member.state is RankPhase.LEAVING:
            orderly = event.reason == IN_ORDER or not member.at_commit
            return self._gone(member, ReportRankLeft(member.rank, event.pid, "" if orderly else event.reason))
        if member.state is RankPhase.LOST:
            if not member.pid and event.pid:  # it was found missing, and only now its end is reported
                member.reason, member.tail = event.reason, event.tail
            return []
        was_ready = member.state is RankPhase.READY
        member.state, member.reason = RankPhase.LOST, event.reason
        member.tail, member.detail = event.tail, event.detail
        return [ReportRankLost(event.rank, event.pid, event.reason)] if was_ready else []

    def _gone(self, member: RankRecord, gone: ReportRankLeft) -> list[Effect]:
        """Handle the departure of a rank that was to leave."""
        del self._members[member.rank]
        again = member.rank in self._again
        if again:
            self._again.discard(member.rank)
            self._members[member.rank] = RankRecord(member.rank)
        # The coordinator has taken it out of the world, our client has not: without this a successor would wait for the rank.
        world = self._world() if member.at_commit else []
        started: list[Effect] = [SpawnRanks((member.rank,), len(self._wanted))] if again else []
        return [gone, *world, *started]
