"""The collectives on MXNet's arrays, with Horovod's names and signatures.

Results are complete when a function returns. ``priority`` is accepted and changes nothing: calls wait, so none overtakes another.
Collectives are not differentiated, as in Horovod. Each docstring is completed by
:func:`hvdlab.bindings.docstrings.documented` with the text that all forms share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlab.bindings import arguments
from hvdlab.bindings.arguments import Adasum, Average, Max, Min, Product, Sum
from hvdlab.bindings.docstrings import documented
from hvdlab.bindings.operations import Operation
from hvdlab.collectives.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
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
from hvdlab.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    set_id,
)
from hvdlab.collectives.types import ReduceOp
from hvdlab.mxnet.adapter import ADAPTER, BINDING, NDArray

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
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


@documented
def allreduce(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | int | None = None,
) -> NDArray:
    """Reduce an array over all ranks. As in Horovod, there is no Adasum for MXNet: ``AssertionError``."""
    operation = _reducing(average, op, prescale_factor, postscale_factor, process_set)
    return BINDING.run(operation, tensor, name)[0]


@documented
def allreduce_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | int | None = None,
) -> NDArray:
    """Reduce an array over all ranks in place and return it."""
    operation = _reducing(average, op, prescale_factor, postscale_factor, process_set)
    return BINDING.run(operation, tensor, name, in_place=True)[0]


@documented
def grouped_allreduce(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | int | None = None,
) -> Sequence[NDArray]:
    """Reduce several arrays as by :func:`allreduce`, executed together. An empty list is returned as it is."""
    operation = _reducing(average, op, prescale_factor, postscale_factor, process_set)
    return _grouped(operation, tensors, name)


@documented
def grouped_allreduce_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | int | None = None,
) -> Sequence[NDArray]:
    """Reduce several arrays as by :func:`allreduce_`, executed together; returns the list that was given."""
    operation = _reducing(average, op, prescale_factor, postscale_factor, process_set)
    _grouped(operation, tensors, name, in_place=True)
    return tensors


@documented
def allgather(
    tensor: NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Concatenate the arrays of all ranks, in the order of the ranks; every rank gets all of it."""
    return BINDING.run(arguments.gathering(set_id(process_set)), tensor, name)[0]


@documented
def grouped_allgather(
    tensors: Sequence[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Sequence[NDArray]:
    """Gather several arrays as by :func:`allgather`, executed together. An empty list is returned as it is."""
    return _grouped(arguments.gathering(set_id(process_set)), tensors, name)


@documented
def broadcast(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Copy ``root_rank``'s array to all ranks."""
    return BINDING.run(arguments.broadcasting(root_rank, set_id(process_set)), tensor, name)[0]


@documented
def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Overwrite an array on all ranks with that of ``root_rank`` and return it."""
    return BINDING.run(arguments.broadcasting(root_rank, set_id(process_set)), tensor, name, in_place=True)[0]


@documented
def alltoall(
    tensor: NDArray,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray | tuple[NDArray, NDArray]:
    """Send each rank its own rows and concatenate the rows from all ranks.

    Returns:
        The received rows; if ``splits`` was given also how many of them came from each rank, as int32.
    """
    counts = splits.asnumpy() if ADAPTER.is_tensor(splits) else splits
    operation = arguments.exchanging(ADAPTER, tensor, counts, set_id(process_set))
    output, result = BINDING.run(operation, tensor, name)
    return output if splits is None else (output, BINDING.received_splits(result))


@documented
def reducescatter(
    tensor: NDArray,
    op: ReduceOp | int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray:
    """Reduce an array over all ranks, and give each rank its share of the rows."""
    operation = _scattering([tensor], op, prescale_factor, postscale_factor, process_set)
    return BINDING.run(operation, tensor, name)[0]


@documented
def grouped_reducescatter(
    tensors: Sequence[NDArray],
    op: ReduceOp | int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Sequence[NDArray]:
    """Reduce and divide several arrays as by :func:`reducescatter`, executed together. An empty list is returned as it is."""
    listed = arguments.tensor_list(ADAPTER, tensors)
    operation = _scattering(listed, op, prescale_factor, postscale_factor, process_set)
    return _grouped(operation, tensors, name)


def _reducing(
    average: bool | None,
    op: ReduceOp | int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Operation:
    if op == Adasum:
        raise AssertionError(
            "Horovod has no Adasum for MXNet, so scripts don't expect it here: use hvd.Average"
        )
    return arguments.allreducing(average, op, prescale_factor, postscale_factor, set_id(process_set))


def _scattering(
    tensors: Sequence[NDArray],
    op: ReduceOp | int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Operation:
    return arguments.scattering(ADAPTER, tensors, op, prescale_factor, postscale_factor, set_id(process_set))


def _grouped(
    operation: Operation, tensors: Sequence[NDArray], name: str | None, *, in_place: bool = False
) -> Sequence[NDArray]:
    listed = arguments.tensor_list(ADAPTER, tensors)
    if not listed:
        return tensors
    outputs: list[NDArray] = BINDING.submit_group(operation, listed, name, in_place=in_place).wait()
    return outputs
