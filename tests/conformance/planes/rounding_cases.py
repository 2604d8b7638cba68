"""How much precision a sum of 16-bit floats may lose: one rounding of the exact sum. The cases run inside workers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from conformance.planes import inputs
from conformance.planes.actor import CollectiveActor
from hvdlab.collectives.types import SUM, DType, ReduceOp, Reduction

BITS = {DType.F16: 10, DType.BF16: 7}
"""Of the fraction."""


def rounded_once(
    got: npt.NDArray[np.float64], exact: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64], dtype: DType
) -> None:
    """Whether ``got`` is ``exact`` to half a unit in the last place, plus float32's error for addends of ``sizes``."""
    exponents = np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14)))
    half_unit = np.exp2(exponents - BITS[dtype] - 1)
    excess = np.abs(got - exact) - half_unit - 8 * 2.0**-24 * sizes
    assert (excess <= 0).all(), (got[excess.argmax()], exact[excess.argmax()], excess.max())


def sums(actor: CollectiveActor, dtype: DType, counts: list[int]) -> int:
    """Allreduce and reducescatter of addends of very different sizes, plain and as an average."""
    n = actor.size
    parts = []
    for number, count in enumerate(counts):
        rng = np.random.default_rng([number, count])
        wide = rng.normal(size=(n, count)) * np.exp2(rng.integers(-6, 7, size=(n, count)))
        parts.append([inputs.from_float64(row, dtype) for row in wide])
    total = 0
    for postscale in (1.0, 1.0 / n):
        mine = [part[actor.index].copy() for part in parts]
        outs = actor.allreduce(mine, dtype, Reduction(ReduceOp.SUM, postscale=postscale), False)
        for part, out in zip(parts, outs, strict=True):
            addends = np.stack([inputs.to_float64(p, dtype) for p in part]) * postscale
            rounded_once(inputs.to_float64(out, dtype), addends.sum(0), np.abs(addends).sum(0), dtype)
        total ^= inputs.digest(outs)
    part = parts[0]
    even = [len(part[0]) // n] * n
    cut = [p[: sum(even)].copy() for p in part]
    out = actor.reducescatter(cut[actor.index], even, dtype, SUM)
    start = sum(even[: actor.index])
    addends = np.stack([inputs.to_float64(p[start : start + even[0]], dtype) for p in cut])
    rounded_once(inputs.to_float64(out, dtype), addends.sum(0), np.abs(addends).sum(0), dtype)
    return total
