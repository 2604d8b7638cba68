"""What waits for long is reported, and ended if that is wanted."""

from __future__ import annotations

from coordinator_simulation import Simulation, signature
from hvdlab.collectives.coordinator.options import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m


def simulate(**options: float) -> Simulation:
    sim = Simulation(CoordinatorOptions(size=3, **options))  # type: ignore[arg-type]  # tests give the right ones
    sim.connect_client()
    sim.world(0, 1, 2)
    sim.ranks[0].submit(signature("loss"))
    sim.drain()
    return sim


def reports(sim: Simulation, seconds: int) -> list[int]:
    """Seconds after which the client was told of a stall."""
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
