"""Priorities: the most urgent ready entry goes first, and no entry that is kept back waits in vain."""

from __future__ import annotations

from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.simulation.coordinator import Simulation, Submission, signature

NBYTES = 16
"""Of each tensor here."""


def simulate(
    credit: int = NBYTES, *, tracked: bool = False, size: int = 2, flush_delay: float = 0.0
) -> Simulation:
    """Return ranks whose reports of executed batches the test sends itself."""
    sim = Simulation(CoordinatorOptions(size=size, scheduling_credit=credit, flush_delay=flush_delay))
    sim.connect_client()
    for rank in sim.world(*range(size), tracked=tracked):
        rank.reports = []
    return sim


def submit(sim: Simulation, name: str, priority: int | None, **fields: object) -> list[Submission]:
    given = [
        rank.submit(signature(name, **fields), priority=priority)  # type: ignore[arg-type]  # right in each test
        for rank in sim.ranks.values()
    ]
    sim.drain()
    return given


def executed(sim: Simulation) -> list[str]:
    """Return the names in each batch of the present generation, in order."""
    (rank, *_) = sim.ranks.values()
    sim.check_order()
    batches = rank.executed[0, rank.sets[0].generation]
    return ["+".join(sig.name for sig in names) for _, names, _ in batches]


def report(sim: Simulation) -> None:
    """Report that the oldest batch that was not reported yet has been executed."""
    rank = sim.ranks[0]
    assert rank.reports is not None
    rank.say(rank.reports.pop(0))
    sim.drain()


def test_the_first_layers_gradient_overtakes_those_that_were_ready_before() -> None:
    sim = simulate()
    for layer in (3, 2, 1, 0):  # as in a backward pass
        submit(sim, f"layer {layer}", -layer)
    assert executed(sim) == ["layer 3"]  # when it became ready it was the only one
    for _ in range(3):
        report(sim)
    assert executed(sim) == ["layer 3", "layer 0", "layer 1", "layer 2"]
    report(sim)
    assert not sim.state.sets.world.negotiation.pending


def test_as_many_are_under_way_as_the_credit_allows() -> None:
    sim = simulate(3 * NBYTES)
    for number in range(5):
        submit(sim, f"{number}", 0)
    assert executed(sim) == ["0", "1", "2"]
    report(sim)
    assert executed(sim) == ["0", "1", "2", "3"]


def test_one_that_is_larger_than_the_credit_is_executed() -> None:
    sim = simulate(1)
    submit(sim, "a", 5)
    submit(sim, "b", 5)
    assert executed(sim) == ["a"]
    report(sim)
    assert executed(sim) == ["a", "b"]


def test_those_whose_turn_comes_together_are_fused_up_to_half_of_the_credit() -> None:
    sim = simulate(4 * NBYTES)
    submit(sim, "large", 0, shape=(64,))
    for number in range(5):
        submit(sim, f"{number}", number)
    assert executed(sim) == ["large"]
    report(sim)
    assert executed(sim) == ["large", "4+3", "2+1"]
    report(sim)
    assert executed(sim) == ["large", "4+3", "2+1", "0"]


def test_what_has_no_priority_does_not_wait() -> None:
    sim = simulate()
    submit(sim, "a", 0)
    submit(sim, "b", 9)
    submit(sim, "loss", None)
    submit(sim, "barrier", None, kind=OpKind.BARRIER, shape=())
    assert executed(sim) == ["a", "loss", "barrier"]


def test_without_a_credit_all_go_in_the_order_of_becoming_ready() -> None:
    sim = simulate(0)
    for priority, name in enumerate("abc"):
        submit(sim, name, priority)
    assert executed(sim) == ["a", "b", "c"]
    assert sim.ranks[0].reports == []


def test_only_allreduces_have_priorities() -> None:
    sim = simulate()
    submit(sim, "a", 0)
    submit(sim, "b", 1, kind=OpKind.BROADCAST, root=0)
    assert executed(sim) == ["a", "b"]


def test_submissions_of_one_name_stay_in_order_although_ranks_disagree_about_the_priority() -> None:
    """A rank can have submitted both under one local id: the first execution belongs to the older one."""
    sim = simulate()
    submit(sim, "a", 0)
    zero, one = sim.ranks.values()
    first = one.submit(signature("x"), priority=-1)
    sim.drain()  # its priority counts
    zero.submit(signature("x"), priority=4)
    second = zero.submit(signature("x"), priority=4)
    sim.drain()
    one.submit(signature("x"))
    submit(sim, "y", 2)
    submit(sim, "x", None)
    assert executed(sim) == ["a"]
    for _ in range(4):
        report(sim)
    assert executed(sim) == ["a", "y", "x", "x", "x"]
    assert isinstance(first.outcome, m.Execute)
    assert isinstance(second.outcome, m.Execute)
    assert first.outcome.sequence < second.outcome.sequence


