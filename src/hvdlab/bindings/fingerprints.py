"""Fingerprints of data: equal ones mean equal bytes.

SHA-1 is the quickest hash of the standard library on every processor that has instructions for it, and among the
quickest on others. No attacker chooses the data: hvdlab compares variables of one user's own ranks.

A device makes fingerprints of its memory's contents out of sums of products, which have the same bits in any order of computation.
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
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]

SIZE = 20
"""Bytes of a fingerprint."""

BLOCK = 4 << 20
"""Bytes that get a fingerprint of their own, so that blocks that differ can be told from those that don't."""

MOST_THREADS = 8
"""Threads of one process at most, for any number of cores."""


def fingerprint(*parts: Any) -> bytes:
    """Return the fingerprint of bytes-like objects, one after the other."""
    # A Python in FIPS mode refuses SHA-1 for security alone.
    made = hashlib.sha1(usedforsecurity=False)
    for part in parts:
        made.update(part)
    return made.digest()


def of_blocks(
    size: int, read: Callable[[int, int], Any], *, block: int = BLOCK, pool: ThreadPoolExecutor | None = None
) -> bytes:
    """Return the fingerprints of the blocks of ``size`` bytes, one behind the other.

    Args:
        size: Number of bytes.
        read: ``read(offset, length)`` gives a contiguous bytes-like object.
        block: Bytes of a block; the last one can be shorter.
        pool: Threads among which the blocks are divided.
    """

    def one(offset: int) -> bytes:
        return fingerprint(read(offset, min(block, size - offset)))

    offsets = range(0, size, block)
    made: Iterable[bytes] = map(one, offsets) if pool is None or len(offsets) < 2 else pool.map(one, offsets)
    return b"".join(made)


def differing(ours: bytes, theirs: bytes) -> list[int]:
    """Return the numbers of the blocks in which two results of :func:`of_blocks` differ; both of data of one size."""
    return [n // SIZE for n in range(0, len(ours), SIZE) if ours[n : n + SIZE] != theirs[n : n + SIZE]]


def threads_for(processes: int) -> int:
    """Return how many threads each of some processes on this host gets to make fingerprints at the same time."""
    # By the cores that this process may use, which Slurm or a container has limited; cpu_count() has those of
    # the machine.
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, processes)))


# -- fingerprints that a device makes ----------------------------------------------------------------------------------


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
