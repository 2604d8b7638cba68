"""Ranks' states and the coordinator's, joined by queues that deliver in any interleaving. No process, no clock."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from hvdlab.collectives.coordinator.events import (
    CloseConnection,
    PeerConnected,
    PeerLost,
    Received,
    Send,
    SendConfigure,
    Tick,
)
from hvdlab.collectives.coordinator.state import CoordinatorOptions, CoordinatorState
from hvdlab.collectives.dtypes import DType, OpKind, ReduceOp
from hvdlab.collectives.engine.effects import AbortPlane, Fail, NewEpoch, RunBatch, Succeed
from hvdlab.collectives.engine.entry import Entry
from hvdlab.collectives.engine.request import Request
from hvdlab.collectives.engine.state import RankState
from hvdlab.collectives.errors import CauseKind, HvdlabError
from hvdlab.collectives.protocol import messages as m


class SimEntry(Entry):
    """An entry that remembers how it ended."""

    __slots__ = ("outcome",)

    def __init__(self, request: Request, site: str) -> None:
        Entry.__init__(self, request, site, 0)
        self.outcome: object = None

    def complete(self, outcome: object) -> None:
        assert self.outcome is None, "ended twice"
        self.outcome = outcome


Operation = tuple[int, int, int, int]  # process set, epoch, sequence, batch


@dataclass
class SimRank:
    """One rank: its state, its queues, its executor."""

    rank: int
    state: RankState
    peer: int
    alive: bool = True
    to_coordinator: deque[m.Message] = field(default_factory=deque)
    from_coordinator: deque[m.Message] = field(default_factory=deque)
    jobs: deque[RunBatch] = field(default_factory=deque)
    members: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    aborted: set[tuple[int, int]] = field(default_factory=set)
    entries: list[SimEntry] = field(default_factory=list)
    done: set[Operation] = field(default_factory=set)
    order: dict[tuple[int, int], list[tuple[str, ...]]] = field(default_factory=dict)


class Simulation:
    """N ranks and a coordinator. Planes are a meeting: an operation ends when all its members have come to it."""

    def __init__(self, size: int, seed: int, *, local_limit: int = 4096, tracked: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.coordinator = CoordinatorState(CoordinatorOptions(size=size))
        self.ranks: list[SimRank] = []
        for rank in range(size):
            self.ranks.append(SimRank(rank, RankState(rank, local_limit), peer=100 + rank))
            hello = m.Hello(m.PROTOCOL_VERSION, "", "rank", rank, "host", 1000 + rank, planes=("shm",))
            self._carry_out(self.coordinator.handle(PeerConnected(100 + rank, hello), self.now))
        self.run()

    # -- what users do --------------------------------------------------------------------------------------------

    def submit(self, rank: int, request: Request, site: str = "") -> SimEntry | HvdlabError:
        me = self.ranks[rank]
        entry = SimEntry(request, site or f"rank.py:{rank}")
        try:
            me.state.submit(entry)
        except HvdlabError as error:
            self._flush(me)
            return error
        me.entries.append(entry)
        if self.random.random() < 0.5:
            self._flush(me)
        return entry

    def withdraw(self, rank: int, process_set: int = 0) -> None:
        me = self.ranks[rank]
        me.state.withdraw(process_set, CauseKind.INTERRUPTED, f"rank {rank} was interrupted")
        self._flush(me)

    def tear(self, rank: int) -> None:
        """An interrupt in the middle of a submission."""
        me = self.ranks[rank]
        me.state.mend(f"rank {rank} was interrupted")
        self._flush(me)

    def kill(self, rank: int) -> None:
        me = self.ranks[rank]
        me.alive = False
        me.from_coordinator.clear()
        # What it had written before may or may not be read.
        for _ in range(self.random.randint(0, len(me.to_coordinator))):
            me.to_coordinator.pop()
        me.jobs.clear()

    # -- the world's steps ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One random thing that can happen; false if nothing can."""
        choices = []
        for me in self.ranks:
            if me.alive and me.state.has_messages:
                choices.append((self._flush, me))
            if me.to_coordinator or (not me.alive and me.peer in self.coordinator.by_peer):
                choices.append((self._to_coordinator, me))
            if me.alive and me.from_coordinator:
                choices.append((self._from_coordinator, me))
            if me.alive and me.jobs and self._can_run(me):
                choices.append((self._run_job, me))
        if choices:
            action, me = self.random.choice(choices)
            action(me)
            return True
        deadline = self.coordinator.next_deadline()
        if deadline is not None and deadline < self.now + 5:
            self.now = max(self.now, deadline)
            self._carry_out(self.coordinator.handle(Tick(), self.now))
            return True
        return False

    def run(self, limit: int = 200_000) -> None:
        """Let happen what can, until nothing can any more."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("it does not come to rest")

    def _flush(self, me: SimRank) -> None:
        me.to_coordinator.extend(me.state.take_messages())

    def _to_coordinator(self, me: SimRank) -> None:
        events: list[object] = []
        for _ in range(self.random.randint(1, 3)):
            if me.to_coordinator:
                events.append(Received(me.peer, me.to_coordinator.popleft()))  # type: ignore[arg-type]
        if not me.alive and not me.to_coordinator:
            events.append(PeerLost(me.peer, "connection closed"))
        self._carry_out(self.coordinator.handle_all(events, self.now))  # type: ignore[arg-type]
        self.coordinator.validate_state()

    def _carry_out(self, effects: object) -> None:
        for effect in effects:  # type: ignore[attr-defined]
            if isinstance(effect, Send | SendConfigure):
                for peer in effect.peers:
                    me = self.ranks[peer - 100]
                    if me.alive:
                        me.from_coordinator.append(effect.message)
            elif isinstance(effect, CloseConnection):
                raise AssertionError(f"the coordinator throws {effect.peer} out: {self.coordinator.outbox}")  # noqa: TRY004  # no type error: it may not happen

    def _from_coordinator(self, me: SimRank) -> None:
        message = me.from_coordinator.popleft()
        for effect in me.state.handle(message, 0):
            match effect:
                case RunBatch():
                    me.jobs.append(effect)
                case Fail(entry, error):
                    if isinstance(entry, SimEntry):
                        entry.complete(error)
                case Succeed(entry, process_set):
                    entry.complete(("set", process_set))  # type: ignore[attr-defined]
                case AbortPlane(process_set, epoch):
                    me.aborted.update(s for s in me.members if s[0] == process_set and s[1] <= epoch)
                case NewEpoch():
                    me.members[effect.process_set, effect.epoch] = tuple(x.rank for x in effect.members)
        me.state.validate()

    # -- planes ---------------------------------------------------------------------------------------------------

    def _can_run(self, me: SimRank) -> bool:
        here = _operation(me.jobs[0])
        if here[:2] in me.aborted:
            return True
        others = [self.ranks[rank] for rank in me.members[here[:2]]]
        return all(here in o.done or (o.alive and o.jobs and _operation(o.jobs[0]) == here) for o in others)

    def _run_job(self, me: SimRank) -> None:
        job = me.jobs.popleft()
        here = _operation(job)
        if here[:2] in me.aborted:
            return
        me.done.add(here)
        names = tuple(f"{e.request.kind.label} {e.name}" for e in job.entries)
        me.order.setdefault(here[:2], []).append(names)
        for entry in job.entries:
            if me.state.finish(entry) and isinstance(entry, SimEntry):
                entry.complete(("done", *here, names))

    # -- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every handle of a living rank has ended, and all members saw one order of operations."""
        for me in self.ranks:
            if me.alive:
                me.state.validate()
                for entry in me.entries:
                    assert entry.outcome is not None, (me.rank, entry.name, entry.phase)
        scopes = {scope for me in self.ranks for scope in me.order}
        for scope in scopes:
            orders = [me.order.get(scope, []) for me in self.ranks if scope in me.members]
            longest = max(orders, key=len)
            for order in orders:
                assert order == longest[: len(order)], scope


def allreduce(name: str | None, shape: tuple[int, ...] = (4,), **changes: object) -> Request:
    """A request like those that bindings make."""
    request = Request(OpKind.ALLREDUCE, name, np.zeros(shape, np.float32), dtype=DType.F32, op=ReduceOp.SUM)
    for key, value in changes.items():
        setattr(request, key, value)
    return request


def _operation(job: RunBatch) -> Operation:
    return (job.process_set, job.epoch, job.sequence, job.batch)