def test_a_verdict_does_not_overtake_what_is_kept_back() -> None:
    sim = simulate()
    submit(sim, "a", 0)
    kept = submit(sim, "b", 0)
    zero, one = sim.ranks.values()
    wrong = zero.submit(signature("b"), priority=0), one.submit(signature("b", shape=(5,)), priority=0)
    sim.drain()
    assert executed(sim) == ["a", "b"]
    assert all(isinstance(one.outcome, m.Execute) for one in kept)
    assert all(isinstance(one.outcome, m.Reject) for one in wrong)


def test_what_is_kept_back_is_executed_although_a_rank_ends_its_cell() -> None:
    sim = simulate(tracked=True)
    sim.client_says(m.CellStarted("cell", (0, 1)))
    for rank in sim.ranks.values():
        rank.say(m.CellBegin("cell"))
    sim.drain()
    for number in range(3):
        submit(sim, f"{number}", number)
    assert executed(sim) == ["0"]
    sim.ranks[1].say(m.CellEnd("cell"))
    sim.drain()
    assert executed(sim) == ["0", "2+1"]


def test_joining_ends_after_all_that_was_kept_back() -> None:
    """Also after collectives in which a joined rank takes part with zeros: it goes on as if that were over."""
    sim = simulate()
    submit(sim, "a", 0)
    submit(sim, "kept", 0)
    zero, one = sim.ranks.values()
    join = signature("join.noname", OpKind.JOIN, shape=())
    one.submit(join)
    sim.drain()
    zero.submit(signature("alone"), priority=0)
    zero.submit(join)
    sim.drain()
    assert executed(sim) == ["a", "kept+alone", "join.noname"]


def test_a_death_ends_what_is_kept_back_and_the_error_names_it() -> None:
    sim = simulate()
    submit(sim, "a", 0)
    kept, _ = submit(sim, "b", 0)
    sim.kill(1)
    sim.drain()
    assert isinstance(kept.outcome, m.Abort)
    assert [pending.name for pending in kept.outcome.pending] == ["b"]
    assert not sim.state.sets.world.negotiation.pending


def test_what_is_kept_back_is_announced_again_in_the_next_generation_that_begins_in_order() -> None:
    sim = simulate()
    for number in range(3):
        submit(sim, f"{number}", number)
    zero = sim.ranks[0]
    zero.say(m.Renew(0, zero.sets[0].generation))
    sim.drain()
    assert executed(sim) == ["2"]
    report(sim)  # that of the former generation: it does not concern this one
    assert executed(sim) == ["2"]
    report(sim)
    assert executed(sim) == ["2", "1"]


def wait_behind_a_kept_tensor(
    sim: Simulation, *, for_the_second: bool
) -> tuple[Submission, Submission, Submission]:
    """While ``x`` is kept back, rank 0 submits it once more and waits for either, and rank 1 for a ``y`` of its own.

    Returns:
        Rank 0's first and second ``x``, and rank 1's ``y``.
    """
    submit(sim, "a", 0)
    submit(sim, "x", 0)
    zero, one = sim.ranks.values()
    generation = zero.sets[0].generation
    first = zero.sets[0].pending[0]
    second = zero.submit(signature("x"), priority=0)
    other = one.submit(signature("y"))
    sim.drain()
    zero.say(m.Blocked(0, generation, (second if for_the_second else first).local, 1.0))
    one.say(m.Blocked(0, generation, other.local, 1.0))
    sim.drain()
    sim.tick(1.0)
    sim.drain()
    return first, second, other


def test_a_rank_that_waits_for_what_is_kept_back_is_in_no_deadlock() -> None:
    """Not even if it has submitted the name once more, and all others wait as well."""
    sim = simulate()
    first, _, other = wait_behind_a_kept_tensor(sim, for_the_second=False)
    assert other.outcome is None, "rank 0 goes on when its tensor's turn has come"
    report(sim)
    assert isinstance(first.outcome, m.Execute)


def test_a_deadlock_behind_what_is_kept_back_is_found_once_that_is_over() -> None:
    """A rank that waits for the second tensor of a name reports it while the first is kept."""
    sim = simulate()
    _, second, _ = wait_behind_a_kept_tensor(sim, for_the_second=True)
    assert second.outcome is None
    report(sim)  # of `a`: `x` is executed
    sim.tick(1.0)
    sim.drain()
    assert isinstance(second.outcome, m.Abort)
    assert second.outcome.text == (
        "deadlock, all wait for each other: rank 0 in allreduce `x` (line 0); rank 1 in allreduce `y` (line 1)"
    )


def test_what_is_held_to_be_fused_does_not_hold_up_what_was_kept_back() -> None:
    sim = simulate(flush_delay=10.0)
    submit(sim, "first", 0)
    sim.tick(10.0)
    submit(sim, "kept", 0)
    sim.tick(10.0)
    assert executed(sim) == ["first"]
    submit(sim, "held", None)
    report(sim)
    assert executed(sim) == ["first", "held", "kept"]
