"""A job of any size on a modelled network: the real state machines of its coordinator and ranks, with a model of all that is between them.

No clock is read, so a job is the same on every machine. A process does one thing after another: each message that it
reads or writes takes it :attr:`Network.message` seconds, and its bytes leave it at :attr:`Network.bandwidth`. The coordinator reads
all that has come by the time it is free as one round, as its server does. What states compute takes no time beside that.

The ranks of each host may be behind a relay, and relays behind further ones: processes like the others.
"""

from __future__ import annotations

import heapq
import itertools
import math
import tracemalloc
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdlab.collectives.coordinator.events import (
    Event,
    PeerConnected,
    PeerLost,
    Received,
    ReceivedTogether,
    Send,
    SendConfigure,
    Tick,
)
from hvdlab.collectives.coordinator.relays import Relays
from hvdlab.collectives.coordinator.state import CoordinatorOptions, CoordinatorState
from hvdlab.collectives.dtypes import DType, OpKind, ReduceOp
from hvdlab.collectives.engine.effects import Fail, NewEpoch, RunBatch
from hvdlab.collectives.engine.entry import Entry
from hvdlab.collectives.engine.request import Request
from hvdlab.collectives.engine.state import RankState
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_from_rank, decode_hello, encode, encode_payload
from hvdlab.collectives.protocol.rosters import ROSTERS, SentMembers
from hvdlab.collectives.relay import events as relay_events
from hvdlab.collectives.relay.state import RelayState


@dataclass(frozen=True)
class Network:
    """What things take.

    Attributes:
        message: Seconds of a process for a message that it reads, or writes.
        latency: Seconds between two processes.
        bandwidth: Bytes that a process sends in a second.
        ranks_per_host: How many ranks share a host, and its relay if there is one.
        relays_per_relay: How many relays are behind one.
    """

    message: float = 20e-6
    latency: float = 30e-6
    bandwidth: float = 1.25e9
    ranks_per_host: int = 16
    relays_per_relay: int = 32


@dataclass
class Traffic:
    """What a process has read and written."""

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
        """What came after a moment, of which ``before`` is a copy."""
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
        ordered: When it was last told to execute something.
        failed: When something that it waited for last failed.
        renewed: When it last began an epoch.
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


@dataclass(eq=False)
class TimedRelay:
    """One relay.

    Attributes:
        number: Of this relay among all.
        above: The number of the relay above it; ``None`` if that is the coordinator.
        ranks: Whether ranks are behind it, and not relays.
        state: What it knows.
        free: When it has done what it is doing.
        awake: When it will look at what it holds, or ``None``.
    """

    number: int
    above: int | None
    ranks: bool
    state: RelayState = field(default_factory=RelayState)
    traffic: Traffic = field(default_factory=Traffic)
    free: float = 0.0
    awake: float | None = None


@dataclass(frozen=True)
class FromRelay:
    """A message of a relay, on its way to the coordinator."""

    relay: int
    message: m.From | m.Lost | m.Faulty


@dataclass(frozen=True)
class Passage:
    """What a part of a job has cost.

    Attributes:
        seconds: How long it took.
        root: What the coordinator has read and written.
        leaf: The same of the rank that had most to do with.
    """

    seconds: float
    root: Traffic
    leaf: Traffic


