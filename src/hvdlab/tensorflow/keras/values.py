"""Collectives on what Keras users have: numbers, arrays, lists. Outside of functions results are arrays, as Keras' values are."""

from __future__ import annotations

from typing import Any

from hvdlab.bindings.arguments import Average
from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.tensorflow import ops
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
        value: Anything that TensorFlow makes a tensor of, of equal shape and dtype on every rank.
        name: Equal on all ranks.
        average: Deprecated form of ``op``.
        prescale_factor: Multiplies the inputs.
        postscale_factor: Multiplies the result.
        op: ``hvd.Average`` (default), ``hvd.Sum``, ...
        compression: Applied to what is sent, and undone on what is received.

    Returns:
        An array (a numpy number for a single one); in a function a tensor.
    """
    return _as_value(
        ops.allreduce(
            _tensor(value),
            average=average,
            op=op,
            name=name,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the values of all ranks along dimension 0; see :func:`allreduce`."""
    return _as_value(ops.allgather(_tensor(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The value of one rank; see :func:`allreduce`."""
    return _as_value(ops.broadcast(_tensor(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: ReduceOp | int = Average) -> Any:
    """This rank's rows of the values reduced over all ranks; see :func:`allreduce`."""
    return _as_value(ops.reducescatter(_tensor(value), name=name, op=op))


def _tensor(value: Any) -> Any:
    return tf.convert_to_tensor(plain_variable(value))


def _as_value(tensor: Any) -> Any:
    return tensor.numpy() if hasattr(tensor, "numpy") and tf.executing_eagerly() else tensor
