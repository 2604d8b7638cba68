"""Folds: ``out = postscale * (prescale * s0 (op) prescale * s1 (op) …)``, element by element, in the order given.

A fold is made for one element type and operator and keeps the scratch memory that it needs; it belongs to one
thread. Its numpy calls release the GIL. The order of the sources alone determines the bits of the result, so a plane
that passes them by position gets the same bits on every member, for every size.

float16 and bfloat16 are accumulated in float32 and rounded once. numpy converts float16 slowly and has no bfloat16: a binding whose
framework is faster registers its own :class:`Conversion` with :func:`register_conversion`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.planes.buffers import HostArray, HostArrays
from hvdlab.collectives.types import DType, ReduceOp, Reduction

Wide = npt.NDArray[np.float32]
"""An array of float16 or bfloat16 while it is reduced."""

BLOCK = 1 << 16
"""Elements that are worked through at a time where scratch memory is needed, so that it stays in the cache."""
HALF_BLOCK = 1 << 15
"""Elements converted at a time: the two float32 blocks stay in a 1 MiB second-level cache."""
_QUIET_NAN = np.uint16(0x7FC0)

MANY = 8
"""Rows of an array from which on one call of numpy for all of them is quicker than one for each …"""
NARROW = 32
"""… up to this many elements of a row: it writes every intermediate sum into memory of its own."""

_ERRORS_IN_CONTEXT = np.lib.NumpyVersion(np.__version__) >= "2.0.0"
"""Whether numpy keeps its handling of errors in a context variable. Before version 2 a thread has it."""

UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


class Fold(Protocol):
    """Function that reduces equally long buffers in storage type into ``out``.

    ``out`` may be the first source; with two sources and ``prescale`` 1 of a type for which :func:`is_direct` holds
    it may be either. It overlaps no other source.
    """

    def __call__(self, sources: HostArrays, out: HostArray, prescale: float, postscale: float) -> None: ...


def make_fold(dtype: DType, op: ReduceOp) -> Fold:
    """Return a fold for one element type and operator. ``op`` is SUM, MIN, MAX or PRODUCT."""
    ufunc = UFUNCS[op]
    if dtype in (DType.F16, DType.BF16):
        return HalfFold(dtype, ufunc)
    if dtype is DType.BOOL:
        # PRODUCT and SUM do not come here: ``check_supported`` has refused them for truth values.
        return DirectFold(np.logical_and if op is ReduceOp.MIN else np.logical_or)
    return DirectFold(ufunc) if dtype.is_floating else IntegerFold(ufunc)


class FoldScratch:
    """Folds of one thread at a time, by element type and operator. They run without numpy's warnings of overflow and NaN."""

    def __init__(self) -> None:
        self._folds: dict[tuple[DType, ReduceOp], Fold] = {}
        #: The context in which numpy ignores them. Entering it costs a tenth of an ``errstate``, half of a small fold.
        self._quiet: Context | None = None
        if _ERRORS_IN_CONTEXT:
            self._quiet = Context()
            self._quiet.run(np.seterr, all="ignore")

    def fold(
        self,
        dtype: DType,
        reduction: Reduction,
        sources: HostArrays,
        out: HostArray,
    ) -> None:
        """Reduce buffers of this element type into ``out``, as a :class:`Fold` does. The operator is SUM, MIN, MAX or PRODUCT."""
        op, prescale, postscale = reduction
        fold = self._folds.get((dtype, op))
        if fold is None:
            fold = self._folds[dtype, op] = make_fold(dtype, op)
        self._run(fold, sources, out, prescale, postscale)

    def quiet(self, dtype: DType, op: ReduceOp) -> Fold:
        """Return a fold for one element type and operator that runs without numpy's warnings."""
        fold = make_fold(dtype, op)
        if self._quiet is None:
            return partial(self._run, fold)
        return partial(self._quiet.run, fold)  # type: ignore[call-arg]  # the fold's own arguments come with the call

    def _run(
        self, fold: Fold, sources: HostArrays, out: HostArray, prescale: float, postscale: float
    ) -> None:
        if self._quiet is not None:
            self._quiet.run(fold, sources, out, prescale, postscale)
        else:
            with np.errstate(all="ignore"):
                fold(sources, out, prescale, postscale)


def is_direct(dtype: DType) -> bool:
    """Return whether numpy's own operator does the whole work at about the speed of a copy."""
    return dtype not in (DType.F16, DType.BF16)


