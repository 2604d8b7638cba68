"""Gradients of collectives.

One autograd function runs every collective; what differs between them is a table of gradient functions. Horovod's
conventions hold, so that code written for it computes what it did: gradients of an average or a sum are averaged or
summed like the tensors were, while allgather and broadcast *average* the gradients of all ranks, as if the loss were
the mean of the ranks' losses.

Reductions that are no sums (Min, Max, Product, Adasum) have the derivative of the sum of the ranks' losses; every rank
computes it for itself from the tensors of all, so for these a backward pass takes as many tensors' memory as there are
ranks.

Gradients are made of collectives, so every rank that ran the collective must run its backward pass, too. They can be
differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdlab.collectives import context
from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.torch.handles import received_splits
from hvdlab.torch.nonlinear import LINEAR, reduced
from hvdlab.torch.process_sets import members, position
from hvdlab.torch.submission import Operation, run, submit_group

Tensors = Sequence[torch.Tensor]


def collective(operation: Operation, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    """Run a collective on one tensor and wait; differentiable if the tensor requires gradients."""
    if _recorded((tensor,)):
        return _apply(operation, name, (tensor,), grouped=False)[0]
    return run(operation, tensor, name)[0]


def collectives(operation: Operation, tensors: Tensors, name: str | None) -> list[torch.Tensor]:
    """Run a collective on a group of tensors and wait; differentiable where the tensors require gradients."""
    if _recorded(tensors):
        return list(_apply(operation, name, tensors, grouped=True))
    outputs: list[torch.Tensor] = submit_group(operation, tensors, name).wait()
    return outputs


def exchange(
    operation: Operation, tensor: torch.Tensor, name: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an alltoall and wait; the output, which is differentiable, and the received splits."""
    if _recorded((tensor,)):
        output, received = _apply(operation, name, (tensor,), grouped=False)
        return output, received
    output, result = run(operation, tensor, name)
    return output, received_splits(result)


def _recorded(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def _apply(operation: Operation, name: str | None, tensors: Tensors, grouped: bool) -> Tensors:
    outputs: Tensors = _Collective.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        _Forward(operation, name, grouped, [t.shape for t in tensors]), *tensors
    )
    return outputs


