"""Ranks of a simulated job, without processes: the current and the past operations of each."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hvdlab.collectives.engine.entries import Entry, RunBatch
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.member_lists import KnownMembers

if TYPE_CHECKING:
    from support.simulation.joint_boards import AtBoard


class SimEntry(Entry):
    """Entry that remembers how it ended.

    Attributes:
        number: Its submission.
        outcome: How it ended; ``None`` until then.
        ends: Called with the outcome.
    """

    __slots__ = ("ends", "number", "outcome")

    def __init__(self, request: Request, site: str, number: int = 0) -> None:
        Entry.__init__(self, request, site, 0)
        self.number = number
        self.outcome: object = None
        self.ends: Callable[[object], None] = lambda outcome: None

    def complete(self, outcome: object) -> None:
        assert self.outcome is None, f"{self.name} ended twice: {self.outcome!r}, {outcome!r}"
        self.outcome = outcome
        self.ends(outcome)


class SimHandle(SimEntry):
    """Entry in place of another one that could not end at the board; it ends that as well."""

    __slots__ = ("_replaced",)

    def __init__(self, replaced: SimEntry) -> None:
        SimEntry.__init__(self, replaced.request, replaced.site, replaced.number)
        self.outcome = replaced.outcome
        self._replaced = replaced

    def complete(self, outcome: object) -> None:
        SimEntry.complete(self, outcome)
        self._replaced.complete(outcome)


Scope = tuple[int, int]  # process set, generation
Operation = tuple[int, int, int, int]  # process set, generation, sequence, batch


@dataclass(eq=False)
class SimRank:
    """One rank's process: its state, its connection's queues, its executor.

    Attributes:
        pid: Which process it is; no other has it.
        peer: Its connection.
        incarnation: Of the coordinator that it is, or was, connected to.
        alive: Whether it is part of the job, as far as it knows.
        open: Whether the coordinator listens to its connection.
        ending: Whether its connection has ended at its side (it died, or left), so that no more bytes come.
        lost: Whether it looks for a successor of its coordinator.
        early: Whether the coordinator has ordered it to connect again later.
        cut: Whether its network has failed. away: Whether it is not back yet.
        killed, told_to_leave: Events that ended it.
        blocked: The wait of its user.
        at_board: Its user's thread, where that waits at a board.
        members_told, members_known: Which descriptions of members its connection has been sent, and which it has got.
        world: Ranks that live, by the messages that it has received.
        cells: Those that run here. known_cells: Those that ever did.
        members: Process ids of the members of each generation.
        aborted, broken: Generations whose plane was ended, or has failed here.
        order: The operations executed in each generation.
        operations: How many of these met others on the plane.
        hears: Called with each message of the coordinator's, once the state has it.
    """

    rank: int
    pid: int
    state: RankState
    peer: int = 0
    incarnation: int = -1
    alive: bool = True
    open: bool = True
    ending: bool = False
    lost: bool = False
    early: bool = False
    cut: bool = False
    away: bool = False
    killed: bool = False
    told_to_leave: bool = False
    blocked: SimEntry | None = None
    at_board: AtBoard | None = None
    members_told: int = 0
    members_known: KnownMembers = field(default_factory=KnownMembers)
    world: tuple[int, ...] = ()
    to_coordinator: deque[m.Message] = field(default_factory=deque)
    from_coordinator: deque[m.Message | None] = field(default_factory=deque)
    jobs: deque[RunBatch] = field(default_factory=deque)
    cells: dict[str, None] = field(default_factory=dict)
    known_cells: set[str] = field(default_factory=set)
    members: dict[Scope, tuple[int, ...]] = field(default_factory=dict)
    aborted: set[Scope] = field(default_factory=set)
    broken: set[Scope] = field(default_factory=set)
    entries: list[SimEntry] = field(default_factory=list)
    done: set[Operation] = field(default_factory=set)
    order: dict[Scope, list[tuple[str, ...]]] = field(default_factory=dict)
    operations: Counter[Scope] = field(default_factory=Counter)
    hears: Callable[[m.Message], None] | None = None

    @classmethod
    def nobody(cls, rank: int) -> SimRank:
        """Stands for a number that no process has had yet."""
        return cls(rank, 0, RankState(rank), alive=False, open=False, ending=True)

    @property
    def keeps_lane(self) -> bool:
        """Whether its user's thread waits at a board for others with which it is to meet on the plane."""
        return self.at_board is not None and self.at_board.keeps_lane
