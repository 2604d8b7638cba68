"""Horovod's API for ``tf.keras`` on hvdlab's collective core: ``import hvdlab.tensorflow.keras as hvd``.

``tf.keras`` is Keras 3, or Keras 2 (``tf_keras``) if TF_USE_LEGACY_KERAS=1 is set. The functions accept optimizers and models of both.

Example:
    >>> import keras
    >>> import hvdlab.tensorflow.keras as hvd
    >>> hvd.init()  # on every rank; a process that is no rank becomes a world of one
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size())), "mse", run_eagerly=True)
    >>> broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    >>> model.fit(keras.ops.ones((4, 2)), keras.ops.ones((4, 1)), verbose=0, callbacks=[broadcast]).epoch
    [0]
    >>> hvd.shutdown()
"""

from __future__ import annotations

from typing import Any

from hvdlab.bindings.arguments import Average, Sum
from hvdlab.bindings.monitoring import DivergenceError, metric
from hvdlab.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvdlab.collectives.types import ReduceOp
from hvdlab.horovod.common.util import is_version_greater_equal_than
from hvdlab.tensorflow import mpi_ops
from hvdlab.tensorflow.compression import Compression, Compressor
from hvdlab.tensorflow.functions import broadcast_global_variables, plain_variable
from hvdlab.tensorflow.gradient_tape import Groups, chosen_groups, local_variables
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.keras import callbacks, elastic, optimizers
from hvdlab.tensorflow.keras.monitoring import record, watch, watch_divergence
from hvdlab.tensorflow.keras.optimizers import distributed
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
    """Make an optimizer of Keras that reduces gradients over all ranks before it applies them.

    The result has the name of ``optimizer``'s class, its settings, and its state if there is any, and can be given to
    ``model.compile``. With loss scaling (mixed precision) gradients are reduced before Keras checks whether they are finite, so
    that all ranks skip the same steps.

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
        backward_passes_per_step: How often gradients are computed, and added up on the rank, before they are reduced and applied.
        average_aggregated_gradients: Whether the sum over the passes of a step is divided by their number.
        num_groups: Deprecated form of ``groups``.
        groups: Number of groups of gradients that are reduced together, or a list of lists of variables; a variable in no list
            is reduced by itself. By default all gradients are reduced together, in a graph in buckets of up to 16 MiB.
        process_set: The ranks that take part; all by default.
        scale_local_gradients: Whether gradients of local variables (see ``register_local_var``) are divided by the
            number of ranks, which makes them as large as averages.

    Returns:
        The new optimizer; ``optimizer`` itself is unchanged. Every rank must apply gradients alike. That raises ``MismatchError``
        or ``AbortedError`` as ``hvd.allreduce`` does; the variables are unchanged then.

    Raises:
        InvalidRequestError: ``optimizer`` is no optimizer of Keras, or distributed already, or another argument is wrong.
        UnsupportedError: ``op`` is ``hvd.Adasum``, or Keras does not run on TensorFlow.
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
    """Return a :func:`DistributedOptimizer` that leaves the gradients of some layers on their rank.

    Args:
        optimizer: An optimizer of Keras 3 or of Keras 2 (``tf_keras``).
        name, device_dense, device_sparse, compression, sparse_as_dense: As for :func:`DistributedOptimizer`.
        gradient_predivide_factor, op, backward_passes_per_step: Likewise.
        average_aggregated_gradients, groups, process_set, scale_local_gradients: Likewise.
        local_layers: A Keras layer, or a list of them, whose trainable weights are local: their gradients are not reduced. They
            must be built.

    Returns:
        The new optimizer. Applying gradients raises ``MismatchError`` or ``AbortedError`` if the collective fails;
        the variables are unchanged then.

    Raises:
        InvalidRequestError, UnsupportedError: As by :func:`DistributedOptimizer`, or ``local_layers`` has other objects than layers.
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
    """Load a model, whether saved with hvdlab or without, and make its optimizer distributed, with its saved state.

    Args:
        filepath: A file that ``tf.keras.models.load_model`` can load.
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
    return optimizers.load_model(tf.keras, filepath, custom_optimizers, custom_objects, compression)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | int | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Reduce a value over all ranks.

    Args:
        value: Anything that TensorFlow can convert to a tensor, of equal shape and dtype on every rank.
        name: Equal on all ranks. Calls without a name are matched in order.
        average: Deprecated form of ``op``: true stands for ``Average``, false for ``Sum``.
        prescale_factor: Multiplies the inputs.
        postscale_factor: Multiplies the result.
        op: ``hvd.Average`` (default), ``hvd.Sum``, or another operator of ``hvdlab.tensorflow``.
        compression: Applied to tensors that are sent, and undone on received ones.

    Returns:
        A tensor.

    Raises:
        InvalidRequestError: An argument is wrong. Nothing was sent.
        NotInitializedError: ``init()`` was not called.
        MismatchError, AbortedError: The ranks disagree, or the reduction can't complete. ``value`` is untouched.
    """
    return mpi_ops.allreduce(
        _tensor(value),
        average=average,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the values of all ranks along dimension 0, in the order of the ranks.

    Args:
        value: Anything that TensorFlow can convert to a tensor; dtype and dimensions but the first are equal on every rank.
        name: Equal on all ranks. Calls without a name are matched in order.

    Returns:
        A tensor.

    Raises:
        InvalidRequestError, NotInitializedError, MismatchError, AbortedError: As by :func:`allreduce`.
    """
    return mpi_ops.allgather(_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return ``root_rank``'s value on every rank.

    Args:
        value: Anything that TensorFlow can convert to a tensor, of equal shape and dtype on every rank.
        root_rank: The rank whose value all get.
        name: Equal on all ranks. Calls without a name are matched in order.

    Returns:
        A tensor.

    Raises:
        InvalidRequestError, NotInitializedError, MismatchError, AbortedError: As by :func:`allreduce`.
    """
    return mpi_ops.broadcast(_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp | int = Average) -> Any:
    """Reduce a value over all ranks, and return this rank's rows of the result.

    Args:
        value: Anything that TensorFlow can convert to a tensor of at least one dimension, of equal shape and dtype on every rank.
        name: Equal on all ranks. Calls without a name are matched in order.
        op: ``hvd.Average`` (default), ``hvd.Sum``, or another operator of ``hvdlab.tensorflow`` but ``Adasum``.

    Returns:
        A tensor.

    Raises:
        InvalidRequestError, NotInitializedError, MismatchError, AbortedError: As by :func:`allreduce`.
    """
    return mpi_ops.reducescatter(_tensor(value), name=name, op=op)


def _tensor(value: Any) -> Any:
    return tf.convert_to_tensor(plain_variable(value))
