"""Whole jobs in random schedules: thousands each time, a million in the soak, and with Hypothesis, which makes them short.

See ``support/simulation/joint_schedules.py`` for the events and the invariants, and for the way to repeat a failed schedule.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.effort import examples
from support.simulation.joint_schedules import ACTIONS, Schedule, run_seed, soak
from support.simulation.joint_simulation import Simulation, allreduce

MILLION = 1_000_000


@pytest.mark.timeout(3600)
def test_thousands_of_schedules() -> None:
    for seed in range(examples(2500)):
        told = run_seed(seed)
        assert not told, f"seed {seed}: {told}"


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_a_million_schedules() -> None:
    """Goes on where it was interrupted: remove the file to start over."""
    progress = Path(os.environ.get("HVDLAB_SCHEDULES", "out/schedules.json"))
    progress.parent.mkdir(parents=True, exist_ok=True)
    assert soak(MILLION, MILLION, os.cpu_count() or 1, float("inf"), progress) == 0


class Job(RuleBasedStateMachine):
    """Job whose events Hypothesis chooses, to find the shortest sequence that breaks an invariant."""

    schedule: Schedule | None = None

    @initialize(seed=st.integers(0, 1 << 32))
    def begin(self, seed: int) -> None:
        self.schedule = Schedule(seed)
        if self.schedule.tracked:
            self.schedule.do_cell()

    @rule(action=st.sampled_from(sorted(set(ACTIONS))), seed=st.integers(0, 1 << 16))
    def act(self, action: str, seed: int) -> None:
        assert self.schedule is not None
        self.schedule.chance.seed(seed)
        self.schedule.sim.random.seed(seed)
        getattr(self.schedule, "do_" + action)()

    @invariant()
    def holds(self) -> None:
        if self.schedule is not None:
            self.schedule.sim.check_order()
            self.schedule.sim.coordinator.validate_state()

    def teardown(self) -> None:
        if self.schedule is not None:
            self.schedule.rest()
            self.schedule.finish()


TestJob = Job.TestCase
TestJob.settings = settings(
    max_examples=examples(150),
    report_multiple_bugs=False,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def reachable(*roots: object) -> int:
    """Return how many objects these keep alive, but for code."""
    seen: dict[int, object] = {}
    todo = list(roots)
    while todo:
        found = todo.pop()
        if id(found) not in seen and not isinstance(found, type | ModuleType | FunctionType):
            seen[id(found)] = found
            todo += gc.get_referents(found)
    return len(seen)


def one_round(simulation: Simulation, number: int) -> None:
    """Run every operation that leaves traces, with names that never come again."""
    cell = f"cell {number}"
    simulation.start_cell(cell, (0, 1, 2))
    simulation.run()
    for rank in range(3):
        for i in range(3):
            simulation.submit(rank, allreduce(f"{number}.{i}"))
        simulation.submit(rank, allreduce("bad", (4 + rank,)))
        simulation.submit(rank, allreduce(f"group {number}", group=(f"group {number}", 1)))
        simulation.submit(rank, Request(OpKind.ADD_PROCESS_SET, f"add {number}", ranks=(0, 1)))
    simulation.run()
    for rank in range(2):
        for id in simulation.ranks[rank].state.sets:
            entry = simulation.submit(rank, allreduce(f"{number}.blocked", process_set=id))
            simulation.ranks[rank].state.report_waiting(entry, 0.5)  # type: ignore[arg-type]  # none is refused
    simulation.run()
    for id in {id for me in simulation.ranks for id in me.state.sets} - {0}:
        for rank in range(3):
            simulation.submit(rank, Request(OpKind.REMOVE_PROCESS_SET, f"remove {id}", root=id))
    simulation.run()
    for rank in range(3):
        simulation.end_cell(rank, f"Error: {number}")
    simulation.withdraw(number % 3)
    simulation.run()
    if number % 3 == 0:
        simulation.restart()
        simulation.run()
    simulation.kill(1)
    simulation.say(m.RankLost(1, simulation.ranks[1].pid, f"death {number}"))
    simulation.run()
    simulation.say(m.Expect((0, 1, 2)))
    assert simulation.connect(1)
    simulation.run()
    simulation.say(m.Expect((0, 1)))
    simulation.run()
    simulation.leave(2)
    simulation.run()
    simulation.say(m.Expect((0, 1, 2)))
    simulation.run()
    assert simulation.connect(2)
    simulation.run()


def test_no_state_grows() -> None:
    """A hundred rounds of all that happens leave no more behind than twenty."""
    simulation = Simulation(3, 1, local_limit=8, tracked=True, options=CoordinatorOptions(reattach=1.0))
    sizes = []
    for number in range(102):
        one_round(simulation, number)
        if number % 3 == 2:
            sizes.append(reachable(simulation.coordinator, *[me.state for me in simulation.ranks]))
    simulation.check_order()
    assert max(sizes[-10:]) <= max(sizes[4:10]) + 20, sizes
