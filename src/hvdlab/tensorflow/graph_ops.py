"""Collectives in TensorFlow, in eager mode and in graphs, and their gradients.

Outside of functions a collective runs at once; in functions and graphs it becomes an operation. :func:`collective`,
:func:`collectives` and :func:`exchange` decide which. In both cases gradients follow the rules of
:mod:`hvdlab.bindings.gradients`: TensorFlow's tape records a collective that runs at once, and finds the gradient function of an
operation by the operation's name.

Reductions that are no sums are functions of all ranks' tensors in one, so that TensorFlow differentiates them. For Min and Max, the
gradient goes to the rank whose element was the smallest or largest (ranks that tie share it evenly). For Product, each rank's is
multiplied by the product of the other ranks' elements. For Adasum, it is the derivative of its formula.

In a TensorFlow in which operations can't be registered, there is one ``numpy_function`` for each group. TensorFlow runs these one
after the other, in the order in which they are in the function. So all ranks must have them in the same order, and each blocks one
of TensorFlow's threads while it waits.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlab.bindings.arguments import row_counts
from hvdlab.bindings.gradients import Differentiable, ForwardPass, own_rows
from hvdlab.bindings.operations import Operation
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.reduce import levels
from hvdlab.collectives.text import site_of_lines
from hvdlab.collectives.types import OpKind, ReduceOp, Reduction, check_supported
from hvdlab.tensorflow import kernels
from hvdlab.tensorflow.adapter import BINDING, as_tensor, core_dtype
from hvdlab.tensorflow.errors import JIT
from hvdlab.tensorflow.installed import internal, tf
from hvdlab.tensorflow.kernels import Call, decoded

_record = internal("eager.record")
_stack = internal("util.tf_stack")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_./-]")
_MOVING = (OpKind.ALLGATHER, OpKind.BROADCAST, OpKind.ALLTOALL)
_SPLITTING = (OpKind.REDUCESCATTER, OpKind.ALLTOALL)


class Outputs(NamedTuple):
    """The outputs of an operation in a graph.

    Attributes:
        tensors: The output for each tensor.
        received: For an alltoall: the number of rows received from each member, an int32 tensor.
        places: For an allgather: for each tensor the number of this rank's first row, and how many rows it has; an int64 tensor.
    """

    tensors: list[Any]
    received: Any = None
    places: Any = None


# -- gradients --------------------------------------------------------------------------------------------------------


class _TensorFlowDifferentiation:
    """Differentiation by TensorFlow; see :class:`hvdlab.bindings.gradients.Differentiation`."""

    def record(self, forward: ForwardPass, tensors: Sequence[Any]) -> Sequence[Any]:
        # The operations inside must not be recorded as well: ``backward`` stands for all of them.
        with _record.stop_recording():
            outputs = _eager.forward(forward, tensors)
        kept = () if forward.linear else tensors
        count = len(tensors)

        def backward(*gradients: Any) -> Sequence[Any]:
            return _graph_or_eager.backward(forward, kept, gradients)

        # Without the received splits of an alltoall, which have no gradient.
        _record.record_operation("HvdlabCollective", list(outputs[:count]), list(tensors), backward)
        return outputs

    def rows(self, tensor: Any, start: Any, count: Any, shape: Any) -> Any:
        return tf.reshape(tensor[start : start + count], shape)

    def zeros_like(self, tensor: Any) -> Any:
        with tf.control_dependencies(
            [tensor]
        ):  # otherwise TensorFlow would prune its collective on this rank, while others wait for it
            return tf.zeros_like(tensor)

    def scaled(self, tensor: Any, factor: float) -> Any:
        return tensor * tf.cast(factor, tensor.dtype)

    def as_row(self, tensor: Any) -> Any:
        return tf.expand_dims(tensor, 0)

    def derivative(self, operation: Operation, stacked: Any, gradient: Any, mine: int, count: int) -> Any:
        # ``stacked`` came out of an allgather, whose gradient is an average over the ranks; here the ranks' losses add up.
        inputs = _scaled_backwards(stacked, count)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = reduced(operation.reduction, inputs, count)
        return tape.gradient(output, inputs, gradient)[mine]


def _scaled_backwards(tensor: Any, factor: int) -> Any:
    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def same(tensor: Any) -> Any:
        return tf.identity(tensor), lambda gradient: gradient * tf.cast(factor, gradient.dtype)

    return same(tensor)


class _UnrecordedAdapter:
    """Part of an adapter that :class:`Differentiable` needs: no gradients to record, since TensorFlow records them itself."""

    def requires_grad(self, tensors: Sequence[Any]) -> bool:
        return False


class _EndedHandle(NamedTuple):
    """Part of a handle that the gradient rules need: its collective has ended already."""

    outputs: list[Any]

    def wait(self) -> list[Any]:
        return self.outputs


class _GraphOrEagerBinding:
    """Part of a binding that the gradient rules need: runs collectives on gradients in eager mode, or makes operations of them."""

    adapter = _UnrecordedAdapter()

    def run(self, operation: Operation, tensor: Any, name: str | None) -> tuple[Any, Any]:
        if operation.kind is OpKind.ALLTOALL:
            return exchange(operation, tensor, operation.splits, name)
        return collective(operation, tensor, name), None

    def submit_group(self, operation: Operation, tensors: Sequence[Any], name: str | None) -> _EndedHandle:
        return _EndedHandle(collectives(operation, list(tensors), name))

    def received_splits(self, result: Any) -> Any:
        return result


_differentiation: Any = _TensorFlowDifferentiation()
_binding: Any = _GraphOrEagerBinding()
_eager: Differentiable[Any] = Differentiable(BINDING, _differentiation)
_graph_or_eager: Differentiable[Any] = Differentiable(_binding, _differentiation)


def gradients_of(call: Call, inputs: Sequence[Any], outputs: Outputs, gradients: Sequence[Any]) -> list[Any]:
    """Return the gradients of an operation's inputs from those of its outputs."""
    forward = ForwardPass(call.operation, call.name, call.grouped, [tf.shape(each) for each in inputs])
    if outputs.places is not None:
        forward.rows = [(outputs.places[i, 0], outputs.places[i, 1]) for i in range(len(inputs))]
    forward.received = outputs.received
    whole = [
        tf.convert_to_tensor(gradient) if gradient is not None else tf.zeros_like(output)
        for gradient, output in zip(gradients, outputs.tensors, strict=False)
    ]
    return list(_graph_or_eager.backward(forward, () if forward.linear else inputs, whole))


