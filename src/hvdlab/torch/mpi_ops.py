"""The collectives and queries under Horovod's name for their module, ``horovod.torch.mpi_ops``."""

from __future__ import annotations

from hvdlab.collectives.errors import CollectiveError as HorovodInternalError
from hvdlab.horovod.common.util import (
    get_average_backwards_compatibility_fun,
)
from hvdlab.horovod.common.util import (
    num_rank_is_power_2 as check_num_rank_power_of_2,
)
from hvdlab.torch import arguments
from hvdlab.torch.allreducing import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hvdlab.torch.arguments import Adasum, Average, Max, Min, Product, Sum
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
from hvdlab.torch.broadcasting import broadcast, broadcast_, broadcast_async, broadcast_async_
from hvdlab.torch.compression import Compression
from hvdlab.torch.exchanging import alltoall, alltoall_async
from hvdlab.torch.gathering import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from hvdlab.torch.handles import poll, synchronize
from hvdlab.torch.joining import join
from hvdlab.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvdlab.torch.scattering import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvdlab.torch.sparse import sparse_allreduce_async

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(arguments)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
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
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
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
]
