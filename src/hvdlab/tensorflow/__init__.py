"""Horovod's TensorFlow API on hvdlab's collective core: ``import hvdlab.tensorflow as hvd``.

Names and signatures are Horovod's; :mod:`hvdlab.tensorflow.mpi_ops` describes the collectives' use of shapes, dtypes, gradients and
errors. It needs no compiler, and works with the TensorFlow that is installed.

Example:
    >>> import tensorflow as tf
    >>> import hvdlab.tensorflow as hvd
    >>> hvd.init()  # on every rank; a process that is no rank becomes a world of one
    >>> weight = tf.Variable([1.0, 2.0])
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(weight * weight)
    >>> tape = hvd.DistributedGradientTape(tape)
    >>> tape.gradient(loss, [weight])[0].numpy()
    array([2., 4.], dtype=float32)
    >>> hvd.shutdown()
"""

from __future__ import annotations

from hvdlab.bindings import arguments
from hvdlab.bindings.arguments import Adasum, Average, Max, Min, Product, Sum
from hvdlab.bindings.monitoring import DivergenceError, export, metric

# Not in __all__: `from hvdlab.tensorflow import *` would hide Python's built-in breakpoint().
from hvdlab.collectives.basics import breakpoint as breakpoint
from hvdlab.collectives.errors import CollectiveError as HorovodInternalError
from hvdlab.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvdlab.horovod.common.util import (
    check_extension,
    get_average_backwards_compatibility_fun,
    gpu_available,
    split_list,
)
from hvdlab.horovod.common.util import (
    num_rank_is_power_2 as check_num_rank_power_of_2,
)
from hvdlab.tensorflow import compression, elastic, functions, mpi_ops, sync_batch_norm
from hvdlab.tensorflow import functions as util

# Horovod's package binds these submodules by its own imports, and packages take the private names from it.
from hvdlab.tensorflow import gradient_aggregation as gradient_aggregation
from hvdlab.tensorflow.compression import Compression
from hvdlab.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    refs_to_vars,
    vars_to_refs,
)
from hvdlab.tensorflow.functions import _executing_eagerly as _executing_eagerly
from hvdlab.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from hvdlab.tensorflow.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from hvdlab.tensorflow.keras.monitoring import record, watch, watch_divergence
from hvdlab.tensorflow.mpi_ops import _allreduce as _allreduce
from hvdlab.tensorflow.mpi_ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    reducescatter,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from hvdlab.tensorflow.optimizer import DistributedAdasumOptimizer, DistributedOptimizer
from hvdlab.tensorflow.sync_batch_norm import SyncBatchNormalization

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(arguments)

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedAdasumOptimizer",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "DivergenceError",
    "HorovodInternalError",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "compression",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "export",
    "functions",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "gradient_aggregation",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "metric",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "record",
    "reducescatter",
    "refs_to_vars",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "split_list",
    "start_timeline",
    "stop_timeline",
    "sync_batch_norm",
    "util",
    "vars_to_refs",
    "watch",
    "watch_divergence",
]
