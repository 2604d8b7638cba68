"""Arrays as bytes on the host, wherever they are, and the elements in which two of them differ.

Nothing here imports a framework: one that is not in ``sys.modules`` can't have made the value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.bindings.array_source import ArraySource
from hvdlab.bindings.framework_hooks import loaded
from hvdlab.kernel_ext.wire.compare import Difference

STRIDE = 96 << 10
"""Bytes that are worked on at once, so that results stay in the cache, and in memory that malloc keeps at hand."""

_AS_FLOAT = {"bfloat16": np.dtype(np.uint16)}

Array = npt.NDArray[Any]


def numeric(raw: Bytes, dtype: str, itemsize: int) -> Array | None:
    """These bytes as numbers of the type that a framework calls ``dtype``; None if numpy does not know the type."""
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

    A difference from NaN is no number, so NaN does not count for the largest differences.
    """
    count, first = 0, -1
    largest: float | None = None
    relative: float | None = None
    stride = _stride(itemsize)
    for start in range(0, ours.nbytes, stride):
        end = start + stride
        a, b = ours[start:end], theirs[start:end]
        odd = _differing(a, b, itemsize)
        found = int(np.count_nonzero(odd))
        if not found:
            continue
        count += found
        if first < 0:
            first = start // itemsize + int(odd.argmax())
        here, there = numeric(a, dtype, itemsize), numeric(b, dtype, itemsize)
        if here is not None and there is not None:
            if found < odd.size // 8:  # else choosing elements takes longer than computing with all
                here, there = here[odd], there[odd]
            most, rel = _magnitudes(here, there)
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


def _stride(itemsize: int) -> int:
    """Bytes of whole elements; half-precision ones become twice as large."""
    return max(1, STRIDE // max(4, itemsize)) * itemsize


def _differing(a: Bytes, b: Bytes, itemsize: int) -> npt.NDArray[np.bool_]:
    """For each element, whether its bytes differ."""
    if itemsize in (1, 2, 4, 8):
        word = np.dtype(f"u{itemsize}")
        same_size: npt.NDArray[np.bool_] = a.view(word) != b.view(word)
        return same_size
    odd: npt.NDArray[np.bool_] = (a.reshape(-1, itemsize) != b.reshape(-1, itemsize)).any(axis=1)
    return odd


def _magnitudes(a: Array, b: Array) -> tuple[float | None, float | None]:
    """The largest absolute and relative difference."""
    with np.errstate(all="ignore"):
        if a.dtype.kind == "f" and a.dtype.itemsize == 2:
            a, b = a.astype(np.float32), b.astype(np.float32)
        if a.dtype.kind == "f":
            most, relative = _quick(a, b)
            if np.isfinite(most) and np.isfinite(relative):
                return float(most), float(relative)
            a, b = a.astype(np.float64), b.astype(np.float64)
        return _careful(a, b)


def _quick(a: Array, b: Array) -> tuple[Any, Any]:
    """The same in the elements' own precision and few passes; not finite if elements are not, or differ by too much."""
    apart = np.subtract(a, b)
    np.abs(apart, out=apart)
    most = apart.max()
    bound = np.abs(a)
    np.maximum(bound, np.abs(b), out=bound)
    np.maximum(bound, np.finfo(a.dtype).tiny, out=bound)
    np.divide(apart, bound, out=apart)
    return most, apart.max()


def _careful(a: Array, b: Array) -> tuple[float | None, float | None]:
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
    stride = _stride(itemsize)
    for start in range(0, raw.nbytes, stride):
        part = numeric(raw[start : start + stride], dtype, itemsize)
        if part is None or part.dtype.kind not in "fc":
            return 0, 0
        finite = np.isfinite(part)
        if not finite.all():
            odd = part[~finite]
            nan = int(np.isnan(odd).sum())
            nans, infs = nans + nan, infs + odd.size - nan
    return nans, infs


Bytes = npt.NDArray[np.uint8]


def array_source(value: Any) -> ArraySource | None:
    """``value`` as an array; None if it is no array, or one of Python objects. Raises what the framework raises."""
    for hooks in loaded():
        if (source := hooks.array(value)) is not None:
            return source
    return None
