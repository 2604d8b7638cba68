"""Random schedules of elastic jobs whose hosts come and go: the launcher, the coordinator and the training of each rank.

The table of hosts, the supervisor and the launcher's loop are those of ``hvdlab run``, the coordinator and the ranks' states
those of every job, and each rank runs the real loop around elastic training. The source of hosts, the processes, the
connections and the clock are simulated. A seed repeats a schedule that failed::

    python tests/support/simulation/joint_elastic.py --seed 1234              # this one, printed step by step
    python tests/support/simulation/joint_elastic.py --count 100000 --jobs 2 --progress out/elastic.json
"""

from __future__ import annotations

import io
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))  # where the other modules of tests are, for this program


from hvdlab.collectives.context import core_rank, own_number
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.elastic.training_loop import run_fn
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import AbortedError, HvdlabError, ReleasedError, StartError
from hvdlab.collectives.failover.successor import GENERATIONS
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.settings import CONSECUTIVE
from hvdlab.collectives.types import Membership, OpKind, ReduceOp
from hvdlab.launch.host_discovery import HostsAsked, HostsFound, HostSource, HostTick, NotFound
from hvdlab.launch.starter import Ended, Started
from hvdlab.runner import events as e
from hvdlab.runner import job as job_module
from hvdlab.runner.job import JobRun
from hvdlab.runner.job_spec import JobSpec
from hvdlab.runner.output import Writer
from support.fakes.job import IdleStarter, NoSink
from support.simulation.joint_programs import SimEngine, Submitted, TrainingState, Turns, own_engines
from support.simulation.joint_ranks import SimRank
from support.simulation.joint_schedules import command_line
from support.simulation.joint_simulation import Simulation

HOSTS = ("a", "b", "c", "d")
ACTIONS = (
    *["steps"] * 6, "host_comes", "host_comes", "host_goes", "slots_change", "answer", "answer", "answer", "flap", "fail", "hang",
    "kill", "kill", "lose_host", "refuse", "stall_host", "mend", "restart", "cut", "time", "time",
)  # fmt: skip
_CALM = frozenset({"kill", "lose_host", "cut", "restart", "refuse", "stall_host"})
"""What is left out of some schedules: then no rank may go back."""
_FAR = 1000.0
"""Seconds after which a source has certainly been believed, and every host that was put aside is tried again."""


@dataclass(eq=False)
class Process:
    """A rank's process, from the order to start it to the report of its end.

    Attributes:
        rank, host: Which rank it is, and where.
        pid: 0 until it runs.
        me: The rank in the job; ``None`` until it has connected.
        turns: Its program.
        passed: Steps that were committed by all, when it was one of them.
        partners: The processes of the world in which these were committed.
        saved: Steps that it has saved.
        origin: The process with whose state the training began that it took part in last.
        known: Whether the coordinator is certain to know that it trains.
        cut: Whether its network has failed, so that it may be lost.
        signal: One that it was sent and that ends it.
        end: How it ended, until the launcher reports that; its exit code is ``None`` if it is unknown.
    """

    rank: int
    host: str
    pid: int = 0
    me: SimRank | None = None
    turns: Turns | None = None
    engine: SimEngine | None = None
    passed: int = 0
    partners: frozenset[int] = frozenset()
    saved: int = 0
    origin: int = 0
    known: bool = False
    cut: bool = False
    signal: int = 0
    end: tuple[int | None, int, str] | None = None
    watched: list[str] = field(default_factory=list)


