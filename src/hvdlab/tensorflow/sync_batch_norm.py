"""``SyncBatchNormalization``: batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.mpi_ops import allgather, size_op

_Base: Any = tf.keras.layers.BatchNormalization


@tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
def _summed_gradient(tensor: Any) -> tuple[Any, Any]:
    """Return the tensor; its gradient is multiplied by the number of ranks, over which an allgather's gradient is averaged."""
    return tf.identity(tensor), lambda gradient: gradient * tf.cast(size_op(), gradient.dtype)


class SyncBatchNormalization(_Base):  # type: ignore[misc,unused-ignore]
    """A ``BatchNormalization`` layer whose mean and variance in training are those of all ranks' batches together.

    A rank's weight in these is its number of elements for each channel, without those that a mask leaves out. In training all ranks
    must run the forward and the backward pass alike.

    Args:
        fused: Only ``False``; the fused kernel is not supported.
        kwargs: The arguments of ``tf.keras.layers.BatchNormalization``. By default Keras names the layer by its class.

    Raises:
        InvalidRequestError: ``fused`` is ``True`` or ``None``.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise InvalidRequestError("SyncBatchNormalization does not support fused=True.")
        if "name" not in kwargs:
            kwargs["name"] = None
        if hasattr(_Base, "_fused_can_be_used"):  # Keras 2: otherwise it uses its own moments
            kwargs["fused"] = False
        super().__init__(**kwargs)

    def _over_all_ranks(self, inputs: Any, axes: list[int], keep: bool, mask: Any) -> tuple[Any, Any]:
        """Return mean and biased variance over all ranks, from one allgather of each rank's count, mean and sum of squared deviations.

        A variance from sums of squares would be lost in rounding where it is small beside the mean. The formula for parts is that of
        Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
        """
        wide = tf.cast(inputs, tf.float32) if inputs.dtype in (tf.float16, tf.bfloat16) else inputs
        weights = tf.ones_like(wide)
        if mask is not None:
            weights = tf.broadcast_to(tf.cast(mask, wide.dtype)[..., None], tf.shape(wide))
        count = tf.reduce_sum(weights, axes, keepdims=True)
        # A mask can leave a rank without elements: its NaN, though of weight 0, would spread to all ranks.
        mean = tf.math.divide_no_nan(tf.reduce_sum(wide * weights, axes, keepdims=True), count)
        squares = tf.reduce_sum(weights * tf.math.squared_difference(wide, mean), axes, keepdims=True)
        kept = tf.shape(mean)
        parts = tf.stack([tf.reshape(each, [-1]) for each in (count, mean, squares)])
        every = allgather(_summed_gradient(parts[None]), name=f"{self.name}.moments")
        counts, means, deviations = every[:, 0], every[:, 1], every[:, 2]
        elements = tf.reduce_sum(counts, 0)
        mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), elements)
        between = tf.reduce_sum(counts * tf.math.squared_difference(means, mean), 0)
        variance = tf.math.divide_no_nan(tf.reduce_sum(deviations, 0) + between, elements)
        shape = kept if keep else tf.shape(mean)
        return tf.reshape(mean, shape), tf.reshape(variance, shape)

    def _moments(self, inputs: Any, *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
        """Return the mean and variance. Keras 3 calls it with inputs and a mask, Keras 2 also with the axes and ``keep_dims``."""
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
        """Return the mean and variance. Keras 2 calls it in ``_moments``."""
        return self._over_all_ranks(inputs, list(reduction_axes), keep_dims, mask)

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        config.pop("synchronized", None)  # an argument of Keras for its own distribution strategies
        return config
