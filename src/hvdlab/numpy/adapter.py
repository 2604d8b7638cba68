"""Adapter of numpy arrays, of objects that numpy can view as arrays, and of arrays of GPUs, for the bindings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvdlab.bindings.operations import Binding
from hvdlab.collectives.arrays import dtype_of
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.types import DType, OpKind
from hvdlab.numpy.device_arrays import ArraysOnDevices, DeviceArray, device_array

Array = npt.NDArray[Any]
AnyArray: TypeAlias = Any
"""An array of numpy's, or a :class:`DeviceArray`."""


class NumpyAdapter:
    """Adapter of arrays; see :class:`hvdlab.bindings.adapter.FrameworkAdapter`. Buffers, DLPack objects, numbers and lists are tensors, too."""

    def check(self, value: Any, kind: OpKind, in_place: bool) -> AnyArray:
        array = as_array(value)
        if in_place:
            _check_writable(value, array)
        return array

    def is_tensor(self, value: Any) -> bool:
        if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__dlpack__"):
            return True
        return device_array(value) is not None

    def dtype(self, tensor: AnyArray) -> DType:
        dtype = tensor.element_type() if isinstance(tensor, DeviceArray) else dtype_of(tensor)
        if dtype is None:
            if tensor.dtype.name == "bfloat16":  # of ml_dtypes
                return DType.BF16
            raise UnsupportedError(
                f"arrays of {tensor.dtype} can't be sent; convert to one of "
                f"{', '.join(d.label for d in DType)} (in native byte order) first."
            )
        return dtype

    def shape(self, tensor: AnyArray) -> tuple[int, ...]:
        found: tuple[int, ...] = tensor.shape
        return found

    def is_direct(self, tensor: AnyArray) -> bool:
        return type(tensor) is not DeviceArray and bool(tensor.flags.c_contiguous)

    def host_view(self, tensor: Array) -> Array:
        # Not by the name of the type, which numpy makes again each time: that cost more time than all other steps here.
        return tensor if dtype_of(tensor) is not None else tensor.view(np.uint16)

    def stage(self, tensor: AnyArray) -> AnyArray:
        return tensor.on_host() if isinstance(tensor, DeviceArray) else tensor.copy(order="C")

    def empty_like(self, tensor: AnyArray) -> AnyArray:
        return np.empty(tensor.shape, tensor.dtype)

    def empty(self, shape: tuple[int, ...], like: AnyArray) -> AnyArray:
        return np.empty(shape, like.dtype)

    def deliver(self, output: Any, into: AnyArray) -> None:
        if not isinstance(into, DeviceArray):
            np.copyto(into, output)
            return
        owner = output.owner if isinstance(output, DeviceArray) else into.from_host(output)
        into.owner[...] = owner

    def placed(self, output: Any, like: AnyArray) -> Any:
        return like.from_host(output) if isinstance(like, DeviceArray) else output

    def mark_written(self, tensor: AnyArray) -> None:
        """Do nothing: arrays are not differentiated."""

    def requires_grad(self, tensors: Sequence[Any]) -> bool:
        return False

    def received_splits(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        return counts


ADAPTER = NumpyAdapter()
BINDING: Binding[Any] = Binding(ADAPTER, ArraysOnDevices())
"""Runs collectives on arrays."""


def _check_writable(value: Any, array: AnyArray) -> None:
    if isinstance(array, DeviceArray):
        if array.is_readonly:
            raise InvalidRequestError("this array is read-only; the in-place call would have to write to it.")
        return
    if not array.flags.writeable:
        raise InvalidRequestError("this array is read-only; the in-place call would have to write to it.")
    if array is not value and array.base is None:
        raise InvalidRequestError(
            f"a {type(value).__name__} has no memory that the in-place call could write to; give an array."
        )


def as_array(value: Any) -> AnyArray:
    """Return an array of a user's value: its own memory if numpy can view it or it is an array of a GPU, otherwise a copy.

    Raises:
        UnsupportedError: It is a DLPack object that numpy can't import.
    """
    if type(value) is np.ndarray:
        return value
    on_device = device_array(value)
    if on_device is not None:
        return on_device
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
