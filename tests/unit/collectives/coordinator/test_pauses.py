"""While a user looks around in a rank, no rank waits for it in vain, and no clock of a stall runs."""

from __future__ import annotations

from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m
from support.simulation.coordinator import Simulation, signature


def simulate(**options: float) -> Simulation:
    sim = Simulation(CoordinatorOptions(size=3, **options))  # type: ignore[arg-type]  # tests give the right ones
    sim.connect_client()
    sim.world(0, 1, 2)
    return sim


def wait(sim: Simulation, seconds: int) -> list[int]:
    """Return the reported durations of stalls in this time, in seconds."""
    sim.to_client.clear()
    for _ in range(seconds):
        sim.tick(1.0)
        sim.drain()
    return [round(message.seconds) for message in sim.to_client if isinstance(message, m.Stalled)]


def say(sim: Simulation, rank: int, message: m.Message) -> None:
    sim.ranks[rank].say(message)
    sim.drain()


def test_no_stall_is_reported_while_a_rank_is_paused_and_that_time_does_not_count() -> None:
    sim = simulate(stall_seconds=3.0)
    sim.ranks[0].submit(signature("loss"))
    sim.drain()
    assert wait(sim, 2) == []
    say(sim, 2, m.Paused("at a prompt"))
    assert wait(sim, 100) == []
    say(sim, 2, m.Resumed())
    assert wait(sim, 3) == [3]


def test_what_began_during_the_pause_has_waited_only_since_its_end() -> None:
    sim = simulate(stall_seconds=3.0)
    say(sim, 2, m.Paused("at a prompt"))
    wait(sim, 10)
    sim.ranks[0].submit(signature("loss"))
    sim.drain()
    assert wait(sim, 10) == []
    say(sim, 2, m.Resumed())
    assert wait(sim, 2) == []
    assert wait(sim, 1) == [3]


def test_nothing_is_given_up_while_a_rank_is_paused() -> None:
    sim = simulate(stall_seconds=0.0, stall_shutdown=5.0)
    sim.ranks[0].submit(signature("loss"))
    sim.drain()
    say(sim, 1, m.Paused("at a prompt"))
    wait(sim, 100)
    assert sim.ranks[0].submissions[0].outcome is None
    say(sim, 1, m.Resumed())
    wait(sim, 6)
    assert isinstance(sim.ranks[0].submissions[0].outcome, m.Abort)


def test_clocks_stand_still_until_the_last_rank_goes_on() -> None:
    sim = simulate(stall_seconds=3.0)
    sim.ranks[0].submit(signature("loss"))
    for rank in (1, 2):
        say(sim, rank, m.Paused("at a prompt"))
    say(sim, 1, m.Resumed())
    assert wait(sim, 10) == []
    sim.kill(2)
    assert wait(sim, 1) == []
    assert not sim.state.pauses


def test_ranks_that_wait_for_each_other_are_told_once_nobody_is_paused() -> None:
    sim = simulate()
    for rank, name in ((0, "a"), (1, "b"), (2, "c")):
        sim.ranks[rank].submit(signature(name))
    sim.drain()
    say(sim, 2, m.Paused("at a prompt"))
    for rank in range(3):
        local = sim.ranks[rank].sets[0].pending[0].local
        say(sim, rank, m.Blocked(0, sim.state.sets.world.generation, local, 0.5))
    wait(sim, 5)
    assert all(sim.ranks[rank].submissions[0].outcome is None for rank in range(3))
    say(sim, 2, m.Resumed())
    wait(sim, 1)
    outcome = sim.ranks[0].submissions[0].outcome
    assert isinstance(outcome, m.Abort)
    assert outcome.kind == "deadlock"


def test_clients_are_told_who_is_paused_also_those_that_come_later() -> None:
    sim = simulate()
    sim.to_client.clear()
    say(sim, 2, m.Paused("at a prompt"))
    say(sim, 1, m.Paused("stopped in a debugger"))
    say(sim, 2, m.Resumed())
    told = [message for message in sim.to_client if isinstance(message, m.PausedRanks)]
    assert [dict(zip(x.ranks, x.reasons, strict=True)) for x in told] == [
        {2: "at a prompt"},
        {1: "stopped in a debugger", 2: "at a prompt"},
        {1: "stopped in a debugger"},
    ]
    sim.to_client.clear()
    sim.connect_client()
    assert m.PausedRanks((1,), ("stopped in a debugger",)) in sim.to_client


def test_going_on_twice_or_without_a_pause_has_no_effect() -> None:
    sim = simulate(stall_seconds=3.0)
    sim.ranks[0].submit(signature("loss"))
    say(sim, 1, m.Resumed())
    assert wait(sim, 3) == [3]
