"""The reduction of a training step's gradients, for tapes and optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from hvdlab.bindings.arguments import Average, gradient_operator, predivide_factor
from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.horovod.common.util import split_list
from hvdlab.tensorflow.compression import Compression, Compressor
from hvdlab.tensorflow.functions import vars_to_refs
from hvdlab.tensorflow.graph import in_graph
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.ops import allreduce, grouped_allreduce, size_op

BUCKET = 16 << 20
"""Bytes of gradients that one operation of a graph reduces if the user names no groups: enough for the operation's own cost not to
matter, and few enough for the reduction to begin while the backward pass goes on."""

_REDUCED = "_hvdlab_reduced"
"""The attribute of a reduced gradient that has the id of the process set over which it was reduced."""

Groups = int | Sequence[Sequence[Any]] | None


class GradientReducer:
    """Reduces gradients over all ranks, which must all call it alike.

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
        #: The variables whose gradients stay on their rank, as references by :func:`vars_to_refs`.
        self.local: set[Any] = set()
        #: Called with this rank's own gradients before they are reduced.
        self.observer: Callable[[Sequence[Any]], None] | None = None
        #: Whether it has warned that gradients had been reduced before.
        self._warned = False

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable's gradients on their rank: they are not reduced."""
        self.local.add(vars_to_refs(variable))

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        """The reduced gradients, in the same order; ``None`` stays ``None``.

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
        references = [None] * len(found) if variables is None else [vars_to_refs(each) for each in variables]
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
        """A group's gradients, reduced by one collective; each sparse gradient by its own."""
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
            members = [place_of[ref] for variable in group if (ref := vars_to_refs(variable)) in place_of]
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


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _buckets(places: list[int], gradients: list[Any]) -> list[list[int]]:
    """Buckets of gradients in the order in which a backward pass computes them: those of the last variables first."""
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
        """The ranks over which gradients are reduced."""
        return self._hvdlab_parts()[0].process_set  # type: ignore[no-any-return]

    @process_set.setter
    def process_set(self, process_set: ProcessSet) -> None:
        self._hvdlab_change("process_set", process_set)

    @property
    def scale_local_gradients(self) -> bool:
        """Whether gradients of local variables are divided by the number of ranks."""
        return self._hvdlab_parts()[0].scale_local_gradients  # type: ignore[no-any-return]

    @scale_local_gradients.setter
    def scale_local_gradients(self, scale_local_gradients: bool) -> None:
        self._hvdlab_change("scale_local_gradients", scale_local_gradients)
