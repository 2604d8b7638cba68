"""The compressors of MXNet's arrays; see :mod:`hvdlab.bindings.compression`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlab.bindings.compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Compressor that sends floating-point arrays as float16; leaves others as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        if np.dtype(tensor.dtype).kind != "f":
            return tensor, None
        return tensor.astype("float16", copy=False), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tensor.astype(ctx, copy=False)


class Compression:
    """The compressors that come with hvdlab."""

    none = NoneCompressor
    fp16 = FP16Compressor
