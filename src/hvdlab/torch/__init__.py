"""Horovod's torch API on hvdlab's collective core: ``import hvdlab.torch as hvd``.

Names and signatures are Horovod's; :mod:`hvdlab.torch.ops` says what the collectives do with shapes, dtypes, gradients and
errors.
"""

from __future__ import annotations

from hvdlab.bindings.arguments import Adasum, Average, Max, Min, Product, Sum
from hvdlab.bindings.handles import Handle
from hvdlab.collectives.errors import CollectiveError as HorovodInternalError
from hvdlab.collectives.metrics.rank_metrics import export, metric

# Not in __all__: `from hvdlab.torch import *` would hide Python's built-in breakpoint().
from hvdlab.collectives.stopping import breakpoint as breakpoint
from hvdlab.horovod.common.util import check_extension
from hvdlab.torch import elastic, mpi_ops
from hvdlab.torch.basics import (
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
from hvdlab.torch.compression import Compression
from hvdlab.torch.divergence import DivergenceError, watch_divergence
from hvdlab.torch.functions import allgather_object, broadcast_object, broadcast_parameters
from hvdlab.torch.ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from hvdlab.torch.optimizer import DistributedOptimizer
from hvdlab.torch.optimizer_state import broadcast_optimizer_state
from hvdlab.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvdlab.torch.recording import record
from hvdlab.torch.sparse import sparse_allreduce_async
from hvdlab.torch.sync_batch_norm import SyncBatchNorm
from hvdlab.torch.watch import watch

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
