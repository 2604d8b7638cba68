"""Horovod's arguments, checked and turned into operations of the core."""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from hvdlab.bindings.adapter import FrameworkAdapter
from hvdlab.bindings.operations import Operation
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.types import PLAIN, OpKind, ReduceOp, Reduction

T = TypeVar("T")

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

_NOT_THE_USERS = ("hvdlab.", "torch.", "tensorflow.", "keras.", "tf_keras.")
"""Modules whose lines a warning does not name: ours, and frameworks that may stand between us and the user's code."""


def chosen_operator(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """Return the reduction operator of a call that still may use Horovod's old ``average=``.

    Raises:
        InvalidRequestError: Both were given, or ``op`` is no operator.
    """
    if op is None:
        if average is None:
            return Average
        warnings.warn(
            "average= is deprecated; give op=hvd.Average or op=hvd.Sum.",
            DeprecationWarning,
            stacklevel=_levels_to_the_user(),
        )
        return Average if average else Sum
    if average is not None:
        raise InvalidRequestError("op= replaces average=; give only op=.")
    return checked_operator(op)


def checked_operator(op: ReduceOp | int) -> ReduceOp:
    """Return ``op`` as an operator that hvdlab can execute."""
    if type(op) is ReduceOp:
        return op
    try:
        return ReduceOp(op)
    except ValueError:
        raise InvalidRequestError(
            f"op={op!r} is no reduction operator; give hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or "
            "hvd.Product."
        ) from None


def gradient_operator(op: ReduceOp | int) -> ReduceOp:
    """Return ``op`` as an operator with which optimizers and tapes can reduce gradients.

    Raises:
        InvalidRequestError: It is none: ``Average``, ``Sum`` and ``Adasum`` are.
    """
    chosen = checked_operator(op)
    if chosen not in (Average, Sum, Adasum):
        raise InvalidRequestError(
            f"Gradients are reduced with hvd.Average, hvd.Sum or hvd.Adasum, not with {chosen.name.lower()}."
        )
    return chosen


def predivide_factor(factor: float) -> float:
    """Return the divisor of gradients before the sum, as part of the division of an average.

    Raises:
        InvalidRequestError: It is no positive, finite number.
    """
    if not 0 < factor < math.inf:
        raise InvalidRequestError(f"gradient_predivide_factor= must be positive, not {factor}.")
    return float(factor)


# -- operations -------------------------------------------------------------------------------------------------------
# Process sets come as ids here: see hvdlab.collectives.process_sets.set_id.


def allreducing(
    average: bool | None,
    op: ReduceOp | int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: int,
) -> Operation:
    """Return the operation of an allreduce."""
    chosen = op if type(op) is ReduceOp and average is None else chosen_operator(average, op)
    return Operation(
        OpKind.ALLREDUCE, reduction_of(chosen, prescale_factor, postscale_factor), -1, process_set
    )


def reduction_of(op: ReduceOp, prescale_factor: float, postscale_factor: float) -> Reduction:
    """Return the reduction of these arguments; without factors none is made."""
    prescale, postscale = float(prescale_factor), float(postscale_factor)
    return PLAIN[op] if prescale == 1.0 == postscale else Reduction(op, prescale, postscale)


def gathering(process_set: int) -> Operation:
    """Return the operation of an allgather."""
    return Operation(OpKind.ALLGATHER, process_set=process_set)


def broadcasting(root_rank: int, process_set: int) -> Operation:
    """Return the operation of a broadcast; raises ``InvalidRequestError`` if ``root_rank`` is no number."""
    try:
        root = operator.index(root_rank)
    except TypeError:
        raise InvalidRequestError(f"root_rank takes the number of a rank, not {root_rank!r}.") from None
    return Operation(OpKind.BROADCAST, root=root, process_set=process_set)


def scattering(
    adapter: FrameworkAdapter[T],
    tensors: Sequence[Any],
    op: ReduceOp | int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: int,
) -> Operation:
    """Return the operation of a reducescatter of these tensors; raises ``InvalidRequestError`` if one is 0-d."""
    _refuse_scalars(adapter, tensors, OpKind.REDUCESCATTER)
    chosen = checked_operator(op)
    reduction = reduction_of(chosen, prescale_factor, postscale_factor)
    return Operation(OpKind.REDUCESCATTER, reduction, process_set=process_set)


def exchanging(adapter: FrameworkAdapter[T], tensor: Any, splits: Any, process_set: int) -> Operation:
    """Return the operation of an alltoall; raises ``InvalidRequestError`` for a 0-d tensor, or splits that are no counts."""
    _refuse_scalars(adapter, (tensor,), OpKind.ALLTOALL)
    return Operation(OpKind.ALLTOALL, process_set=process_set, splits=row_counts(splits))


def _refuse_scalars(adapter: FrameworkAdapter[T], tensors: Sequence[Any], kind: OpKind) -> None:
    if any(adapter.is_tensor(tensor) and not adapter.shape(tensor) for tensor in tensors):
        raise InvalidRequestError(f"{kind.label} splits dimension 0, which a 0-d tensor does not have.")


def tensor_list(adapter: FrameworkAdapter[T], tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors of a grouped collective; one tensor, which could be iterated over as well, is refused."""
    if adapter.is_tensor(tensors):
        raise InvalidRequestError("A grouped collective takes a list of tensors, not one tensor.")
    return list(tensors)


def row_counts(splits: Any) -> tuple[int, ...] | None:
    """Return the ``splits`` of an alltoall as numbers; they may come as a tensor, an array or a list."""
    if splits is None:
        return None
    try:
        counts = tuple(operator.index(count) for count in _listed(splits))
    except TypeError:
        raise InvalidRequestError(
            f"splits= takes a one-dimensional tensor or a list of integers, not {splits!r}."
        ) from None
    if any(count < 0 for count in counts):
        raise InvalidRequestError(f"splits= counts rows, which can't be negative: {list(counts)}.")
    return counts


def _listed(splits: Any) -> Sequence[int]:
    tolist = getattr(splits, "tolist", None)  # of tensors and arrays
    listed: Any = splits if tolist is None else tolist()
    return listed if isinstance(listed, Sequence) else [listed]


def _levels_to_the_user() -> int:
    """Return the ``stacklevel`` of a warning in the caller of this, for the line of the first caller outside hvdlab and the frameworks."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    return level
