"""Operations of the data plane made of requests: shapes, outputs, scales, counts.

Three kinds of reductions are computed here, beside or instead of the plane:

* A *small tensor* travels with the negotiation. Every member gets the bytes of all members in the same order and computes the
  result itself, with the folds of the planes, so all members get the same bits.
* *Integer averages* and scaled integers are reduced in a wider type; see :mod:`hvdlab.collectives.reduce`.
* *Adasum* needs from a plane alltoall, small sums and allgather only. Member ``i`` gets slice ``i`` of all members' tensors,
  together as many elements as the tensors of one member, and combines the slices along the tree. Only the dot products, three
  numbers for each pair and tensor, are summed over the members at each level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import monotonic_ns

import numpy as np

from hvdlab.collectives.engine.entries import Entry, RunBatch, Zeros
from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.planes.base import (
    HOST,
    Buffer,
    Completion,
    HostArray,
    HostArrays,
    PhaseTimes,
    Plane,
    Tensor,
    buffer_of,
    host_view,
    storage_type,
)
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.planes.registry import PeerPlanes
from hvdlab.collectives.reduce import (
    UFUNCS,
    FoldScratch,
    Segment,
    WideReduction,
    adasum,
    combine,
    fold_plain,
    levels,
    narrowed,
    needs_width,
    products,
    widened,
)
from hvdlab.collectives.types import SUM, DType, OpKind, ReduceOp, Reduction

Tables = tuple[tuple[int, ...], ...]
Begun = tuple[Result, Completion | None]

SMALL_BYTES = 4096
"""Size in bytes of the largest tensor that travels with the negotiation. Above, a few memory copies are cheaper."""
SMALL_MEMBERS = 16
"""Members of the largest process set whose tensors do so: every member gets the bytes of all members."""


def run_batch(plane: Plane, batch: RunBatch, phases: PhaseTimes) -> tuple[list[Result], Completion | None]:
    """Begin the operations of a batch on its plane.

    Returns:
        The results, in the order of the batch's entries, and the completion after which their outputs are complete; without a
        completion they are complete now. Blocks and raises as the plane does.
    """
    entries = batch.entries
    kind = entries[0].request.kind
    if kind is OpKind.ALLREDUCE:
        return _allreduce(plane, entries, phases)
    one = _ONE_BY_ONE[kind]
    tables = batch.tables
    results: list[Result] = []
    last: Completion | None = None  # a plane ends operations in the order in which they were begun
    for i, entry in enumerate(entries):
        result, last = one(plane, entry.request, tables[i] if tables else (), phases)
        results.append(result)
    return results, last


def _allreduce(
    plane: Plane, entries: Sequence[Entry], phases: PhaseTimes
) -> tuple[list[Result], Completion | None]:
    first = entries[0].request
    # All entries of a batch have the first one's operator, scales and element type: the coordinator fuses only such.
    reduction, dtype = first.reduction, first.dtype
    ins: list[Tensor] = []
    outs: list[Tensor] = []
    results = []
    for entry in entries:
        request = entry.request
        source, out = request.input, None
        if source is None:
            assert isinstance(entry, Zeros)
            source = out = plane.zeros(entry.shape, dtype)
        if out is None:
            out = _output(plane, request, source.shape)
        ins.append(source)
        outs.append(out)
        results.append(Result(out))
    wide = needs_width(dtype, reduction)
    on_host = wide or reduction.op is ReduceOp.ADASUM
    if not isinstance(plane, HostPlane):
        assert not on_host, "such an allreduce of a device is refused when it is submitted"
        buffers = [buffer_of(tensor, dtype) for tensor in ins], [buffer_of(tensor, dtype) for tensor in outs]
        return results, plane.start_allreduce(*buffers, dtype, reduction.summed(plane.context.size), phases)
    # Views, as the arrays are C-contiguous: the plane writes into the user's own outputs.
    sources = [host_view(tensor).reshape(-1) for tensor in ins]
    targets = [host_view(tensor).reshape(-1) for tensor in outs]
    if wide:
        allreduce_wide(plane, sources, targets, dtype, reduction, phases)
    elif reduction.op is ReduceOp.ADASUM:
        allreduce_adasum(plane, sources, targets, dtype, reduction, phases)
    else:
        plane.allreduce(sources, targets, dtype, reduction.summed(plane.context.size), phases)
    return results, None


def _allgather(plane: Plane, request: Request, table: Tables, phases: PhaseTimes) -> Begun:
    source, rest = _rows_first(request)
    width = math.prod(rest)
    rows = [row[0] for row in table]
    out = _output(plane, request, (sum(rows), *rest))
    completion = plane.start_allgather(
        source, [r * width for r in rows], buffer_of(out, request.dtype), phases
    )
    return Result(out, None, table), completion


def _broadcast(plane: Plane, request: Request, table: Tables, phases: PhaseTimes) -> Begun:
    source = request.input
    assert source is not None
    out = _output(plane, request, source.shape)
    context = plane.context
    root = context.ranks.index(request.root)
    # Only the root's data counts, and it is in place already where output and input are one.
    elsewhere = root == context.index and out is not source
    completion = plane.start_broadcast(
        buffer_of(source, request.dtype) if elsewhere else None, buffer_of(out, request.dtype), root, phases
    )
    return Result(out), completion


def _reducescatter(plane: Plane, request: Request, table: Tables, phases: PhaseTimes) -> Begun:
    assert request.input is not None
    source, rest = _rows_first(request)
    width = math.prod(rest)
    size, index = plane.context.size, plane.context.index
    # A number without dimensions counts as one row, as in an allgather.
    rows = scatter_rows((request.input.shape or (1,))[0], size)
    reduction, dtype = request.reduction, request.dtype
    out = _output(plane, request, (rows[index], *rest))
    counts, target = [r * width for r in rows], buffer_of(out, dtype)
    if needs_width(dtype, reduction):
        assert isinstance(plane, HostPlane), (
            "what is reduced on the host is refused elsewhere when it is submitted"
        )
        reducescatter_wide(plane, host_view(source), counts, host_view(target), dtype, reduction, phases)
        return Result(out), None
    return Result(out), plane.start_reducescatter(
        source, counts, target, dtype, reduction.summed(size), phases
    )


def _alltoall(plane: Plane, request: Request, table: Tables, phases: PhaseTimes) -> Begun:
    source, rest = _rows_first(request)
    width = math.prod(rest)
    index = plane.context.index
    received = tuple(splits[index] for splits in table)
    out = _output(plane, request, (sum(received), *rest))
    completion = plane.start_alltoall(
        source,
        [r * width for r in table[index]],
        [r * width for r in received],
        buffer_of(out, request.dtype),
        phases,
    )
    return Result(out, received, table), completion


def _barrier(plane: Plane, request: Request, table: Tables, phases: PhaseTimes) -> Begun:
    return Result(), plane.start_barrier(phases)


def source_of(batch: RunBatch) -> int:
    """Return the rank that sends a message."""
    ranks = batch.entries[0].request.ranks
    # For a receive from any rank the order names the sender.
    return batch.tables[0][0][0] if len(ranks) == 1 else ranks[0]


def run_message(pairs: PeerPlanes, request: Request, sender: int, phases: PhaseTimes) -> Result:
    """Send a message, or receive one of the rank ``sender``.

    When this returns, the receiver has the message, or the sender's buffer has been read. Blocks and raises as planes do.
    """
    ranks = pairs.context.ranks
    source, target = ranks.index(sender), ranks.index(request.ranks[-1])
    if pairs.context.index == source:
        assert request.input is not None
        pairs.send(host_view(buffer_of(request.input, request.dtype)), target, phases)
        return Result()
    assert request.output is not None
    pairs.receive(host_view(buffer_of(request.output, request.dtype)), source, phases)
    return Result(request.output, source=sender)


def scatter_rows(rows: int, members: int) -> list[int]:
    """Return how many of ``rows`` each member gets in a reducescatter; the first ``rows % members`` get one more than the others."""
    base, more = divmod(rows, members)
    return [base + 1 if index < more else base for index in range(members)]


def _rows_first(request: Request) -> tuple[Buffer, tuple[int, ...]]:
    """Return the input, and the extents of one of its rows."""
    source = request.input
    assert source is not None
    return buffer_of(source, request.dtype), source.shape[1:]


def _output(plane: Plane, request: Request, shape: tuple[int, ...]) -> Tensor:
    if request.output is not None:
        return request.output
    if request.allocate is not None:
        return request.allocate(shape)
    return plane.empty(shape, request.dtype)


_ONE_BY_ONE: dict[OpKind, Callable[[Plane, Request, Tables, PhaseTimes], Begun]] = {
    OpKind.ALLGATHER: _allgather,
    OpKind.BROADCAST: _broadcast,
    OpKind.REDUCESCATTER: _reducescatter,
    OpKind.ALLTOALL: _alltoall,
    OpKind.BARRIER: _barrier,
}

# -- small tensors ------------------------------------------------------------------------------------------------


def payload_of(request: Request, members: int) -> bytes:
    """Return the tensor's bytes if it can travel with its announcement, otherwise none."""
    source = request.input
    if source is None:
        return b""
    if request.kind is OpKind.SENDRECV:
        if request.output is not None:
            return b""  # this rank receives the message
    elif request.kind is not OpKind.ALLREDUCE or not 1 < members <= SMALL_MEMBERS:
        return b""
    if request.device != HOST or source.nbytes > SMALL_BYTES:
        return b""
    return host_view(source).tobytes()


