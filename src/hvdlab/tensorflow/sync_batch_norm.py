"""``SyncBatchNormalization``: batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

from hvdlab.bindings.arguments import Sum
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.ops import allreduce

_Base: Any = tf.keras.layers.BatchNormalization


class SyncBatchNormalization(_Base):  # type: ignore[misc,unused-ignore]
    """A ``BatchNormalization`` layer whose mean and variance in training are those of all ranks' batches together.

    Every rank counts as much as it has examples, or elements that no mask leaves out. All ranks must call it alike, in the forward pass and in the backward
    pass.

    Args:
        fused: Not supported; only ``False``.
        kwargs: What ``tf.keras.layers.BatchNormalization`` takes. Without a ``name`` the layer has a name of its class.

    Raises:
        InvalidRequestError: ``fused=True``.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise InvalidRequestError("SyncBatchNormalization does not support fused=True.")
        if "name" not in kwargs:
            kwargs["name"] = None
        if hasattr(_Base, "_fused_can_be_used"):  # Keras 2, whose fused kernel computes the moments itself
            kwargs["fused"] = False
        super().__init__(**kwargs)

    def _over_all_ranks(self, inputs: Any, axes: list[int], keep: bool, mask: Any) -> tuple[Any, Any]:
        """Mean and variance over all ranks, from one reduction of count, sums and sums of squares."""
        wide = tf.cast(inputs, tf.float32) if inputs.dtype in (tf.float16, tf.bfloat16) else inputs
        if mask is None:
            total, squares = tf.reduce_sum(wide, axes), tf.reduce_sum(wide * wide, axes)
            elements = tf.cast(tf.size(wide), wide.dtype)
        else:
            weights = tf.broadcast_to(tf.cast(mask, wide.dtype)[..., None], tf.shape(wide))
            total = tf.reduce_sum(wide * weights, axes)
            squares = tf.reduce_sum(wide * wide * weights, axes)
            elements = tf.reduce_sum(weights)
        count = elements / tf.cast(tf.size(total), wide.dtype)
        flat = [tf.reshape(total, [-1]), tf.reshape(squares, [-1]), [count]]
        sums = allreduce(tf.concat(flat, 0), op=Sum, name=f"{self.name}.moments")
        features = tf.size(total)
        mean = tf.math.divide_no_nan(sums[:features], sums[-1])
        variance = tf.maximum(tf.math.divide_no_nan(sums[features:-1], sums[-1]) - mean * mean, 0)
        shape = tf.shape(tf.reduce_sum(wide, axes, keepdims=True)) if keep else tf.shape(total)
        return tf.reshape(mean, shape), tf.reshape(variance, shape)

    def _moments(self, inputs: Any, *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
        """What Keras asks for: Keras 3 by inputs and a mask; Keras 2 by inputs, axes, whether to keep these, and a mask."""
        if hasattr(_Base, "_calculate_mean_and_var"):
            found: tuple[Any, Any] = super()._moments(inputs, *arguments, **keywords)
            return found
        mask = arguments[0] if arguments else keywords.get("mask")
        return self._over_all_ranks(inputs, self._reduced_axes(inputs), keep=False, mask=mask)

    def _reduced_axes(self, inputs: Any) -> list[int]:
        rank = inputs.shape.rank
        kept = [axis % rank for axis in (self.axis if isinstance(self.axis, list | tuple) else [self.axis])]
        return [axis for axis in range(rank) if axis not in kept]

    def _calculate_mean_and_var(
        self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None
    ) -> tuple[Any, Any]:
        """What Keras 2 computes the moments by."""
        return self._over_all_ranks(inputs, list(reduction_axes), keep_dims, mask)

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        config.pop("synchronized", None)  # that is MultiWorkerMirroredStrategy's
        return config