def _gradient(op: Any, *gradients: Any) -> list[Any]:
    call = decoded(op.get_attr("call"))
    kind = call.operation.kind
    if kind is OpKind.ALLTOALL:
        found = Outputs([op.outputs[0]], received=op.outputs[1])
        return [*gradients_of(call, [op.inputs[0]], found, gradients), None]
    inputs = list(op.inputs)
    found = Outputs(
        list(op.outputs[: len(inputs)]), places=op.outputs[-1] if kind is OpKind.ALLGATHER else None
    )
    return gradients_of(call, inputs, found, gradients)


kernels.registered()  # at import: the program may load a saved graph that has these operations before it makes one itself
for _kind, _name in kernels.OPS.items():
    if _kind is not OpKind.JOIN:
        tf.RegisterGradient(_name)(_gradient)
for _name in (kernels.OPS[OpKind.JOIN], kernels.QUERY):
    tf.no_gradient(_name)


# -- anywhere ---------------------------------------------------------------------------------------------------------


def in_graph(tensors: Sequence[Any]) -> bool:
    """Return whether a collective of these tensors becomes an operation in a graph."""
    return not tf.executing_eagerly() or any(is_symbolic(tensor) for tensor in tensors)


def is_symbolic(tensor: Any) -> bool:
    """Return whether this is a tensor of a graph, which has no values yet."""
    return isinstance(tensor, tf.Tensor) and not hasattr(tensor, "_numpy_internal")


def collective(
    operation: Operation, tensor: Any, name: str | None, *, ignore_name_scope: bool = False
) -> Any:
    """Run a collective on one tensor, or in a graph make an operation for it; returns the output."""
    graph = in_graph((tensor,))
    sent, received = _carried(operation.kind, [tensor])
    if graph:
        return received(_emitted(operation, sent, name, False, ignore_name_scope).tensors)[0]
    return received([_eager.collective(operation, sent[0], name)])[0]


def collectives(
    operation: Operation, tensors: list[Any], name: str | None, *, ignore_name_scope: bool = False
) -> list[Any]:
    """Run a collective on a group of tensors, or in a graph make one operation for it; returns the outputs."""
    if not tensors:
        return []
    graph = in_graph(tensors)
    sent, received = _carried(operation.kind, tensors)
    if graph:
        return received(_emitted(operation, sent, name, True, ignore_name_scope).tensors)
    return received(_eager.collectives(operation, sent, name))


