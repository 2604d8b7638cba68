"""``DistributedOptimizer``: an optimizer that takes the same step on all ranks, with the gradients of all.

The result is of the given optimizer's class, with a class of this module in front: ``DistributedMixin`` reduces gradients during
the backward pass. ``AdasumMixin`` (``op=hvd.Adasum``) lets each rank take a step of its own, and combines the changes that the
optimizers made. So an optimizer's own scaling (such as Adam's) has been applied before: each parameter becomes its value before
the step plus the Adasum of the ranks' changes of it. See :mod:`hvdlab.collectives.reduce` for the formula.
"""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdlab.bindings.arguments import Adasum, Average, gradient_operator, predivide_factor
from hvdlab.bindings.gradient_reducer import (
    BackwardPassCounter,
    GradientHook,
    GradientReducer,
    Groups,
    ReductionSettings,
    bucketed,
    check_unique,
)
from hvdlab.bindings.handles import Handle, wait_for_all
from hvdlab.bindings.operations import Operation
from hvdlab.collectives.context import is_initialized
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.process_sets import ProcessSet, global_process_set, set_id
from hvdlab.collectives.types import PLAIN, OpKind, ReduceOp
from hvdlab.torch.adapter import ADAPTER, BINDING, as_stored
from hvdlab.torch.compression import Compression, Compressor
from hvdlab.torch.monitoring import meter_of
from hvdlab.torch.mpi_ops import sparse_allreduce_async


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups[torch.Tensor] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> DistributedMixin | AdasumMixin:
    """Make an optimizer whose gradients are reduced over all ranks during the backward pass.

    The result is an instance of the given optimizer's class, so learning-rate schedulers and gradient scalers accept it.
    It continues with the given optimizer's state and parameter groups; use only the new optimizer from here on.

    Args:
        optimizer: Any ``torch.optim`` optimizer, made alike on all ranks. A distributed one is wrapped again, not twice.
        named_parameters: ``model.named_parameters()``: the names that errors and the timeline show. It must name every
            parameter of the optimizer, and may name others. By default a parameter is named by its place in the optimizer.
        compression: The compressor that gradients are sent through, such as ``hvd.Compression.fp16``; by default none.
        backward_passes_per_step: The gradients of this many backward passes are added up on each rank before they are
            reduced. (They are not divided by this number.)
        op: ``hvd.Average`` or ``hvd.Sum`` of the gradients, or ``hvd.Adasum`` of the steps that the ranks' optimizers
            take, see :mod:`hvdlab.torch.optimizer`.
        gradient_predivide_factor: With ``hvd.Average``: gradients are divided by this number before the sum, and the sum by
            the number of ranks over this number.
        num_groups: Deprecated form of ``groups``.
        groups: The number of groups of gradients that are reduced together, or lists of parameters, each a group.
            By default each gradient is reduced on its own, as soon as it is there.
        sparse_as_dense: Reduce sparse gradients as dense ones, then make them sparse again, with the entries that are not
            zero. By default the ranks gather the entries of sparse gradients and add them up.
        process_set: The ranks that train together; a rank outside takes its steps alone.

    Returns:
        The new optimizer, with ``synchronize()`` and ``skip_synchronize()``, see
        :class:`hvdlab.torch.optimizer.DistributedMixin`. ``op``, ``backward_passes_per_step``,
        ``gradient_predivide_factor``, ``sparse_as_dense`` and ``process_set`` can be read from it, and set between steps on all
        ranks alike; as in Horovod the name of each parameter can be read from the dictionary ``_parameter_names``.
        ``step()`` and ``synchronize()`` raise ``MismatchError`` or ``AbortedError`` if a collective fails. The
        parameters are unchanged then, and the gradients undefined.

    Raises:
        InvalidRequestError: An argument is wrong; the message names it.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    settings = checked_settings(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
    passes = checked_passes(backward_passes_per_step)
    names = checked_names(named_parameters, optimizer.param_groups)
    if num_groups:
        warnings.warn("num_groups= is deprecated; give groups=.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    given = optimizer._given if isinstance(optimizer, DistributedBase) else type(optimizer)
    mixin: type[DistributedMixin | AdasumMixin] = DistributedMixin
    gradients = TorchGradients(sparse_as_dense=sparse_as_dense)
    watcher: BackwardPassCounter[torch.Tensor] = GradientReducer(BINDING, gradients, settings, passes)
    if settings.op is Adasum:
        mixin, watcher = AdasumMixin, ChangeReducer(compression, process_set, passes)
    kind: type[DistributedMixin | AdasumMixin]
    kind = type(given.__name__, (mixin, given), {"_given": given})  # pyright: ignore[reportAssignmentType]
    # Not by the class's constructor: only the user's program knows its arguments, and it would begin with an
    # empty state.
    distributed = object.__new__(kind)
    # Not "step": a scheduler that was made for the given optimizer has put a wrapper of the old step into the instance.
    distributed.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    distributed.__dict__.update(_watcher=watcher, _gradients=gradients, _settings=settings, _groups=groups)
    distributed._parameter_names = parameter_names(optimizer.param_groups, names)
    distributed._included = bool(process_set.included())
    distributed._watch(groups if groups is not None else 0)
    # After the attributes were copied: a given optimizer that counts its steps already passes its meter on,
    # and no second hook is registered.
    meter_of(distributed)
    return distributed


def received(
    plain: torch.optim.Optimizer,
    names: Iterable[tuple[str, torch.Tensor]],
    passes: int,
    settings: ReductionSettings,
    groups: Groups[torch.Tensor] | None,
) -> torch.optim.Optimizer:
    """Unpickle a distributed optimizer; in a process without ranks, such as the notebook's, return the plain optimizer."""
    if not is_initialized():
        return plain
    return DistributedOptimizer(
        plain,
        names,
        settings.compression,
        passes,
        settings.op,
        settings.predivide,
        groups=groups,
        sparse_as_dense=settings.sparse_as_dense,
        process_set=settings.process_set,
    )


