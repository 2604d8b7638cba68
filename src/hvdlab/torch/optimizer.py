"""``DistributedOptimizer``: an optimizer that takes the same step on all ranks, with the gradients of all."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from hvdlab.bindings.arguments import Adasum, Average
from hvdlab.bindings.buckets import Groups
from hvdlab.bindings.gradient_reducer import GradientReducer, ReductionSettings
from hvdlab.bindings.hooks import GradientWatcher
from hvdlab.collectives.context import is_initialized
from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.torch.adapter import BINDING
from hvdlab.torch.adasum import AdasumMixin, ChangeReducer
from hvdlab.torch.compression import Compression, Compressor
from hvdlab.torch.distributed import DistributedBase, DistributedMixin, checked_passes, checked_settings
from hvdlab.torch.gradients import TorchGradients
from hvdlab.torch.parameter_names import checked_names, parameter_names
from hvdlab.torch.process_sets import ProcessSet, global_process_set
from hvdlab.torch.steps import meter_of


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

    The result is an instance of the given optimizer's class, so learning-rate schedulers and gradient scalers take it.
    It goes on with the given optimizer's state and parameter groups; use only the new optimizer from here on.

    Args:
        optimizer: Any ``torch.optim`` optimizer, made alike on all ranks. A distributed one is wrapped anew, not twice.
        named_parameters: ``model.named_parameters()``: the names that errors and the timeline show. It must name every
            parameter of the optimizer, and may name others. By default a parameter is named by its place in the optimizer.
        compression: The compressor that gradients are sent through, such as ``hvd.Compression.fp16``; by default none.
        backward_passes_per_step: The gradients of this many backward passes are added up on each rank before they are
            reduced. (They are not divided by this number.)
        op: ``hvd.Average`` or ``hvd.Sum`` of the gradients, or ``hvd.Adasum`` of the steps that the ranks' optimizers
            take, see :mod:`hvdlab.torch.adasum`.
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
        :class:`hvdlab.torch.distributed.DistributedMixin`. ``op``, ``backward_passes_per_step``,
        ``gradient_predivide_factor``, ``sparse_as_dense`` and ``process_set`` can be read from it, and set between steps on all
        ranks alike; as in Horovod the name of each parameter can be read from the dictionary ``_parameter_names``.

    Raises:
        InvalidRequestError: An argument is wrong; the text says which.
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
    watcher: GradientWatcher[torch.Tensor] = GradientReducer(BINDING, gradients, settings, passes)
    if settings.op is Adasum:
        mixin, watcher = AdasumMixin, ChangeReducer(compression, process_set, passes)
    kind: type[DistributedMixin | AdasumMixin]
    kind = type(given.__name__, (mixin, given), {"_given": given})  # pyright: ignore[reportAssignmentType]
    distributed = object.__new__(kind)
    # Not "step": a scheduler that was made for the given optimizer has put a wrapper of the old step into the instance.
    distributed.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    distributed.__dict__.update(_watcher=watcher, _gradients=gradients, _settings=settings, _groups=groups)
    distributed._parameter_names = parameter_names(optimizer.param_groups, names)
    distributed._included = bool(process_set.included())
    distributed._watch(groups if groups is not None else 0)
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
