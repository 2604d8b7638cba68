"""Horovod's API for Keras on hvdlab's collective core: ``import hvdlab.keras as hvd``. Keras runs on TensorFlow.

The names are those of :mod:`hvdlab.tensorflow.keras`; some functions have fewer arguments here, as in Horovod.

Example:
    >>> import keras
    >>> import hvdlab.keras as hvd
    >>> hvd.init()  # on every rank; a process that is no rank becomes a world of one
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size())), "mse", run_eagerly=True)
    >>> broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    >>> model.fit(keras.ops.ones((4, 2)), keras.ops.ones((4, 1)), verbose=0, callbacks=[broadcast]).epoch
    [0]
    >>> hvd.shutdown()
"""

from __future__ import annotations

import importlib
from typing import Any

from hvdlab.bindings.arguments import Adasum, Average, Sum
from hvdlab.bindings.monitoring import DivergenceError, metric
from hvdlab.collectives.process_sets import ProcessSet, global_process_set
from hvdlab.collectives.types import ReduceOp
from hvdlab.keras import callbacks, elastic
from hvdlab.tensorflow.compression import Compression, Compressor
from hvdlab.tensorflow.functions import broadcast_global_variables
from hvdlab.tensorflow.gradient_tape import Groups
from hvdlab.tensorflow.keras import DistributedOptimizer as _DistributedOptimizer
from hvdlab.tensorflow.keras import (
    PartialDistributedOptimizer,
    allgather,
    broadcast,
    optimizers,
    reducescatter,
)
from hvdlab.tensorflow.keras import allreduce as _allreduce
from hvdlab.tensorflow.keras.monitoring import record, watch, watch_divergence
from hvdlab.tensorflow.mpi_ops import (
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
    """Make an optimizer of Keras that reduces gradients over all ranks before it applies them.

    The result has the name of ``optimizer``'s class, its settings, and its state if there is any, and can be given to
    ``model.compile``. :func:`hvdlab.tensorflow.keras.DistributedOptimizer` has further arguments.

    Args:
        optimizer: An optimizer of Keras 3 or of Keras 2 (``tf_keras``).
        name: Beginning of the collectives' names; by default ``Distributed`` and the name of the optimizer's class.
        device_dense: Device for dense gradients, such as ``/cpu:0``; by default where they are.
        device_sparse: Device for ``tf.IndexedSlices``; by default where they are.
        compression: Applied to gradients that are sent, and undone on received ones.
        sparse_as_dense: Make sparse gradients dense before they are reduced.
        gradient_predivide_factor: For ``Average``: gradients are divided by this number before the sum, and the sum by the number
            of ranks over this number.
        op: ``hvd.Average`` or ``hvd.Sum``.
        num_groups: Deprecated form of ``groups``.
        groups: Number of groups of gradients that are reduced together, or a list of lists of variables; a variable in no list
            is reduced by itself. By default all gradients are reduced together, in a graph in buckets of up to 16 MiB.

    Returns:
        The new optimizer. Every rank must apply gradients alike. That raises ``MismatchError`` or ``AbortedError`` as
        ``hvd.allreduce`` does; the variables are unchanged then.

    Raises:
        InvalidRequestError: ``optimizer`` is no optimizer of Keras, or distributed already, or another argument is wrong.
        UnsupportedError: ``op`` is ``hvd.Adasum``, or Keras does not run on TensorFlow.
    """
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
    """Reduce a value over all ranks.

    Args:
        value: Anything that TensorFlow can convert to a tensor, of equal shape and dtype on every rank.
        name: Equal on all ranks. Calls without a name are matched in order.
        average: Whether to average (the default, as in Horovod) or to sum. Not used if ``op`` is given.
        prescale_factor: Multiplies the inputs.
        postscale_factor: Multiplies the result.
        op: ``hvd.Average``, ``hvd.Sum`` or ``hvd.Adasum``; by default according to ``average``.
        compression: Applied to tensors that are sent, and undone on received ones.

    Returns:
        A tensor.

    Raises:
        InvalidRequestError: An argument is wrong. Nothing was sent.
        NotInitializedError: ``init()`` was not called.
        MismatchError, AbortedError: The ranks disagree, or the reduction can't complete. ``value`` is untouched.
    """
    chosen = op if op is not None else Average if average in (True, None) else Sum
    return _allreduce(
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
    """Load a model, whether saved with hvdlab or without, and make its optimizer distributed, with its saved state.

    Args:
        filepath: A file that ``keras.models.load_model`` can load.
        custom_optimizers: Further classes of optimizers that may be in the file.
        custom_objects: Further classes and functions that may be in the file, by name. For the optimizer in a ``.keras`` or ``.h5``
            file this may be a function that makes the optimizer from its settings, distributed or not.
        compression: The compressor that the distributed optimizer sends gradients through.
        legacy_opts: Has no effect: optimizers of every kind are found.

    Returns:
        The model; without an optimizer if none was saved.

    Raises:
        ValueError: The file can't be read, or needs a class that is not known.
    """
    keras = importlib.import_module("keras")
    return optimizers.load_model(keras, filepath, custom_optimizers, custom_objects, compression)
