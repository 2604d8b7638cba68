"""The plane: from collectives to the steps of a :class:`~hvdlab.collectives.planes.gpu.nccl_group.NcclGroup`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import ClassVar

from hvdlab.collectives.planes.base import Buffer, Completion, PhaseTimes
from hvdlab.collectives.planes.gpu import nccl_library
from hvdlab.collectives.planes.gpu.device import Device
from hvdlab.collectives.planes.gpu.gpu_plane import CudaBuffer, GpuPlane, cuda_buffer
from hvdlab.collectives.planes.gpu.jobs import LINE, MOST_ADDRESSES
from hvdlab.collectives.planes.gpu.nccl_group import NcclGroup
from hvdlab.collectives.planes.gpu.nccl_library import ID_BYTES, TYPES, NcclPiece
from hvdlab.collectives.types import PLAIN, DType, ReduceOp, Reduction

TENSORS = 512
"""Tensors that are packed together; a collective with more becomes several operations."""
BLOCK_BYTES = 1 << 26
"""Bytes that members exchange at a time where our kernels add: so the memory for it does not grow with the tensors."""
MOST_BLOCKS = 64
"""Blocks of an operation; those of a larger one are larger. The tables of their launches must fit into ``TABLE_BYTES``."""

_KEY = "nccl"


def is_by_nccl(dtype: DType, op: ReduceOp) -> bool:
    """Return whether NCCL gives the results that all planes give.

    It has no 16-bit integers, rounds f16 and bf16 at each addition, and its minimum and maximum lose NaNs.
    """
    keeps_nan = not dtype.is_floating or op in (ReduceOp.SUM, ReduceOp.PRODUCT)
    return dtype in TYPES and keeps_nan


def _counted_as(dtype: DType) -> DType:
    """Return the element type to reduce in: truth values are reduced as the bytes that they are."""
    return DType.U8 if dtype is DType.BOOL else dtype


@dataclass(frozen=True, slots=True)
class RankShare:
    """Part of an array that a member reduces, in elements."""

    begin: int
    count: int


class NcclPlane(GpuPlane[NcclGroup]):
    """Data plane for ranks that have a GPU each, on any hosts.

    The members join at the first operation, which shows the GPU of this one's tensors. NCCL's own reductions can give
    other results than the other planes (see :func:`is_by_nccl`). Then members exchange their shares, and our kernel adds them in the order
    of positions, f16 and bf16 in float32, rounded once. ``phases.transfer`` is the time from the begin of an operation to its end, with all waits.
    """

    name: ClassVar[str] = "cuda/nccl"
    most_members: ClassVar[int] = MOST_ADDRESSES - 1  # our kernel reads an array of each, and writes one

    @classmethod
    def unavailable(cls) -> str | None:
        reason = super().unavailable()
        if reason is None and (missing := nccl_library.why_missing()):
            reason = f"The plane `{cls.name}` can't be used: {missing}"
        return reason

    # -- joining ----------------------------------------------------------------------------------------------------

    def _join(self, device: Device, deadline: float) -> NcclGroup:
        me, nccl = self.context, nccl_library.nccl()
        assert me.store is not None, "a group of the engine has a store"
        with device:
            if me.index == 0:
                identity = nccl.unique_id()
                assert len(identity) == ID_BYTES
                me.store.set(_KEY, identity)
            else:
                identity = me.store.get(_KEY, max(0.0, deadline - time.monotonic()))
            return NcclGroup(device, nccl.connect(identity, me.size, me.index))

    # -- operations ---------------------------------------------------------------------------------------------------

    def start_allreduce(
        self,
        ins: Sequence[Buffer],
        outs: Sequence[Buffer],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> Completion | None:
        started, dtype = time.monotonic_ns(), _counted_as(dtype)
        pairs = [(cuda_buffer(i), cuda_buffer(o)) for i, o in zip(ins, outs, strict=True) if i.nbytes]
        last: Completion | None = None
        for start in range(0, len(pairs), TENSORS):
            some = pairs[start : start + TENSORS]
            tensors = [tensor for pair in some for tensor in pair]
            steps = partial(_allreduce, pairs=some, dtype=dtype, reduction=reduction)
            last = self._run(steps, tensors, phases, started)
        # Operations end in the order in which they were begun, so the end of the last one is that of all.
        return last

    def start_allgather(
        self, send: Buffer, counts: Sequence[int], out: Buffer, phases: PhaseTimes
    ) -> Completion | None:
        sizes = [count * out.dtype.itemsize for count in counts]
        source, target = cuda_buffer(send), cuda_buffer(out)
        return self._run(
            partial(_allgather, source=source, sizes=sizes, out=target), [source, target], phases
        )

    def start_broadcast(
        self, source: Buffer | None, out: Buffer, root: int, phases: PhaseTimes
    ) -> Completion | None:
        if not out.nbytes:
            return None
        given, target = cuda_buffer(source or out), cuda_buffer(out)

        def steps(member: NcclMember) -> None:
            group = member.group
            group.call(group.communicator.broadcast, given.pointer, target.pointer, target.nbytes, root)

        return self._run(steps, [given, target], phases)

    def start_reducescatter(
        self,
        send: Buffer,
        counts: Sequence[int],
        out: Buffer,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> Completion | None:
        source, target = cuda_buffer(send), cuda_buffer(out)
        steps = partial(
            _reducescatter, source=source.pointer, counts=counts, out=target.pointer, dtype=_counted_as(dtype),
            reduction=reduction,
        )  # fmt: skip
        return self._run(steps, [source, target], phases)

    def start_alltoall(
        self,
        send: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Buffer,
        phases: PhaseTimes,
    ) -> Completion | None:
        source, target, itemsize = cuda_buffer(send), cuda_buffer(out), out.dtype.itemsize

        def steps(member: NcclMember) -> None:
            sends = _pieces(source.pointer, _in_turn(send_counts), itemsize)
            receives = _pieces(target.pointer, _in_turn(recv_counts), itemsize)
            own, place = sends[member.index], receives[member.index]
            member.group.copy(place.pointer, own.pointer, own.nbytes)
            member.exchange(sends, receives)

        return self._run(steps, [source, target], phases)

    def start_barrier(self, phases: PhaseTimes) -> Completion | None:
        def steps(member: NcclMember) -> None:
            group = member.group
            word = group.scratch(LINE)
            # NCCL has no barrier; an allreduce of one byte ends once all have come.
            group.call(group.communicator.allreduce, word, word, 1, DType.U8, ReduceOp.MAX)

        return self._run(steps, [], phases)

    def _run(
        self,
        steps: Callable[[NcclMember], None],
        tensors: Sequence[CudaBuffer],
        phases: PhaseTimes,
        started: int = 0,
    ) -> Completion:
        group = self._joined(tensors)
        member = NcclMember(group, self.context.index, self.context.size)
        return group.run(partial(steps, member), tensors, phases, started or time.monotonic_ns())


@dataclass(frozen=True, slots=True)
class NcclMember:
    """Member while it enqueues an operation.

    Attributes:
        group: The group that enqueues the steps.
        index: This member's position.
        size: Number of members.
    """

    group: NcclGroup
    index: int
    size: int

    def exchange(self, sends: Sequence[NcclPiece], receives: Sequence[NcclPiece]) -> None:
        """Exchange pieces with the other members. Those from this member to itself, and empty ones, are left out."""
        sends, receives = (
            [piece for piece in pieces if piece.member != self.index and piece.nbytes]
            for pieces in (sends, receives)
        )
        if sends or receives:
            self.group.call(self.group.communicator.exchange, sends, receives)


def _allreduce(
    member: NcclMember, pairs: Sequence[tuple[CudaBuffer, CudaBuffer]], dtype: DType, reduction: Reduction
) -> None:
    itemsize, by_nccl = dtype.itemsize, is_by_nccl(dtype, reduction.op)
    if len(pairs) == 1:
        ((source, out),) = pairs
        count = source.nbytes // itemsize
        if by_nccl:
            _reduce_by_nccl(member, source.pointer, out.pointer, count, dtype, reduction)
        else:
            _reduce_by_exchange(member, source.pointer, out.pointer, count, dtype, reduction, scratch=0)
        return
    group = member.group
    # Each tensor begins at a line, so that our kernels move whole lines. The bytes between them are reduced with them.
    sizes = [source.nbytes for source, _ in pairs]
    *begins, total = accumulate((_up(size) for size in sizes), initial=0)
    count = total // itemsize
    packed = group.scratch(total + (0 if by_nccl else _room(member, count, itemsize)))
    places = [packed + begin for begin in begins]
    pack = [(source.pointer, place) for (source, _), place in zip(pairs, places, strict=True)]
    unpack = [(place, out.pointer) for (_, out), place in zip(pairs, places, strict=True)]
    if by_nccl:
        _scale(group, sizes, pack, dtype, reduction.prescale)
        # Without factors: they are applied while the tensors are packed and unpacked.
        _reduce_by_nccl(member, packed, packed, count, dtype, PLAIN[reduction.op])
        _scale(group, sizes, unpack, dtype, reduction.postscale)
    else:
        group.fold(sizes, pack, None)
        _reduce_by_exchange(member, packed, packed, count, dtype, reduction, scratch=packed + total)
        group.fold(sizes, unpack, None)


def _scale(
    group: NcclGroup, sizes: Sequence[int], moves: Sequence[tuple[int, int]], dtype: DType, factor: float
) -> None:
    """Copy arrays of ``sizes`` bytes, and multiply them."""
    if factor == 1.0:
        group.fold(sizes, moves, None)
    else:
        group.fold([size // dtype.itemsize for size in sizes], moves, dtype, Reduction(ReduceOp.SUM, factor))


def _reduce_by_nccl(
    member: NcclMember, source: int, out: int, count: int, dtype: DType, reduction: Reduction
) -> None:
    group = member.group
    if reduction.prescale != 1.0:
        group.fold([count], [(source, out)], dtype, Reduction(ReduceOp.SUM, reduction.prescale))
        # From the output on: the user's input stays as it is.
        source = out
    group.call(group.communicator.allreduce, source, out, count, dtype, reduction.op)
    if reduction.postscale != 1.0:
        group.fold([count], [(out, out)], dtype, Reduction(ReduceOp.SUM, reduction.postscale))


def _reduce_by_exchange(
    member: NcclMember, source: int, out: int, count: int, dtype: DType, reduction: Reduction, scratch: int
) -> None:
    """Reduce block by block: each member gets its share of all members' arrays, adds them up, and gives the result to all.

    ``scratch`` is memory of :func:`_room` bytes, or 0 if the operation uses no other.
    """
    itemsize = dtype.itemsize
    scratch = scratch or member.group.scratch(_room(member, count, itemsize))
    # All blocks receive into the same scratch: the group's one stream folds a block before it receives the next one.
    for begin, elements in _blocks(count, BLOCK_BYTES // itemsize):
        at = begin * itemsize
        shares = _shares(elements, member.size, itemsize)
        own = shares[member.index]
        _fold_share(member, source + at, shares, out + at + own.begin * itemsize, dtype, reduction, scratch)
        result = out + at + own.begin * itemsize
        sends = [NcclPiece(other, result, own.count * itemsize) for other in range(member.size)]
        member.exchange(sends, _pieces(out + at, shares, itemsize))


def _reducescatter(
    member: NcclMember, source: int, counts: Sequence[int], out: int, dtype: DType, reduction: Reduction
) -> None:
    itemsize = dtype.itemsize
    most = max(LINE, BLOCK_BYTES // (itemsize * member.size) // LINE * LINE)  # whole lines
    slices = _in_turn(counts)
    widest = _largest_block(max(counts), most)
    scratch = member.group.scratch(member.size * _up(min(widest, max(counts)) * itemsize))
    # As many blocks on all members, also where this one's slice has ended: the others need its share.
    for begin, elements in _blocks(max(counts), most):
        shares = [RankShare(s.begin + begin, max(0, min(elements, s.count - begin))) for s in slices]
        _fold_share(member, source, shares, out + begin * itemsize, dtype, reduction, scratch)


def _fold_share(
    member: NcclMember,
    source: int,
    shares: Sequence[RankShare],
    out: int,
    dtype: DType,
    reduction: Reduction,
    scratch: int,
) -> None:
    """Get this member's share of the array of each member, and reduce them to ``out``."""
    itemsize = dtype.itemsize
    own = shares[member.index]
    nbytes = own.count * itemsize
    receives = [NcclPiece(other, scratch + other * _up(nbytes), nbytes) for other in range(member.size)]
    member.exchange(_pieces(source, shares, itemsize), receives)
    places = [piece.pointer for piece in receives]
    places[member.index] = source + own.begin * itemsize
    member.group.fold([own.count], [(*places, out)], dtype, reduction)


