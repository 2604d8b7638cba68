"""The ranks' states against the coordinator's, in random interleavings of all that can happen."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import AbortedError, CauseKind, DuplicateNameError, MismatchError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.effort import examples
from support.simulation.joint_ranks import SimEntry
from support.simulation.joint_simulation import Simulation, allreduce

SEEDS = st.integers(0, 2**32)


def outcomes(simulation: Simulation, name: str) -> list[object]:
    return [e.outcome for me in simulation.ranks for e in me.entries if e.name == name]


@given(seed=SEEDS, size=st.integers(1, 5), count=st.integers(1, 30), limit=st.sampled_from([4, 4096]))
@settings(max_examples=examples(60), deadline=None)
def test_any_order_of_submissions_completes(seed: int, size: int, count: int, limit: int) -> None:
    simulation = Simulation(size, seed, local_limit=limit)
    for round_ in range(2):
        for rank in range(size):
            names = [f"t{i}" for i in range(count)]
            random.Random(seed + rank + round_).shuffle(names)
            for name in names:
                simulation.submit(rank, allreduce(name))
        simulation.run()
        simulation.check()
    for me in simulation.ranks:
        assert all(isinstance(e.outcome, tuple) for e in me.entries)
        assert len(me.entries) == 2 * count


def test_a_mismatch_fails_that_name_only_and_alike() -> None:
    simulation = Simulation(3, 1)
    for rank in range(3):
        simulation.submit(rank, allreduce("good"))
        simulation.submit(rank, allreduce("bad", (4, 5 if rank == 2 else 4)), f"cell [7] line {rank}")
    simulation.run()
    simulation.check()
    bad = outcomes(simulation, "bad")
    assert all(isinstance(o, MismatchError) for o in bad)
    assert len({str(o) for o in bad}) == 1
    assert "cell [7] line 0" in str(bad[0])
    assert "cell [7] line 2" in str(bad[0])
    assert all(isinstance(o, tuple) for o in outcomes(simulation, "good"))


def test_a_duplicate_fails_on_every_rank() -> None:
    simulation = Simulation(3, 2)
    simulation.submit(0, allreduce("x"), "a.py:1")
    simulation.run()
    assert isinstance(simulation.submit(0, allreduce("x"), "a.py:2"), DuplicateNameError)
    simulation.run()
    for rank in (1, 2):
        simulation.submit(rank, allreduce("x"))
    simulation.run()
    simulation.check()
    assert all(isinstance(o, DuplicateNameError) for o in outcomes(simulation, "x"))
    for rank in range(3):
        simulation.submit(rank, allreduce("x"))
    simulation.run()
    assert [type(o) for o in outcomes(simulation, "x")].count(tuple) == 3


@pytest.mark.parametrize("how", ["kill", "withdraw", "tear"])
def test_the_group_works_again_after_an_abort(how: str) -> None:
    simulation = Simulation(3, 3)
    for rank in (0, 1):
        simulation.submit(rank, allreduce("x"))
    simulation.run()
    getattr(simulation, how)(1)
    simulation.run()
    simulation.check()
    aborted = [e.outcome for r in (0, 1) for e in simulation.ranks[r].entries if simulation.ranks[r].alive]
    kind = CauseKind.RANK_DIED if how == "kill" else CauseKind.INTERRUPTED
    assert all(isinstance(o, AbortedError) and o.cause.kind is kind for o in aborted)
    again = [
        simulation.submit_after_loss(me.rank, partial(allreduce, "x")) for me in simulation.ranks if me.alive
    ]
    simulation.run()
    simulation.check()
    assert all(isinstance(e, SimEntry) and isinstance(e.outcome, tuple) for e in again)


def leave_out_rank_2_in_the_middle(seed: int) -> tuple[Simulation, list[SimEntry]]:
    """All execute something large; then the world is resized in order."""
    simulation = Simulation(3, seed)
    entries = [simulation.submit(rank, allreduce("x", (2000,))) for rank in range(3)]
    simulation.run(work=False)
    assert all(me.jobs for me in simulation.ranks)
    simulation.say(m.Expect((0, 1)))
    simulation.run(work=False)
    assert simulation.ranks[0].state.sets[0].generation == 2
    return simulation, entries[:2]  # type: ignore[return-value]  # none was refused


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("how", ["dies", "gives up"])
def test_what_was_begun_with_one_that_is_left_out_does_not_last_for_ever(how: str, seed: int) -> None:
    simulation, entries = leave_out_rank_2_in_the_middle(seed)
    if how == "dies":
        simulation.kill(2)
    else:
        simulation.leave(2)
    simulation.run()
    simulation.check()
    kind = CauseKind.RANK_DIED if how == "dies" else CauseKind.RANK_LEFT
    for entry in entries:
        assert isinstance(entry.outcome, AbortedError)
        assert (entry.outcome.cause.kind, entry.outcome.cause.ranks) == (kind, (2,))
    again = [simulation.submit(rank, allreduce("x", (2000,))) for rank in (0, 1)]
    simulation.run()
    assert all(isinstance(e, SimEntry) and isinstance(e.outcome, tuple) for e in again)


def test_a_plane_that_fails_after_its_generation_is_told() -> None:
    simulation, entries = leave_out_rank_2_in_the_middle(1)
    me = simulation.ranks[0]
    me.jobs.popleft()
    me.broken.add((0, 1))
    me.state.plane_failed(0, 1, "RuntimeError: connection reset")
    simulation.run()
    simulation.check()
    for entry in entries:
        assert isinstance(entry.outcome, AbortedError)
        assert entry.outcome.cause.kind is CauseKind.PLANE_FAILED
        assert "connection reset" in entry.outcome.cause.text


def test_what_is_finished_before_one_is_left_out_is_right() -> None:
    simulation, entries = leave_out_rank_2_in_the_middle(1)
    simulation.run()
    simulation.kill(2)
    simulation.run()
    assert all(isinstance(entry.outcome, tuple) for entry in entries)
    simulation.check()


def wait_for(simulation: Simulation, rank: int, name: str) -> SimEntry:
    entry = simulation.submit(rank, allreduce(name))
    assert isinstance(entry, SimEntry)
    simulation.ranks[rank].state.report_waiting(entry, 0.5)
    simulation.run()
    return entry


def test_a_wait_is_known_in_the_generation_that_follows() -> None:
    simulation = Simulation(2, 1)
    first = wait_for(simulation, 0, "a")
    simulation.say(m.Expect((0, 1, 2)))
    simulation.run()
    simulation.connect(2)
    simulation.run()
    assert first.outcome is None
    entries = [first, *(wait_for(simulation, rank, "b") for rank in (1, 2))]
    for entry in entries:
        assert isinstance(entry.outcome, AbortedError)
        assert entry.outcome.cause.kind is CauseKind.DEADLOCK


def test_who_waits_in_vain_is_told_though_another_goes_on() -> None:
    """Rank 2 has submitted the tensors for which the others wait; they wait for each other."""
    simulation = Simulation(3, 1)
    waiting = [wait_for(simulation, 0, "a"), wait_for(simulation, 1, "b")]
    for name in "ab":
        simulation.submit(2, allreduce(name))
    simulation.run()
    for entry in waiting:
        assert isinstance(entry.outcome, AbortedError)
        assert entry.outcome.cause.kind is CauseKind.DEADLOCK


@given(seed=SEEDS, size=st.integers(1, 4), generations=st.integers(1, 3))
@settings(max_examples=examples(100), deadline=None)
def test_uneven_data(seed: int, size: int, generations: int) -> None:
    """Each rank has a number of batches, and joins; in each batch all tensors that it has, in any order."""
    chance = random.Random(seed)
    simulation = Simulation(size, seed, local_limit=8)
    for _ in range(generations):
        batches = [chance.randint(0, 4) for _ in range(size)]
        for rank in chance.sample(range(size), size):
            for batch in range(batches[rank]):
                for name in chance.sample("abc", 3):
                    simulation.submit(rank, allreduce(f"{name}{batch}"))
                for _ in range(chance.randint(0, 5)):
                    simulation.step()
            simulation.submit(rank, Request(OpKind.JOIN))
        simulation.run()
    simulation.check()
    for me in simulation.ranks:
        assert all(isinstance(entry.outcome, tuple) for entry in me.entries)
        assert not any(group.pending for group in me.state.sets.values())
    orders = [me.order.get((0, 1), []) for me in simulation.ranks]
    assert orders == [orders[0]] * size, "a rank that has joined takes part in everything"


ACTIONS = (
    "submit",
    "submit",
    "submit",
    "submit",
    "steps",
    "steps",
    "withdraw",
    "tear",
    "mismatch",
    "kill",
    "join",
)


@given(seed=SEEDS, size=st.integers(1, 4), count=st.integers(1, 60))
@settings(max_examples=examples(150), deadline=None)
def test_every_handle_ends_whatever_happens(seed: int, size: int, count: int) -> None:
    chance = random.Random(seed)
    simulation = Simulation(size, seed, local_limit=8)
    for _ in range(count):
        rank = chance.randrange(size)
        if not simulation.ranks[rank].alive:
            continue
        action = chance.choice(ACTIONS)
        if action == "steps":
            for _ in range(chance.randint(1, 20)):
                simulation.step()
        elif action == "kill":
            if sum(me.alive for me in simulation.ranks) > 1 and chance.random() < 0.3:
                simulation.kill(rank)
        elif action == "join":
            simulation.submit(rank, Request(OpKind.JOIN))
        elif action in ("withdraw", "tear"):
            getattr(simulation, action)(rank)
        else:
            shape = (4,) if action == "submit" else (chance.randint(4, 5),)
            name = chance.choice([None, "a", "b", "c"])
            simulation.submit(rank, allreduce(name, shape))
    simulation.run()
    # Tensors that only some ranks submit are given up; then nothing may be left.
    for _ in range(3):
        for me in simulation.ranks:
            if me.alive and any(e.outcome is None for e in me.entries):
                simulation.withdraw(me.rank)
        simulation.run()
    simulation.check()
    final = [
        simulation.submit_after_loss(me.rank, partial(allreduce, "final"))
        for me in simulation.ranks
        if me.alive
    ]
    simulation.run()
    assert all(isinstance(e, SimEntry) and isinstance(e.outcome, tuple) for e in final)
