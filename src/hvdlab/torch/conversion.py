"""Between torch tensors and the buffers of the collective core, without copying where memory allows it.

A *direct* tensor (CPU, strided, contiguous) shares its memory with the core. Any other one is *staged*: the core
works on a contiguous copy in host memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvdlab.collectives.dtypes import DType
from hvdlab.collectives.errors import UnsupportedError

_DTYPES: dict[torch.dtype, DType] = {
    torch.bool: DType.BOOL,
    torch.uint8: DType.U8,
    torch.int8: DType.I8,
    torch.int16: DType.I16,
    torch.int32: DType.I32,
    torch.int64: DType.I64,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.F32,
    torch.float64: DType.F64,
}
_BITS = np.dtype(np.uint16)


def core_dtype(tensor: torch.Tensor) -> DType:
    """The core's element type of a tensor; raises ``UnsupportedError`` if it has none (complex, quantised, ...)."""
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        known = ", ".join(dtype.label for dtype in DType)
        hint = " Send torch.view_as_real(tensor) instead." if tensor.is_complex() else ""
        raise UnsupportedError(f"Collectives take {known}; this tensor is {tensor.dtype}.{hint}") from None


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether the core can work on the tensor's own memory."""
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous view of a tensor whose elements fill its memory in another order, such as ``channels_last``.

    The view has an extent of 1 behind the others, so its shape is not that of any tensor of the same dimensions: ranks
    whose memory is in different orders disagree, instead of mixing up elements. What can't be viewed so, or is
    contiguous, is returned as it is.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    view = tensor.permute(order)
    return view.unsqueeze(-1) if view.is_contiguous() else tensor


def staged(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory (page-locked for a CUDA tensor, which makes its transfer fast).

    Raises ``UnsupportedError`` for tensors without plain elements: sparse ones and those on the meta device.
    """
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"This collective takes dense tensors; this one has layout {tensor.layout}. Use hvd.allreduce or "
            "hvd.sparse_allreduce_async for a sparse COO tensor, or give tensor.to_dense()."
        )
    if tensor.is_meta:
        raise UnsupportedError("A tensor on the meta device has no data to communicate.")
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach())


def storage_view(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A numpy array over the memory of a direct tensor, in the core's storage type; it keeps that memory alive."""
    if tensor.dtype is torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(_BITS)
    return tensor.numpy(force=True)


class OutputAllocator:
    """Allocates the output of a collective as a torch tensor once its shape is known.

    The core calls it, on its executor thread.
    """

    __slots__ = ("_dtype", "_tensor")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensor: torch.Tensor | None = None

    def __call__(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        self._tensor = torch.empty(shape, dtype=self._dtype)
        return storage_view(self._tensor)

    @property
    def allocated(self) -> torch.Tensor:
        """The output; only after the collective is complete."""
        assert self._tensor is not None, "the core completed a collective without asking for its output"
        return self._tensor
