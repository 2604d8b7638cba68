"""Gradients of collectives in torch: the rules of :mod:`hvdlab.bindings.gradients` behind one autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlab.bindings.gradients import Differentiable, ForwardPass
from hvdlab.bindings.operations import Operation
from hvdlab.collectives.dtypes import OpKind
from hvdlab.torch.adapter import BINDING
from hvdlab.torch.nonlinear import reduced


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
    """See :class:`hvdlab.bindings.gradients.Differentiation`."""

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
            stacked.register_hook(lambda averaged: averaged * count)  # type: ignore[no-untyped-call]  # torch's
        else:
            stacked.requires_grad_()
        with torch.enable_grad():
            inputs = stacked.view_as(stacked)
            output = reduced(operation.op, inputs, operation.prescale, operation.postscale)
            (all_gradients,) = torch.autograd.grad(output, inputs, gradient, create_graph=again)
        result: torch.Tensor = all_gradients[mine]
        return result


_differentiable: Differentiable[torch.Tensor] = Differentiable(BINDING, _TorchDifferentiation())
collective = _differentiable.collective
collectives = _differentiable.collectives
exchange = _differentiable.exchange
