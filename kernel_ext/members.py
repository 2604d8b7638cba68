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


class MemberState(StrEnum):
    """Which part of its life a rank is in."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    LOST = "lost"


@dataclass(slots=True)
class Member:
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
    state: MemberState = MemberState.STARTING
    at_commit: bool = False
    reason: str = ""
    tail: str = ""
    detail: str = ""


# -- what happens -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """The caller wants the pool to consist of these ranks; with ``replace_lost`` lost ones among them are started again.

    With ``at_commit`` the pool only shrinks: ranks that are not wanted any more leave at the next commit of the elastic training.
    """

    ranks: tuple[int, ...]
    replace_lost: bool = False
    at_commit: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The pool is made of these ranks, which another process has started; ``pids`` has those that live.

    That process has let the ranks ``let_go`` go, which are not among the others; they have not come to a commit yet.
    """

    ranks: tuple[int, ...]
    pids: Mapping[int, int]
    let_go: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """The rank's agent has said that it takes mail."""

    rank: int


@dataclass(frozen=True, slots=True)
class Reconnected:
    """There is another connection to the coordinator or to its successor: what was sent over the last one may be lost."""


Event = Wanted | Found | Started | Answered | Ended | Reconnected


# -- what to do -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expect:
    """Tell the coordinator which ranks the world is made of."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Start these ranks, in a pool of ``size``."""

    ranks: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Leave:
    """:class:`Expect` has the coordinator tell this rank to leave; see that it does."""

    rank: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """Tell the coordinator that these ranks leave at the next commit of the elastic training.

    An :class:`Expect` has them until they have left: one without them would send them away at once, in the middle of a step.
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
class Died:
    """A rank that was ready is lost."""

    rank: int
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank that was to leave has left.

    ``died`` says how, if it was to leave at a commit and did not come to that in order: what it did since its last commit is lost.
    """

    rank: int
    pid: int
    died: str = ""


Effect = Expect | LetGo | Start | Leave | Resized | AskReady | Died | Gone


class Members:
    """All ranks of a pool that are wanted or still alive."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._wanted: tuple[int, ...] = ()
        # Ranks that are wanted again while the process of that number is still leaving.
        self._again: set[int] = set()

    # -- queries --------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> tuple[int, ...]:
        """The ranks that the pool shall consist of, ascending."""
        return self._wanted

    def get(self, rank: int) -> Member | None:
        """A rank that is wanted or still alive."""
        return self._members.get(rank)

    def in_state(self, *states: MemberState) -> tuple[int, ...]:
        """The wanted ranks in one of these states."""
        return tuple(rank for rank in self._wanted if self._members[rank].state in states)

    @property
    def ready(self) -> tuple[int, ...]:
        """The wanted ranks that take cells."""
        return self.in_state(MemberState.READY)

    @property
    def lost(self) -> tuple[int, ...]:
        """The wanted ranks that have ended."""
        return self.in_state(MemberState.LOST)

    @property
    def let_go(self) -> tuple[int, ...]:
        """Ranks that leave at the next commit and have not left yet."""
        return tuple(sorted(member.rank for member in self._members.values() if member.at_commit))

    def living(self) -> dict[int, int]:
        """Rank to process id of every rank that has a process, leaving ones included."""
        return {m.rank: m.pid for m in self._members.values() if m.pid and m.state is not MemberState.LOST}

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; returns the effects that the pool must carry out, in order."""
        match event:
            case Wanted():
                return self._want(event)
            case Found():
                return self._found(event)
            case Started(rank, pid):
                member = self._members.get(rank)
                if member is not None and member.state is not MemberState.LOST:
                    member.pid = pid
                return []
            case Answered(rank):
                member = self._members.get(rank)
                if member is not None and member.state is MemberState.STARTING:
                    member.state = MemberState.READY
                return []
            case Ended():
                return self._ended(event)
            case Reconnected():
                starting = self.in_state(MemberState.STARTING)
                again: list[Effect] = [Resized(self.ready, len(self._wanted))]
                return self._world() + again + ([AskReady(starting)] if starting else [])

    def _found(self, event: Found) -> list[Effect]:
        self._wanted = tuple(sorted(event.ranks))
        self._members = {rank: Member(rank, event.pids.get(rank, 0)) for rank in self._wanted}
        for rank in event.let_go:
            if pid := event.pids.get(rank, 0):
                self._members[rank] = Member(rank, pid, MemberState.LEAVING, at_commit=True)
        return []

    def _world(self) -> list[Effect]:
        """Tell the coordinator which ranks the world is made of, and which of them leave."""
        going = self.let_go
        expected = tuple(sorted({*self._wanted, *going}))
        # A rank that has come to its commit already is no part of the world any more: LetGo takes it out of it again.
        return [Expect(expected), LetGo(going)] if going else [Expect(expected)]

    def _want(self, event: Wanted) -> list[Effect]:
        before, self._wanted = self._wanted, tuple(sorted(set(event.ranks)))
        starting: list[int] = []
        left = tuple(rank for rank in before if rank not in self._wanted)
        effects: list[Effect] = []
        for rank in self._wanted:
            member = self._members.get(rank)
            if member is None or (member.state is MemberState.LOST and event.replace_lost):
                self._members[rank] = Member(rank)
                starting.append(rank)
            elif member.state is MemberState.LEAVING:
                self._again.add(rank)
        for rank in set(self._members) - set(self._wanted):
            effects += self._drop(self._members[rank], at_commit=event.at_commit)
        if not event.at_commit:
            effects = self._world() + effects
        elif left:
            effects.insert(0, LetGo(left))
        size = len(self._wanted)
        staying = self.ready
        if staying and size != len(before):
            effects.append(Resized(staying, size))
        if starting:
            effects.append(Start(tuple(starting), size))
        return effects

    def _drop(self, member: Member, *, at_commit: bool) -> list[Effect]:
        self._again.discard(member.rank)
        if member.state is MemberState.LOST:
            del self._members[member.rank]
            return []
        if member.state is MemberState.LEAVING:
            return []
        member.state, member.at_commit = MemberState.LEAVING, at_commit
        return [Leave(member.rank)]

    def _ended(self, event: Ended) -> list[Effect]:
        member = self._members.get(event.rank)
        if member is None or (event.pid and member.pid not in (0, event.pid)):
            return []
        if member.state is MemberState.LEAVING:
            orderly = event.reason == IN_ORDER or not member.at_commit
            return self._gone(member, Gone(member.rank, event.pid, "" if orderly else event.reason))
        if member.state is MemberState.LOST:
            if not member.pid and event.pid:  # it was found missing, and only now its end is reported
                member.reason, member.tail = event.reason, event.tail
            return []
        was_ready = member.state is MemberState.READY
        member.state, member.reason = MemberState.LOST, event.reason
        member.tail, member.detail = event.tail, event.detail
        return [Died(event.rank, event.pid, event.reason)] if was_ready else []

    def _gone(self, member: Member, gone: Gone) -> list[Effect]:
        """A rank that was to leave has left."""
        del self._members[member.rank]
        again = member.rank in self._again
        if again:
            self._again.discard(member.rank)
            self._members[member.rank] = Member(member.rank)
        # The coordinator has taken it out of the world. Its client has not: a successor would wait for it.
        world = self._world() if member.at_commit else []
        started: list[Effect] = [Start((member.rank,), len(self._wanted))] if again else []
        return [gone, *world, *started]
