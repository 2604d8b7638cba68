"""Gradients of collectives in torch: the rules of :mod:`hvdlab.bindings.gradients` behind one autograd function.

Reductions that are no sums are functions of all ranks' tensors in one, so that autograd differentiates them. For Min and Max, the
gradient goes to the rank whose element was the smallest or largest (ranks that tie share it evenly). For Product, each rank's is
multiplied by the product of the other ranks' elements. For Adasum, it is the derivative of its formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlab.bindings.gradients import Differentiable, ForwardPass
from hvdlab.bindings.operations import Operation
from hvdlab.collectives.reduce import levels
from hvdlab.collectives.types import OpKind, ReduceOp, Reduction
from hvdlab.torch.adapter import BINDING

_HALVES = (torch.float16, torch.bfloat16)


def reduced(reduction: Reduction, stacked: torch.Tensor) -> torch.Tensor:
    """Return the reduction of the tensors of all ranks, which are stacked along dimension 0; differentiable.

    The operator is MIN, MAX, PRODUCT or ADASUM. float16 and bfloat16 are computed in float32, as by the core.
    """
    op, prescale, postscale = reduction
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
    """Return the Adasum of the rows, by the formula in :mod:`hvdlab.collectives.reduce`."""
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
    # As in the core, which accumulates Adasum's products in float64: the gradient is that of the value that
    # it computes.
    return (a.double() * b.double()).sum()


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: ForwardPass, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.forward_pass = forward
        if not forward.linear:
            ctx.save_for_backward(*tensors)
        outputs = _differentiable.forward(forward, tensors)
        if forward.operation.kind is OpKind.ALLTOALL:
            ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # The outputs of a group share this node, and each may have a backward pass of its own. torch raises at any look at
        # ``saved_tensors`` after the first pass, even where nothing was saved.
        tensors = () if ctx.forward_pass.linear else ctx.saved_tensors
        return None, *_differentiable.backward(ctx.forward_pass, tensors, gradients)


class _TorchDifferentiation:
    """Differentiation by torch's autograd; see :class:`hvdlab.bindings.gradients.Differentiation`."""

    def record(self, forward: ForwardPass, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = _Collective.apply(forward, *tensors)  # type: ignore[no-untyped-call]
        return outputs

    def rows(self, tensor: torch.Tensor, start: int, count: int, shape: tuple[int, ...]) -> torch.Tensor:
        return tensor.narrow(0, start, count).reshape(shape)

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor)

    def scaled(self, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        return tensor * factor

    def as_row(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)

    def derivative(
        self, operation: Operation, stacked: torch.Tensor, gradient: torch.Tensor, mine: int, count: int
    ) -> torch.Tensor:
        again = torch.is_grad_enabled()  # whether the user differentiates this gradient once more
        if stacked.requires_grad:
            # ``stacked`` came out of an allgather, whose gradient is an average over the ranks; here the ranks' losses add up.
            stacked.register_hook(lambda averaged: averaged * count)
        else:
            stacked.requires_grad_()
        with torch.enable_grad():
            # Through a view: to differentiate by ``stacked`` itself would run its hook here, which is for a
            # second derivative alone.
            inputs = stacked.view_as(stacked)
            output = reduced(operation.reduction, inputs)
            (all_gradients,) = torch.autograd.grad(output, inputs, gradient, create_graph=again)
        result: torch.Tensor = all_gradients[mine]
        return result


_differentiable: Differentiable[torch.Tensor] = Differentiable(BINDING, _TorchDifferentiation())
collective = _differentiable.collective
collectives = _differentiable.collectives
exchange = _differentiable.exchange
