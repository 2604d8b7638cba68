"""Combinations of collective, element type and operator that exist. Imports no numpy: any process may ask."""

from __future__ import annotations

from hvdlab.collectives.errors import UnsupportedError
from hvdlab.collectives.types import DType, OpKind, ReduceOp

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
