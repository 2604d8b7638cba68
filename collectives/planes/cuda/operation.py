"""An operation: what a member brings to it, and the jobs that a worker makes of what all members bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.dtypes import DType, ReduceOp
from hvdlab.collectives.planes.cuda.gpus import CudaBuffer
from hvdlab.collectives.planes.cuda.jobs import Addresses

Counts = npt.NDArray[np.int64]


class Jobs(NamedTuple):
    """The jobs of an operation.

    Attributes:
        counts: Number of elements of each job.
        ins: Addresses that each job reads, a row for each job.
        outs: Addresses that each job writes, likewise.
    """

    counts: Counts
    ins: Addresses
    outs: Addresses


class Inputs(NamedTuple):
    """What all members bring to an operation, with addresses that are valid for the worker.

    Attributes:
        ins, outs: Addresses of the tensors, by member and tensor.
        numbers: What each member announced besides, by member.
    """

    ins: Addresses
    outs: Addresses
    numbers: Counts


class JobMaker(Protocol):
    """Makes the jobs of an operation. Two that are equal make the same jobs of the same inputs."""

    def __call__(self, given: Inputs, /) -> Jobs: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Operation:
    """What a member brings to an operation.

    Attributes:
        ins, outs: Its tensors, in pairs.
        jobs: Makes the jobs from what all members bring; equal on all members.
        dtype: Element type of a reduction; ``None`` moves bytes, and counts are bytes then.
        op, prescale, postscale: How to reduce.
        numbers: Further numbers that the worker needs, one for each member.
    """

    ins: Sequence[CudaBuffer]
    outs: Sequence[CudaBuffer]
    jobs: JobMaker
    dtype: DType | None = None
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    numbers: Sequence[int] = field(default=())

    @property
    def itemsize(self) -> int:
        """Bytes of one counted element: an element of ``dtype``, or a byte."""
        return 1 if self.dtype is None else self.dtype.itemsize


class AllreduceJobs(NamedTuple):
    """A job for each tensor, which reads that tensor of all members and writes all their outputs for it."""

    counts: tuple[int, ...]

    def __call__(self, given: Inputs) -> Jobs:
        return Jobs(np.array(self.counts, np.int64), given.ins.T, given.outs.T)


class AllgatherJobs(NamedTuple):
    """A job for each member, which copies its tensor to its place in all members' outputs. ``sizes`` are in bytes."""

    sizes: tuple[int, ...]

    def __call__(self, given: Inputs) -> Jobs:
        counts = np.array(self.sizes, np.int64)
        begins = _begins(counts)
        outs = given.outs[:, 0][np.newaxis, :] + begins[:, np.newaxis].astype(np.uint64)
        return Jobs(counts, given.ins[:, :1], outs)


class BroadcastJobs(NamedTuple):
    """One job: the root's tensor is read and goes to the outputs of all, but its own if that is the same memory."""

    nbytes: int
    root: int

    def __call__(self, given: Inputs) -> Jobs:
        source, targets = given.ins[self.root, 0], given.outs[:, 0]
        return Jobs(np.array([self.nbytes]), source.reshape(1, 1), targets[targets != source].reshape(1, -1))


class ReducescatterJobs(NamedTuple):
    """A job for each member: its slice of all members' tensors is read, and its output is written."""

    counts: tuple[int, ...]
    itemsize: int

    def __call__(self, given: Inputs) -> Jobs:
        each = np.array(self.counts, np.int64)
        begins = (_begins(each) * self.itemsize).astype(np.uint64)
        return Jobs(each, given.ins[:, 0][np.newaxis, :] + begins[:, np.newaxis], given.outs[:, :1])


class AlltoallJobs(NamedTuple):
    """A job for each pair of members. A member's ``numbers`` are how many elements it sends to each member."""

    itemsize: int

    def __call__(self, given: Inputs) -> Jobs:
        sizes = given.numbers * self.itemsize
        sent = np.cumsum(sizes, axis=1) - sizes
        received = np.cumsum(sizes, axis=0) - sizes
        ins = given.ins[:, :1] + sent.astype(np.uint64)
        outs = given.outs[:, 0][np.newaxis, :] + received.astype(np.uint64)
        return Jobs(sizes.reshape(-1), ins.reshape(-1, 1), outs.reshape(-1, 1))


def _begins(counts: Counts) -> Counts:
    found: Counts = np.cumsum(counts) - counts
    return found
