"""A job of any size on a modelled network: the real state machines of its coordinator and ranks, with a model of all that is between them.

No clock is read, so a job is the same on every machine. A process does one thing after another: each message that it
reads or writes takes it :attr:`Network.message` seconds, and its bytes leave it at :attr:`Network.bandwidth`. The
coordinator reads all messages that have arrived by the time it is free as one round, as its server does. The states'
computations take no time beside that.
"""

from __future__ import annotations

import heapq
import itertools
import math
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdlab.collectives.coordinator.events import (
    Event,
    PeerConnected,
    PeerLost,
    Received,
    Send,
    SendConfigure,
    Tick,
)
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.state import CoordinatorState
from hvdlab.collectives.engine.entries import Entry, Fail, NewGeneration, RunBatch
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_from_rank, decode_hello, encode
from hvdlab.collectives.protocol.member_lists import SHORTENED, SentMembers
from hvdlab.collectives.types import SUM, DType, OpKind, ReduceOp

Coming = Event | m.Message | Callable[[], None] | None
"""What comes at a moment: an event, a message to a rank, a call, or the coordinator's next round."""


@dataclass(frozen=True)
class Network:
    """Costs of a message and of its bytes.

    Attributes:
        message: Seconds of a process for a message that it reads, or writes.
        latency: Seconds between two processes.
        bandwidth: Bytes that a process sends in a second.
        ranks_per_host: How many ranks share a host.
    """

    message: float = 20e-6
    latency: float = 30e-6
    bandwidth: float = 1.25e9
    ranks_per_host: int = 16


@dataclass
class Traffic:
    """Messages and bytes that a process has read and written."""

    frames_in: int = 0
    frames_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    @property
    def frames(self) -> int:
        return self.frames_in + self.frames_out

    @property
    def bytes(self) -> int:
        return self.bytes_in + self.bytes_out

    def since(self, before: Traffic) -> Traffic:
        """Return the traffic after a moment, of which ``before`` is a copy."""
        return Traffic(
            self.frames_in - before.frames_in,
            self.frames_out - before.frames_out,
            self.bytes_in - before.bytes_in,
            self.bytes_out - before.bytes_out,
        )


@dataclass(eq=False)
class TimedRank:
    """One rank.

    Attributes:
        state: Its side of negotiation.
        free: When it has done what it is doing.
        alive: Whether it has not been killed.
        members_told: Which descriptions of members it has been sent.
        ordered: When it last received an order to execute.
        failed: When its last wait failed.
        renewed: When it last began a generation.
    """

    rank: int
    state: RankState
    traffic: Traffic = field(default_factory=Traffic)
    free: float = 0.0
    alive: bool = True
    members_told: int = 0
    ordered: float = -1.0
    failed: float = -1.0
    renewed: float = -1.0


@dataclass(frozen=True)
class Passage:
    """Cost of a part of a job.

    Attributes:
        seconds: How long it took.
        root: Traffic of the coordinator.
        leaf: Traffic of the busiest rank.
    """

    seconds: float
    root: Traffic
    leaf: Traffic


