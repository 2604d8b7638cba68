"""The collectives on numpy arrays, buffers, DLPack objects, and arrays of GPUs (CuPy's, or with ``__cuda_array_interface__``).

Arrays may be of any layout; one that is not C-contiguous is copied. Results are numpy arrays, or arrays of the same GPU package. ``process_set`` is a
``ProcessSet``, its id, or another object with a ``process_set_id``. Scalars count as one row where rows are divided.

Each docstring is completed by :func:`hvdlab.bindings.docstrings.documented` with the text that all forms share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.bindings import arguments
from hvdlab.bindings.arguments import Average
from hvdlab.bindings.docstrings import documented
from hvdlab.bindings.handles import Handle
from hvdlab.bindings.operations import Operation, reduced_at_once
from hvdlab.collectives import context
from hvdlab.collectives.context import shown_number
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.process_sets import ProcessSet, set_id
from hvdlab.collectives.types import OpKind, ReduceOp
from hvdlab.numpy.adapter import ADAPTER, BINDING, AnyArray, DeviceArray, as_array

Array = npt.NDArray[Any]
AnyProcessSet = Any
"""A ``ProcessSet``, an id, or an object with a ``process_set_id``."""


# -- allreduce --------------------------------------------------------------------------------------------------------


@documented
def allreduce(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> Array:
    """Reduce element by element over all ranks."""
    if type(tensor) is np.ndarray and tensor.flags.carray and prescale_factor == 1.0 == postscale_factor:
        reduced = np.empty(tensor.shape, tensor.dtype)
        if reduced_at_once(
            tensor, reduced, name, op, process_set if type(process_set) is int else _set_id(process_set)
        ):
            return reduced
    operation = _allreducing(op, prescale_factor, postscale_factor, process_set)
    output: Array = BINDING.run(operation, tensor, name)[0]
    return output


@documented
def allreduce_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> Handle:
    """Start :func:`allreduce`."""
    operation = _allreducing(op, prescale_factor, postscale_factor, process_set)
    return BINDING.submit(operation, tensor, name)


@documented
def allreduce_(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> Any:
    """Reduce element by element over all ranks, in place."""
    # C-contiguous, aligned and writeable: such an array needs no further checks.
    plain = type(tensor) is np.ndarray and tensor.flags.carray and prescale_factor == 1.0 == postscale_factor
    if plain and reduced_at_once(
        tensor, tensor, name, op, process_set if type(process_set) is int else _set_id(process_set)
    ):
        return tensor
    operation = _allreducing(op, prescale_factor, postscale_factor, process_set)
    output: Any = BINDING.run(operation, tensor, name, in_place=True)[0]
    return output


@documented
def allreduce_async_(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> Handle:
    """Start :func:`allreduce_`."""
    operation = _allreducing(op, prescale_factor, postscale_factor, process_set)
    return BINDING.submit(operation, tensor, name, in_place=True)


@documented
def grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> list[Array]:
    """Reduce several arrays as one: none is executed before every rank has submitted all."""
    handle = grouped_allreduce_async(tensors, name, op, prescale_factor, postscale_factor, process_set)
    outputs: list[Array] = handle.wait()
    return outputs


@documented
def grouped_allreduce_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> Handle:
    """Start :func:`grouped_allreduce`."""
    operation = _allreducing(op, prescale_factor, postscale_factor, process_set)
    return BINDING.submit_group(operation, arguments.tensor_list(ADAPTER, tensors), name)


@documented
def grouped_allreduce_(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> list[Any]:
    """Reduce several arrays as one, in place."""
    handle = grouped_allreduce_async_(tensors, name, op, prescale_factor, postscale_factor, process_set)
    outputs: list[Any] = handle.wait()
    return outputs


@documented
def grouped_allreduce_async_(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> Handle:
    """Start :func:`grouped_allreduce_`."""
    operation = _allreducing(op, prescale_factor, postscale_factor, process_set)
    given = arguments.tensor_list(ADAPTER, tensors)
    return BINDING.submit_group(operation, given, name, in_place=True)


# -- allgather --------------------------------------------------------------------------------------------------------


@documented
def allgather(
    tensor: Any,
    name: str | None = None,
    process_set: AnyProcessSet = 0,
) -> Array:
    """Concatenate the arrays of all ranks; every rank gets all of it."""
    operation = arguments.gathering(_set_id(process_set))
    output: Array = BINDING.run(operation, _rows(tensor), name)[0]
    return output


@documented
def allgather_async(
    tensor: Any,
    name: str | None = None,
    process_set: AnyProcessSet = 0,
) -> Handle:
    """Start :func:`allgather`."""
    operation = arguments.gathering(_set_id(process_set))
    return BINDING.submit(operation, _rows(tensor), name)


@documented
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: AnyProcessSet = 0,
) -> list[Array]:
    """Gather several arrays as one group."""
    outputs: list[Array] = grouped_allgather_async(tensors, name, process_set).wait()
    return outputs


@documented
def grouped_allgather_async(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: AnyProcessSet = 0,
) -> Handle:
    """Start :func:`grouped_allgather`."""
    operation = arguments.gathering(_set_id(process_set))
    return BINDING.submit_group(operation, _all_rows(tensors), name)


# -- broadcast --------------------------------------------------------------------------------------------------------


@documented
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: AnyProcessSet = 0,
) -> Array:
    """Give every rank the array of ``root_rank``."""
    operation = arguments.broadcasting(root_rank, _set_id(process_set))
    output: Array = BINDING.run(operation, tensor, name)[0]
    return output


@documented
def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: AnyProcessSet = 0,
) -> Handle:
    """Start :func:`broadcast`."""
    operation = arguments.broadcasting(root_rank, _set_id(process_set))
    return BINDING.submit(operation, tensor, name)


@documented
def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: AnyProcessSet = 0,
) -> Any:
    """Overwrite the array with that of ``root_rank``."""
    operation = arguments.broadcasting(root_rank, _set_id(process_set))
    output: Any = BINDING.run(operation, tensor, name, in_place=True)[0]
    return output


@documented
def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: AnyProcessSet = 0,
) -> Handle:
    """Start :func:`broadcast_`."""
    operation = arguments.broadcasting(root_rank, _set_id(process_set))
    return BINDING.submit(operation, tensor, name, in_place=True)


# -- reducescatter ----------------------------------------------------------------------------------------------------


@documented
def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> Array:
    """Reduce over all ranks, and divide the rows of the result among them."""
    given = _rows(tensor)
    operation = _scattering([given], op, prescale_factor, postscale_factor, process_set)
    output: Array = BINDING.run(operation, given, name)[0]
    return output


@documented
def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> Handle:
    """Start :func:`reducescatter`."""
    given = _rows(tensor)
    operation = _scattering([given], op, prescale_factor, postscale_factor, process_set)
    return BINDING.submit(operation, given, name)


@documented
def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> list[Array]:
    """Reduce and scatter several arrays as one group."""
    handle = grouped_reducescatter_async(tensors, name, op, prescale_factor, postscale_factor, process_set)
    outputs: list[Array] = handle.wait()
    return outputs


@documented
def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnyProcessSet = 0,
) -> Handle:
    """Start :func:`grouped_reducescatter`."""
    given = _all_rows(tensors)
    operation = _scattering(given, op, prescale_factor, postscale_factor, process_set)
    return BINDING.submit_group(operation, given, name)


# -- alltoall, barrier and join ---------------------------------------------------------------------------------------


@documented
def alltoall(
    tensor: Any,
    splits: Sequence[int] | Array | None = None,
    name: str | None = None,
    process_set: AnyProcessSet = 0,
) -> tuple[Array, tuple[int, ...]]:
    """Send ``splits[j]`` rows to the ``j``-th rank.

    Returns:
        The array of the received rows, in the order of the ranks, and the number of rows from each, a tuple.
    """
    given = _rows(tensor)
    operation = arguments.exchanging(ADAPTER, given, splits, _set_id(process_set))
    output, result = BINDING.run(operation, given, name)
    return output, result.received_splits or ()


@documented
def alltoall_async(
    tensor: Any,
    splits: Sequence[int] | Array | None = None,
    name: str | None = None,
    process_set: AnyProcessSet = 0,
) -> Handle:
    """Start :func:`alltoall`; ``synchronize`` gives the pair."""
    given = _rows(tensor)
    operation = arguments.exchanging(ADAPTER, given, splits, _set_id(process_set))
    return BINDING.submit(operation, given, name)


def barrier(process_set: AnyProcessSet = 0, name: str | None = None) -> None:
    """Return once every rank has called it.

    Args:
        process_set: The ranks that take part; all by default.
        name: Equal on all ranks.

    Raises:
        InvalidRequestError: This rank is not in the process set.
        NotInitializedError: ``init()`` was not called.
        AbortedError: A rank died, failed, left or was interrupted before all were there.
    """
    request = Request(OpKind.BARRIER, name, process_set=_set_id(process_set))
    context.engine("barrier").run(request)


def join(process_set: AnyProcessSet = 0) -> int:
    """Take part with zeros in the allreduces of the ranks that have data left, until all have joined.

    An average still divides by all ranks, and barriers count those that have joined as present. Other collectives,
    and other operators than Sum and Average, raise ``JoinedRanksError`` where they are submitted meanwhile.

    Args:
        process_set: The ranks that join; all by default.

    Returns:
        The rank that joined last; the same on all.

    Raises:
        InvalidRequestError: This rank is not in the process set.
        NotInitializedError: ``init()`` was not called.
        AbortedError: A rank died, failed, left or was interrupted before all had joined.
    """
    return shown_number(context.engine("join").join(_set_id(process_set)))


# -- arguments --------------------------------------------------------------------------------------------------------


def _allreducing(
    op: ReduceOp, prescale_factor: float, postscale_factor: float, process_set: AnyProcessSet
) -> Operation:
    return arguments.allreducing(None, op, prescale_factor, postscale_factor, _set_id(process_set))


def _scattering(
    tensors: Sequence[Any],
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: AnyProcessSet,
) -> Operation:
    return arguments.scattering(ADAPTER, tensors, op, prescale_factor, postscale_factor, _set_id(process_set))


def _rows(tensor: Any) -> AnyArray:
    """Return the user's value as an array; a scalar as one row."""
    array = as_array(tensor)
    if array.ndim:
        return array
    return as_array(array.owner.reshape(1)) if isinstance(array, DeviceArray) else array.reshape(1)


def _all_rows(tensors: Sequence[Any]) -> list[AnyArray]:
    return [_rows(tensor) for tensor in arguments.tensor_list(ADAPTER, tensors)]


def _set_id(process_set: AnyProcessSet) -> int:
    if isinstance(process_set, int):
        return process_set
    if isinstance(process_set, ProcessSet):
        return set_id(process_set)
    number = getattr(process_set, "process_set_id", None)
    return set_id(process_set) if number is None else int(number)
