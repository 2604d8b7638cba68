"""Types that all processes share: element types, operators and kinds of collectives as on the wire, and their
combinations that exist; membership as a client knows it.

No numpy here: the coordinator needs item sizes only, and any process may ask for combinations. The numpy types are in :mod:`hvdlab.collectives.planes.base`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from hvdlab.collectives.errors import UnsupportedError
from hvdlab.collectives.protocol import messages as m


class DType(IntEnum):
    """Element type of a tensor; ``BF16`` is stored as its 16 raw bits, since numpy has no bfloat16."""

    # The numbers are on the wire and in recordings.
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
        """Return the size of one element in bytes."""
        return _ITEMSIZE[self]

    @property
    def label(self) -> str:
        """Return the name that users know, such as ``float32``."""
        return _LABEL[self]

    @property
    def is_floating(self) -> bool:
        return self in (DType.F16, DType.BF16, DType.F32, DType.F64)


# Not from numpy, which the coordinator does not import.
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


class Reduction(NamedTuple):
    """Operator and scale factors of a reduction: ``postscale * (prescale * x0 (op) prescale * x1 (op) …)``.

    A value, compared and hashed by its fields. The element type is not part of it, since it is the tensor's.

    Attributes:
        op: Reduction operator; AVERAGE is a sum divided by the number of members at execution.
        prescale: Multiplies the inputs; 1.0 for none.
        postscale: Multiplies the result; 1.0 for none.
    """

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def is_scaled(self) -> bool:
        """Return whether there is a scale factor."""
        return self.prescale != 1.0 or self.postscale != 1.0

    @property
    def has_nan(self) -> bool:
        """Return whether a scale factor is NaN. Such a reduction can be found in no dict, unless the NaN is the same object."""
        return self.prescale != self.prescale or self.postscale != self.postscale

    def summed(self, members: int) -> Reduction:
        """Return the reduction that a plane makes for this one: for an average, a sum whose ``postscale`` divides it by ``members``."""
        if self.op is not ReduceOp.AVERAGE:
            return self
        return Reduction(ReduceOp.SUM, self.prescale, self.postscale / members)


PLAIN = {op: Reduction(op) for op in ReduceOp}
"""Reductions without scale factors, by operator. They are made once, so that the usual calls make none."""
SUM = PLAIN[ReduceOp.SUM]
AVERAGE = PLAIN[ReduceOp.AVERAGE]


class OpKind(IntEnum):
    """Kind of a collective. ``ADD_PROCESS_SET`` and ``REMOVE_PROCESS_SET`` move no data; the coordinator acts on them.

    ``PUSH`` and ``PULL`` are not collectives but requests of one worker to a parameter server; they are recorded like collectives.
    ``SENDRECV`` is a message of one member to another: these two submit it, and do not wait for the other members.
    """

    # The numbers are on the wire and in recordings.
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
        """Return whether it is a request to a parameter server."""
        return self in (OpKind.PUSH, OpKind.PULL)


LEAVES = "leaves at the next commit"
"""State that is shown of a rank that was released, and that trains until then."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Ranks of the job at one moment.

    Attributes:
        expected: Ranks that should make up the world; empty if neither a client nor a setting has named any.
        members: Living ranks, in order.
        deaths: Ranks that died and were not replaced, with process id, time and reason.
        generation: Generation of the world; 0 before it was formed for the first time.
        waiting: Members that elastic training has to let in.
        formed: Ranks that this generation of the world is made of; empty until it has begun.
        leaving: Members that were released, and leave where elastic training lets the world change.
        kept: Members that were released and stay for the time being, since too few would be left to train.
        restoring: Whether a coordinator's successor still waits for ranks: until it has heard them, it does not know which ranks of the
            world live or leave.
    """

    expected: tuple[int, ...] = ()
    members: tuple[m.Member, ...] = ()
    deaths: tuple[m.Death, ...] = ()
    generation: int = 0
    waiting: tuple[int, ...] = ()
    formed: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    restoring: bool = False
    kept: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the numbers of the living ranks."""
        return tuple(member.rank for member in self.members)

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the expected ranks that do not live: not started yet, or dead."""
        living = set(self.ranks)
        return tuple(rank for rank in self.expected if rank not in living)

    @property
    def complete(self) -> bool:
        """Return whether the world was formed and all expected ranks live."""
        return self.generation > 0 and not self.missing


@dataclass(frozen=True, slots=True)
class Stall:
    """Collective that has been waiting for ranks for long.

    Attributes:
        process_set: Its process set.
        seconds: Seconds that it has been waiting, or executing, so far.
        kind, name: The collective: its number in :class:`OpKind`, and its tensor.
        waited: Ranks that submitted it.
        missing: Ranks that did not, and for which the others wait.
        sites: The line of code of each of ``waited``.
        joined: Ranks that have joined: they participate without submitting it.
    """

    process_set: int
    seconds: float
    kind: int
    name: str
    waited: tuple[int, ...]
    missing: tuple[int, ...]
    sites: tuple[str, ...]
    joined: tuple[int, ...] = ()


_REDUCING = (OpKind.ALLREDUCE, OpKind.REDUCESCATTER)


def check_supported(kind: OpKind, dtype: DType, op: ReduceOp) -> None:
    """Raise ``UnsupportedError`` if no plane can do this; collectives that only move data take every element type.

    Args:
        kind: The collective. ``op`` matters for allreduce and reducescatter only.
        dtype: Element type.
        op: As the user gave it; AVERAGE counts as a SUM that is divided afterwards.
    """
    if kind not in _REDUCING:
        return
    if op is ReduceOp.ADASUM:
        _check_adasum(kind, dtype)
        return
    if dtype is DType.BOOL and op not in (ReduceOp.MIN, ReduceOp.MAX):
        raise UnsupportedError(
            f"{kind.label} of bool tensors can't {_verb(op)}; use Min (true where all ranks are true) or Max "
            "(true where any rank is true), or cast to an integer type to count."
        )


def _check_adasum(kind: OpKind, dtype: DType) -> None:
    if kind is OpKind.REDUCESCATTER:
        raise UnsupportedError(
            "reducescatter with Adasum does not exist, since what Adasum makes of a part depends on the whole tensor; "
            "use allreduce with Adasum, or reducescatter with Average."
        )
    if not dtype.is_floating:
        raise UnsupportedError(
            f"{kind.label} with Adasum takes floating-point tensors, not {dtype.label}; use Sum or Average, "
            "or cast to float32."
        )


def _verb(op: ReduceOp) -> str:
    return {ReduceOp.AVERAGE: "average", ReduceOp.SUM: "sum", ReduceOp.PRODUCT: "multiply"}.get(
        op, op.name.lower()
    )
