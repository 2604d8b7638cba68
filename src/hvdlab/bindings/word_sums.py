"""Fingerprints that a device makes of its memory's contents, out of sums of products, which have the same bits in any order of computation.

A block is read as signed words of 32 bits in rows. For each of some sets of weights, a row becomes the sum of its words times their weights, modulo
2**64. The halves of these sums are words again, and become one sum in the same way. The block is reduced to a number for each set of weights;
their SHA-1 is its fingerprint.

Equal blocks have equal fingerprints. Let two blocks differ in a word, by less than 2**32. The difference has 31 factors of two at most. So the sums of its row are
equal for one in 2**33 of all weights at most, for any values of the other words. Those of the block are equal for as many. With independent weights for each set
two blocks that differ have equal numbers with a probability of ``2**(-32 * SETS)``, as low as that of two equal values of SHA-1. As SHA-1
here, this is for data that was not made to deceive.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

from hvdlab.collectives.fingerprint import BLOCK, fingerprint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]

SETS = 5
"""Sets of weights."""
COLUMNS = 1024
"""Words of a row."""
ROWS = BLOCK // 4 // COLUMNS
"""Rows of a block; a shorter one ends with zeros."""
LEAST = 256 << 10
"""Bytes from which an array's fingerprints are made on its device: to copy a smaller one takes no longer than to launch the kernels."""


@cache
def weights(rows: int, columns: int) -> Integers:
    """Return for each set the weights of a row's words, then those of the lower and of the higher halves of all rows' sums. The same in all processes.

    Args:
        rows: Rows of a block.
        columns: Words of a row.
    """
    import numpy as np  # not above: the hooks of torch, which use this, may be asked in the middle of an import

    width = columns + 2 * rows
    drawn = hashlib.shake_128(b"hvdlab: weights of word sums").digest(8 * SETS * width)
    found = np.frombuffer(drawn, "<i8").astype(np.int64).reshape(SETS, width)
    found.flags.writeable = False
    return found


def fingerprints(sums: npt.NDArray[Any]) -> bytes:
    """Return the fingerprints of blocks, one behind the other, out of a row of ``SETS`` numbers for each."""
    import numpy as np

    return b"".join(fingerprint(row.tobytes()) for row in np.ascontiguousarray(sums, "<i8"))
