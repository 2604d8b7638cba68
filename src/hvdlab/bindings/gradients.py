"""Which collectives the gradient of a collective is made of.

Horovod's conventions hold, so that code written for it computes the same values: gradients of an average or a sum are
averaged or summed like the tensors were. Allgather and broadcast *average* the gradients of all ranks, as if the
loss were the mean of the ranks' losses.

Reductions that are no sums (Min, Max, Product, Adasum) have the derivative of the sum of the ranks' losses; every rank
computes it for itself from the tensors of all, so for these a backward pass needs as many tensors' memory as there are
ranks.

Gradients are made of collectives, so every rank that ran the collective must run its backward pass, too. Where the
framework can do that, they can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from hvdlab.bindings.operations import Binding, Operation
from hvdlab.collectives.context import own_number
from hvdlab.collectives.engine.requests import Result
from hvdlab.collectives.process_sets import members, position
from hvdlab.collectives.types import AVERAGE, SUM, OpKind, ReduceOp

T = TypeVar("T")

LINEAR = frozenset({ReduceOp.SUM, ReduceOp.AVERAGE})
"""Operators whose gradient does not depend on the tensors."""

_REDUCTIONS = frozenset({OpKind.ALLREDUCE, OpKind.REDUCESCATTER})


class Differentiation(Protocol[T]):
    """Differentiation by a framework: its way to record an operation, and the functions of tensors that the rules need. All are differentiable."""

    def record(self, forward: ForwardPass, tensors: Sequence[T]) -> Sequence[Any]:
        """Run :meth:`Differentiable.forward` so that its backward pass calls :meth:`Differentiable.backward`.

        The framework must keep the tensors until then, unless ``forward.linear``: then it keeps nothing, so that each output
        of a group can have a backward pass of its own. The last output of an alltoall, its received splits, is not
        differentiable.
        """
        ...

    def rows(self, tensor: T, start: int, count: int, shape: tuple[int, ...]) -> T:
        """Return ``count`` rows (of dimension 0) from ``start``, in this shape."""
        ...

    def zeros_like(self, tensor: T) -> T:
        """Return a tensor of zeros."""
        ...

    def scaled(self, tensor: T, factor: float) -> T:
        """Return the tensor times a number."""
        ...

    def as_row(self, tensor: T) -> T:
        """Return the tensor with a dimension of 1 in front."""
        ...

    def derivative(self, operation: Operation, stacked: T, gradient: T, mine: int, count: int) -> T:
        """Return the gradient of a reduction that is no sum.

        Args:
            operation: The reduction.
            stacked: The tensors of all members, along dimension 0.
            gradient: Sum of the members' gradients.
            mine: This rank's position among the members.
            count: Number of members. ``stacked`` came out of an allgather, which averages gradients, while the members'
                losses add up here: a gradient that flows back to ``stacked`` must be multiplied by this number.
        """
        ...


@dataclass(slots=True)
class ForwardPass:
    """Facts about the forward pass, for a gradient rule.

    Attributes:
        operation: The collective.
        name: Its name.
        grouped: Whether it was a group.
        shapes: Shapes of the tensors.
        rows: For an allgather: for each tensor the number of its first row in the output, and how many rows it has.
        received: For an alltoall: the rows received from each member.
    """

    operation: Operation
    name: str | None
    grouped: bool
    shapes: list[tuple[int, ...]]
    rows: Sequence[tuple[int, int]] = field(default_factory=list)
    received: tuple[int, ...] = ()

    @property
    def linear(self) -> bool:
        """Return whether the gradient does not depend on the tensors."""
        return self.operation.kind not in _REDUCTIONS or self.operation.reduction.op in LINEAR

    @property
    def gradient_name(self) -> str | None:
        """Return the name of the collectives on its gradients."""
        return None if self.name is None else f"{self.name}.gradient"


class Differentiable(Generic[T]):
    """Collectives that wait, recorded for differentiation where their tensors require gradients.

    Args:
        binding: Runs the collectives.
        framework: Records them, and does the arithmetic of gradients.
    """

    def __init__(self, binding: Binding[T], framework: Differentiation[T]) -> None:
        self._binding = binding
        self._framework = framework

    def collective(self, operation: Operation, tensor: Any, name: str | None) -> T:
        """Run a collective on one tensor and wait."""
        if self._binding.adapter.requires_grad((tensor,)):
            output: T = self._record(operation, name, (tensor,), grouped=False)[0]
            return output
        return self._binding.run(operation, tensor, name)[0]

    def collectives(self, operation: Operation, tensors: Sequence[Any], name: str | None) -> list[T]:
        """Run a collective on a group of tensors and wait."""
        if self._binding.adapter.requires_grad(tensors):
            return list(self._record(operation, name, tensors, grouped=True))
        outputs: list[T] = self._binding.submit_group(operation, tensors, name).wait()
        return outputs

    def exchange(self, operation: Operation, tensor: Any, name: str | None) -> tuple[T, Any]:
        """Run an alltoall and wait; the output, which is differentiable, and the received splits."""
        if self._binding.adapter.requires_grad((tensor,)):
            output, received = self._record(operation, name, (tensor,), grouped=False)
            return output, received
        result: Result
        output, result = self._binding.run(operation, tensor, name)
        return output, self._binding.received_splits(result)

    def _record(
        self, operation: Operation, name: str | None, tensors: Sequence[Any], *, grouped: bool
    ) -> Sequence[Any]:
        adapter = self._binding.adapter
        checked = [adapter.check(tensor, operation.kind, False) for tensor in tensors]
        shapes = [tuple(adapter.shape(tensor)) for tensor in checked]
        return self._framework.record(ForwardPass(operation, name, grouped, shapes), checked)

    # -- called by the framework's record ---------------------------------------------------------------------------

    def forward(self, forward: ForwardPass, tensors: Sequence[T]) -> tuple[Any, ...]:
        """Run the collective; the outputs, and for an alltoall the received splits behind them."""
        operation = forward.operation
        if forward.grouped:
            handle = self._binding.submit_group(operation, tensors, forward.name)
            outputs = tuple(handle.wait())
            _keep_rows(forward, handle.tables)
            return outputs
        output, result = self._binding.run(operation, tensors[0], forward.name)
        _keep_rows(forward, [result.tables])
        if operation.kind is not OpKind.ALLTOALL:
            return (output,)
        forward.received = result.received_splits or ()
        return output, self._binding.received_splits(result)

    def backward(self, forward: ForwardPass, tensors: Sequence[T], gradients: Sequence[T]) -> Sequence[T]:
        """Return the gradients of the tensors from those of the outputs; ``tensors`` may be empty if ``forward.linear``."""
        if forward.linear:
            return _RULES[forward.operation.kind](self, forward, gradients)
        return self._of_nonlinear(forward, tensors, gradients)

    # -- rules ------------------------------------------------------------------------------------------------------

    def _on_gradients(self, forward: ForwardPass, operation: Operation, gradients: Sequence[T]) -> list[T]:
        """Run a collective of the same process set on the gradients, as a group if the forward pass was one."""
        operation = operation._replace(process_set=forward.operation.process_set)
        if forward.grouped:
            return self.collectives(operation, gradients, forward.gradient_name)
        return [self.collective(operation, gradients[0], forward.gradient_name)]

    def _of_allreduce(self, forward: ForwardPass, gradients: Sequence[T]) -> Sequence[T]:
        return self._on_gradients(forward, forward.operation, gradients)

    def _of_allgather(self, forward: ForwardPass, gradients: Sequence[T]) -> Sequence[T]:
        averaged = self._on_gradients(forward, _AVERAGE, gradients)
        return [
            self._framework.rows(gradient, start, count, shape)
            for gradient, (start, count), shape in zip(averaged, forward.rows, forward.shapes, strict=True)
        ]

    def _of_broadcast(self, forward: ForwardPass, gradients: Sequence[T]) -> Sequence[T]:
        averaged = self._on_gradients(forward, _AVERAGE, gradients)
        if own_number() == forward.operation.root:
            return averaged
        return [self._framework.zeros_like(gradient) for gradient in averaged]

    def _of_reducescatter(self, forward: ForwardPass, gradients: Sequence[T]) -> Sequence[T]:
        operation = forward.operation
        op, prescale, postscale = operation.reduction
        scale = prescale * postscale
        if op is ReduceOp.SUM:
            scale *= len(members(operation.process_set))
        scaled = gradients if scale == 1.0 else [self._framework.scaled(each, scale) for each in gradients]
        return self._on_gradients(forward, _GATHER, scaled)

    def _of_alltoall(self, forward: ForwardPass, gradients: Sequence[T]) -> Sequence[T]:
        back = Operation(OpKind.ALLTOALL, process_set=forward.operation.process_set, splits=forward.received)
        return [self.exchange(back, gradients[0], forward.gradient_name)[0]]

    def _of_nonlinear(
        self, forward: ForwardPass, tensors: Sequence[T], gradients: Sequence[T]
    ) -> Sequence[T]:
        """Return the gradient of a reduction that is no sum, from all ranks' tensors and the sum of their gradients."""
        operation = forward.operation
        whole = _SUM if operation.kind is OpKind.ALLREDUCE else _GATHER
        summed = self._on_gradients(forward, whole, gradients)
        gathered = self._on_gradients(forward, _GATHER, [self._framework.as_row(t) for t in tensors])
        mine, count = position(operation.process_set), len(members(operation.process_set))
        return [
            self._framework.derivative(operation, stacked, gradient, mine, count)
            for stacked, gradient in zip(gathered, summed, strict=True)
        ]


