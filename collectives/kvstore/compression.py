"""Gradient compression to two bits or one, with the error kept for the next push.

The formulas are those of MXNet: ``r += g``; ``q`` is what is sent of ``r``; ``r -= q``. All in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.errors import KVStoreError
from hvdlab.collectives.kvstore.keys import require

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

TYPES = ("2bit", "1bit")
BLOCK = 1 << 15
"""Elements that are worked on at once, so that they stay in the cache."""


@dataclass(frozen=True, slots=True)
class GradientCompression:
    """How gradients are compressed.

    Attributes:
        type: ``2bit`` sends ``+threshold`` where the residual reaches it, ``-threshold`` where it reaches ``-threshold``, else 0;
            ``1bit`` sends +1 where the residual is above the threshold, else -1.
        threshold: Positive for ``2bit``.
    """

    type: str
    threshold: float = 0.5

    @classmethod
    def from_params(cls, params: Any) -> GradientCompression:
        """Make one from a dict with ``type`` and ``threshold`` (default 0.5); other entries are ignored, and values may be text.

        Raises:
            AssertionError: It is no dict.
            KVStoreError: There is no ``type``, or type or threshold are wrong.
        """
        require(isinstance(params, Mapping), f"unexpected type for compression_params: {type(params)}")
        texts = {str(name): str(value) for name, value in params.items()}
        if "type" not in texts:
            raise KVStoreError(f"gradient compression needs a type, one of {', '.join(TYPES)}")
        if texts["type"] not in TYPES:
            raise KVStoreError(
                f"Unknown type for gradient compression {texts['type']}; known are {', '.join(TYPES)}"
            )
        try:
            threshold = float(texts.get("threshold", "0.5"))
        except ValueError:
            raise KVStoreError(f"threshold must be a number, not {texts['threshold']!r}") from None
        if texts["type"] == "2bit" and not threshold > 0:
            raise KVStoreError(f"threshold must be greater than 0, not {threshold:g}")
        return cls(texts["type"], threshold)

    def quantize(self, gradient: Floats, residual: Floats, out: Floats) -> None:
        """Write to ``out`` what is sent of a gradient, and keep the rest.

        Args:
            gradient: The gradient, flat and contiguous, float32.
            residual: What earlier calls have not sent, of the same size, zeros at first; changed in place.
            out: Gets the values that are sent, of the same size; may be ``gradient``.
        """
        t = np.float32(self.threshold)
        high, low = np.empty((2, min(BLOCK, gradient.size)), np.bool_)
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, gradient.size, BLOCK):
                r, q = residual[start : start + BLOCK], out[start : start + BLOCK]
                above, below = high[: r.size], low[: r.size]
                np.add(r, gradient[start : start + BLOCK], out=r)
                if self.type == "2bit":
                    # The difference of two comparisons is 1, -1 or 0; its product with the threshold is exact.
                    np.greater_equal(r, t, out=above)
                    np.less_equal(r, -t, out=below)
                    signs = above.view(np.int8)
                    np.subtract(signs, below.view(np.int8), out=signs)
                    np.copyto(q, signs)
                    np.multiply(q, t, out=q)
                else:
                    np.greater(r, t, out=above)
                    np.copyto(q, above)
                    np.multiply(q, np.float32(2), out=q)
                    np.subtract(q, np.float32(1), out=q)
                np.subtract(r, q, out=r)

    def pack(self, quantized: Floats) -> Bytes:
        """Pack the output of :meth:`quantize` into bits in MXNet's layout: the first value in the top bits of byte 0.

        ``2bit``: 11 plus, 10 minus, 00 zero, in whole float32 words of 16 values. ``1bit``: 1 plus, 0 minus, in words of 32.
        """
        if self.type == "1bit":
            bits = np.zeros(-(-quantized.size // 32) * 32, np.uint8)
            bits[: quantized.size] = quantized > 0
            return np.packbits(bits)
        bits = np.zeros((-(-quantized.size // 16) * 16, 2), np.uint8)
        bits[: quantized.size, 0] = quantized != 0
        bits[: quantized.size, 1] = quantized > 0
        return np.packbits(bits)

    def unpack(self, packed: Bytes, size: int) -> Floats:
        """The reverse of :meth:`pack`, for ``size`` values."""
        bits = np.unpackbits(packed)
        if self.type == "1bit":
            return np.where(bits[:size] == 1, np.float32(1), np.float32(-1))
        sent, plus = bits.reshape(-1, 2)[:size].T
        values = np.where(plus == 1, np.float32(self.threshold), np.float32(-self.threshold))
        return np.where(sent == 1, values, np.float32(0))