class ElasticSchedule:
    """One job from one seed. Raises ``AssertionError`` where something does not hold.

    Args:
        seed: Of everything that is left to chance.
        tell: Whether the actions are printed.
        later: Seconds by which the launcher's first time limits come later: those for its ranks to be started, and for enough hosts.
    """

    def __init__(self, seed: int, *, tell: bool = False, later: float = 0.0) -> None:
        self.chance = chance = random.Random(seed)
        self.tell = tell
        self.least = chance.choice((1, 1, 2, 3))
        self.most = chance.randint(max(2, self.least), 5)
        self.start = chance.randint(self.least, self.most)
        self.numbers = chance.choice((CONSECUTIVE, "stable"))
        self.every = chance.choice((1, 2, 3))
        self.pairs = chance.random() < 0.3
        self.calm = chance.random() < 0.25
        self.actions = [a for a in ACTIONS if not (self.calm and a in _CALM)]
        options = CoordinatorOptions(
            size=None, by_seniority=self.numbers == CONSECUTIVE, fusion_threshold=chance.choice((0, 1 << 20))
        )
        lacking = chance.choice((0.0, 0.0, 0.1))
        self.sim = Simulation(0, chance.getrandbits(32), options=options, validate=0.02, lacking=lacking)
        self.submitted = Submitted(self.sim)
        self.listed: dict[str, int] = {}
        self.down: set[str] = set()
        self.stalled: set[str] = set()
        self.processes: list[Process] = []
        self.pids = 10_000
        self.cut: set[int] = set()
        #: Origins of states that one that was cut off had brought back, by processes that have them.
        self.brought: dict[int, int] = {}
        self.faults: list[str] = []
        self.stop = False
        self.said: list[str] = []
        self.facts: dict[object, object] = {}
        limit = 1000 if self.calm else chance.choice((1000, 1000, 3))
        given = JobSpec(
            ("train",),
            self.start,
            (),
            min_ranks=self.least,
            max_ranks=self.most,
            source=HostSource(),
            source_name="the script",
            reset_limit=limit,
            elastic_timeout=3 * _FAR,
            # Drawn apart, so that the seeds of before stand for the same schedules otherwise.
            join_timeout=random.Random(f"patience of {seed}").choice((None, None, None, 3.0)),
        )
        with self._clock(later):
            self.run_ = JobRun(given, NoSink(), _Err(self))
        self.run_._client = _Client(self.sim)  # type: ignore[assignment]  # stands in for a Client
        self.run_._starter = _Starter(self)
        self.sim.client_hears = self._world_told
        self.sim.client_hears_of_return = lambda told: self.run_._events._on_returned(
            told.rank, told.pid, told.seconds
        )

    def close(self) -> None:
        """End all programs."""
        for process in self.processes:
            if process.turns is not None:
                process.turns.kill()
        self.run_._events.close()

    def say(self, text: str) -> None:
        """Keep a line of the launcher's own."""
        self.said.append(text)
        if self.tell:
            print(f"{self.sim.now:8.2f} -- {text}")

    # -- interface of the launcher's loop ----------------------------------------------------------------------------

    def start_on(self, host: str, ranks: Sequence[int]) -> None:
        """Order ranks to be started."""
        if host in self.down and self.chance.random() < 0.5:
            raise StartError(f"the agent of {host} could not be started")
        taken = {process.rank for process in self.processes}
        assert taken.isdisjoint(ranks), f"ranks {ranks} are started though they run"
        self.processes += [Process(rank, host) for rank in ranks]

    def give_up(self, host: str) -> None:
        """End the agent of a host, and with it the processes there."""
        its = [process for process in self.processes if process.host == host and process.end is None]
        running = [process.rank for process in its if self.run_._supervisor.ranks[process.rank].pid]
        assert not running, f"{host} is given up though ranks {running} run there"
        for process in its:  # one may have begun to run just now
            self.faults.append(f"rank {process.rank} is ended with the agent of {host}")
            self.kill_process(process, (None, 0, f"the agent of {host} was ended"))

    def signal_rank(self, rank: int, number: int) -> None:
        """Send a signal that ends a rank."""
        if any(isinstance(said, m.Release) and rank in said.ranks for said in self.sim.client):
            # The coordinator has been deaf for as long as the launcher waits, and may let the rank in just before it ends.
            self.faults.append(f"rank {rank} is ended before the coordinator has read that it is let go")
        for process in self.processes:
            if process.rank == rank and process.end is None:
                process.signal = number

    def _world_told(self, world: m.World) -> None:
        if not world.restoring:
            told = Membership(
                world.expected,
                world.members,
                world.deaths,
                world.generation,
                world.waiting,
                world.formed,
                kept=world.kept,
            )
            self.run_._events._on_membership(told)

    # -- acts of a rank -----------------------------------------------------------------------------------------------

    def _connect(self, process: Process) -> None:
        engine = process.engine = SimEngine(self.submitted, self.numbers, self.least)
        me = self.sim.connect(process.rank, pid=process.pid, hears=engine.hears)
        if me is None:
            assert self._may_be_unwanted(process), (
                f"rank {process.rank} is refused: {self.sim.coordinator.admission.refusals}"
            )
            process.end = 1, 0, ""
            return
        process.me = me
        process.turns = Turns(engine, lambda: self._main(process))
        engine.attach(me, process.turns)

    def _may_be_unwanted(self, process: Process) -> bool:
        """Whether the launcher lets this rank go, or has given it up and is about to kill it."""
        state = self.run_._supervisor.ranks[process.rank]
        return state.releasing or state.abandoned

    def _main(self, process: Process) -> None:
        engine = process.engine
        assert engine is not None
        code = 0
        try:
            engine.world.wait_complete(30.0, process.rank, 600.0)
            state = TrainingState(_Watcher(self, process), batch=0, groups=(), done=False, origin=process.pid)
            state.register_reset_callbacks([lambda: self._check_number(engine)])
            run_fn(self._train, lambda: None)(state, process)
            engine.shutdown()
        except SystemExit as left:
            code = int(str(left.code))
        except ReleasedError:
            assert self._may_be_unwanted(process), "a rank is let go that nobody wants to go"
            engine.shutdown()
        except HvdlabError as error:
            code = 1
            self._failed(process, error)
        process.end = code, 0, ""

    def _failed(self, process: Process, error: HvdlabError) -> None:
        """A rank's program ends by an error: that may only be so where it never was in the world, or was cut off."""
        me = process.me
        assert me is not None
        unborn = isinstance(error, StartError) and not process.watched and bool(self.faults)
        if not (unborn or process.cut):
            process.watched.append(f"rank {process.rank} failed: {error!r}")
            self.facts["failed"] = process.watched[-1]
        self.faults.append(f"rank {process.rank} ends: {error}")
        culprits = tuple(error.cause.ranks) if isinstance(error, AbortedError) else ()
        if me.alive and me.open and not (me.lost or me.cut or me.away):  # the report is mail
            self.run_._events.post(e.Reported(process.rank, str(error), culprits))
        if me.alive:
            self.sim.kill(process.rank)

    def _train(self, state: TrainingState, process: Process) -> None:
        engine = process.engine
        assert engine is not None
        pair = self._add_pair(engine)
        while not state.done:
            directly = self.chance.random() < 0.8
            total = engine.allreduce("x", 1.0, directly=directly)
            members = self.submitted.members(0, engine.generation)
            assert total == len(members), (total, members)
            if pair and pair in engine.me.state.sets and engine.me.state.sets[pair].index >= 0:
                both = engine.allreduce("pair", 1.0, process_set=pair, directly=False)
                assert both in (1.0, 2.0), both
            last, count = state.groups[-1] if state.groups else ((), 0)
            if last == members:
                state.groups = (*state.groups[:-1], (members, count + 1))
            else:
                state.groups = (*state.groups, (members, 1))
            state.batch += 1
            over = engine.allreduce("over", float(self.stop), ReduceOp.MAX, directly=directly) > 0
            state.done = state.done or over
            if state.done or state.batch % self.every == 0:
                process.saved = state.batch
                state.commit()
            elif state.batch % 5 == 0:
                state.check_host_updates()

    def _add_pair(self, engine: SimEngine) -> int:
        """Add a process set of the first and the last rank, as scripts number them."""
        if not self.pairs or engine.size < 2:
            return 0
        ranks = engine.ranks()
        numbers = (0, len(ranks) - 1) if self.numbers == CONSECUTIVE else (ranks[0], ranks[-1])
        chosen = tuple(sorted(core_rank(number) for number in numbers))
        added = engine.run(Request(OpKind.ADD_PROCESS_SET, f"add {chosen}", ranks=chosen))
        return added.process_set

    def _check_number(self, engine: SimEngine) -> None:
        ranks = engine.ranks()
        if self.numbers == CONSECUTIVE:
            assert own_number() == ranks.index(engine.rank) < engine.size, (engine.rank, ranks)
        else:
            assert own_number() == engine.rank

    def ended(self) -> set[int]:
        """Return the processes that have ended."""
        return {process.pid for process in self.processes if process.end is not None}

    def same(self, what: object, value: object) -> None:
        """Check that all that know of this know the same."""
        known = self.facts.setdefault(what, value)
        assert known == value, f"{what}: {known} and {value}"

    # -- the world's steps ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Play one possible event, of any part of the job; return false if there is none."""
        choices: list[Callable[[], object]] = []
        for process in self.processes:
            self._choices(process, choices)
        if self.run_._events._queue:
            choices += [self._take_news] * 2
        choices += [self._simulate] * (2 + len(choices))
        self.chance.shuffle(choices)
        return any(choice() is not False for choice in choices)

    def _simulate(self) -> bool:
        return self.sim.step(clock=False)

    def _choices(self, process: Process, choices: list[Callable[[], object]]) -> None:
        turns, me = process.turns, process.me
        if process.end is not None:
            choices.append(lambda: self._report(process))
        elif process.signal:
            choices.append(lambda: self.kill_process(process, (0, process.signal, "")))
        elif not process.pid:
            if process.host in self.down:
                choices.append(lambda: self._refuse(process))
            elif process.host not in self.stalled:
                choices.append(lambda: self._spawn(process))
        elif me is None:
            if not self.sim.client:  # the launcher has announced the expected ranks before it starts any
                choices.append(lambda: self._connect(process))
        elif turns is not None:
            engine = process.engine
            assert engine is not None
            if not me.alive and not engine.closed and engine.world._lost is None:
                engine.world.lost("the coordinator refuses this rank")
            if turns.can_go_on:
                choices.append(turns.go_on)

    def _spawn(self, process: Process) -> None:
        self.pids += 1
        process.pid = self.pids
        self.run_.handle(Started(process.rank, process.pid, process.host))

    def _refuse(self, process: Process) -> None:
        process.end = None, 0, f"no route to {process.host}"

    def kill_process(self, process: Process, end: tuple[int | None, int, str]) -> None:
        """End its process."""
        if process.turns is not None:
            process.turns.kill()
        if process.me is not None and process.me.alive:
            assert self.sim.ranks[process.rank] is process.me
            self.sim.kill(process.rank)
        process.end = end

    def _report(self, process: Process) -> None:
        assert process.end is not None
        if process.turns is not None and not process.turns.ended:
            process.turns.kill()
        code, number, reason = process.end
        self.processes.remove(process)
        self.run_.handle(Ended(process.rank, process.pid, reason, code=code, signal=number))

    def _take_news(self) -> None:
        for posted in self.run_._events.take():
            self.run_._take(posted)

    def _pass_time(self, seconds: float) -> None:
        self.sim.pass_time(self.sim.now + seconds)
        self.run_._on_host_event(HostTick())
        self.run_._handle(e.JobTick())

    def _reconnected(self) -> None:
        """Before time passes: let ranks find the coordinator's successor, which would give them up, and ends be reported."""
        for _ in range(20_000):
            there = [me for me in self.sim.ranks if me.alive and not me.away]
            lost = any(me.lost or None in me.from_coordinator for me in there)
            ending = any(process.end is not None for process in self.processes) or self.run_._events._queue
            if not (lost or ending or self.sim.coordinator.restoring.active) or self.run_._finished:
                return
            if not self.step():
                self._pass_time(1.0)
        raise AssertionError(f"ranks do not come to the coordinator's successor: {self._story()}")

    # -- events -----------------------------------------------------------------------------------------------------------

    def do_steps(self) -> None:
        for _ in range(self.chance.randint(1, 60)):
            self.step()
        self.sim.pass_time(self.sim.now + self.chance.choice((0.0, 0.05, 0.3)))

    def do_host_comes(self) -> None:
        self.listed[self.chance.choice(HOSTS)] = self.chance.randint(1, 3)

    def do_host_goes(self) -> None:
        if self.listed:
            del self.listed[self.chance.choice(sorted(self.listed))]

    def do_slots_change(self) -> None:
        if self.listed:
            self.listed[self.chance.choice(sorted(self.listed))] = self.chance.randint(1, 3)

    def do_answer(self, hosts: dict[str, int] | None = None) -> None:
        """Let the source of hosts answer with its list."""
        self._reconnected()
        self.run_._events.post(HostsAsked())
        self.run_._events.post(HostsFound(dict(self.listed if hosts is None else hosts)))
        self._pass_time(1.0)

    def do_flap(self) -> None:
        """Let it change its mind each second."""
        host = self.chance.choice(HOSTS)
        for round_ in range(self.chance.randint(2, 8)):
            self.do_answer({**self.listed, host: 1} if round_ % 2 else self._without(host))
            for _ in range(self.chance.randint(0, 20)):
                self.step()

    def _without(self, host: str) -> dict[str, int]:
        return {name: slots for name, slots in self.listed.items() if name != host}

    def do_fail(self) -> None:
        self.run_._events.post(HostsAsked())
        self.run_._events.post(NotFound("it failed with exit code 3"))

    def do_hang(self) -> None:
        self.run_._events.post(HostsAsked())
        self.do_time()

    def do_kill(self) -> None:
        if alive := [process for process in self.processes if process.pid and process.end is None]:
            process = self.chance.choice(alive)
            self._fault(f"SIGKILL of rank {process.rank}")
            self.kill_process(process, (0, signal.SIGKILL, ""))

    def do_lose_host(self) -> None:
        """End all its processes at once; connections to it are refused."""
        if hosts := sorted({process.host for process in self.processes}):
            host = self.chance.choice(hosts)
            self._fault(f"{host} is lost")
            self.down.add(host)
            for process in self.processes:
                if process.host == host and process.end is None:
                    self.kill_process(process, (None, 0, f"the agent of {host} is gone"))

    def do_refuse(self) -> None:
        self.down.add(self.chance.choice(HOSTS))

    def do_stall_host(self) -> None:
        """Let processes that are started there from now on neither run nor fail."""
        self.stalled.add(self.chance.choice(HOSTS))

    def do_mend(self) -> None:
        self.down.clear()
        self.stalled.clear()
        self.sim.mend()

    def do_restart(self) -> None:
        self._fault("the coordinator is killed")
        self.sim.restart()

    def do_cut(self) -> None:
        cut = [p for p in self.processes if p.me is not None and p.me.alive and p.me.open and p.end is None]
        if cut and not self.sim.coordinator.restoring.active:
            process = self.chance.choice(cut)
            self.cut_off(process, away=self.chance.random() < 0.5)

    def cut_off(self, process: Process, *, away: bool) -> None:
        """Let the network of a rank fail, and stay away until it is mended, or not."""
        self._fault(f"rank {process.rank} is cut off")
        process.cut = True
        self.cut.add(process.pid)
        self.sim.cut(process.rank, away=away)

    def do_time(self) -> None:
        """Let time pass until the launcher has something to do."""
        self._reconnected()
        table = self.run_._table
        assert table is not None
        due = [t for t in (self.run_._supervisor.deadline, table.deadline) if t is not None]
        if due and min(due) < self.sim.now + _FAR:
            self._pass_time(max(0.0, min(due) - self.sim.now))

    def _fault(self, text: str) -> None:
        self.faults.append(text)
        if self.tell:
            print(f"{self.sim.now:8.2f} !! {text}")

    # -- all of it ------------------------------------------------------------------------------------------------------------

    def _clock(self, later: float = 0.0) -> AbstractContextManager[object]:
        """Have the launcher use the simulated clock."""
        return mock.patch.object(job_module, "time", SimpleNamespace(monotonic=lambda: self.sim.now + later))

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Have the job use the simulated clock, and each program its own engine; all programs end afterwards."""
        with ExitStack() as stack:
            stack.enter_context(self._clock())
            stack.enter_context(own_engines())
            stack.callback(self.close)
            yield

    def run(self) -> None:
        """Play random actions; then all hosts are there, all ranks train, and training ends."""
        with self.playing():
            for _ in range(self.chance.randint(5, 60)):
                action = self.chance.choice(self.actions)
                if self.tell:
                    print(f"{self.sim.now:8.2f} {action}")
                getattr(self, "do_" + action)()
                self.check()
                if self.run_._finished:
                    break
            self.finish()

    def check(self) -> None:
        """Check the invariants."""
        assert "failed" not in self.facts, self.facts["failed"]
        self.sim.check_order()

    def finish(self) -> None:
        self.do_mend()
        self.listed = {"a": 2, "b": 2, "c": 2}
        self.until(self.all_train, "not all ranks train together")
        self.stop = True
        self.until(lambda: self.run_._finished, "the job does not end")
        self.check()
        self.check_worlds()
        code = self.run_._done.code
        may_be_silent = self.run_._supervisor._settled or any(
            "there were no hosts for" in text for text in self.said
        )
        assert code == 0 or may_be_silent, (code, self.said[-5:])

    def until(self, condition: Callable[[], bool], text: str) -> None:
        for round_ in range(100):
            for _ in range(100):
                if self.run_._finished or condition():
                    return
                self.step()
            self.check()
            self.do_answer()
            if round_ % 4 == 3:
                self._reconnected()
                self._pass_time(60.0)
        raise AssertionError(f"{text}: {self._story()}")

    def all_train(self) -> bool:
        """Whether there are as many ranks as may be, and all of them are in one world and have committed in it."""
        living = {process.rank for process in self.processes}
        wanted = min(self.most, sum(self.listed.values()))
        if not living or (len(living) < wanted and not self.run_._supervisor._settled):
            return False
        for process in self.processes:
            me = process.me
            group = None if me is None else me.state.sets.get(0)
            if group is None or not group.configured or set(group.ranks) != living or process.end is not None:
                return False
            state, spent = self.run_._supervisor.ranks[process.rank], self.run_._supervisor._settled
            # Once the restarts are spent, no rank comes in place of one that is kept.
            if not process.saved or (state.releasing and not (spent and state.kept)):
                return False
        return True

    def _story(self) -> str:
        ranks = [
            f"rank {p.rank} on {p.host}: pid {p.pid}, end {p.end}, saved {p.saved}, "
            + ("not connected" if p.me is None else _told(p.me))
            for p in self.processes
        ]
        membership = self.sim.coordinator.membership
        elastic = self.sim.coordinator.elastic
        return "\n".join(
            (
                *ranks,
                f"the world is {self.sim.coordinator.sets.world.members} in generation {self.sim.coordinator.sets.world.generation}",
                f"expected {membership.expected}, awaited {membership.awaited}, waiting {membership.waiting}",
                f"leaving {membership.leaving}, training {elastic.training}, ready {elastic.ready}",
                f"least {self.least}, most {self.most}, said {self.said[-6:]}, faults {self.faults[-6:]}",
            )
        )

    def check_worlds(self) -> None:
        """Numbers of ranks: by seniority those that were there come first, in their order; the others are sorted."""
        generations = [generation for number, generation in sorted(self.sim.generations) if number == 0]
        for place, generation in enumerate(generations):
            pids = self.sim.generations[0, generation]
            if self.numbers == CONSECUTIVE:
                before = next(
                    (
                        self.sim.generations[0, e]
                        for e in generations[:place][::-1]
                        if self._heard(e, generation)
                    ),
                    (),
                )
                # One that was cut off and comes back to a successor of the coordinator comes as one that is new.
                stayed = tuple(pid for pid in before if pid in pids and pid not in self.cut)
                assert tuple(pid for pid in pids if pid in stayed) == stayed, (before, pids)
                new = [pid for pid in pids if pid not in before]
                assert pids[len(pids) - len(new) :] == tuple(new) or self.cut.intersection(pids), (
                    before,
                    pids,
                )
            else:
                ranks = [self.sim.by_pid[pid].rank for pid in pids]
                assert ranks == sorted(ranks), ranks

    def _heard(self, before: int, generation: int) -> bool:
        """Whether the coordinator of a generation of the world can know of an earlier one: it began that itself, or a member has heard of it."""
        if before // GENERATIONS == generation // GENERATIONS:
            return True
        return any((0, before) in self.sim.by_pid[pid].members for pid in self.sim.generations[0, generation])


def _told(me: SimRank) -> str:
    """Return a description of a connected rank, for an error."""
    group = me.state.sets.get(0)
    world = (
        "no world"
        if group is None
        else f"world {group.ranks} in generation {group.generation} ({group.configured})"
    )
    waits = [
        f"{x.request.kind.label} {x.name} ({x.phase}) in {x.generation}"
        for x in me.entries
        if x.outcome is None
    ]
    return (
        f"alive {me.alive}, told to leave {me.told_to_leave}, {world}, waits in {waits}, {me.state.failure}"
    )


class _Watcher:
    """Watcher of the state of one rank's training."""

    def __init__(self, schedule: ElasticSchedule, process: Process) -> None:
        self._schedule, self._process = schedule, process

    def synced(self, state: TrainingState) -> None:
        process, engine = self._process, self._process.engine
        assert engine is not None
        process.watched.append("synced")
        came_back = self._schedule.sim.returned | self._schedule.cut
        if process.origin not in (0, state.origin):
            # All that some rank had trained with were lost, and others began from the start before it came back. To a successor of the
            # coordinator, which does not know that it was given up, it comes as all do.
            # Not the processes of the world as it is now: the one that came back may have died since it sent its state. It may also have
            # died before all had it, and another one that has it sends it on.
            brought = {pid for pid, origin in self._schedule.brought.items() if origin == state.origin}
            assert engine.broadcast_among & (came_back | brought), f"rank {process.rank} began from the start"
            self._schedule.brought[process.pid] = state.origin
            process.passed = process.saved = 0
        elif process.pid in came_back and process.partners <= came_back | self._schedule.ended():
            # All that knew of its last steps were cut off or lost, and others went on from an earlier commit before it came back.
            process.passed = process.saved = min(process.passed, state.batch)
        process.origin = state.origin
        assert state.batch >= process.passed, f"{process.passed} steps were committed, {state.batch} are left"
        assert sum(count for _, count in state.groups) == state.batch, "steps were lost, or done twice"
        # No two trainings that began from nothing count as one.
        self._schedule.same(("lineage", engine.lineage.began), state.origin)
        if engine.size > 1:
            self._schedule.same(("state", engine.generation), (state.batch, state.groups))

    def restored(self, state: TrainingState) -> None:
        # A rank that comes just as training begins is let in at once, and the others begin again then.
        early = not self._process.known
        assert self._schedule.faults or early, (
            f"rank {self._process.rank} went back though nothing has failed"
        )

    def agreed(self, state: TrainingState) -> None:
        process, engine = self._process, self._process.engine
        assert engine is not None
        process.passed = process.saved
        process.partners = frozenset(pid for _, _, pid in engine.processes()[1])
        process.known = process.known or engine.size > 1