def run_small(
    request: Request, payloads: tuple[bytes, ...], scratch: FoldScratch, source: int = -1
) -> Result:
    """Compute an allreduce from all members' bytes, or receive a message of rank ``source``.

    The caller keeps ``scratch``, for one thread at a time.
    """
    storage = storage_type(request.dtype)
    if request.kind is OpKind.SENDRECV:
        if request.output is not None:
            host_view(request.output).reshape(-1)[...] = np.frombuffer(payloads[0], storage)
            return Result(request.output, source=source)
        return Result()
    return run_parts(request, [np.frombuffer(payload, storage) for payload in payloads], scratch)


def run_parts(request: Request, parts: HostArrays, scratch: FoldScratch) -> Result:
    """Compute an allreduce from all members' elements, which are not changed."""
    source, out = request.input, request.output
    assert source is not None
    if out is None:
        storage = storage_type(request.dtype)
        out = np.empty(source.shape, storage) if request.allocate is None else request.allocate(source.shape)
    view = host_view(out)
    reduction, dtype = request.reduction, request.dtype
    if reduction.op is ReduceOp.ADASUM:
        view.reshape(-1)[...] = adasum(parts, dtype, reduction)
    elif needs_width(dtype, reduction):
        _run_wide(dtype, reduction, parts, view.reshape(-1))
    else:
        flat = view if view.ndim == 1 else view.reshape(-1)
        scratch.fold(dtype, reduction.summed(len(parts)), parts, flat)
    return Result(out)


