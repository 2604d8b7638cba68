"""Optimizers and Gluon trainers that sum gradients over ranks."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import mxnet as mx  # pyright: ignore[reportMissingImports]

from hvdlab.bindings.arguments import Sum, allreducing, predivide_factor
from hvdlab.bindings.compression import Compressor
from hvdlab.bindings.handles import wait_for_all
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.process_sets import ProcessSet, global_process_set, set_id
from hvdlab.horovod.common.util import split_list
from hvdlab.mxnet.adapter import BINDING, NDArray
from hvdlab.mxnet.compression import Compression


class GradientSums:
    """Sums of gradients over the ranks of a process set.

    Args:
        gradient_predivide_factor: ``f``: gradients are divided by it before the sum; the division after it makes an average.
        num_groups: How many groups the gradients of a call are executed in; 0 for none.
        process_set: The ranks that take part; a rank outside is alone.
        compression: Compressor of the gradients that are sent.

    Raises:
        InvalidRequestError: ``gradient_predivide_factor`` is not positive, ``num_groups`` is negative, or the process set is not
            registered.
    """

    def __init__(
        self,
        gradient_predivide_factor: float,
        num_groups: int,
        process_set: ProcessSet,
        compression: type[Compressor] = Compression.none,
    ) -> None:
        if num_groups < 0:
            raise InvalidRequestError(f"num_groups= takes no negative number of groups: {num_groups}.")
        set_id(process_set)
        self._factor = predivide_factor(gradient_predivide_factor)
        self._num_groups = num_groups
        self._process_set = process_set
        self._compression = compression

    @property
    def scale(self) -> float:
        """Return the factor of gradients after the sum that makes them averages."""
        return 1.0 if self._alone() else self._factor / self._ranks()

    def add_up(self, names: Sequence[str], gradients: Sequence[NDArray]) -> None:
        """Sum gradients in place, each under its name, and wait for all."""
        if self._alone():
            return
        operation = allreducing(None, Sum, 1.0 / self._factor, 1.0, set_id(self._process_set))
        sent = [self._compression.compress(gradient) for gradient in gradients]
        handles = []
        for group in self._groups(names, [array for array, _ in sent]):
            if len(group) == 1:
                name, array = group[0]
                handles.append(BINDING.submit(operation, array, name, in_place=True))
            else:
                group_name = f"{group[0][0]}:{group[-1][0]}"
                arrays = [array for _, array in group]
                handles.append(BINDING.submit_group(operation, arrays, group_name, in_place=True))
        # For all, also where one fails: the core still writes to the gradients of those in flight.
        wait_for_all(handles)
        for gradient, (array, context) in zip(gradients, sent, strict=True):
            if array is not gradient:
                gradient[:] = self._compression.decompress(array, context)

    def _groups(self, names: Sequence[str], arrays: Sequence[NDArray]) -> list[list[tuple[str, NDArray]]]:
        named = list(zip(names, arrays, strict=True))
        if not self._num_groups:
            return [[pair] for pair in named]
        groups: list[list[tuple[str, NDArray]]] = []
        for part in split_list(named, self._num_groups):
            by_type: dict[Any, list[tuple[str, NDArray]]] = defaultdict(list)
            for name, array in part:
                by_type[array.dtype].append((name, array))
            groups.extend(by_type.values())
        return groups

    def _alone(self) -> bool:
        return self._ranks() == 1 or not self._process_set.included()

    def _ranks(self) -> int:
        set_id(self._process_set)  # raises for one that was removed, whose size is not known
        return self._process_set.size() or 1


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]  # MXNet has no types
    """An MXNet optimizer whose updates first average the gradients over ranks.

    Attributes that are not its own are the wrapped optimizer's, also when they are set.

    Args:
        optimizer: The ``mx.optimizer.Optimizer`` that updates the weights. Its ``rescale_grad`` is divided by the number of
            ranks: gradients are summed, and the mean is left to it.
        gradient_predivide_factor: Divides gradients before the sum, and multiplies them after it, against overflow.
        num_groups: How many groups the gradients of one update of many are executed in; 0 for none.
        process_set: The ranks that take part, all by default; a rank outside takes its steps alone.

    Raises:
        InvalidRequestError: ``optimizer`` is none of MXNet's or distributed already, or another argument is wrong.
        NotInitializedError: ``hvd.init()`` was not called.
    """

    _OWN = frozenset({"_optimizer", "_sums"})

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise InvalidRequestError(
                f"DistributedOptimizer takes an mx.optimizer.Optimizer, not {type(optimizer).__name__}."
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise InvalidRequestError(
                "This optimizer is distributed already: its gradients would be reduced twice."
            )
        self._optimizer = optimizer
        self._sums = GradientSums(gradient_predivide_factor, num_groups, process_set)
        optimizer.rescale_grad *= self._sums.scale

    def __getattr__(self, item: str) -> Any:
        if item in self._OWN:  # not set yet: copied or unpickled
            raise AttributeError(item)
        return getattr(self._optimizer, item)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def create_state(self, index: Any, weight: NDArray) -> Any:
        """Return the wrapped optimizer's state for one weight.

        Args:
            index: The weight's index.
            weight: The weight.
        """
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: NDArray) -> Any:
        """Return the wrapped optimizer's state for one weight, with a float32 copy if it uses that.

        Args:
            index: The weight's index.
            weight: The weight.
        """
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Sum the gradient over ranks, in place, and update the weight; or lists of these. Every rank calls it.

        Args:
            index: The weight's index, or a list of them.
            weight: The weight, which is updated in place, or a list.
            grad: Its gradient, of the same shape and dtype; it becomes the sum over ranks.
            state: What :meth:`create_state` returned for it, or a list.

        Raises:
            MismatchError, AbortedError: The collective failed. The weights are unchanged then, the gradients
                undefined.
        """
        self._add_up(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update a weight as :meth:`update` does, for states of :meth:`create_state_multi_precision`.

        Args:
            index, weight, grad, state: As for :meth:`update`.
        """
        self._add_up(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def _add_up(self, index: Any, grad: Any) -> None:
        if isinstance(index, tuple | list):
            self._sums.add_up([str(number) for number in index], grad)
        else:
            self._sums.add_up([str(index)], [grad])

    def set_learning_rate(self, lr: float) -> None:
        """Change the wrapped optimizer's learning rate to ``lr``."""
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: dict[Any, float]) -> None:
        """Set the wrapped optimizer's factors of the learning rate to ``args_lr_mult``."""
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: dict[Any, float]) -> None:
        """Set the wrapped optimizer's factors of the weight decay to ``args_wd_mult``."""
        self._optimizer.set_wd_mult(args_wd_mult)


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]  # MXNet has no types
    """A ``gluon.Trainer`` that averages gradients over ranks instead of using a key-value store.

    Args:
        params: A ``ParameterDict``, a dict, or a list of parameters, which are sorted by name so that ranks agree.
        optimizer: Its name or an ``mx.optimizer.Optimizer``. A :class:`DistributedOptimizer` is unwrapped, with a warning.
        optimizer_params: Its arguments, if ``optimizer`` is a name.
        compression: Compressor of the gradients that are sent.
        gradient_predivide_factor: Divides gradients before the sum, and multiplies them after it, against overflow.
        prefix: Goes before the names of gradients, which keeps several trainers of one program apart.
        num_groups: How many groups the gradients of a step are executed in; 0 for none.
        process_set: The ranks that take part, all by default; a rank outside takes its steps alone.

    Raises:
        AssertionError: ``prefix`` is not a str.
        InvalidRequestError: A parameter is on several devices, or another argument is wrong.
        NotInitializedError: ``hvd.init()`` was not called.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: type[Compressor] = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        assert prefix is None or isinstance(prefix, str), f"prefix must be a str, not {type(prefix).__name__}"
        sums = GradientSums(gradient_predivide_factor, num_groups, process_set, compression)
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer averages gradients itself: the optimizer inside DistributedOptimizer is used.",
                stacklevel=2,
            )
            # Undoes the factor of the DistributedOptimizer's constructor: the trainer multiplies by its own.
            optimizer.rescale_grad /= optimizer._sums.scale
            optimizer = optimizer._optimizer
        if isinstance(params, list | tuple):
            params = sorted(params, key=lambda parameter: parameter.name)
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        if len(self._contexts) > 1:
            raise InvalidRequestError(
                f"DistributedTrainer trains on one device per rank, and the parameters are on {len(self._contexts)}: "
                "initialize them with one context, and start a rank for each."
            )
        self._sums = sums
        self._prefix = prefix or ""
        self._scale *= sums.scale

    def _allreduce_grads(self) -> None:
        trained = [(i, p) for i, p in enumerate(self._params) if p.grad_req != "null"]
        names = [f"{self._prefix}{i}" for i, _ in trained]
        self._sums.add_up(names, [parameter.list_grad()[0] for _, parameter in trained])
