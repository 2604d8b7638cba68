"""Long waits are reported, and ended if so configured."""

from __future__ import annotations

from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m
from support.simulation.coordinator import Simulation, signature


def simulate(**options: float) -> Simulation:
    sim = Simulation(CoordinatorOptions(size=3, **options))  # type: ignore[arg-type]  # tests give the right ones
    sim.connect_client()
    sim.world(0, 1, 2)
    sim.ranks[0].submit(signature("loss"))
    sim.drain()
    return sim


def reports(sim: Simulation, seconds: int) -> list[int]:
    """Return the seconds after which the client got a report of a stall."""
    for _ in range(seconds):
        sim.tick(1.0)
        sim.drain()
    return [round(message.seconds) for message in sim.to_client if isinstance(message, m.Stalled)]


def test_the_operator_is_told_who_is_missing() -> None:
    sim = simulate(stall_seconds=3.0)
    assert reports(sim, 7) == [3, 6]
    assert "allreduce `loss` has been waiting for 3 s: submitted by ranks 0, missing ranks 1,2" in sim.logged


def test_zero_reports_nothing() -> None:
    sim = simulate(stall_seconds=0.0)
    assert reports(sim, 100) == []
    assert sim.logged == []


def test_after_the_shutdown_time_the_waiting_ranks_are_told_who_is_missing() -> None:
    sim = simulate(stall_seconds=2.0, stall_shutdown=5.0)
    assert reports(sim, 10) == [2, 4]
    outcome = sim.ranks[0].submissions[0].outcome
    assert isinstance(outcome, m.Abort)
    assert (outcome.kind, outcome.ranks) == ("timeout", (1, 2))
    assert "ranks 1,2 did not submit it within 5 s" in outcome.text


def test_the_set_goes_on_after_that() -> None:
    sim = simulate(stall_shutdown=5.0, stall_seconds=0.0)
    reports(sim, 6)
    for rank in sim.ranks.values():
        rank.submit(signature("next"))
    sim.drain()
    assert all(isinstance(r.submissions[-1].outcome, m.Execute) for r in sim.ranks.values())


def test_a_group_that_never_is_complete_ends_too() -> None:
    sim = simulate(stall_shutdown=5.0)
    for rank in sim.ranks.values():
        rank.submit(signature("part", group="g", group_size=2))
    for rank in (sim.ranks[1], sim.ranks[2]):
        rank.submit(signature("loss"))
    sim.drain()
    assert reports(sim, 6) == []
    outcome = sim.ranks[2].submissions[0].outcome
    assert isinstance(outcome, m.Abort)
    assert "its group was not complete within 5 s" in outcome.text


# -- executed operations ------------------------------------------------------------------------------------------------


def executing(*ranks: int, **options: float) -> Simulation:
    """Order all ranks to execute `loss`, while these wait for its end."""
    sim = simulate(**options)
    for rank in (1, 2):
        sim.ranks[rank].submit(signature("loss"))
    sim.drain()
    for rank in ranks:
        says_that_it_waits(sim, rank, 0)
    return sim


def says_that_it_waits(sim: Simulation, rank: int, local: int) -> None:
    sim.ranks[rank].say(m.Blocked(0, sim.state.sets.world.generation, local, 0.5, executing=True))
    sim.drain()


def told(sim: Simulation, seconds: int, *answering: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the client's messages within these seconds, if these ranks answer pings."""
    sim.to_client.clear()
    for _ in range(seconds):
        sim.tick(1.0)
        sim.drain()
        for number in answering:
            if any(isinstance(message, m.Ping) for message in sim.ranks[number].received):
                sim.ranks[number].say(m.Pong(0))
        for rank in sim.ranks.values():
            rank.received.clear()
        sim.drain()
    stalls = [message for message in sim.to_client if isinstance(message, m.Stalled)]
    return [(s.collective.waited, s.collective.missing) for s in stalls]


def test_who_does_not_do_its_part_is_named() -> None:
    sim = executing(0, 2, stall_seconds=10.0)
    assert told(sim, 25, 0, 2) == [((0, 2), (1,)), ((0, 2), (1,))]
    assert "allreduce `loss` has been executed for 10 s: ranks 1 do not answer" in " ".join(sim.logged)
    says_that_it_waits(sim, 0, -1)
    says_that_it_waits(sim, 2, -1)
    assert told(sim, 100) == []


def test_one_that_said_that_it_waits_may_have_been_stopped_since() -> None:
    assert told(executing(0, 1, 2, stall_seconds=10.0), 15, 0, 2) == [((0, 2), (1,))]


def test_a_long_operation_of_living_ranks_is_no_stall() -> None:
    assert told(executing(0, 1, stall_seconds=10.0), 60, 0, 1, 2) == []


def test_nobody_is_asked_if_stalls_are_of_no_interest() -> None:
    assert told(executing(0, 1, stall_seconds=0.0), 100) == []
