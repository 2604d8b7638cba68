"""The coordinator's part: the ranks that wait for admission, and the time at which the world begins again."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.coordinator.events import PeerConnected, PeerLost, Tick
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.effort import examples
from support.simulation.coordinator import SimulatedRank, Simulation, hello, signature

M = TypeVar("M", bound=m.Message)


def training(size: int = 3, *, tracked: bool = False) -> Simulation:
    """Return ranks in the middle of elastic training; in a pool all run a cell."""
    sim = Simulation(CoordinatorOptions(size=size))
    sim.connect_client()
    sim.world(*range(size), tracked=tracked)
    if tracked:
        sim.client_says(m.CellStarted("cell", tuple(range(size))))
    say(sim, m.Elastic(True), *range(size))
    sim.to_client.clear()
    return sim


def say(sim: Simulation, message: m.Message, *ranks: int) -> None:
    for rank in ranks:
        sim.ranks[rank].say(message)
    sim.drain()


def regroup(sim: Simulation, *ranks: int, at_least: int = 1, ticket: int = 1) -> None:
    say(sim, m.Regroup(ticket, at_least, "it failed"), *ranks)


def all_of(rank: SimulatedRank, kind: type[M]) -> list[M]:
    return [message for message in rank.received if isinstance(message, kind)]


def world_of(sim: Simulation, rank: int) -> tuple[int, ...]:
    return sim.ranks[rank].sets[0].ranks


def test_a_newcomer_waits_until_all_have_regrouped() -> None:
    sim = training()
    sim.kill(1)
    regroup(sim, 0, 2)
    assert world_of(sim, 0) == world_of(sim, 2) == (0, 2)
    back = sim.connect(1)
    sim.drain()
    assert back.sets == {}
    assert all_of(sim.ranks[0], m.World)[-1].waiting == (1,)
    assert all_of(back, m.World)[-1].waiting == (1,)
    regroup(sim, 0, ticket=2)
    assert back.sets == {}
    regroup(sim, 2, ticket=2)
    assert world_of(sim, 0) == world_of(sim, 1) == world_of(sim, 2) == (0, 1, 2)
    for rank in (0, 2):
        kinds = [type(x) for x in sim.ranks[rank].received]
        assert kinds[-1] is m.Regrouped
        assert all_of(sim.ranks[rank], m.World)[-1].waiting == ()
        assert [answer.ticket for answer in all_of(sim.ranks[rank], m.Regrouped)] == [1, 2]
    assert all_of(back, m.Regrouped) == []


def test_a_newcomer_does_not_wait_for_another_that_is_still_on_its_way() -> None:
    sim = training(4)
    for rank in (1, 2):
        sim.kill(rank)
    regroup(sim, 0, 3)
    sim.client_says(m.Expect((0, 1, 2, 3)))
    back = sim.connect(1)
    sim.drain()
    assert all_of(back, m.World)[-1].waiting == (1,)
    regroup(sim, 0, 3, ticket=2)
    assert back.sets[0].ranks == (0, 1, 3)
    assert all_of(sim.ranks[0], m.World)[-1].waiting == ()


def test_a_rank_that_was_not_there_at_the_start_comes_in_like_one_that_comes_back() -> None:
    sim = training()
    sim.client_says(m.Expect((0, 1, 2, 3)))
    new = sim.connect(3)
    sim.drain()
    assert new.sets == {}
    assert all_of(sim.ranks[0], m.World)[-1].waiting == (3,)
    regroup(sim, 0, 1, 2)
    assert new.sets[0].ranks == (0, 1, 2, 3)


def test_without_newcomers_the_world_begins_anew_all_the_same() -> None:
    sim = training()
    generation = sim.ranks[0].sets[0].generation
    regroup(sim, 0, 1, 2)
    assert sim.ranks[0].sets[0].generation == generation + 1
    submitted = [sim.ranks[rank].submit(signature("x")) for rank in range(3)]
    sim.drain()
    assert all(isinstance(s.outcome, m.Execute) for s in submitted)


@pytest.mark.parametrize("before", [True, False])
def test_who_waits_for_a_rank_that_has_regrouped_is_told(before: bool) -> None:
    sim = training()
    if not before:
        regroup(sim, 1)
    submitted = [sim.ranks[rank].submit(signature("x")) for rank in (0, 2)]
    sim.drain()
    if before:
        assert [s.outcome for s in submitted] == [None, None]
        regroup(sim, 1)
    for s in submitted:
        assert isinstance(s.outcome, m.Abort)
        assert s.outcome.text == "rank 1 went back to its last commit (it failed)"
        assert (s.outcome.kind, s.outcome.ranks) == ("withdrawn", (1,))


def test_a_collective_of_others_goes_on_while_a_rank_has_regrouped() -> None:
    sim = training()
    for rank in range(3):
        sim.ranks[rank].submit(signature("new", OpKind.ADD_PROCESS_SET, ranks=(0, 2)))
    sim.drain()
    (pair,) = [id for id in sim.ranks[0].sets if id]
    regroup(sim, 1)
    submitted = [sim.ranks[rank].submit(signature("x"), pair) for rank in (0, 2)]
    sim.drain()
    assert all(isinstance(s.outcome, m.Execute) for s in submitted)


def test_too_few_wait_for_more() -> None:
    sim = training()
    sim.kill(1)
    regroup(sim, 0, 2, at_least=3)
    assert all_of(sim.ranks[0], m.Regrouped) == []
    sim.connect(1)
    sim.drain()
    assert world_of(sim, 1) == (0, 1, 2)
    assert all_of(sim.ranks[2], m.Regrouped)


def test_all_hear_that_training_has_begun() -> None:
    sim = Simulation(CoordinatorOptions(size=2))
    sim.world(0, 1)
    sim.drain()
    say(sim, m.Elastic(True), 0)
    sim.now += 1.0
    sim.handle(Tick())
    sim.drain()
    assert all_of(sim.ranks[1], m.World)[-1].training


def test_a_rank_that_ends_its_training_is_not_waited_for() -> None:
    sim = training()
    regroup(sim, 0, 1)
    assert all_of(sim.ranks[0], m.Regrouped) == []
    say(sim, m.Elastic(False), 2)
    assert all_of(sim.ranks[0], m.Regrouped)
    assert world_of(sim, 2) == (0, 1, 2)


def test_a_rank_that_dies_is_not_waited_for() -> None:
    sim = training()
    regroup(sim, 0, 1)
    sim.kill(2)
    sim.drain()
    assert world_of(sim, 0) == (0, 1)
    assert all_of(sim.ranks[0], m.Regrouped)


def test_a_newcomer_that_dies_at_the_door_is_forgotten() -> None:
    sim = training()
    sim.kill(1)
    sim.connect(1)
    sim.drain()
    sim.kill(1)
    sim.drain()
    assert all_of(sim.ranks[0], m.World)[-1].waiting == ()
    regroup(sim, 0, 2)
    assert world_of(sim, 0) == (0, 2)


def test_after_the_training_of_a_script_newcomers_wait_until_its_ranks_leave() -> None:
    sim = training()
    sim.kill(1)
    regroup(sim, 0, 2)
    back = sim.connect(1)
    say(sim, m.Elastic(False), 0, 2)
    assert back.sets == {}
    for rank in (0, 2):
        sim.leave(rank)
    sim.drain()
    assert 0 not in back.sets or back.sets[0].ranks == (1,)


def test_in_a_pool_newcomers_with_a_cell_come_in_after_the_training() -> None:
    sim = training(tracked=True)
    sim.kill(1)
    regroup(sim, 0, 2)
    back = sim.connect(1, tracked=True)
    sim.drain()
    assert all_of(sim.ranks[0], m.World)[-1].waiting == ()  # it does nothing that would need the others
    sim.client_says(m.CellStarted("again", (1,)))
    sim.drain()
    assert all_of(sim.ranks[0], m.World)[-1].waiting == (1,)
    say(sim, m.Elastic(False), 0, 2)
    assert back.sets[0].ranks == (0, 1, 2)


# -- any order --------------------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["kill", "back", "fail", "submit", "deliver", "hear", "end"]), st.integers(0, 3)
    ),
    max_size=40,
)


@settings(max_examples=examples(200), deadline=None)
@given(ACTIONS)
def test_in_any_order_all_that_live_come_together(actions: list[tuple[str, int]]) -> None:
    sim = Simulation(CoordinatorOptions(size=4))
    sim.connect_client()
    sim.world(*range(4))
    tickets: dict[SimulatedRank, int] = {}
    trains: dict[SimulatedRank, bool] = {}
    for member in sim.ranks.values():
        member.say(m.Elastic(True))
        trains[member] = True
    for action, number in actions:
        rank = sim.ranks.get(number)
        if rank is None:
            if action == "back":
                sim.connect(number)
            continue
        answered = len(all_of(rank, m.Regrouped)) == tickets.get(rank, 0)
        if action == "kill" and len(sim.ranks) > 1:
            sim.kill(number)
        elif action == "fail" and trains.get(rank) and answered:
            tickets[rank] = tickets.get(rank, 0) + 1
            rank.say(m.Regroup(tickets[rank], 1, ""))
        elif action == "submit" and answered and 0 in rank.sets and not rank.in_flight("x"):
            rank.submit(signature("x"))
        elif action == "deliver" and rank.outgoing and rank.peer in sim._by_peer:
            sim.deliver_from(rank)
        elif action == "hear" and rank.incoming:
            sim.deliver_to(rank)
        elif action == "end" and trains.get(rank) and answered and len(trains) > 1:
            rank.say(m.Elastic(False))
            trains[rank] = False
    sim.drain()
    # Now every rank that trains stops; none may be left waiting for an answer.
    for member in sim.ranks.values():
        if trains.get(member) and len(all_of(member, m.Regrouped)) == tickets.get(member, 0):
            tickets[member] = tickets.get(member, 0) + 1
            member.say(m.Regroup(tickets[member], 1, ""))
    sim.drain()
    for rank in sim.ranks.values():
        assert [answer.ticket for answer in all_of(rank, m.Regrouped)] == list(
            range(1, tickets.get(rank, 0) + 1)
        )
    inside = [rank for rank in sim.ranks.values() if 0 in rank.sets]
    assert len({(rank.sets[0].generation, rank.sets[0].ranks) for rank in inside}) <= 1
    sim.check_order()


# -- ranks that are let go ----------------------------------------------------------------------------------------------


def test_a_rank_is_let_go_once_all_have_regrouped() -> None:
    sim = training()
    sim.client_says(m.Release((1,)))
    sim.drain()
    assert [all_of(sim.ranks[rank], m.World)[-1].leaving for rank in range(3)] == [(1,)] * 3
    assert not all_of(sim.ranks[1], m.Leave)
    regroup(sim, 0, 1)
    assert not all_of(sim.ranks[1], m.Leave)
    regroup(sim, 2)
    assert all_of(sim.ranks[1], m.Leave)
    assert world_of(sim, 0) == world_of(sim, 2) == (0, 2)
    assert [len(all_of(sim.ranks[rank], m.Regrouped)) for rank in range(3)] == [1, 0, 1]
    assert [len(all_of(sim.ranks[rank], m.Abort)) for rank in range(3)] == [0, 0, 0]
    assert all_of(sim.ranks[0], m.World)[-1].leaving == ()
    assert all_of(sim.ranks[0], m.World)[-1].expected == (0, 2)
    sim.kill(1)  # its end is no death
    assert all_of(sim.ranks[0], m.World)[-1].deaths == ()


def test_one_comes_and_another_leaves_at_the_same_commit() -> None:
    sim = training()
    sim.client_says(m.Expect((0, 1, 2, 3)))
    new = sim.connect(3)
    sim.drain()
    sim.client_says(m.Release((0,)))
    sim.drain()
    regroup(sim, 0, 1, 2, at_least=3)
    assert world_of(sim, 1) == new.sets[0].ranks == (1, 2, 3)
    assert all_of(sim.ranks[0], m.Leave)


def test_ranks_that_are_needed_train_on_until_others_have_come() -> None:
    sim = training()
    sim.client_says(m.Release((0, 1)))
    sim.drain()
    regroup(sim, 0, 1, 2, at_least=2)
    assert all_of(sim.ranks[1], m.Leave)  # one can be spared
    assert not all_of(sim.ranks[0], m.Leave)
    assert [len(all_of(sim.ranks[rank], m.Regrouped)) for rank in (0, 2)] == [1, 1]
    assert world_of(sim, 0) == world_of(sim, 2) == (0, 2)
    assert all_of(sim.ranks[2], m.World)[-1].leaving == ()  # or they would stop at each commit
    sim.client_says(m.Expect((0, 2, 3)))
    new = sim.connect(3)
    sim.drain()
    assert (all_of(sim.ranks[2], m.World)[-1].leaving, all_of(sim.ranks[2], m.World)[-1].waiting) == (
        (0,),
        (3,),
    )
    regroup(sim, 0, 2, at_least=2, ticket=2)
    assert all_of(sim.ranks[0], m.Leave)
    assert world_of(sim, 2) == new.sets[0].ranks == (2, 3)


def test_one_that_is_needed_and_dies_is_lost_like_any_other() -> None:
    sim = training()
    sim.client_says(m.Release((0,)))
    sim.drain()
    regroup(sim, 0, 1, 2, at_least=3)
    assert sim.state.membership.kept == {0}
    sim.kill(0)
    assert sim.state.membership.deaths.keys() == {0}
    assert not sim.state.membership.kept


def test_without_training_ranks_are_let_go_at_once() -> None:
    sim = Simulation(CoordinatorOptions(size=3))
    sim.connect_client()
    sim.world(0, 1, 2)
    sim.client_says(m.Release((2, 7)))
    sim.drain()
    assert all_of(sim.ranks[2], m.Leave)
    assert world_of(sim, 0) == (0, 1)


def test_one_that_waits_to_enter_is_let_go_at_once() -> None:
    sim = training()
    sim.client_says(m.Expect((0, 1, 2, 3)))
    new = sim.connect(3)
    sim.drain()
    sim.client_says(m.Release((3,)))
    sim.drain()
    assert all_of(new, m.Leave)
    assert world_of(sim, 0) == (0, 1, 2)


@pytest.mark.parametrize("before", [True, False])
def test_what_a_rank_submits_that_was_let_go_fails(before: bool) -> None:
    """It waits for no rank: the others have gone on without it, and their generations are not its own."""
    sim = Simulation(CoordinatorOptions(size=3))
    sim.connect_client()
    sim.world(*range(3))
    for rank in range(3):
        sim.ranks[rank].submit(signature("new", OpKind.ADD_PROCESS_SET, ranks=(1, 2)))
    sim.drain()
    (pair,) = [id for id in sim.ranks[1].sets if id]
    if before:  # it is on its way when the rank is let go
        submitted = [sim.ranks[1].submit(signature("x"), where) for where in (0, pair)]
    sim.client_says(m.Release((1, 2)))
    if not before:
        sim.drain()
        submitted = [sim.ranks[1].submit(signature("x"), where) for where in (0, pair)]
    alone = sim.ranks[0].submit(signature("x"))
    sim.drain()
    for each in submitted:
        assert isinstance(each.outcome, m.Cancelled)
        assert each.outcome.text == "rank 1 was let go, and the others go on without it"
        assert each.outcome.pending.sites == ("line 1",)
    assert isinstance(alone.outcome, m.Execute)
    assert world_of(sim, 0) == (0,)


def test_one_that_dies_before_it_is_let_go_is_lost_like_any_other() -> None:
    sim = training()
    sim.client_says(m.Release((1,)))
    sim.drain()
    sim.kill(1)
    regroup(sim, 0, 2)
    assert world_of(sim, 0) == (0, 2)
    assert all_of(sim.ranks[0], m.World)[-1].leaving == ()


# -- positions by seniority ---------------------------------------------------------------------------------------------


def by_seniority(size: int = 4) -> Simulation:
    """Return ranks in elastic training that have consecutive numbers."""
    sim = Simulation(CoordinatorOptions(size=size, by_seniority=True))
    sim.connect_client()
    sim.world(*range(size))
    say(sim, m.Elastic(True), *range(size))
    return sim


def test_one_in_the_place_of_a_lost_rank_comes_behind_those_that_were_there() -> None:
    sim = by_seniority()
    sim.kill(0)
    regroup(sim, 1, 2, 3)
    assert world_of(sim, 1) == (1, 2, 3)
    sim.connect(0)
    sim.drain()
    regroup(sim, 1, 2, 3, ticket=2)
    assert [world_of(sim, rank) for rank in range(4)] == [(1, 2, 3, 0)] * 4
    say(sim, m.Elastic(True), 0)
    sim.kill(2)
    sim.client_says(m.Expect((0, 1, 2, 3, 4)))
    for rank in (4, 2):
        sim.connect(rank)
    sim.drain()
    regroup(sim, 1, 3, 0, ticket=3)
    assert world_of(sim, 0) == (1, 3, 0, 2, 4)
    # A process set has the same order.
    for rank in (1, 3, 0, 2, 4):
        sim.ranks[rank].submit(signature("new", OpKind.ADD_PROCESS_SET, ranks=(0, 2, 3)))
    sim.drain()
    (added,) = [id for id in sim.ranks[0].sets if id]
    assert sim.ranks[3].sets[added].ranks == (3, 0, 2)
    # Messages to clients are in the order of the numbers that are shown.
    assert sim.to_client[-1].formed == (0, 1, 2, 3, 4)  # type: ignore[attr-defined]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=12))
def test_positions_of_ranks_that_stay_never_change_among_each_other(changes: list[tuple[bool, int]]) -> None:
    sim, ticket = by_seniority(), 0
    order = list(range(4))
    for kills, number in changes:
        if kills and number in sim.ranks and len(sim.ranks) > 1:
            sim.kill(number)
            order.remove(number)
        elif not kills and number not in sim.ranks:
            sim.connect(number)
            order.append(number)
        else:
            continue
        sim.drain()
        ticket += 1
        inside = [rank for rank, its in sim.ranks.items() if 0 in its.sets]
        say(sim, m.Elastic(True), *inside)
        say(sim, m.Regroup(ticket, 1, ""), *inside)
        assert [world_of(sim, rank) for rank in sim.ranks] == [tuple(order)] * len(order)


# -- ranks that were cut off ------------------------------------------------------------------------------------------


def come_back(
    sim: Simulation, lost: SimulatedRank, *, training: bool = True, **fields: object
) -> SimulatedRank:
    """Reconnect the process of a rank whose connection was lost; it reports its state."""
    again = {"pid": 1000 * lost.peer + lost.rank, "incarnation": 0, "returns": True} | fields
    back = sim.connect(lost.rank, tracked=lost.tracked, **again)
    if back.peer in sim._by_peer:
        back.say(m.Resume((m.KnownSet(0, 1, (0, 1, 2)),), (0, 1, 2), elastic=training))
    sim.drain()
    return back


def refusal(rank: SimulatedRank) -> m.Refused:
    while rank.incoming:
        rank.take(rank.incoming.popleft())
    (refused,) = all_of(rank, m.Refused)
    return refused


def cut_off(sim: Simulation, rank: int = 1, silence: float = 30.0) -> SimulatedRank:
    """Let the coordinator give a rank up, and the others begin again without it."""
    lost = sim.ranks.pop(rank)
    sim.gone.append(lost)
    del sim._by_peer[lost.peer]
    sim.handle(PeerLost(lost.peer, "no sign of life for 30 s", silence))
    regroup(sim, *sim.ranks)
    return lost


def test_a_rank_that_was_cut_off_comes_back_and_waits_to_be_let_in() -> None:
    sim = training()
    lost = cut_off(sim)
    assert world_of(sim, 0) == (0, 2)
    sim.tick(12.0)
    back = come_back(sim, lost, training=False)
    assert [type(message) for message in back.received[:2]] == [m.Welcome, m.Outdated]
    assert "the others have gone on without it" in all_of(back, m.Outdated)[0].text
    (returned,) = [message for message in sim.to_client if isinstance(message, m.Returned)]
    assert (returned.rank, returned.seconds) == (1, pytest.approx(42.0))
    regroup(sim, 1)
    assert back.sets == {}
    assert all_of(sim.ranks[0], m.World)[-1].waiting == (1,)
    regroup(sim, 0, 2, ticket=2)
    assert world_of(sim, 0) == world_of(sim, 1) == (0, 1, 2)
    assert [answer.ticket for answer in all_of(back, m.Regrouped)] == [1]
    assert not sim.state.membership.ranks[1].outdated


def test_one_in_the_middle_of_its_own_training_is_not_let_in_before_it_has_gone_back() -> None:
    """The others would begin again twice: once with it, and once more when it fails."""
    sim = training()
    back = come_back(sim, cut_off(sim))
    regroup(sim, 0, 2, ticket=2)
    assert back.sets == {}
    assert world_of(sim, 0) == (0, 2)
    regroup(sim, 1)
    assert back.sets == {}
    regroup(sim, 0, 2, ticket=3)
    assert world_of(sim, 0) == world_of(sim, 1) == (0, 1, 2)


def test_it_is_no_member_if_it_comes_back_in_the_moment_of_its_loss() -> None:
    sim = training()
    lost = sim.ranks.pop(1)
    back = SimulatedRank(1, sim._next_peer, tracked=False)
    sim.ranks[1] = sim._by_peer[back.peer] = back
    again = hello(1, pid=1000 * lost.peer + 1, incarnation=0, returns=True)
    sim.handle(PeerLost(lost.peer, "its connection ended"), PeerConnected(back.peer, again))
    sim.drain()
    assert world_of(sim, 0) == (0, 2)
    assert back.sets == {}


def test_its_number_may_be_taken() -> None:
    sim = training()
    lost = cut_off(sim)
    sim.connect(1)
    refused = refusal(come_back(sim, lost))
    assert "already connected" in refused.reason
    assert not refused.again


def test_it_is_not_let_in_after_another_process_with_its_number() -> None:
    sim = training()
    lost = cut_off(sim)
    sim.connect(1)
    sim.drain()
    sim.kill(1)
    assert "gone on without it" in refusal(come_back(sim, lost)).reason


def test_the_launcher_may_have_given_it_up() -> None:
    sim = training()
    lost = cut_off(sim)
    sim.client_says(m.RankLost(1, 1000 * lost.peer + 1, "the connection to b is lost"))
    refused = refusal(come_back(sim, lost))
    assert "gone on without it" in refused.reason
    assert not refused.again


def test_one_that_does_not_train_is_not_let_in() -> None:
    """Its next submission would meet later ones of the others."""
    sim = training()
    assert "gone on without it" in refusal(come_back(sim, cut_off(sim), returns=False)).reason


@pytest.mark.parametrize("noticed_by", ["the server", "the state"])
def test_one_that_broke_the_protocol_is_not_let_in(noticed_by: str) -> None:
    sim = training()
    lost = sim.ranks[1]
    if noticed_by == "the state":
        lost.say(m.Regrouped(1))
        sim.deliver_from(lost)
    else:
        del sim._by_peer[lost.peer]
        sim.handle(PeerLost(lost.peer, "it sent no message", faulty=True))
    assert "gone on without it" in refusal(come_back(sim, lost)).reason


def test_one_whose_old_connection_is_still_there_is_to_come_again() -> None:
    sim = training()
    living = sim.ranks[1]
    early = refusal(come_back(sim, living))
    assert early.again
    sim.ranks[1] = living
    lost = cut_off(sim)
    back = come_back(sim, lost)
    assert all_of(back, m.Refused) == []


def test_those_that_come_back_begin_again_by_themselves_once_there_are_enough() -> None:
    sim = training()
    lost = [cut_off(sim, rank) for rank in (0, 1, 2)]
    for each in lost:
        come_back(sim, each)
    regroup(sim, 0, at_least=2)
    assert sim.ranks[0].sets == {}
    regroup(sim, 1, at_least=2)
    assert world_of(sim, 0) == world_of(sim, 1) == (0, 1)


def test_in_a_pool_it_is_let_in_once_the_others_have_ended_their_cells() -> None:
    sim = Simulation(CoordinatorOptions(size=3))
    sim.connect_client()
    sim.world(0, 1, 2, tracked=True)
    sim.client_says(m.CellStarted("cell", (0, 1, 2)))
    back = come_back(sim, cut_off_of_pool(sim), training=False)
    back.say(m.CellBegin("cell"))
    sim.drain()
    assert back.sets == {}
    for rank in (0, 2):
        sim.ranks[rank].say(m.CellEnd("cell", ""))
        assert back.sets == {}
        sim.drain()
    assert back.sets[0].ranks == world_of(sim, 0) == (0, 1, 2)


def cut_off_of_pool(sim: Simulation) -> SimulatedRank:
    lost = sim.ranks.pop(1)
    del sim._by_peer[lost.peer]
    sim.handle(PeerLost(lost.peer, "no sign of life for 30 s", 30.0))
    sim.drain()
    return lost