def _run_wide(dtype: DType, reduction: Reduction, parts: HostArrays, out: HostArray) -> None:
    wide = WideReduction(dtype, reduction, len(parts))
    encoded = [wide.encode(part) for part in parts]
    fold_plain(UFUNCS[wide.of_encoded.op], encoded, encoded[0])
    wide.decode(encoded[0], out)


# -- Adasum -------------------------------------------------------------------------------------------------------


def allreduce_adasum(
    plane: HostPlane,
    ins: Sequence[HostArray],
    outs: Sequence[HostArray],
    dtype: DType,
    reduction: Reduction,
    phases: PhaseTimes,
) -> None:
    """Reduce fused tensors by Adasum, each tensor on its own; arguments and guarantees are those of a plane's allreduce.

    Needs as much memory again as the tensors (float16 and bfloat16: as float32), once more if they are several.
    """
    size, index = plane.context.size, plane.context.index
    # Of one vector Adasum is the vector itself, as a sum is: only the scales are left to apply.
    if size == 1:
        plane.allreduce(ins, outs, dtype, reduction._replace(op=ReduceOp.SUM), phases)
        return
    packed = ins[0] if len(ins) == 1 else _timed_concatenation(ins, phases)
    # Differences of rounded bounds: the counts differ by one at most, and add up to the whole.
    counts = [len(packed) * (i + 1) // size - len(packed) * i // size for i in range(size)]
    mine = counts[index]
    slices = np.empty(size * mine, packed.dtype)
    plane.alltoall(packed, counts, [mine] * size, slices, phases)
    reduced = _reduce_slices(
        plane, slices.reshape(size, mine), _segments(ins, sum(counts[:index]), mine), len(ins), dtype,
        reduction, phases,
    )  # fmt: skip
    # The packed copy is not needed any more, and has the size of the result.
    target = outs[0] if len(outs) == 1 else packed
    plane.allgather(reduced, counts, target, phases)
    if len(outs) > 1:
        start = monotonic_ns()
        offset = 0
        for out in outs:
            np.copyto(out, packed[offset : offset + len(out)])
            offset += len(out)
        phases.unpack += monotonic_ns() - start


def _reduce_slices(
    plane: HostPlane,
    slices: HostArray,
    segments: Sequence[Segment],
    tensors: int,
    dtype: DType,
    reduction: Reduction,
    phases: PhaseTimes,
) -> HostArray:
    """Return this member's slice of the result, from the slices of all members (one in each row)."""
    with np.errstate(all="ignore"):
        start = monotonic_ns()
        vectors = widened(slices, dtype, reduction.prescale)
        for pairs in levels(len(slices)):
            totals = products(vectors, pairs, segments, tensors)
            flat = totals.reshape(-1)
            phases.transfer += monotonic_ns() - start
            # All members get the same bits of the sums, so they combine their slices with the same factors.
            plane.allreduce([flat], [flat], DType.F64, SUM, phases)
            start = monotonic_ns()
            combine(vectors, pairs, segments, totals)
        reduced = narrowed(vectors[0], dtype, reduction.postscale)
        phases.transfer += monotonic_ns() - start
    return reduced


def _segments(tensors: Sequence[HostArray], begin: int, length: int) -> list[Segment]:
    """Return the places of the tensors in the slice of ``length`` elements that begins at ``begin`` of them packed."""
    segments = []
    offset = -begin
    for number, tensor in enumerate(tensors):
        start, stop = max(offset, 0), min(offset + len(tensor), length)
        if start < stop:
            segments.append((number, start, stop))
        offset += len(tensor)
    return segments


def _timed_concatenation(buffers: Sequence[HostArray], phases: PhaseTimes) -> HostArray:
    start = monotonic_ns()
    packed = np.concatenate(buffers)
    phases.pack += monotonic_ns() - start
    return packed


# -- integers -----------------------------------------------------------------------------------------------------


def allreduce_wide(
    plane: HostPlane,
    ins: Sequence[HostArray],
    outs: Sequence[HostArray],
    dtype: DType,
    reduction: Reduction,
    phases: PhaseTimes,
) -> None:
    """Reduce integers in a wider type. Arguments and guarantees are those of a plane's allreduce; the operator can also be AVERAGE."""
    wide = WideReduction(dtype, reduction, plane.context.size)
    encoded = [wide.encode(source) for source in ins]
    plane.allreduce(encoded, encoded, DType.I64, wide.of_encoded, phases)
    for reduced, out in zip(encoded, outs, strict=True):
        wide.decode(reduced, out)


def reducescatter_wide(
    plane: HostPlane,
    send: HostArray,
    counts: Sequence[int],
    out: HostArray,
    dtype: DType,
    reduction: Reduction,
    phases: PhaseTimes,
) -> None:
    """Reduce and scatter integers in a wider type, as a plane's reducescatter does; the operator can also be AVERAGE."""
    wide = WideReduction(dtype, reduction, plane.context.size)
    # An element is ``width`` neighbours, so a member's slice stays in one piece, and the counts grow alike.
    reduced = np.empty(len(out) * wide.width, np.int64)
    widened = [count * wide.width for count in counts]
    plane.reducescatter(wide.encode(send), widened, reduced, DType.I64, wide.of_encoded, phases)
    wide.decode(reduced, out)