class DirectFold:
    """Fold of float32, float64 or bool: numpy's operator; scales are applied in the type itself."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc
        self._scaled: HostArray | None = None

    def __call__(self, sources: HostArrays, out: HostArray, prescale: float, postscale: float) -> None:
        if prescale != 1.0:
            self._fold_scaled(sources, out, prescale)
        else:
            fold_plain(self._ufunc, sources, out)
        if postscale != 1.0:
            self._scale(out, out, postscale)

    def _fold_scaled(self, sources: HostArrays, out: HostArray, prescale: float) -> None:
        # Straight into the output, which can be this very source. The others must stay as they are, and go through scratch memory.
        self._scale(sources[0], out, prescale)
        if self._scaled is None or self._scaled.dtype != out.dtype:
            self._scaled = np.empty(BLOCK, out.dtype)
        for source in sources[1:]:
            for start in range(0, len(out), BLOCK):
                part = out[start : start + BLOCK]
                scaled = self._scaled[: len(part)]
                self._scale(source[start : start + BLOCK], scaled, prescale)
                self._ufunc(part, scaled, out=part)

    def _scale(self, source: HostArray, out: HostArray, factor: float) -> None:
        np.multiply(source, factor, out)


class IntegerFold(DirectFold):
    """Fold of integers: exact modulo the type's width; scales are applied in float64 and truncated toward zero."""

    def __init__(self, ufunc: np.ufunc) -> None:
        super().__init__(ufunc)
        self._wide: npt.NDArray[np.float64] | None = None

    def _scale(self, source: HostArray, out: HostArray, factor: float) -> None:
        if self._wide is None:
            self._wide = np.empty(BLOCK, np.float64)
        for start in range(0, len(out), BLOCK):
            part = out[start : start + BLOCK]
            wide = self._wide[: len(part)]
            np.multiply(source[start : start + BLOCK], factor, wide)
            # By way of int64, since a float beyond the range of a narrow type converts to a number that depends on the CPU.
            part[...] = wide.astype(np.int64)


def fold_plain(ufunc: np.ufunc, sources: HostArrays, out: HostArray) -> None:
    """Compute ``out = s0 (op) s1 (op) …`` without scales."""
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


@dataclass(frozen=True, slots=True)
class Conversion:
    """Pair of functions that convert one 16-bit type. They round to nearest even, keep NaN a NaN, and give the same bits in all ranks.

    Attributes:
        widen: ``widen(source, out)``: storage type to float32, equally long, no overlap.
        narrow: ``narrow(source, out)``: float32 to storage type; may overwrite ``source``.
    """

    widen: Callable[[HostArray, Wide], None]
    narrow: Callable[[Wide, HostArray], None]


def widen_f16(source: HostArray, out: Wide) -> None:
    out[...] = source


def narrow_f16(source: Wide, out: HostArray) -> None:
    np.copyto(out, source, casting="same_kind")


def widen_bf16(source: HostArray, out: Wide) -> None:
    np.left_shift(source, 16, out.view(np.uint32), dtype=np.uint32)


def narrow_bf16(source: Wide, out: HostArray) -> None:
    """Round to nearest even on the bits. NaN is handled apart: rounding up could carry it into an infinity."""
    # First: the additions below change ``source`` itself, whose bits they work on.
    nan = np.isnan(source)
    bits = source.view(np.uint32)
    # Half of the last place that stays, less one, plus one if that place is odd: the sum carries exactly where rounding to even goes up.
    up = bits >> 16
    up &= 1
    up += 0x7FFF
    bits += up
    # The upper halves of little-endian words, without a shifted copy.
    out[...] = bits.view(np.uint16)[1::2]
    if nan.any():
        out[nan] = _QUIET_NAN


_conversions = {
    DType.F16: Conversion(widen_f16, narrow_f16),
    DType.BF16: Conversion(widen_bf16, narrow_bf16),
}


def register_conversion(dtype: DType, conversion: Conversion) -> None:
    """Use a faster conversion for float16 or bfloat16 in folds made from now on, in this process."""
    if dtype not in _conversions:
        raise ValueError(f"{dtype.label} is not converted to be reduced; only float16 and bfloat16 are.")
    _conversions[dtype] = conversion


def conversion_of(dtype: DType) -> Conversion:
    """Return the conversion in use, for instance to put it back after a test."""
    return _conversions[dtype]


class HalfFold:
    """Fold of float16 or bfloat16: widened to float32, reduced, rounded once."""

    def __init__(self, dtype: DType, ufunc: Callable[..., Any]) -> None:
        self._conversion = _conversions[dtype]
        self._ufunc = ufunc
        self._sum = np.empty(HALF_BLOCK, np.float32)
        self._next = np.empty(HALF_BLOCK, np.float32)

    def __call__(self, sources: HostArrays, out: HostArray, prescale: float, postscale: float) -> None:
        for start in range(0, len(out), HALF_BLOCK):
            stop = min(start + HALF_BLOCK, len(out))
            self._fold_block([s[start:stop] for s in sources], out[start:stop], prescale, postscale)

    def _fold_block(
        self, sources: list[HostArray], out: HostArray, prescale: float, postscale: float
    ) -> None:
        total, addend, widen = self._sum[: len(out)], self._next[: len(out)], self._conversion.widen
        widen(sources[0], total)
        if prescale != 1.0:
            np.multiply(total, prescale, total)
        for source in sources[1:]:
            widen(source, addend)
            if prescale != 1.0:
                np.multiply(addend, prescale, addend)
            self._ufunc(total, addend, out=total)
        if postscale != 1.0:
            np.multiply(total, postscale, total)
        self._conversion.narrow(total, out)
