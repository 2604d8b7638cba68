"""Several backward passes for each step: each rank adds up its gradients before the ranks reduce them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.tensorflow.functions import vars_to_refs
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.mpi_ops import size_op


class LocalGradientAggregationHelper:
    """Helper that adds gradients up over the passes of a step, and reduces the sums in the last pass.

    Args:
        backward_passes_per_step: How many passes make a step.
        allreduce_func: ``f(gradients, variables)``: returns the reduced gradients.
        sparse_as_dense: Whether ``tf.IndexedSlices`` are made dense; with several passes they are refused otherwise.
        average_aggregated_gradients: Whether the reduced sum is divided by the number of passes.
        rank: This rank; only kept as an attribute.
        optimizer_type: The optimizer's class; only kept as an attribute.
        process_set: The ranks that take part; all by default.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        name: Beginning of the names of the variables that it makes.

    Attributes:
        counter: A variable with the number of passes since the last step; ``None`` before the first pass.
        locally_aggregated_grads: The variables with the sums of this step's passes; empty before the first pass.

    Raises:
        ValueError: ``backward_passes_per_step`` is less than 1.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: Any,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step= is at least 1, not {backward_passes_per_step}.")
        self.backward_passes_per_step = backward_passes_per_step
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.rank = rank
        self.optimizer_type = optimizer_type
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self._allreduce = allreduce_func
        self.name = name
        #: Variables whose gradients stay on their rank, as references.
        self._local: set[Any] = set()
        #: Numbers of the variables that have had a gradient; the others take no part.
        self._seen: set[int] = set()
        #: In a graph: the operations that a pass has to run before apply_gradients() reads the counter.
        self._computed: list[Any] = []
        self.counter: Any = None
        self.locally_aggregated_grads: list[Any] = []

    def register_local_var(self, var: Any) -> None:
        """Leave a variable's gradients on their rank: they are added up, but not reduced.

        Args:
            var: The variable.
        """
        self._local.add(vars_to_refs(var))

    def build(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Make the variables for the sums and the counter, if there are none yet.

        Also for gradients that are ``None``: they may be there in a later pass, when a ``tf.function`` can make no more variables.

        Args:
            gradients: The gradients of a pass, or ``None`` for a variable without one.
            variables: Their variables.
        """
        if self.counter is not None:
            return
        prefix = f"{self.name}_" if self.name else ""
        with tf.init_scope():
            self.counter = tf.Variable(
                0, trainable=False, dtype=tf.int32, name=f"{prefix}aggregation_counter"
            )
            self.locally_aggregated_grads = [
                tf.Variable(
                    tf.zeros(
                        tuple(variable.shape),
                        tf.as_dtype((variable if gradient is None else gradient).dtype).base_dtype,
                    ),
                    trainable=False,
                    name=f"{prefix}aggregated_{number}",
                )
                for number, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            ]

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add these gradients, and return the sums: reduced in a step's last pass, otherwise this rank's own.

        Args:
            grads: Tensors, ``tf.IndexedSlices`` or ``None``, which adds nothing. Where all passes of a variable had ``None`` so far, its
                sum is ``None``, too.
            vars: Their variables, in the same order.

        Raises:
            ValueError: A gradient is sparse, a step has several passes, and ``sparse_as_dense`` is false.
        """
        dense = [self._dense(gradient) for gradient in grads]
        if self.backward_passes_per_step == 1:
            return self._reduced(dense, vars)
        self.build(dense, vars)
        # Where the ranks could not reduce the sums of the last pass, they are there still, and that step is abandoned.
        before = self.counter.read_value()
        abandoned = tf.greater_equal(before, self.backward_passes_per_step)
        sums: list[Any] = []
        for number, (total, gradient) in enumerate(zip(self.locally_aggregated_grads, dense, strict=True)):
            if gradient is not None:
                self._seen.add(number)
            more = tf.zeros_like(total) if gradient is None else gradient
            summed = number in self._seen
            sums.append(
                total.assign(tf.where(abandoned, more, total.read_value() + more)) if summed else None
            )
        counter = self.counter.assign(tf.where(abandoned, 1, before + 1))
        present = [i for i, each in enumerate(sums) if each is not None]
        with tf.control_dependencies(
            [] if tf.executing_eagerly() else [counter, *(sums[i] for i in present)]
        ):
            outputs = tf.cond(
                tf.equal(counter, self.backward_passes_per_step),
                lambda: self._last_pass(present, vars),
                lambda: [tf.identity(self.locally_aggregated_grads[i]) for i in present],
            )
        found = list(sums)
        for i, output in zip(
            present, outputs if isinstance(outputs, list | tuple) else [outputs], strict=True
        ):
            found[i] = output
        self._computed = [] if tf.executing_eagerly() else [found[i] for i in present] + [counter]
        return found

    def _last_pass(self, present: list[int], variables: Sequence[Any]) -> list[Any]:
        sums = [self.locally_aggregated_grads[i].read_value() for i in present]
        reduced = self._reduced(sums, [variables[i] for i in present])
        if self.average_aggregated_gradients:
            reduced = [each / tf.cast(self.backward_passes_per_step, each.dtype) for each in reduced]
        # Cleared after the reduction alone: if it fails, the counter and the sums stay, by which the next
        # pass gives the step up.
        with tf.control_dependencies(reduced):
            cleared = [
                self.locally_aggregated_grads[i].assign(tf.zeros_like(total))
                for i, total in zip(present, sums, strict=True)
            ]
            with tf.control_dependencies(cleared):
                return [tf.identity(each) for each in reduced]

    def apply_gradients(
        self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the closure in a step's last pass; in the other passes only count the iteration.

        Args:
            apply_grads_closure: Applies the gradients that :meth:`compute_gradients` returned.
            optimizer: Its ``iterations``, if it has any, is increased in the other passes, so that it counts passes.
            args, kwargs: Not used; Horovod has them.

        Returns:
            Whether gradients were applied, as a bool tensor; with one pass per step the closure's result.
        """
        if self.backward_passes_per_step == 1:
            return apply_grads_closure()

        def apply() -> Any:
            with tf.control_dependencies(_in_graph(self.counter.assign(0))):
                applied = apply_grads_closure()
            with tf.control_dependencies(
                _in_graph(applied)
            ):  # in a graph of TensorFlow 1 it would not run otherwise
                return tf.constant(True)

        def skip() -> Any:
            iterations = getattr(optimizer, "iterations", None)
            if iterations is not None:
                iterations.assign_add(1)
            return tf.constant(False)

        with tf.control_dependencies(self._computed):
            passes = self.counter.read_value()
        self._computed = []
        return tf.cond(tf.equal(passes, self.backward_passes_per_step), apply, skip)

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self.sparse_as_dense and self.backward_passes_per_step > 1:
            raise ValueError(
                "Sparse gradients can't be added up over several backward passes; give sparse_as_dense=True."
            )
        return tf.convert_to_tensor(gradient) if self.sparse_as_dense else gradient

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self._local:
            return list(self._allreduce(gradients, variables))
        local = [vars_to_refs(variable) in self._local for variable in variables]
        shared = [i for i, is_local in enumerate(local) if not is_local]
        found = list(gradients)
        reduced = self._allreduce([gradients[i] for i in shared], [variables[i] for i in shared])
        for i, output in zip(shared, reduced, strict=True):
            found[i] = output
        if self.scale_local_gradients:
            for i, is_local in enumerate(local):
                if is_local and found[i] is not None:
                    size = size_op(self.process_set.process_set_id or 0)
                    found[i] = found[i] / tf.cast(size, found[i].dtype)
        return found


def _in_graph(operation: Any) -> list[Any]:
    """Return a list with the operation as a control dependency; empty in eager mode, where it has run already."""
    return [] if operation is None or tf.executing_eagerly() else [operation]