def _keep_rows(forward: ForwardPass, tables: Sequence[tuple[tuple[int, ...], ...]]) -> None:
    if forward.operation.kind is OpKind.ALLGATHER:
        forward.rows = own_rows(tables, forward.operation.process_set)


def own_rows(tables: Sequence[tuple[tuple[int, ...], ...]], process_set: int) -> list[tuple[int, int]]:
    """Return where this rank's rows begin in the output of an allgather, and how many they are.

    Args:
        tables: For each tensor each member's announcement, as a handle has it when it is done.
        process_set: The ranks that took part.
    """
    mine = position(process_set)
    counts = [[rows for (rows,) in table] for table in tables]
    return [(sum(each[:mine]), each[mine]) for each in counts]


_SUM = Operation(OpKind.ALLREDUCE, SUM)
_AVERAGE = Operation(OpKind.ALLREDUCE, AVERAGE)
_GATHER = Operation(OpKind.ALLGATHER)

_RULES: dict[OpKind, Callable[[Differentiable[Any], ForwardPass, Sequence[Any]], Sequence[Any]]] = {
    OpKind.ALLREDUCE: Differentiable._of_allreduce,
    OpKind.ALLGATHER: Differentiable._of_allgather,
    OpKind.BROADCAST: Differentiable._of_broadcast,
    OpKind.REDUCESCATTER: Differentiable._of_reducescatter,
    OpKind.ALLTOALL: Differentiable._of_alltoall,
}
