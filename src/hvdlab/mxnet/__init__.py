"""Horovod's API for MXNet: ``import hvdlab.mxnet as hvd``. Needs MXNet 1.9.1, which needs Python 3.11 and numpy 1.23.

Example:
    >>> import mxnet as mx
    >>> import hvdlab.mxnet as hvd
    >>> hvd.init()  # on every rank; a process that is no rank becomes a world of one
    >>> hvd.allreduce(mx.nd.array([1, 2]), average=False).asnumpy()
    array([1., 2.], dtype=float32)
    >>> hvd.shutdown()
"""

from __future__ import annotations

from hvdlab.horovod.common.util import check_extension, split_list
from hvdlab.mxnet.compression import Compression
from hvdlab.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from hvdlab.mxnet.kvstore import install_kvstore, register_stores, uninstall_kvstore
from hvdlab.mxnet.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
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
    reducescatter,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvdlab.mxnet.optimizer import DistributedOptimizer, DistributedTrainer

register_stores()

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "check_extension",
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
    "install_kvstore",
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
    "split_list",
    "start_timeline",
    "stop_timeline",
    "uninstall_kvstore",
]
