"""What can be done while ranks have joined: they have no data of their own any more."""

from __future__ import annotations

from hvdlab.collectives.coordinator.signatures import kind_label
from hvdlab.collectives.coordinator.verdicts import Impossible
from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.collectives.errors import call_name, format_ranks
from hvdlab.collectives.protocol.messages import Signature

_WITH_ZEROS = frozenset({ReduceOp.SUM, ReduceOp.AVERAGE})
"""Operators for which zeros are a contribution like another."""


def refuse_with_joined(signature: Signature, joined: tuple[int, ...]) -> Impossible | None:
    """The verdict on a collective in which the ranks ``joined`` can't take part; ``None`` if they can."""
    kind = signature.kind
    if kind == OpKind.BARRIER or (kind == OpKind.ALLREDUCE and signature.op in _WITH_ZEROS):
        return None
    what = call_name(kind_label(kind), signature.name)
    if kind == OpKind.ALLREDUCE:
        what += f" with op={_operator(signature.op)}"
    has = "has" if len(joined) == 1 else "have"
    reason = (
        f"{what} is not supported with join: {format_ranks(joined)} {has} joined, having no data left. "
        "Until all ranks have joined only allreduce with Sum or Average, and barrier, can be used"
    )
    return Impossible(signature.name, reason, joined)


def refuse_incomplete(signature: Signature, joined: tuple[int, ...]) -> Impossible:
    """The verdict on a group of which some tensors have not been submitted when all ranks have joined."""
    what = call_name(kind_label(signature.kind), signature.name)
    reason = f"{what} is one of a group of {signature.group_size} tensors, which was not complete when all ranks joined"
    return Impossible(signature.name, reason, joined)


def _operator(op: int) -> str:
    try:
        return ReduceOp(op).name.capitalize()
    except ValueError:
        return str(op)
