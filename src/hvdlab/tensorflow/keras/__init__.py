"""Horovod's API for ``tf.keras`` on hvdlab's collective core: ``import hvdlab.tensorflow.keras as hvd``.

``tf.keras`` is Keras 3, or Keras 2 (``tf_keras``) if TF_USE_LEGACY_KERAS=1 is set. Optimizers of either are taken.
"""

from __future__ import annotations

from typing import Any

from hvdlab.bindings.arguments import Average, Sum
from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.collectives.metrics.record import metric
from hvdlab.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvdlab.horovod.common.util import is_version_greater_equal_than
from hvdlab.tensorflow.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
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
from hvdlab.tensorflow.compression import Compression, Compressor
from hvdlab.tensorflow.functions import broadcast_global_variables
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.keras import callbacks, elastic, models
from hvdlab.tensorflow.keras.divergence import DivergenceError, watch_divergence
from hvdlab.tensorflow.keras.optimizers import distributed
from hvdlab.tensorflow.keras.recording import record
from hvdlab.tensorflow.keras.values import allgather, allreduce, broadcast, reducescatter
from hvdlab.tensorflow.keras.watch import watch
from hvdlab.tensorflow.reduction import Groups
from hvdlab.tensorflow.tape import chosen_groups, local_variables

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DivergenceError",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "is_version_greater_equal_than",
    "load_model",
    "local_rank",
    "local_size",
    "metric",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "record",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "watch",
    "watch_divergence",
]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer of Keras that reduces gradients over all ranks before it applies them.

    The arguments are those of :func:`hvdlab.tensorflow.DistributedOptimizer`. It has the class's name and the settings of
    ``optimizer``, and its state if there is one, and can be given to ``model.compile``. With loss scaling
    (mixed precision) gradients are reduced before they are found finite or not, so all ranks agree.
    """
    return distributed(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=chosen_groups(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """:func:`DistributedOptimizer` that leaves the gradients of some layers on their rank.

    Args:
        optimizer: See there, as for the other arguments.
        local_layers: A Keras layer, or a list of them, whose trainable weights are local; they must be built.
    """
    made = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in local_variables(local_layers):
        made.register_local_var(variable)
    return made


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model whose optimizer is distributed, with its state; saved with or without hvdlab.

    Args:
        filepath: What ``tf.keras.models.load_model`` takes.
        custom_optimizers: Further classes of optimizers that may be in the file.
        custom_objects: Further classes and functions that may be in the file, by name. For an optimizer in a ``.keras`` or ``.h5`` file it may be a
            function that makes it of its settings, distributed or not.
        compression: Of the distributed optimizer.
        legacy_opts: Changes nothing: optimizers of every kind are found.

    Returns:
        The model; without an optimizer if none was saved.

    Raises:
        ValueError: The file can't be read, or needs a class that is not known.
    """
    return models.load_model(tf.keras, filepath, custom_optimizers, custom_objects, compression)
