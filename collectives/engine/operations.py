"""From requests to operations of the plane: shapes, outputs, scales, counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from hvdlab.collectives.arrays import storage_type
from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.collectives.engine.adasum import allreduce_adasum
from hvdlab.collectives.engine.effects import RunBatch
from hvdlab.collectives.engine.entry import Entry
from hvdlab.collectives.engine.integers import allreduce_wide, reducescatter_wide
from hvdlab.collectives.engine.request import Request, Result
from hvdlab.collectives.planes.base import Buffer, Phases, Plane
from hvdlab.collectives.reduce.integers import needs_width

Tables = tuple[tuple[int, ...], ...]


def run_batch(plane: Plane, batch: RunBatch, phases: Phases) -> list[Result]:
    """Execute a batch; results are in the order of its entries. Blocks; raises what the plane raises."""
    entries = batch.entries
    kind = entries[0].request.kind
    if kind is OpKind.ALLREDUCE:
        return _allreduce(plane, entries, phases)
    one = _ONE_BY_ONE[kind]
    tables = batch.tables
    return [one(plane, e.request, tables[i] if tables else (), phases) for i, e in enumerate(entries)]


def _allreduce(plane: Plane, entries: Sequence[Entry], phases: Phases) -> list[Result]:
    first = entries[0].request
    op, postscale = first.op, first.postscale
    if op is ReduceOp.AVERAGE:
        op, postscale = ReduceOp.SUM, postscale / plane.context.size
    ins: list[Buffer] = []
    outs: list[Buffer] = []
    results = []
    for entry in entries:
        request = entry.request
        source, out = request.input, request.output
        assert source is not None
        if out is None:
            out = np.empty_like(source) if request.allocate is None else request.allocate(source.shape)
        ins.append(source.reshape(-1))
        outs.append(out.reshape(-1))
        results.append(Result(out))
    if needs_width(first.dtype, first.op, first.prescale, first.postscale):
        allreduce_wide(plane, ins, outs, first.dtype, first.op, first.prescale, first.postscale, phases)
    elif op is ReduceOp.ADASUM:
        allreduce_adasum(plane, ins, outs, first.dtype, first.prescale, postscale, phases)
    else:
        plane.allreduce(ins, outs, first.dtype, op, first.prescale, postscale, phases)
    return results


def _allgather(plane: Plane, request: Request, table: Tables, phases: Phases) -> Result:
    source = _rows_first(request)
    rest = source.shape[1:]
    width = math.prod(rest)
    rows = [row[0] for row in table]
    out = _output(request, (sum(rows), *rest))
    plane.allgather(source.reshape(-1), [r * width for r in rows], out.reshape(-1), phases)
    return Result(out, None, table)


def _broadcast(plane: Plane, request: Request, table: Tables, phases: Phases) -> Result:
    source = request.input
    assert source is not None
    out = request.output
    if out is None:
        out = np.empty_like(source) if request.allocate is None else request.allocate(source.shape)
    context = plane.context
    root = context.ranks.index(request.root)
    if root == context.index and out is not source:
        np.copyto(out, source)
    plane.broadcast(out.reshape(-1), root, phases)
    return Result(out)


def _reducescatter(plane: Plane, request: Request, table: Tables, phases: Phases) -> Result:
    source = _rows_first(request)
    rest = source.shape[1:]
    width = math.prod(rest)
    size, index = plane.context.size, plane.context.index
    rows = scatter_rows(source.shape[0], size)
    op, postscale = request.op, request.postscale
    if op is ReduceOp.AVERAGE:
        op, postscale = ReduceOp.SUM, postscale / size
    out = _output(request, (rows[index], *rest))
    sent, counts, prescale = source.reshape(-1), [r * width for r in rows], request.prescale
    if needs_width(request.dtype, request.op, prescale, request.postscale):
        reducescatter_wide(
            plane,
            sent,
            counts,
            out.reshape(-1),
            request.dtype,
            request.op,
            prescale,
            request.postscale,
            phases,
        )
    else:
        plane.reducescatter(sent, counts, out.reshape(-1), request.dtype, op, prescale, postscale, phases)
    return Result(out)


def _alltoall(plane: Plane, request: Request, table: Tables, phases: Phases) -> Result:
    source = _rows_first(request)
    rest = source.shape[1:]
    width = math.prod(rest)
    index = plane.context.index
    received = tuple(splits[index] for splits in table)
    out = _output(request, (sum(received), *rest))
    plane.alltoall(
        source.reshape(-1),
        [r * width for r in table[index]],
        [r * width for r in received],
        out.reshape(-1),
        phases,
    )
    return Result(out, received, table)


def _barrier(plane: Plane, request: Request, table: Tables, phases: Phases) -> Result:
    plane.barrier(phases)
    return Result()


def scatter_rows(rows: int, members: int) -> list[int]:
    """Rows that each member gets of a reducescatter: even, the first ``rows % members`` get one more."""
    base, more = divmod(rows, members)
    return [base + 1 if index < more else base for index in range(members)]


def _rows_first(request: Request) -> Buffer:
    source = request.input
    assert source is not None
    return source if source.ndim else source.reshape(1)


def _output(request: Request, shape: tuple[int, ...]) -> Buffer:
    if request.output is not None:
        return request.output
    if request.allocate is not None:
        return request.allocate(shape)
    return np.empty(shape, storage_type(request.dtype))


_ONE_BY_ONE: dict[OpKind, Callable[[Plane, Request, Tables, Phases], Result]] = {
    OpKind.ALLGATHER: _allgather,
    OpKind.BROADCAST: _broadcast,
    OpKind.REDUCESCATTER: _reducescatter,
    OpKind.ALLTOALL: _alltoall,
    OpKind.BARRIER: _barrier,
}
