"""Adasum: a sum that counts the common part of its addends only once.

Of two vectors it is ::

    Adasum(a, b) = (1 - a·b / 2|a|²) a  +  (1 - a·b / 2|b|²) b

which is ``a + b`` where they are orthogonal and their mean where they are equal. Source: Maleki, Musuvathi, Mytkowicz,
Saarikivi, Xu, Eksarevskiy, Ekanayake, Barsoum: "Scaling Distributed Training with Adaptive Summation", 2020
(arXiv:2006.02924). More than two are combined along a binary tree, see :func:`levels`.

A vector that is all zeros (or whose squared norm underflows) leaves the other one as it is. Dot products are
accumulated in float64. Everything here is arithmetic on local memory; which member has which part of the vectors is the
business of :mod:`hvdlab.collectives.engine.operations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.planes.buffers import HostArrays
from hvdlab.collectives.reduce.fold import conversion_of
from hvdlab.collectives.types import PLAIN, DType, ReduceOp, Reduction

Vector = npt.NDArray[Any]
Products = npt.NDArray[np.float64]
"""For each pair and tensor: ``a·a``, ``b·b`` and ``a·b``."""

Pair = tuple[int, int]
Segment = tuple[int, int, int]
"""Number of a tensor, and where its elements begin and end in the vectors."""

BLOCK = 1 << 13
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
    """Return the Adasum of equally long vectors in storage type, all of which are here; they are left alone."""
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
    for start in range(0, len(a), BLOCK):
        left = a[start : start + BLOCK].astype(np.float64, copy=False)
        right = b[start : start + BLOCK].astype(np.float64, copy=False)
        result += (np.dot(left, left), np.dot(right, right), np.dot(left, right))
    return result


def _add_scaled(a: Vector, of_a: float, b: Vector, of_b: float) -> None:
    for start in range(0, len(a), BLOCK):
        left, right = a[start : start + BLOCK], b[start : start + BLOCK]
        np.multiply(left, of_a, out=left)
        np.multiply(right, of_b, out=right)
        np.add(left, right, out=left)
