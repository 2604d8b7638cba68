"""A coordinator's state with simulated ranks, for tests without processes, sockets or clocks.

Messages travel in queues, one per direction and rank, so that a test decides which message overtakes which. Each
simulated rank keeps the rules of the protocol and checks that the coordinator does: each submission ends exactly once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvdlab.collectives.coordinator.events import (
    CloseConnection,
    Event,
    Log,
    PeerConnected,
    PeerLost,
    Received,
    Send,
    SendConfigure,
    Tick,
)
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.state import CoordinatorState
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import DType, OpKind, ReduceOp

CLIENT = 1_000_000  # number of the client's connection, above every rank's


def signature(
    name: str,
    kind: OpKind = OpKind.ALLREDUCE,
    *,
    shape: tuple[int, ...] = (4,),
    dtype: DType = DType.F32,
    op: ReduceOp = ReduceOp.SUM,
    root: int = -1,
    group: str = "",
    group_size: int = 0,
    ranks: tuple[int, ...] = (),
) -> m.Signature:
    return m.Signature(
        int(kind), name, int(dtype), int(op), shape, root, group=group, group_size=group_size, ranks=ranks
    )


def hello(rank: int, *, tracked: bool = False, pid: int | None = None, **fields: Any) -> m.Hello:
    given: dict[str, Any] = {"host": "host", "planes": ("shm", "gloo")} | fields
    return m.Hello(
        m.PROTOCOL_VERSION,
        "",
        "rank",
        rank,
        pid=1000 + rank if pid is None else pid,
        cells_tracked=tracked,
        **given,
    )


@dataclass(eq=False)
class Submission:
    """Submission of a simulated user."""

    signature: m.Signature
    extra: tuple[int, ...] = ()
    local: int = -1
    generation: int = 0
    outcome: m.Message | None = None
    priority: int | None = None

    def end(self, message: m.Message) -> None:
        assert self.outcome is None, f"{self.signature.name} ends twice: {self.outcome}, {message}"
        self.outcome = message


class ExecutedBatch(NamedTuple):
    """Batch that a simulated rank has executed."""

    sequence: int
    signatures: tuple[m.Signature, ...]
    tables: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass
class SetView:
    """Process set as a simulated rank knows it."""

    generation: int
    ranks: tuple[int, ...]
    plane: str
    open: bool = True
    pending: list[Submission] = field(default_factory=list)


class SimulatedRank:
    """Model of a rank's side of the protocol."""

    def __init__(self, rank: int, peer: int, *, tracked: bool, by_seniority: bool = False) -> None:
        self.rank, self.peer, self.tracked, self.by_seniority = rank, peer, tracked, by_seniority
        self.outgoing: deque[m.Message] = deque()
        self.incoming: deque[m.Message] = deque()
        self.sets: dict[int, SetView] = {}
        self.submissions: list[Submission] = []
        self.received: list[m.Message] = []
        self.executed: dict[tuple[int, int], list[ExecutedBatch]] = defaultdict(list)
        self.cells: set[str] = set()
        self.left = False
        #: Reports of executed batches that the test sends itself; ``None``: each is sent at once.
        self.reports: list[m.Executed] | None = None
        self._locals: dict[tuple[m.Signature, int | None], int] = {}

    # -- the user -------------------------------------------------------------------------------------------------

    def submit(
        self,
        sig: m.Signature,
        process_set: int = 0,
        extra: tuple[int, ...] = (),
        priority: int | None = None,
    ) -> Submission:
        submission = Submission(sig, extra, priority=priority)
        self.submissions.append(submission)
        view = self.sets[process_set]
        view.pending.append(submission)
        if view.open:
            self._announce(process_set, [submission])
        return submission

    def in_flight(self, name: str, process_set: int = 0) -> bool:
        return any(s.signature.name == name for s in self.sets[process_set].pending)

    def say(self, message: m.Message) -> None:
        self.outgoing.append(message)

    def _announce(self, process_set: int, submissions: list[Submission]) -> None:
        definitions = []
        for s in submissions:
            known = s.signature, s.priority
            if known not in self._locals:
                self._locals[known] = len(self._locals) * 3 + self.rank % 2  # ids differ between some ranks
                site = f"line {self.rank}"
                definitions.append(m.Definition(self._locals[known], s.signature, site, s.priority))
            s.local = self._locals[known]
            s.generation = self.sets[process_set].generation
        extra = tuple(s.extra for s in submissions) if any(s.extra for s in submissions) else ()
        locals = tuple(s.local for s in submissions)
        self.say(
            m.Announce(process_set, self.sets[process_set].generation, locals, tuple(definitions), extra)
        )

    # -- the coordinator's messages -------------------------------------------------------------------------------

    def take(self, message: m.Message) -> None:
        self.received.append(message)
        if isinstance(message, m.Configure):
            self._configure(message)
        elif isinstance(message, m.Abort):
            self._abort(message)
        elif isinstance(message, m.Execute):
            self._execute(message)
        elif isinstance(message, m.Reject | m.RejectDuplicate | m.Decline | m.Cancelled):
            for local in message.locals if message.process_set in self.sets else ():
                self._pop(message.process_set, message.generation, local, message)
        elif isinstance(message, m.ProcessSetAdded):
            view = self.sets[0]
            self._pop(0, view.generation, message.local, message)
        elif isinstance(message, m.Dissolve):
            dissolved = self.sets.pop(message.process_set, None)
            for submission in dissolved.pending if dissolved is not None else ():
                submission.end(message)  # submitted after the abort that came before

    def _configure(self, message: m.Configure) -> None:
        view = self.sets.get(message.process_set)
        ranks = tuple(member.rank for member in message.members)
        assert self.rank in ranks
        assert self.by_seniority or ranks == tuple(sorted(ranks))
        if view is None:
            view = self.sets[message.process_set] = SetView(message.generation, ranks, message.plane)
        else:
            assert message.generation > view.generation, "generations must increase"
            view.generation, view.ranks, view.plane, view.open = (
                message.generation,
                ranks,
                message.plane,
                True,
            )
        if view.pending:
            self._announce(message.process_set, view.pending)

    def _abort(self, message: m.Abort) -> None:
        view = self.sets[message.process_set]
        if message.generation < view.generation:
            # It concerns operations still executed of a generation that was changed over from in order.
            assert not any(s.generation <= message.generation for s in view.pending)
            return
        assert message.generation == view.generation
        assert view.open
        view.open = False
        for submission in view.pending:
            if submission.generation == message.generation:
                submission.end(message)
        view.pending = [s for s in view.pending if s.outcome is None]

    def _execute(self, message: m.Execute) -> None:
        view = self.sets[message.process_set]
        assert message.generation == view.generation
        assert view.open
        for number, batch in enumerate(message.batches):
            if batch.reported and view.ranks[0] == self.rank:
                report = m.Executed(message.process_set, message.generation, message.sequence, number)
                (self.outgoing if self.reports is None else self.reports).append(report)
            names: list[m.Signature] = []
            for local in batch.locals:
                if local < 0:  # it has joined
                    assert any(s.signature.kind == OpKind.JOIN for s in view.pending) or batch.zeros
                    names.append(batch.zeros[-1 - local])
                else:
                    names.append(self._pop(message.process_set, message.generation, local, message).signature)
            assert not batch.tables or len(batch.tables) == len(batch.locals)
            done = ExecutedBatch(message.sequence, tuple(names), batch.tables)
            self.executed[message.process_set, message.generation].append(done)

    def _pop(self, process_set: int, generation: int, local: int, message: m.Message) -> Submission:
        view = self.sets[process_set]
        assert generation == view.generation
        for submission in view.pending:
            if submission.local == local and submission.generation == generation:
                view.pending.remove(submission)
                submission.end(message)
                return submission
        raise AssertionError(f"rank {self.rank}: nothing pending as {local} for {message}")


