"""From requests to operations of the plane: shapes, outputs, scales, counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.collectives.engine.adasum import allreduce_adasum
from hvdlab.collectives.engine.effects import RunBatch
from hvdlab.collectives.engine.entry import Entry
from hvdlab.collectives.engine.integers import allreduce_wide, reducescatter_wide
from hvdlab.collectives.engine.joined import Zeros
from hvdlab.collectives.engine.request import Request, Result
from hvdlab.collectives.planes.base import Completion, PhaseTimes, Plane
from hvdlab.collectives.planes.buffers import Buffer, Tensor, buffer_of, host_view
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.planes.subgroups import PeerPlanes
from hvdlab.collectives.reduce.integers import needs_width

Tables = tuple[tuple[int, ...], ...]
Begun = tuple[Result, Completion | None]


def run_batch(plane: Plane, batch: RunBatch, phases: PhaseTimes) -> tuple[list[Result], Completion | None]:
    """Begin a batch.

    Returns:
        The results, in the order of the batch's entries, and the completion after which their outputs are there; without a completion
        they are there now. Blocks as the plane does; raises what the plane raises.
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
    op, postscale = first.op, first.postscale
    if op is ReduceOp.AVERAGE:
        op, postscale = ReduceOp.SUM, postscale / plane.context.size
    dtype = first.dtype
    ins: list[Buffer] = []
    outs: list[Buffer] = []
    results = []
    for entry in entries:
        request = entry.request
        source, out = request.input, None
        if source is None:
            assert isinstance(entry, Zeros)
            source = out = plane.zeros(entry.shape, dtype)
        if out is None:
            out = _output(plane, request, source.shape)
        ins.append(buffer_of(source, dtype))
        outs.append(buffer_of(out, dtype))
        results.append(Result(out))
    wide = needs_width(dtype, first.op, first.prescale, first.postscale)
    if wide or op is ReduceOp.ADASUM:
        assert isinstance(plane, HostPlane), (
            "what is reduced on the host is refused elsewhere when it is submitted"
        )
        sources, targets = [host_view(buffer) for buffer in ins], [host_view(buffer) for buffer in outs]
        if wide:
            allreduce_wide(plane, sources, targets, dtype, first.op, first.prescale, first.postscale, phases)
        else:
            allreduce_adasum(plane, sources, targets, dtype, first.prescale, postscale, phases)
        return results, None
    return results, plane.start_allreduce(ins, outs, dtype, op, first.prescale, postscale, phases)


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
    rows = scatter_rows((request.input.shape or (1,))[0], size)
    op, postscale = request.op, request.postscale
    if op is ReduceOp.AVERAGE:
        op, postscale = ReduceOp.SUM, postscale / size
    out = _output(plane, request, (rows[index], *rest))
    counts, target = [r * width for r in rows], buffer_of(out, request.dtype)
    if needs_width(request.dtype, request.op, request.prescale, request.postscale):
        assert isinstance(plane, HostPlane), (
            "what is reduced on the host is refused elsewhere when it is submitted"
        )
        reducescatter_wide(
            plane, host_view(source), counts, host_view(target), request.dtype, request.op, request.prescale,
            request.postscale, phases,
        )  # fmt: skip
        return Result(out), None
    completion = plane.start_reducescatter(
        source, counts, target, request.dtype, op, request.prescale, postscale, phases
    )
    return Result(out), completion


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
    """The rank that sends a message."""
    ranks = batch.entries[0].request.ranks
    return (
        batch.tables[0][0][0] if len(ranks) == 1 else ranks[0]
    )  # the order says which one a receive from any rank gets


def run_message(pairs: PeerPlanes, request: Request, sender: int, phases: PhaseTimes) -> Result:
    """Send a message, or receive one of the rank ``sender``. When this returns, the receiver has it, or the sender's buffer has been read.

    Blocks and raises as planes do.
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
    """Rows of ``rows`` that each member gets in a reducescatter: equally many, but the first ``rows % members`` get one more."""
    base, more = divmod(rows, members)
    return [base + 1 if index < more else base for index in range(members)]


def _rows_first(request: Request) -> tuple[Buffer, tuple[int, ...]]:
    """The input, and the extents of one of its rows."""
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
