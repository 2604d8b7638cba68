"""How torch's parameters hold their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch.utils.hooks import RemovableHandle

from hvdlab.bindings.gradient_reducer import ReductionSettings
from hvdlab.bindings.handles import Handle
from hvdlab.bindings.hooks import GradientHook
from hvdlab.torch.adapter import as_stored
from hvdlab.torch.sparse import sparse_allreduce_async

ANOTHER_LOSS = (
    "If it was another loss that reached these parameters, as a GAN's generator loss reaches the discriminator's, keep "
    "it from making their gradients: call requires_grad_(False) on that module before that loss is computed, and "
    "requires_grad_(True) after its backward pass."
)
"""For errors: what may have happened if gradients were computed once more than expected, and what to do."""

_NAMES_TWICE = (
    "it is a gradient, of which another DistributedOptimizer has one of this name. Give both named_parameters=, with "
    "names of their own: [(f'D.{name}', p) for name, p in D.named_parameters()]. "
    f"{ANOTHER_LOSS}"
)


class TorchGradients:
    """See :class:`hvdlab.bindings.gradient_reducer.GradientAdapter`.

    Args:
        sparse_as_dense: Whether sparse gradients are reduced as dense ones, and made sparse again. It can be set between steps.
    """

    another_loss = ANOTHER_LOSS
    names_twice = _NAMES_TWICE

    def __init__(self, *, sparse_as_dense: bool = False) -> None:
        self.sparse_as_dense = sparse_as_dense
        #: For each parameter that has had a sparse gradient: how many of the gradient's dimensions are sparse.
        self._sparse_dims: dict[torch.Tensor, int] = {}

    def register(self, parameter: torch.Tensor, hook: GradientHook) -> RemovableHandle:
        return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]

    def registered(self, parameter: torch.Tensor) -> Iterable[object]:
        hooks: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        return hooks.values()

    def at_end(self, callback: Callable[[], None]) -> None:
        if torch._C._current_graph_task_id() >= 0:
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def untracked(self) -> AbstractContextManager[object]:
        return torch.no_grad()

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            if parameter in self._sparse_dims and not self.sparse_as_dense:
                return nothing_of(parameter, self._sparse_dims[parameter])
            gradient = torch.zeros_like(parameter, requires_grad=False)
            if parameter.requires_grad:
                parameter.grad = gradient
        elif gradient.requires_grad:
            raise AssertionError(
                "A gradient that requires gradients itself (create_graph=True) can't be reduced in place; "
                "detach it before, or use hvd.allreduce in the loss."
            )
        elif gradient.is_sparse:
            self._sparse_dims[parameter] = gradient.sparse_dim()
            if self.sparse_as_dense:
                gradient = parameter.grad = gradient.to_dense()
        return gradient

    def is_sparse(self, gradient: torch.Tensor) -> bool:
        return gradient.is_sparse

    def reduce_sparse(self, gradient: torch.Tensor, name: str, settings: ReductionSettings) -> Handle:
        return sparse_allreduce_async(gradient, name, settings.op, settings.process_set)

    def as_sent(
        self, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The tensors, as views that need no copy where their elements lie in memory in another order than C's.

        Only a tensor with its parameter's strides is sent in its own order: parameters have the same order on all ranks, while
        gradients in any other order may differ from rank to rank.
        """
        if all(tensor.is_contiguous() for tensor in tensors):
            return tensors
        return [
            as_stored(tensor) if tensor.stride() == parameter.stride() else tensor
            for parameter, tensor in zip(parameters, tensors, strict=True)
        ]

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        return sum([tensor.nbytes for tensor in tensors])

    def install(self, parameter: torch.Tensor, reduced: torch.Tensor) -> None:
        if reduced.is_sparse:
            parameter.grad = reduced
        elif parameter in self._sparse_dims and parameter.grad is not None:
            # It was reduced as a dense one, as by sparse_as_dense. Make it sparse again: SparseAdam takes sparse gradients only, and
            # other optimizers would apply a gradient of zero to the rows that no rank has used.
            parameter.grad = reduced.to(parameter.dtype).to_sparse(self._sparse_dims[parameter])
        elif parameter.grad is None:
            # A parameter that is frozen on this rank goes on without a gradient, as without hvdlab, unless another rank has one.
            if reduced.any():
                parameter.grad = reduced
        elif parameter.grad is not reduced:
            parameter.grad.copy_(reduced)


def nothing_of(parameter: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """A sparse gradient of this parameter without entries."""
    values = parameter.new_empty((0, *parameter.shape[sparse_dims:]), requires_grad=False)
    indices = torch.empty((sparse_dims, 0), dtype=torch.long, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)
