"""Horovod's arguments, checked and turned into operations of the core."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.process_sets import ProcessSet, set_id
from hvdlab.torch.submission import Operation

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def chosen_operator(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """The reduction operator of a call that still may use Horovod's old ``average=``.

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
    """``op`` as an operator that hvdlab can execute."""
    try:
        return ReduceOp(op)
    except ValueError:
        raise InvalidRequestError(
            f"op={op!r} is no reduction operator; give hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or "
            "hvd.Product."
        ) from None


def reduction(
    kind: OpKind,
    average: bool | None,
    op: ReduceOp | int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Operation:
    """The operation of an allreduce or a reducescatter."""
    chosen = chosen_operator(average, op)
    return Operation(
        kind, chosen, float(prescale_factor), float(postscale_factor), process_set=set_id(process_set)
    )


def tensor_list(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a grouped collective; one tensor, which could be iterated over as well, is refused."""
    if isinstance(tensors, torch.Tensor):
        raise InvalidRequestError("A grouped collective takes a list of tensors, not one tensor.")
    return list(tensors)


def row_counts(splits: torch.Tensor | Sequence[int] | None) -> tuple[int, ...] | None:
    """The ``splits`` of an alltoall as numbers; they may come as a tensor, an array or a list."""
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


def _listed(splits: torch.Tensor | Sequence[int]) -> Sequence[int]:
    tolist = getattr(splits, "tolist", None)  # of tensors and arrays
    listed: Any = splits if tolist is None else tolist()
    return listed if isinstance(listed, Sequence) else [listed]


def _levels_to_the_user() -> int:
    """``stacklevel`` of a warning in the caller of this, for the line of the first caller outside hvdlab and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("hvdlab.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level
