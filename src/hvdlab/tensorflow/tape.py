"""``DistributedGradientTape``: a gradient tape whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from hvdlab.bindings.arguments import Average
from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.tensorflow.compression import Compression, Compressor
from hvdlab.tensorflow.functions import vars_to_refs
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.reduction import DistributedGradients, GradientReducer, Groups

_WRAPPED_TWICE = "is distributed already: its gradients would be reduced twice. Wrap the tape (or optimizer) that it was made of."


class _Distributed(DistributedGradients):
    """The methods that a distributed tape has in front of those of its own class."""

    _hvdlab_reducer: GradientReducer

    def _hvdlab_parts(self) -> list[Any]:
        return [self._hvdlab_reducer]

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The gradients of a target, reduced over all ranks, in the structure of ``sources``. All ranks must call it.

        Args:
            target: A tensor, or a nested structure of tensors, to differentiate.
            sources: The tensors or variables to differentiate by, which may be nested.
            output_gradients: The gradients of the targets; ones by default.
            args, kwargs: Further arguments of the plain tape's method.

        Raises:
            MismatchError, AbortedError: As for ``allreduce``. The tape has been used up then, unless it is persistent.
        """
        gradients = super().gradient(target, sources, output_gradients, *args, **kwargs)  # type: ignore[misc]
        flat, variables = tf.nest.flatten(gradients), tf.nest.flatten(sources)
        return tf.nest.pack_sequence_as(sources, self._hvdlab_reducer(flat, variables))

    def get_local_and_global_gradients(
        self, gradients: Sequence[Any], sources: Sequence[Any]
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Divide gradients into those that stay on their rank and those that the ranks reduce. Nothing is sent.

        Args:
            gradients: Gradients of this rank, or ``None``.
            sources: Their variables or tensors, in the same order.

        Returns:
            Pairs of a gradient and its source: first those of local sources (see :meth:`register_local_source`), then the others.
        """
        local: list[tuple[Any, Any]] = []
        shared: list[tuple[Any, Any]] = []
        for pair in zip(gradients, sources, strict=True):
            (local if vars_to_refs(pair[1]) in self._hvdlab_reducer.local else shared).append(pair)
        return local, shared

    def register_local_source(self, source: Any) -> None:
        """Leave the gradients of a source, a variable or tensor, on their rank: they are not reduced."""
        self._hvdlab_reducer.register_local_var(source)


@cache
def _distributed_class(kind: Any) -> Any:
    return type(kind.__name__, (_Distributed, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape that reduces gradients over all ranks.

    ::

        with tf.GradientTape() as tape:
            loss = ...
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    Args:
        gradtape: A ``tf.GradientTape``, before or after it has recorded.
        device_dense: Device for dense gradients, such as ``/cpu:0``; by default where they are.
        device_sparse: Device for ``tf.IndexedSlices``; by default where they are.
        compression: Applied to what is sent, and undone on what is received.
        sparse_as_dense: Make sparse gradients dense before they are reduced.
        op: ``hvd.Average``, ``hvd.Sum`` or ``hvd.Adasum``.
        gradient_predivide_factor: For ``Average``: gradients are divided by this number before the sum, and the sum by the number
            of ranks over this number.
        num_groups: Deprecated form of ``groups``.
        groups: Number of groups of gradients that are reduced together, or a list of lists of variables; a variable in no list
            is reduced by itself. By default all gradients are reduced together, in a graph in buckets of up to 16 MiB.
        process_set: The ranks that take part; all by default.
        scale_local_gradients: Whether gradients of local sources (see ``register_local_source``) are divided by the
            number of ranks, which makes them as large as averages.

    Returns:
        A tape of the same class, with the same recording. Its ``gradient`` must be called on every rank.

    Raises:
        InvalidRequestError: The tape is distributed already, or an argument is wrong.
    """
    if isinstance(gradtape, _Distributed):
        raise InvalidRequestError(f"This tape {_WRAPPED_TWICE}")
    if not isinstance(gradtape, tf.GradientTape):
        raise InvalidRequestError(
            f"hvd.DistributedGradientTape takes a tf.GradientTape, not {type(gradtape).__name__}."
        )
    kind: Any = type(gradtape)
    tape = object.__new__(_distributed_class(kind))
    tape.__dict__ = gradtape.__dict__  # both tapes have the same recording, whichever goes on with it
    tape._hvdlab_reducer = GradientReducer(
        "DistributedGradientTape",
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        chosen_groups(num_groups, groups),
        process_set,
        scale_local_gradients,
    )
    return tape


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A :func:`DistributedGradientTape` that leaves the gradients of some layers on their rank.

    Args:
        gradtape: A ``tf.GradientTape``, before or after it has recorded.
        device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups, process_set,
            scale_local_gradients: As for :func:`DistributedGradientTape`.
        local_layers: A Keras layer, or a list of them, whose trainable weights are local: their gradients are not reduced. They
            must be built.

    Raises:
        InvalidRequestError: As by :func:`DistributedGradientTape`, or ``local_layers`` has something else than layers.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def local_variables(layers: Any) -> list[Any]:
    """The trainable weights of a layer or of several; an empty list for ``None``.

    Raises:
        InvalidRequestError: ``layers`` has something else than layers.
    """
    if layers is None:
        return []
    listed = list(layers) if isinstance(layers, Iterable) else [layers]
    for layer in listed:
        if not hasattr(layer, "trainable_weights"):
            raise InvalidRequestError(f"local_layers= takes Keras layers, not {type(layer).__name__}.")
    return [variable for layer in listed for variable in layer.trainable_weights]


def chosen_groups(num_groups: int, groups: Groups) -> Groups:
    """``groups``, or Horovod's older ``num_groups``."""
    return groups if groups is not None else num_groups or None
