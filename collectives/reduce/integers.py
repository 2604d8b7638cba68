"""Averages and scaled reductions of integers, made of plain reductions of int64 that can't overflow on the way.

A plane reduces integers modulo the width of their type. That is right for a sum, but an average fits into the type where
the sum before the division does not, and so may a scaled sum. So each member :meth:`encodes <WideReduction.encode>` its
elements as int64, any plane reduces these, and each member :meth:`decodes <WideReduction.decode>` the result:

* Elements are scaled by ``prescale`` in float64 and truncated toward zero (without a scale they are as they are).
* A sum of narrow types is exact in int64. For an average of int64 each element travels as a quotient and a remainder of
  the number of members, whose sums can't overflow.
* An average is truncated toward zero, and exact also beyond 2**53: that of equal values is that value.
* ``postscale`` is applied to the exact result in float64, and the product is truncated. A result that does not fit
  into the type is taken modulo its width, as a sum is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.types import PLAIN, SUM, DType, ReduceOp, Reduction

Wide = npt.NDArray[np.int64]


def needs_width(dtype: DType, reduction: Reduction) -> bool:
    """Return whether a reduction of this element type has to be made as a :class:`WideReduction`."""
    if dtype.is_floating or dtype is DType.BOOL:
        return False
    return reduction.op is ReduceOp.AVERAGE or (dtype is not DType.I64 and reduction.is_scaled)


class WideReduction:
    """Average or scaled reduction of integers.

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

    def encode(self, source: npt.NDArray[Any]) -> Wide:
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

    def decode(self, reduced: Wide, out: npt.NDArray[Any]) -> None:
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


def _truncated(values: npt.NDArray[np.float64]) -> Wide:
    with np.errstate(invalid="ignore"):  # for values beyond int64
        return values.astype(np.int64)
