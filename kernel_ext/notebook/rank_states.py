"""The ranks of a pool, from the order to start one to its end: a state machine without I/O.

A rank is wanted or not, and *starting*, *ready*, *leaving* or *lost*. Ranks that stay are never touched by a change
of the others. A lost rank keeps its number until it is replaced (*repair*) or no longer wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hvdlab.launch.processes import describe_exit
from hvdlab.launch.starter import Ended, Started

IN_ORDER = describe_exit(0, 0)
"""How the process of a rank ends that has left in obedience to the coordinator's order."""


class RankPhase(StrEnum):
    """Which part of its life a rank is in."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    LOST = "lost"


@dataclass(slots=True)
class RankRecord:
    """One rank.

    Attributes:
        rank: Its number.
        pid: Its process, or 0 as long as it has none.
        state: Which part of its life it is in.
        at_commit: Whether it leaves at the next commit of the elastic training, and is a rank of the world until then.
        reason: Why it is lost; empty if it is not.
        tail: The last lines of its standard error, if it is lost.
        detail: What else the starter reported of its end, such as its peak memory.
    """

    rank: int
    pid: int = 0
    state: RankPhase = RankPhase.STARTING
    at_commit: bool = False
    reason: str = ""
    tail: str = ""
    detail: str = ""


# -- what happens -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolSizeSet:
    """The caller wants the pool to consist of these ranks; with ``replace_lost`` lost ones among them are started again.

    With ``at_commit`` the pool only shrinks: ranks that are not wanted any more leave at the next commit of the elastic training.
    """

    ranks: tuple[int, ...]
    replace_lost: bool = False
    at_commit: bool = False


@dataclass(frozen=True, slots=True)
class RanksAdopted:
    """The pool is made of these ranks, which another process has started; ``pids`` has those that live.

    That process has let the ranks ``let_go`` go, which are not among the others; they have not come to a commit yet.
    """

    ranks: tuple[int, ...]
    pids: Mapping[int, int]
    let_go: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentReady:
    """The rank's agent has said that it takes mail."""

    rank: int


@dataclass(frozen=True, slots=True)
class Reconnected:
    """There is another connection to the coordinator or to its successor: what was sent over the last one may be lost."""


Event = PoolSizeSet | RanksAdopted | Started | AgentReady | Ended | Reconnected


# -- what to do -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpectRanks:
    """Tell the coordinator which ranks the world is made of."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpawnRanks:
    """Start these ranks, in a pool of ``size``."""

    ranks: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class AwaitLeaving:
    """:class:`ExpectRanks` has the coordinator tell this rank to leave; see that it does."""

    rank: int


@dataclass(frozen=True, slots=True)
class LeaveAtCommit:
    """Tell the coordinator that these ranks leave at the next commit of the elastic training.

    An :class:`ExpectRanks` has them until they have left: one without them would send them away at once, in the middle of a step.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resized:
    """Tell these ranks, which stay, that the pool has ``size`` ranks now."""

    ranks: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class AskReady:
    """Ask these ranks to say again that they take mail."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReportRankLost:
    """A rank that was ready is lost."""

    rank: int
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReportRankLeft:
    """A rank that was to leave has left.

    ``died`` says how, if it was to leave at a commit and did not come to that in order: what it did since its last commit is lost.
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
    """All ranks of a pool that are wanted or still alive."""

    def __init__(self) -> None:
        self._members: dict[int, RankRecord] = {}
        self._wanted: tuple[int, ...] = ()
        # Ranks that are wanted again while the process of that number is still leaving.
        self._again: set[int] = set()

    # -- queries --------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> tuple[int, ...]:
        """The ranks that the pool shall consist of, ascending."""
        return self._wanted

    def get(self, rank: int) -> RankRecord | None:
        """Return a rank that is wanted or still alive."""
        return self._members.get(rank)

    def in_state(self, *states: RankPhase) -> tuple[int, ...]:
        """Return the wanted ranks in one of these states."""
        return tuple(rank for rank in self._wanted if self._members[rank].state in states)

    @property
    def ready(self) -> tuple[int, ...]:
        """The wanted ranks that take cells."""
        return self.in_state(RankPhase.READY)

    @property
    def lost(self) -> tuple[int, ...]:
        """The wanted ranks that have ended."""
        return self.in_state(RankPhase.LOST)

    @property
    def let_go(self) -> tuple[int, ...]:
        """Ranks that leave at the next commit and have not left yet."""
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
                if member is not None and member.state is not RankPhase.LOST:
                    member.pid = pid
                return []
            case AgentReady(rank):
                member = self._members.get(rank)
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
        """Tell the coordinator which ranks the world is made of, and which of them leave."""
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
        # The coordinator has taken it out of the world. Its client has not: a successor would wait for it.
        world = self._world() if member.at_commit else []
        started: list[Effect] = [SpawnRanks((member.rank,), len(self._wanted))] if again else []
        return [gone, *world, *started]
