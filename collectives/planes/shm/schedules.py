"""In which order a member's stages follow each other, and why no slot is overwritten before all have read it.

Steps are numbered through all operations of a generation; step ``t`` uses slot ``t % slots`` of every member. A member
*fills* its slot for a step and posts ``arrived``; having waited for all members' ``arrived`` it *takes* its part
of all slots. Where each member reduces a slice for the others there is a stage in between: it *folds* its slice into
its own slot and posts ``reduced``; having waited for all members' ``reduced``, it takes.

A member runs ``ahead`` steps before it first waits. No member counts how far others have read its slots; that follows from the words that it has waited for:

* Two stages, iteration ``i``: fill ``i``, take ``i - ahead``. Before filling ``i`` a member has taken
  ``i - 1 - ahead``, so all members had filled that, so each was past iteration ``i - 2 - ahead``, in which it took
  ``i - 2 - 2*ahead``. Hence ``slots >= 2 + 2*ahead`` suffices.
* Three stages, iteration ``i``: fill ``i``, fold ``i - ahead``, take ``i - 2*ahead``. Before filling ``i`` a member
  has folded ``i - 1 - ahead``, so all members were past iteration ``i - 2 - ahead``, in which each took ``i - 2 - 3*ahead``.
  Hence ``slots >= 2 + 3*ahead``.
* Between operations: the last wait of an operation that ends before step ``t`` was for step ``t - 1`` of all members,
  so each has taken ``t - 2 - ahead``. The next operation fills up to ``t + ahead`` before its first wait, which
  is the same bound; after that wait a member knows that all others have left the earlier operation.

Every operation therefore waits for *all* members in each of its steps, even where it needs one member's data only.
``tests/unit/collectives/planes/test_shm_schedules.py`` replays these sequences under random schedules.

Below are the operations that are driven in this order: the two ways in which large buffers are reduced, and exchanges, in which
members read from the slots of others. With two members each reads the other's chunk and adds it to its own input, straight into
the output: one copy into a slot, one addition, one synchronisation per chunk. As many bytes move between the cores as if each
reduced one half. With more members, or an expensive fold, each member reduces one slice of a chunk for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from hvdlab.collectives.planes.base import HostArray
from hvdlab.collectives.planes.shm.layout import ChunkSlice, cut, slice_bounds
from hvdlab.collectives.reduce import Fold
from hvdlab.collectives.types import Reduction

FEW_PARTS = 4
"""Parts of tensors in one slice that a member reduces one by one; more of them it first puts together."""
PLANS_KEPT = 32
"""Lists of steps that a process keeps. Training has one for each bucket of gradients."""
MOST_STEPS_KEPT = 128
"""Steps of a list that is kept. With eight members it takes less than half a megabyte, and to make a longer one takes little beside what it is for."""
MOST_BUFFERS_KEPT = 512
"""Buffers of an operation whose list is kept."""


class PipelineStage(IntEnum):
    """Part of a step: fill this member's slot, fold a slice of all slots, take from all slots."""

    FILL = 0
    FOLD = 1
    TAKE = 2


StageOrder = tuple[tuple[PipelineStage, int], ...]
"""Stages with their steps within an operation, in order."""


@lru_cache(PLANS_KEPT)
def two_stages(steps: int, ahead: int) -> StageOrder:
    """Return the order of the stages of an operation of so many steps, without folding."""
    order = []
    for i in range(steps + ahead):
        if i < steps:
            order.append((PipelineStage.FILL, i))
        if i >= ahead:
            order.append((PipelineStage.TAKE, i - ahead))
    return tuple(order)


@lru_cache(PLANS_KEPT)
def three_stages(steps: int, ahead: int) -> StageOrder:
    """Return the order of the stages of an operation of so many steps, with folding."""
    order = []
    for i in range(steps + 2 * ahead):
        if i < steps:
            order.append((PipelineStage.FILL, i))
        if ahead <= i < steps + ahead:
            order.append((PipelineStage.FOLD, i - ahead))
        if i >= 2 * ahead:
            order.append((PipelineStage.TAKE, i - 2 * ahead))
    return tuple(order)


def ahead_of_two(slots: int) -> int:
    """Return how far a member may run ahead in :func:`two_stages`."""
    return (slots - 2) // 2


def ahead_of_three(slots: int) -> int:
    """Return how far a member may run ahead in :func:`three_stages`; 5 slots are the least."""
    return (slots - 2) // 3


