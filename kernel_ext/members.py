"""The ranks of a pool, from the order to start one to its end: a state machine without I/O.

A rank is wanted or not, and *starting*, *ready*, *leaving* or *lost*. Ranks that stay are never touched by a change
of the others. A lost rank keeps its number until it is replaced (*repair*) or no longer wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hvdlab.launch.starter import Ended, Started


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
        reason: Why it is lost; empty if it is not.
        tail: The last lines of its standard error, if it is lost.
        detail: What else the starter reported of its end, such as its peak memory.
    """

    rank: int
    pid: int = 0
    state: MemberState = MemberState.STARTING
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
    """The pool is made of these ranks, which another process has started; ``pids`` has those that live."""

    ranks: tuple[int, ...]
    pids: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Answered:
    """The rank's agent has said that it takes mail."""

    rank: int


Event = Wanted | Found | Started | Answered | Ended


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
    """Tell the coordinator that these ranks leave at the next commit of the elastic training."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resized:
    """Tell these ranks, which stay, that the pool has ``size`` ranks now."""

    ranks: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Died:
    """A rank that was ready is lost."""

    rank: int
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank that was to leave has left."""

    rank: int


Effect = Expect | LetGo | Start | Leave | Resized | Died | Gone


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

    def living(self) -> dict[int, int]:
        """Rank to process id of every rank that has a process, leaving ones included."""
        return {m.rank: m.pid for m in self._members.values() if m.pid and m.state is not MemberState.LOST}

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; returns the effects that the pool must carry out, in order."""
        match event:
            case Wanted():
                return self._want(event)
            case Found(ranks, pids):
                self._wanted = tuple(sorted(ranks))
                self._members = {rank: Member(rank, pids.get(rank, 0)) for rank in self._wanted}
                return []
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

    def _want(self, event: Wanted) -> list[Effect]:
        before, self._wanted = self._wanted, tuple(sorted(set(event.ranks)))
        starting: list[int] = []
        left = tuple(rank for rank in before if rank not in self._wanted)
        effects: list[Effect] = [LetGo(left) if event.at_commit else Expect(self._wanted)]
        for rank in self._wanted:
            member = self._members.get(rank)
            if member is None or (member.state is MemberState.LOST and event.replace_lost):
                self._members[rank] = Member(rank)
                starting.append(rank)
            elif member.state is MemberState.LEAVING:
                self._again.add(rank)
        for rank in set(self._members) - set(self._wanted):
            effects += self._drop(self._members[rank])
        size = len(self._wanted)
        staying = self.ready
        if staying and size != len(before):
            effects.append(Resized(staying, size))
        if starting:
            effects.append(Start(tuple(starting), size))
        return effects

    def _drop(self, member: Member) -> list[Effect]:
        self._again.discard(member.rank)
        if member.state is MemberState.LOST:
            del self._members[member.rank]
            return []
        if member.state is MemberState.LEAVING:
            return []
        member.state = MemberState.LEAVING
        return [Leave(member.rank)]

    def _ended(self, event: Ended) -> list[Effect]:
        member = self._members.get(event.rank)
        if member is None or (event.pid and member.pid not in (0, event.pid)):
            return []
        if member.state is MemberState.LEAVING:
            return self._gone(member)
        if member.state is MemberState.LOST:
            if not member.pid and event.pid:  # it was found missing, and only now its end is reported
                member.reason, member.tail = event.reason, event.tail
            return []
        was_ready = member.state is MemberState.READY
        member.state, member.reason = MemberState.LOST, event.reason
        member.tail, member.detail = event.tail, event.detail
        return [Died(event.rank, event.pid, event.reason)] if was_ready else []

    def _gone(self, member: Member) -> list[Effect]:
        """A rank that was to leave has left."""
        del self._members[member.rank]
        if member.rank not in self._again:
            return [Gone(member.rank)]
        self._again.discard(member.rank)
        self._members[member.rank] = Member(member.rank)
        return [Gone(member.rank), Start((member.rank,), len(self._wanted))]
