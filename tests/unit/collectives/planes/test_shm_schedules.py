"""No schedule lets a member overwrite a slot that another has still to read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.planes.shm.schedules import (
    FEW_PARTS,
    MOST_BUFFERS_KEPT,
    MOST_STEPS_KEPT,
    PipelineStage,
    SlicedReduction,
    ahead_of_three,
    ahead_of_two,
    sliced_steps,
    three_stages,
    two_stages,
    whole_steps,
)
from hvdlab.collectives.reduce import make_fold
from hvdlab.collectives.types import SUM, DType, ReduceOp

ARRIVED, REDUCED = 0, 1


class OverwrittenError(Exception):
    pass


@dataclass(frozen=True)
class Operation:
    folding: bool
    steps: int


class Memory:
    """Slots that remember the step they hold, and the counters."""

    def __init__(self, members: int, slots: int) -> None:
        self.slots = slots
        self.filled = [[-1] * slots for _ in range(members)]
        self.folded = [[-1] * slots for _ in range(members)]
        self.counters = [[0] * members, [0] * members]

    def expect(self, table: list[list[int]], step: int) -> None:
        for member, slots in enumerate(table):
            if slots[step % self.slots] != step:
                raise OverwrittenError(f"step {step} of member {member}: found {slots[step % self.slots]}")


def member(
    memory: Memory, index: int, operations: Sequence[Operation], aheads: tuple[int, int]
) -> Iterator[None]:
    """Run one member; each ``yield`` is a point where others can run, also in the middle of reading."""
    base = 0
    for operation in operations:
        order = (
            three_stages(operation.steps, aheads[1])
            if operation.folding
            else two_stages(operation.steps, aheads[0])
        )
        for stage, offset in order:
            step = base + offset
            slot = step % memory.slots
            if stage is PipelineStage.FILL:
                memory.filled[index][slot] = step
                memory.folded[index][slot] = -1  # the result of a slice lies in the slot too
                yield
                memory.counters[ARRIVED][index] = step + 1
                continue
            row = REDUCED if operation.folding and stage is PipelineStage.TAKE else ARRIVED
            while min(memory.counters[row]) < step + 1:
                yield
            table = memory.folded if row == REDUCED else memory.filled
            memory.expect(table, step)
            yield
            memory.expect(table, step)  # still there at the end of reading
            if stage is PipelineStage.FOLD:
                memory.folded[index][slot] = step
                yield
                memory.counters[REDUCED][index] = step + 1
        base += operation.steps
        yield


def play(
    members: int, slots: int, operations: Sequence[Operation], aheads: tuple[int, int], seed: int
) -> None:
    """Run all members in a random order with long and short turns."""
    rng = random.Random(seed)
    memory = Memory(members, slots)
    running = {i: member(memory, i, operations, aheads) for i in range(members)}
    while running:
        index = rng.choice(list(running))
        for _ in range(rng.choice((1, 1, 3, 40))):
            try:
                next(running[index])
            except StopIteration:
                del running[index]
                break


OPERATIONS = st.lists(st.builds(Operation, st.booleans(), st.integers(1, 12)), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 4), st.integers(5, 12), OPERATIONS, st.integers(0, 1 << 30))
def test_every_slot_is_read_before_it_is_filled_again(
    members: int, slots: int, operations: list[Operation], seed: int
) -> None:
    play(members, slots, operations, (ahead_of_two(slots), ahead_of_three(slots)), seed)


@pytest.mark.parametrize("folding", [False, True])
@pytest.mark.parametrize("slots", [5, 8])
def test_the_replay_finds_a_member_that_runs_too_far_ahead(slots: int, folding: bool) -> None:
    aheads = (ahead_of_two(slots) + 1, ahead_of_three(slots) + 1)

    def search() -> None:
        for seed in range(3000):
            play(2, slots, [Operation(folding, 20)] * 2, aheads, seed)

    with pytest.raises(OverwrittenError):
        search()


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_each_stage_of_each_step_comes_once_and_in_order(steps: int, ahead: int) -> None:
    three = list(three_stages(steps, ahead))
    two = list(two_stages(steps, ahead))
    for stage in PipelineStage:
        assert [k for s, k in three if s is stage] == list(range(steps))
    assert (
        [k for s, k in two if s is PipelineStage.FILL]
        == [k for s, k in two if s is PipelineStage.TAKE]
        == list(range(steps))
    )
    for order in (two, three):
        place = {event: i for i, event in enumerate(order)}
        for step in range(steps):
            assert place[PipelineStage.FILL, step] < place[PipelineStage.TAKE, step]


@given(
    st.integers(2, 5),
    st.lists(st.integers(0, 90) | st.just(200), min_size=1, max_size=4 * FEW_PARTS).filter(any),
    st.booleans(),
)
def test_slices_of_many_tensors_are_reduced_as_numpy_does(
    members: int, lengths: list[int], in_place: bool
) -> None:
    """Every member's buffers meet in chunks of 64 elements, whose slices are of several tensors, of one, or empty."""
    chunk, random = 64, np.random.default_rng(sum(lengths))
    ins = [[random.normal(size=n).astype(np.float32) for n in lengths] for _ in range(members)]
    right = [ins[0][i].copy() for i in range(len(lengths))]
    for other in ins[1:]:
        right = [total + tensor for total, tensor in zip(right, other, strict=True)]
    outs = ins if in_place else [[np.full(n, np.nan, np.float32) for n in lengths] for _ in range(members)]
    fold, slots = make_fold(DType.F32, ReduceOp.SUM), tuple(np.full((members, chunk), np.nan, np.float32))
    parts = [SlicedReduction(ins[m], outs[m], m, members, chunk, fold, SUM) for m in range(members)]
    for step in range(parts[0].steps):
        for stage in (SlicedReduction.fill, SlicedReduction.fold, SlicedReduction.take):
            for part in parts:
                stage(part, step, slots)
    for mine in outs:
        for found, expected in zip(mine, right, strict=True):
            assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ((10, 700), True),
        ((64 * MOST_STEPS_KEPT,), True),
        ((64 * MOST_STEPS_KEPT, 1), False),
        ((1,) * (MOST_BUFFERS_KEPT + 1), False),
    ],
)
def test_lists_of_steps_are_kept_for_the_next_time_unless_they_are_long(
    lengths: tuple[int, ...], kept: bool
) -> None:
    for first, second in (
        (sliced_steps(lengths, 64, 1, 3, 16), sliced_steps(lengths, 64, 1, 3, 16)),
        (whole_steps(lengths, 64), whole_steps(lengths, 64)),
    ):
        assert first == second
        assert (first is second) == kept
