"""The collectives and queries under Horovod's name for their module, ``horovod.tensorflow.mpi_ops``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlab.bindings.arguments import Adasum, Average, Max, Min, Product, Sum
from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvdlab.horovod.common.util import num_rank_is_power_2 as check_num_rank_power_of_2
from hvdlab.tensorflow.basics import (
    barrier,
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
from hvdlab.tensorflow.ops import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)

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
