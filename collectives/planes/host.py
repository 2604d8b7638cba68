"""Planes of the host: their operations work on arrays, on the thread that calls them, and return when they are done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hvdlab.collectives.arrays import storage_type
from hvdlab.collectives.dtypes import DType, ReduceOp
from hvdlab.collectives.planes.base import Phases, Plane
from hvdlab.collectives.planes.buffers import HOST, Buffer, HostArray, host_view


class HostPlane(Plane):
    """A data plane of the host's memory.

    Its operations take arrays: one-dimensional, C-contiguous, in storage type. They block until the
    operation has ended, and raise the error that it ends with.
    """

    device: ClassVar[str] = HOST

    @abstractmethod
    def allreduce(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: Phases,
    ) -> None:
        """Reduce element by element over all members; see :meth:`Plane.start_allreduce`."""

    @abstractmethod
    def allgather(self, send: HostArray, counts: Sequence[int], out: HostArray, phases: Phases) -> None:
        """Concatenate the members' ``send`` (``counts[i]`` elements each) in member order into ``out``."""

    @abstractmethod
    def broadcast(self, buffer: HostArray, root: int, phases: Phases) -> None:
        """Copy the buffer of member ``root`` (a position) to all: it is read on that member and written on the others."""

    @abstractmethod
    def reducescatter(
        self,
        send: HostArray,
        counts: Sequence[int],
        out: HostArray,
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: Phases,
    ) -> None:
        """Reduce ``send`` (``sum(counts)`` elements) and leave slice ``i`` (``counts[i]`` elements) in ``out`` of member ``i``."""

    @abstractmethod
    def alltoall(
        self,
        send: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: HostArray,
        phases: Phases,
    ) -> None:
        """Send the ``j``-th piece of ``send`` to member ``j``; ``out`` gets the pieces in member order."""

    @abstractmethod
    def barrier(self, phases: Phases) -> None:
        """Return once all members have called it."""

    # -- buffers --------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DType) -> HostArray:
        return np.empty(shape, storage_type(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> HostArray:
        # The system hands out zeroed memory as it is touched: until the operation's turn comes, the zeros cost nothing.
        return np.zeros(shape, storage_type(dtype))

    def start_allreduce(
        self,
        ins: Sequence[Buffer],
        outs: Sequence[Buffer],
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: Phases,
    ) -> None:
        views = [host_view(source) for source in ins]
        self.allreduce(views, [host_view(out) for out in outs], dtype, op, prescale, postscale, phases)

    def start_allgather(self, send: Buffer, counts: Sequence[int], out: Buffer, phases: Phases) -> None:
        self.allgather(host_view(send), counts, host_view(out), phases)

    def start_broadcast(self, source: Buffer | None, out: Buffer, root: int, phases: Phases) -> None:
        target = host_view(out)
        if source is not None and root == self.context.index:
            np.copyto(target, host_view(source))
        self.broadcast(target, root, phases)

    def start_reducescatter(
        self,
        send: Buffer,
        counts: Sequence[int],
        out: Buffer,
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: Phases,
    ) -> None:
        self.reducescatter(host_view(send), counts, host_view(out), dtype, op, prescale, postscale, phases)

    def start_alltoall(
        self,
        send: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Buffer,
        phases: Phases,
    ) -> None:
        self.alltoall(host_view(send), send_counts, recv_counts, host_view(out), phases)

    def start_barrier(self, phases: Phases) -> None:
        self.barrier(phases)
