"""Memory that planes work on, wherever it is, and the numpy types that hold the core's element types.

A tensor of the host is a numpy array in *storage* type (``uint16`` for bfloat16, ``bool`` for bool), so that neither the engine
nor a plane needs a framework. A tensor on a device is only known by its address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.types import DType

_STORAGE: dict[DType, np.dtype[Any]] = {
    DType.BOOL: np.dtype(np.bool_),
    DType.U8: np.dtype(np.uint8),
    DType.I8: np.dtype(np.int8),
    DType.I16: np.dtype(np.int16),
    DType.I32: np.dtype(np.int32),
    DType.I64: np.dtype(np.int64),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(np.uint16),
    DType.F32: np.dtype(np.float32),
    DType.F64: np.dtype(np.float64),
}
# Without BF16: a uint16 array of a user's holds integers, and the core has no such element type.
_FROM_NUMPY = {storage: dtype for dtype, storage in _STORAGE.items() if dtype is not DType.BF16}


def storage_type(dtype: DType) -> np.dtype[Any]:
    """Return the numpy type that holds elements of ``dtype``; ``uint16`` holds bfloat16's bits."""
    return _STORAGE[dtype]


def dtype_of(array: npt.NDArray[Any]) -> DType | None:
    """Return the core's element type of a numpy array, or ``None`` if the core has none for it."""
    return _FROM_NUMPY.get(array.dtype)


HOST = "cpu"
"""The device class of the host's memory."""

HostArray: TypeAlias = npt.NDArray[Any]
"""C-contiguous, in storage type."""

HostArrays: TypeAlias = Sequence[HostArray] | HostArray
"""Equally long flat arrays in storage type. A two-dimensional array, of any strides, stands for its rows."""


class Buffer(Protocol):
    """C-contiguous memory on one device. A plane treats it as one-dimensional; its shape does not matter."""

    @property
    def pointer(self) -> int:
        """Return the address of the first element, in the address space of the device."""
        ...

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the extent of each dimension, in elements."""
        ...

    @property
    def dtype(self) -> DType:
        """Return the type of the elements."""
        ...

    @property
    def device(self) -> str:
        """Return the device class, such as ``cpu`` or ``cuda``; the same as that of the plane that works on it."""
        ...


class HostBuffer:
    """Buffer that is a numpy array.

    Args:
        array: In storage type, C-contiguous.
        dtype: Element type.
    """

    __slots__ = ("array", "dtype")

    def __init__(self, array: HostArray, dtype: DType) -> None:
        self.array = array
        self.dtype = dtype

    @property
    def pointer(self) -> int:
        address: int = self.array.__array_interface__["data"][0]
        return address

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def device(self) -> str:
        return HOST


Tensor: TypeAlias = HostArray | Buffer
"""The tensors in requests and results: an array of the host, or a buffer of any device."""


def buffer_of(tensor: Tensor, dtype: DType) -> Buffer:
    """Return a tensor as a plane takes it; an array in one dimension."""
    # Arrays are C-contiguous, so this is a view: the plane writes into the user's own output.
    return HostBuffer(tensor.reshape(-1), dtype) if isinstance(tensor, np.ndarray) else tensor


def host_view(tensor: Tensor | Buffer) -> HostArray:
    """Return the array of a tensor of the host.

    Raises:
        TypeError: It is on another device.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, HostBuffer):
        return tensor.array
    raise TypeError(f"a buffer on {tensor.device} can't be read by the host")