StepViews = tuple[HostArray, ...]
"""The slots of one step, by member."""


class SteppedOperation(Protocol):
    """Operation of ``steps`` steps, each at most one slot of every member. Steps come in order.

    ``slots`` are the slots of the step, by member, in the type that the operation works in.
    """

    @property
    def steps(self) -> int: ...

    def fill(self, step: int, slots: StepViews) -> None:
        """Put the other members' data into this member's slot."""

    def take(self, step: int, slots: StepViews) -> None:
        """Get this member's data from all slots, which are full."""


class FoldingOperation(SteppedOperation, Protocol):
    """Operation in which each member reduces a slice of every step for all."""

    def fold(self, step: int, slots: StepViews) -> None:
        """Reduce this member's slice over all slots into its own; ``take`` then finds the result."""


PlacedPart = tuple[int, slice, slice]
"""Buffer, some of its elements, and their place in a slot."""


def whole_steps(lengths: tuple[int, ...], chunk: int) -> tuple[tuple[PlacedPart, ...], ...]:
    """Return the parts of each step of a :class:`TwoMemberReduction`.

    Args:
        lengths: Elements of each buffer.
        chunk: Elements of a chunk.
    """
    return (_kept_whole_steps if _is_kept(lengths, chunk) else _new_whole_steps)(lengths, chunk)


def _is_kept(lengths: tuple[int, ...], chunk: int) -> bool:
    return len(lengths) <= MOST_BUFFERS_KEPT and sum(lengths) <= MOST_STEPS_KEPT * chunk


def _new_whole_steps(lengths: tuple[int, ...], chunk: int) -> tuple[tuple[PlacedPart, ...], ...]:
    return tuple(
        tuple(
            [(buffer, slice(start, start + size), slice(at, at + size)) for buffer, start, at, size in pieces]
        )
        for pieces in cut(lengths, chunk)
    )


_kept_whole_steps = lru_cache(PLANS_KEPT)(_new_whole_steps)


class TwoMemberReduction:
    """Allreduce of two members without prescale, for a fold that is about as fast as a copy."""

    def __init__(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        index: int,
        chunk: int,
        fold: Fold,
        postscale: float,
    ) -> None:
        self._ins, self._outs, self._index = ins, outs, index
        self._fold, self._postscale = fold, postscale
        self._steps = whole_steps(tuple(map(len, ins)), chunk)
        self.steps = len(self._steps)

    def fill(self, step: int, slots: StepViews) -> None:
        # Through the slot: to read the other member's memory where it lies (process_vm_readv) took twice as long.
        own, ins = slots[self._index], self._ins
        for buffer, part, place in self._steps[step]:
            own[place] = ins[buffer][part]

    def take(self, step: int, slots: StepViews) -> None:
        index, fold, postscale = self._index, self._fold, self._postscale
        other = slots[1 - index]
        for buffer, part, place in self._steps[step]:
            mine, theirs = self._ins[buffer][part], other[place]
            # Both members add in the order of their positions: the payload of a NaN depends on it.
            sources = (theirs, mine) if index else (mine, theirs)
            fold(sources, self._outs[buffer][part], 1.0, postscale)


class SlicedStep(NamedTuple):
    """Copies of one step of a :class:`SlicedReduction`, by buffers and elements.

    Attributes:
        fills: Buffer, its elements, and their place in this member's slot.
        folds: Buffer, its elements, and their place in the slots: this member's slice, in parts.
        takes: Buffer, its elements, the member that reduces them, and their place in its slot.
    """

    fills: tuple[PlacedPart, ...]
    folds: tuple[PlacedPart, ...]
    takes: tuple[tuple[int, slice, int, slice], ...]


def sliced_steps(
    lengths: tuple[int, ...], chunk: int, index: int, members: int, grain: int
) -> tuple[SlicedStep, ...]:
    """Return the steps of a :class:`SlicedReduction`.

    Args:
        lengths: Elements of each buffer.
        chunk: Elements of a chunk.
        index: This member's position.
        members: How many there are.
        grain: Elements of a cache line. Slots begin with one, and slices have whole ones: where a member writes its result into its
            slot, no other member reads from the same line for a slice of its own.
    """
    make = _kept_sliced_steps if _is_kept(lengths, chunk) else _new_sliced_steps
    return make(lengths, chunk, index, members, grain)


