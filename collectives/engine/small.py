"""Small tensors, which travel with the negotiation instead of meeting on the data plane.

Every member gets all members' bytes in the same order and computes the result itself, with the folds that the planes
use, so all members get the same bits.
"""

from __future__ import annotations

import numpy as np

from hvdlab.collectives.arrays import storage_type
from hvdlab.collectives.dtypes import DType, OpKind, ReduceOp
from hvdlab.collectives.engine.request import Request, Result
from hvdlab.collectives.planes.buffers import HOST, HostArray, HostArrays, host_view
from hvdlab.collectives.reduce.adasum import adasum
from hvdlab.collectives.reduce.fold import UFUNCS, Fold, fold_plain, make_fold
from hvdlab.collectives.reduce.integers import WideReduction, needs_width

BYTES = 4096
"""Size in bytes of the largest tensor that travels with the negotiation. Above, a few memory copies are cheaper."""
MEMBERS = 16
"""Members of the largest process set whose tensors do so: every member gets the bytes of all members."""

Folds = dict[tuple[DType, ReduceOp], Fold]


def payload_of(request: Request, members: int) -> bytes:
    """The tensor's bytes if it may travel with its announcement, else none."""
    source = request.input
    if source is None:
        return b""
    if request.kind is OpKind.SENDRECV:
        if request.output is not None:
            return b""  # this rank receives the message
    elif request.kind is not OpKind.ALLREDUCE or not 1 < members <= MEMBERS:
        return b""
    if request.device != HOST or source.nbytes > BYTES:
        return b""
    return host_view(source).tobytes()


def run_small(request: Request, payloads: tuple[bytes, ...], folds: Folds, source: int = -1) -> Result:
    """Compute an allreduce from all members' bytes, or take in a message of rank ``source``.

    The caller keeps ``folds``, for one thread at a time.
    """
    storage = storage_type(request.dtype)
    if request.kind is OpKind.SENDRECV:
        if request.output is not None:
            host_view(request.output).reshape(-1)[...] = np.frombuffer(payloads[0], storage)
            return Result(request.output, source=source)
        return Result()
    return run_parts(request, [np.frombuffer(payload, storage) for payload in payloads], folds)


def run_parts(request: Request, parts: HostArrays, folds: Folds) -> Result:
    """Compute an allreduce from all members' elements, which are not changed."""
    source, out = request.input, request.output
    assert source is not None
    if out is None:
        storage = storage_type(request.dtype)
        out = np.empty(source.shape, storage) if request.allocate is None else request.allocate(source.shape)
    view = host_view(out)
    if request.op is ReduceOp.ADASUM:
        view.reshape(-1)[...] = adasum(parts, request.dtype, request.prescale, request.postscale)
        return Result(out)
    if needs_width(request.dtype, request.op, request.prescale, request.postscale):
        _run_wide(request, parts, view.reshape(-1))
        return Result(out)
    op, postscale = request.op, request.postscale
    if op is ReduceOp.AVERAGE:
        op, postscale = ReduceOp.SUM, postscale / len(parts)
    fold = folds.get((request.dtype, op))
    if fold is None:
        fold = folds[request.dtype, op] = make_fold(request.dtype, op)
    with np.errstate(all="ignore"):
        fold(parts, view if view.ndim == 1 else view.reshape(-1), request.prescale, postscale)
    return Result(out)


def _run_wide(request: Request, parts: HostArrays, out: HostArray) -> None:
    wide = WideReduction(request.dtype, request.op, len(parts), request.prescale, request.postscale)
    encoded = [wide.encode(part) for part in parts]
    fold_plain(UFUNCS[wide.op], encoded, encoded[0])
    wide.decode(encoded[0], out)