class TimedJob:
    """A coordinator and ``size`` ranks.

    Args:
        size: Number of ranks.
        network: What things take.
        levels: How many relays are between each rank and the coordinator.
    """

    def __init__(self, size: int, network: Network | None = None, levels: int = 0) -> None:
        self.network = network or Network()
        self.now = 0.0
        self.root = Traffic()
        self.coordinator = CoordinatorState(CoordinatorOptions(size=size, stall_seconds=0.0))
        self.ranks = [TimedRank(rank, RankState(rank)) for rank in range(size)]
        self.relays: list[TimedRelay] = []
        self._behind: dict[int, TimedRelay] = {}  # by rank
        self._relays = Relays(itertools.count(size).__next__)
        self._rank_of: dict[int, int] = {rank: rank for rank in range(size)}  # by peer
        self._whole: dict[
            bytes, m.Message
        ] = {}  # what a payload says to a rank that knows what it leaves out
        self._add_relays(levels)
        self._members = SentMembers()
        self._free = 0.0  # when the coordinator has done what it is doing
        self._inbox: deque[tuple[list[Event], int]] = deque()
        self._awake = False  # whether it is about to look there
        # (when, order, place, what comes, its bytes); the place is a rank, _ROOT, or further below that a relay
        self._coming: list[tuple[float, int, int, Coming, int]] = []
        self._order = itertools.count()

    def _add_relays(self, levels: int) -> None:
        """One for each host, and above them fewer and fewer; those of the last level are connected to the coordinator."""
        behind: list[TimedRelay] = []
        for level in range(levels):
            width = self.network.relays_per_relay if level else self.network.ranks_per_host
            count = math.ceil(len(behind if level else self.ranks) / width)
            begin = len(self.relays)
            self.relays += [TimedRelay(begin + place, None, not level) for place in range(count)]
            for relay in behind:
                above = relay.above = begin + (relay.number - behind[0].number) // width
                self.relays[above].state.handle(relay_events.Opened(relay.number, relays=True), 0.0)
            for me in self.ranks if not level else ():
                relay = self._behind[me.rank] = self.relays[me.rank // width]
                relay.state.handle(relay_events.Opened(me.rank), 0.0)
            behind = self.relays[begin:]
        for relay in behind:
            self._relays.open(_number_at_root(relay))

    # -- what happens to the job ----------------------------------------------------------------------------------

    def form(self) -> Passage:
        """All ranks connect at once, and the world begins."""
        before = self._mark()
        for me in self.ranks:
            hello = self.hello(me.rank)
            self._say(me, PeerConnected(me.rank, hello), hello)
        self.run()
        assert all(me.renewed >= 0 for me in self.ranks), "the world is not complete"
        return self._passage(before, max(me.renewed for me in self.ranks))

    def step(self, names: Sequence[str], late: Mapping[int, float] | None = None) -> Passage:
        """All ranks submit these tensors at once; it is over when the last of them has been told to execute the last one.

        Args:
            names: The tensors.
            late: How many seconds later than the others some ranks submit.
        """
        before = self._mark()
        living = [me for me in self.ranks if me.alive]
        for me in living:
            me.free = max(me.free, self.now + (late or {}).get(me.rank, 0.0))
            self._submit(me, names)
        self.run()
        assert all(not group.pending for me in living for group in me.state.sets.values())
        return self._passage(before, max(me.ordered for me in living))

    def kill(self, rank: int) -> tuple[Passage, float]:
        """A rank dies while all others wait for it.

        Returns:
            What it cost, with the time after which all knew of it, and how many seconds passed until all had begun anew.
        """
        victim, others = self.ranks[rank], [me for me in self.ranks if me.alive and me.rank != rank]
        for me in others:
            self._submit(me, ("waited for",))
        self.run()
        before = self._mark()
        victim.alive = False
        reason, when = "its connection ended", self.now + self.network.latency
        if rank in self._behind:
            self._later(when, _place(self._behind[rank]), relay_events.Ended(rank, reason), 0)
        else:
            self._later(when, _ROOT, PeerLost(rank, reason), 0)
        self.run()
        assert all(me.failed > before[0] and me.renewed > before[0] for me in others)
        passage = self._passage(before, max(me.failed for me in others))
        return passage, max(me.renewed for me in others) - before[0]

    def run(self) -> None:
        """Let happen what is on its way, and what is due because of it."""
        while True:
            due = self.coordinator.next_deadline()
            if (
                due is not None
                and not self._awake
                and due < (self._coming[0][0] if self._coming else math.inf)
            ):
                self._later(max(self.now, due), _ROOT, Tick(), 0)
            if not self._coming:
                return
            when, _, place, what, size = heapq.heappop(self._coming)
            self.now = when
            if place >= 0:
                assert isinstance(what, m.Message)
                self._at_rank(self.ranks[place], what, size)
            elif place < _ROOT:
                assert isinstance(what, relay_events.Event)
                self._at_relay(self.relays[_ROOT - 1 - place], what, size)
            elif what is None:
                self._awake = False
                self._one_round()
            elif isinstance(what, FromRelay):
                self._inbox.append((self._relays.received(what.relay, what.message), size))
                self._wake()
            else:
                assert isinstance(what, PeerConnected | Received | PeerLost | Tick)
                self._inbox.append(([what], size))
                self._wake()

    # -- the coordinator ------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._later(max(self.now, self._free), _ROOT, None, 0)

    def _one_round(self) -> None:
        """Read all that has come, and carry out what follows from it."""
        read = [size for _, size in self._inbox if size]
        events = [event for come, _ in self._inbox for event in come]
        self._inbox.clear()
        for event in events:
            if isinstance(event, PeerConnected):
                self._rank_of[event.peer] = event.hello.rank
        self.root.frames_in += len(read)
        self.root.bytes_in += sum(read)
        self._free = self.now + len(read) * self.network.message
        for effect in self.coordinator.handle_all(events, self._free):
            if isinstance(effect, Send | SendConfigure):
                self._send(effect)

    def _send(self, effect: Send | SendConfigure) -> None:
        """Send as the server does; ranks get whole messages, which their engines make of the short ones."""
        message = effect.fallback if isinstance(effect, SendConfigure) else effect.message
        short: dict[int, tuple[bytes, int]] = {}  # by what a rank knows
        alike: dict[int, list[int]] = {}  # peers behind relays, by what they know
        if roster := type(message) in ROSTERS:
            self._members.add(message)
        for peer in effect.peers:
            me = self.ranks[self._rank_of[peer]]
            known = me.members_told if roster else 0
            if known not in short:
                said, after = self._members.shorten(message, known) if roster else (message, 0)
                short[known] = encode_payload(said), after
            if roster:
                me.members_told = short[known][1]
            if me.rank in self._behind:
                alike.setdefault(known, []).append(peer)
            else:
                self._from_root(me.rank, message, HEAD + len(short[known][0]))
        for known, peers in alike.items():
            payload = short[known][0]
            self._whole[payload] = message
            for relay, numbers in self._relays.routes(tuple(peers))[1].items():
                told = encode_payload(m.To(numbers, payload))
                place = _place(self.relays[relay - 1])
                self._from_root(place, relay_events.Told(told), HEAD + len(told))

    def _from_root(self, place: int, what: Coming, size: int) -> None:
        self.root.frames_out += 1
        self.root.bytes_out += size
        self._free += self.network.message + size / self.network.bandwidth
        self._later(self._free + self.network.latency, place, what, size)

    # -- relays ---------------------------------------------------------------------------------------------------

    def _at_relay(self, relay: TimedRelay, what: relay_events.Event, size: int) -> None:
        network, traffic = self.network, relay.traffic
        relay.free = max(relay.free, self.now)
        if isinstance(what, relay_events.Tick):
            relay.awake = None
        elif size:
            traffic.frames_in += 1
            traffic.bytes_in += size
            relay.free += network.message
        for effect in relay.state.handle(what, relay.free):
            for place, sent, length in self._sends(relay, effect):
                traffic.frames_out += 1
                traffic.bytes_out += length
                relay.free += network.message + length / network.bandwidth
                self._later(relay.free + network.latency, place, sent, length)
        due = relay.state.next_deadline()
        if due is not None and relay.awake is None:
            relay.awake = max(self.now, due)
            self._later(relay.awake, _place(relay), relay_events.Tick(), 0)

    def _sends(self, relay: TimedRelay, effect: relay_events.Effect) -> Iterable[tuple[int, Coming, int]]:
        """The frames that a relay sends: where to, what, and their bytes."""
        if isinstance(effect, relay_events.SendUp):
            assert isinstance(effect.message, m.From | m.Lost)
            payload = encode_payload(effect.message)
            if relay.above is None:
                yield _ROOT, FromRelay(_number_at_root(relay), effect.message), HEAD + len(payload)
            else:
                above = _place(self.relays[relay.above])
                yield above, relay_events.Heard(relay.number, payload), HEAD + len(payload)
        elif isinstance(effect, relay_events.SendDown):
            for connection in effect.connections:
                size = HEAD + len(effect.payload)
                if relay.ranks:
                    yield connection, self._whole[effect.payload], size
                else:
                    yield _place(self.relays[connection]), relay_events.Told(effect.payload), size

    # -- ranks ----------------------------------------------------------------------------------------------------

    def hello(self, rank: int) -> m.Hello:
        """How a rank introduces itself."""
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
            request = Request(
                OpKind.ALLREDUCE, name, _TENSOR, output=_TENSOR, dtype=DType.F32, op=ReduceOp.SUM
            )
            me.state.submit(Entry(request, "cell [4] line 12", 0))
        me.free = max(me.free, self.now)
        self._flush(me)

    def _flush(self, me: TimedRank) -> None:
        for message in me.state.take_messages():
            self._say(me, Received(me.rank, message), message)  # type: ignore[arg-type]  # ranks say FromRank

    def _say(self, me: TimedRank, event: Event, message: m.Message) -> None:
        """Send a message, which is the event at the coordinator if the rank has its own connection."""
        payload = encode_payload(message)
        size = HEAD + len(payload)
        me.traffic.frames_out += 1
        me.traffic.bytes_out += size
        me.free += self.network.message + size / self.network.bandwidth
        relay = self._behind.get(me.rank)
        place = _ROOT if relay is None else _place(relay)
        what: Coming = event if relay is None else relay_events.Heard(me.rank, payload)
        self._later(me.free + self.network.latency, place, what, size)

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
                    me.state.finish(entry)
            elif isinstance(effect, Fail):
                me.failed = me.free
            elif isinstance(effect, NewEpoch):
                me.renewed = me.free
        self._flush(me)

    # -- time and counting ----------------------------------------------------------------------------------------

    def _later(self, when: float, place: int, what: Coming, size: int) -> None:
        heapq.heappush(self._coming, (when, next(self._order), place, what, size))

    def _mark(self) -> tuple[float, Traffic, list[Traffic]]:
        self._whole.clear()
        return self.now, self.root.since(Traffic()), [me.traffic.since(Traffic()) for me in self.ranks]

    def _passage(self, before: tuple[float, Traffic, list[Traffic]], end: float) -> Passage:
        begin, root, leaves = before
        leaf = max(
            (me.traffic.since(old) for me, old in zip(self.ranks, leaves, strict=True)),
            key=lambda traffic: (traffic.frames, traffic.bytes),
        )
        return Passage(end - begin, self.root.since(root), leaf)


def _place(relay: TimedRelay) -> int:
    return _ROOT - 1 - relay.number


def _number_at_root(relay: TimedRelay) -> int:
    return relay.number + 1  # 0 is for ranks without a relay


def memory_of_root(size: int, names: Sequence[str], behind: int = 0) -> int:
    """Bytes that the coordinator's state takes once all ranks have announced these tensors, each message decoded as it comes from a socket.

    Args:
        size: Number of ranks.
        names: The tensors.
        behind: How many ranks are behind each relay; 0 without relays.
    """
    job, definitions = TimedJob(0), []
    for local, name in enumerate(names):
        signature = m.Signature(int(OpKind.ALLREDUCE), name, int(DType.F32), int(ReduceOp.SUM), _TENSOR.shape)
        definitions.append(m.Definition(local, signature, "cell [4] line 12"))
    announce = encode(m.Announce(0, 1, tuple(range(len(names))), tuple(definitions)))[HEAD:]
    tracemalloc.start()
    try:
        state = CoordinatorState(CoordinatorOptions(size=size, stall_seconds=0.0))
        state.handle_all(
            [
                PeerConnected(r, decode_hello(encode(job.hello(r))[HEAD:]), 1 + r // behind if behind else 0)
                for r in range(size)
            ],
            0.0,
        )
        for first in range(0, size, behind or 1):
            said = decode_from_rank(announce)
            assert isinstance(said, m.Announce)
            together = tuple(range(first, min(first + behind, size)))
            state.handle(ReceivedTogether(together, said) if behind else Received(first, said), 1.0)
        assert state.sets.world.sequence >= 1, "the ranks did not agree"
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


Coming = Event | FromRelay | relay_events.Event | m.Message | None
_ROOT = -1
"""The coordinator's place."""
HEAD = 4
"""Bytes of a frame before its payload."""
_TENSOR = np.zeros(2048, np.float32)
"""What is submitted: too large to travel with its announcement."""
