"""A thousand simulated ranks, without a process."""

from __future__ import annotations

import random

import pytest

from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m
from support.simulation.coordinator import Simulation, signature

SIZE = 1000


@pytest.fixture(scope="module")
def sim() -> Simulation:
    """Return a world of a thousand that has been formed; the tests go on with it in order."""
    sim = Simulation(CoordinatorOptions(size=SIZE), validate=False)
    sim.world(*range(SIZE))
    sim.state.validate_state()
    return sim


def test_the_world_is_formed_with_a_bounded_number_of_frames(sim: Simulation) -> None:
    assert all(
        rank.sets[0].generation == 1 and len(rank.sets[0].ranks) == SIZE for rank in sim.ranks.values()
    )
    assert sim.frames < 6 * SIZE  # welcome, configuration and a few reports of the world each


def test_tensors_in_random_order_are_executed_alike_everywhere(sim: Simulation) -> None:
    order = random.Random(5)
    names = [f"grad.{number}" for number in range(20)]
    for rank in sim.ranks.values():
        order.shuffle(names)
        for name in names:
            rank.submit(signature(name))
    sim.drain()
    sim.state.validate_state()
    sim.check_order()
    executed = {name.name for _, batch, _ in sim.ranks[0].executed[0, 1] for name in batch}
    assert executed == set(names)
    assert all(s.outcome is not None for rank in sim.ranks.values() for s in rank.submissions)


def test_a_mismatch_reaches_all(sim: Simulation) -> None:
    for number, rank in sim.ranks.items():
        rank.submit(signature("odd", shape=(5 if number == 700 else 4,)))
    sim.drain()
    told = [
        message for rank in sim.ranks.values() for message in rank.received if isinstance(message, m.Reject)
    ]
    assert len(told) == SIZE
    (parties,) = {reject.parties for reject in told}
    assert [len(party.ranks) for party in parties] == [SIZE - 1, 1]


def test_a_death_reaches_all(sim: Simulation) -> None:
    for number in range(SIZE // 2):
        sim.ranks[number].submit(signature("late"))
    sim.drain()
    sim.kill(SIZE - 1)
    sim.drain()
    sim.state.validate_state()
    for number in range(SIZE - 1):
        rank = sim.ranks[number]
        assert rank.sets[0].generation == 2
        assert not rank.sets[0].pending
    aborts = [message for message in sim.ranks[0].received if isinstance(message, m.Abort)]
    assert len(aborts[-1].pending[0].waited) == SIZE // 2


def test_all_leave_without_a_flood(sim: Simulation) -> None:
    before = sim.frames
    for rank in list(sim.ranks.values()):
        rank.say(m.Bye())
    sim.drain()
    sim.state.validate_state()
    assert sim.frames - before < 6 * SIZE
    assert not sim.state.membership.ranks
    assert len(sim.state.signatures) == 0
