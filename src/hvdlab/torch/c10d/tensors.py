"""Torch's tensors as memory of the core: their own memory if the core can read and write it, else a copy, or bytes.

Where a ``device`` is given, it is the class of the memory that the core is to work in: the host's, or that of the tensor's device if the
group has a data plane for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy.typing as npt
import torch

from hvdlab.collectives.engine.requests import Result
from hvdlab.collectives.planes.buffers import HOST
from hvdlab.torch.adapter import ADAPTER, CUDA_TENSORS, DTYPES

Copy = Callable[[Result], None]
"""Copies the result of one request to the user's tensor."""


def resolved(tensor: torch.Tensor, device: str = HOST) -> torch.Tensor:
    """A tensor's elements in contiguous memory: the tensor's own memory if possible."""
    tensor = tensor.detach().cpu() if device == HOST else tensor.detach()
    return tensor.contiguous().resolve_conj().resolve_neg()


def plain_of(tensor: torch.Tensor, device: str = HOST) -> torch.Tensor:
    """The same as :func:`resolved`, but flat and as bytes if the core does not know the dtype."""
    tensor = resolved(tensor, device)
    return tensor if tensor.dtype in DTYPES else tensor.reshape(-1).view(torch.uint8)


def real_parts(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as its real and imaginary parts, each of which can be summed and averaged; others as they are."""
    return (
        torch.view_as_real(resolved(tensor) if tensor.is_conj() else tensor)
        if tensor.is_complex()
        else tensor
    )


def memory_of(plain: torch.Tensor, device: str) -> Any:
    """The memory of a plain tensor that is on this device."""
    return ADAPTER.host_view(plain) if device == HOST else CUDA_TENSORS.view(plain)


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return ADAPTER.host_view(plain_of(tensor))


def core_dtype(tensor: torch.Tensor) -> Any:
    return DTYPES.get(tensor.dtype, DTYPES[torch.uint8])


def writable_array(tensor: torch.Tensor, *, reducing: bool = False) -> tuple[npt.NDArray[Any], Copy | None]:
    """The same as :func:`writable`, in the host's memory and with the tensor's shape."""
    return writable(tensor, HOST, reducing=reducing)


def writable(
    tensor: torch.Tensor, device: str, *, reducing: bool = False, shape: tuple[int, ...] | None = None
) -> tuple[Any, Copy | None]:
    """Memory with a tensor's values that the core may write a result to.

    Args:
        tensor: The user's tensor.
        device: Class of the memory.
        reducing: Whether the core computes with the elements; it can only move those of a dtype that it does not know.
        shape: Of the memory, with -1 for one extent that follows from the others; by default the tensor's.

    Returns:
        The memory, and what copies the result to the tensor if the memory is not the tensor's own.

    Raises:
        UnsupportedError: ``reducing``, and the core does not know the dtype.
    """
    if reducing:
        ADAPTER.dtype(tensor)  # only for its error
    plain = plain_of(tensor, device)
    memory = memory_of(plain if shape is None else plain.reshape(shape), device)
    if plain.data_ptr() == tensor.data_ptr() and not (tensor.is_conj() or tensor.is_neg()):
        ADAPTER.mark_written(tensor)
        return memory, None

    def copy(result: Result) -> None:
        values = plain if plain.dtype == tensor.dtype else plain.view(tensor.dtype)
        tensor.detach().copy_(values.view(tensor.shape))

    return memory, copy


def scatter_into(outputs: Iterable[torch.Tensor], gathered: torch.Tensor, result: Result) -> None:
    """Copy what was received to the outputs, one after the other."""
    start = 0
    for output in outputs:
        stop = start + output.numel()
        output.detach().copy_(gathered[start:stop].view(output.shape))
        start = stop
