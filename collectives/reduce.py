"""Arithmetic of reductions on arrays of this process: folds, averages of integers, Adasum.

A fold computes ``out = postscale * (prescale * s0 (op) prescale * s1 (op) …)``, element by element, in the order given. It is made for one element type and operator and keeps the scratch memory that it needs; it belongs to one
thread. Its numpy calls release the GIL. The order of the sources alone determines the bits of the result, so a plane
that passes them by position gets the same bits on every member, for every size.

float16 and bfloat16 are accumulated in float32 and rounded once. numpy converts float16 slowly and has no bfloat16: a binding whose
framework is faster registers its own :class:`Conversion` with :func:`register_conversion`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.planes.base import HostArray, HostArrays
from hvdlab.collectives.types import PLAIN, SUM, DType, ReduceOp, Reduction

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

    def __init__(self, dtype: DType, ufunc: np.ufunc) -> None:
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


# -- averages and scaled reductions of integers ------------------------------------------------------------------------


WideIntegers = npt.NDArray[np.int64]


def needs_width(dtype: DType, reduction: Reduction) -> bool:
    """Return whether a reduction of this element type has to be made as a :class:`WideReduction`."""
    if dtype.is_floating or dtype is DType.BOOL:
        return False
    return reduction.op is ReduceOp.AVERAGE or (dtype is not DType.I64 and reduction.is_scaled)


class WideReduction:
    """Average or scaled reduction of integers, made of plain reductions of int64 that can't overflow on the way.

    A plane reduces integers modulo the width of their type. That is right for a sum, but an average fits into the type where
    the sum before the division does not, and so may a scaled sum. So each member :meth:`encodes <encode>` its
    elements as int64, any plane reduces these, and each member :meth:`decodes <decode>` the result:

    * Elements are scaled by ``prescale`` in float64 and truncated toward zero (without a scale they are as they are).
    * A sum of narrow types is exact in int64. For an average of int64 each element travels as a quotient and a remainder of
      the number of members, whose sums can't overflow.
    * An average is truncated toward zero, and exact also beyond 2**53: that of equal values is that value.
    * ``postscale`` is applied to the exact result in float64, and the product is truncated. A result that does not fit
      into the type is taken modulo its width, as a sum is.

    Args:
        dtype: Type of the elements, an integer.
        reduction: As the user gave it.
        members: How many there are.

    Attributes:
        of_encoded: The plane's reduction of the encoded elements.
        width: Number of int64 that stand for an element; they are neighbours.
    """

    def __init__(self, dtype: DType, reduction: Reduction, members: int) -> None:
        averages = reduction.op is ReduceOp.AVERAGE
        self._members = members if averages else 1
        self._reduction = reduction
        self.of_encoded = SUM if averages else PLAIN[reduction.op]
        self.width = 2 if averages and dtype is DType.I64 else 1

    def encode(self, source: npt.NDArray[Any]) -> WideIntegers:
        """Return ``width`` int64 for each element of a flat array."""
        values = source.astype(np.int64)
        if self._reduction.prescale != 1.0:
            values = _truncated(source.astype(np.float64) * self._reduction.prescale)
        if self.width == 1:
            return values
        pairs = np.empty((len(values), 2), np.int64)
        np.fmod(values, self._members, out=pairs[:, 1])  # with the sign of the element, so that quotients fit
        # Without the remainder the division is exact, so its way of rounding does not matter.
        np.floor_divide(values - pairs[:, 1], self._members, out=pairs[:, 0])
        return pairs.reshape(-1)

    def decode(self, reduced: WideIntegers, out: npt.NDArray[Any]) -> None:
        """Write the result of the encoded elements' reduction to a flat array of the elements' type."""
        n = self._members
        if self.width == 2:
            # The sum of the remainders is below n * n in magnitude. Its whole part is carried, and 0 to n - 1 are left.
            quotients, remainders = reduced.reshape(-1, 2).T
            quotients, remainders = quotients + remainders // n, remainders % n
        else:
            quotients, remainders = reduced // n, reduced % n
        # The number to divide by n is quotients * n + remainders, with remainders from 0 to n - 1.
        if self._reduction.postscale == 1.0:
            # The quotient is rounded down; for a negative average with a remainder that is one below the truncated one.
            out[...] = quotients + ((quotients < 0) & (remainders > 0))
        else:
            exact = quotients + remainders / n if self.width == 2 else reduced / n
            out[...] = _truncated(exact * self._reduction.postscale)


def _truncated(values: npt.NDArray[np.float64]) -> WideIntegers:
    with np.errstate(invalid="ignore"):  # for values beyond int64
        return values.astype(np.int64)


# -- Adasum ------------------------------------------------------------------------------------------------------------


Vector = npt.NDArray[Any]
Products = npt.NDArray[np.float64]
"""For each pair and tensor: ``a·a``, ``b·b`` and ``a·b``."""

Pair = tuple[int, int]
Segment = tuple[int, int, int]
"""Number of a tensor, and where its elements begin and end in the vectors."""

ADASUM_BLOCK = 1 << 13
"""Elements worked through at a time: elements that are read twice are still in the cache, and BLAS starts no threads for them."""


def levels(members: int) -> list[list[Pair]]:
    """Return the pairs that are combined, level by level; in ``(a, b)`` the result takes the place of ``a``.

    With a power of two of members, neighbours at distance 1 are combined first, then their results at distance 2, and
    so on, until all is in member 0's place. Otherwise, with ``p`` the largest power of two below, the members from ``p``
    on are combined with members 0, 1, … in a level before those.
    """
    power = 1 << (members.bit_length() - 1)
    found = [[(i, power + i) for i in range(members - power)]] if members > power else []
    distance = 1
    while distance < power:
        found.append([(i, i + distance) for i in range(0, power, 2 * distance)])
        distance *= 2
    return found


def products(vectors: Vector, pairs: Sequence[Pair], segments: Sequence[Segment], tensors: int) -> Products:
    """Return this memory's share of the dot products that a level needs; shares of several memories are added up."""
    result = np.zeros((len(pairs), tensors, 3))
    for row, (a, b) in zip(result, pairs, strict=True):
        for number, start, stop in segments:
            row[number] += _products(vectors[a, start:stop], vectors[b, start:stop])
    return result


