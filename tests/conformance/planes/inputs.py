"""Inputs that every worker can compute for every member, and the results that numpy gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.types import DType, ReduceOp, Reduction

Array = npt.NDArray[Any]
UFUNC = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
TOLERANCE = {DType.F16: 1.0 / 1024, DType.BF16: 1.0 / 128, DType.F32: 1e-5, DType.F64: 1e-12}


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, to nearest even. An implementation of its own, for finite values and NaN."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), np.uint64(0x7FC0), rounded).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_float64(array: Array, dtype: DType) -> npt.NDArray[np.float64]:
    """Return the values of an array in storage type."""
    return (from_bf16(array) if dtype is DType.BF16 else array).astype(np.float64)


def from_float64(values: npt.NDArray[np.float64], dtype: DType) -> Array:
    if dtype is DType.BF16:
        return to_bf16(values.astype(np.float32))
    return values.astype(storage_type(dtype))


def values(seed: int, member: int, count: int, dtype: DType) -> Array:
    """Return ``count`` elements of ``dtype``, other ones for each seed and member."""
    rng = np.random.default_rng([seed, member, count])
    if dtype is DType.BOOL:
        return rng.random(count) < 0.7
    if dtype.is_floating:
        return from_float64(rng.uniform(-2.0, 2.0, count), dtype)
    info = np.iinfo(storage_type(dtype))
    low, high = max(int(info.min), -1000), min(int(info.max), 1000)
    return rng.integers(low, high + 1, count).astype(storage_type(dtype))


def reduced(parts: Sequence[Array], dtype: DType, reduction: Reduction) -> Array:
    """Return the right result of a reduction: exact for bool and integers, the float64 result for floating types."""
    op, prescale, postscale = reduction
    if dtype.is_floating:
        scaled = [to_float64(p, dtype) * prescale for p in parts]
        if op is ReduceOp.AVERAGE:
            return np.asarray(sum(scaled) / len(parts) * postscale)
        return np.asarray(reduce(UFUNC[op], scaled) * postscale)
    if dtype is DType.BOOL:
        return np.asarray(reduce(np.logical_and if op is ReduceOp.MIN else np.logical_or, parts))
    # These are so small that int64 holds all that comes up; see cases.extremes for those that are not.
    wide = [scaled_integers(p.astype(np.int64), prescale) for p in parts]
    result = np.asarray(reduce(UFUNC[ReduceOp.SUM if op is ReduceOp.AVERAGE else op], wide))
    if op is ReduceOp.AVERAGE:
        result = np.trunc(result / len(parts) * postscale).astype(np.int64)
    else:
        result = scaled_integers(result, postscale)
    return result.astype(storage_type(dtype))


def scaled_integers(array: Array, scale: float) -> Array:
    """Return integers scaled in float64, truncated toward zero."""
    if scale == 1.0:
        return array
    return np.trunc(array.astype(np.float64) * scale).astype(np.int64)


def assert_reduced(got: Array, expected: Array, dtype: DType, what: str) -> None:
    """Compare with :func:`reduced`: exactly, or within the rounding of the floating type."""
    if not dtype.is_floating:
        wrong = np.flatnonzero(got != expected)
    else:
        wide = to_float64(got, dtype)
        wrong = np.flatnonzero(~(np.abs(wide - expected) <= TOLERANCE[dtype] * (1.0 + np.abs(expected))))
    if len(wrong):
        i = int(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(got)} differ, first [{i}]: {got[i]}, expected {expected[i]}"
        )


def digest(arrays: Sequence[Array]) -> int:
    """Return a checksum of the bits, to compare members."""
    total = 0
    for array in arrays:
        total = crc32(array.tobytes(), total)
    return total
