"""The shared-memory plane: every operation is a sequence of steps over a few shared slots per member.

A step moves at most one slot of each member. An object with ``fill``, ``take`` and perhaps ``fold`` (:mod:`schedules`)
does the work of each step; this module drives it in the order that is proved there. A small
allreduce has a path of its own: one step, one synchronisation, and every member reduces everything.

The size of chunks is measured (:class:`ChunkChoice`): which one is best depends on the caches, on how fast a core runs Python, and on
how many members share a core.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, ClassVar

import numpy as np

from hvdlab.collectives.planes.base import (
    HostArray,
    PhaseTimes,
    PlaneAborted,
    PlaneBroken,
    PlaneContext,
    storage_type,
)
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.planes.shm.layout import (
    CHUNK_BYTES,
    LINE,
    PAGE,
    PAIR_CHUNK_BYTES,
    SegmentLayout,
    layout_from,
    part,
)
from hvdlab.collectives.planes.shm.schedules import (
    AllGather,
    AllToAll,
    Broadcast,
    FoldingOperation,
    PipelineStage,
    ReduceScatter,
    SlicedReduction,
    SteppedOperation,
    StepViews,
    TwoMemberReduction,
    ahead_of_three,
    ahead_of_two,
    three_stages,
    two_stages,
)
from hvdlab.collectives.planes.shm.signals import ARRIVED, REDUCED, YIELDS, Signals
from hvdlab.collectives.reduce import Fold, is_direct, make_fold
from hvdlab.collectives.types import DType, ReduceOp, Reduction

SMALL_BYTES = 16 * 1024
"""Up to this size in bytes every member reduces everything, in one step with one synchronisation."""
# With four chunks the median of 1 MiB was half as much again: at each chunk a member may have to wait.
TWO_CHUNKS_BYTES = 1024 * 1024
"""Up to this size in bytes two members make do with two chunks: waiting for each other costs more than the cache gains."""
LEAST_CHUNK_BYTES = 64 * 1024
"""Chunks are not made smaller than this to have more of them."""
SMALL_VIEWS = 128
"""Number of shapes for which short views of slots are kept."""
TRIAL_BYTES = 8 * 1024 * 1024
"""Bytes that are reduced in one trial of a size of chunks."""
ROUNDS = 3
"""How often each size is tried. The first time it may find memory that was not touched before, or other work on a core."""
LEAST_GAIN = 0.03
"""By which part of the default's time another size has to be faster."""
_BYTE = np.dtype(np.uint8)
_TOO_MANY_FILES = "as happens when a process has as many open files as it may (`ulimit -n`)"


