"""Fingerprints of data: equal ones mean equal bytes.

SHA-1 is the quickest hash of the standard library on every processor that has instructions for it, and among the
quickest on others. No attacker chooses the data: hvdlab compares variables of one user's own ranks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SIZE = 20
"""Bytes of a fingerprint."""

BLOCK = 4 << 20
"""Bytes that get a fingerprint of their own, so that blocks that differ can be told from those that don't."""

MOST_THREADS = 8
"""Threads of one process at most, for any number of cores."""


def fingerprint(*parts: Any) -> bytes:
    """Return the fingerprint of bytes-like objects, one after the other."""
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
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, processes)))
