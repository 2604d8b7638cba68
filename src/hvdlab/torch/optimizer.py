"""``DistributedOptimizer``: an optimizer whose ``step`` works with gradients reduced over all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.arguments import Average, Sum, checked_operator
from hvdlab.torch.buckets import Groups, bucketed, checked_names, gradient_names
from hvdlab.torch.compression import Compression, Compressor
from hvdlab.torch.gradients import GradientReducer, ReductionSettings
from hvdlab.torch.process_sets import ProcessSet, global_process_set


class DistributedMixin(torch.optim.Optimizer):
    """What ``DistributedOptimizer`` adds in front of the class of the given optimizer."""

    _given: type[torch.optim.Optimizer]
    _reducer: GradientReducer
    _names: dict[torch.Tensor, str]
    _included: bool
    _synchronized = False
    _synchronizing = True

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; ``step`` does this by itself.

        Call it to work on the reduced gradients (to clip them, say), then ``step`` inside :meth:`skip_synchronize`.

        Raises:
            MismatchError, AbortedError: As for ``allreduce``. Gradients are undefined then; parameters and optimizer
                state are untouched, and the next backward pass starts a new step.
        """
        if self._included:
            self._reducer.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context ``step`` uses the gradients as they are."""
        self._synchronizing = False
        try:
            yield
        finally:
            self._synchronizing = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, then take a step.

        Args:
            closure: Recomputes the loss with its gradients, which are reduced each time; every rank must call it
                equally often.

        Returns:
            What the given optimizer's ``step`` returns: the loss of this rank, if there is a closure.
        """
        if not self._synchronizing:
            return self._plain_step(closure)
        if self._synchronized:
            warnings.warn(
                "step() reduces the gradients again although synchronize() was called before; put step() into "
                "`with optimizer.skip_synchronize():`.",
                stacklevel=2,
            )
        if closure is None:
            self.synchronize()
            return self._plain_step(None)
        if self._reducer.in_progress:
            self.synchronize()
        return self._plain_step(self._reducing(closure))

    # Without this torch would wrap this method, too, and run hooks registered on the optimizer twice per step.
    step.hooked = True  # type: ignore[attr-defined]  # torch.optim.Optimizer looks for the attribute

    def _plain_step(self, closure: Callable[[], Any] | None) -> Any:
        self._synchronized = False
        if closure is None:
            return super().step()
        return super().step(closure)

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return reduced

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            AssertionError: Between a backward pass and ``step`` (or ``synchronize``), when an allreduce may be
                working on them.
        """
        if self._reducer.in_progress:
            raise AssertionError(
                "zero_grad() was called after a backward pass and before step() or synchronize(), while gradients may "
                "still be being reduced. Call step() first, or synchronize() to drop this step."
            )
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change after how many backward passes gradients are reduced. Call it between steps."""
        self._reducer.set_passes(_checked_passes(passes))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their gradients are reduced like the others'."""
        super().add_param_group(param_group)
        self._watch(())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer, distributed or not, and begin a new step."""
        self._reducer.drop()
        self._synchronized = False
        super().load_state_dict(state_dict)

    def _watch(self, groups: Groups) -> None:
        """Begin to reduce the gradients of those parameters that are not watched yet."""
        if not self._included:
            return
        new = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and not self._reducer.watches(parameter)
        ]
        for name, parameters in bucketed(new, gradient_names(self.param_groups, self._names), groups):
            self._reducer.watch(name, parameters)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> DistributedMixin:
    """Make an optimizer whose gradients are reduced over all ranks during the backward pass.

    The result is an instance of the given optimizer's class, so learning-rate schedulers and gradient scalers take it.
    It goes on with that one's state and parameter groups; use only the new one from here on.

    Args:
        optimizer: Any ``torch.optim`` optimizer, made alike on all ranks. A distributed one is wrapped anew, not twice.
        named_parameters: ``model.named_parameters()``: the names that errors and the timeline show. More than the
            optimizer has is fine, fewer is not.
        compression: What gradients are sent as, such as ``hvd.Compression.fp16``.
        backward_passes_per_step: Gradients of so many backward passes are added up on each rank before they are
            reduced. (They are not divided by it.)
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: With ``hvd.Average``, divide by this before the sum and by the rest after it.
        num_groups: Deprecated form of ``groups``.
        groups: How many groups of gradients to form that are reduced together, or lists of parameters, each a group.
            By default each gradient goes on its own, as soon as it is there.
        sparse_as_dense: Make sparse gradients dense first; otherwise their entries are gathered and added up.
        process_set: The ranks that train together; a rank outside takes its steps alone.

    Returns:
        The new optimizer, with :meth:`~DistributedMixin.synchronize` and :meth:`~DistributedMixin.skip_synchronize`.

    Raises:
        InvalidRequestError: An argument is wrong.
        UnsupportedError: ``op`` is ``hvd.Adasum``.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    settings = _checked_settings(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    reducer = GradientReducer(settings, _checked_passes(backward_passes_per_step))
    names = checked_names(named_parameters, optimizer.param_groups)
    if num_groups:
        warnings.warn("num_groups= is deprecated; give groups=.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    given = optimizer._given if isinstance(optimizer, DistributedMixin) else type(optimizer)
    kind = type(given.__name__, (DistributedMixin, given), {"_given": given})
    distributed: DistributedMixin = object.__new__(kind)
    # A scheduler made for the given optimizer has put a wrapper of its step into the instance.
    distributed.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    distributed._reducer, distributed._names = reducer, names
    distributed._included = bool(process_set.included())
    distributed._watch(groups if groups is not None else 0)
    return distributed


def _checked_settings(
    compression: type[Compressor],
    op: ReduceOp | int,
    predivide: float,
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> ReductionSettings:
    chosen = checked_operator(op)
    if chosen not in (Average, Sum):
        raise InvalidRequestError(
            f"Gradients are reduced with hvd.Average or hvd.Sum, not with {chosen.name.lower()}."
        )
    if predivide != 1.0 and chosen is not Average:
        raise InvalidRequestError("gradient_predivide_factor= splits a division, so it needs op=hvd.Average.")
    if predivide <= 0:
        raise InvalidRequestError(f"gradient_predivide_factor= must be positive, not {predivide}.")
    return ReductionSettings(compression, chosen, predivide, sparse_as_dense, process_set)


def _checked_passes(passes: int) -> int:
    if passes < 1:
        raise InvalidRequestError(f"backward_passes_per_step must be at least 1, not {passes}.")
    return passes