def _new_sliced_steps(
    lengths: tuple[int, ...], chunk: int, index: int, members: int, grain: int
) -> tuple[SlicedStep, ...]:
    steps = []
    for pieces in cut(lengths, chunk):
        bounds = slice_bounds(pieces[-1].at + pieces[-1].length, members, grain)
        takes = _takes(pieces, bounds)
        folds = [(buffer, part, place) for buffer, part, member, place in takes if member == index]
        fills = _outside(pieces, bounds[index], bounds[index + 1])
        steps.append(SlicedStep(tuple(fills), tuple(folds), tuple(takes)))
    return tuple(steps)


_kept_sliced_steps = lru_cache(PLANS_KEPT)(_new_sliced_steps)


def _takes(pieces: Sequence[ChunkSlice], bounds: Sequence[int]) -> list[tuple[int, slice, int, slice]]:
    """Return the parts of buffers in a chunk, cut where the members' slices meet, each with its member and its place in the chunk."""
    parts = []
    member = 0
    for buffer, start, at, length in pieces:
        end = at + length
        while at < end:
            # More than one step where slices are empty, since a chunk can have fewer cache lines than there are members.
            while bounds[member + 1] <= at:
                member += 1
            stop = min(end, bounds[member + 1])
            parts.append((buffer, slice(start, start + stop - at), member, slice(at, stop)))
            start += stop - at
            at = stop
    return parts


def _outside(pieces: Sequence[ChunkSlice], lo: int, hi: int) -> list[PlacedPart]:
    """Return the parts of buffers in a chunk before ``lo`` and from ``hi`` on, each with its place in the chunk."""
    parts = []
    for buffer, start, at, length in pieces:
        end, offset = at + length, start - at
        if at < lo:
            stop = min(end, lo)
            parts.append((buffer, slice(start, stop + offset), slice(at, stop)))
        if end > hi:
            begin = max(at, hi)
            parts.append((buffer, slice(begin + offset, end + offset), slice(begin, end)))
    return parts