def exchange(
    operation: Operation, tensor: Any, splits: Any, name: str | None, *, ignore_name_scope: bool = False
) -> tuple[Any, Any]:
    """Run an alltoall, or in a graph make an operation for it.

    Returns:
        The output, and the number of rows that came from each member.
    """
    graph = in_graph((tensor, splits))
    sent, received = _carried(operation.kind, [tensor])
    if graph:
        found = _emitted(operation._replace(splits=None), sent, name, False, ignore_name_scope, splits)
        return received(found.tensors)[0], found.received
    _refuse_scalars(operation.kind, *sent)
    output, counts = _eager.exchange(operation._replace(splits=_counts(splits)), sent[0], name)
    return received([output])[0], counts


def _carried(kind: OpKind, given: Sequence[Any]) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
    """Return the tensors to send, and a function that makes the outputs of the tensors that were received.

    The core has no uint16. Collectives that only move data carry it as int16; so they do not notice if another rank gives int16.
    """
    tensors = [as_tensor(tensor, kind) for tensor in given]
    if kind not in _MOVING or tf.uint16 not in (dtypes := [tensor.dtype for tensor in tensors]):
        return tensors, lambda outputs: outputs
    sent = [tf.bitcast(each, tf.int16) if each.dtype == tf.uint16 else each for each in tensors]

    def received(outputs: list[Any]) -> list[Any]:
        pairs = zip(outputs, dtypes, strict=True)
        return [tf.bitcast(each, dtype) if dtype == tf.uint16 else each for each, dtype in pairs]

    return sent, received


def _counts(splits: Any) -> tuple[int, ...] | None:
    if tf.is_tensor(splits):
        splits = splits.numpy()
    return row_counts(splits)


def _refuse_scalars(kind: OpKind, *tensors: Any) -> None:
    if kind in _SPLITTING and any(tensor.shape.rank == 0 for tensor in tensors):
        raise InvalidRequestError(f"{kind.label} splits dimension 0, which a 0-d tensor does not have.")


# -- in a graph -------------------------------------------------------------------------------------------------------


def _emitted(
    operation: Operation,
    tensors: list[Any],
    name: str | None,
    grouped: bool,
    ignore_name_scope: bool,
    splits: Any = None,
) -> Outputs:
    kind = operation.kind
    for tensor in tensors:
        check_supported(kind, core_dtype(tensor), operation.reduction.op)
    _refuse_scalars(kind, *tensors)
    refuse_compilation(JIT)
    base = name or _made_name(kind, tensors[0], grouped)
    # Two operations of one name could be in flight at once. Ranks that trace alike count equal names alike.
    unique = tf.compat.v1.get_default_graph().unique_name(
        _NOT_IN_A_NAME.sub("_", base).strip("/") or "tensor"
    )
    if ignore_name_scope:
        unique = unique.rpartition("/")[2]
    call = Call(operation, unique, grouped, users_line())
    found = _as_operation(call, tensors, splits)
    _keep_shapes(kind, tensors, found.tensors)
    return found


def users_line() -> str:
    """Return the user's line of code that is being traced; in code that AutoGraph has rewritten, the original line."""
    frames = _stack.extract_stack()
    return site_of_lines((frame.filename, frame.lineno) for frame in reversed(list(frames)))


def _made_name(kind: OpKind, tensor: Any, grouped: bool) -> str:
    return f"{'HvdlabGrouped' if grouped else 'Hvdlab'}{kind.label.capitalize()}_{getattr(tensor, 'name', 'tensor')}"


def _as_operation(call: Call, tensors: list[Any], splits: Any) -> Outputs:
    kind = call.operation.kind
    registered = kernels.usable()
    rows = _splits_tensor(splits) if kind is OpKind.ALLTOALL else None
    if isinstance(registered, str):
        warnings.warn(
            f"Collectives in graphs run one after the other, through numpy_function: {registered}. "
            "All ranks must have them in the same order.",
            RuntimeWarning,
            stacklevel=2,
        )
        return Outputs(*grouped_numpy_function(call, tensors, rows, gradients_of))
    function = getattr(registered.functions, f"hvdlab_{kind.label}")
    if kind is OpKind.ALLTOALL:
        output, received = function(tensors[0], rows, call=call.encoded(), name=_node(call))
        return Outputs([output], received=received)
    found = function(tensors, call=call.encoded(), name=_node(call))
    if kind is OpKind.ALLGATHER:
        return Outputs(list(found[0]), places=found[1])
    return Outputs(list(found))