@dataclass(slots=True)
class _Forward:
    """What a gradient function knows of the forward pass.

    Attributes:
        operation: The collective.
        name: Its name.
        grouped: Whether it was a group.
        shapes: Shapes of the tensors.
        rows: For an allgather: for each tensor the rows of each member.
        received: For an alltoall: the rows received from each member.
    """

    operation: Operation
    name: str | None
    grouped: bool
    shapes: list[torch.Size]
    rows: list[list[int]] = field(default_factory=list)
    received: tuple[int, ...] = ()

    @property
    def linear(self) -> bool:
        """Whether the gradient does not depend on the tensors."""
        return self.operation.kind not in _REDUCTIONS or self.operation.op in LINEAR

    def run(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        if self.grouped:
            handle = submit_group(self.operation, tensors, self.name)
            outputs = tuple(handle.wait())
            self._note_rows(handle.tables)
            return outputs
        output, result = run(self.operation, tensors[0], self.name)
        self._note_rows([result.tables])
        if self.operation.kind is not OpKind.ALLTOALL:
            return (output,)
        self.received = result.received_splits or ()
        return output, received_splits(result)

    def _note_rows(self, tables: Sequence[tuple[tuple[int, ...], ...]]) -> None:
        if self.operation.kind is OpKind.ALLGATHER:
            self.rows = [[rows for (rows,) in table] for table in tables]

    def on_gradients(self, operation: Operation, gradients: Tensors) -> list[torch.Tensor]:
        """Run a collective of the same process set on the gradients, as a group if this was one."""
        operation = operation._replace(process_set=self.operation.process_set)
        name = None if self.name is None else f"{self.name}.gradient"
        if self.grouped:
            return collectives(operation, gradients, name)
        return [collective(operation, gradients[0], name)]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: _Forward, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.forward_pass = forward
        if not forward.linear:
            ctx.save_for_backward(*tensors)
        outputs = forward.run(tensors)
        if forward.operation.kind is OpKind.ALLTOALL:
            ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        forward: _Forward = ctx.forward_pass
        if not forward.linear:
            return None, *_of_nonlinear(forward, ctx.saved_tensors, gradients)
        return None, *_GRADIENTS[forward.operation.kind](forward, gradients)


def _of_allreduce(forward: _Forward, gradients: Tensors) -> Tensors:
    return forward.on_gradients(forward.operation, gradients)


def _of_allgather(forward: _Forward, gradients: Tensors) -> Tensors:
    averaged = forward.on_gradients(Operation(OpKind.ALLREDUCE, ReduceOp.AVERAGE), gradients)
    mine = position(forward.operation.process_set)
    return [
        gradient.narrow(0, sum(rows[:mine]), rows[mine]).reshape(shape)
        for gradient, rows, shape in zip(averaged, forward.rows, forward.shapes, strict=True)
    ]


def _of_broadcast(forward: _Forward, gradients: Tensors) -> Tensors:
    averaged = forward.on_gradients(Operation(OpKind.ALLREDUCE, ReduceOp.AVERAGE), gradients)
    if context.engine().rank == forward.operation.root:
        return averaged
    return [torch.zeros_like(gradient) for gradient in averaged]


def _of_reducescatter(forward: _Forward, gradients: Tensors) -> Tensors:
    operation = forward.operation
    scale = operation.prescale * operation.postscale
    if operation.op is ReduceOp.SUM:
        scale *= len(members(operation.process_set))
    scaled = list(gradients) if scale == 1.0 else [gradient * scale for gradient in gradients]
    return forward.on_gradients(Operation(OpKind.ALLGATHER), scaled)


def _of_alltoall(forward: _Forward, gradients: Tensors) -> Tensors:
    back = Operation(OpKind.ALLTOALL, process_set=forward.operation.process_set, splits=forward.received)
    name = None if forward.name is None else f"{forward.name}.gradient"
    return [exchange(back, gradients[0], name)[0]]


def _of_nonlinear(forward: _Forward, tensors: Tensors, gradients: Tensors) -> Tensors:
    """The gradient of a reduction that is no sum, from all ranks' tensors and the sum of their gradients."""
    operation = forward.operation
    whole = (
        Operation(OpKind.ALLREDUCE, ReduceOp.SUM)
        if operation.kind is OpKind.ALLREDUCE
        else Operation(OpKind.ALLGATHER)
    )
    summed = forward.on_gradients(whole, gradients)
    gathered = forward.on_gradients(Operation(OpKind.ALLGATHER), [t.unsqueeze(0) for t in tensors])
    mine, count = position(operation.process_set), len(members(operation.process_set))
    return [
        _derivative(operation, stacked, gradient, mine, count)
        for stacked, gradient in zip(gathered, summed, strict=True)
    ]


def _derivative(
    operation: Operation, stacked: torch.Tensor, gradient: torch.Tensor, mine: int, count: int
) -> torch.Tensor:
    again = torch.is_grad_enabled()  # whether this is to be differentiated itself
    if stacked.requires_grad:
        # An allgather averages gradients, while the losses of all ranks add up here.
        stacked.register_hook(lambda averaged: averaged * count)  # type: ignore[no-untyped-call]  # torch's
    else:
        stacked.requires_grad_()
    with torch.enable_grad():
        inputs = stacked.view_as(stacked)
        output = reduced(operation.op, inputs, operation.prescale, operation.postscale)
        (all_gradients,) = torch.autograd.grad(output, inputs, gradient, create_graph=again)
    result: torch.Tensor = all_gradients[mine]
    return result


_REDUCTIONS = frozenset({OpKind.ALLREDUCE, OpKind.REDUCESCATTER})
_GRADIENTS: dict[OpKind, Callable[[_Forward, Tensors], Tensors]] = {
    OpKind.ALLREDUCE: _of_allreduce,
    OpKind.ALLGATHER: _of_allgather,
    OpKind.BROADCAST: _of_broadcast,
    OpKind.REDUCESCATTER: _of_reducescatter,
    OpKind.ALLTOALL: _of_alltoall,
}
