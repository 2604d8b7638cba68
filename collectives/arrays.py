"""Conversion between numpy's types and the core's element types."""

from __future__ import annotations

from typing import Any

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