class SlicedReduction:
    """Allreduce in which each member reduces a slice of every chunk for all; any number of members, any fold.

    The result of a slice goes into the slot of the member that reduced it, in the place where no other member looks for
    that one's input. So a member never puts its own slice there: it reads that from its input when it reduces it.
    """

    def __init__(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        index: int,
        members: int,
        chunk: int,
        fold: Fold,
        reduction: Reduction,
    ) -> None:
        self._ins, self._outs, self._index = ins, outs, index
        self._fold, self._prescale, self._postscale = fold, reduction.prescale, reduction.postscale
        grain = max(1, 64 // ins[0].itemsize)
        self._steps = sliced_steps(tuple(map(len, ins)), chunk, index, members, grain)
        self.steps = len(self._steps)
        self._scratch = np.empty(0, ins[0].dtype)

    def fill(self, step: int, slots: StepViews) -> None:
        own, ins = slots[self._index], self._ins
        for buffer, source, place in self._steps[step].fills:
            own[place] = ins[buffer][source]

    def fold(self, step: int, slots: StepViews) -> None:
        own, parts = slots[self._index], self._steps[step].folds
        if len(parts) > FEW_PARTS:
            self._fold_together(parts, slots)
            return
        # Straight into the place that fill() has left out: no member reads it before this one posts ``reduced``.
        for buffer, source, place in parts:
            sources = [slot[place] for slot in slots]
            sources[self._index] = self._ins[buffer][source]
            self._fold(sources, own[place], self._prescale, self._postscale)

    def _fold_together(self, parts: Sequence[PlacedPart], slots: StepViews) -> None:
        """Put the parts of this member's slice together, and reduce the slice at once."""
        place = slice(parts[0][2].start, parts[-1][2].stop)
        size = place.stop - place.start
        if len(self._scratch) < size:
            self._scratch = np.empty(size, self._ins[0].dtype)
        sources = [slot[place] for slot in slots]
        inputs = [self._ins[buffer][source] for buffer, source, _ in parts]
        sources[self._index] = np.concatenate(inputs, out=self._scratch[:size])
        self._fold(sources, slots[self._index][place], self._prescale, self._postscale)

    def take(self, step: int, slots: StepViews) -> None:
        outs = self._outs
        for buffer, target, member, place in self._steps[step].takes:
            outs[buffer][target] = slots[member][place]


def starts(counts: Sequence[int]) -> list[int]:
    """Return where each of several consecutive parts begins."""
    return [0, *accumulate(counts)][:-1]


class AllGather:
    """Copy of each member's part to all, a slot at a time; bytes."""

    def __init__(
        self, send: HostArray, counts: Sequence[int], out: HostArray, index: int, chunk: int
    ) -> None:
        self._send, self._counts, self._out, self._index, self._chunk = send, counts, out, index, chunk
        self._starts = starts(counts)
        # The longest part counts, also on members with a shorter one: each step waits for all members.
        self.steps = -(-max(counts) // chunk)

    def fill(self, step: int, slots: StepViews) -> None:
        part = self._send[step * self._chunk : (step + 1) * self._chunk]
        if len(part):
            slots[self._index][: len(part)] = part
            at = self._starts[self._index] + step * self._chunk
            self._out[at : at + len(part)] = part

    def take(self, step: int, slots: StepViews) -> None:
        done, chunk = step * self._chunk, self._chunk
        for member, count in enumerate(self._counts):
            length = min(chunk, count - done)
            if length > 0 and member != self._index:
                at = self._starts[member] + done
                self._out[at : at + length] = slots[member][:length]


class Broadcast:
    """Copy of the root's buffer to all, a slot at a time; bytes."""

    def __init__(self, buffer: HostArray, root: int, index: int, chunk: int) -> None:
        self._buffer, self._root, self._is_root, self._chunk = buffer, root, root == index, chunk
        self.steps = -(-len(buffer) // chunk)

    def fill(self, step: int, slots: StepViews) -> None:
        if self._is_root:
            part = self._buffer[step * self._chunk : (step + 1) * self._chunk]
            slots[self._root][: len(part)] = part

    def take(self, step: int, slots: StepViews) -> None:
        if not self._is_root:
            part = self._buffer[step * self._chunk : (step + 1) * self._chunk]
            part[:] = slots[self._root][: len(part)]


class AllToAll:
    """Exchange between all pairs of members: a slot is divided into a place for each receiver; bytes.

    ``steps`` is the number of steps that this member needs. No member knows all others' counts, so the members agree on the largest.
    """

    def __init__(
        self,
        send: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: HostArray,
        index: int,
        place: int,
    ) -> None:
        self._send, self._out, self._index, self._place = send, out, index, place
        self._send_counts, self._recv_counts = send_counts, recv_counts
        self._send_starts, self._recv_starts = starts(send_counts), starts(recv_counts)
        self.steps = -(-max(*send_counts, *recv_counts) // place)

    def fill(self, step: int, slots: StepViews) -> None:
        done, place, own = step * self._place, self._place, slots[self._index]
        for member, count in enumerate(self._send_counts):
            length = min(place, count - done)
            if length > 0:
                at = self._send_starts[member] + done
                part = self._send[at : at + length]
                if member == self._index:
                    mine = self._recv_starts[member] + done
                    self._out[mine : mine + length] = part
                else:
                    own[member * place : member * place + length] = part

    def take(self, step: int, slots: StepViews) -> None:
        done, place, index = step * self._place, self._place, self._index
        for member, count in enumerate(self._recv_counts):
            length = min(place, count - done)
            if length > 0 and member != index:
                at = self._recv_starts[member] + done
                self._out[at : at + length] = slots[member][index * place : index * place + length]


class ReduceScatter:
    """Reduction of a slice for each member: a slot is divided into a place for each, which reduces all members' elements in its places."""

    def __init__(
        self,
        send: HostArray,
        counts: Sequence[int],
        out: HostArray,
        index: int,
        place: int,
        fold: Fold,
        reduction: Reduction,
    ) -> None:
        self._send, self._counts, self._out, self._index, self._place = send, counts, out, index, place
        self._fold, self._prescale, self._postscale = fold, reduction.prescale, reduction.postscale
        self._starts = starts(counts)
        self.steps = -(-max(counts) // place)

    def fill(self, step: int, slots: StepViews) -> None:
        done, place, own = step * self._place, self._place, slots[self._index]
        for member, count in enumerate(self._counts):
            length = min(place, count - done)
            if length > 0 and member != self._index:
                at = self._starts[member] + done
                own[member * place : member * place + length] = self._send[at : at + length]

    def take(self, step: int, slots: StepViews) -> None:
        done, place, index = step * self._place, self._place, self._index
        length = min(place, self._counts[index] - done)
        if length <= 0:
            return
        sources = [slot[index * place : index * place + length] for slot in slots]
        at = self._starts[index] + done
        # From the input: fill() has put nothing into this member's own place.
        sources[index] = self._send[at : at + length]
        self._fold(sources, self._out[done : done + length], self._prescale, self._postscale)
