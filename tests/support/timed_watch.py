"""Watched groups in a job of any size on a modelled network: heartbeats while nothing happens, and the report of one late launch.

The groups are the real ones, with a rank's engine that delivers their mail over the modelled network, and without an inner group: torch's
backend moves the bytes of a watched group, and that is no business of the coordinator's. The heartbeats are those of the coordinator's own liveness check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist

from hvdlab.collectives.coordinator.connections import Connection, Connections
from hvdlab.collectives.coordinator.events import Received
from hvdlab.collectives.coordinator.liveness import Liveness
from hvdlab.collectives.coordinator.process import ServerOptions
from hvdlab.collectives.engine.entries import Entry
from hvdlab.collectives.engine.requests import CompletionHook, Request
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_to_peer
from hvdlab.collectives.text import operator_log
from hvdlab.torch.c10d.launch_ring import (
    COLLECTIVES,
    SENT,
    AnyWatchMail,
    LaunchRing,
    LaunchSlot,
    LaunchVerdict,
    Verdict,
)
from hvdlab.torch.c10d.watched import WatchedGroup
from hvdlab.torch.c10d.watched_work import Generation, WatchedWork
from support.simulation.timed_job import HEAD, Coming, Network, TimedJob, TimedRank, Traffic

INSPECTION = 0.12e-6
"""Seconds of the coordinator for one connection that its liveness check inspects: measured on a slow core."""
PING_AFTER = ServerOptions("").ping_after
"""Seconds of silence after which the coordinator pings a rank."""
_TOPIC = "c10d.watched"
_TICK = 1e-6
"""Seconds after which the coordinator notices that a check is due: the clock that it reads has moved on."""
_EARLIER = 2 * SENT
"""Launches before the one that is late: as many as a rank has to send for a comparison, and more."""


@dataclass(frozen=True)
class Heartbeats:
    """Load of the coordinator in a second, by ranks that launch without it.

    Attributes:
        frames, bytes: Messages that it reads and writes, and their bytes.
        inspections: Connections that its liveness check inspects.
        busy: Seconds of its processor.
    """

    frames: float
    bytes: float
    inspections: float
    busy: float


@dataclass(frozen=True)
class LateReport:
    """Cost of one launch that a rank leaves out, from the instant at which all others find it late.

    Attributes:
        seconds: After which all ranks know which one is missing.
        resumed: Seconds from its launch until all know that it has come.
        root, comparer, leaf: Traffic of the coordinator, of the rank that compares, and of the busiest other one.
        busy: Seconds of the coordinator's processor.
        missing: The ranks that the verdict names.
    """

    seconds: float
    resumed: float
    root: Traffic
    comparer: Traffic
    leaf: Traffic
    busy: float
    missing: tuple[int, ...]


class StandIn(Entry):
    """A launch's stand-in in the core, with the part of a handle that a watched group uses."""

    __slots__ = ("hooks", "over")

    def __init__(self, request: Request) -> None:
        super().__init__(request, request.site or "", 0)
        self.over = False
        self.hooks: list[CompletionHook] = []

    def done(self) -> bool:
        return self.over

    def add_hook(self, hook: CompletionHook) -> bool:
        self.hooks.append(hook)
        return True

    def tell_blocked(self, seconds: float) -> None:
        raise AssertionError("no thread of the user's waits in this job")

    def end(self) -> None:
        self.over = True
        for hook in self.hooks:
            hook(None, None)


class TimedEngine:
    """The engine of a rank of the job, as far as a watched group uses it."""

    runs_cell = True

    def __init__(self, job: TimedWatches, me: TimedRank) -> None:
        self._job, self._me = job, me
        self.rank = me.rank

    @property
    def living(self) -> Sequence[int]:
        return range(len(self._job.ranks))

    def post(self, topic: str, body: bytes, to: Sequence[int]) -> None:
        self._job.post(self._me, m.Post(topic, body, tuple(to)))

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self._job.call_at(max(self._job.now, self._me.free) + seconds, call)

    def call_on_control(self, call: Callable[[], None]) -> None:
        call()

    def submit(self, request: Request) -> StandIn:
        entry = StandIn(request)
        self._me.state.submit(entry)
        self._job.flush(self._me)
        return entry