def _allgather(member: NcclMember, source: CudaBuffer, sizes: Sequence[int], out: CudaBuffer) -> None:
    group = member.group
    # All members decide alike, as each knows all sizes. Otherwise some would call another operation of NCCL than the others.
    if sizes[0] and len(set(sizes)) == 1:
        group.call(group.communicator.allgather, source.pointer, out.pointer, sizes[0])
        return
    places = _pieces(out.pointer, _in_turn(sizes), 1)
    own = places[member.index]
    group.copy(own.pointer, source.pointer, own.nbytes)
    member.exchange([NcclPiece(other, source.pointer, own.nbytes) for other in range(member.size)], places)


def _pieces(base: int, shares: Sequence[RankShare], itemsize: int) -> list[NcclPiece]:
    """Return the shares of an array as a piece for each member."""
    return [
        NcclPiece(other, base + share.begin * itemsize, share.count * itemsize)
        for other, share in enumerate(shares)
    ]


def _in_turn(counts: Sequence[int]) -> list[RankShare]:
    """Return shares that follow each other."""
    begins = accumulate(counts, initial=0)
    return [RankShare(begin, count) for begin, count in zip(begins, counts, strict=False)]


def _shares(count: int, members: int, itemsize: int) -> list[RankShare]:
    """Return equal shares that begin at lines of the array; the last ones may be smaller."""
    grain = LINE // itemsize
    each = -(-count // (members * grain)) * grain
    return [
        RankShare(min(index * each, count), max(0, min(each, count - index * each)))
        for index in range(members)
    ]


def _blocks(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield begin and elements of the blocks of ``most`` elements into which ``count`` elements are divided."""
    size = _largest_block(count, most)
    for begin in range(0, count, size):
        yield begin, min(size, count - begin)


def _largest_block(count: int, most: int) -> int:
    """Return the elements of a block: ``most``, or as many as make ``MOST_BLOCKS`` blocks of whole lines."""
    return max(most, _up(-(-count // MOST_BLOCKS)))


def _room(member: NcclMember, count: int, itemsize: int) -> int:
    """Return the bytes of all members' shares that :func:`_reduce_by_exchange` receives."""
    elements = min(count, _largest_block(count, BLOCK_BYTES // itemsize))
    return member.size * _up(_shares(elements, member.size, itemsize)[0].count * itemsize)


def _up(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
