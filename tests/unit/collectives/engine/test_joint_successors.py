"""Ranks, their client and the successor of a coordinator that died, in interleavings that once went wrong."""

from __future__ import annotations

from functools import partial

import pytest

from hvdlab.collectives.coordinator.events import PeerLost
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import AbortedError, CauseKind
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.simulation.joint_ranks import SimEntry
from support.simulation.joint_simulation import Simulation, allreduce

INCARNATION = 1 << 20  # the generations of a successor are above this


def pool(size: int, seed: int) -> Simulation:
    """Return ranks that run a cell."""
    simulation = Simulation(size, seed, tracked=True, options=CoordinatorOptions(reattach=1.0))
    simulation.start_cell("first", tuple(range(size)))
    simulation.run()
    return simulation


def works(simulation: Simulation, *ranks: int) -> None:
    entries = [simulation.submit_after_loss(rank, partial(allreduce, "again")) for rank in ranks]
    simulation.run()
    assert all(isinstance(e, SimEntry) and isinstance(e.outcome, tuple) for e in entries), entries
    simulation.check_order()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("client", [True, False], ids=["a client tells", "ranks alone tell"])
def test_the_group_goes_on_with_a_successor(seed: int, *, client: bool) -> None:
    simulation = Simulation(3, seed)
    lost = simulation.submit(0, allreduce("x"))
    added = [simulation.submit(r, Request(OpKind.ADD_PROCESS_SET, "add", ranks=(0, 2))) for r in range(3)]
    simulation.run()
    simulation.restart(client=client)
    simulation.run()
    assert isinstance(lost, SimEntry)
    assert isinstance(lost.outcome, AbortedError)
    assert lost.outcome.cause.kind is CauseKind.COORDINATOR_LOST
    works(simulation, 0, 1, 2)
    assert {e.outcome for e in added if isinstance(e, SimEntry)} == {("set", 1)}
    for me in simulation.ranks:
        assert me.state.sets[0].generation > INCARNATION
        assert (1 in me.state.sets) == (me.rank != 1)


@pytest.mark.parametrize("seed", range(5))
def test_a_new_process_for_one_that_had_died_is_not_taken_for_dead(seed: int) -> None:
    simulation = pool(3, seed)
    simulation.kill(1)
    simulation.restart()
    simulation.connect(1)
    simulation.run()
    simulation.coordinator.validate_state()
    assert 1 not in simulation.coordinator.membership.deaths
    assert simulation.ranks[1].open


def test_a_cell_that_ends_before_the_client_is_heard_does_not_run_for_ever() -> None:
    simulation = pool(2, 1)
    simulation.restart(client=False)
    for me in simulation.ranks:
        while not me.lost:
            simulation._from_coordinator(me)
        simulation._reconnect(me)
    simulation.read_all()
    simulation.ranks[1].cells.clear()
    simulation.ranks[1].state.end_cell("first", "")
    simulation._flush(simulation.ranks[1])
    simulation.read_all()
    simulation._recall()
    simulation.run()
    waiting = simulation.submit(0, allreduce("x"))
    simulation.run()
    assert isinstance(waiting, SimEntry)
    assert isinstance(waiting.outcome, AbortedError)
    assert waiting.outcome.cause.kind is CauseKind.CELL_ENDED


@pytest.mark.parametrize("seed", range(5))
def test_who_dies_before_the_client_is_heard_is_not_awaited(seed: int) -> None:
    simulation = Simulation(3, seed, options=CoordinatorOptions(size=3, reattach=1.0))
    simulation.restart(client=False)
    simulation.run()
    simulation.kill(2)
    simulation.run()
    simulation._recall()
    (recall, _) = simulation.client
    simulation.client.pop()  # that its process has ended is not known yet
    assert isinstance(recall, m.Recall)
    simulation.run()
    assert not simulation.coordinator.membership.awaited
    works(simulation, 0, 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_client_is_heard_late_and_has_resized_the_world(seed: int) -> None:
    """The successor has made the old world, one rank of which has to leave, and dies instead."""
    simulation = Simulation(3, seed, options=CoordinatorOptions(size=3, reattach=1.0))
    simulation.restart(client=False)
    simulation.run()
    entry = simulation.submit(0, allreduce("x"))
    simulation.run()
    simulation._expected = (0, 1)
    simulation._recall()
    simulation.kill(2)
    simulation.run()
    assert isinstance(entry, SimEntry)
    assert isinstance(entry.outcome, AbortedError)
    works(simulation, 0, 1)


@pytest.mark.parametrize("seed", range(20))
def test_an_interrupted_submission_does_not_take_old_answers_for_new(seed: int) -> None:
    """Ids start over after an interrupt, while answers to the old ones are on their way."""
    simulation = Simulation(2, seed)
    for rank in range(2):
        simulation.submit(rank, Request(OpKind.ADD_PROCESS_SET, "add", ranks=(0,)))
        simulation.submit(rank, allreduce("bad", (4 + rank,)))
        simulation.submit(rank, allreduce("x"))
        simulation._flush(simulation.ranks[rank])
    simulation.read_all()
    me = simulation.ranks[0]
    simulation.tear(0)
    for entry in me.entries:
        assert entry.outcome is None
    while me.from_coordinator and 1 not in me.state.sets:
        simulation._from_coordinator(me)
    new = [simulation.submit(0, allreduce(name, process_set=1)) for name in "cd"]
    simulation.run()
    for submitted in new:
        assert isinstance(submitted, SimEntry)
        assert isinstance(submitted.outcome, tuple)
        assert submitted.outcome[:2] == ("done", 1), submitted.outcome


def test_the_interrupt_of_one_ends_what_others_finish_who_were_left_out() -> None:
    """Ranks 1 and 2 have to leave, and are in the middle of the collective that rank 0 gives up."""
    simulation = Simulation(3, 1)
    entries = [simulation.submit(rank, allreduce("x", (2000,))) for rank in range(3)]
    simulation.run(work=False)
    simulation.say(m.Expect((0,)))
    simulation.run(work=False)
    simulation.withdraw(0)
    simulation.run(work=False)
    simulation.run()
    for entry in entries:
        assert isinstance(entry, SimEntry)
        assert isinstance(entry.outcome, AbortedError)
        assert entry.outcome.cause.kind is CauseKind.INTERRUPTED


@pytest.mark.parametrize("seed", range(5))
def test_who_was_cut_off_from_a_process_set_does_not_wait_for_it(seed: int) -> None:
    """The others have gone on without it, and it comes back to the successor, to the world alone."""
    simulation = Simulation(3, seed)
    for rank in range(3):
        simulation.submit(rank, Request(OpKind.ADD_PROCESS_SET, "add", ranks=(0, 1, 2)))
    simulation.run()
    simulation.ranks[1].cut = True  # it does not notice before it has found the successor
    simulation._carry_out(PeerLost(simulation.ranks[1].peer, "no sign of life"))
    simulation.ranks[1].open = False
    for rank in (0, 2):
        while simulation.ranks[rank].from_coordinator:
            simulation._from_coordinator(simulation.ranks[rank])
    simulation.ranks[1].from_coordinator.append(None)
    simulation.restart(client=False)
    simulation.run()
    assert [me.state.sets[0].ranks for me in simulation.ranks] == [(0, 1, 2)] * 3 or not simulation.ranks[
        1
    ].alive
    assert 1 not in simulation.ranks[1].state.sets
    assert simulation.ranks[0].state.sets[1].ranks == (0, 2)
