"""Compression of tensors for the way between ranks.

A compressor is a pair of functions, used as ``compression=`` of the collectives and of ``DistributedOptimizer``::

    small, context = compressor.compress(tensor)      # before the collective
    tensor = compressor.decompress(small, context)    # after it

Subclass :class:`Compressor` for one of your own; every rank must use the same.
"""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Interface of a compressor. Its functions must be differentiable if the collective is to be."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is sent, and whatever :meth:`decompress` needs besides."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Undo :meth:`compress` on what was received."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16 (sums are accumulated in float32); leaves others as they are."""

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