def combine(vectors: Vector, pairs: Sequence[Pair], segments: Sequence[Segment], totals: Products) -> None:
    """Combine the pairs of a level in place, given the dot products of whole tensors. The ``b`` are used up."""
    for row, (a, b) in zip(totals, pairs, strict=True):
        for number, start, stop in segments:
            # Python's floats: with numpy's own, numpy 2 would compute the products with float32 vectors in float64.
            aa, bb, ab = row[number].tolist()
            _add_scaled(vectors[a, start:stop], _factor(ab, aa), vectors[b, start:stop], _factor(ab, bb))


def widened(source: Vector, dtype: DType, prescale: float) -> Vector:
    """Return vectors to work on: float16 and bfloat16 as float32, scaled; may be ``source`` itself, changed."""
    if dtype in (DType.F16, DType.BF16):
        wide = np.empty(source.shape, np.float32)
        conversion_of(dtype).widen(source.reshape(-1), wide.reshape(-1))
    else:
        wide = source
    if prescale != 1.0:
        np.multiply(wide, prescale, out=wide)
    return wide


def narrowed(source: Vector, dtype: DType, postscale: float) -> Vector:
    """Return the result in storage type, scaled and rounded once; ``source`` is used up."""
    if postscale != 1.0:
        np.multiply(source, postscale, out=source)
    if dtype not in (DType.F16, DType.BF16):
        return source
    storage = np.empty(source.shape, np.float16 if dtype is DType.F16 else np.uint16)
    conversion_of(dtype).narrow(source, storage)
    return storage


def adasum(addends: HostArrays, dtype: DType, reduction: Reduction = PLAIN[ReduceOp.ADASUM]) -> Vector:
    """Return the Adasum of equally long vectors in storage type, all of which are here; they are left alone.

    Adasum is a sum that counts the common part of its addends only once. Of two vectors it is ::

        Adasum(a, b) = (1 - a·b / 2|a|²) a  +  (1 - a·b / 2|b|²) b

    which is ``a + b`` where they are orthogonal and their mean where they are equal. Source: Maleki, Musuvathi, Mytkowicz,
    Saarikivi, Xu, Eksarevskiy, Ekanayake, Barsoum: "Scaling Distributed Training with Adaptive Summation", 2020
    (arXiv:2006.02924). More than two are combined along a binary tree, see :func:`levels`.

    A vector that is all zeros (or whose squared norm underflows) leaves the other one as it is. Dot products are
    accumulated in float64. Everything here is arithmetic on local memory; :mod:`hvdlab.collectives.engine.operations` decides
    which member has which part of the vectors.
    """
    # Stacked, which copies: the levels combine vectors in place.
    vectors = widened(np.stack(list(addends)), dtype, reduction.prescale)
    segments = [(0, 0, vectors.shape[1])]
    with np.errstate(all="ignore"):
        for pairs in levels(len(addends)):
            combine(vectors, pairs, segments, products(vectors, pairs, segments, 1))
        return narrowed(vectors[0], dtype, reduction.postscale)


def _factor(product: float, square: float) -> float:
    return 1.0 - product / (2.0 * square) if square > 0.0 else 1.0


def _products(a: Vector, b: Vector) -> Products:
    result = np.zeros(3)
    for start in range(0, len(a), ADASUM_BLOCK):
        left = a[start : start + ADASUM_BLOCK].astype(np.float64, copy=False)
        right = b[start : start + ADASUM_BLOCK].astype(np.float64, copy=False)
        result += (np.dot(left, left), np.dot(right, right), np.dot(left, right))
    return result


def _add_scaled(a: Vector, of_a: float, b: Vector, of_b: float) -> None:
    for start in range(0, len(a), ADASUM_BLOCK):
        left, right = a[start : start + ADASUM_BLOCK], b[start : start + ADASUM_BLOCK]
        np.multiply(left, of_a, out=left)
        np.multiply(right, of_b, out=right)
        np.add(left, right, out=left)
