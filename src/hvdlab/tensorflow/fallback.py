"""Collectives in graphs of a TensorFlow in which operations can't be registered: one ``numpy_function`` for each group.

TensorFlow runs these one after the other, in the order in which they are in the function. So all ranks must have them in the same
order, and each blocks one of TensorFlow's threads while it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlab.bindings.gradients import own_rows
from hvdlab.collectives.dtypes import OpKind
from hvdlab.tensorflow.adapter import BINDING
from hvdlab.tensorflow.calls import Call
from hvdlab.tensorflow.installed import tf

Gradients = Callable[[Call, Sequence[Any], Any, Sequence[Any]], list[Any]]


class _Given(list[Any]):
    """The outputs, with the attributes of ``graph.Outputs``: that module imports this one, so its class can't be used here."""

    tensors: list[Any]
    received: Any = None
    places: Any = None


def grouped_numpy_function(
    call: Call, tensors: list[Any], splits: Any, gradients_of: Gradients
) -> tuple[list[Any], Any, Any]:
    """Make one ``numpy_function`` that runs a collective on all these tensors.

    Args:
        call: The collective.
        tensors: Tensors of a graph.
        splits: For an alltoall: a tensor with the rows for each member, empty to divide them evenly; ``None`` for other collectives.
        gradients_of: Computes the gradients of ``tensors`` from those of the outputs.

    Returns:
        The outputs; for an alltoall the number of rows received from each member, else ``None``; for an allgather the places of
        this rank's rows, else ``None``.
    """
    kind, count = call.operation.kind, len(tensors)
    extra = {OpKind.ALLGATHER: tf.int64, OpKind.ALLTOALL: tf.int32}.get(kind)
    types = [tensor.dtype for tensor in tensors] + ([] if extra is None else [extra])

    def run(*arrays: Any) -> list[Any]:
        return _run(call, list(arrays))

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def recorded(*inputs: Any) -> Any:
        given = [*inputs] if splits is None else [*inputs, splits]
        outputs = list(tf.numpy_function(run, given, types, stateful=True))
        found = _Given()
        found.tensors = outputs[:count]
        if kind is OpKind.ALLGATHER:
            found.places = outputs[count]
        elif kind is OpKind.ALLTOALL:
            found.received = outputs[count]

        def gradient(*gradients: Any) -> list[Any]:
            return gradients_of(call, inputs, found, gradients[:count])

        return outputs, gradient

    outputs = recorded(*tensors)
    received = outputs[count] if kind is OpKind.ALLTOALL else None
    return list(outputs[:count]), received, outputs[count] if kind is OpKind.ALLGATHER else None


def _run(call: Call, arrays: list[Any]) -> list[Any]:
    operation = call.operation
    if operation.kind is OpKind.ALLTOALL:
        splits = tuple(int(rows) for rows in arrays.pop())
        operation = operation._replace(splits=splits or None)
    tensors = [tf.constant(array) for array in arrays]
    if not call.grouped:
        handle = BINDING.submit(operation, tensors[0], call.name, site=call.site)
        found = handle.wait()
        if operation.kind is OpKind.ALLTOALL:
            return [found[0].numpy(), found[1].numpy()]
        outputs = [found.numpy()]
    else:
        handle = BINDING.submit_group(operation, tensors, call.name, site=call.site)
        outputs = [output.numpy() for output in handle.wait()]
    if operation.kind is OpKind.ALLGATHER:
        outputs.append(np.array(own_rows(handle.tables, operation.process_set), np.int64))
    return outputs
