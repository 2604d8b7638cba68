"""Horovod's API for Keras on hvdlab's collective core: ``import hvdlab.keras as hvd``. Keras runs on TensorFlow.

Everything is that of :mod:`hvdlab.tensorflow.keras`, but for arguments that Horovod has there only.
"""

from __future__ import annotations

import importlib
from typing import Any

from hvdlab.bindings.arguments import Adasum, Average, Sum
from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.collectives.metrics.record import metric
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.keras import callbacks, elastic
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
from hvdlab.tensorflow.keras import DistributedOptimizer as _DistributedOptimizer
from hvdlab.tensorflow.keras import PartialDistributedOptimizer, models, values
from hvdlab.tensorflow.keras.divergence import DivergenceError, watch_divergence
from hvdlab.tensorflow.keras.recording import record
from hvdlab.tensorflow.keras.values import allgather, broadcast, reducescatter
from hvdlab.tensorflow.keras.watch import watch
from hvdlab.tensorflow.reduction import Groups

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DivergenceError",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
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
    num_groups: int = 0,
    groups: Groups = None,
) -> Any:
    """An optimizer of Keras that reduces gradients over all ranks; see :func:`hvdlab.tensorflow.keras.DistributedOptimizer`."""
    return _DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        num_groups=num_groups,
        groups=groups,
    )


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | int | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Reduce a value over all ranks; see :func:`hvdlab.tensorflow.keras.allreduce`.

    ``average`` is true by default, as in Horovod, and gives way to ``op``.
    """
    chosen = op if op is not None else Average if average in (True, None) else Sum
    return values.allreduce(
        value,
        name=name,
        op=chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model whose optimizer is distributed; see :func:`hvdlab.tensorflow.keras.load_model`."""
    keras = importlib.import_module("keras")
    return models.load_model(keras, filepath, custom_optimizers, custom_objects, compression)
