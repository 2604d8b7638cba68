"""Random schedules of a whole job: acts of users, processes and the network in any order, and the invariants.

A schedule is made from its seed alone, so that one that fails can be had again::

    python tests/support/simulation/joint_schedules.py --seed 1234            # this one, printed step by step
    python tests/support/simulation/joint_schedules.py --count 1000000 --jobs 2 --progress out/schedules.json

The latter notes how far it has come, and goes on from there when it is started again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # where the other modules of tests are, for this program


from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.engine.entries import ANNOUNCED, EXECUTING, POSTED, UNANNOUNCED, Entry
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import AbortedError, CauseKind
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import DType, OpKind
from support.simulation.joint_ranks import SimEntry, SimRank
from support.simulation.joint_simulation import Simulation, allreduce, message

Play = Callable[[int], str]
"""Runs the schedule of a seed; returns what went wrong, or an empty text."""

_SIZES = (1, 2, 2, 3, 3, 4)
GROWTH = 2
"""Ranks beyond those of the start that a world may get."""
ACTIONS = (
    *["submit"] * 6, *["everywhere"] * 5, *["steps"] * 6,
    *["directly"] * 4, *["messages"] * 4, "give_up", "alone", "group", "gather", "exchange", "copy", "barrier", "join", "mismatch", "add_set", "remove_set",
    "withdraw", "tear", "kill", "cut", "mend", "leave", "come", "come", "resize", "restart", "block", "wait", "cell", "end_cell", "pause", "go_on",
    "settle",
)  # fmt: skip
_NAMES = (None, None, "a", "b", "c")
_CALM = frozenset({"kill", "cut", "leave", "resize", "restart", "withdraw", "tear"})
"""What is left out of some schedules, so that others of the things that can happen get further."""


class Schedule:
    """One run from one seed. Raises ``AssertionError`` where something does not hold."""

    def __init__(self, seed: int, *, tell: bool = False) -> None:
        self.chance = random.Random(seed)
        self.tell = tell
        chance = self.chance
        self.size = chance.choice(_SIZES)
        #: Ranks that there may be by now.
        self.most = self.size
        self.tracked = chance.random() < 0.4
        options = CoordinatorOptions(
            size=None if self.tracked else self.size,
            fusion_threshold=chance.choice([0, 32, 1 << 20]),
            flush_delay=chance.choice([0.0, 0.0, 0.0, 0.2]),
            scheduling_credit=chance.choice([1, 20, 8000, 0]),
            reattach=1.0,
        )
        self.sim = Simulation(
            self.size,
            chance.getrandbits(32),
            local_limit=chance.choice([3, 8, 4096]),
            tracked=self.tracked,
            options=options,
            validate=0.05,
            lacking=chance.choice([0.0, 0.0, 0.1]),
            returns=chance.random() < 0.8,
        )
        #: Priorities that allreduces have in this schedule.
        kinds: list[list[int | None]] = [[None], [None], [None, 0], [0, 0, 7, -3]]
        self.priorities = chance.choice(kinds)
        self.cells = 0
        self.script = False  # whether only the ranks have any state
        self.resized = False
        calm = chance.random() < 0.2
        self.actions = [a for a in ACTIONS if not (calm and a in _CALM)]

    def run(self) -> None:
        """Run all of it: random actions, then an end in order, after which nothing may be left."""
        if self.tracked:
            self.do_cell()
        for _ in range(self.chance.randint(3, 40)):
            action = self.chance.choice(self.actions)
            self._say(action)
            getattr(self, "do_" + action)()
        self.rest()
        self.finish()

    def _say(self, text: str) -> None:
        if self.tell:
            print(f"-- {text}")

    # -- ranks and places -----------------------------------------------------------------------------------------

    def living(self) -> list[SimRank]:
        return [me for me in self.sim.ranks if me.alive]

    def free(self) -> list[SimRank]:
        """Return ranks whose users can do something."""
        return [
            me
            for me in self.living()
            if (me.blocked is None or me.blocked.outcome is not None)
            and (me.cells or not self.tracked)
            and not me.state.failover.paused
        ]

    def someone(self) -> SimRank | None:
        free = self.free()
        return self.chance.choice(free) if free else None

    def somewhere(self, me: SimRank) -> int:
        return self.chance.choice([0, 0, *me.state.sets]) if me.state.sets else 0

    def submit(self, me: SimRank, request: Request) -> None:
        done = self.sim.submit(me.rank, request)
        if self.tell:
            print(
                f"   rank {me.rank}: {request.kind.label} {request.name} in {request.process_set}: {done!r}"
            )

    def allreduce(self, name: str | None, shape: tuple[int, ...] = (4,), **changes: object) -> Request:
        return allreduce(name, shape, priority=self.chance.choice(self.priorities), **changes)

    # -- acts of users --------------------------------------------------------------------------------------------

    def do_submit(self) -> None:
        me = self.someone()
        if me is not None:
            self.submit(me, self.allreduce(self.chance.choice(_NAMES), process_set=self.somewhere(me)))

    def do_everywhere(self) -> None:
        """Submit the same on all ranks, as correct programs do; ranks are not equally fast."""
        where = self.chance.choice([0, 0, 0, 1, 2])
        names = [self.chance.choice(_NAMES) for _ in range(self.chance.randint(1, 4))]
        large = self.chance.random() < 0.3
        shape = (2000,) if large else (4,)  # the former does not travel with its announcement
        for me in self.free():
            if where in me.state.sets or where == 0:
                for name in names:
                    self.submit(me, self.allreduce(name, shape, process_set=where))
            for _ in range(self.chance.randint(0, 3)):
                self.sim.step()

    def do_directly(self) -> None:
        """Run programs that wait for each collective, most of them for the same."""
        where = self.chance.choice([0, 0, 0, 1, 2])
        names = [self.chance.choice(_NAMES) for _ in range(self.chance.randint(1, 4))]
        for name in names:
            usual = (2000,) if self.chance.random() < 0.3 else (4,)  # the former meet on the plane
            for me in self.free():
                if (where in me.state.sets or where == 0) and self.chance.random() < 0.97:
                    directly = self.chance.random() < 0.95
                    shape = usual if self.chance.random() < 0.97 else (5,)
                    done = self.sim.submit(
                        me.rank, self.allreduce(name, shape, process_set=where), directly=directly
                    )
                    self._say(f"rank {me.rank}: {name} in {where}, directly {directly}: {done!r}")
                for _ in range(self.chance.randint(0, 3)):
                    self.sim.step()
            if self.chance.random() < 0.8:
                self._progress()

    def _progress(self) -> None:
        for _ in range(40):
            if all(me.blocked is None or me.blocked.outcome is not None for me in self.living()):
                return
            if not self.sim.step():
                return

    def do_alone(self) -> None:
        me = self.someone()
        if me is not None:
            request = allreduce(self.chance.choice(_NAMES), process_set=self.somewhere(me))
            self.sim.submit(me.rank, request, directly=True)

    def do_mismatch(self) -> None:
        me = self.someone()
        if me is not None:
            self.submit(me, self.allreduce(self.chance.choice(_NAMES), (5,), process_set=self.somewhere(me)))

    def do_group(self) -> None:
        members = [f"g{i}" for i in range(3)]
        where = self.chance.choice([0, 0, 1])
        for me in self.free():
            if self.chance.random() < 0.8 and (where in me.state.sets or where == 0):
                self.chance.shuffle(members)
                for name in members:
                    self.submit(me, self.allreduce(name, group=("g", 3), process_set=where))

    def do_gather(self) -> None:
        for me in self.free():
            if self.chance.random() < 0.9:
                rows = np.zeros((self.chance.randint(0, 3), 2), np.float32)
                self.submit(me, Request(OpKind.ALLGATHER, None, rows, dtype=DType.F32))

    def do_exchange(self) -> None:
        for me in self.free():
            members = len(me.state.sets[0].ranks) if 0 in me.state.sets else 1
            splits = tuple(self.chance.randint(0, 2) for _ in range(members))
            rows = np.zeros((sum(splits), 2), np.float32)
            self.submit(me, Request(OpKind.ALLTOALL, "x", rows, dtype=DType.F32, splits=splits))

    def do_copy(self) -> None:
        root = self.chance.randrange(self.most)
        for me in self.free():
            tensor = np.zeros(3, np.float32)
            self.submit(me, Request(OpKind.BROADCAST, "r", tensor, tensor, dtype=DType.F32, root=root))

    def do_messages(self) -> None:
        """Send messages from some ranks to one that names the senders, or receives from any, on one of two channels."""
        where, channel = self.chance.choice([0, 0, 0, 1]), self.chance.choice("xy")
        target = self.chance.randrange(self.most)
        shape = (2000,) if self.chance.random() < 0.3 else (4,)  # the former meet on the plane
        for _ in range(self.chance.randint(1, 3)):
            for me in self.chance.sample(self.free(), len(self.free())):
                if where and where not in me.state.sets:
                    continue
                if me.rank == target:
                    source = self.chance.randrange(self.most) if self.chance.random() < 0.4 else None
                    self.submit(me, message(source, target, channel, shape, where, receives=True))
                elif self.chance.random() < 0.6:
                    used = shape if self.chance.random() < 0.97 else (5,)
                    self.submit(me, message(me.rank, target, channel, used, where, receives=False))
                for _ in range(self.chance.randint(0, 3)):
                    self.sim.step()

    def do_give_up(self) -> None:
        """Let a user give up a message that waits for the other rank."""
        me = self.someone()
        if me is not None:
            waiting = [e for e in me.entries if e.outcome is None and e.request.kind is OpKind.SENDRECV]
            if waiting:
                entry = self.chance.choice(waiting)
                given_up = me.state.cancellations.cancel(entry, CauseKind.TIMEOUT, "it took too long")
                self._say(f"rank {me.rank} gives {entry.name} up: {given_up}")

    def do_barrier(self) -> None:
        for me in self.free():
            if self.chance.random() < 0.9:
                self.submit(me, Request(OpKind.BARRIER, None))

    def do_join(self) -> None:
        for me in self.free():
            if self.chance.random() < 0.7:
                self.submit(me, Request(OpKind.JOIN, process_set=self.somewhere(me)))

    def do_add_set(self) -> None:
        ranks = tuple(sorted(self.chance.sample(range(self.most), self.chance.randint(1, self.most))))
        for me in self.free():
            self.submit(me, Request(OpKind.ADD_PROCESS_SET, f"add {ranks}", ranks=ranks))

    def do_remove_set(self) -> None:
        number = self.chance.randint(1, 3)
        for me in self.free():
            self.submit(me, Request(OpKind.REMOVE_PROCESS_SET, f"remove {number}", root=number))

    def do_withdraw(self) -> None:
        me = self.chance.choice(self.living() or [None])
        if me is not None:
            self.sim.withdraw(me.rank, self.somewhere(me))

    def do_tear(self) -> None:
        me = self.chance.choice(self.living() or [None])
        if me is not None:
            self.sim.tear(me.rank)

    def do_block(self) -> None:
        """Let a user wait for long."""
        me = self.someone()
        if me is not None:
            self.block(me)

    def do_wait(self) -> None:
        for me in self.free():
            self.block(me)

    def block(self, me: SimRank) -> None:
        waiting = [entry for entry in me.entries if entry.outcome is None]
        if waiting:
            me.blocked = self.chance.choice(waiting)
            me.state.report_waiting(me.blocked, 0.5)

    def do_pause(self) -> None:
        """Let a user pause a rank, which does nothing in that time."""
        me = self.someone()
        if me is not None:
            me.state.paused(("at a prompt",))

    def do_go_on(self) -> None:
        for me in self.living():
            if me.state.failover.paused and self.chance.random() < 0.5:
                me.state.paused(())

    def do_cell(self) -> None:
        if self.tracked and self.living():
            self.cells += 1
            cell = f"cell {self.cells}"
            ranks = tuple(me.rank for me in self.living() if self.chance.random() < 0.9)
            if ranks:
                self.sim.start_cell(cell, ranks)

    def do_end_cell(self) -> None:
        me = self.someone()
        if me is not None and me.cells:
            self.end_cell(me)

    def end_cell(self, me: SimRank) -> None:
        self.sim.end_cell(me.rank, self.chance.choice(["", "ValueError: no"]))

    # -- coming and going -----------------------------------------------------------------------------------------

    def do_kill(self) -> None:
        if len(self.living()) > 1:
            me = self.chance.choice(self.living())
            self.sim.kill(me.rank)
            if self.chance.random() < 0.5 and not self.script:
                self.sim.say(m.RankLost(me.rank, me.pid, "killed by SIGKILL"))

    def do_cut(self) -> None:
        if len(self.living()) > 1:
            self.sim.cut(self.chance.choice(self.living()).rank, away=self.chance.random() < 0.4)

    def do_mend(self) -> None:
        """Mend the networks."""
        self.sim.mend()

    def do_leave(self) -> None:
        me = self.someone()
        if me is not None and not me.jobs and not me.ending:
            self.sim.leave(me.rank)

    def do_come(self) -> None:
        """Start a rank that was lost, or was never there before."""
        living = {me.rank for me in self.living()}
        gone = [rank for rank in range(self.most) if rank not in living]
        if gone:
            self.sim.connect(self.chance.choice(gone))

    def do_resize(self) -> None:
        """Shrink or grow the world, also beyond its size at the start, whose new ranks come sooner or later."""
        if self.script:
            return
        self.resized = True
        size = self.chance.randint(1, max(2, self.size + GROWTH))
        self.most = max(self.most, size)
        self.sim.say(m.Expect(tuple(range(size))))
        if self.chance.random() < 0.5:
            living = {me.rank for me in self.living()}
            for rank in self.chance.sample(range(size), size):
                if rank not in living and self.chance.random() < 0.7:
                    self.sim.connect(rank)

    def do_restart(self) -> None:
        """Kill the coordinator; a pool's client sends its state to the successor, scripts have none."""
        if self.chance.random() < 0.3:
            self.script = self.script or (
                not self.tracked and not self.resized and self.chance.random() < 0.5
            )
            self.sim.restart(client=not self.script)

    # -- time -----------------------------------------------------------------------------------------------------

    def do_steps(self) -> None:
        for _ in range(self.chance.randint(1, 20)):
            self.step()

    def step(self) -> bool:
        """Play one step of the world, in which ranks ordered to leave can do so."""
        for me in self.sim.ranks:
            if me.told_to_leave and me.alive and not me.ending and not me.jobs and self.chance.random() < 0.3:
                self._say(f"rank {me.rank} leaves as it was told")
                self.sim.leave(me.rank)
                return True
        return self.sim.step()

    def do_settle(self) -> None:
        self.rest()

    def rest(self) -> None:
        """Play all possible events; afterwards only operations that are allowed to wait do so."""
        for _ in range(100_000):
            if not self.step():
                if any(me.told_to_leave and me.alive and not me.ending for me in self.sim.ranks):
                    assert not any(me.jobs for me in self.sim.ranks if me.told_to_leave and me.alive)
                    continue
                break
        else:
            raise AssertionError("it does not come to rest")
        self.sim.check_order()
        for me in self.living():
            self.check_waits(me)
        self.check_deadlock()

    # -- invariants -----------------------------------------------------------------------------------------------

    def members(self, me: SimRank, process_set: int) -> Iterator[SimRank]:
        group = me.state.sets[process_set]
        return (self.sim.by_pid[pid] for pid in me.members[process_set, group.generation])

    def check_waits(self, me: SimRank) -> None:
        """Check that no operation waits for an impossible event, except of the network."""
        if me.away:
            return
        for group in me.state.sets.values():
            for entry in group.pending:
                what = f"rank {me.rank}: {entry.request.kind.label} {entry.name} in {group.id}, generation {entry.generation}"
                assert entry.phase != EXECUTING, f"{what} executes for ever"
                if entry.phase == POSTED and group.withdrawn >= 0:
                    continue  # its user has given up
                if not group.configured:
                    assert group.id == 0, f"{what} waits for a generation that does not come"
                    awaited = self.sim.coordinator.membership.awaited or me.told_to_leave
                    # A rank outside the world that has no cell or was cut off is admitted when no other runs one.
                    waits = not me.cells or self.sim.coordinator.membership.ranks[me.rank].outdated
                    at_the_door = (
                        self.tracked and waits and any(o.cells for o in self.living() if o is not me)
                    )
                    assert awaited or at_the_door, what
                    continue
                assert entry.phase == ANNOUNCED, what
                if entry.request.kind is OpKind.SENDRECV:
                    self.check_message(me, entry, what)
                    continue
                missing = [m for m in self.members(me, group.id) if not _has(m, group.id, entry.name)]
                if entry.request.kind is not OpKind.JOIN:
                    missing = [m for m in missing if not _has(m, group.id, "join.noname")]
                for other in missing:
                    assert other.alive, f"{what} waits for rank {other.rank}, which is gone"
                    assert other.cells or not self.tracked, (
                        f"{what} waits for rank {other.rank}, which is idle"
                    )
                assert missing or entry.request.group, f"{what} waits for nobody"

    def check_message(self, me: SimRank, entry: Entry, what: str) -> None:
        """Check that a message waits only for a rank that may still submit its part."""
        awaited = self.awaited(me, entry)
        assert awaited, f"{what} waits for nobody"
        for other in awaited:
            assert other.alive, f"{what} waits for rank {other.rank}, which is gone"
        assert not self.tracked or any(other.cells for other in awaited), f"{what} waits for idle ranks"

    def awaited(self, me: SimRank, entry: Entry) -> list[SimRank]:
        """Return the ranks that may submit the other part of a message, and have not; none if one has, so that nothing
        is to wait for."""
        number, request = entry.request.process_set, entry.request
        others = [other for other in self.members(me, number) if other is not me]
        if len(request.ranks) > 1:
            others = [other for other in others if other.rank in request.ranks]
            found = any(_has(other, number, entry.name) for other in others)
        else:
            found = any(_sends_to(other, me.rank, request) for other in others)
        return [] if found else [other for other in others if not _has(other, number, "join.noname")]

    def check_deadlock(self) -> None:
        """Check that ranks that wait for each other get an error."""
        stuck: dict[SimRank, list[SimRank]] = {}
        for me in self.living():
            entry = me.blocked
            if entry is None or entry.outcome is not None or entry.request.group or entry.phase != ANNOUNCED:
                continue
            if me.state.failover.paused:
                continue
            if entry.request.kind is OpKind.SENDRECV:
                stuck[me] = self.awaited(me, entry)
                continue
            others = [o for o in self.members(me, entry.request.process_set) if o is not me]
            names = (entry.name,) if entry.request.kind is OpKind.JOIN else (entry.name, "join.noname")
            stuck[me] = [o for o in others if not any(_has(o, entry.request.process_set, n) for n in names)]
        while free := [me for me, missing in stuck.items() if any(o not in stuck for o in missing)]:
            for me in free:
                del stuck[me]
        assert not stuck, f"ranks {[me.rank for me in stuck]} wait for each other"

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let users give up all waits; the remaining group then works, shuts down, and leaves nothing behind."""
        sim = self.sim
        sim.mend()
        for me in self.living():
            if me.state.failover.paused:
                me.state.paused(())
        self.rest()
        assert not sim.coordinator.pauses
        for _ in range(4):
            for me in self.living():
                while me.cells:
                    self.end_cell(me)
                for group in list(me.state.sets.values()):
                    if group.pending and self.chance.random() < 0.7:
                        sim.withdraw(me.rank, group.id)
            self.rest()
        for _ in range(8):
            waiting = [me for me in self.living() if any(e.outcome is None for e in me.entries)]
            if not waiting:
                break
            for me in waiting:
                for group in list(me.state.sets.values()):
                    sim.withdraw(me.rank, group.id)
            self.rest()
        self.check_ended()
        self.work()
        for me in self.chance.sample(self.living(), len(self.living())):
            sim.leave(me.rank)
            self.rest()
        self.check_empty()

    def check_ended(self) -> None:
        """Check that operations given up have failed, except those waiting for a world that awaits others."""
        for me in self.living():
            for entry in me.entries:
                group = me.state.sets.get(entry.request.process_set)
                formed = group is None or group.configured
                held = entry.phase == UNANNOUNCED and not formed and self.sim.coordinator.membership.awaited
                assert entry.outcome is not None or held, (me.rank, entry.name, entry.phase)

    def work(self) -> None:
        """Check that the next collective of the remaining ranks is right, except the one that reports the lost
        ranks."""
        for me in self.living():
            me.blocked = None
        if self.tracked:
            ranks = tuple(me.rank for me in self.living())
            self.sim.start_cell("last", ranks)
            self.rest()
        for _ in range(2):
            world = [me for me in self.living() if 0 in me.state.sets and me.state.sets[0].configured]
            entries = [self.sim.submit_after_loss(me.rank, partial(allreduce, "last")) for me in world]
            self.rest()
            outcomes = [entry.outcome if isinstance(entry, SimEntry) else entry for entry in entries]
            if not any(_tells_who_left(outcome) for outcome in outcomes):
                break
        for outcome in outcomes:
            assert isinstance(outcome, tuple), outcome

    def check_empty(self) -> None:
        state = self.sim.coordinator
        assert not state.membership.ranks
        assert not state.by_peer
        assert len(state.signatures) == 0
        assert set(state.sets.by_id) == {0}, "process sets of nobody"
        assert not state.sets.world.negotiation.pending
        assert not state.sets.world.negotiation.owed
        assert not state.cells.idle
        assert not state.touched
        assert not state.answers
        for me in [*self.sim.ranks, *self.sim.former]:
            for group in me.state.sets.values() if not me.killed else ():
                assert not group.pending
                assert not group.names


def _has(me: SimRank, process_set: int, name: str) -> bool:
    group = me.state.sets.get(process_set)
    return group is not None and any(entry.name == name for entry in group.pending)


def _sends_to(me: SimRank, rank: int, received: Request) -> bool:
    """Whether a message of this rank waits that a receive from any rank of ``rank`` may get."""
    group = me.state.sets.get(received.process_set)
    wanted = (me.rank, rank), received.channel
    return group is not None and any((e.request.ranks, e.request.channel) == wanted for e in group.pending)


def _tells_who_left(outcome: object) -> bool:
    return isinstance(outcome, AbortedError) and outcome.cause.kind is CauseKind.RANK_LEFT


def run_seed(seed: int) -> str:
    """Run one schedule and return its error, or an empty text."""
    try:
        Schedule(seed).run()
    except Exception:  # noqa: BLE001  # any error is reported with its seed
        return traceback.format_exc(limit=-3)
    return ""


def _run_range(play: Play, start: int, stop: int) -> tuple[int, dict[int, str]]:
    failed = {}
    for seed in range(start, stop):
        told = play(seed)
        if told:
            failed[seed] = told
    return stop - start, failed


def command_line(text: str, play: Play, tell: Callable[[int], None]) -> int:
    """Run the schedules that the command line names.

    Args:
        text: Description of the schedules.
        play: Runs the schedule of a seed; returns its error, or an empty text.
        tell: Runs one, and prints its steps.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="run this one, and tell what happens in it")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that long")
    parser.add_argument("--progress", type=Path, help="a file that says how many have been run")
    given = parser.parse_args()
    if given.seed is not None:
        tell(given.seed)
        return 0
    return soak(given.count, given.start, given.jobs, given.seconds, given.progress, play)


