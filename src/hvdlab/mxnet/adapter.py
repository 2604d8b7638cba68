"""Adapter of MXNet's arrays for the bindings.

A *direct* array (dense, on the CPU) shares its memory with the core, without a copy. One on another device is *staged*: the core
works on a copy in host memory. MXNet runs operations on arrays later, on threads of its own; the core waits for an array's operations
before it uses the array's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx  # pyright: ignore[reportMissingImports]
import numpy as np
import numpy.typing as npt

from hvdlab.bindings.kvstore_arrays import mxnet_memory, wait_to_write_mxnet
from hvdlab.bindings.operations import Binding
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.planes.base import dtype_of
from hvdlab.collectives.types import DType, OpKind

NDArray = Any
"""An ``mx.nd.NDArray``; MXNet has no types."""

_DTYPES: dict[Any, DType | None] = {}


class MXNetAdapter:
    """Adapter of MXNet's arrays; see :class:`hvdlab.bindings.adapter.FrameworkAdapter`."""

    def check(self, value: Any, kind: OpKind, in_place: bool) -> NDArray:
        if not isinstance(value, mx.nd.NDArray):
            raise InvalidRequestError(f"{kind.label} takes an mx.nd.NDArray, not {type(value).__name__}.")
        if value.stype != "default":
            raise UnsupportedError(
                f"{kind.label} takes dense arrays; this one is {value.stype}. Give tostype('default')."
            )
        return value

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, mx.nd.NDArray)

    def dtype(self, tensor: NDArray) -> DType:
        if tensor.dtype not in _DTYPES:
            _DTYPES[tensor.dtype] = dtype_of(np.empty(0, tensor.dtype))
        dtype = _DTYPES[tensor.dtype]
        if dtype is None:
            raise UnsupportedError(f"arrays of {np.dtype(tensor.dtype)} can't be sent; use astype() first.")
        return dtype

    def shape(self, tensor: NDArray) -> tuple[int, ...]:
        shape: tuple[int, ...] = tensor.shape
        return shape

    def is_direct(self, tensor: NDArray) -> bool:
        return bool(tensor.context.device_type.startswith("cpu"))

    def host_view(self, tensor: NDArray) -> npt.NDArray[Any]:
        wait_to_write_mxnet(tensor)
        return mxnet_memory(tensor)

    def stage(self, tensor: NDArray) -> NDArray:
        return tensor.copyto(mx.cpu())

    def empty_like(self, tensor: NDArray) -> NDArray:
        return mx.nd.empty(tensor.shape, dtype=tensor.dtype)

    def empty(self, shape: tuple[int, ...], like: NDArray) -> NDArray:
        return mx.nd.empty(shape, dtype=like.dtype)

    def deliver(self, output: NDArray, into: NDArray) -> None:
        output.copyto(into)

    def placed(self, output: NDArray, like: NDArray) -> NDArray:
        return output.as_in_context(like.context)

    def mark_written(self, tensor: NDArray) -> None:
        """Do nothing, since MXNet does not notice writes in place: a backward pass that needs the old values is the user's error."""

    def requires_grad(self, tensors: Sequence[Any]) -> bool:
        return False

    def received_splits(self, counts: tuple[int, ...]) -> NDArray:
        return mx.nd.array(counts, dtype="int32")


ADAPTER = MXNetAdapter()
BINDING: Binding[Any] = Binding(ADAPTER)
"""Runs collectives on MXNet's arrays."""
