"""The ``mpi`` plane: ranks that an MPI launcher started, through mpi4py.

MPI offers no way to cancel a collective, so every operation is a non-blocking one, which the executor polls and can give up.
A request that was given up may still read and write its buffers, whenever MPI next makes progress. Data that it reads then goes to
members that have not given up, and a root of a large broadcast gets its own data back. So MPI only ever gets memory of this plane's
own, which the process keeps unchanged once a request was given up. The next generation has a communicator of its own. MPI makes progress
inside the poll, hence polling is the transfer, not a wait beside it.
"""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from hvdlab.collectives.planes.base import HostArray, PhaseTimes, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.host import HostPlane, Scratch, Staging, leave_to_library
from hvdlab.collectives.rendezvous import backends
from hvdlab.collectives.types import DType, ReduceOp, Reduction

# While a transfer may be under way the poll only yields the core. Once it takes much longer than the bytes would need, some member
# is late, and the poll sleeps for short times.
_BYTES_PER_SECOND = 500e6  # assumed of every transfer
_EAGER_SECONDS = 0.002  # at least, for small transfers
_SLEEP_SECONDS = 100e-6  # between two polls

_LAUNCHER_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


class MpiPlane(HostPlane):
    """Data plane of one process set and generation over MPI. See :class:`hvdlab.collectives.planes.base.Plane`."""

    name = "mpi"

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context)
        # Open MPI's vector kernels add 8-bit integers with saturation; wider ones wrap to numpy's results.
        self._staging = Staging({DType.U8: np.dtype(np.int32), DType.I8: np.dtype(np.int32)}, direct=False)
        #: Copies of the data to send.
        self._sent = Scratch()
        self._comm: Any = None
        self._aborted = threading.Event()

    @classmethod
    def unavailable(cls) -> str | None:
        if not any(name in os.environ for name in _LAUNCHER_VARIABLES):
            return "the mpi plane needs ranks that mpiexec started; use `--launcher mpi`"
        # Before the import, which starts MPI: MPI_Init of another MPI than the launcher's ends the process.
        wrong = backends.mpi_mismatch(os.environ)
        if wrong is not None:
            return f"{wrong}; install the mpi4py that goes with the launcher, or choose plane shm or gloo"
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
        if MPI.COMM_WORLD.size < me.size:
            raise PlaneBroken(
                f"mpi4py's MPI sees {MPI.COMM_WORLD.size} of {me.size} ranks: it is another MPI than the launcher's. "
                "Install the mpi4py that goes with it, or choose another plane by HVDLAB_PLANE"
            )
        # Create_group blocks without end, so every member shows first that it is about to enter.
        store.set(f"mpi/{me.index}", str(MPI.COMM_WORLD.rank).encode())
        world_ranks = [int(store.get(f"mpi/{index}", timeout)) for index in range(me.size)]
        group = MPI.COMM_WORLD.group.Incl(world_ranks)
        try:
            # A tag for each process set, so that messages of two sets with common members don't meet. MPI guarantees tags up to 32,767.
            self._comm = MPI.COMM_WORLD.Create_group(
                group, tag=(me.process_set * 4099 + me.generation) % 32000
            )
        except MPI.Exception as error:
            raise PlaneBroken(f"MPI could not make a communicator: {error}") from error
        finally:
            group.Free()

    def allreduce(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        from mpi4py import MPI

        start = time.monotonic_ns()
        packed = self._staging.pack(ins, outs, dtype, reduction.prescale)
        phases.pack += time.monotonic_ns() - start
        self._run(partial(self._comm.Iallreduce, MPI.IN_PLACE, packed, _mpi_op(reduction.op)), phases, packed)
        start = time.monotonic_ns()
        self._staging.unpack(packed, outs, dtype, reduction.postscale)
        phases.unpack += time.monotonic_ns() - start

    def allgather(self, send: HostArray, counts: Sequence[int], out: HostArray, phases: PhaseTimes) -> None:
        from mpi4py import MPI

        sizes = [c * send.itemsize for c in counts]
        first = sum(sizes[: self.context.index])
        with self._received(out, phases) as received:
            # The copy is what MPI sends: the user's array may change as soon as this rank has given up.
            received[first : first + send.nbytes] = _raw(send)
            self._run(partial(self._comm.Iallgatherv, MPI.IN_PLACE, [received, sizes]), phases, received)

    def broadcast(self, buffer: HostArray, root: int, phases: PhaseTimes) -> None:
        if root == self.context.index:
            sent = self._copy(buffer, phases)
            self._run(partial(self._comm.Ibcast, sent, root), phases, sent)
            return
        with self._received(buffer, phases) as received:
            self._run(partial(self._comm.Ibcast, received, root), phases, received)

    def reducescatter(
        self,
        send: HostArray,
        counts: Sequence[int],
        out: HostArray,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        start = time.monotonic_ns()
        widened = self._staging.widened(send, dtype, reduction.prescale)
        phases.pack += time.monotonic_ns() - start
        reduced = np.empty(counts[self.context.index], widened.dtype)
        self._run(
            partial(self._comm.Ireduce_scatter, widened, reduced, list(counts), _mpi_op(reduction.op)),
            phases,
            widened,
            reduced,
        )
        start = time.monotonic_ns()
        self._staging.unpack(reduced, [out], dtype, reduction.postscale)
        phases.unpack += time.monotonic_ns() - start

    def alltoall(
        self,
        send: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: HostArray,
        phases: PhaseTimes,
    ) -> None:
        item, sent = send.itemsize, self._copy(send, phases)
        parts = [sent, [c * item for c in send_counts]]
        sizes = [c * item for c in recv_counts]
        with self._received(out, phases) as received:
            self._run(partial(self._comm.Ialltoallv, parts, [received, sizes]), phases, sent, received)

    def barrier(self, phases: PhaseTimes) -> None:
        start = time.monotonic_ns()
        moved = PhaseTimes()
        self._run(partial(self._comm.Ibarrier), moved)
        phases.wait += time.monotonic_ns() - start

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        # MPI_Comm_free is collective and would wait for members that may be gone; the handle is left to MPI_Finalize.
        self._comm = None

    def _copy(self, send: HostArray, phases: PhaseTimes) -> HostArray:
        """Return a copy of the bytes to send, in memory of this plane's own."""
        start = time.monotonic_ns()
        sent = self._sent.take(send.nbytes, np.dtype(np.uint8))
        np.copyto(sent, _raw(send))
        phases.pack += time.monotonic_ns() - start
        return sent

    @contextmanager
    def _received(self, out: HostArray, phases: PhaseTimes) -> Iterator[HostArray]:
        """Yield memory of this plane's own, as bytes, and copy it to ``out`` if the block raises nothing."""
        received = self._staging.take(out.nbytes, np.dtype(np.uint8))
        yield received
        start = time.monotonic_ns()
        np.copyto(_raw(out), received)
        phases.unpack += time.monotonic_ns() - start

    def _run(self, begin: partial[Any], phases: PhaseTimes, *buffers: HostArray) -> None:
        """Begin an operation and poll it to its end; give it up on abort, and keep its buffers alive then."""
        if self._aborted.is_set():
            raise PlaneAborted
        start = time.monotonic_ns()
        eager_until = start + int(
            1e9 * max(_EAGER_SECONDS, sum(b.nbytes for b in buffers) / _BYTES_PER_SECOND)
        )
        requests: list[Any] = []
        try:
            # Beginning the operation and noting it are one step of the interpreter: an interrupt can't come in between.
            requests.extend(map(operator.call, (begin,)))
            request = requests[0]
            while not request.Test():
                if self._aborted.is_set():
                    raise PlaneAborted
                if time.monotonic_ns() < eager_until:
                    os.sched_yield()
                else:
                    # Not time.sleep(): an abort ends this pause.
                    self._aborted.wait(_SLEEP_SECONDS)
        except BaseException:
            # Also after an interrupt: MPI may use these buffers for as long as the process lives.
            leave_to_library(*requests, *buffers)
            self._staging.leave()
            self._sent.leave()
            raise
        phases.transfer += time.monotonic_ns() - start
        # Also if it has ended by now: from an abort on every operation of a plane ends so.
        if self._aborted.is_set():
            raise PlaneAborted


def _raw(buffer: HostArray) -> HostArray:
    return buffer.view(np.uint8)


def _mpi_op(op: ReduceOp) -> Any:
    from mpi4py import MPI

    return {ReduceOp.SUM: MPI.SUM, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX, ReduceOp.PRODUCT: MPI.PROD}[
        op
    ]
