"""Torch tensors as the core sees them: their dtypes, memory and devices, and torch's conversions of 16-bit floats.

A *direct* tensor (CPU, strided, contiguous) shares its memory with the core, without a copy. So does a contiguous CUDA tensor
if the process set has a data plane for CUDA. Any other tensor is *staged*: the core works on a contiguous copy, on the
tensor's device if the process set has a plane for it, otherwise in host memory.

The core's reductions convert float16 and bfloat16 by torch's vectorised code. On one core it takes 3 to 6 microseconds for 32,768
elements, where numpy takes 54 and 81 for float16, and 30 to round to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvdlab.bindings.operations import Binding
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.planes.base import HOST, Buffer
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.planes.gpu.device import DeviceFailed
from hvdlab.collectives.reduce import Conversion, register_conversion
from hvdlab.collectives.types import DType, OpKind

DTYPES: dict[torch.dtype, DType] = {
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
_OF_NUMPY = frozenset(DTYPES) - {torch.bfloat16}


@cache
def _type_string(dtype: torch.dtype) -> str:
    """Return numpy's name of an element type; numpy has no bfloat16, and the core stores it as words of 16 bits."""
    return _BITS.str if dtype is torch.bfloat16 else torch.empty(0, dtype=dtype).numpy().dtype.str


