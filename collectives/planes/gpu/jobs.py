"""From an operation to the table of a launch: a kernel's inputs, computation and outputs.

A member brings a :class:`GpuOperation`. A worker makes :class:`Jobs` of all members' operations, and of these the :class:`JobTable`, whose
layout ``kernels.cu`` has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.planes.gpu.gpu_plane import CudaBuffer
from hvdlab.collectives.types import SUM, DType, Reduction

Addresses = npt.NDArray[np.uint64]

LINE = 16
"""Bytes that a thread moves at a time if all addresses of a job are multiples of it."""
LEAST_CHUNK, MOST_CHUNK = 4096, 65536
"""Bytes of an input that a block works on at a time."""
BLOCKS = 1024
"""Blocks that fill a large GPU; with fewer chunks than that some of it stays idle."""
MOST_ADDRESSES = 128
"""Addresses of a job, as ``MOST`` in ``kernels.cu``."""

# The bit of a job's count by which ``kernels.cu`` knows that it may move whole lines (``ALIGNED`` there).
_ALIGNED = np.uint64(1 << 63)


@dataclass(frozen=True, slots=True)
class JobTable:
    """Table of the jobs of a launch.

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


def table_of(counts: npt.NDArray[np.int64], addresses: Addresses, itemsize: int) -> JobTable:
    """Return the table of jobs.

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
    # The layout that ``next_chunk`` in ``kernels.cu`` reads: the first chunk of each job, and the number of all; counts; addresses.
    words = np.empty(jobs + 1 + jobs + addresses.size, np.uint64)
    words[0] = 0
    np.cumsum(chunks, out=words[1 : jobs + 1], dtype=np.uint64)
    tagged = words[jobs + 1 : 2 * jobs + 1]
    tagged[:] = counts
    # Of all addresses of a job at once: their union has a low bit as soon as one of them has.
    aligned = (np.bitwise_or.reduce(addresses, axis=1) % np.uint64(LINE)) == 0
    tagged[aligned] |= _ALIGNED
    words[2 * jobs + 1 :] = addresses.reshape(-1)
    return JobTable(words, jobs, chunk, int(words[jobs]))


def chunk_bytes(total: int) -> int:
    """Return the bytes of a chunk, a power of two, such that ``total`` bytes keep a GPU busy."""
    chunk = LEAST_CHUNK
    while chunk < MOST_CHUNK and chunk * BLOCKS < total:
        chunk *= 2
    return chunk


def share(
    counts: npt.NDArray[np.int64], part: int, parts: int, itemsize: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the elements of each job that one of several GPUs works on: where they begin, and how many there are.

    Shares begin at multiples of a line, so that the shares of an aligned job are aligned too.
    """
    grain = LINE // itemsize
    lines = -(-counts // grain)
    begin = np.minimum(lines * part // parts * grain, counts)
    end = np.minimum(lines * (part + 1) // parts * grain, counts)
    return begin, end - begin


Counts = npt.NDArray[np.int64]


class Jobs(NamedTuple):
    """Jobs of an operation.

    Attributes:
        counts: Number of elements of each job.
        ins: Addresses that each job reads, a row for each job.
        outs: Addresses that each job writes, likewise.
    """

    counts: Counts
    ins: Addresses
    outs: Addresses


class Inputs(NamedTuple):
    """Tensors that all members bring to an operation, with addresses that are valid for the worker.

    Attributes:
        ins, outs: Addresses of the tensors, by member and tensor.
        numbers: Further numbers that each member announced, by member.
    """

    ins: Addresses
    outs: Addresses
    numbers: Counts


class JobMaker(Protocol):
    """Function that makes the jobs of an operation. Two that are equal make the same jobs of the same inputs."""

    def __call__(self, given: Inputs, /) -> Jobs: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class GpuOperation:
    """Operation on a GPU, as one member brings it.

    Attributes:
        ins, outs: Its tensors, in pairs.
        jobs: Makes the jobs from all members' operations; equal on all members.
        dtype: Element type of a reduction; ``None`` moves bytes, and counts are bytes then.
        reduction: How to reduce.
        numbers: Further numbers that the worker needs, one for each member.
    """

    ins: Sequence[CudaBuffer]
    outs: Sequence[CudaBuffer]
    jobs: JobMaker
    dtype: DType | None = None
    reduction: Reduction = SUM
    numbers: Sequence[int] = field(default=())

    @property
    def itemsize(self) -> int:
        """Return the bytes of one counted element: an element of ``dtype``, or a byte."""
        return 1 if self.dtype is None else self.dtype.itemsize


class AllreduceJobs(NamedTuple):
    """Jobs for the tensors, each of which reads its tensor of all members and writes all their outputs for it."""

    counts: tuple[int, ...]

    def __call__(self, given: Inputs) -> Jobs:
        return Jobs(np.array(self.counts, np.int64), given.ins.T, given.outs.T)


class AllgatherJobs(NamedTuple):
    """Jobs for the members, each of which copies its member's tensor to its place in all members' outputs. ``sizes`` are in bytes."""

    sizes: tuple[int, ...]

    def __call__(self, given: Inputs) -> Jobs:
        counts = np.array(self.sizes, np.int64)
        begins = _begins(counts)
        outs = given.outs[:, 0][np.newaxis, :] + begins[:, np.newaxis].astype(np.uint64)
        return Jobs(counts, given.ins[:, :1], outs)


class BroadcastJobs(NamedTuple):
    """Single job: the root's tensor is read and goes to the outputs of all, but its own if that is the same memory."""

    nbytes: int
    root: int

    def __call__(self, given: Inputs) -> Jobs:
        source, targets = given.ins[self.root, 0], given.outs[:, 0]
        # The root's output is left out where it is the input: a kernel would read and write the same bytes.
        return Jobs(np.array([self.nbytes]), source.reshape(1, 1), targets[targets != source].reshape(1, -1))


class ReducescatterJobs(NamedTuple):
    """Jobs for the members: each reads its member's slice of all tensors, and writes that member's output."""

    counts: tuple[int, ...]
    itemsize: int

    def __call__(self, given: Inputs) -> Jobs:
        each = np.array(self.counts, np.int64)
        begins = (_begins(each) * self.itemsize).astype(np.uint64)
        return Jobs(each, given.ins[:, 0][np.newaxis, :] + begins[:, np.newaxis], given.outs[:, :1])


class AlltoallJobs(NamedTuple):
    """Jobs for all pairs of members. A member's ``numbers`` are how many elements it sends to each member."""

    itemsize: int

    def __call__(self, given: Inputs) -> Jobs:
        sizes = given.numbers * self.itemsize
        # Sizes are by sender and receiver. Along a row they follow each other in the sender's input, down a column in the receiver's output.
        sent = np.cumsum(sizes, axis=1) - sizes
        received = np.cumsum(sizes, axis=0) - sizes
        ins = given.ins[:, :1] + sent.astype(np.uint64)
        outs = given.outs[:, 0][np.newaxis, :] + received.astype(np.uint64)
        return Jobs(sizes.reshape(-1), ins.reshape(-1, 1), outs.reshape(-1, 1))


def _begins(counts: Counts) -> Counts:
    found: Counts = np.cumsum(counts) - counts
    return found
