"""Arrays compared element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.kernel_ext.inspect.arrays import Bytes
from hvdlab.kernel_ext.inspect.messages import Difference

STRIDE = 64 << 10
"""Elements that are worked on at once, so that what is computed stays in the cache."""

_AS_FLOAT = {"bfloat16": np.dtype(np.uint16)}

Array = npt.NDArray[Any]


def numeric(raw: Bytes, dtype: str, itemsize: int) -> Array | None:
    """These bytes as numbers of the type that a framework calls ``dtype``; None if numpy does not know it."""
    if dtype in _AS_FLOAT:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    try:
        known = np.dtype(dtype)
    except TypeError:
        return None
    fits = known.kind in "biufc" and known.itemsize == itemsize
    return raw.view(known) if fits else None


def compare(ours: Bytes, theirs: Bytes, dtype: str, itemsize: int) -> Difference:
    """How two ranges of whole elements differ, bit by bit; magnitudes where the elements are numbers.

    NaN differs from nothing by an amount, so it does not count for the largest differences.
    """
    count, first = 0, -1
    largest: float | None = None
    relative: float | None = None
    for start in range(0, ours.nbytes, STRIDE * itemsize):
        end = start + STRIDE * itemsize
        a, b = ours[start:end], theirs[start:end]
        odd = _differing(a, b, itemsize)
        if not odd.size:
            continue
        count += odd.size
        if first < 0:
            first = start // itemsize + int(odd[0])
        numbers = numeric(a, dtype, itemsize), numeric(b, dtype, itemsize)
        if numbers[0] is not None and numbers[1] is not None:
            most, rel = _magnitudes(numbers[0][odd], numbers[1][odd])
            largest, relative = _more(largest, most), _more(relative, rel)
    if not count:
        return Difference(0)
    where = slice(first * itemsize, (first + 1) * itemsize)
    return Difference(
        count,
        first,
        element(ours[where], dtype, itemsize),
        element(theirs[where], dtype, itemsize),
        largest,
        relative,
    )


def _differing(a: Bytes, b: Bytes, itemsize: int) -> npt.NDArray[np.intp]:
    """Numbers of the elements whose bytes differ."""
    if itemsize in (1, 2, 4, 8):
        word = np.dtype(f"u{itemsize}")
        return np.flatnonzero(a.view(word) != b.view(word))
    return np.flatnonzero((a.reshape(-1, itemsize) != b.reshape(-1, itemsize)).any(axis=1))


def _magnitudes(a: Array, b: Array) -> tuple[float | None, float | None]:
    with np.errstate(all="ignore"):
        if a.dtype.kind == "f" and a.dtype.itemsize < 8:
            a, b = a.astype(np.float64), b.astype(np.float64)
        if a.dtype.kind == "b":
            a, b = a.astype(np.uint8), b.astype(np.uint8)
        if a.dtype.kind in "iu":  # exact, whatever the size
            apart = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
            bound = np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
        else:
            apart = np.abs(a - b)
            bound = np.maximum(np.abs(a), np.abs(b))
        known = ~np.isnan(apart)
        if not known.any():
            return None, None
        apart, bound = apart[known], bound[known]
        relative = np.where(bound > 0, apart / bound, 0.0)
    relative = relative[~np.isnan(relative)]  # inf - 1 relative to inf
    return float(apart.max()), float(relative.max()) if relative.size else None


def _more(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)


def element(raw: Bytes, dtype: str, itemsize: int) -> str:
    """One element in words."""
    number = numeric(raw, dtype, itemsize)
    if number is not None:
        return str(number[0])
    if dtype.startswith(("<U", "|S", "datetime64", "timedelta64")):
        return str(raw.view(np.dtype(dtype))[0])[:80]
    return raw.tobytes()[:16].hex()


def not_finite(raw: Bytes, dtype: str, itemsize: int) -> tuple[int, int]:
    """How many of the elements are NaN, and how many infinite."""
    nans = infs = 0
    for start in range(0, raw.nbytes, STRIDE * itemsize):
        part = numeric(raw[start : start + STRIDE * itemsize], dtype, itemsize)
        if part is None or part.dtype.kind not in "fc":
            return 0, 0
        finite = np.isfinite(part)
        if not finite.all():
            odd = part[~finite]
            nan = int(np.isnan(odd).sum())
            nans, infs = nans + nan, infs + odd.size - nan
    return nans, infs