class _Elements:
    """Memory of a direct tensor, of which numpy makes an array that keeps this object.

    ``Tensor.numpy`` would do, but for a trace that it leaves: the tensor's storage can't be resized from then on.

    Args:
        tensor: The tensor, which lives as long as the array.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tensor.shape,
            "typestr": _type_string(tensor.dtype),
            "data": (tensor.data_ptr(), False),
        }


class TorchAdapter:
    """Adapter of torch's tensors; see :class:`hvdlab.bindings.adapter.FrameworkAdapter`."""

    def check(self, value: Any, kind: OpKind, in_place: bool) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise InvalidRequestError(f"{kind.label} takes a torch.Tensor, not {type(value).__name__}.")
        return value

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def dtype(self, tensor: torch.Tensor) -> DType:
        """Return the core's element type; raises ``UnsupportedError`` if the core has none for this dtype (complex, quantised, ...)."""
        try:
            return DTYPES[tensor.dtype]
        except KeyError:
            known = ", ".join(dtype.label for dtype in DType)
            raise UnsupportedError(
                f"Collectives take {known}; this tensor is {tensor.dtype}.{_way_out(tensor)}"
            ) from None

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tensor.shape

    def is_direct(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            # In memory, elements of a tensor with the negative bit have the opposite sign.
            and not tensor.is_neg()
        )

    def host_view(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        if tensor.numel() == 0 or not self.is_direct(tensor):
            # ``force`` lets parameters pass, of which numpy() refuses to make an array.
            bits = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
            array = bits.numpy(force=True)
            return array.view(_BITS) if tensor.dtype is torch.bfloat16 else array
        return np.asarray(_Elements(tensor))

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy in host memory (page-locked for a CUDA tensor, which makes its transfer fast).

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

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, requires_grad=False)

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype)

    def deliver(self, output: torch.Tensor, into: torch.Tensor) -> None:
        into.detach().copy_(output)

    def placed(self, output: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return output if like.is_cpu else output.to(like.device)

    def mark_written(self, tensor: torch.Tensor) -> None:
        # An inference tensor has no version, and no backward pass can have saved it.
        if not tensor.is_inference():
            # The core writes behind autograd's back: with a new version, a backward pass that has saved the tensor raises
            # an error instead of computing with the overwritten values.
            torch.autograd.graph.increment_version(tensor)

    def requires_grad(self, tensors: Sequence[Any]) -> bool:
        return torch.is_grad_enabled() and any(
            isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
        )

    def received_splits(self, counts: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(counts, dtype=torch.int32)


def _way_out(tensor: torch.Tensor) -> str:
    """Return a further sentence on the remedy for a tensor whose dtype the core does not know; empty if there is none."""
    if tensor.is_complex():
        return " Send torch.view_as_real(tensor) instead."
    if (
        tensor.is_floating_point() and tensor.element_size() == 1
    ):  # sums would be rounded to three bits, or to two
        return " Send tensor.view(torch.uint8) where it is only moved; cast it to bfloat16 or float32 to reduce it."
    return ""


class CudaTensors:
    """Device memory of CUDA tensors; see :class:`hvdlab.bindings.adapter.DeviceMemory`.

    A collective begins after the work that the submitting thread has put on the current stream of the tensor's device. When its
    handle is done the GPU has written the outputs, so that any stream may use them.
    """

    def device(self, tensor: torch.Tensor) -> str:
        return gpu_plane.CUDA if tensor.is_cuda and tensor.layout is torch.strided else HOST

    def is_direct(self, tensor: torch.Tensor) -> bool:
        return tensor.is_contiguous() and not tensor.is_neg()

    def view(self, tensor: torch.Tensor) -> Buffer:
        if torch.cuda.is_current_stream_capturing():
            raise InvalidRequestError(
                "A collective can't be captured in a CUDA graph: ranks agree on it each time. Put it between two graphs."
            )
        ordinal = tensor.device.index
        stream = torch.cuda.current_stream(ordinal).cuda_stream
        try:
            return gpu_plane.buffer_on_stream(
                tensor.data_ptr(), tuple(tensor.shape), DTYPES[tensor.dtype], ordinal, stream, tensor
            )
        except DeviceFailed as error:
            raise InvalidRequestError(f"The GPU of this rank: {error}") from error

    @contextmanager
    def views_together(self) -> Iterator[None]:
        try:
            with gpu_plane.marked_together():
                yield
        except DeviceFailed as error:
            raise InvalidRequestError(f"The GPU of this rank: {error}") from error

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty_like(tensor).copy_(tensor.detach())

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(tensor.shape, tensor)

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def received(self, output: torch.Tensor) -> torch.Tensor:
        # The engine's executor thread may have allocated it, on another stream: torch's allocator must not reuse the memory
        # before this stream is done with it.
        output.record_stream(torch.cuda.current_stream(output.device))
        return output


ADAPTER = TorchAdapter()
CUDA_TENSORS = CudaTensors()
BINDING = Binding(ADAPTER, CUDA_TENSORS)
"""Runs collectives on torch tensors."""


def plain_array(tensor: Any) -> npt.NDArray[Any] | None:
    """Return the memory of a tensor whose collectives need no further checks, ``None`` for any other value.

    Such a tensor is of no subclass, contiguous in host memory, and of an element type that numpy has.
    """
    # No other subclass: a DTensor, for example, shows a shape whose elements its own memory does not have.
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return None
    if not tensor.is_cpu or tensor.dtype not in _OF_NUMPY or not ADAPTER.is_direct(tensor):
        return None
    # host_view() would check once more whether it is direct.
    return np.asarray(_Elements(tensor)) if tensor.numel() else ADAPTER.host_view(tensor)


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous view of a tensor whose elements fill its memory in another order, such as ``channels_last``.

    The view has a further dimension of extent 1 at its end, so that its shape differs from that of every contiguous tensor of
    the same number of dimensions: the coordinator then finds that ranks with different memory orders disagree, instead of the
    core mixing up their elements. A tensor that is contiguous, or can't be viewed in this way, is returned as it is.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    view = tensor.permute(order)
    return view.unsqueeze(-1) if view.is_contiguous() else tensor


HalfArray = npt.NDArray[Any]


def _convert_f16(source: HalfArray, out: HalfArray) -> None:
    torch.from_numpy(out).copy_(_tensor(source))


def _widen_bf16(source: HalfArray, out: HalfArray) -> None:
    torch.from_numpy(out).copy_(_bf16(source))


def _narrow_bf16(source: HalfArray, out: HalfArray) -> None:
    _bf16(out).copy_(_tensor(source))


def _bf16(bits: HalfArray) -> torch.Tensor:
    return _tensor(bits.view(np.int16)).view(torch.bfloat16)


def _tensor(array: HalfArray) -> torch.Tensor:
    # torch warns of arrays that it can't write to, as the core's are when a small tensor came in a message.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def register_conversions() -> None:
    """Let the core convert 16-bit floats by torch from now on, in this process. Both conversions round to nearest even."""
    register_conversion(DType.F16, Conversion(_convert_f16, _convert_f16))
    register_conversion(DType.BF16, Conversion(_widen_bf16, _narrow_bf16))
