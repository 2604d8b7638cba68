"""What hvdlab's bindings know of numpy arrays, and of what numpy can view as an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.bindings.operations import Binding
from hvdlab.collectives.arrays import dtype_of
from hvdlab.collectives.dtypes import DType, OpKind
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError

Array = npt.NDArray[Any]


class NumpyAdapter:
    """See :class:`hvdlab.bindings.adapter.Adapter`. Buffers, DLPack objects, numbers and lists are tensors, too."""

    def check(self, value: Any, kind: OpKind, in_place: bool) -> Array:
        array = as_array(value)
        if in_place:
            _check_writable(value, array)
        return array

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, np.ndarray | np.generic) or hasattr(value, "__dlpack__")

    def dtype(self, tensor: Array) -> DType:
        dtype = dtype_of(tensor)
        if dtype is None:
            if tensor.dtype.name == "bfloat16":  # of ml_dtypes
                return DType.BF16
            raise UnsupportedError(
                f"arrays of {tensor.dtype} can't be sent; convert to one of "
                f"{', '.join(d.label for d in DType)} (in native byte order) first."
            )
        return dtype

    def shape(self, tensor: Array) -> tuple[int, ...]:
        return tensor.shape

    def is_direct(self, tensor: Array) -> bool:
        return tensor.flags.c_contiguous

    def host_view(self, tensor: Array) -> Array:
        # Not by the name of the type, which numpy makes anew each time: that took longer than all else here.
        return tensor if dtype_of(tensor) is not None else tensor.view(np.uint16)

    def stage(self, tensor: Array) -> Array:
        return tensor.copy(order="C")

    def empty_like(self, tensor: Array) -> Array:
        return np.empty(tensor.shape, tensor.dtype)

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        return np.empty(shape, like.dtype)

    def deliver(self, output: Array, into: Array) -> None:
        np.copyto(into, output)

    def placed(self, output: Array, like: Array) -> Array:
        return output

    def mark_written(self, tensor: Array) -> None:
        """Arrays are not differentiated."""

    def requires_grad(self, tensors: Sequence[Any]) -> bool:
        return False

    def received_splits(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        return counts


ADAPTER = NumpyAdapter()
BINDING = Binding(ADAPTER)
"""Runs collectives on numpy arrays."""


def _check_writable(value: Any, array: Array) -> None:
    if not array.flags.writeable:
        raise InvalidRequestError("this array is read-only; the in-place call would have to write to it.")
    if array is not value and array.base is None:
        raise InvalidRequestError(
            f"a {type(value).__name__} has no memory that the in-place call could write to; give an array."
        )


def as_array(value: Any) -> Array:
    """An array of what a user gave: its own memory if numpy can view that, else a copy.

    Raises:
        UnsupportedError: It is a DLPack object that numpy can't take over.
    """
    if type(value) is np.ndarray:
        return value
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic):
        try:
            return np.from_dlpack(value)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise UnsupportedError(
                f"numpy can't take over this {type(value).__module__}.{type(value).__qualname__} ({error}); "
                "it takes CPU tensors without gradient. For torch tensors use hvdlab.torch."
            ) from error
    anything: Any = value
    try:
        return np.asarray(memoryview(anything))
    except TypeError:
        return np.asarray(anything)
