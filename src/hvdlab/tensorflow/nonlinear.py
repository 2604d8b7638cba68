"""Reductions that are no sums, as functions of all ranks' tensors in one, so that TensorFlow differentiates them.

For Min and Max, the gradient goes to the rank whose element was the smallest or largest (ranks that tie share it evenly). For
Product, each rank's is multiplied by the product of the other ranks' elements. For Adasum, it is the derivative of its formula.
"""

from __future__ import annotations

from typing import Any

from hvdlab.collectives.dtypes import ReduceOp
from hvdlab.collectives.reduce.adasum import levels
from hvdlab.tensorflow.installed import tf


def reduced(op: ReduceOp, stacked: Any, count: int, prescale: float, postscale: float) -> Any:
    """The reduction of the tensors of ``count`` ranks, which are stacked along dimension 0; differentiable.

    ``op`` is MIN, MAX, PRODUCT or ADASUM. float16 and bfloat16 are computed in float32, as by the core.
    """
    wide = tf.cast(stacked, tf.float32) if stacked.dtype in (tf.float16, tf.bfloat16) else stacked
    if prescale != 1.0:
        wide = wide * prescale
    if op is ReduceOp.MIN:
        result = tf.reduce_min(wide, 0)
    elif op is ReduceOp.MAX:
        result = tf.reduce_max(wide, 0)
    elif op is ReduceOp.PRODUCT:
        result = tf.reduce_prod(wide, 0)
    else:
        result = _adasum(tf.unstack(wide, count))
    if postscale != 1.0:
        result = result * postscale
    return tf.cast(result, stacked.dtype)


def _adasum(vectors: list[Any]) -> Any:
    """The Adasum of the vectors, by the formula in :mod:`hvdlab.collectives.reduce.adasum`."""
    for pairs in levels(len(vectors)):
        for a, b in pairs:
            common = _dot(vectors[a], vectors[b])
            vectors[a] = _share(vectors[a], common) + _share(vectors[b], common)
    return vectors[0]


def _share(vector: Any, common: Any) -> Any:
    square = _dot(vector, vector)
    # Divide by 1 where the square is 0: TensorFlow also differentiates the branch that tf.where does not choose, and a NaN there
    # would get into the gradient.
    factor = 1 - common / (2 * tf.where(square > 0, square, tf.ones_like(square)))
    return vector * tf.cast(factor, vector.dtype)


def _dot(a: Any, b: Any) -> Any:
    return tf.reduce_sum(tf.cast(a, tf.float64) * tf.cast(b, tf.float64))
