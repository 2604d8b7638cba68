"""float16 and bfloat16: accumulated in float32 over all members, rounded once.

numpy converts float16 slowly and knows no bfloat16; a binding whose framework is faster registers its own
:class:`Conversion` with :func:`register_conversion`. Both directions must round to nearest even, keep NaN a NaN, and
give the same bits in every process of a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.dtypes import DType
from hvdlab.collectives.planes.buffers import HostArrays

Buffer = npt.NDArray[Any]
Wide = npt.NDArray[np.float32]
BLOCK = 1 << 15
"""Elements converted at a time: the two float32 blocks stay in a 1 MiB second-level cache."""

_QUIET_NAN = np.uint16(0x7FC0)


@dataclass(frozen=True, slots=True)
class Conversion:
    """The two functions that convert one 16-bit type.

    Attributes:
        widen: ``widen(source, out)``: storage type to float32, equally long, no overlap.
        narrow: ``narrow(source, out)``: float32 to storage type; may overwrite ``source``.
    """

    widen: Callable[[Buffer, Wide], None]
    narrow: Callable[[Wide, Buffer], None]


def widen_f16(source: Buffer, out: Wide) -> None:
    out[...] = source


def narrow_f16(source: Wide, out: Buffer) -> None:
    np.copyto(out, source, casting="same_kind")


def widen_bf16(source: Buffer, out: Wide) -> None:
    np.left_shift(source, 16, out.view(np.uint32), dtype=np.uint32)


def narrow_bf16(source: Wide, out: Buffer) -> None:
    """Round to nearest even on the bits. NaN is set apart, since rounding up could carry it into an infinity."""
    nan = np.isnan(source)
    bits = source.view(np.uint32)
    up = bits >> 16
    up &= 1
    up += 0x7FFF
    bits += up
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
    """The conversion in use, e.g. to put it back after a test."""
    return _conversions[dtype]


class HalfFold:
    """A fold of float16 or bfloat16, see :class:`hvdlab.collectives.reduce.fold.Fold`."""

    def __init__(self, dtype: DType, ufunc: Callable[..., Any]) -> None:
        self._conversion = _conversions[dtype]
        self._ufunc = ufunc
        self._sum = np.empty(BLOCK, np.float32)
        self._next = np.empty(BLOCK, np.float32)

    def __call__(self, sources: HostArrays, out: Buffer, prescale: float, postscale: float) -> None:
        for start in range(0, len(out), BLOCK):
            stop = min(start + BLOCK, len(out))
            self._fold_block([s[start:stop] for s in sources], out[start:stop], prescale, postscale)

    def _fold_block(self, sources: list[Buffer], out: Buffer, prescale: float, postscale: float) -> None:
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
