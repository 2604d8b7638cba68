"""The ``mpi`` plane: ranks that an MPI launcher started, through mpi4py.

MPI offers no way to cancel a collective, so every operation is a non-blocking one that is polled and can be given up.
A request that was given up may still write into its buffers: they stay alive with the process, and the next epoch has
a communicator of its own. MPI makes progress inside the poll, hence polling is the transfer, not a wait beside it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlab.collectives.dtypes import DType, ReduceOp
from hvdlab.collectives.planes.base import Buffer, Phases, Plane, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.staging import Staging, narrow, scale, widen

# While a transfer may be under way the poll only yields; a member that is much later than the bytes would need is
# waited for in short sleeps.
_BYTES_PER_SECOND = 500e6
_EAGER_SECONDS = 0.002
_SLEEP_SECONDS = 100e-6

_LAUNCHER_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


class MpiPlane(Plane):
    """Collectives of one process set and epoch over MPI. See :class:`hvdlab.collectives.planes.base.Plane`."""

    name = "mpi"

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context)
        self._staging = Staging()
        self._comm: Any = None
        self._aborted = threading.Event()

    @classmethod
    def unavailable(cls) -> str | None:
        if not any(name in os.environ for name in _LAUNCHER_VARIABLES):
            return "the mpi plane needs ranks that mpiexec started; use `--launcher mpi`"
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            return (
                f"the mpi plane needs mpi4py and an MPI library ({error}); install `hvdlab[mpi]` and `mpich`"
            )
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            return "this MPI does not allow several threads (MPI_THREAD_MULTIPLE); choose plane shm or gloo"
        return None

    def connect(self, timeout: float) -> None:
        from mpi4py import MPI

        me, store = self.context, self.context.store
        if store is None:
            raise PlaneBroken("the mpi plane needs a rendezvous store")
        # Create_group blocks without end, so every member shows first that it is about to enter.
        store.set(f"mpi/{me.index}", str(MPI.COMM_WORLD.rank).encode())
        world_ranks = [int(store.get(f"mpi/{index}", timeout)) for index in range(me.size)]
        group = MPI.COMM_WORLD.group.Incl(world_ranks)
        try:
            self._comm = MPI.COMM_WORLD.Create_group(group, tag=(me.process_set * 4099 + me.epoch) % 32000)
        except MPI.Exception as error:
            raise PlaneBroken(f"MPI could not make a communicator: {error}") from error
        finally:
            group.Free()

    def allreduce(
        self,
        ins: Sequence[Buffer],
        outs: Sequence[Buffer],
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: Phases,
    ) -> None:
        from mpi4py import MPI

        start = time.monotonic_ns()
        packed = self._staging.pack(ins, outs, dtype, prescale)
        phases.pack += time.monotonic_ns() - start
        self._finish(self._comm.Iallreduce(MPI.IN_PLACE, packed, _mpi_op(op)), phases, packed)
        start = time.monotonic_ns()
        self._staging.unpack(packed, outs, dtype, postscale)
        phases.unpack += time.monotonic_ns() - start

    def allgather(self, send: Buffer, counts: Sequence[int], out: Buffer, phases: Phases) -> None:
        sizes = [c * send.itemsize for c in counts]
        self._finish(self._comm.Iallgatherv(_raw(send), [_raw(out), sizes]), phases, send, out)

    def broadcast(self, buffer: Buffer, root: int, phases: Phases) -> None:
        self._finish(self._comm.Ibcast(_raw(buffer), root), phases, buffer)

    def reducescatter(
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
        start = time.monotonic_ns()
        compute = self._staging.compute_type(dtype)
        widened = np.empty(send.size, compute)
        widen(send, widened, dtype)
        scale(widened, prescale)
        phases.pack += time.monotonic_ns() - start
        reduced = np.empty(counts[self.context.index], compute)
        request = self._comm.Ireduce_scatter(widened, reduced, list(counts), _mpi_op(op))
        self._finish(request, phases, widened, reduced)
        start = time.monotonic_ns()
        scale(reduced, postscale)
        narrow(reduced, out, dtype)
        phases.unpack += time.monotonic_ns() - start

    def alltoall(
        self,
        send: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Buffer,
        phases: Phases,
    ) -> None:
        item = send.itemsize
        request = self._comm.Ialltoallv(
            [_raw(send), [c * item for c in send_counts]], [_raw(out), [c * item for c in recv_counts]]
        )
        self._finish(request, phases, send, out)

    def barrier(self, phases: Phases) -> None:
        start = time.monotonic_ns()
        moved = Phases()
        self._finish(self._comm.Ibarrier(), moved)
        phases.wait += time.monotonic_ns() - start

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        # MPI_Comm_free is collective and would wait for members that may be gone; the handle is left to MPI_Finalize.
        self._comm = None

    def _finish(self, request: Any, phases: Phases, *buffers: Buffer) -> None:
        """Poll a request to its end; give it up on abort, keeping its buffers alive."""
        start = time.monotonic_ns()
        eager_until = start + int(
            1e9 * max(_EAGER_SECONDS, sum(b.nbytes for b in buffers) / _BYTES_PER_SECOND)
        )
        while not request.Test():
            if self._aborted.is_set():
                _leave_to_mpi(request, *buffers)
                raise PlaneAborted
            if time.monotonic_ns() < eager_until:
                os.sched_yield()
            else:
                self._aborted.wait(_SLEEP_SECONDS)
        phases.transfer += time.monotonic_ns() - start
        if self._aborted.is_set():
            raise PlaneAborted


def _leave_to_mpi(*objects: object) -> None:
    """Keep these alive for as long as the process lives: MPI may still read and write them."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _raw(buffer: Buffer) -> Buffer:
    return buffer.view(np.uint8)


def _mpi_op(op: ReduceOp) -> Any:
    from mpi4py import MPI

    return {ReduceOp.SUM: MPI.SUM, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX, ReduceOp.PRODUCT: MPI.PROD}[
        op
    ]
