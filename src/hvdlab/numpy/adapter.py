"""Adapter of numpy arrays, of objects that numpy can view as arrays, and of arrays of GPUs, for the bindings."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from hvdlab.bindings.operations import Binding
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.planes.base import HOST, Buffer, dtype_of
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.planes.gpu.device import DeviceFailed
from hvdlab.collectives.types import DType, OpKind


class DeviceArray:
    """An array of a GPU.

    Args:
        owner: The user's array, or a new one of the same package.
        described: Its ``__cuda_array_interface__``, or the same made of its DLPack capsule.
        capsule: The capsule, which keeps its memory.

    Attributes:
        owner: As given.
        pointer: Address of its first element.
        shape, dtype, is_contiguous, is_readonly: As numpy means them.
        stream: The stream that it is ready on, as the interface counts streams; ``None`` if it may be used at once.
    """

    def __init__(self, owner: Any, described: dict[str, Any], capsule: object = None) -> None:
        self.owner, self._capsule = owner, capsule
        self.pointer, self.is_readonly = described["data"]
        self.shape: tuple[int, ...] = tuple(described["shape"])
        self.dtype = np.dtype(described["typestr"])
        self.stream: int | None = described.get("stream")
        strides = described.get("strides")
        self.is_contiguous = strides is None or _is_contiguous(
            self.shape, tuple(strides), self.dtype.itemsize
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def element_type(self) -> DType | None:
        """Return the core's element type; ``None`` if the core has none for this array's."""
        return dtype_of(np.empty(0, self.dtype))

    def namespace(self) -> Any:
        """Return the functions of the array's package.

        Raises:
            UnsupportedError: The package has none by the array API's standard, and is not CuPy, whose arrays don't name theirs.
        """
        find = getattr(self.owner, "__array_namespace__", None)
        if find is None and type(self.owner).__module__.partition(".")[0] == "cupy":
            return sys.modules["cupy"]
        if find is None:
            raise UnsupportedError(
                f"{_name(self.owner)} has no __array_namespace__, by which hvdlab makes new arrays; use a call in place "
                "on a C-contiguous array (with a data plane for CUDA), or give a CuPy array."
            )
        return find()

    def copy(self) -> DeviceArray:
        """Return a C-contiguous copy, on its GPU."""
        made = self.empty(self.shape)
        if made.pointer != self.pointer:
            made.owner[...] = self.owner
        return device_array(made.owner) or made

    def empty(self, shape: tuple[int, ...]) -> DeviceArray:
        """Return a new array of its package, type and GPU."""
        device: Any = getattr(self.owner, "device", None)
        current: Any = device if hasattr(device, "__enter__") else contextlib.nullcontext()
        # CuPy makes arrays on the calling thread's current device. The executor thread calls this, too, and
        # has one of its own.
        with current:
            made = device_array(self.namespace().empty(shape, dtype=self.owner.dtype))
        assert made is not None, f"{_name(self.owner)}'s package made an array that is on no GPU"
        return made

    def on_host(self) -> Array:
        """Return a copy in host memory, for a process set without a data plane for CUDA."""
        get = getattr(self.owner, "get", None)
        if get is None:
            raise UnsupportedError(
                f"there is no data plane for CUDA here, and {_name(self.owner)} has no get() to copy it to the host; copy it yourself."
            )
        return np.asarray(get(), order="C")

    def from_host(self, array: Array) -> Any:
        """Return a new array of its package with these elements."""
        made = self.empty(array.shape)
        made.owner.set(array)
        return made.owner


class ArraysOnDevices:
    """Device memory of arrays; see :class:`hvdlab.bindings.adapter.DeviceMemory`."""

    def device(self, tensor: Array | DeviceArray) -> str:
        return gpu_plane.CUDA if isinstance(tensor, DeviceArray) else HOST

    def is_direct(self, tensor: Any) -> bool:
        found: bool = tensor.is_contiguous
        return found

    def view(self, tensor: Any) -> Buffer:
        dtype = tensor.element_type()
        assert dtype is not None, "types that can't be sent were refused"
        try:
            ordinal = gpu_plane.gpus().ordinal_of(tensor.pointer) if tensor.pointer else 0
            if tensor.stream is None:
                return gpu_plane.CudaBuffer(tensor.pointer, tensor.shape, dtype, ordinal, None, tensor)
            return gpu_plane.buffer_on_stream(
                tensor.pointer, tensor.shape, dtype, ordinal, tensor.stream, tensor
            )
        except DeviceFailed as error:
            raise InvalidRequestError(f"the GPU of this rank: {error}") from error

    @contextlib.contextmanager
    def views_together(self) -> Iterator[None]:
        try:
            with gpu_plane.marked_together():
                yield
        except DeviceFailed as error:
            raise InvalidRequestError(f"the GPU of this rank: {error}") from error

    def stage(self, tensor: Any) -> Any:
        return tensor.copy()

    def empty_like(self, tensor: Any) -> Any:
        return tensor.empty(tensor.shape)

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        return like.empty(shape)

    def received(self, output: Any) -> Any:
        return output.owner


def device_array(value: Any) -> DeviceArray | None:
    """Return an array of a GPU as hvdlab uses it; ``None`` for other objects."""
    if isinstance(value, DeviceArray):
        return value
    described = getattr(value, "__cuda_array_interface__", None)
    if isinstance(described, dict):
        return DeviceArray(value, described)
    if isinstance(value, np.ndarray | np.generic) or not hasattr(value, "__dlpack_device__"):
        return None
    if int(value.__dlpack_device__()[0]) != _DLPACK_CUDA:
        return None
    capsule = value.__dlpack__(stream=_LEGACY_STREAM)  # from then on that stream waits for the array
    return DeviceArray(value, _described(capsule), capsule)


class _DLTensor(ctypes.Structure):
    """Beginning of the structure in a DLPack capsule."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DLPACK_CUDA, _LEGACY_STREAM = 2, 1
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
"""What numpy calls DLPack's types of elements."""


def _described(capsule: object) -> dict[str, Any]:
    """Return a capsule's content as ``__cuda_array_interface__`` describes it.

    Raises:
        UnsupportedError: numpy has no name for its elements.
    """
    find = ctypes.pythonapi.PyCapsule_GetPointer
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(find(capsule, b"dltensor"))
    if tensor.code not in _KINDS or tensor.lanes != 1:
        raise UnsupportedError(
            f"DLPack's elements of type {tensor.code} with {tensor.bits} bits can't be sent."
        )
    itemsize = tensor.bits // 8
    strides = tuple(itemsize * tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    return {
        # ctypes has ``None`` for a null pointer, as an array without elements has it.
        "data": ((tensor.data or 0) + tensor.byte_offset, False),
        "shape": tuple(tensor.shape[i] for i in range(tensor.ndim)),
        "typestr": f"{_KINDS[tensor.code]}{itemsize}",
        "strides": strides,
        "stream": _LEGACY_STREAM,
    }


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if 0 in shape:
        return True
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _name(owner: Any) -> str:
    return f"{type(owner).__module__}.{type(owner).__qualname__}"


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
        # As a buffer first: numpy would make a string of ``bytes``.
        return np.asarray(memoryview(anything))
    except TypeError:
        return np.asarray(anything)
