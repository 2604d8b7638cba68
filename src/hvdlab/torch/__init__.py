"""Horovod's torch API on hvdlab's collective core: ``import hvdlab.torch as hvd``.

Names and signatures are Horovod's; :mod:`hvdlab.torch.mpi_ops` describes the collectives' use of shapes, dtypes, gradients and
errors.

Example:
    >>> import torch
    >>> import hvdlab.torch as hvd
    >>> hvd.init()  # on every rank; a process that is no rank becomes a world of one
    >>> model = torch.nn.Linear(2, 1)
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Sum)
    tensor([1., 2.])
    >>> hvd.shutdown()
"""

from __future__ import annotations

from hvdlab.bindings.arguments import Adasum, Average, Max, Min, Product, Sum
from hvdlab.bindings.handles import Handle
from hvdlab.bindings.monitoring import DivergenceError, export, metric

# Not in __all__: `from hvdlab.torch import *` would hide Python's built-in breakpoint().
from hvdlab.collectives.basics import breakpoint as breakpoint
from hvdlab.collectives.errors import CollectiveError as HorovodInternalError
from hvdlab.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvdlab.horovod.common.util import check_extension
from hvdlab.torch import elastic, mpi_ops
from hvdlab.torch.compression import Compression
from hvdlab.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdlab.torch.monitoring import record, watch, watch_divergence
from hvdlab.torch.mpi_ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    reducescatter,
    reducescatter_async,
    rocm_built,
    shutdown,
    size,
    sparse_allreduce_async,
    start_timeline,
    stop_timeline,
    synchronize,
)
from hvdlab.torch.optimizer import DistributedOptimizer
from hvdlab.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DivergenceError",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_extension",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "export",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metric",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "record",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "watch",
    "watch_divergence",
]
