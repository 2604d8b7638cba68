"""Collectives on TensorFlow's tensors, and queries, under Horovod's name for their module, ``horovod.tensorflow.mpi_ops``.

Tensors are of any dtype of ``hvdlab.collectives.types.DType``; variables, arrays and numbers are converted. Outside of functions a
collective runs at once. In a ``tf.function``, a graph of TensorFlow 1 or a ``tf.data`` pipeline it is an asynchronous
operation: any number of them may wait, in any order on the ranks.

All of them are differentiable; every rank must then run the backward pass.
:func:`hvdlab.bindings.docstrings.documented` adds to each docstring the text that all forms share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from hvdlab.bindings import arguments
from hvdlab.bindings.arguments import Adasum, Average, Max, Min, Product, Sum
from hvdlab.bindings.compression import all_compressed, compressed
from hvdlab.bindings.docstrings import documented
from hvdlab.bindings.framework_hooks import devices_in_use
from hvdlab.bindings.operations import Operation
from hvdlab.collectives import basics, context
from hvdlab.collectives.basics import (
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvdlab.collectives.context import core_rank, shown_number
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.metrics.sampler import ask_frameworks
from hvdlab.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    set_id,
)
from hvdlab.collectives.types import OpKind, ReduceOp
from hvdlab.horovod.common.util import num_rank_is_power_2 as check_num_rank_power_of_2
from hvdlab.tensorflow import errors, interrupts, kernels
from hvdlab.tensorflow.adapter import ADAPTER
from hvdlab.tensorflow.compression import Compression, Compressor
from hvdlab.tensorflow.errors import translated
from hvdlab.tensorflow.graph_ops import collective, collectives, exchange, in_graph, users_line
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.kernels import Call

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp | int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return :func:`allreduce` of a dense tensor, by default its sum: a private function of Horovod that packages call.

    Args:
        tensor, name, op, prescale_factor, postscale_factor, ignore_name_scope, process_set: As for :func:`allreduce`.

    Raises:
        InvalidRequestError, NotInitializedError, MismatchError, AbortedError: As by :func:`allreduce`.
    """
    return allreduce(
        tensor,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
    )


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp | int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return :func:`grouped_allreduce` of dense tensors, by default their sums.

    Args:
        tensors, name, op, prescale_factor, postscale_factor, ignore_name_scope, process_set: As for :func:`grouped_allreduce`.

    Raises:
        InvalidRequestError, NotInitializedError, MismatchError, AbortedError: As by :func:`grouped_allreduce`.
    """
    return grouped_allreduce(
        tensors,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
    )


def init(
    comm: Sequence[int] | Any | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
) -> None:
    ask_frameworks(devices_in_use)
    basics.init(comm, process_sets)
    interrupts.begin()


init.__doc__ = basics.init.__doc__
errors.install()

# -- allreduce --------------------------------------------------------------------------------------------------------


@translated
@documented
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over all ranks into a new one of its shape and dtype.

    The gradient of ``hvd.Average`` and ``hvd.Sum`` is the same reduction of the gradients; that of the other operators is the
    derivative of the sum of the ranks' losses.

    ``tf.IndexedSlices`` can be summed and averaged: the ranks gather the values and indices of all, and the gathered slices stand
    for the sum, or, with their values divided by the number of ranks, for the average. The average of integers is floating point
    then, of the dtype that ``/`` gives in TensorFlow. Both scale factors multiply the gathered values.
    """
    operation = _allreducing(average, op, prescale_factor, postscale_factor, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return _sparse(operation, tensor, name, device_sparse, ignore_name_scope)
    with _device(device_dense):
        return compressed(
            compression,
            _tensor(tensor, OpKind.ALLREDUCE, compression),
            lambda sent: collective(operation, sent, name, ignore_name_scope=ignore_name_scope),
        )


@translated
@documented
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors as by :func:`allreduce`, executed together once every rank has submitted all of them."""
    operation = _allreducing(average, op, prescale_factor, postscale_factor, process_set)
    given = arguments.tensor_list(ADAPTER, tensors)
    sparse = {i: each for i, each in enumerate(given) if isinstance(each, tf.IndexedSlices)}
    dense = [_tensor(each, OpKind.ALLREDUCE, compression) for i, each in enumerate(given) if i not in sparse]
    with _device(device_dense):
        outputs = iter(
            all_compressed(
                compression,
                dense,
                lambda sent: collectives(operation, sent, name, ignore_name_scope=ignore_name_scope),
            )
        )
    found = []
    for i in range(len(given)):
        if i in sparse:
            part = None if name is None else f"{name}.sparse.{i}"
            found.append(_sparse(operation, sparse[i], part, device_sparse, ignore_name_scope))
        else:
            found.append(next(outputs))
    return found


def _sparse(operation: Operation, slices: Any, name: str | None, device: str, ignore_name_scope: bool) -> Any:
    op = operation.reduction.op
    if op not in (Average, Sum):
        raise UnsupportedError(
            f"tf.IndexedSlices can be averaged and summed, not reduced by {op.name.lower()}; give "
            "sparse_as_dense=True, or tf.convert_to_tensor(slices)."
        )
    gathering = Operation(OpKind.ALLGATHER, process_set=operation.process_set)
    with _device(device):
        values, indices = collectives(
            gathering, [slices.values, slices.indices], name, ignore_name_scope=ignore_name_scope
        )
        values = _scaled_slices(operation, values)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _scaled_slices(operation: Operation, values: Any) -> Any:
    """Apply the scale factors, and the division of an average, to the gathered values of ``tf.IndexedSlices``."""
    op, prescale, postscale = operation.reduction
    scale = prescale * postscale
    if op is not Average:
        if scale == 1.0:
            return values
        if values.dtype.is_integer:  # a factor such as 0.5 would be 0 in the dtype of the values
            return tf.cast(tf.cast(values, tf.float64) * scale, values.dtype)
        return values * tf.cast(scale, values.dtype)
    if values.dtype.is_integer:
        # Rounding before the slices of one row are added up would lose up to 1 for each of them.
        values = tf.math.truediv(values, tf.ones((), values.dtype))
    if scale != 1.0:
        values = values * tf.cast(scale, values.dtype)
    return values / tf.cast(size_op(operation.process_set), values.dtype)


# -- allgather --------------------------------------------------------------------------------------------------------


@translated
@documented
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate the tensors of all ranks, in the order of the ranks; every rank gets the whole.

    A rank's gradient is its own rows of the *average* of the gradients over all ranks.
    """
    return collective(_gathering(process_set), tensor, name, ignore_name_scope=ignore_name_scope)


@translated
@documented
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several tensors as by :func:`allgather`, executed together."""
    given = arguments.tensor_list(ADAPTER, tensors)
    return collectives(_gathering(process_set), given, name, ignore_name_scope=ignore_name_scope)


# -- broadcast --------------------------------------------------------------------------------------------------------


@translated
@documented
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return ``root_rank``'s tensor on every rank; elsewhere ``tensor`` gives the shape and dtype.

    The gradient on the root is the *average* of the gradients over all ranks, on other ranks zero.
    """
    operation = arguments.broadcasting(root_rank, set_id(process_set))
    _check_root(operation)
    return collective(operation, tensor, name, ignore_name_scope=ignore_name_scope)


@translated
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Assign the values that the variables have on ``root_rank`` to them on every rank.

    Args:
        variables: Resource variables of equal shapes and dtypes on every rank, in the same order.
        root_rank: The rank whose values all get: a rank of the world, also within a process set.
        name: Equal on all ranks, and not in flight twice. Calls without a name are matched in order.
        process_set: The ranks that take part; all by default.

    Returns:
        The variables. In a graph of TensorFlow 1: tensors with their new values, which every rank must run.

    Raises:
        InvalidRequestError: An argument is wrong, or this rank is not in the process set. Nothing was sent.
        NotInitializedError: ``init()`` was not called.
        MismatchError: The ranks disagree about the variables; raised on all of them. The group can go on.
        AbortedError: It can't complete: a rank died, failed, left, was interrupted, ... The group can go on.

    After a failed collective the variables have their former values.
    """
    operation = arguments.broadcasting(root_rank, set_id(process_set))
    _check_root(operation)
    given = list(variables)
    for variable in given:
        if not hasattr(variable, "assign"):
            raise InvalidRequestError(f"broadcast_ takes variables, not {type(variable).__name__}.")
    values = collectives(operation, [_value(variable) for variable in given], name)
    assigned = [variable.assign(value) for variable, value in zip(given, values, strict=True)]
    if tf.executing_eagerly() or tf.inside_function():
        return given
    return assigned


def _value(variable: Any) -> Any:
    read = getattr(variable, "read_value", None)
    return tf.convert_to_tensor(variable) if read is None else read()


# -- reducescatter ----------------------------------------------------------------------------------------------------


@translated
@documented
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor of at least one dimension over all ranks, and return this rank's rows of the result.

    The gradient of ``hvd.Average`` and ``hvd.Sum`` is the allgather of the gradients, times the number of ranks for
    ``hvd.Sum``, times the scale factors; that of the other operators is the derivative of the sum of the ranks' losses.
    """
    _refuse_sparse("reducescatter", tensor)
    operation = _scattering(op, prescale_factor, postscale_factor, process_set, [tensor])
    with _device(device_dense):
        return compressed(
            compression,
            _tensor(tensor, OpKind.REDUCESCATTER, compression),
            lambda sent: collective(operation, sent, name, ignore_name_scope=ignore_name_scope),
        )


@translated
@documented
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Reduce and divide several tensors as by :func:`reducescatter`, executed together."""
    given = arguments.tensor_list(ADAPTER, tensors)
    _refuse_sparse("grouped_reducescatter", *given)
    operation = _scattering(op, prescale_factor, postscale_factor, process_set, given)
    dense = [_tensor(each, OpKind.REDUCESCATTER, compression) for each in given]
    with _device(device_dense):
        return all_compressed(compression, dense, lambda sent: collectives(operation, sent, name))


def _refuse_sparse(function: str, *tensors: Any) -> None:
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise UnsupportedError(
            f"hvd.{function} takes dense tensors, not tf.IndexedSlices; give tf.convert_to_tensor(slices)."
        )


# -- alltoall ---------------------------------------------------------------------------------------------------------


@translated
@documented
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank, and return the rows received, in the order of the ranks they came from.

    Gradients go back the way the rows came.

    Returns:
        A new tensor with the rows received, in the order of the ranks they came from. If ``splits`` were given, a pair of this
        tensor and an int32 tensor with the number of rows received from each rank.
    """
    operation = Operation(OpKind.ALLTOALL, process_set=set_id(process_set))
    output, received = exchange(operation, tensor, splits, name, ignore_name_scope=ignore_name_scope)
    return output if splits is None else (output, received)


# -- the end of the data ----------------------------------------------------------------------------------------------


@translated
def join() -> Any:
    """Declare that this rank has no data left, and wait until all ranks have done so.

    Meanwhile the other ranks need not wait for this one: it takes part with zeros in their allreduces with ``hvd.Sum`` or
    ``hvd.Average`` (which divides by all ranks, those that have joined included). Any other collective, and any other operator,
    raises ``HorovodInternalError`` on the ranks that submit it while some rank has joined.

    Returns:
        The rank that joined last, the same on all ranks: a number, or in a graph an int32 tensor.

    Raises:
        NotInitializedError: ``init()`` was not called.
        AbortedError: A rank died, left, failed or was interrupted before all had joined.
    """
    if not in_graph(()):
        return shown_number(context.engine("hvd.join()").run(Request(OpKind.JOIN)).last_joined)
    registered = kernels.usable()
    if isinstance(registered, str):
        return tf.numpy_function(lambda: _int32(context.engine("hvd.join()").join()), [], tf.int32)
    call = Call(Operation(OpKind.JOIN), None, False, users_line())
    return registered.functions.hvdlab_join(call=call.encoded())


# -- the world, when an operation is executed -------------------------------------------------------------------------


@translated
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of a process set at the time of execution, as an int32 tensor.

    In a graph it follows elastic training, while ``hvd.size()`` is the number at the time at which the graph was made.

    Args:
        process_set_id: ``process_set_id`` of a process set; all ranks by default.
        name: Name of the operation in the graph.

    Raises:
        NotInitializedError: ``init()`` was not called.
        InvalidRequestError: There is no such process set.
    """
    return _query("size", process_set_id, name)


@translated
def rank_op(name: str | None = None) -> Any:
    """Return this rank's number at the time of execution, as an int32 tensor; ``name`` is the operation's.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    return _query("rank", 0, name)


@translated
def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host at the time of execution, as an int32 tensor; ``name`` is the operation's.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    return _query("local_size", 0, name)


@translated
def local_rank_op(name: str | None = None) -> Any:
    """Return this rank's number on its host at the time of execution, as an int32 tensor; ``name`` is the operation's.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    return _query("local_rank", 0, name)


@translated
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is in a process set at the time of execution, otherwise 0, as an int32 tensor.

    Args:
        process_set_id: ``process_set_id`` of a process set; all ranks by default.
        name: Name of the operation in the graph.

    Raises:
        NotInitializedError: ``init()`` was not called.
        InvalidRequestError: There is no such process set.
    """
    return _query("included", process_set_id, name)


def _query(what: str, process_set_id: int, name: str | None) -> Any:
    if not in_graph(()):
        return tf.constant(kernels.asked(what, process_set_id), tf.int32)
    registered = kernels.usable()
    if isinstance(registered, str):
        return tf.numpy_function(lambda: _int32(kernels.asked(what, process_set_id)), [], tf.int32)
    return registered.functions.hvdlab_query(call=f"?{what} {process_set_id}", name=name)


def _int32(number: int) -> Any:
    return tf.int32.as_numpy_dtype(number)


# -- operations -------------------------------------------------------------------------------------------------------


def _allreducing(
    average: bool | None,
    op: ReduceOp | int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Operation:
    return arguments.allreducing(average, op, prescale_factor, postscale_factor, set_id(process_set))


def _gathering(process_set: ProcessSet) -> Operation:
    return arguments.gathering(set_id(process_set))


def _scattering(
    op: ReduceOp | int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    tensors: Sequence[Any],
) -> Operation:
    chosen = arguments.checked_operator(op)
    if chosen is Adasum:
        raise UnsupportedError(
            "reducescatter with Adasum does not exist, since what Adasum makes of a part depends on the whole tensor; "
            "use allreduce with Adasum, or reducescatter with Average."
        )
    if any(getattr(getattr(tensor, "shape", None), "rank", 1) == 0 for tensor in tensors):
        raise InvalidRequestError("reducescatter splits dimension 0, which a 0-d tensor does not have.")
    reduction = arguments.reduction_of(chosen, prescale_factor, postscale_factor)
    return Operation(OpKind.REDUCESCATTER, reduction, process_set=set_id(process_set))


def _check_root(operation: Operation) -> None:
    """Raise ``InvalidRequestError`` for a wrong root while a graph is made, and not only when it runs."""
    if not tf.executing_eagerly() and basics.is_initialized():
        engine = context.engine()
        ranks = engine.ranks(operation.process_set)
        if core_rank(operation.root) not in ranks:
            raise InvalidRequestError(
                f"root {operation.root} is not in process set {operation.process_set}; its ranks are {list(ranks)}."
            )


def _tensor(value: Any, kind: OpKind, compression: type[Compressor]) -> Any:
    """Return a tensor for the compressor; without compression the value as it is, which is converted later."""
    return value if compression is Compression.none else ADAPTER.check(value, kind, False)


@cache
def _no_device() -> Any:
    import contextlib

    return contextlib.nullcontext()


def _device(name: str) -> Any:
    return tf.device(name) if name else _no_device()