class _Client:
    """Client of the coordinator, as the launcher has it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def expect(self, ranks: Sequence[int]) -> None:
        self._simulation.say(m.Expect(tuple(ranks)))

    def release(self, ranks: Sequence[int]) -> None:
        self._simulation.say(m.Release(tuple(ranks)))

    def rank_lost(self, rank: int, pid: int, reason: str) -> None:
        self._simulation.say(m.RankLost(rank, pid, reason))


class _Starter(IdleStarter):
    """Starter that records the processes started, signalled and given up."""

    def __init__(self, schedule: ElasticSchedule) -> None:
        self._schedule = schedule

    def start_on(self, host: str, ranks: Sequence[int], size: int) -> None:
        self._schedule.start_on(host, ranks)

    def give_up(self, host: str) -> None:
        self._schedule.give_up(host)

    def signal(self, rank: int, number: int) -> None:
        self._schedule.signal_rank(rank, number)


class _Err(Writer):
    """Writer that hands the launcher's own lines to the schedule."""

    def __init__(self, schedule: ElasticSchedule) -> None:
        super().__init__(io.StringIO())
        self._schedule = schedule

    def say(self, text: str) -> None:
        self._schedule.say(text)


def run_elastic_seed(seed: int, later: float = 0.0) -> str:
    """Run one schedule (see :class:`ElasticSchedule`), and return its error, or an empty text."""
    try:
        ElasticSchedule(seed, later=later).run()
    except Exception:  # noqa: BLE001  # any error is reported with its seed
        return traceback.format_exc(limit=-4)
    return ""


if __name__ == "__main__":
    sys.exit(
        command_line(__doc__ or "", run_elastic_seed, lambda seed: ElasticSchedule(seed, tell=True).run())
    )
