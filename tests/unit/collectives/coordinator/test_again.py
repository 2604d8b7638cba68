"""Leaving the world and coming back to it: a returning rank waits until the old world has gone as a whole."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.coordinator.events import PeerConnected, Received
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.effort import examples
from support.simulation.coordinator import SimulatedRank, Simulation, signature


def formed(size: int = 3) -> Simulation:
    sim = Simulation(CoordinatorOptions(size=size))
    sim.connect_client()
    sim.world(*range(size))
    return sim


def again(sim: Simulation, rank: int) -> SimulatedRank:
    """Shut down, and back at once."""
    if rank in sim.ranks:
        sim.leave(rank)
        sim.drain()
    back = sim.connect(rank)
    sim.drain()
    return back


def configured(rank: SimulatedRank) -> list[m.Configure]:
    return [x for x in rank.received if isinstance(x, m.Configure) and x.process_set == 0]


def aborts(rank: SimulatedRank) -> list[m.Abort]:
    return [x for x in rank.received if isinstance(x, m.Abort)]


def test_the_new_world_is_formed_when_nobody_of_the_old_one_is_left() -> None:
    sim = formed()
    old = sim.ranks[2]
    first, second = again(sim, 0), again(sim, 1)
    assert configured(first) == configured(second) == []
    assert aborts(old) == []
    third = again(sim, 2)
    for rank in (first, second, third):
        assert [member.rank for member in configured(rank)[0].members] == [0, 1, 2]
        rank.submit(signature("x"))
    sim.drain()
    for rank in (first, second, third):
        assert isinstance(rank.submissions[0].outcome, m.Execute)
        assert aborts(rank) == []


def test_an_abort_of_the_old_world_does_not_bring_the_one_who_is_back_into_it() -> None:
    sim = formed()
    back = again(sim, 0)
    sim.ranks[1].submit(signature("x"))  # finds that rank 0 has left
    sim.drain()
    assert [x.kind for x in aborts(sim.ranks[1])] == ["rank_left"]
    assert [member.rank for member in configured(sim.ranks[1])[-1].members] == [1, 2]
    assert configured(back) == []
    for rank in (1, 2):
        sim.ranks[rank].submit(signature("y"))
    sim.drain()
    assert isinstance(sim.ranks[1].submissions[-1].outcome, m.Execute)  # they go on by themselves
    again(sim, 1)
    again(sim, 2)
    assert [member.rank for member in configured(back)[0].members] == [0, 1, 2]


def test_goodbye_and_return_in_one_round_with_others_waiting() -> None:
    sim = formed()
    sim.ranks[1].submit(signature("x"))
    sim.drain()
    old = sim.ranks[0]
    back = SimulatedRank(0, 77, tracked=False)
    sim._by_peer[77] = back
    hello = m.Hello(m.PROTOCOL_VERSION, "", "rank", 0, "host", 1000, planes=("shm",))
    sim.handle(Received(old.peer, m.Bye()), PeerConnected(77, hello))
    sim.ranks[0] = back
    sim.drain()
    assert configured(back) == []
    assert [x.kind for x in aborts(sim.ranks[1])] == ["rank_left"]
    again(sim, 2)
    again(sim, 1)
    assert [member.rank for member in configured(back)[0].members] == [0, 1, 2]


def test_all_say_goodbye_and_return_in_one_round() -> None:
    sim = formed(2)
    olds = [sim.ranks[0], sim.ranks[1]]
    sim.ranks[1].submit(signature("x"))
    sim.drain()
    backs = [SimulatedRank(rank, 70 + rank, tracked=False) for rank in range(2)]
    events: list[Received | PeerConnected] = []
    for old, back in zip(olds, backs, strict=True):
        sim._by_peer[back.peer] = back
        hello = m.Hello(m.PROTOCOL_VERSION, "", "rank", back.rank, "host", 1000, planes=("shm",))
        events += [Received(old.peer, m.Bye()), PeerConnected(back.peer, hello)]
    sim.handle(*events)
    sim.ranks = {back.rank: back for back in backs}
    sim.drain()
    assert [len(configured(back)) for back in backs] == [1, 1]


def test_process_sets_do_not_survive() -> None:
    sim = formed(2)
    for rank in range(2):
        sim.ranks[rank].submit(signature("add", OpKind.ADD_PROCESS_SET, shape=(), ranks=(0, 1)))
    sim.drain()
    assert len(sim.state.sets.by_id) >= 1
    again(sim, 0)
    again(sim, 1)
    assert set(sim.state.sets.by_id) == {0}


def test_a_world_that_lost_a_rank_is_made_anew_without_it() -> None:
    sim = formed()
    sim.kill(1)
    sim.drain()
    again(sim, 0)
    back = again(sim, 2)
    assert [member.rank for member in configured(back)[-1].members] == [0, 2]
    world = sim.state.membership.world(1, ())
    assert [(death.rank, death.admitted) for death in world.deaths] == [(1, True)]


def test_who_dies_while_it_waits_for_the_new_world_is_told_of() -> None:
    sim = formed()
    again(sim, 1)
    sim.kill(1)
    sim.drain()
    (death,) = sim.state.membership.world(1, ()).deaths
    assert (death.rank, death.admitted) == (1, False)


@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), rounds=st.integers(1, 5))
@settings(max_examples=examples(100), deadline=None)
def test_in_any_interleaving_each_world_is_whole(seed: int, size: int, rounds: int) -> None:
    """Every rank runs: a collective, shut down, back; ranks wait for each other only in the collective."""
    chance = random.Random(seed)
    sim = formed(size)
    done = dict.fromkeys(range(size), 0)
    asked: dict[int, bool] = dict.fromkeys(range(size), False)
    while any(count < rounds for count in done.values()):
        moves: list[tuple[str, int]] = []
        for rank in range(size):
            me = sim.ranks.get(rank)
            if me is None:
                moves.append(("connect", rank))
                continue
            moves += [("out", rank)] if me.outgoing else []
            moves += [("in", rank)] if me.incoming else []
            if not me.left and done[rank] < rounds and 0 in me.sets:
                assert [*me.sets[0].ranks] == [*range(size)]
                if not asked[rank]:
                    moves.append(("submit", rank))
                elif me.submissions[0].outcome is not None:
                    moves.append(("leave", rank))
        action, rank = chance.choice(moves)
        me = sim.ranks.get(rank)
        if action == "connect":
            sim.connect(rank)
        elif me is not None and action == "out":
            sim.deliver_from(me)
        elif me is not None and action == "in":
            sim.deliver_to(me)
        elif me is not None and action == "submit":
            me.submit(signature(f"x{done[rank]}"))
            asked[rank] = True
        elif me is not None:
            assert isinstance(me.submissions[0].outcome, m.Execute), me.submissions[0].outcome
            sim.leave(rank)
            asked[rank], done[rank] = False, done[rank] + 1
