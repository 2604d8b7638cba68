"""The table of a launch: what a kernel reads, computes and writes. ``kernels.cu`` has its layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]

LINE = 16
"""Bytes that a thread moves at a time if all addresses of a job are multiples of it."""
LEAST_CHUNK, MOST_CHUNK = 4096, 65536
"""Bytes of an input that a block works on at a time."""
BLOCKS = 1024
"""Blocks that fill a large GPU; with fewer chunks than that some of it stays idle."""
MOST_ADDRESSES = 128
"""Addresses of a job, as ``MOST`` in ``kernels.cu``."""

_ALIGNED = np.uint64(1 << 63)


@dataclass(frozen=True, slots=True)
class Table:
    """Jobs for a launch.

    Attributes:
        words: The words that the kernel reads.
        jobs: Number of jobs that have elements.
        chunk: Elements of a chunk.
        chunks: Number of chunks of all jobs.
    """

    words: Addresses
    jobs: int
    chunk: int
    chunks: int


def table_of(counts: npt.NDArray[np.int64], addresses: Addresses, itemsize: int) -> Table:
    """The table of jobs.

    Args:
        counts: Elements of each job.
        addresses: A row for each job: the addresses that it reads, then those that it writes.
        itemsize: Bytes of an element.
    """
    kept = counts > 0
    if not kept.all():
        counts, addresses = counts[kept], addresses[kept]
    jobs = len(counts)
    chunk = chunk_bytes(int(counts.sum()) * itemsize) // itemsize
    chunks = -(-counts // chunk)
    words = np.empty(jobs + 1 + jobs + addresses.size, np.uint64)
    words[0] = 0
    np.cumsum(chunks, out=words[1 : jobs + 1], dtype=np.uint64)
    tagged = words[jobs + 1 : 2 * jobs + 1]
    tagged[:] = counts
    aligned = (np.bitwise_or.reduce(addresses, axis=1) % np.uint64(LINE)) == 0
    tagged[aligned] |= _ALIGNED
    words[2 * jobs + 1 :] = addresses.reshape(-1)
    return Table(words, jobs, chunk, int(words[jobs]))


def chunk_bytes(total: int) -> int:
    """Bytes of a chunk, a power of two, such that ``total`` bytes keep a GPU busy."""
    chunk = LEAST_CHUNK
    while chunk < MOST_CHUNK and chunk * BLOCKS < total:
        chunk *= 2
    return chunk


def share(
    counts: npt.NDArray[np.int64], part: int, parts: int, itemsize: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which elements of each job one of several GPUs works on: where they begin, and how many there are.

    Shares begin at multiples of a line, so that the shares of an aligned job are aligned too.
    """
    grain = LINE // itemsize
    lines = -(-counts // grain)
    begin = np.minimum(lines * part // parts * grain, counts)
    end = np.minimum(lines * (part + 1) // parts * grain, counts)
    return begin, end - begin