def soak(
    count: int, start: int, jobs: int, seconds: float, progress: Path | None, play: Play = run_seed
) -> int:
    """Run many; the number that failed, at most 255."""
    done, failed, spent = 0, {}, 0.0
    if progress is not None and progress.exists():
        known = json.loads(progress.read_text())
        done, failed, spent = known["done"], known["failed"], known["seconds"]
    begin = time.monotonic()
    piece = 500
    with ProcessPoolExecutor(jobs) as pool:
        while done < count and time.monotonic() - begin < seconds:
            starts = range(start + done, min(start + count, start + done + 4 * jobs * piece), piece)
            stops = [min(first + piece, start + count) for first in starts]
            for number, wrong in pool.map(partial(_run_range, play), starts, stops):
                done += number
                failed |= {str(seed): told for seed, told in wrong.items()}
            elapsed = spent + time.monotonic() - begin
            report = {"done": done, "failed": failed, "seconds": round(elapsed, 1)}
            if progress is not None:
                progress.write_text(json.dumps(report, indent=1))
            print(f"{done} schedules, {len(failed)} failed, {done / elapsed:.0f}/s", flush=True)
    last = Counter(told.strip().splitlines()[-1][:150] for told in failed.values())
    for told, number in last.most_common(20):
        example = next(seed for seed, text in failed.items() if text.strip().splitlines()[-1][:150] == told)
        print(f"{number} times, such as seed {example}: {told}")
    return min(len(failed), 255)


if __name__ == "__main__":
    sys.exit(command_line(__doc__ or "", run_seed, lambda seed: Schedule(seed, tell=True).run()))
