"""Waits for ranks outside of collectives: in vain when ranks end their cells, and when all wait for each other."""

from __future__ import annotations

from coordinator_simulation import SimulatedRank, Simulation, signature
from hvdlab.collectives.coordinator.options import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m

OTHERS = {rank: tuple(other for other in range(3) if other != rank) for rank in range(3)}


def simulate(*, tracked: bool = True) -> Simulation:
    sim = Simulation(CoordinatorOptions(size=3))
    sim.connect_client()
    sim.world(0, 1, 2, tracked=tracked)
    if tracked:
        sim.client_says(m.CellStarted("cell", (0, 1, 2)))
        for rank in range(3):
            sim.ranks[rank].say(m.CellBegin("cell"))
    sim.drain()
    return sim


def waits(
    sim: Simulation, rank: int, number: int = 1, ranks: tuple[int, ...] = (), *, any: bool = True
) -> None:
    what = f"recv of rank {rank}"
    sim.ranks[rank].say(m.Await(number, ranks or OTHERS[rank], any, what, f"line {rank}"))
    sim.drain()


def absences(rank: SimulatedRank) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(each.number, each.kind, each.ranks) for each in rank.received if isinstance(each, m.Absent)]


def answer(sim: Simulation, rank: int) -> None:
    """Say that a wait goes on, if that was asked."""
    asked = [each.number for each in sim.ranks[rank].received if isinstance(each, m.AwaitStill)]
    waits(sim, rank, asked[-1])


def test_any_of_several_ranks_is_awaited_until_none_runs_a_cell() -> None:
    sim = simulate()
    waits(sim, 0, 7)
    sim.ranks[1].say(m.CellEnd("cell"))
    sim.drain()
    assert absences(sim.ranks[0]) == []  # rank 2 may send
    sim.ranks[2].say(m.CellEnd("cell", "ValueError: no"))
    sim.drain()
    assert absences(sim.ranks[0]) == [(7, "cell_failed", (2,))]
    sim.ranks[2].say(m.CellBegin("other"))
    sim.ranks[2].say(m.CellEnd("other"))
    sim.drain()
    assert len(absences(sim.ranks[0])) == 1


def test_where_all_are_needed_one_without_a_cell_is_enough() -> None:
    sim = simulate()
    waits(sim, 0, any=False)
    sim.ranks[1].say(m.CellEnd("cell"))
    sim.drain()
    assert absences(sim.ranks[0]) == [(1, "cell_ended", (1,))]


def test_a_wait_that_is_over_is_forgotten_and_so_are_those_of_the_dead() -> None:
    sim = simulate()
    waits(sim, 0)
    sim.ranks[0].say(m.Await(1))
    waits(sim, 2)
    sim.kill(2)
    for rank in (0, 1):
        sim.ranks[rank].say(m.CellEnd("cell"))
    sim.drain()
    assert absences(sim.ranks[0]) == []
    assert sim.state.awaiting == set()


def test_scripts_have_no_cells_that_end() -> None:
    sim = simulate(tracked=False)
    waits(sim, 0)
    assert absences(sim.ranks[0]) == []


def test_all_wait_for_each_other_once_all_have_confirmed_it() -> None:
    sim = simulate(tracked=False)
    waits(sim, 0)
    waits(sim, 1)
    sim.ranks[2].submit(signature("x"))
    sim.drain()
    view = sim.ranks[2].sets[0]
    sim.ranks[2].say(m.Blocked(0, view.epoch, view.pending[0].local, 0.5))
    sim.drain()
    assert [absences(sim.ranks[rank]) for rank in (0, 1)] == [[], []]
    answer(sim, 0)
    assert absences(sim.ranks[0]) == []
    answer(sim, 1)
    for rank in (0, 1):
        assert absences(sim.ranks[rank]) == [(1, "deadlock", (0, 1, 2))]
    (abort,) = [each for each in sim.ranks[2].received if isinstance(each, m.Abort)]
    assert (
        "rank 0 in recv of rank 0 (line 0); rank 1 in recv of rank 1 (line 1); rank 2 in allreduce"
        in abort.text
    )


def test_mail_that_is_on_its_way_may_be_what_a_rank_waits_for() -> None:
    sim = simulate(tracked=False)
    waits(sim, 0)
    waits(sim, 1)
    sim.ranks[2].say(m.Post("message", b"", (0,)))
    waits(sim, 2)  # all wait; each is asked, and rank 0 has mail that comes before the question
    answer(sim, 1)
    answer(sim, 2)
    assert not any(absences(sim.ranks[rank]) for rank in range(3))
    sim.ranks[0].say(m.Await(1))
    sim.ranks[0].say(m.Post("message", b"", (1,)))
    sim.drain()
    waits(sim, 0, 2)
    answer(sim, 0)
    answer(sim, 2)  # what it had said holds; nothing was sent to it
    assert not any(absences(sim.ranks[rank]) for rank in range(3)), "rank 1 has mail since it answered"
    answer(sim, 1)
    assert [len(absences(sim.ranks[rank])) for rank in range(3)] == [1, 1, 1]


def test_a_rank_keeps_the_coordinator_from_no_work_by_very_many_waits() -> None:
    sim = simulate()
    for number in range(1, 200):
        waits(sim, 0, number)
    assert len(sim.state.membership.ranks[0].awaits) == 64