class TimedJob:
    """Coordinator and ``size`` ranks.

    Args:
        size: Number of ranks.
        network: Costs of messages.
    """

    def __init__(self, size: int, network: Network | None = None) -> None:
        self.network = network or Network()
        self.now = 0.0
        self.root = Traffic()
        self.coordinator = CoordinatorState(CoordinatorOptions(size=size, stall_seconds=0.0))
        self.ranks = [TimedRank(rank, RankState(rank)) for rank in range(size)]
        self._members = SentMembers()
        self._free = 0.0  # when the coordinator is free again
        self._inbox: deque[tuple[Event, int]] = deque()
        self._awake = False  # whether it is about to look there
        # (when, order, rank or -1 for the coordinator, the message or a call, its bytes)
        self._coming: list[tuple[float, int, int, Coming, int]] = []
        self._order = itertools.count()

    # -- events of the job ----------------------------------------------------------------------------------------

    def form(self) -> Passage:
        """Connect all ranks at once, so that the world begins."""
        before = self._mark()
        for me in self.ranks:
            hello = self.hello(me.rank)
            self._to_coordinator(me, PeerConnected(me.rank, hello), hello)
        self.run()
        assert all(me.renewed >= 0 for me in self.ranks), "the world is not complete"
        return self._passage(before, max(me.renewed for me in self.ranks))

    def step(self, names: Sequence[str]) -> Passage:
        """Submit on all ranks these tensors at once; it is over when the last rank has received the order to execute
        the last one."""
        before = self._mark()
        living = [me for me in self.ranks if me.alive]
        for me in living:
            self._submit(me, names)
        self.run()
        assert all(not group.pending for me in living for group in me.state.sets.values())
        return self._passage(before, max(me.ordered for me in living))

    def kill(self, rank: int) -> tuple[Passage, float]:
        """Kill a rank while all others wait for it.

        Returns:
            Its cost, with the time after which all knew of it, and how many seconds passed until all had begun a new
            generation.
        """
        victim, others = self.ranks[rank], [me for me in self.ranks if me.alive and me.rank != rank]
        for me in others:
            self._submit(me, ("waited for",))
        self.run()
        before = self._mark()
        victim.alive = False
        self._later(self.now + self.network.latency, -1, PeerLost(rank, "its connection ended"), 0)
        self.run()
        assert all(me.failed > before[0] and me.renewed > before[0] for me in others)
        passage = self._passage(before, max(me.failed for me in others))
        return passage, max(me.renewed for me in others) - before[0]

    def run(self, until: float = math.inf) -> None:
        """Deliver the messages in flight, and those that follow from them, up to a moment."""
        while True:
            due = self.coordinator.next_deadline()
            if (
                due is not None
                and not self._awake
                and due < (self._coming[0][0] if self._coming else math.inf)
            ):
                self._later(max(self.now, due), -1, Tick(), 0)
            if not self._coming or self._coming[0][0] > until:
                return
            when, _, place, what, size = heapq.heappop(self._coming)
            self.now = when
            if callable(what):
                what()
            elif place >= 0:
                assert isinstance(what, m.Message)
                self._at_rank(self.ranks[place], what, size)
            elif what is None:
                self._awake = False
                self._one_round()
            else:
                assert isinstance(what, PeerConnected | Received | PeerLost | Tick)
                self._inbox.append((what, size))
                self._wake()

    # -- the coordinator ------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._later(max(self.now, self._free), -1, None, 0)

    def _one_round(self) -> None:
        """Read all messages that have arrived, and carry out their effects."""
        read = [size for _, size in self._inbox if size]
        events = [event for event, _ in self._inbox]
        self._inbox.clear()
        self.root.frames_in += len(read)
        self.root.bytes_in += sum(read)
        self._free = self.now + len(read) * self.network.message
        for effect in self.coordinator.handle_all(events, self._free):
            if isinstance(effect, Send | SendConfigure):
                self._send(effect)

    def _send(self, effect: Send | SendConfigure) -> None:
        """Send as the server does; ranks get whole messages, which their engines make of the short ones."""
        message = effect.fallback if isinstance(effect, SendConfigure) else effect.message
        sizes: dict[int, tuple[int, int]] = {}  # by the rank's state
        if roster := type(message) in SHORTENED:
            self._members.add(message)
        for peer in effect.peers:
            me = self.ranks[peer]
            known = me.members_told if roster else 0
            if known not in sizes:
                short, after = self._members.shorten(message, known) if roster else (message, 0)
                sizes[known] = len(encode(short)), after
            size, after = sizes[known]
            if roster:
                me.members_told = after
            self.root.frames_out += 1
            self.root.bytes_out += size
            self._free += self.network.message + size / self.network.bandwidth
            self._later(self._free + self.network.latency, peer, message, size)

    # -- ranks ----------------------------------------------------------------------------------------------------

    def hello(self, rank: int) -> m.Hello:
        """Return how a rank introduces itself."""
        host = rank // self.network.ranks_per_host
        return m.Hello(
            m.PROTOCOL_VERSION,
            "0123456789abcdef0123456789abcdef",
            "rank",
            rank,
            f"node{host:04d}",
            100_000 + rank,
            f"10.0.{host // 256}.{host % 256}",
            ("shm", "gloo"),
        )

    def _submit(self, me: TimedRank, names: Sequence[str]) -> None:
        for name in names:
            request = Request(OpKind.ALLREDUCE, name, _TENSOR, output=_TENSOR, dtype=DType.F32, reduction=SUM)
            me.state.submit(Entry(request, "cell [4] line 12", 0))
        me.free = max(me.free, self.now)
        self._flush(me)

    def _flush(self, me: TimedRank) -> None:
        for message in me.state.take_messages():
            self._to_coordinator(me, Received(me.rank, message), message)  # type: ignore[arg-type]  # ranks say FromRank

    def _to_coordinator(self, me: TimedRank, event: Event, message: m.Message) -> None:
        size = len(encode(message))
        me.traffic.frames_out += 1
        me.traffic.bytes_out += size
        me.free += self.network.message + size / self.network.bandwidth
        self._later(me.free + self.network.latency, -1, event, size)

    def _at_rank(self, me: TimedRank, message: m.Message, size: int) -> None:
        if not me.alive:
            return
        me.traffic.frames_in += 1
        me.traffic.bytes_in += size
        me.free = max(me.free, self.now) + self.network.message
        for effect in me.state.handle(message, int(me.free * 1e9)):
            if isinstance(effect, RunBatch):
                me.ordered = me.free
                for entry in effect.entries:
                    self._execute(me, entry)
            elif isinstance(effect, Fail):
                me.failed = me.free
            elif isinstance(effect, NewGeneration):
                me.renewed = me.free
        self._flush(me)

    def _execute(self, me: TimedRank, entry: Entry) -> None:
        """Execute a collective that was ordered, which takes no time."""
        me.state.finish(entry)

    # -- time and counting ----------------------------------------------------------------------------------------

    def _later(self, when: float, place: int, what: Coming, size: int) -> None:
        heapq.heappush(self._coming, (when, next(self._order), place, what, size))

    def _mark(self) -> tuple[float, Traffic, list[Traffic]]:
        return self.now, self.root.since(Traffic()), [me.traffic.since(Traffic()) for me in self.ranks]

    def _passage(self, before: tuple[float, Traffic, list[Traffic]], end: float) -> Passage:
        begin, root, leaves = before
        leaf = max(
            (me.traffic.since(old) for me, old in zip(self.ranks, leaves, strict=True)),
            key=lambda traffic: (traffic.frames, traffic.bytes),
        )
        return Passage(end - begin, self.root.since(root), leaf)


def memory_of_root(size: int, names: Sequence[str]) -> int:
    """Return bytes that the coordinator's state takes once all ranks have announced these tensors, each message decoded
    as it comes from a socket."""
    job, definitions = TimedJob(0), []
    for local, name in enumerate(names):
        signature = m.Signature(int(OpKind.ALLREDUCE), name, int(DType.F32), int(ReduceOp.SUM), _TENSOR.shape)
        definitions.append(m.Definition(local, signature, "cell [4] line 12"))
    announce = encode(m.Announce(0, 1, tuple(range(len(names))), tuple(definitions)))[HEAD:]
    tracemalloc.start()
    try:
        state = CoordinatorState(CoordinatorOptions(size=size, stall_seconds=0.0))
        state.handle_all(
            [PeerConnected(r, decode_hello(encode(job.hello(r))[HEAD:])) for r in range(size)], 0.0
        )
        for rank in range(size):
            state.handle(Received(rank, decode_from_rank(announce)), 1.0)
        assert state.sets.world.sequence >= 1, "the ranks did not agree"
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


HEAD = 4
"""Bytes of a frame before its payload."""
_TENSOR = np.zeros(2048, np.float32)
"""What is submitted: too large to travel with its announcement."""
