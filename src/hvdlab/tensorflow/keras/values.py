"""Collectives on numbers, arrays and lists, whose results are tensors."""

from __future__ import annotations

from typing import Any

from hvdlab.bindings.arguments import Average
from hvdlab.collectives.types import ReduceOp
from hvdlab.tensorflow import mpi_ops
from hvdlab.tensorflow.compression import Compression, Compressor
from hvdlab.tensorflow.functions import plain_variable
from hvdlab.tensorflow.installed import tf


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
