"""Reductions that are no sums, as functions of all ranks' tensors in one, so that autograd differentiates them.

For Min and Max, the gradient goes to the rank whose element was the smallest or largest (ranks that tie share it evenly). For
Product, each rank's is multiplied by the product of the other ranks' elements. For Adasum, it is the derivative of its formula.
"""

from __future__ import annotations

import torch

from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.collectives.reduce.adasum import levels

_HALVES = (torch.float16, torch.bfloat16)


def reduced(op: ReduceOp, stacked: torch.Tensor, prescale: float, postscale: float) -> torch.Tensor:
    """The reduction of the tensors of all ranks, which are stacked along dimension 0; differentiable.

    ``op`` is MIN, MAX, PRODUCT or ADASUM. float16 and bfloat16 are computed in float32, as by the core.
    """
    wide = stacked.float() if stacked.dtype in _HALVES else stacked
    if prescale != 1.0:
        wide = wide * prescale
    if op is ReduceOp.MIN:
        result = wide.amin(0)
    elif op is ReduceOp.MAX:
        result = wide.amax(0)
    elif op is ReduceOp.PRODUCT:
        result = wide.prod(0)
    else:
        result = _adasum(wide)
    if postscale != 1.0:
        result = result * postscale
    return result.to(stacked.dtype)


def _adasum(stacked: torch.Tensor) -> torch.Tensor:
    """The Adasum of the rows, by the formula in :mod:`hvdlab.collectives.reduce.adasum`."""
    vectors = list(stacked.unbind())
    for pairs in levels(len(vectors)):
        for a, b in pairs:
            common = _dot(vectors[a], vectors[b])
            vectors[a] = _share(vectors[a], common) + _share(vectors[b], common)
    return vectors[0]


def _share(vector: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
    square = _dot(vector, vector)
    # Divide by 1 where the square is 0: autograd also differentiates the branch that torch.where does not choose, and a NaN
    # there would get into the gradient.
    factor = 1 - common / (2 * torch.where(square > 0, square, torch.ones_like(square)))
    return vector * factor.to(vector.dtype)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double()).sum()
