"""Element types, reduction operators and collective kinds, as numbers that travel on the wire.

No numpy here: the coordinator needs item sizes only. The numpy types are in :mod:`hvdlab.collectives.arrays`.
"""

from __future__ import annotations

from enum import IntEnum


class DType(IntEnum):
    """Element type of a tensor. ``BF16`` is stored as its 16 raw bits, since numpy has no bfloat16."""

    BOOL = 0
    U8 = 1
    I8 = 2
    I16 = 3
    I32 = 4
    I64 = 5
    F16 = 6
    BF16 = 7
    F32 = 8
    F64 = 9

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return _ITEMSIZE[self]

    @property
    def label(self) -> str:
        """The name users know, such as ``float32``."""
        return _LABEL[self]

    @property
    def is_floating(self) -> bool:
        return self in (DType.F16, DType.BF16, DType.F32, DType.F64)


_ITEMSIZE = {
    DType.BOOL: 1,
    DType.U8: 1,
    DType.I8: 1,
    DType.I16: 2,
    DType.I32: 4,
    DType.I64: 8,
    DType.F16: 2,
    DType.BF16: 2,
    DType.F32: 4,
    DType.F64: 8,
}
_LABEL = {
    DType.BOOL: "bool",
    DType.U8: "uint8",
    DType.I8: "int8",
    DType.I16: "int16",
    DType.I32: "int32",
    DType.I64: "int64",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F32: "float32",
    DType.F64: "float64",
}


class ReduceOp(IntEnum):
    """Reduction operator; the numbers are Horovod's, which user code sometimes prints or stores."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class OpKind(IntEnum):
    """Which collective. ``ADD_PROCESS_SET`` and ``REMOVE_PROCESS_SET`` move no data; the coordinator acts on them.

    ``PUSH`` and ``PULL`` are not collectives but requests of one worker to a parameter server; they are recorded like collectives.
    ``SENDRECV`` is a message of one member to another: these two submit it, and do not wait for the other members.
    """

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    REDUCESCATTER = 3
    ALLTOALL = 4
    BARRIER = 5
    ADD_PROCESS_SET = 6
    REMOVE_PROCESS_SET = 7
    JOIN = 8
    PUSH = 9
    PULL = 10
    SENDRECV = 11

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def asks_server(self) -> bool:
        """Whether it is a request to a parameter server."""
        return self in (OpKind.PUSH, OpKind.PULL)
