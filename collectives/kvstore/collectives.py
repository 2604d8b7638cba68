"""Collectives of the core on the arrays of stores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlab.collectives import context
from hvdlab.collectives.arrays import dtype_of
from hvdlab.collectives.dtypes import DType, OpKind, ReduceOp
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.handle import Handle
from hvdlab.collectives.engine.request import Request
from hvdlab.collectives.errors import HvdlabError, KVStoreError, MismatchError, UnsupportedError
from hvdlab.collectives.kvstore.arrays import Array
from hvdlab.collectives.kvstore.keys import Key


def joined() -> Engine:
    """This rank's engine; joins the world if that has not happened yet."""
    return context.init()


def submit_sum(array: Array, name: str, *, at_once: bool = False) -> Handle:
    """Start the sum over all ranks, in place. Several of one name may be in flight: they are matched in order.

    If the caller waits for it ``at_once``, that is quicker.
    """
    request = Request(OpKind.ALLREDUCE, name, array, array, _dtype(array), ReduceOp.SUM, anonymous=True)
    return context.engine("pushpull").submit(request, at_once=at_once)


def submit_broadcast(array: Array, name: str) -> Handle:
    """Start the broadcast from rank 0, in place."""
    request = Request(OpKind.BROADCAST, name, array, array, _dtype(array), root=0, anonymous=True)
    return context.engine("broadcast").submit(request)


def submit_gather(array: Array, name: str) -> Handle:
    """Start to concatenate the rows of all ranks; the result has the numbers of rows of each rank in its tables."""
    request = Request(OpKind.ALLGATHER, name, array, dtype=_dtype(array), anonymous=True)
    return context.engine("push").submit(request)


def completed(handles: list[tuple[Key, Handle]]) -> None:
    """Wait for all, then raise the first error, so that nothing is written to afterwards.

    Raises:
        KVStoreError: The ranks gave arrays of different shapes or types under one key.
        AbortedError: A rank died, failed, left or was interrupted.
    """
    first: Exception | None = None
    for key, handle in handles:
        try:
            handle.wait()
        except MismatchError as error:
            if first is None:
                first = KVStoreError(f"the workers disagree about key {key!r}: {error}", key)
                first.__cause__ = error
        except HvdlabError as error:
            first = first or error
    if first is not None:
        raise first


def barrier(name: str) -> None:
    """Return once every rank has called it."""
    context.engine("barrier").run(Request(OpKind.BARRIER, name))


def largest(own: Sequence[int], name: str) -> list[int]:
    """For each of the numbers the largest that any rank gave."""
    request = Request(OpKind.ALLREDUCE, name, dtype=DType.I64, op=ReduceOp.MAX, anonymous=True)
    request.input = request.output = numbers = np.array(own, np.int64)
    context.engine("kvstore").run(request)
    found: list[int] = numbers.tolist()
    return found


def _dtype(array: Array) -> DType:
    dtype = dtype_of(array)
    if dtype is None:
        raise UnsupportedError(f"arrays of {array.dtype} can't be sent; convert to another type first.")
    return dtype
