"""The compressors of torch tensors; see :mod:`hvdlab.bindings.compression`."""

from __future__ import annotations

from typing import Any

import torch

from hvdlab.bindings.compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Compressor that sends floating-point tensors as float16 (sums are accumulated in float32); leaves others as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype.is_floating_point:
            return tensor.to(torch.float16), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The compressors that come with hvdlab."""

    none = NoneCompressor
    fp16 = FP16Compressor