class TimedGroup(WatchedGroup):
    """A watched group of all ranks of the job."""

    def __init__(self, engine: TimedEngine, members: Sequence[int]) -> None:
        # Not a WatchedGroup's, which waits for the other ranks. torch's types know the form with a store alone.
        dist.ProcessGroup.__init__(self, engine.rank, len(members))  # type: ignore[call-arg]
        self._engine, self._members = cast(Any, engine), tuple(members)
        self._name_in_mail, self.process_set = "0123456789abcdef.c10d.0", 0
        self.on_device = False
        self._late = 5.0
        self._calls = cast(
            Any,
            SimpleNamespace(
                name_in_core="c10d.0",
                seconds=1800.0,
                recorded_as=lambda operation: f"dist.{operation}",
                name_of=lambda operation, sequence, part: f"dist.{operation} #{sequence}{part}",
            ),
        )
        self._ring = LaunchRing()
        self._inquiries, self._ended_on, self._entered = {}, {}, None
        self._generation = Generation(1)

    @property
    def generation(self) -> Generation:
        return self._generation

    def launched(self, slots: Sequence[LaunchSlot]) -> None:
        """Record launches, of which the last one is in flight."""
        generation = self._generation
        for slot in slots:
            self._ring.add(slot)
        generation.counts[COLLECTIVES] = slots[-1].number
        generation.flying.append(WatchedWork(self, generation, slots[-1], 1800.0))
        if slots[-1].number <= generation.wanted.get(COLLECTIVES, 0):
            self._stand_in(generation, COLLECTIVES, slots[-1].number)


class TimedConnections(Connections):
    """Connections of the job's ranks, without sockets."""

    def __init__(self, job: TimedWatches) -> None:
        super().__init__(ServerOptions(""), operator_log("coordinator"))
        self.loop.close()
        self._job = job

    def write(
        self, connection: Connection, frame: bytes, descriptor: int = -1, *, bulk: bool = False
    ) -> None:
        self._job.send_ping(connection.peer, frame)


