"""The flush delay: ready entries wait for more to fuse with it, but never in vain."""

from __future__ import annotations

from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.simulation.coordinator import Simulation, signature

DELAY = 0.005  # seconds of the simulated clock


def simulate(**options: float) -> Simulation:
    given: dict[str, float] = {"flush_delay": DELAY} | options
    sim = Simulation(CoordinatorOptions(size=2, **given))  # type: ignore[arg-type]  # tests give the right ones
    sim.world(0, 1)
    return sim


def submit(sim: Simulation, *names: str, kind: OpKind = OpKind.ALLREDUCE, count: int = 4) -> None:
    for name in names:
        for rank in sim.ranks.values():
            rank.submit(signature(name, kind, shape=(count,)))
        sim.drain()


def batches(sim: Simulation) -> list[list[int]]:
    """Return how many tensors each batch of each order had."""
    orders = [message for message in sim.ranks[0].received if isinstance(message, m.Execute)]
    return [[len(batch.locals) for batch in order.batches] for order in orders]


def test_what_comes_within_the_delay_is_fused() -> None:
    sim = simulate()
    submit(sim, "a")
    sim.tick(DELAY * 0.5)
    submit(sim, "b", "c")
    assert batches(sim) == []
    sim.tick(DELAY * 0.6)
    sim.drain()
    assert batches(sim) == [[3]]


def test_without_a_delay_each_goes_at_once() -> None:
    sim = simulate(flush_delay=0.0)
    submit(sim, "a", "b")
    assert batches(sim) == [[1], [1]]


def test_a_full_batch_does_not_wait() -> None:
    sim = simulate(fusion_threshold=32)
    submit(sim, "a")
    assert batches(sim) == []
    submit(sim, "b")
    assert batches(sim) == [[2]]


def test_with_nothing_fused_nothing_is_held() -> None:
    sim = simulate(fusion_threshold=0)
    submit(sim, "a")
    assert batches(sim) == [[1]]


def test_a_barrier_lets_go_of_what_is_held() -> None:
    sim = simulate()
    submit(sim, "a")
    submit(sim, "barrier", kind=OpKind.BARRIER)
    assert batches(sim) == [[1, 1]]


def test_a_rank_that_dies_ends_what_is_held() -> None:
    sim = simulate()
    submit(sim, "a")
    sim.kill(1)
    sim.drain()
    assert isinstance(sim.ranks[0].submissions[0].outcome, m.Abort)
    sim.tick(DELAY)
    assert sim.state.fusion.windows.due is None


def test_a_cell_that_ends_does_not_fail_what_is_complete() -> None:
    sim = Simulation(CoordinatorOptions(size=2, flush_delay=DELAY))
    sim.connect_client()
    sim.world(0, 1, tracked=True)
    sim.client_says(m.CellStarted("cell", (0, 1)))
    for rank in sim.ranks.values():
        rank.say(m.CellBegin("cell"))
    submit(sim, "a")
    assert batches(sim) == []
    sim.ranks[0].say(m.CellEnd("cell"))
    sim.drain()
    assert batches(sim) == [[1]]


def test_groups_are_fused_apart_if_wanted() -> None:
    sim = simulate(separate_groups=True)
    for name, group in (("a", "g"), ("b", "h"), ("c", "g"), ("d", "h"), ("e", "")):
        for rank in sim.ranks.values():
            rank.submit(signature(name, group=group, group_size=2 if group else 0))
    sim.drain()
    sim.tick(DELAY)
    sim.drain()
    assert batches(sim) == [[2, 2, 1]]


def test_what_was_held_in_a_generation_that_has_ended_says_nothing_about_the_next() -> None:
    sim = simulate()
    submit(sim, "a")
    sim.kill(1)
    sim.drain()
    submit(sim, "barrier", kind=OpKind.BARRIER)
    assert batches(sim) == [[1]], "a barrier is never held"
