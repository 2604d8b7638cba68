"""``DistributedGradientTape``, and the reduction of a training step's gradients for tapes and optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from hvdlab.bindings.arguments import Average, Max, gradient_operator, predivide_factor
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.collectives.types import ReduceOp
from hvdlab.horovod.common.util import split_list
from hvdlab.tensorflow.compression import Compression, Compressor
from hvdlab.tensorflow.functions import plain_variable, vars_to_refs
from hvdlab.tensorflow.graph_ops import in_graph
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.mpi_ops import allreduce, grouped_allreduce, size_op

BUCKET = 16 << 20
"""Bytes of gradients that one operation of a graph reduces if the user names no groups: enough for the operation's own cost not to
matter, and few enough for the reduction to begin while the backward pass goes on."""

_REDUCED = "_hvdlab_reduced"
"""The attribute of a reduced gradient that has the id of the process set over which it was reduced."""

Groups = int | Sequence[Sequence[Any]] | None


class TensorFlowReducer:
    """Reducer of gradients over all ranks, which must all call it alike.

    Args:
        name: Beginning of the collectives' names.
        device_dense, device_sparse: Devices for dense gradients and for ``tf.IndexedSlices``; by default where they are.
        compression: The compressor that dense gradients are sent through.
        sparse_as_dense: Whether ``tf.IndexedSlices`` are made dense before they are reduced.
        op: ``Average``, ``Sum`` or ``Adasum``.
        gradient_predivide_factor: For ``Average``: the number that gradients are divided by before the sum, as a part of the
            division by the number of ranks.
        groups: Number of groups of gradients that are reduced together, or for each group a list of its variables.
        process_set: The ranks that take part.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.

    Raises:
        InvalidRequestError: ``op`` is none of these, ``gradient_predivide_factor`` is not 1 with another operator than
            ``Average`` or is not positive, or ``groups`` is a negative number or no list of lists.
    """

    def __init__(
        self,
        name: str,
        device_dense: str = "",
        device_sparse: str = "",
        compression: type[Compressor] = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp | int = Average,
        gradient_predivide_factor: float = 1.0,
        groups: Groups = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        self._op = gradient_operator(op)
        if gradient_predivide_factor != 1.0 and self._op is not Average:
            raise InvalidRequestError("gradient_predivide_factor= is for op=hvd.Average only.")
        if isinstance(groups, int):
            if groups < 0:
                raise InvalidRequestError(f"groups= takes no negative number of groups: {groups}.")
        elif groups is not None and not all(isinstance(group, list | tuple) for group in groups):
            raise InvalidRequestError("groups= takes a number, or a list of lists of variables.")
        self._name = name
        self._devices = {"device_dense": device_dense, "device_sparse": device_sparse}
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._predivide = predivide_factor(gradient_predivide_factor)
        self._groups = groups
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        #: The variables whose gradients stay on their rank, as references by :func:`_reference`.
        self.local: set[Any] = set()
        #: Called with this rank's own gradients before they are reduced.
        self.observer: Callable[[Sequence[Any]], None] | None = None
        #: Whether it has warned that gradients had been reduced before.
        self._warned = False

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable's gradients on their rank: they are not reduced."""
        self.local.add(_reference(variable))

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        """Return the reduced gradients, in the same order; ``None`` stays ``None``.

        Args:
            gradients: Tensors, ``tf.IndexedSlices`` or ``None``.
            variables: The variables of the gradients; needed for groups of variables, and for local variables.

        Raises:
            MismatchError, AbortedError: As for ``allreduce``; the given gradients are untouched.
        """
        found = list(gradients)
        self._warn_of_reduced(found)
        if self.observer is not None:
            self.observer(found)
        if self._sparse_as_dense:
            found = [tf.convert_to_tensor(each) if _is_sparse(each) else each for each in found]
        references = [None] * len(found) if variables is None else [_reference(each) for each in variables]
        local = [
            i for i, reference in enumerate(references) if reference is not None and reference in self.local
        ]
        if self.scale_local_gradients:
            for i in local:
                found[i] = self._scaled(found[i])
        together = [i for i, each in enumerate(found) if each is not None and i not in set(local)]
        for number, places in enumerate(self._grouped(together, found, references)):
            for i, output in zip(places, self._reduced([found[i] for i in places], number), strict=True):
                if output is not found[i]:
                    setattr(output, _REDUCED, self.process_set.process_set_id)
                found[i] = output
        return found

    def spread_overflow(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients; those of all ranks as NaN if a gradient of any rank is not finite.

        Loss scaling skips a pass with such gradients, and has to skip it on all ranks: their passes and scales would differ from then
        on.

        Args:
            gradients: Tensors, ``tf.IndexedSlices`` or ``None``, which stays ``None``.

        Raises:
            MismatchError, AbortedError: As for ``allreduce``.
        """
        values = [_values(each) for each in gradients if each is not None]
        if not values:
            return list(gradients)
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in values])
        flag = tf.cast(tf.logical_not(finite), tf.float32)
        overflow = allreduce(flag, op=Max, name=f"{self._name}.overflow", process_set=self.process_set) > 0

        def spread(gradient: Any) -> Any:
            if gradient is None:
                return None
            value = _values(gradient)
            value = tf.where(overflow, tf.constant(float("nan"), value.dtype), value)
            if not _is_sparse(gradient):
                return value
            return tf.IndexedSlices(value, gradient.indices, gradient.dense_shape)

        return [spread(each) for each in gradients]

    def _warn_of_reduced(self, gradients: Sequence[Any]) -> None:
        """Warn once if the gradients are those that a distributed tape or another optimizer has reduced already."""
        id = self.process_set.process_set_id
        if self._warned or id is None or all(getattr(each, _REDUCED, None) != id for each in gradients):
            return
        self._warned = True
        warnings.warn(
            f"{self._name} gets gradients that have been reduced over the same ranks already: each step costs twice as "
            "much, and with op=hvd.Sum they are too large. Use hvd.DistributedGradientTape or "
            "hvd.DistributedOptimizer, not both.",
            stacklevel=4,
        )

    def _reduced(self, gradients: list[Any], number: int) -> list[Any]:
        """Return a group's gradients, reduced by one collective; each sparse gradient by its own."""
        keywords: dict[str, Any] = {
            **self._devices,
            "compression": self._compression,
            "op": self._op,
            "prescale_factor": 1.0 / self._predivide,
            "postscale_factor": self._predivide,
            "process_set": self.process_set,
            "name": f"{self._name}.{number}",
        }
        if len(gradients) == 1:
            return [allreduce(gradients[0], **keywords)]
        return grouped_allreduce(gradients, **keywords)  # type: ignore[no-any-return]

    def _grouped(self, places: list[int], gradients: list[Any], references: list[Any]) -> list[list[int]]:
        if not places:
            return []
        if isinstance(self._groups, int) and self._groups > 0:
            return [group for group in split_list(places, min(self._groups, len(places))) if group]
        if self._groups and not isinstance(self._groups, int):
            return self._by_variables(places, references)
        if not in_graph([gradients[i] for i in places if not _is_sparse(gradients[i])]):
            return [places]  # in eager mode all of them are computed already
        return _buckets(places, gradients)

    def _by_variables(self, places: list[int], references: list[Any]) -> list[list[int]]:
        assert not isinstance(self._groups, int)
        place_of = {references[i]: i for i in places if references[i] is not None}
        groups, taken = [], set()
        for group in self._groups or ():
            members = [place_of[ref] for variable in group if (ref := _reference(variable)) in place_of]
            if members:
                groups.append(members)
                taken.update(members)
        return groups + [[i] for i in places if i not in taken]

    def _scaled(self, gradient: Any) -> Any:
        if gradient is None:
            return None
        id = self.process_set.process_set_id or 0
        if _is_sparse(gradient):
            values = gradient.values / tf.cast(size_op(id), gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size_op(id), gradient.dtype)


def _reference(variable: Any) -> Any:
    """Return a reference that a variable of Keras 3 shares with TensorFlow's variable behind it.

    Programs name the one, and Keras applies gradients to the other.
    """
    return vars_to_refs(plain_variable(variable))


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _values(gradient: Any) -> Any:
    return gradient.values if _is_sparse(gradient) else tf.convert_to_tensor(gradient)


def _buckets(places: list[int], gradients: list[Any]) -> list[list[int]]:
    """Return buckets of gradients in the order in which a backward pass computes them: those of the last variables first."""
    buckets: list[list[int]] = []
    left = 0
    for i in reversed(places):
        gradient = gradients[i]
        if _is_sparse(gradient):
            buckets.append([i])
            left = 0
            continue
        size = (gradient.shape.num_elements() or 0) * gradient.dtype.size
        if not buckets or left < size:
            buckets.append([])
            left = BUCKET
        buckets[-1].append(i)
        left -= size
    return buckets


class DistributedGradients:
    """Base of distributed optimizers and tapes with Horovod's attributes for the reduction of gradients.

    A program may set these attributes, to the same values on all ranks. The next reduction then uses them; in a ``tf.function``,
    the next one that is traced.
    """

    def _hvdlab_parts(self) -> list[Any]:
        """Return the reducer, and other objects that have these attributes as well."""
        raise NotImplementedError

    def _hvdlab_change(self, name: str, value: Any) -> None:
        for part in self._hvdlab_parts():
            setattr(part, name, value)

    @property
    def process_set(self) -> ProcessSet:
        """Return the ranks over which gradients are reduced."""
        return self._hvdlab_parts()[0].process_set  # type: ignore[no-any-return]

    @process_set.setter
    def process_set(self, process_set: ProcessSet) -> None:
        self._hvdlab_change("process_set", process_set)

    @property
    def scale_local_gradients(self) -> bool:
        """Return whether gradients of local variables are divided by the number of ranks."""
        return self._hvdlab_parts()[0].scale_local_gradients  # type: ignore[no-any-return]

    @scale_local_gradients.setter
    def scale_local_gradients(self, scale_local_gradients: bool) -> None:
        self._hvdlab_change("scale_local_gradients", scale_local_gradients)


_WRAPPED_TWICE = "is distributed already: its gradients would be reduced twice. Wrap the tape (or optimizer) that it was made of."


class _Distributed(DistributedGradients):
    """The methods that a distributed tape has in front of those of its own class."""

    #: Not in ``__dict__``, which all tapes of one recording share; see :func:`_distributed_class`.
    _hvdlab_reducer: TensorFlowReducer

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
        """Return the gradients of a target, reduced over all ranks, in the structure of ``sources``. All ranks must call it.

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
            (local if _reference(pair[1]) in self._hvdlab_reducer.local else shared).append(pair)
        return local, shared

    def register_local_source(self, source: Any) -> None:
        """Leave the gradients of a source, a variable or tensor, on their rank: they are not reduced."""
        self._hvdlab_reducer.register_local_var(source)


@cache
def _distributed_class(kind: Any) -> Any:
    members = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        # A slot, since a plain tape may be wrapped more than once: each wrapping has settings of its own.
        "__slots__": ("_hvdlab_reducer",),
    }
    return type(kind.__name__, (_Distributed, kind), members)


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
    """Return a tape that reduces gradients over all ranks.

    ::

        with tf.GradientTape() as tape:
            loss = ...
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    Args:
        gradtape: A ``tf.GradientTape``, before or after it has recorded.
        device_dense: Device for dense gradients, such as ``/cpu:0``; by default where they are.
        device_sparse: Device for ``tf.IndexedSlices``; by default where they are.
        compression: Applied to tensors that are sent, and undone on received ones.
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
        ``gradient`` raises ``MismatchError`` or ``AbortedError`` if the collective fails; the variables are unchanged
        then.

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
    tape._hvdlab_reducer = TensorFlowReducer(
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
    """Return a :func:`DistributedGradientTape` that leaves the gradients of some layers on their rank.

    Args:
        gradtape: A ``tf.GradientTape``, before or after it has recorded.
        device_dense, device_sparse, compression, sparse_as_dense: As for :func:`DistributedGradientTape`.
        op, gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients: Likewise.
        local_layers: A Keras layer, or a list of them, whose trainable weights are local: their gradients are not reduced. They
            must be built.

    Returns:
        The tape. ``gradient`` raises ``MismatchError`` or ``AbortedError`` if the collective fails; the variables are
        unchanged then.

    Raises:
        InvalidRequestError: As by :func:`DistributedGradientTape`, or ``local_layers`` has other objects than layers.
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
    """Return the trainable weights of a layer or of several; an empty list for ``None``.

    Raises:
        InvalidRequestError: ``layers`` has other objects than layers.
    """
    if layers is None:
        return []
    listed = list(layers) if isinstance(layers, Iterable) else [layers]
    for layer in listed:
        if not hasattr(layer, "trainable_weights"):
            raise InvalidRequestError(f"local_layers= takes Keras layers, not {type(layer).__name__}.")
    return [variable for layer in listed for variable in layer.trainable_weights]


def chosen_groups(num_groups: int, groups: Groups) -> Groups:
    """Return ``groups``, or Horovod's older ``num_groups``."""
    return groups if groups is not None else num_groups or None