EXTRA_BACKWARD_HINT = (
    "If it was another loss that reached these parameters, as a GAN's generator loss reaches the discriminator's, keep "
    "it from making their gradients: call requires_grad_(False) on that module before that loss is computed, and "
    "requires_grad_(True) after its backward pass."
)
"""For errors: what may have happened if gradients were computed once more than expected, and what to do."""

_DUPLICATE_NAME_HINT = (
    "it is a gradient, of which another DistributedOptimizer has one of this name. Give both named_parameters=, with "
    "names of their own: [(f'D.{name}', p) for name, p in D.named_parameters()]. "
    f"{EXTRA_BACKWARD_HINT}"
)


class TorchGradients:
    """Access to torch's gradients; see :class:`hvdlab.bindings.gradient_reducer.GradientAdapter`.

    Args:
        sparse_as_dense: Whether sparse gradients are reduced as dense ones, and made sparse again. It can be set between steps.
    """

    extra_backward_hint = EXTRA_BACKWARD_HINT
    duplicate_name_hint = _DUPLICATE_NAME_HINT

    def __init__(self, *, sparse_as_dense: bool = False) -> None:
        self.sparse_as_dense = sparse_as_dense
        #: For each parameter that has had a sparse gradient: how many of the gradient's dimensions are sparse.
        self._sparse_dims: dict[torch.Tensor, int] = {}

    def register(self, parameter: torch.Tensor, hook: GradientHook) -> RemovableHandle:
        return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return]

    def registered(self, parameter: torch.Tensor) -> Iterable[object]:
        hooks: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        return hooks.values()

    def at_end(self, callback: Callable[[], None]) -> None:
        # torch refuses a callback outside of a backward pass. There the thread that waits for the gradients
        # announces them.
        if torch._C._current_graph_task_id() >= 0:
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def untracked(self) -> AbstractContextManager[object]:
        return torch.no_grad()

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            if parameter in self._sparse_dims and not self.sparse_as_dense:
                # Ranks that have a gradient gather its entries under the name of a sparse one, which zeros of
                # a dense tensor would never meet.
                return nothing_of(parameter, self._sparse_dims[parameter])
            gradient = torch.zeros_like(parameter, requires_grad=False)
            # A frozen parameter keeps none: with a gradient of zeros the optimizer's weight decay and
            # momentum would still change it.
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
        """Return the tensors, as views that need no copy where their elements lie in memory in another order than C's.

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
        # Without compression the core has written into the gradient itself.
        elif parameter.grad is not reduced:
            parameter.grad.copy_(reduced)


def nothing_of(parameter: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """Return a sparse gradient of this parameter without entries."""
    values = parameter.new_empty((0, *parameter.shape[sparse_dims:]), requires_grad=False)
    indices = torch.empty((sparse_dims, 0), dtype=torch.long, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)


def checked_names(
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None, param_groups: Sequence[dict[str, Any]]
) -> dict[torch.Tensor, str]:
    """Return the names that a user gave to parameters; empty if the user gave none.

    Raises:
        InvalidRequestError: These are no (name, parameter) pairs, a name comes twice, or a parameter of the
            optimizer has no name.
    """
    if named_parameters is None:
        return {}
    # It is often a generator, such as model.named_parameters(), which can be read only once.
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidRequestError(
            "named_parameters= takes (name, parameter) pairs; it is usually given model.named_parameters()."
        )
    check_unique([name for name, _ in pairs], "named_parameters=")
    names = {parameter: name for name, parameter in pairs}
    unnamed = [
        f"param_groups[{g}]['params'][{i}] {list(parameter.shape)}"
        for g, group in enumerate(param_groups)
        for i, parameter in enumerate(group["params"])
        if parameter not in names
    ]
    if unnamed:
        raise InvalidRequestError(
            "named_parameters= must name every parameter of the optimizer; these are missing: "
            f"{', '.join(unnamed)}."
        )
    return names


def parameter_names(
    param_groups: Sequence[dict[str, Any]], names: dict[torch.Tensor, str]
) -> dict[torch.Tensor, str]:
    """Return the given names, and for a parameter of the optimizer without one its place there, such as ``group0.param3``."""
    places = {
        parameter: f"group{g}.param{i}"
        for g, group in enumerate(param_groups)
        for i, parameter in enumerate(group["params"])
    }
    return {**places, **names}


def gradient_names(
    param_groups: Sequence[dict[str, Any]], names: dict[torch.Tensor, str]
) -> dict[torch.Tensor, str]:
    """Return the name in the core of each parameter's gradient: ``grad.`` and the parameter's name or place."""
    every = parameter_names(param_groups, names)
    return {parameter: f"grad.{every[parameter]}" for group in param_groups for parameter in group["params"]}


_UNSCALE = torch.amp.GradScaler._unscale_grads_.__code__


class DistributedBase(torch.optim.Optimizer):
    """Base of the distributed optimizers: they count the backward passes of a step, for any kind of reduction.

    ``op``, ``gradient_predivide_factor``, ``sparse_as_dense`` and ``process_set`` can be set between steps, on all ranks alike.
    """

    _given: type[torch.optim.Optimizer]
    _watcher: BackwardPassCounter[torch.Tensor]
    _gradients: TorchGradients
    _settings: ReductionSettings
    _parameter_names: dict[torch.Tensor, str]  # programs that were written for Horovod read this attribute
    _included: bool
    _groups: Groups[torch.Tensor] | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the optimizer without a step in progress: on the rank that gets it, it reduces gradients again."""
        plain = object.__new__(self._given)
        # Those that torch's own pickles of optimizers have: hooks and the watcher belong to this process.
        plain.__dict__.update({name: vars(self)[name] for name in ("defaults", "state", "param_groups")})
        names = [(name, parameter) for parameter, name in self._parameter_names.items()]
        return received, (plain, names, self.backward_passes_per_step, self._settings, self._groups)

    @property
    def backward_passes_per_step(self) -> int:
        """Return after how many backward passes gradients are reduced. Assign it between steps."""
        return self._watcher.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    @property
    def op(self) -> ReduceOp:
        """Return ``hvd.Average``, ``hvd.Sum`` or ``hvd.Adasum``; the last one can't be set, nor be exchanged for another one."""
        return self._settings.op

    @op.setter
    def op(self, op: ReduceOp | int) -> None:
        self._change(replace(self._settings, op=gradient_operator(op)))

    @property
    def gradient_predivide_factor(self) -> float:
        """Return the number that gradients are divided by before the sum, as a part of an average's division; 1.0 by default."""
        return self._settings.predivide

    @gradient_predivide_factor.setter
    def gradient_predivide_factor(self, factor: float) -> None:
        self._change(replace(self._settings, predivide=factor))

    @property
    def sparse_as_dense(self) -> bool:
        """Return whether sparse gradients are reduced as dense ones."""
        return self._settings.sparse_as_dense

    @sparse_as_dense.setter
    def sparse_as_dense(self, sparse_as_dense: bool) -> None:
        self._change(replace(self._settings, sparse_as_dense=sparse_as_dense))

    @property
    def process_set(self) -> ProcessSet:
        """Return the ranks that train together."""
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
    def _watcher_for(self, settings: ReductionSettings) -> BackwardPassCounter[torch.Tensor]:
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
                f"still be being reduced. Call step() first, or synchronize() to drop this step. {EXTRA_BACKWARD_HINT}"
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
    """Mixin that reduces gradients over the ranks, then takes the given optimizer's step with them."""

    _watcher: GradientReducer[torch.Tensor, torch.Tensor]  # pyright: ignore[reportIncompatibleVariableOverride]  # is set once
    _synchronizing = True
    _before_scaling = False

    def _watcher_for(self, settings: ReductionSettings) -> GradientReducer[torch.Tensor, torch.Tensor]:
        return GradientReducer(BINDING, self._gradients, settings, self._watcher.passes)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; ``step`` does this by itself.

        Call it to work on the reduced gradients (to clip them, for example), then ``step`` inside :meth:`skip_synchronize`.

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
        """Let ``step``, within this context, use the gradients as they are, without reducing them."""
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
            The result of the given optimizer's ``step``: the loss of this rank, if there is a closure.

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
        # A backward pass before the step has its own reduction. The pass that the closure makes would be one
        # too many on top of it.
        if self._watcher.in_progress:
            self.synchronize()
        return self._plain_step(self._reducing(closure))

    # Without this torch would wrap this method as well as the given class's, and run the optimizer's hooks twice in each step.
    step.hooked = True  # type: ignore[attr-defined]  # torch.optim.Optimizer looks for the attribute

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            # The step itself uses these gradients. Left set, this would make the next step() warn of a
            # synchronize() that the user never called.
            self._watcher.settled = False
            return loss

        return reduced

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups, as of any optimizer.

        A ``torch.amp.GradScaler`` reads them before ``step``, to divide the gradients and look for infinities in them. The
        gradients are reduced at that moment, so that all ranks find the same infinities, and skip a step together.
        """
        # For the scaler alone: a scheduler or a logger that reads the groups during a step must not wait for
        # other ranks.
        if sys._getframe(1).f_code is _UNSCALE and self._watcher.in_progress:
            self.synchronize()
            # After synchronize(), which sets it back: step() is to skip its own reduction for this one only.
            self._before_scaling = True
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(  # pyright: ignore[reportIncompatibleVariableOverride]  # an attribute of torch's
        self, groups: list[dict[str, Any]]
    ) -> None:
        self.__dict__["param_groups"] = groups


def checked_passes(passes: int) -> int:
    """Return ``backward_passes_per_step`` as given; raises ``InvalidRequestError`` if it is less than 1."""
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


class ChangeReducer(BackwardPassCounter[torch.Tensor]):
    """Reducer that combines the changes that the ranks' steps make to the parameters.

    Args:
        compression: The compressor that changes are sent through.
        process_set: The ranks whose changes are combined.
        passes: How many backward passes make up a step.
    """

    def __init__(self, compression: type[Compressor], process_set: ProcessSet, passes: int) -> None:
        super().__init__(TorchGradients(), passes)
        self._compression = compression
        self._process_set = process_set
        #: The parameters whose changes are combined together, in the order of :meth:`watch`, equal on all
        #: ranks.
        self._buckets: list[tuple[str, list[torch.Tensor]]] = []

    def watch(self, name: str, parameters: Iterable[torch.Tensor]) -> None:
        bucket = list(parameters)
        super().watch(name, bucket)
        self._buckets.append((name, bucket))

    def complete(self, parameter: torch.Tensor) -> None:
        """Do nothing: changes can be combined only after the rank's optimizer has taken its step."""

    def drop(self) -> None:
        self.reset()

    @torch.no_grad()
    def around(self, step: Callable[[], Any]) -> Any:
        """Take this rank's step, and replace it by the Adasum of all ranks' steps.

        Args:
            step: Changes the parameters as this rank's optimizer does.

        Returns:
            The result of ``step``.

        After an error or Ctrl-C the parameters have the values that they had before.
        """
        self.check()
        watched = [parameter for _, bucket in self._buckets for parameter in bucket]
        starts = {parameter: parameter.detach().clone() for parameter in watched}
        try:
            # A closure runs backward passes within the step, which no_grad() around this method would forbid.
            with torch.enable_grad():
                result = step()
            changes = {parameter: parameter.detach() - start for parameter, start in starts.items()}
            for parameter, change in self._reduced(changes):
                parameter.copy_(starts[parameter] + change)
        # Ctrl-C as well: otherwise some parameters would have the combined values, and others those of this
        # rank's own step.
        except BaseException:
            for parameter, start in starts.items():
                parameter.copy_(start)
            raise
        finally:
            self.reset()
        return result

    def _reduced(
        self, changes: dict[torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        operation = Operation(OpKind.ALLREDUCE, PLAIN[ReduceOp.ADASUM], process_set=set_id(self._process_set))
        started: list[tuple[list[torch.Tensor], Handle, list[Any]]] = []
        for name, bucket in self._buckets:
            compressed = [self._compression.compress(changes[parameter]) for parameter in bucket]
            sent = [tensor for tensor, _ in compressed]
            handle = (
                BINDING.submit(operation, sent[0], name, in_place=True)
                if len(sent) == 1
                else BINDING.submit_group(operation, sent, name, in_place=True)
            )
            started.append((bucket, handle, [context for _, context in compressed]))
        # Before the first value is yielded: if a bucket fails, no parameter has been overwritten yet.
        results = wait_for_all([handle for _, handle, _ in started])
        for (bucket, _, contexts), outputs in zip(started, results, strict=True):
            listed = outputs if isinstance(outputs, list) else [outputs]
            for parameter, output, context in zip(bucket, listed, contexts, strict=True):
                yield parameter, self._compression.decompress(output, context)


class AdasumMixin(DistributedBase):
    """Mixin that takes the given optimizer's step on each rank, and combines the steps by Adasum."""

    _watcher: ChangeReducer  # pyright: ignore[reportIncompatibleVariableOverride]  # assigned once

    def _watcher_for(self, settings: ReductionSettings) -> ChangeReducer:
        return ChangeReducer(settings.compression, settings.process_set, self._watcher.passes)

    def synchronize(self) -> None:
        """Do nothing: no change can be reduced before :meth:`step`."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raise ``AssertionError``: it is not possible with Adasum, as in Horovod."""
        raise AssertionError(
            "skip_synchronize() does not go with op=hvd.Adasum, which combines the ranks' steps, not their gradients."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with this rank's gradients, and replace it by the Adasum of all ranks' steps.

        Args:
            closure: Recomputes the loss with its gradients. Each rank's optimizer may call it as often as it needs.

        Returns:
            The result of the given optimizer's ``step``: the loss of this rank, if there is a closure.

        Raises:
            MismatchError, AbortedError: As for ``allreduce``. Parameters have the values from before the step; the optimizer's
                state (momenta, ...) has already changed by this rank's step.
        """
        if not self._included:
            return self._plain_step(closure)
        if closure is None:
            self._warn_of_a_step_without_backward()
        self._watch(0)  # parameters that were unfrozen since the last step
        own = None if closure is None else self._counted_from_zero(closure)
        return self._watcher.around(lambda: self._plain_step(own))

    def _counted_from_zero(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure, with the count of backward passes set back to zero before and after each call."""

        def counted() -> Any:
            self._watcher.reset()
            loss = closure()
            self._watcher.reset()
            return loss

        return counted

    step.hooked = True  # type: ignore[attr-defined]  # see DistributedMixin.step