class ShmPlane(HostPlane):
    """Data plane for ranks of one host.

    Options: ``chunk_bytes`` and ``slots`` (the layout: equal on all members and for ``segment_size``) and ``yields``.
    Reductions add in the order of the members' positions at any size. ``phases``: ``pack`` is copying into
    slots, ``transfer`` reducing and copying out of them. The size of chunks is measured
    (:class:`ChunkChoice`) unless :meth:`tune` sets it.
    """

    name: ClassVar[str] = "shm"

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context)
        self._index, self._size, self._fd = context.index, context.size, context.memory_fd
        self._layout = layout_from(context.options, context.size)
        self._small = min(SMALL_BYTES, self._layout.chunk_bytes)
        #: Bytes of a chunk that tune() has set; 0 leaves them to the choice.
        self._slice = 0
        #: Steps of all operations so far, the same on all members between operations.
        self._step = 0
        #: Numbers that this member has declared, which select the row for the next one.
        self._declared = 0
        self._choice = ChunkChoice(context.size, self._layout.chunk_bytes)
        # Operations that move bytes to one place for each member, or from one, have chunks of the default's size.
        self._default = min(CHUNK_BYTES, self._layout.chunk_bytes)
        self._folds: dict[tuple[DType, ReduceOp], Fold] = {}
        #: Held while the memory and its signals come and go, so that an abort finds both or none.
        self._guard = threading.Lock()
        self._aborted = False
        self._memory: mmap.mmap | None = None

    @classmethod
    def unavailable(cls) -> str | None:
        machine = platform.machine().lower()
        if not sys.platform.startswith("linux"):
            return "The plane `shm` needs Linux (memfd and futex); choose `gloo` or `mpi`."
        if machine not in ("x86_64", "amd64") or sys.maxsize < 2**32:
            return (
                f"The plane `shm` relies on the memory order of 64-bit x86, and this machine is {machine}; "
                "choose `gloo` or `mpi`."
            )
        return None

    def connect(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        memory = self._map()
        yields = int(self.context.options.get("yields", YIELDS))
        with self._guard:
            self._memory = memory
            self._slots = Slots(memory, self._layout)
            self._signals = Signals(memory, self._layout, self._index, yields)
            # An abort may have come before there were signals, whose waits it could end.
            if self._aborted:
                self._signals.abort()
        # Step 1 moves no data. Fresh memory has zeros in all counters, so when all have reached 1 each member has mapped it.
        self._step = 1
        self._signals.post(ARRIVED, 1)
        self._signals.wait(ARRIVED, 1, deadline)

    def _map(self) -> mmap.mmap:
        if self._fd < 0:
            raise PlaneBroken(f"shared memory: no memory came for this group, {_TOO_MANY_FILES}")
        size = os.fstat(self._fd).st_size
        if size < self._layout.size:
            raise PlaneBroken(
                f"shared memory: the segment has {size} bytes, {self._layout.size} are needed for {self._size} members; "
                "the coordinator and this rank have different chunk_bytes or slots"
            )
        try:
            memory = mmap.mmap(self._fd, self._layout.size)  # holds a descriptor of its own
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise PlaneBroken(f"shared memory: it can't be mapped, {_TOO_MANY_FILES}") from error
        os.close(self._fd)
        # close() must not close this number, which can be another file's by then.
        self._fd = -1
        return memory

    @np.errstate(all="ignore")
    def allreduce(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        self._check()
        op = reduction.op
        fold = self._folds.get((dtype, op)) or self._make_fold(dtype, op)
        if len(ins) == 1 and 0 < ins[0].nbytes <= self._small:
            self._reduce_small(ins[0], outs[0], fold, reduction, phases)
            return
        total = sum(len(b) for b in ins)
        # All members know the same sizes, so none of them counts a step.
        if not total:
            return
        done = 0
        # All members come to the same answer here, or they would cut the tensor differently: tune() and the trials so far are the same on
        # all of them.
        if not self._slice and self._choice.candidate is not None and total * dtype.itemsize >= TRIAL_BYTES:
            done = self._try_chunks(ins, outs, dtype, fold, reduction, phases)
        if done == total:
            return
        if done:
            ins, outs = part(ins, done, total - done), part(outs, done, total - done)
        chunk = self._chunk(total - done, dtype.itemsize)
        self._reduce(ins, outs, dtype, fold, reduction, chunk, phases)

    def _try_chunks(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        dtype: DType,
        fold: Fold,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> int:
        """Reduce as much as trials of chunks' sizes need. Return the number of elements."""
        total, count, done = sum(len(b) for b in ins), TRIAL_BYTES // dtype.itemsize, 0
        self.barrier(phases)  # a member that is late for the operation must not count
        while (candidate := self._choice.candidate) is not None and done + count <= total:
            begin = monotonic_ns()
            some = part(ins, done, count), part(outs, done, count)
            self._reduce(*some, dtype, fold, reduction, candidate // dtype.itemsize, phases)
            parity = self._declare(monotonic_ns() - begin)
            # This step is what publishes the declarations: after it each member can read those of all.
            self.barrier(phases)
            self._choice.measured(self._signals.agreed(parity))
            done += count
        if self._choice.candidate is None:
            self.context.on_chunks(self._choice.chosen)
        return done

    def _declare(self, number: int) -> int:
        """Declare a number to the other members, which read it after the next step. Return the parity under which they do.

        There are two rows by turns: a member that writes one again knows that all have read it.
        """
        parity = self._declared % 2
        self._declared += 1
        self._signals.declare(parity, number)
        return parity

    def _reduce(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        dtype: DType,
        fold: Fold,
        reduction: Reduction,
        chunk: int,
        phases: PhaseTimes,
    ) -> None:
        """Allreduce in chunks of ``chunk`` elements."""
        # Not with a prescale: the fold scales the first source into the output before it reads the second. In place the output *is* the
        # second source on the second member.
        if self._size == 2 and reduction.prescale == 1.0 and is_direct(dtype):
            pair = TwoMemberReduction(ins, outs, self._index, chunk, fold, reduction.postscale)
            self._run(pair, self._slots.whole(storage_type(dtype)), phases)
        else:
            sliced = SlicedReduction(ins, outs, self._index, self._size, chunk, fold, reduction)
            self._run_folding(sliced, self._slots.whole(storage_type(dtype)), phases)

    def _make_fold(self, dtype: DType, op: ReduceOp) -> Fold:
        return self._folds.setdefault((dtype, op), make_fold(dtype, op))

    def _chunk(self, total: int, itemsize: int) -> int:
        """Return the elements per chunk for ``total`` elements: at least two chunks, to overlap, unless they get too small."""
        half = -(-total * itemsize // 2 // PAGE) * PAGE
        few = self._size == 2 and total * itemsize <= TWO_CHUNKS_BYTES
        most = self._slice or (self._default if few else self._choice.chosen)
        return min(max(half, LEAST_CHUNK_BYTES), most, self._layout.chunk_bytes) // itemsize

    def tune(self, slice_bytes: int) -> None:
        # A chunk without room for a cache line of each member could not be shared among them.
        least = -(-LINE * self._size // PAGE) * PAGE
        self._slice = max(slice_bytes // PAGE * PAGE, least) if slice_bytes else 0

    def _reduce_small(
        self,
        source: HostArray,
        out: HostArray,
        fold: Fold,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        start = monotonic_ns()
        step, signals = self._step, self._signals
        slots = self._slots.short(source.dtype, len(source))[step % self._layout.slots]
        slots[self._index][...] = source
        self._step = step = step + 1
        # One synchronisation is enough. This slot is filled again only for a later step, ``slots`` further on, and a member gets there only
        # after all have posted steps that follow their folds of this one (see schedules.py, "Between operations").
        signals.post(ARRIVED, step)
        packed = monotonic_ns()
        signals.wait(ARRIVED, step)
        waited = monotonic_ns()
        fold(slots, out, reduction.prescale, reduction.postscale)
        phases.pack += packed - start
        phases.wait += waited - packed
        phases.transfer += monotonic_ns() - waited

    def allgather(self, send: HostArray, counts: Sequence[int], out: HostArray, phases: PhaseTimes) -> None:
        sizes = [c * out.itemsize for c in counts]
        work = AllGather(_bytes(send), sizes, _bytes(out), self._index, self._default)
        self._run(work, self._slots.whole(_BYTE), phases)

    def broadcast(self, buffer: HostArray, root: int, phases: PhaseTimes) -> None:
        work = Broadcast(_bytes(buffer), root, self._index, self._default)
        self._run(work, self._slots.whole(_BYTE), phases)

    @np.errstate(all="ignore")
    def reducescatter(
        self,
        send: HostArray,
        counts: Sequence[int],
        out: HostArray,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        op = reduction.op
        fold = self._folds.get((dtype, op)) or self._make_fold(dtype, op)
        place = self._place() // dtype.itemsize
        work = ReduceScatter(send, counts, out, self._index, place, fold, reduction)
        self._run(work, self._slots.whole(storage_type(dtype)), phases)

    def alltoall(
        self,
        send: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: HostArray,
        phases: PhaseTimes,
    ) -> None:
        self._check()
        item = out.itemsize
        work = AllToAll(
            _bytes(send),
            [c * item for c in send_counts],
            [c * item for c in recv_counts],
            _bytes(out),
            self._index,
            self._place(),
        )
        # Members learn the largest number of steps only by the first step, after which all declarations can be read.
        parity = self._declare(work.steps)
        views = self._slots.whole(_BYTE)
        self._drive(work, 0, 1, views, phases)
        # If no member has data the largest number is 0, below the first step of this call, which then does nothing.
        self._drive(work, 1, self._signals.agreed(parity), views, phases)

    def _place(self) -> int:
        """Return the bytes of a slot for each member, in whole cache lines."""
        return self._default // self._size // LINE * LINE

    def barrier(self, phases: PhaseTimes) -> None:
        self._check()
        start = monotonic_ns()
        self._step += 1
        self._signals.post(ARRIVED, self._step)
        self._signals.wait(ARRIVED, self._step)
        phases.wait += monotonic_ns() - start

    def _run(self, work: SteppedOperation, views: list[StepViews], phases: PhaseTimes) -> None:
        self._check()
        self._drive(work, 0, work.steps, views, phases)

    def _drive(
        self, work: SteppedOperation, first: int, stop: int, views: list[StepViews], phases: PhaseTimes
    ) -> None:
        """Run steps ``first`` to ``stop`` (not included) of ``work`` in two stages."""
        signals, slots, base = self._signals, self._layout.slots, self._step - first
        now = monotonic_ns()
        for stage, offset in two_stages(stop - first, ahead_of_two(slots)):
            step = first + offset
            # Counters hold completed steps, so the one that this step completes is one higher than its index from 0.
            end = base + step + 1
            before = now
            if stage is PipelineStage.FILL:
                work.fill(step, views[(end - 1) % slots])
                signals.post(ARRIVED, end)
                now = monotonic_ns()
                phases.pack += now - before
            else:
                signals.wait(ARRIVED, end)
                waited = monotonic_ns()
                work.take(step, views[(end - 1) % slots])
                now = monotonic_ns()
                phases.wait += waited - before
                phases.transfer += now - waited
        self._step += max(0, stop - first)

    def _run_folding(self, work: FoldingOperation, views: list[StepViews], phases: PhaseTimes) -> None:
        """Run all steps of ``work`` in three stages."""
        signals, slots, base = self._signals, self._layout.slots, self._step
        now = monotonic_ns()
        for stage, step in three_stages(work.steps, ahead_of_three(slots)):
            end = base + step + 1
            step_views = views[(end - 1) % slots]
            before = now
            if stage is PipelineStage.FILL:
                work.fill(step, step_views)
                signals.post(ARRIVED, end)
                now = monotonic_ns()
                phases.pack += now - before
                continue
            signals.wait(ARRIVED if stage is PipelineStage.FOLD else REDUCED, end)
            waited = monotonic_ns()
            if stage is PipelineStage.FOLD:
                work.fold(step, step_views)
                signals.post(REDUCED, end)
            else:
                work.take(step, step_views)
            now = monotonic_ns()
            phases.wait += waited - before
            phases.transfer += now - waited
        self._step = base + work.steps

    def _check(self) -> None:
        # Called before an operation touches the memory: other members may still run, and must not see steps of one that was aborted.
        if self._aborted:
            raise PlaneAborted

    def abort(self) -> None:
        with self._guard:
            self._aborted = True
            if self._memory is not None:
                self._signals.abort()

    def close(self) -> None:
        with self._guard:
            self._aborted = True
            memory, self._memory = self._memory, None
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            if memory is None:
                return
            # Under the guard, so that abort() never stores to words that are unmapped.
            self._signals.close()
        # Before the mapping: arrays keep the buffer exported, and closing it would raise.
        self._slots.close()
        self._folds.clear()
        try:
            memory.close()
        except BufferError:
            # A traceback still holds a view; the memory is unmapped when that goes.
            return


def _bytes(buffer: HostArray) -> HostArray:
    view: HostArray = buffer.view(np.uint8)
    return view


class Slots:
    """Views of all members' slots as arrays of one element type, by slot number and member."""

    def __init__(self, memory: mmap.mmap, layout: SegmentLayout) -> None:
        self._layout = layout
        self._bytes = np.frombuffer(memory, np.uint8)
        self._whole: dict[np.dtype[Any], list[StepViews]] = {}
        self._short: dict[tuple[np.dtype[Any], int], list[StepViews]] = {}

    def whole(self, dtype: np.dtype[Any]) -> list[StepViews]:
        """Return views of whole slots: ``views[slot][member]``."""
        views = self._whole.get(dtype)
        if views is None:
            views = self._whole[dtype] = self._make(dtype, self._layout.chunk_bytes)
        return views

    def short(self, dtype: np.dtype[Any], count: int) -> list[StepViews]:
        """Return views of the first ``count`` elements of each slot, kept for the next time."""
        views = self._short.get((dtype, count))
        if views is None:
            if len(self._short) >= SMALL_VIEWS:
                self._short.clear()
            views = self._short[dtype, count] = self._make(dtype, count * dtype.itemsize)
        return views

    def _make(self, dtype: np.dtype[Any], length: int) -> list[StepViews]:
        layout = self._layout
        return [
            tuple(self._view(layout.slot(m, slot), length, dtype) for m in range(layout.members))
            for slot in range(layout.slots)
        ]

    def _view(self, start: int, length: int, dtype: np.dtype[Any]) -> HostArray:
        view: HostArray = self._bytes[start : start + length].view(dtype)
        return view

    def close(self) -> None:
        """Drop all views, so that the memory can be unmapped."""
        self._whole.clear()
        self._short.clear()
        self._bytes = np.empty(0, np.uint8)


def default_chunk(members: int) -> int:
    """Return the bytes of a chunk, as long as nothing was measured."""
    return PAIR_CHUNK_BYTES if members == 2 else CHUNK_BYTES


class ChunkChoice:
    """Choice of the size of chunks by trials within the first large allreduces of a generation; equal on all members.

    Smaller chunks stay in the caches, larger ones let members wait for each other less often. So the first parts of
    :data:`TRIAL_BYTES` bytes, :data:`ROUNDS` for each size, have chunks of different sizes by turns. All after them have the size with the
    shortest trial. These parts are reduced all the same, so the measurement costs a barrier for each of them.

    All members must cut alike. Each declares how long a trial took it, and all use the longest time that a member declared. That is
    also why a generation does not begin with the choice of another one, or of an earlier job: a member that came since would not have it.

    Args:
        members: Members of the group.
        slot_bytes: Size of a slot: larger chunks are not tried.
    """

    def __init__(self, members: int, slot_bytes: int) -> None:
        self._default = min(default_chunk(members), slot_bytes)
        sizes = [
            size for size in (self._default // 2, self._default, self._default * 2) if size <= slot_bytes
        ]
        # Nothing is tried with many members (:data:`~hvdlab.collectives.planes.shm.layout.FEW`), or where slots are smaller than by default since a test or a benchmark asks for it.
        self._sizes = sizes if len(sizes) == 3 else []
        self._best: dict[int, int] = {}
        self._trials = 0
        #: Bytes of a chunk: the default until all trials are over.
        self.chosen = self._default

    @property
    def candidate(self) -> int | None:
        """Return the size to try next, in bytes; ``None`` if there is nothing left to try."""
        if self._trials == ROUNDS * len(self._sizes):
            return None
        return self._sizes[self._trials % len(self._sizes)]

    def measured(self, nanoseconds: int) -> None:
        """Record the time that the trial of :attr:`candidate` took the slowest member."""
        size = self.candidate
        assert size is not None
        # The shortest of the trials: other work on the cores and memory that was not touched before only ever add time.
        self._best[size] = min(nanoseconds, self._best.get(size, nanoseconds))
        self._trials += 1
        if self.candidate is None:
            fastest = min(self._best, key=self._best.__getitem__)
            if self._best[fastest] < (1 - LEAST_GAIN) * self._best[self._default]:
                self.chosen = fastest
