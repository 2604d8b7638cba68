"""The compressors of TensorFlow's tensors; see :mod:`hvdlab.bindings.compression`."""

from __future__ import annotations

from typing import Any

from hvdlab.bindings.compression import Compressor, NoneCompressor
from hvdlab.tensorflow.installed import tf

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Compressor that sends floating-point tensors as float16 (sums are accumulated in float32); leaves others as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype.is_floating:
            return tf.cast(tensor, tf.float16), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """The compressors that come with hvdlab."""

    none = NoneCompressor
    fp16 = FP16Compressor
