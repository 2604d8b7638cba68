"""``DistributedOptimizer`` for TensorFlow 1's optimizers; those of Keras go to :mod:`hvdlab.tensorflow.keras.optimizers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdlab.bindings.arguments import Adasum, Average, gradient_operator
from hvdlab.collectives import basics
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.collectives.types import ReduceOp
from hvdlab.tensorflow.compression import Compression, Compressor
from hvdlab.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from hvdlab.tensorflow.gradient_tape import DistributedGradients, Groups, TensorFlowReducer, chosen_groups
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.keras.optimizers import distributed, is_keras_optimizer
from hvdlab.tensorflow.mpi_ops import allreduce

_v1 = tf.compat.v1
_V1Optimizer: Any = _v1.train.Optimizer


class _Wrapping(_V1Optimizer):  # type: ignore[misc,unused-ignore]
    """An optimizer of TensorFlow 1 that wraps another one, which does most of the work."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool) -> None:
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer = optimizer

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)


class _DistributedOptimizer(DistributedGradients, _Wrapping):
    """Optimizer that reduces gradients over all ranks when they are computed."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reducer: TensorFlowReducer,
        helper: LocalGradientAggregationHelper | None,
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._reducer = reducer
        self._agg_helper = helper

    def _hvdlab_parts(self) -> list[Any]:
        return [part for part in (self._reducer, self._agg_helper) if part is not None]

    def register_local_var(self, var: Any) -> None:
        """Leave a variable's gradients on their rank: they are not reduced."""
        self._reducer.register_local_var(var)
        if self._agg_helper is not None:
            self._agg_helper.register_local_var(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of reduced gradients and variables; the arguments are those of the wrapped optimizer's method."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if self._agg_helper is not None:
            reduced = self._agg_helper.compute_gradients(gradients, variables)
        else:
            reduced = self._reducer(gradients, variables)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the gradients that :meth:`compute_gradients` returned; only in the last pass of a step."""
        if self._agg_helper is None:
            return self._optimizer.apply_gradients(*args, **kwargs)
        return self._agg_helper.apply_gradients(
            lambda: self._optimizer.apply_gradients(*args, **kwargs), self, *args, **kwargs
        )


class _DistributedAdasumOptimizer(_Wrapping):
    """Optimizer that lets each rank take its own step, and combines the steps by Adasum.

    Each rank keeps the variables' values from the beginning of a step. Its step is the difference that its passes have made; the
    Adasum of all ranks' differences is added to the kept values.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        compression: type[Compressor],
        backward_passes_per_step: int,
        process_set: ProcessSet,
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        if backward_passes_per_step < 1:
            raise InvalidRequestError(
                f"backward_passes_per_step= is at least 1, not {backward_passes_per_step}."
            )
        self._compression = compression
        self._process_set = process_set
        self._passes = backward_passes_per_step
        #: The variables' values at the beginning of a step, and the number of its passes, in variables of
        #: TensorFlow.
        self._starts: list[Any] = []
        self._counter: Any = None

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return pairs of this rank's own gradients and variables; the arguments are those of the wrapped optimizer's method."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def _prepare(self, variables: Sequence[Any]) -> None:
        if self._counter is None:
            with tf.init_scope():
                self._counter = tf.Variable(0, trainable=False, dtype=tf.int32, name="adasum_counter")
                self._starts = [
                    tf.Variable(
                        tf.zeros(variable.shape, variable.dtype.base_dtype),
                        trainable=False,
                        name=f"adasum_start_{number}",
                    )
                    for number, variable in enumerate(variables)
                ]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply this rank's gradients, and in the last pass combine the steps of all ranks.

        Returns:
            Whether the steps were combined, as a bool tensor.
        """
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        variables = [variable for _, variable in pairs]
        self._prepare(variables)
        before = self._counter.read_value()
        abandoned = tf.greater_equal(before, self._passes)  # the ranks could not combine the steps before
        first = tf.logical_or(tf.equal(before, 0), abandoned)
        kept = [
            start.assign(tf.where(first, variable, start))
            for start, variable in zip(self._starts, variables, strict=True)
        ]
        # The values from before must be read first: in a graph nothing else orders this before the step that
        # changes them.
        with tf.control_dependencies(
            [each.op if hasattr(each, "op") else each for each in _graph_only(kept)]
        ):
            stepped = self._optimizer.apply_gradients(pairs, *args, **kwargs)
        with tf.control_dependencies(_graph_only([stepped])):
            counter = self._counter.assign(tf.where(abandoned, 1, before + 1))
            return tf.cond(
                tf.equal(counter, self._passes),
                lambda: self._combine(variables),
                lambda: tf.constant(False),
            )

    def _combine(self, variables: Sequence[Any]) -> Any:
        pairs = list(zip(variables, self._starts, strict=True))
        combined = [
            allreduce(
                variable.read_value() - start.read_value(),
                op=Adasum,
                compression=self._compression,
                name=f"DistributedAdasum.{number}",
                process_set=self._process_set,
            )
            for number, (variable, start) in enumerate(pairs)
        ]
        # No variable before all steps are combined: if one fails, all stay as this rank's own step has left them.
        with tf.control_dependencies(_graph_only(combined)):
            done = [
                variable.assign(start + step) for (variable, start), step in zip(pairs, combined, strict=True)
            ]
            done.append(self._counter.assign(0))
        with tf.control_dependencies(_graph_only(done)):
            return tf.constant(True)


def _graph_only(operations: list[Any]) -> list[Any]:
    """Return the operations as control dependencies; none in eager mode, where they have run already."""
    return [] if tf.executing_eagerly() else [each for each in operations if each is not None]


def DistributedAdasumOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
) -> Any:
    """Return an optimizer that combines the ranks' steps by Adasum, as ``DistributedOptimizer(op=hvd.Adasum)`` makes one.

    Args:
        optimizer: An optimizer of ``tf.compat.v1.train``, which takes each rank's step.
        name: Name of the new optimizer; by default ``Distributed`` and the name of the given one's class.
        use_locking: Whether TensorFlow 1's optimizers lock variables while they update them.
        device_dense: Not used; Horovod has it.
        device_sparse: Not used; Horovod has it.
        compression: Applied to the steps that are sent, and undone on received ones.
        backward_passes_per_step: How many times gradients are applied on the rank before the ranks' steps are combined.

    Raises:
        InvalidRequestError: ``backward_passes_per_step`` is less than 1.
    """
    return _DistributedAdasumOptimizer(
        optimizer, name, use_locking, compression, backward_passes_per_step, global_process_set
    )


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that reduces gradients over all ranks before it applies them.

    Args:
        optimizer: One of ``tf.compat.v1.train``, of Keras 3 or of Keras 2 (``tf_keras``).
        name: Name of the new optimizer; by default ``Distributed`` and the name of the given one's class.
        use_locking: Whether TensorFlow 1's optimizers lock variables while they update them.
        device_dense: Device for dense gradients, such as ``/cpu:0``; by default where they are.
        device_sparse: Device for ``tf.IndexedSlices``; by default where they are.
        compression: Applied to tensors that are sent, and undone on received ones.
        sparse_as_dense: Make sparse gradients dense before they are reduced.
        backward_passes_per_step: How often gradients are computed, and added up on the rank, before they are reduced and applied.
        op: ``hvd.Average``, ``hvd.Sum`` or, with TensorFlow 1's optimizers, ``hvd.Adasum``, which combines the ranks' steps.
        gradient_predivide_factor: For ``Average``: gradients are divided by this number before the sum, and the sum by the number
            of ranks over this number.
        average_aggregated_gradients: Whether the sum over the passes of a step is divided by their number.
        num_groups: Deprecated form of ``groups``.
        groups: Number of groups of gradients that are reduced together, or a list of lists of variables; a variable in no list
            is reduced by itself. By default all gradients are reduced together, in a graph in buckets of up to 16 MiB.
        process_set: The ranks that take part; all by default.
        scale_local_gradients: Whether gradients of local variables (see ``register_local_var``) are divided by the
            number of ranks, which makes them as large as averages.

    Returns:
        An optimizer, which every rank must call alike. Applying or computing gradients raises ``MismatchError`` or
        ``AbortedError`` as ``allreduce`` does; the variables are unchanged then, except with ``hvd.Adasum``, where they are as
        after this rank's own step.

    Raises:
        InvalidRequestError: ``optimizer`` is no optimizer, or distributed already, or another argument is wrong (a ``ValueError``).
        UnsupportedError: ``op`` is ``hvd.Adasum`` and the optimizer is one of Keras.
    """
    if is_keras_optimizer(optimizer):
        return distributed(
            optimizer,
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            groups=chosen_groups(num_groups, groups),
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    if not isinstance(optimizer, _V1Optimizer):
        raise InvalidRequestError(
            "hvd.DistributedOptimizer takes an optimizer of tf.compat.v1.train, of Keras or of tf_keras, not "
            f"{type(optimizer).__name__}."
        )
    if isinstance(optimizer, _Wrapping):
        raise InvalidRequestError(
            "This optimizer is distributed already: its gradients would be reduced twice."
        )
    chosen = gradient_operator(op)
    reducer = TensorFlowReducer(
        name or f"Distributed{type(optimizer).__name__}",
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        chosen,
        gradient_predivide_factor,
        chosen_groups(num_groups, groups),
        process_set,
        scale_local_gradients,
    )
    if chosen is Adasum:
        return _DistributedAdasumOptimizer(
            optimizer, name, use_locking, compression, backward_passes_per_step, process_set
        )
    helper = None
    if backward_passes_per_step != 1:
        reduce: Callable[..., Any] = reducer
        helper = LocalGradientAggregationHelper(
            backward_passes_per_step,
            reduce,
            sparse_as_dense,
            average_aggregated_gradients,
            basics.rank(),
            type(optimizer),
            process_set,
            scale_local_gradients,
        )
    return _DistributedOptimizer(optimizer, name, use_locking, reducer, helper)
