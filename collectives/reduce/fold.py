"""Folds: ``out = postscale * (prescale * s0 (op) prescale * s1 (op) …)``, element by element, in the order given.

A fold is made for one element type and operator and keeps the scratch memory that it needs; it belongs to one
thread. Its numpy calls release the GIL. The order of the sources alone determines the bits of the result, so a plane
that passes them by position gets the same bits on every member, for every size.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.dtypes import DType, ReduceOp
from hvdlab.collectives.planes.buffers import HostArray as Buffer
from hvdlab.collectives.planes.buffers import HostArrays
from hvdlab.collectives.reduce.halves import HalfFold

BLOCK = 1 << 16
"""Elements that are worked through at a time where scratch memory is needed, so that it stays in the cache."""

MANY = 8
"""Rows of an array from which on one call of numpy for all of them is quicker than one for each …"""
NARROW = 32
"""… up to this many elements of a row: it writes every intermediate sum into memory of its own."""

UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


class Fold(Protocol):
    """Reduces equally long buffers in storage type into ``out``.

    ``out`` may be the first source; with two sources and ``prescale`` 1 of a type for which :func:`is_direct` holds
    it may be either. It overlaps no other source.
    """

    def __call__(self, sources: HostArrays, out: Buffer, prescale: float, postscale: float) -> None: ...


def make_fold(dtype: DType, op: ReduceOp) -> Fold:
    """A fold for one element type and operator. ``op`` is SUM, MIN, MAX or PRODUCT."""
    ufunc = UFUNCS[op]
    if dtype in (DType.F16, DType.BF16):
        return HalfFold(dtype, ufunc)
    if dtype is DType.BOOL:
        return DirectFold(np.logical_and if op is ReduceOp.MIN else np.logical_or)
    return DirectFold(ufunc) if dtype.is_floating else IntegerFold(ufunc)


def is_direct(dtype: DType) -> bool:
    """Whether numpy's own operator does the whole work at about the speed of a copy."""
    return dtype not in (DType.F16, DType.BF16)


class DirectFold:
    """float32, float64 and bool: numpy's operator; scales are applied in the type itself."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc
        self._scaled: Buffer | None = None

    def __call__(self, sources: HostArrays, out: Buffer, prescale: float, postscale: float) -> None:
        if prescale != 1.0:
            self._fold_scaled(sources, out, prescale)
        else:
            fold_plain(self._ufunc, sources, out)
        if postscale != 1.0:
            self._scale(out, out, postscale)

    def _fold_scaled(self, sources: HostArrays, out: Buffer, prescale: float) -> None:
        self._scale(sources[0], out, prescale)
        if self._scaled is None or self._scaled.dtype != out.dtype:
            self._scaled = np.empty(BLOCK, out.dtype)
        for source in sources[1:]:
            for start in range(0, len(out), BLOCK):
                part = out[start : start + BLOCK]
                scaled = self._scaled[: len(part)]
                self._scale(source[start : start + BLOCK], scaled, prescale)
                self._ufunc(part, scaled, out=part)

    def _scale(self, source: Buffer, out: Buffer, factor: float) -> None:
        np.multiply(source, factor, out)


class IntegerFold(DirectFold):
    """Integers: exact modulo the type's width; scales are applied in float64 and truncated toward zero."""

    def __init__(self, ufunc: np.ufunc) -> None:
        super().__init__(ufunc)
        self._wide: npt.NDArray[np.float64] | None = None

    def _scale(self, source: Buffer, out: Buffer, factor: float) -> None:
        if self._wide is None:
            self._wide = np.empty(BLOCK, np.float64)
        for start in range(0, len(out), BLOCK):
            part = out[start : start + BLOCK]
            wide = self._wide[: len(part)]
            np.multiply(source[start : start + BLOCK], factor, wide)
            # By way of int64, since a float beyond the range of a narrow type converts to whatever the CPU likes.
            part[...] = wide.astype(np.int64)


def fold_plain(ufunc: np.ufunc, sources: HostArrays, out: Buffer) -> None:
    """``out = s0 (op) s1 (op) …`` without scales."""
    if isinstance(sources, np.ndarray) and len(sources) >= MANY and len(out) <= NARROW:
        # `reduce` would be free to add in another order; this is one after the other by its definition.
        np.copyto(out, ufunc.accumulate(sources, axis=0, dtype=out.dtype)[-1])
        return
    if len(sources) == 1:
        if sources[0] is not out:
            np.copyto(out, sources[0])
        return
    ufunc(sources[0], sources[1], out=out)
    for source in sources[2:]:
        ufunc(out, source, out=out)
