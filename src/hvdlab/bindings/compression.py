"""Compression of tensors for the way between ranks.

A compressor is a pair of functions, used as ``compression=`` of the collectives and of ``DistributedOptimizer``::

    small, context = compressor.compress(tensor)      # before the collective
    tensor = compressor.decompress(small, context)    # after it

Subclass :class:`Compressor` for one of your own; every rank must use the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Compressor:
    """Interface of a compressor. Its functions must be differentiable if the collective is to be."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and the context that :meth:`decompress` needs besides."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undo :meth:`compress` on a received tensor."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Compressor that sends tensors as they are."""

    @staticmethod
    def compress(tensor: T) -> tuple[T, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: T, ctx: Any) -> T:
        return tensor


def compressed(compressor: type[Compressor], tensor: T, run: Callable[[T], T]) -> T:
    """Run a collective on a compressed tensor, and decompress its result."""
    sent, context = compressor.compress(tensor)
    result: T = compressor.decompress(run(sent), context)
    return result


def all_compressed(
    compressor: type[Compressor], tensors: Sequence[T], run: Callable[[list[T]], Sequence[T]]
) -> list[T]:
    """Run a grouped collective on compressed tensors, and decompress its results."""
    pairs = [compressor.compress(tensor) for tensor in tensors]
    outputs = run([sent for sent, _ in pairs])
    return [
        compressor.decompress(output, context) for output, (_, context) in zip(outputs, pairs, strict=True)
    ]