def _node(call: Call) -> str:
    """Return the name of the operation in the graph; the collective's own name is in the operation's attribute."""
    return f"{kernels.OPS[call.operation.kind]}/{call.name}"


def _splits_tensor(splits: Any) -> Any:
    if splits is None:
        return tf.zeros((0,), tf.int32)
    if tf.is_tensor(splits):
        if not splits.dtype.is_integer:
            raise InvalidRequestError(
                f"splits= takes a one-dimensional tensor or a list of integers, not a tensor of {splits.dtype.name}."
            )
        return tf.cast(splits, tf.int32)
    return tf.constant(row_counts(splits), tf.int32)


def _keep_shapes(kind: OpKind, tensors: list[Any], outputs: list[Any]) -> None:
    for tensor, output in zip(tensors, outputs, strict=True):
        if kind in (OpKind.ALLREDUCE, OpKind.BROADCAST):
            output.set_shape(tensor.shape)
        elif tensor.shape.rank is not None:
            output.set_shape([None, *tensor.shape[1:]])


def refuse_compilation(reason: str) -> None:
    """Raise ``UnsupportedError`` if XLA is going to compile the function that is being traced: it would fail when it runs."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("polymorphic_function.py"):
            function = frame.f_locals.get("self")
            if getattr(function, "_jit_compile", None) is True:
                raise UnsupportedError(reason)
        frame = frame.f_back


def reduced(reduction: Reduction, stacked: Any, count: int) -> Any:
    """Return the reduction of the tensors of ``count`` ranks, which are stacked along dimension 0; differentiable.

    The operator is MIN, MAX, PRODUCT or ADASUM. float16 and bfloat16 are computed in float32, as by the core.
    """
    op, prescale, postscale = reduction
    wide = tf.cast(stacked, tf.float32) if stacked.dtype in (tf.float16, tf.bfloat16) else stacked
    if prescale != 1.0:
        wide = wide * prescale
    if op is ReduceOp.MIN:
        result = tf.reduce_min(wide, 0)
    elif op is ReduceOp.MAX:
        result = tf.reduce_max(wide, 0)
    elif op is ReduceOp.PRODUCT:
        result = tf.reduce_prod(wide, 0)
    else:
        result = _adasum(tf.unstack(wide, count))
    if postscale != 1.0:
        result = result * postscale
    return tf.cast(result, stacked.dtype)


def _adasum(vectors: list[Any]) -> Any:
    """Return the Adasum of the vectors, by the formula in :mod:`hvdlab.collectives.reduce`."""
    for pairs in levels(len(vectors)):
        for a, b in pairs:
            common = _dot(vectors[a], vectors[b])
            vectors[a] = _share(vectors[a], common) + _share(vectors[b], common)
    return vectors[0]


def _share(vector: Any, common: Any) -> Any:
    square = _dot(vector, vector)
    # Divide by 1 where the square is 0: TensorFlow also differentiates the branch that tf.where does not choose, and a NaN there
    # would get into the gradient.
    factor = 1 - common / (2 * tf.where(square > 0, square, tf.ones_like(square)))
    return vector * tf.cast(factor, vector.dtype)


def _dot(a: Any, b: Any) -> Any:
    return tf.reduce_sum(tf.cast(a, tf.float64) * tf.cast(b, tf.float64))


Gradients = Callable[[Call, Sequence[Any], Any, Sequence[Any]], list[Any]]


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
        The outputs; for an alltoall the number of rows received from each member, otherwise ``None``; for an allgather the places of
        this rank's rows, otherwise ``None``.
    """
    kind, count = call.operation.kind, len(tensors)
    extra = {OpKind.ALLGATHER: tf.int64, OpKind.ALLTOALL: tf.int32}.get(kind)
    types = [tensor.dtype for tensor in tensors] + ([] if extra is None else [extra])

    def run(*arrays: Any) -> list[Any]:
        return _run(call, list(arrays))

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def recorded(*inputs: Any) -> Any:
        given = [*inputs] if splits is None else [*inputs, splits]
        # Stateful: TensorFlow would otherwise merge equal calls, and fold those of constants.
        outputs = list(tf.numpy_function(run, given, types, stateful=True))
        found = Outputs(
            outputs[:count],
            outputs[count] if kind is OpKind.ALLTOALL else None,
            outputs[count] if kind is OpKind.ALLGATHER else None,
        )

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
