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

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Protocol

import numpy as np

from hvdlab.collectives.planes.base import HostArray
from hvdlab.collectives.planes.shm.layout import ChunkSlice, cut, slice_bounds
from hvdlab.collectives.reduce import Fold
from hvdlab.collectives.types import Reduction

FEW_PARTS = 4
"""Parts of tensors in one slice that a member reduces one by one; more of them it first puts together."""


class PipelineStage(IntEnum):
    """Part of a step: fill this member's slot, fold a slice of all slots, take from all slots."""

    FILL = 0
    FOLD = 1
    TAKE = 2


def two_stages(steps: int, ahead: int) -> Iterator[tuple[PipelineStage, int]]:
    """Yield (stage, step within the operation) in order, without folding."""
    for i in range(steps + ahead):
        if i < steps:
            yield PipelineStage.FILL, i
        if i >= ahead:
            yield PipelineStage.TAKE, i - ahead


def three_stages(steps: int, ahead: int) -> Iterator[tuple[PipelineStage, int]]:
    """Yield (stage, step within the operation) in order, with folding."""
    for i in range(steps + 2 * ahead):
        if i < steps:
            yield PipelineStage.FILL, i
        if ahead <= i < steps + ahead:
            yield PipelineStage.FOLD, i - ahead
        if i >= 2 * ahead:
            yield PipelineStage.TAKE, i - 2 * ahead


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
        self._chunks = list(cut([len(b) for b in ins], chunk))

    @property
    def steps(self) -> int:
        return len(self._chunks)

    def fill(self, step: int, slots: StepViews) -> None:
        # Through the slot: to read the other member's memory where it lies (process_vm_readv) took twice as long.
        own, ins = slots[self._index], self._ins
        for buffer, start, at, length in self._chunks[step]:
            own[at : at + length] = ins[buffer][start : start + length]

    def take(self, step: int, slots: StepViews) -> None:
        index, fold, postscale = self._index, self._fold, self._postscale
        other = slots[1 - index]
        for buffer, start, at, length in self._chunks[step]:
            mine, theirs = self._ins[buffer][start : start + length], other[at : at + length]
            # Both members add in the order of their positions: the payload of a NaN depends on it.
            sources = (theirs, mine) if index else (mine, theirs)
            fold(sources, self._outs[buffer][start : start + length], 1.0, postscale)


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
        self._ins, self._outs, self._index, self._members = ins, outs, index, members
        self._fold, self._prescale, self._postscale = fold, reduction.prescale, reduction.postscale
        self._chunks = list(cut([len(b) for b in ins], chunk))
        # Slices in whole cache lines, at which slots begin: where a member writes its result into its slot, no other member reads
        # from the same line for a slice of its own.
        self._grain = max(1, 64 // ins[0].itemsize)
        #: Bounds of the slices by the elements of a chunk: nearly all chunks are equally long.
        self._bounds_of: dict[int, list[int]] = {}
        self._scratch = np.empty(0, ins[0].dtype)

    @property
    def steps(self) -> int:
        return len(self._chunks)

    def _bounds(self, pieces: list[ChunkSlice]) -> list[int]:
        length = pieces[-1].at + pieces[-1].length
        bounds = self._bounds_of.get(length)
        if bounds is None:
            bounds = self._bounds_of[length] = slice_bounds(length, self._members, self._grain)
        return bounds

    def fill(self, step: int, slots: StepViews) -> None:
        own, pieces = slots[self._index], self._chunks[step]
        bounds = self._bounds(pieces)
        lo, hi = bounds[self._index], bounds[self._index + 1]
        for buffer, start, at, length in pieces:
            source, end = self._ins[buffer], at + length
            if at < lo:
                stop = min(end, lo)
                own[at:stop] = source[start : start + stop - at]
            if end > hi:
                begin = max(at, hi)
                own[begin:end] = source[start + begin - at : start + length]

    def fold(self, step: int, slots: StepViews) -> None:
        bounds = self._bounds(self._chunks[step])
        lo, hi = bounds[self._index], bounds[self._index + 1]
        own = slots[self._index]
        # Straight into the place that fill() has left out: no member reads it before this one posts ``reduced``.
        for at, mine in self._inputs(self._chunks[step], lo, hi):
            end = at + len(mine)
            sources = [slot[at:end] for slot in slots]
            sources[self._index] = mine
            self._fold(sources, own[at:end], self._prescale, self._postscale)

    def _inputs(self, pieces: list[ChunkSlice], lo: int, hi: int) -> list[tuple[int, HostArray]]:
        """Return this member's input between two elements of a chunk, in parts, each with its first element within the chunk."""
        parts = []
        for buffer, start, at, length in pieces:
            begin, end = max(at, lo), min(at + length, hi)
            if begin < end:
                parts.append((begin, self._ins[buffer][start + begin - at : start + end - at]))
        if len(parts) <= FEW_PARTS:
            return parts
        if len(self._scratch) < hi - lo:
            self._scratch = np.empty(hi - lo, self._ins[0].dtype)
        return [(lo, np.concatenate([part for _, part in parts], out=self._scratch[: hi - lo]))]

    def take(self, step: int, slots: StepViews) -> None:
        pieces = self._chunks[step]
        bounds = self._bounds(pieces)
        member = 0
        for buffer, start, at, length in pieces:
            out, end = self._outs[buffer], at + length
            while at < end:
                # More than one step where slices are empty, since a chunk can have fewer cache lines than there are members.
                while bounds[member + 1] <= at:
                    member += 1
                stop = min(end, bounds[member + 1])
                out[start : start + stop - at] = slots[member][at:stop]
                start += stop - at
                at = stop


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
