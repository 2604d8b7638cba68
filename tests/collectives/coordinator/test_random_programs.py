"""Random programs that all ranks run to the end, with mistakes: each mistake is told to all ranks, and nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator_simulation import SimulatedRank, Simulation, Submission, signature
from effort import examples
from hvdlab.collectives.coordinator.options import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m


@dataclass(frozen=True)
class Step:
    """What every rank does once.

    Attributes:
        names: One name, or those of a group.
        group: Whether they are a group.
        wrong: Ranks that give another shape, for one of the names.
    """

    names: tuple[str, ...]
    group: bool
    wrong: frozenset[int]

    def signatures(self, rank: int) -> list[m.Signature]:
        group = f"group {self.names}" if self.group else ""
        size = len(self.names) if self.group else 0
        return [
            signature(
                name,
                shape=(5 if rank in self.wrong and name == self.names[-1] else 4,),
                group=group,
                group_size=size,
            )
            for name in self.names
        ]

    def agree(self, size: int) -> bool:
        return len(self.wrong & set(range(size))) in (0, size)


names = st.sampled_from([("a",), ("b",), ("noname",), ("noname",)])
groups = st.sampled_from([("g.0", "g.1", "g.2"), ("h.0", "h.1"), ("group.noname",) * 3])
wrong = st.one_of(st.just(frozenset[int]()), st.frozensets(st.integers(0, 3), max_size=4))
steps = st.one_of(
    st.builds(Step, names, st.just(False), wrong), st.builds(Step, groups, st.just(True), wrong)
)


class Program:
    """A rank that runs the steps one after another, as far ahead as names allow."""

    def __init__(self, rank: SimulatedRank, steps: list[Step]) -> None:
        self.rank, self.steps = rank, steps
        self.done: list[list[Submission]] = []

    def advance(self) -> bool:
        """Submit one more step, unless one of its names is in flight (anonymous ones may be)."""
        if len(self.done) == len(self.steps):
            return False
        step = self.steps[len(self.done)]
        if any("noname" not in name and self.rank.in_flight(name) for name in step.names):
            return False
        self.done.append([self.rank.submit(s) for s in step.signatures(self.rank.rank)])
        return True


@settings(max_examples=examples(200), deadline=None)
@given(size=st.integers(2, 4), program=st.lists(steps, max_size=12), seed=st.integers(0, 1 << 32))
def test_each_mistake_fails_on_all_ranks_and_everything_else_works(
    size: int, program: list[Step], seed: int
) -> None:
    choose = random.Random(seed)
    sim = Simulation(CoordinatorOptions(size=size))
    programs = [Program(rank, program) for rank in sim.world(*range(size))]
    while True:
        moves = [p.advance for p in programs if len(p.done) < len(program)]
        moves += [lambda r=r: sim.deliver_from(r) for r in sim.ranks.values() if r.outgoing]  # type: ignore[misc]
        moves += [lambda r=r: sim.deliver_to(r) for r in sim.ranks.values() if r.incoming]  # type: ignore[misc]
        idle = not any(r.outgoing or r.incoming for r in sim.ranks.values())
        if idle and not any(list(map(Program.advance, programs))):
            break
        choose.choice(moves or [lambda: None])()
    for number, step in enumerate(program):
        outcomes = {type(s.outcome) for p in programs for s in p.done[number]}
        assert outcomes == {m.Execute if step.agree(size) else m.Reject}, (number, step)
        if not step.agree(size) and not step.group and "noname" not in step.names[0]:
            assert len({s.outcome.parties for p in programs for s in p.done[number]}) == 1  # type: ignore[union-attr]
    assert not sim.state.sets.world.matcher.pending
    assert not sim.state.sets.world.matcher.debts
    sim.check_order()
