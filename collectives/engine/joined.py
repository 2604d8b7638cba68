"""What a rank that has joined does for the others: it takes part in their collectives with zeros."""

from __future__ import annotations

import numpy as np

from hvdlab.collectives.arrays import storage_type
from hvdlab.collectives.dtypes import DType, OpKind, ReduceOp
from hvdlab.collectives.engine.entry import Entry
from hvdlab.collectives.engine.request import Request, Result
from hvdlab.collectives.planes.buffers import HOST
from hvdlab.collectives.protocol.messages import Signature


class Zeros(Entry):
    """A collective that other ranks have submitted, with zeros for this rank's tensor. No thread of this rank waits for its end.

    Attributes:
        shape: Shape of the zeros. If they are on a device the request has no input: its plane makes them.
    """

    __slots__ = ("shape",)

    def __init__(self, process_set: int, signature: Signature) -> None:
        kind, dtype = OpKind(signature.kind), DType(signature.dtype)
        self.shape = signature.shape
        tensor = None
        if kind is OpKind.ALLREDUCE and signature.device == HOST:
            # The system hands out zeroed memory as it is touched: until this entry is executed, its zeros cost nothing.
            tensor = np.zeros(signature.shape, storage_type(dtype))
        request = Request(
            kind,
            signature.name,
            tensor,
            tensor,
            dtype,
            ReduceOp(signature.op),
            signature.prescale,
            signature.postscale,
            process_set=process_set,
            device=signature.device,
        )
        Entry.__init__(self, request, "join", 0)
        self.name = signature.name

    def complete(self, result: Result | None, error: Exception | None) -> None:
        """Do nothing: only the ranks that submitted the collective have handles."""
