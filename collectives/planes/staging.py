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
from hvdlab.collectives.planes.base import Buffer

_COMPUTE: dict[DType, np.dtype[Any]] = {
    DType.F16: np.dtype(np.float32),
    DType.BF16: np.dtype(np.float32),
    DType.BOOL: np.dtype(np.uint8),
}


def widen(source: Buffer, target: Buffer, dtype: DType) -> None:
    """Copy storage elements into a buffer of the compute type; bf16's bits are the upper half of a float32."""
    if dtype is DType.BF16 and target.dtype == np.float32:
        bits = target.view(np.uint32)
        np.copyto(bits, source)
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(target, source, casting="unsafe")


def narrow(source: Buffer, target: Buffer, dtype: DType) -> None:
    """Copy compute elements back to storage, rounding once (to nearest, ties to even; NaN stays NaN)."""
    if dtype is not DType.BF16 or source.dtype != np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(target, source, casting="unsafe")
        return
    bits = source.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    np.copyto(target, rounded, casting="unsafe")
    is_nan = np.isnan(source)
    if is_nan.any():
        target[is_nan] = np.uint16(0x7FC0)


def scale(buffer: Buffer, factor: float) -> None:
    """Multiply in place; integers in float64, truncated toward zero."""
    if factor == 1.0:
        return
    if buffer.dtype.kind == "f":
        np.multiply(buffer, buffer.dtype.type(factor), out=buffer)
    else:
        np.copyto(buffer, np.trunc(buffer.astype(np.float64) * factor), casting="unsafe")


class Staging:
    """Reusable contiguous buffers between fused tensors and a library call.

    One per plane, used by the executor thread only. Memory kept is bounded by the largest fused call so far, which
    the fusion threshold bounds.

    Args:
        compute: Compute types that differ from the storage type for this plane, beside f16, bf16 and bool.
        direct: Whether the library may be given a user's output to write to.
    """

    def __init__(self, compute: Mapping[DType, np.dtype[Any]] | None = None, *, direct: bool = True) -> None:
        self._direct = direct
        self._compute = {**_COMPUTE, **(compute or {})}
        self._scratch: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def compute_type(self, dtype: DType) -> np.dtype[Any]:
        return self._compute.get(dtype, storage_type(dtype))

    def pack(self, ins: Sequence[Buffer], outs: Sequence[Buffer], dtype: DType, prescale: float) -> Buffer:
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

    def unpack(self, packed: Buffer, outs: Sequence[Buffer], dtype: DType, postscale: float) -> None:
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

    def widened(self, source: Buffer, dtype: DType, prescale: float) -> Buffer:
        """A scaled copy in the compute type."""
        target = np.empty(source.size, self.compute_type(dtype))
        self._widen(source, target, dtype, prescale)
        return target

    @staticmethod
    def _widen(source: Buffer, target: Buffer, dtype: DType, prescale: float) -> None:
        if prescale != 1.0 and _wraps(target.dtype, dtype):
            source = source.copy()
            scale(source, prescale)
            prescale = 1.0
        widen(source, target, dtype)
        scale(target, prescale)

    def take(self, count: int, kind: np.dtype[Any]) -> Buffer:
        """``count`` uninitialised elements, valid until the next call."""
        nbytes = count * kind.itemsize
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(kind)


def leave_to_library(*objects: object) -> None:
    """Keep these alive for as long as the process lives: a library that can't cancel may still use them."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _wraps(compute: np.dtype[Any], dtype: DType) -> bool:
    """Whether ``compute`` is a wider integer: it must not show, so values are scaled in their own type."""
    return compute.kind == "i" and compute != storage_type(dtype)


def _same_memory(a: Buffer, b: Buffer) -> bool:
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])