class Simulation:
    """Coordinator with its ranks and one client."""

    def __init__(self, options: CoordinatorOptions | None = None, *, validate: bool = True) -> None:
        self.state = CoordinatorState(options)
        self.validate = validate
        self.now = 100.0
        self.ranks: dict[int, SimulatedRank] = {}
        self.gone: list[SimulatedRank] = []
        self.to_client: list[m.Message] = []
        self.logged: list[str] = []
        self.frames = 0
        self._by_peer: dict[int, SimulatedRank] = {}
        self._next_peer = 1

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, *events: Event) -> None:
        """Handle one round."""
        effects = self.state.handle_all(events, self.now)
        if self.validate:
            self.state.validate_state()
        for effect in effects:
            if isinstance(effect, Send | SendConfigure):
                self.frames += len(effect.peers)
                for peer in effect.peers:
                    self._deliver(peer, effect.message)
            elif isinstance(effect, CloseConnection):
                self._closed(effect.peer)
            else:
                assert isinstance(effect, Log), "no simulation tunes"
                self.logged.append(effect.text)

    def _deliver(self, peer: int, message: m.Message) -> None:
        if peer == CLIENT:
            self.to_client.append(message)
        elif peer in self._by_peer:
            self._by_peer[peer].incoming.append(message)

    def _closed(self, peer: int) -> None:
        rank = self._by_peer.pop(peer, None)
        if rank is not None:
            self.gone.append(rank)
            if self.ranks.get(rank.rank) is rank:
                del self.ranks[rank.rank]

    def connect_client(self) -> None:
        self.handle(PeerConnected(CLIENT, m.Hello(m.PROTOCOL_VERSION, "", "client")))

    def connect(self, rank: int, *, tracked: bool = False, **fields: object) -> SimulatedRank:
        by_seniority = self.state.options.by_seniority
        newcomer = SimulatedRank(rank, self._next_peer, tracked=tracked, by_seniority=by_seniority)
        self._next_peer += 1
        self._by_peer[newcomer.peer] = newcomer
        self.ranks[rank] = newcomer
        given = {"pid": 1000 * newcomer.peer + rank} | fields
        self.handle(PeerConnected(newcomer.peer, hello(rank, tracked=tracked, **given)))  # type: ignore[arg-type]  # as above
        return newcomer

    def client_says(self, message: m.FromClient) -> None:
        self.handle(Received(CLIENT, message))

    def kill(self, rank: int, reason: str = "end of file") -> SimulatedRank:
        """End its connection; messages that it had sent are still read."""
        victim = self.ranks.pop(rank)
        self.gone.append(victim)
        while victim.outgoing and victim.peer in self._by_peer:
            self.deliver_from(victim)
        if self._by_peer.pop(victim.peer, None) is not None:
            self.handle(PeerLost(victim.peer, reason))
        return victim

    def leave(self, rank: int) -> None:
        self.ranks[rank].say(m.Bye())
        self.ranks[rank].left = True

    def tick(self, seconds: float) -> None:
        self.now += seconds
        due = self.state.next_deadline()
        if due is not None and self.now >= due:
            self.handle(Tick())

    # -- delivery -------------------------------------------------------------------------------------------------

    def deliver_from(self, rank: SimulatedRank) -> None:
        """Let the coordinator read one message of this rank."""
        self.handle(Received(rank.peer, rank.outgoing.popleft()))  # type: ignore[arg-type]  # ranks say FromRank

    def deliver_to(self, rank: SimulatedRank) -> None:
        """Let this rank read one message of the coordinator."""
        rank.take(rank.incoming.popleft())

    def drain(self) -> None:
        """Deliver everything there is."""
        busy = True
        while busy:
            busy = False
            for rank in list(self.ranks.values()):
                while rank.incoming:
                    self.deliver_to(rank)
                    busy = True
                while rank.outgoing and rank.peer in self._by_peer:
                    self.deliver_from(rank)
                    busy = True

    def world(self, *ranks: int, tracked: bool = False, **fields: object) -> list[SimulatedRank]:
        """Connect these ranks and let them know each other."""
        joined = [self.connect(rank, tracked=tracked, **fields) for rank in ranks]
        self.drain()
        return joined

    # -- checks ---------------------------------------------------------------------------------------------------

    def check_order(self) -> None:
        """Check that all members of a generation have received the same orders, as far as they go."""
        told: dict[tuple[int, int], list[ExecutedBatch]] = {}
        for rank in [*self.ranks.values(), *self.gone]:
            for key, done in rank.executed.items():
                longest = told.setdefault(key, done)
                common = min(len(longest), len(done))
                assert longest[:common] == done[:common], (key, longest, done)
                if len(done) > len(longest):
                    told[key] = done