class TimedWatches(TimedJob):
    """A job whose ranks are members of one watched group.

    Args:
        size: Number of ranks.
        network: Costs of messages.
    """

    def __init__(self, size: int, network: Network | None = None) -> None:
        super().__init__(size, network)
        members = tuple(range(size))
        self.groups = [TimedGroup(TimedEngine(self, me), members) for me in self.ranks]
        self.inspections = 0
        self.verdict = Verdict((), (), ())
        self._judged = 0.0  # when the last rank has got a verdict
        self._connections = TimedConnections(self)
        self._liveness = Liveness(
            self._connections,
            cast(Any, SimpleNamespace(is_paused=lambda peer: False)),
            ServerOptions(""),
            operator_log("coordinator"),
        )

    # -- heartbeats -------------------------------------------------------------------------------------------------

    def beat(self, seconds: float) -> Heartbeats:
        """Let nothing happen for some time, after each rank was last heard at an instant of its own.

        Ranks that start on many hosts, or whose last collective through the coordinator was not the same, are heard at as many instants.
        """
        begin = self.now
        for me in self.ranks:
            heard = begin + PING_AFTER * (me.rank + 1) / len(self.ranks)
            connection = SimpleNamespace(
                peer=me.rank, name=f"rank {me.rank}", heard=heard, asked=None, pid=0, tracked=False
            )
            self._connections.open[me.rank] = cast(Connection, connection)
        self._connections.next_check = begin + PING_AFTER
        self.call_at(self._connections.next_check, self._check)
        self.run(begin + 2 * PING_AFTER)  # until each was pinged once
        before, looked = self._mark(), self.inspections
        self.run(self.now + seconds)
        root, looked = self.root.since(before[1]), self.inspections - looked
        self._connections.open.clear()
        self.run()  # the last check finds none
        busy = root.frames * self.network.message + looked * INSPECTION
        return Heartbeats(root.frames / seconds, root.bytes / seconds, looked / seconds, busy / seconds)

    def _check(self) -> None:
        if self._free > self.now:
            self.call_at(self._free, self._check)
            return
        connections = self._connections
        self.inspections += len(connections.open)
        connections.next_check = float("inf")
        self._free = max(self._free, self.now)
        self._liveness.check(self.now, [])
        if connections.open:
            self.call_at(max(self._free, connections.next_check) + _TICK, self._check)

    def send_ping(self, peer: int, frame: bytes) -> None:
        """Send a ping that the liveness check has written."""
        self.root.frames_out += 1
        self.root.bytes_out += len(frame)
        self._free += self.network.message
        ping = decode_to_peer(memoryview(frame)[HEAD:])
        assert isinstance(ping, m.Ping)
        self._later(self._free + self.network.latency, peer, ping, len(frame))

    def _one_round(self) -> None:
        for event, _ in self._inbox:
            if isinstance(event, Received) and event.peer in self._connections.open:
                self._connections.open[event.peer].heard = self.now
        super()._one_round()

    # -- a report ---------------------------------------------------------------------------------------------------

    def report(self) -> LateReport:
        """Let the highest rank leave a launch out that all others have made, and then make it."""
        slots = [_slot(number) for number in range(1, _EARLIER + 2)]
        *waiting, missing = self.groups
        for group in waiting:
            group.launched(slots)
        missing.launched(slots[:-1])
        missing.generation.flying.clear()
        before = self._mark()
        for me, group in zip(self.ranks, waiting, strict=False):
            me.free = max(me.free, self.now)
            group.check_launches(time.monotonic() + 3600.0)
        self.run()
        known = self._passage(before, self._judged)
        traffic = [me.traffic.since(old) for me, old in zip(self.ranks, before[2], strict=True)]
        self.now = max(self.now, self._free)
        begin = self.ranks[-1].free = max(self.now, self.ranks[-1].free)
        missing.launched(slots[-1:])
        self.run()
        stand_ins = [group.generation.stand_ins[COLLECTIVES, len(slots)] for group in self.groups]
        assert all(stand_in.done() for stand_in in stand_ins), "a rank waits still"
        return LateReport(
            seconds=known.seconds,
            resumed=max(me.ordered for me in self.ranks) - begin,
            root=known.root,
            comparer=traffic[0],
            leaf=max(traffic[1:], key=lambda each: (each.frames, each.bytes)),
            busy=known.root.frames * self.network.message + known.root.bytes / self.network.bandwidth,
            missing=self.verdict.missing,
        )

    def post(self, me: TimedRank, message: m.Post) -> None:
        """Send mail of a rank's group."""
        self._to_coordinator(me, Received(me.rank, message), message)

    def flush(self, me: TimedRank) -> None:
        """Send what a rank's state has for the coordinator."""
        me.free = max(me.free, self.now)
        self._flush(me)

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Call this at a moment of the job."""
        self._later(when, -1, cast(Coming, call), 0)

    def _at_rank(self, me: TimedRank, message: m.Message, size: int) -> None:
        if not isinstance(message, m.Mail | m.Ping):
            super()._at_rank(me, message, size)
            return
        me.traffic.frames_in += 1
        me.traffic.bytes_in += size
        me.free = max(me.free, self.now) + self.network.message
        if isinstance(message, m.Ping):
            pong = m.Pong(message.number, int(me.free * 1e9))
            self._to_coordinator(me, Received(me.rank, pong), pong)
            return
        assert message.topic == _TOPIC
        group = self.groups[me.rank]
        mail: AnyWatchMail = msgspec.msgpack.decode(message.body, type=AnyWatchMail)
        group.handle(message.sender, mail)
        if isinstance(mail, LaunchVerdict):
            self._judged = max(self._judged, me.free)
            self.verdict = group.generation.verdicts[COLLECTIVES, mail.number]
            # Each names all ranks: those of 16,384 ranks would fill some gigabytes of this process.
            group.generation.verdicts.clear()

    def _execute(self, me: TimedRank, entry: Entry) -> None:
        super()._execute(me, entry)
        if isinstance(entry, StandIn):
            entry.end()


def _slot(number: int) -> LaunchSlot:
    shape = torch.Size([4096, 1024]), torch.bfloat16
    site = "train.py:128 (backward)"
    return LaunchSlot(
        1, COLLECTIVES, number, number, "all_gather", shape, None, site, f", layers.{number % 48}", 7
    )
