"""Random programs that all ranks run to the end, with mistakes: each mistake is reported to all ranks, and no other."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.effort import examples
from support.simulation.coordinator import SimulatedRank, Simulation, Submission, signature


@dataclass(frozen=True)
class Step:
    """Step that every rank takes once.

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


names = st.sampled_from([("a",), ("b",), ("noname",), ("noname",)])
groups = st.sampled_from([("g.0", "g.1", "g.2"), ("h.0", "h.1"), ("group.noname",) * 3])
wrong = st.one_of(st.just(frozenset[int]()), st.frozensets(st.integers(0, 3), max_size=4))
steps = st.one_of(
    st.builds(Step, names, st.just(False), wrong), st.builds(Step, groups, st.just(True), wrong)
)


JOIN = signature("join.noname", OpKind.JOIN, shape=())


class Program:
    """Rank that runs the first steps one after another, as far ahead as names allow, and then joins; several times."""

    def __init__(self, rank: SimulatedRank, steps: list[Step], counts: list[int]) -> None:
        self.rank, self.steps, self.counts = rank, steps, counts
        self.done: list[list[list[Submission]]] = [[]]
        self.joins: list[Submission] = []

    @property
    def finished(self) -> bool:
        return len(self.joins) == len(self.counts)

    def advance(self) -> bool:
        """Submit one more step, unless one of its names is in flight (anonymous ones may be)."""
        if self.finished or len(self.joins) == len(self.done):
            if self.finished or self.joins[-1].outcome is None:
                return False
            self.done.append([])
        done = self.done[-1]
        if len(done) == self.counts[len(self.joins)]:
            self.joins.append(self.rank.submit(JOIN))
            return True
        step = self.steps[len(done)]
        if any("noname" not in name and self.rank.in_flight(name) for name in step.names):
            return False
        done.append([self.rank.submit(s) for s in step.signatures(self.rank.rank)])
        return True


@settings(max_examples=examples(200), deadline=None)
@given(
    size=st.integers(1, 4),
    program=st.lists(steps, max_size=10),
    counts=st.lists(st.lists(st.integers(0, 10), min_size=4, max_size=4), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 32),
)
def test_each_mistake_fails_on_all_ranks_and_everything_else_works(
    size: int, program: list[Step], counts: list[list[int]], seed: int
) -> None:
    choose = random.Random(seed)
    sim = Simulation(CoordinatorOptions(size=size))
    lengths = [[min(n, len(program)) for n in generation[:size]] for generation in counts]
    programs = [
        Program(rank, program, [generation[rank.rank] for generation in lengths])
        for rank in sim.world(*range(size))
    ]
    while True:
        moves: list[Callable[[], object]] = [p.advance for p in programs if not p.finished]
        moves += [partial(sim.deliver_from, r) for r in sim.ranks.values() if r.outgoing]
        moves += [partial(sim.deliver_to, r) for r in sim.ranks.values() if r.incoming]
        if sim.state.sets.world.negotiation.mismatches:
            moves.append(partial(sim.tick, 0.6))
        idle = not any(r.outgoing or r.incoming for r in sim.ranks.values())
        if idle and not any(list(map(Program.advance, programs))):
            break
        if moves:
            choose.choice(moves)()
    for generation, length in enumerate(lengths):
        for number, step in enumerate(program):
            working = [p for p in programs if length[p.rank.rank] > number]
            agree = len({p.rank.rank in step.wrong for p in working}) <= 1
            ended = [s for p in working for s in p.done[generation][number]]
            assert {type(s.outcome) for s in ended} == (
                {m.Execute if agree else m.Reject} if ended else set()
            )
            if not agree and not step.group and "noname" not in step.names[0]:
                assert len({s.outcome.parties for s in ended}) == 1  # type: ignore[union-attr]
        joined = [p.joins[generation].outcome for p in programs]
        last = {batch.tables for o in joined for batch in o.batches if batch.tables}  # type: ignore[union-attr]
        assert len(last) == 1
        assert {*last.pop()[0]} <= {(rank,) for rank in range(size)}
    assert not sim.state.sets.world.negotiation.pending
    assert not sim.state.sets.world.negotiation.owed
    sim.check_order()
    told = {tuple(map(str, rank.executed[0, 1])) for rank in sim.ranks.values()}
    assert len(told) <= 1, "a rank was not told of an operation"
