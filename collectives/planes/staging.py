"""Packing fused tensors into one buffer for planes that need their data in one piece.

``shm`` packs while it copies; ``gloo`` and ``mpi`` hand a contiguous buffer to a library. The buffer is of a *compute
type* in which that library reduces without losing precision: float32 for f16 and bf16, uint8 for bool.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.arrays import storage_type
from hvdlab.collectives.dtypes import DType
from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.reduce.fold import HALF_BLOCK, conversion_of

_COMPUTE: dict[DType, np.dtype[Any]] = {
    DType.F16: np.dtype(np.float32),
    DType.BF16: np.dtype(np.float32),
    DType.BOOL: np.dtype(np.uint8),
}


def widen(source: HostArray, target: HostArray, dtype: DType) -> None:
    """Copy storage elements into an equally long buffer of the compute type."""
    if not _is_wide_half(target, dtype):
        np.copyto(target, source, casting="unsafe")
        return
    convert = conversion_of(dtype).widen
    for start in range(0, len(source), HALF_BLOCK):
        convert(source[start : start + HALF_BLOCK], target[start : start + HALF_BLOCK])


def narrow(source: HostArray, target: HostArray, dtype: DType) -> None:
    """Copy compute elements back to storage, rounding once; may overwrite ``source``."""
    with np.errstate(over="ignore", invalid="ignore"):
        if not _is_wide_half(source, dtype):
            np.copyto(target, source, casting="unsafe")
            return
        convert = conversion_of(dtype).narrow
        for start in range(0, len(source), HALF_BLOCK):
            convert(source[start : start + HALF_BLOCK], target[start : start + HALF_BLOCK])


def _is_wide_half(buffer: HostArray, dtype: DType) -> bool:
    return dtype in (DType.F16, DType.BF16) and buffer.dtype == np.float32


def scale(buffer: HostArray, factor: float) -> None:
    """Multiply in place; integers in float64, truncated toward zero."""
    if factor == 1.0:
        return
    if buffer.dtype.kind == "f":
        np.multiply(buffer, buffer.dtype.type(factor), out=buffer)
    else:
        np.copyto(buffer, np.trunc(buffer.astype(np.float64) * factor), casting="unsafe")


class Scratch:
    """Memory that one thread takes again and again; it stays as large as the largest request so far."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, count: int, kind: np.dtype[Any]) -> HostArray:
        """``count`` uninitialised elements, valid until the next call."""
        nbytes = count * kind.itemsize
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(kind)

    def leave(self) -> None:
        """Never use this memory again: a library still reads or writes it."""
        self._memory = np.empty(0, np.uint8)


class Staging(Scratch):
    """Reusable contiguous buffers between fused tensors and a library call.

    One per plane, used by the executor thread only. Memory kept is bounded by the largest fused call so far, which
    the fusion threshold bounds.

    Args:
        compute: Compute types that differ from the storage type for this plane, beside f16, bf16 and bool.
        direct: Whether the library may be given a user's output to write to.
    """

    def __init__(self, compute: Mapping[DType, np.dtype[Any]] | None = None, *, direct: bool = True) -> None:
        super().__init__()
        self._direct = direct
        self._compute = {**_COMPUTE, **(compute or {})}

    def compute_type(self, dtype: DType) -> np.dtype[Any]:
        return self._compute.get(dtype, storage_type(dtype))

    def pack(
        self, ins: Sequence[HostArray], outs: Sequence[HostArray], dtype: DType, prescale: float
    ) -> HostArray:
        """The inputs, scaled, one after another in a buffer that the library may overwrite.

        A lone tensor that needs no conversion is copied to its own output and that is returned (if ``direct``), so
        that the result needs no copy back.
        """
        compute = self.compute_type(dtype)
        if self._direct and len(ins) == 1 and compute == storage_type(dtype):
            packed = outs[0]
            if not _same_memory(ins[0], packed):
                np.copyto(packed, ins[0])
        else:
            packed = self.take(sum(b.size for b in ins), compute)
            offset = 0
            for buffer in ins:
                self._widen(buffer, packed[offset : offset + buffer.size], dtype, prescale)
                offset += buffer.size
            return packed
        scale(packed, prescale)
        return packed

    def unpack(self, packed: HostArray, outs: Sequence[HostArray], dtype: DType, postscale: float) -> None:
        """Scale the reduced buffer and hand its pieces to the outputs."""
        if _wraps(packed.dtype, dtype):
            packed = packed.astype(storage_type(dtype))
        scale(packed, postscale)
        if len(outs) == 1 and packed is outs[0]:
            return
        offset = 0
        for buffer in outs:
            narrow(packed[offset : offset + buffer.size], buffer, dtype)
            offset += buffer.size

    def widened(self, source: HostArray, dtype: DType, prescale: float) -> HostArray:
        """A scaled copy in the compute type."""
        target = np.empty(source.size, self.compute_type(dtype))
        self._widen(source, target, dtype, prescale)
        return target

    @staticmethod
    def _widen(source: HostArray, target: HostArray, dtype: DType, prescale: float) -> None:
        if prescale != 1.0 and _wraps(target.dtype, dtype):
            source = source.copy()
            scale(source, prescale)
            prescale = 1.0
        widen(source, target, dtype)
        scale(target, prescale)


def leave_to_library(*objects: object) -> None:
    """Keep these objects alive for as long as the process lives: a library that can't cancel an operation may still use them."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _wraps(compute: np.dtype[Any], dtype: DType) -> bool:
    """Whether ``compute`` is a wider integer than the storage type. That must not show in results, so values are scaled in their own
    type.
    """
    return compute.kind == "i" and compute != storage_type(dtype)


def _same_memory(a: HostArray, b: HostArray) -> bool:
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])
