"""``hvdlab.numpy`` in a process with a simulated GPU, and a package of arrays there, as CuPy is one on real GPUs."""

from __future__ import annotations

import ctypes
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.numpy import *  # ranks import this module in its place
from support.fakes import cuda as fake_cuda

GPU = fake_cuda.install()


class GpuArray:
    """Array on the simulated GPU, with the attributes that packages need.

    Args:
        memory: Its elements, in the GPU's memory.
        owner: Keeps that memory.
    """

    __array__ = None  # numpy can't read a GPU

    def __init__(self, memory: npt.NDArray[Any], owner: object) -> None:
        self.memory, self.owner = memory, owner
        self.shape, self.dtype = memory.shape, memory.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        described = dict(self.memory.__array_interface__)
        return {name: described[name] for name in ("data", "shape", "typestr", "strides")} | {
            "version": 3,
            "stream": 1,
        }

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(empty=empty)

    def __setitem__(self, where: Any, value: GpuArray) -> None:
        self.memory[where] = value.memory

    def reshape(self, *shape: int) -> GpuArray:
        return GpuArray(self.memory.reshape(*shape), self.owner)

    def get(self) -> npt.NDArray[Any]:
        return self.memory.copy()

    def set(self, array: npt.NDArray[Any]) -> None:
        assert isinstance(array, np.ndarray)
        self.memory[...] = array


class _Owner:
    """Owner that frees memory of the GPU with this object."""

    def __init__(self, nbytes: int) -> None:
        self.pointer = GPU.allocate(nbytes)
        weakref.finalize(self, GPU.free, self.pointer)


def empty(shape: tuple[int, ...], dtype: Any) -> GpuArray:
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=int))
    owner = _Owner(max(1, count * kind.itemsize))
    memory = (ctypes.c_uint8 * max(1, count * kind.itemsize)).from_address(owner.pointer)
    return GpuArray(np.frombuffer(memory, kind, count).reshape(shape), owner)


def on_gpu(array: npt.NDArray[Any]) -> GpuArray:
    made = empty(array.shape, array.dtype)
    made.memory[...] = array
    return made


class DlpackArray:
    """Array on the simulated GPU of a package that has only DLPack."""

    def __init__(self, array: GpuArray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # CUDA, the first one

    def __dlpack__(self, *, stream: int) -> Any:
        assert stream == 1, "the legacy default stream"
        return self.array.memory.__dlpack__()
