"""The classes that ``DistributedOptimizer`` puts in front of the given optimizer's class."""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hvdlab.bindings.arguments import Adasum, Average, gradient_operator, predivide_factor
from hvdlab.bindings.buckets import Groups, bucketed
from hvdlab.bindings.gradient_reducer import GradientReducer, ReductionSettings
from hvdlab.bindings.hooks import GradientWatcher
from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.adapter import ADAPTER, BINDING
from hvdlab.torch.compression import Compressor
from hvdlab.torch.gradients import ANOTHER_LOSS, TorchGradients
from hvdlab.torch.parameter_names import gradient_names, parameter_names
from hvdlab.torch.process_sets import ProcessSet, set_id

_UNSCALE = torch.amp.GradScaler._unscale_grads_.__code__


class DistributedBase(torch.optim.Optimizer):
    """What all distributed optimizers have in common: they count the backward passes of a step, whatever they reduce then.

    ``op``, ``gradient_predivide_factor``, ``sparse_as_dense`` and ``process_set`` can be set between steps, on all ranks alike.
    """

    _given: type[torch.optim.Optimizer]
    _watcher: GradientWatcher[torch.Tensor]
    _gradients: TorchGradients
    _settings: ReductionSettings
    _parameter_names: dict[torch.Tensor, str]  # programs that were written for Horovod read this attribute
    _included: bool
    _groups: Groups[torch.Tensor] | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the optimizer without a step in progress: on the rank that gets it, it reduces gradients again."""
        from hvdlab.torch.optimizer import received

        plain = object.__new__(self._given)
        plain.__dict__.update({name: vars(self)[name] for name in ("defaults", "state", "param_groups")})
        names = [(name, parameter) for parameter, name in self._parameter_names.items()]
        return received, (plain, names, self.backward_passes_per_step, self._settings, self._groups)

    @property
    def backward_passes_per_step(self) -> int:
        """After how many backward passes gradients are reduced. Assign it between steps."""
        return self._watcher.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    @property
    def op(self) -> ReduceOp:
        """``hvd.Average``, ``hvd.Sum`` or ``hvd.Adasum``; the last one can't be set, nor be exchanged for another one."""
        return self._settings.op

    @op.setter
    def op(self, op: ReduceOp | int) -> None:
        self._change(replace(self._settings, op=gradient_operator(op)))

    @property
    def gradient_predivide_factor(self) -> float:
        """The number that gradients are divided by before the sum, as a part of an average's division; 1.0 by default."""
        return self._settings.predivide

    @gradient_predivide_factor.setter
    def gradient_predivide_factor(self, factor: float) -> None:
        self._change(replace(self._settings, predivide=factor))

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients are reduced as dense ones."""
        return self._settings.sparse_as_dense

    @sparse_as_dense.setter
    def sparse_as_dense(self, sparse_as_dense: bool) -> None:
        self._change(replace(self._settings, sparse_as_dense=sparse_as_dense))

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train together."""
        return self._settings.process_set

    @process_set.setter
    def process_set(self, process_set: ProcessSet) -> None:
        self._change(replace(self._settings, process_set=process_set))

    def _change(self, changed: ReductionSettings) -> None:
        """Reduce with these settings from the next step on.

        Raises:
            InvalidRequestError: A step is in progress, or the settings don't go together.
        """
        settings = checked_settings(
            changed.compression, changed.op, changed.predivide, changed.sparse_as_dense, changed.process_set
        )
        if settings == self._settings:
            return
        if (settings.op is Adasum) != (self._settings.op is Adasum):
            raise InvalidRequestError(
                "op= can't be changed to hvd.Adasum or from it: wrap the optimizer in hvd.DistributedOptimizer(..., op=...) again."
            )
        former = self._watcher
        if former.in_progress:
            raise InvalidRequestError(
                "How gradients are reduced can't be changed between a backward pass and step(), while some may be on their way "
                "already: set it before the backward pass."
            )
        self._gradients.sparse_as_dense = settings.sparse_as_dense
        self._watcher, self._settings = self._watcher_for(settings), settings
        self._watcher.settled, self._watcher.stepped = former.settled, former.stepped
        former.retire()  # and its hooks: this rank need not be in the new process set
        self._included = bool(settings.process_set.included())
        self._watch(self._groups if self._groups is not None else 0)

    @abstractmethod
    def _watcher_for(self, settings: ReductionSettings) -> GradientWatcher[torch.Tensor]:
        """Return a watcher that reduces with these settings after as many passes as the present one."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Whether gradients become ``None``, instead of zeros.

        Raises:
            AssertionError: A backward pass was made since the last ``step`` (or ``synchronize``), so that an allreduce may be
                working on the gradients.
        """
        if self._watcher.in_progress:
            raise AssertionError(
                "zero_grad() was called after a backward pass and before step() or synchronize(), while gradients may "
                f"still be being reduced. Call step() first, or synchronize() to drop this step. {ANOTHER_LOSS}"
            )
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change after how many backward passes gradients are reduced. Call it between steps.

        Raises:
            InvalidRequestError: ``passes`` is less than 1.
        """
        self._watcher.set_passes(checked_passes(passes))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as to any optimizer; their gradients are reduced like the others'."""
        super().add_param_group(param_group)
        self._parameter_names = parameter_names(self.param_groups, self._parameter_names)
        self._watch(0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer, distributed or not, and begin a new step.

        First waits for the allreduces that the last backward pass has started, and drops their results.
        """
        self._watcher.drop()
        self._watcher.settled = False
        super().load_state_dict(state_dict)

    def _plain_step(self, closure: Callable[[], Any] | None) -> Any:
        self._watcher.settled, self._watcher.stepped = False, True
        if closure is None:
            return super().step()
        return super().step(closure)

    def _warn_of_a_step_without_backward(self) -> None:
        watcher = self._watcher
        watcher.check()
        if watcher.watching and watcher.stepped and not watcher.in_progress and not watcher.settled:
            warnings.warn(
                "optimizer.step() was called a second time without a backward pass in between; it takes a step with "
                "the gradients of the last one again.",
                stacklevel=3,
            )

    def _watch(self, groups: Groups[torch.Tensor]) -> None:
        """Begin to reduce the gradients of those parameters that require them and are not watched yet."""
        if not self._included:
            return
        new = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and not self._watcher.watches(parameter)
        ]
        if new:
            names = gradient_names(self.param_groups, self._parameter_names)
            for name, parameters in bucketed(new, names, groups, ADAPTER.is_tensor):
                self._watcher.watch(name, parameters)


class DistributedMixin(DistributedBase):
    """Reduces gradients over the ranks, then takes the given optimizer's step with them."""

    _watcher: GradientReducer[torch.Tensor, torch.Tensor]  # pyright: ignore[reportIncompatibleVariableOverride]  # is set once
    _synchronizing = True
    _before_scaling = False

    def _watcher_for(self, settings: ReductionSettings) -> GradientReducer[torch.Tensor, torch.Tensor]:
        return GradientReducer(BINDING, self._gradients, settings, self._watcher.passes)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; ``step`` does this by itself.

        Call it to work on the reduced gradients (to clip them, say), then ``step`` inside :meth:`skip_synchronize`.

        Raises:
            MismatchError, AbortedError: As for ``allreduce``. Gradients are undefined then; parameters and optimizer
                state are untouched, and the next backward pass starts a new step.
        """
        self._watch(0)  # parameters that were unfrozen since the last step
        if self._included:
            self._watcher.synchronize()
        self._watcher.settled = True
        self._before_scaling = False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context ``step`` uses the gradients as they are, without reducing them."""
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

        Raises:
            MismatchError, AbortedError: As for :meth:`synchronize`. Without a closure no step is taken then.
        """
        settled = self._watcher.settled
        if not self._synchronizing or (settled and self._before_scaling):
            return self._plain_step(closure)
        if settled:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): "
                "it reduces the gradients again. Put it into `with optimizer.skip_synchronize():`.",
                stacklevel=2,
            )
        if closure is None:
            self._warn_of_a_step_without_backward()
            self.synchronize()
            return self._plain_step(None)
        if self._watcher.in_progress:
            self.synchronize()
        return self._plain_step(self._reducing(closure))

    # Without this torch would wrap this method as well as the given class's, and run the optimizer's hooks twice in each step.
    step.hooked = True  # type: ignore[attr-defined]  # torch.optim.Optimizer looks for the attribute

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            self._watcher.settled = False
            return loss

        return reduced

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, as of any optimizer.

        A ``torch.amp.GradScaler`` reads them before ``step``, to divide the gradients and look for infinities in them. The
        gradients are reduced at that moment, so that all ranks find the same infinities, and skip a step together.
        """
        if sys._getframe(1).f_code is _UNSCALE and self._watcher.in_progress:
            self.synchronize()
            self._before_scaling = True
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(  # pyright: ignore[reportIncompatibleVariableOverride]  # an attribute of torch's
        self, groups: list[dict[str, Any]]
    ) -> None:
        self.__dict__["param_groups"] = groups


def checked_passes(passes: int) -> int:
    """``backward_passes_per_step`` as given; raises ``InvalidRequestError`` if it is less than 1."""
    if passes < 1:
        raise InvalidRequestError(f"backward_passes_per_step must be at least 1, not {passes}.")
    return passes


def checked_settings(
    compression: type[Compressor],
    op: ReduceOp | int,
    predivide: float,
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> ReductionSettings:
    """Return how an optimizer reduces gradients.

    Raises:
        InvalidRequestError: The arguments don't go together, or the process set is not registered.
    """
    # No rank is included in a set that is not registered: each would train alone.
    set_id(process_set)
    chosen = gradient_operator(op)
    if predivide != 1.0 and chosen is not Average:
        raise InvalidRequestError("gradient_predivide_factor= splits a division, so it needs op=hvd.Average.")
    return ReductionSettings(compression, chosen, predivide_factor(predivide), sparse_as_dense, process_set)
