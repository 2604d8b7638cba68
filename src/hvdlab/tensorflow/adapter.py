"""Adapter of TensorFlow's eager tensors for the bindings.

A tensor on the CPU shares its memory with the core, without a copy. Outside of functions a collective does not go through
TensorFlow's runtime: the calling thread waits in Python, so that Ctrl-C, call sites and errors are as in every other binding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.bindings.operations import Binding
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.types import DType, OpKind
from hvdlab.tensorflow.installed import internal, tf

_record = internal("eager.record")
_DTYPES: dict[Any, DType] = {tf.dtypes.as_dtype(dtype.label): dtype for dtype in DType}
_BITS = np.dtype(np.uint16)


class _Memory:
    """Memory of a tensor for numpy, as an array of no dimensions; keeps the tensor alive."""

    def __init__(self, tensor: Any, address: int, kind: np.dtype[Any]) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "shape": (),
            "typestr": kind.str,
            "data": (address, False),
            "version": 3,
        }


class TensorFlowAdapter:
    """Adapter of TensorFlow's tensors; see :class:`hvdlab.bindings.adapter.FrameworkAdapter`."""

    def check(self, value: Any, kind: OpKind, in_place: bool) -> Any:
        return as_tensor(value, kind)

    def is_tensor(self, value: Any) -> bool:
        return tf.is_tensor(value) or isinstance(value, np.ndarray)

    def dtype(self, tensor: Any) -> DType:
        return core_dtype(tensor)

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def is_direct(self, tensor: Any) -> bool:
        return "CPU" in tensor.device

    def host_view(self, tensor: Any) -> npt.NDArray[Any]:
        array = tensor._numpy_internal()
        half = tensor.dtype == tf.bfloat16
        if type(array) is np.ndarray:
            return array.view(_BITS) if half else array
        # _numpy_internal() copies a 0-d tensor, and memoryview() does not know bfloat16: find the memory's address.
        plain = tf.bitcast(tensor, tf.uint16) if half else tensor
        address = np.asarray(memoryview(plain)).__array_interface__["data"][0]
        return np.asarray(_Memory(plain, address, storage_type(_DTYPES[tensor.dtype])))

    def stage(self, tensor: Any) -> Any:
        copy = self.empty(tuple(tensor.shape), tensor)
        with tf.device("CPU:0"):
            np.copyto(self.host_view(copy), self.host_view(tf.identity(tensor)))
        return copy

    def empty_like(self, tensor: Any) -> Any:
        return self.empty(tuple(tensor.shape), tensor)

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        if not _has_gpu():  # a device scope costs as much as the rest
            return tf.raw_ops.Empty(shape=_shape_tensor(shape), dtype=like.dtype)
        with tf.device("CPU:0"):
            return tf.raw_ops.Empty(shape=_shape_tensor(shape), dtype=like.dtype)

    def deliver(self, output: Any, into: Any) -> None:
        into.assign(output)

    def placed(self, output: Any, like: Any) -> Any:
        with tf.device(like.device):
            return tf.identity(output)

    def mark_written(self, tensor: Any) -> None:
        raise AssertionError("tensors of TensorFlow are never written to")

    def requires_grad(self, tensors: Sequence[Any]) -> bool:
        watched = [tensor for tensor in tensors if isinstance(tensor, tf.Tensor)]
        return bool(watched) and bool(_record.should_record_backprop(watched))

    def received_splits(self, counts: tuple[int, ...]) -> Any:
        return tf.constant(counts, tf.int32)


@lru_cache(maxsize=1024)
def _shape_tensor(shape: tuple[int, ...]) -> Any:
    """Return a shape as a tensor. TensorFlow would make such a tensor of a tuple each time, which needs more time than the allocation."""
    return tf.constant(shape, tf.int32)


@cache
def _has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def as_tensor(value: Any, kind: OpKind) -> Any:
    """Make a tensor of a user's argument to a collective: a tensor, a variable, or any value that TensorFlow can convert.

    Raises:
        InvalidRequestError: TensorFlow can't convert ``value``; ``kind`` is for its text.
    """
    if isinstance(value, tf.Tensor):
        return value
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError, tf.errors.OpError):
        pass
    raise InvalidRequestError(f"{kind.label} takes a tf.Tensor, not {type(value).__name__}.")


def core_dtype(tensor: Any) -> DType:
    """Return the core's element type; raises ``UnsupportedError`` if there is none for this dtype (complex, strings, quantised, ...)."""
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        known = ", ".join(dtype.label for dtype in DType)
        hint = ""
        if tensor.dtype.is_complex:
            hint = " Send tf.math.real(tensor) and tf.math.imag(tensor) instead."
        elif tensor.dtype == tf.uint16:
            hint = " It can be gathered, broadcast and exchanged; cast it to int32 to reduce it."
        raise UnsupportedError(
            f"Collectives take {known}; this tensor is {tensor.dtype.name}.{hint}"
        ) from None


ADAPTER = TensorFlowAdapter()
BINDING = Binding(ADAPTER)
"""Runs collectives on eager tensors."""
