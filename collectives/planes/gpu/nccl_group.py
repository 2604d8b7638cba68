"""A member of a group that NCCL connects.

An operation is a sequence of steps on the group's own stream: calls of NCCL, and launches of our kernels, which pack, scale and add.
The stream waits for the user's streams' work on the tensors, and an event behind the last step marks that the outputs are there. The host
waits for no GPU on the way. But NCCL enqueues a call in the background, and connects two members when they first exchange data. So a step waits until NCCL
has enqueued it, and sometimes for another member to come to the operation.

Giving up
---------
``ncclCommAbort`` ends NCCL's kernels, but not silently. An aborted kernel still signals the other members' kernels
that its data is there, without the data, so that these may end.
On another member the operation would look as if it had succeeded. So a member that gives up in the middle of an operation
leaves its communicator alone for ``LEARN_WITHIN`` seconds. In that time the others learn that the generation has ended, as all members do, and from then on
they believe no operation to be done. This member's enqueued steps go on as long. Only then do our own kernels find the word ``stopped``, which
they read before they write anything.

An operation ends once the communicator is gone and the stream has nothing left to do. It also ends after ``STUCK_AFTER`` seconds, if earlier work on
the GPU, such as a kernel of the user's, needs longer than that.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from hvdlab.collectives.planes.base import PendingCompletion, PhaseTimes, PlaneAborted, PlaneBroken
from hvdlab.collectives.planes.gpu.device import Device, DeviceFailed, KernelLaunch
from hvdlab.collectives.planes.gpu.gpu_group import STUCK_AFTER, GpuGroup
from hvdlab.collectives.planes.gpu.gpu_plane import CudaBuffer
from hvdlab.collectives.planes.gpu.ipc_memory import RING
from hvdlab.collectives.planes.gpu.jobs import table_of
from hvdlab.collectives.planes.gpu.nccl_library import Communicator
from hvdlab.collectives.types import SUM, DType, Reduction

TABLE_BYTES = 1 << 17
"""Room for the tables of the launches of one operation."""
LEARN_WITHIN = 0.2
"""Seconds that the other members get to learn that the generation has ended, before this member's communicator is aborted."""
SEND_WITHIN, CLOSE_WITHIN = 3.0, 6.0
"""Seconds that NCCL gets, when the group is closed, to send data that other members still wait for, and to free everything."""
CHECK_INTERVAL = 0.5
"""Seconds between two polls of whether NCCL has lost a connection, of which it has no event."""
_LEAST_PAUSE, _MOST_PAUSE = 0.00005, 0.002
"""Seconds between two polls of whether NCCL has enqueued a call, of which it has no event either; longer each time."""
_LEAST_SCRATCH = 1 << 20  # bytes

# Offsets in the page of the host behind the tables: the word that ends kernels, and the two words that each kernel writes.
_STOPPED, _TIMES = 0, 128
_WORD = 4  # bytes


class _Enqueued(NamedTuple):
    """Operation that is enqueued.

    Attributes:
        number: Its number.
        event: A CUDA event that comes when the outputs are there.
        pending: The completion that :meth:`NcclGroup.run` returned; it is ended after ``event``.
        phases: Receives the operation's times.
        started: When the operation began, by ``time.monotonic_ns()``.
        tensors: Kept alive until the end.
    """

    number: int
    event: int
    pending: PendingCompletion
    phases: PhaseTimes
    started: int
    tensors: Sequence[CudaBuffer]


class NcclGroup(GpuGroup[_Enqueued]):
    """Member of a group that NCCL connects. Only code that :meth:`run` calls may call the steps.

    Args:
        device: This member's GPU.
        communicator: NCCL's, which is being made; the group frees it.
    """

    kind: ClassVar[str] = "nccl"

    def __init__(self, device: Device, communicator: Communicator) -> None:
        super().__init__(device)
        self.communicator = communicator
        #: Held during each call of NCCL. Once it is stopped only the thread that aborts the communicator makes any.
        #: ``_enqueuing`` is acquired before it.
        self._calling = threading.Lock()
        #: Set once this member has given up or closes the group: nothing is left to be asked of NCCL.
        self._over = threading.Event()
        #: The failure, if that is why the group has stopped.
        self._failure = ""
        #: Memory of the GPU between the steps of an operation; memory that has become too small stays, since enqueued steps use it.
        self._scratch = (0, 0)
        #: Bytes of the tables of this operation that are taken.
        self._table_bytes = 0
        self._host = mmap.mmap(-1, RING * TABLE_BYTES + mmap.PAGESIZE)
        self._anchor = ctypes.c_char.from_buffer(self._host)
        self._open()
        self._monitor = threading.Thread(target=self._ask, name="hvdlab-nccl-monitor", daemon=True)
        self._monitor.start()

    def _abandon(self) -> None:
        self._abort_communicator()

    def _acquire(self) -> None:
        device, free = self._device, self._resources
        self._address = ctypes.addressof(self._anchor)
        self._mapped = device.register(self._address, len(self._host))
        free.callback(device.unregister, self._address)
        self._stopped = ctypes.c_uint32.from_address(self._address + RING * TABLE_BYTES + _STOPPED)
        self.stream = device.new_stream()
        free.callback(device.end_stream, self.stream)
        # Behind the tables: the word ``stopped`` as kernels read it, from the GPU's own memory, as in the plane `cuda/ipc`.
        self._tables = device.allocate(RING * TABLE_BYTES + _WORD)
        free.callback(device.free, self._tables)

    def connect(self, deadline: float) -> None:
        """Wait for the other members.

        Raises:
            PlaneAborted: The group was stopped.
            PlaneBroken: NCCL could not connect them, or not until the deadline (``time.monotonic()``).
        """
        try:
            with self._device:
                self._until_settled(deadline)
        except (DeviceFailed, TimeoutError) as error:
            self._fail(str(error))
            raise PlaneBroken(str(error)) from error

    # -- operations -------------------------------------------------------------------------------------------------

    def run(
        self, enqueue: Callable[[], None], tensors: Sequence[CudaBuffer], phases: PhaseTimes, started: int
    ) -> PendingCompletion:
        """Begin an operation; its outputs are there when the returned completion ends.

        Args:
            enqueue: Enqueues the operation's steps.
            tensors: Its inputs and outputs.
            phases: Gets its times.
            started: When the collective began, by ``time.monotonic_ns()``.

        Raises:
            PlaneAborted: This member has given up.
            PlaneBroken: The GPU or NCCL refused something, or a connection was lost.
        """
        if self._stopping.is_set():
            raise self._reason()
        try:
            with self._enqueuing, self._device:
                return self._begin(enqueue, tensors, phases, started)
        except DeviceFailed as error:
            self._fail(str(error))
            self._quiet.wait()
            raise PlaneBroken(f"the GPU of this rank: {error}") from error
        except (PlaneAborted, PlaneBroken):
            self._quiet.wait()  # steps that were enqueued may write until then
            raise

    def _begin(
        self, enqueue: Callable[[], None], tensors: Sequence[CudaBuffer], phases: PhaseTimes, started: int
    ) -> PendingCompletion:
        number = self._number + 1
        self._await_place(number)
        self._number, self._table_bytes = number, 0
        self._being_enqueued = tensors
        self._wait_for(tensors)
        enqueue()
        event, pending = self._record(self.stream), PendingCompletion()
        self._add(_Enqueued(number, event, pending, phases, started, tensors))
        return pending

    def _wait_for(self, tensors: Sequence[CudaBuffer]) -> None:
        """Make the stream wait for all work that comes before the tensors are read or written."""
        for event in {tensor.after.event for tensor in tensors if tensor.after is not None}:
            self._device.wait_event(self.stream, event)

    # -- steps --------------------------------------------------------------------------------------------------------

    def call(self, call: Callable[..., None], *arguments: object) -> None:
        """Call NCCL to enqueue work: ``call`` is a method of :attr:`communicator`, whose last argument, the stream, is added."""
        with self._calling:
            if self._stopping.is_set():
                raise self._reason()
            call(*arguments, self.stream)
        self._until_settled()

    def fold(
        self,
        counts: Sequence[int],
        addresses: Sequence[Sequence[int]],
        dtype: DType | None,
        reduction: Reduction = SUM,
    ) -> None:
        """Launch our kernel: for each job, reduce the arrays at all addresses but the last, and write the result there.

        Args:
            counts: Elements of each job.
            addresses: Of the arrays of each job; equally many for all.
            dtype: Type of the elements; ``None`` copies bytes.
            reduction: How to reduce.
        """
        table = table_of(
            np.array(counts, np.int64),
            np.array(addresses, np.uint64).reshape(len(counts), -1),
            1 if dtype is None else dtype.itemsize,
        )
        if not table.jobs:
            return
        at = (self._number % RING) * TABLE_BYTES + self._table_bytes
        self._table_bytes += table.words.nbytes
        assert self._table_bytes <= TABLE_BYTES, "the tables of an operation are too large"
        # The place is free: _await_place() has waited for the end of the operation that had it before.
        ctypes.memmove(self._address + at, table.words.ctypes.data, table.words.nbytes)
        self._device.copy(self._tables + at, self._mapped + at, table.words.nbytes, self.stream)
        words, stopped = self._mapped + RING * TABLE_BYTES, self._tables + RING * TABLE_BYTES
        self._device.copy(stopped, words + _STOPPED, _WORD, self.stream)
        self._device.launch(
            KernelLaunch(
                dtype=dtype,
                reduction=reduction,
                jobs=table.jobs,
                ins=len(addresses[0]) - 1,
                outs=1,
                chunk=table.chunk,
                chunks=table.chunks,
                table=self._tables + at,
                stopped=stopped,
                members=1,
                stride=1,
                times=words + _TIMES,
            ),
            self.stream,
        )

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the GPU's memory."""
        if nbytes and target != source:
            self._device.copy(target, source, nbytes, self.stream)

    def scratch(self, nbytes: int) -> int:
        """Return the address of memory that is free until the end of the operation, aligned to lines."""
        if self._scratch[1] < nbytes:
            size = 1 << max(nbytes - 1, _LEAST_SCRATCH - 1).bit_length()
            base = self._device.allocate(size)
            self._resources.callback(self._device.free, base)
            self._scratch = (base, size)
        # Operations share it: the stream executes one after the other.
        return self._scratch[0]

    def _until_settled(self, deadline: float = float("inf")) -> None:
        """Wait until NCCL has done its part on the host. Raises ``TimeoutError`` at the deadline."""
        pause = _LEAST_PAUSE
        while not self._is_settled():
            if time.monotonic() > deadline:
                raise TimeoutError("NCCL did not connect all members in time")
            self._stopping.wait(pause)
            pause = min(2 * pause, _MOST_PAUSE)

    def _is_settled(self) -> bool:
        with self._calling:
            if self._stopping.is_set():
                raise self._reason()
            return self.communicator.settled()

    # -- ends -------------------------------------------------------------------------------------------------------

    def _outcome(self, enqueued: _Enqueued) -> Exception | None:
        try:
            # Within the ``try``: to make the context current fails, too, once the GPU's context is gone, and the operation has to end.
            with self._device:
                self._device.synchronize(enqueued.event)
        except DeviceFailed as failure:
            return PlaneBroken(f"the GPU of this rank: {failure}")
        self._events.append(enqueued.event)
        if not self._stopping.is_set():
            return None
        self._quiet.wait()
        return self._reason()

    def _measure(self, enqueued: _Enqueued) -> None:
        enqueued.phases.transfer += time.monotonic_ns() - enqueued.started

    def _ask(self) -> None:
        """Ask NCCL from time to time whether a connection was lost, which would keep an operation waiting. A thread of its own."""
        while not self._over.wait(CHECK_INTERVAL):
            if self._under_way:
                self._check()

    def _check(self) -> None:
        """Stop if NCCL has lost a connection."""
        try:
            with self._device, self._calling:
                # Under the lock: a communicator that another thread aborts or closes must not be called.
                if not self._over.is_set():
                    self.communicator.settled()
        except DeviceFailed as error:
            self._fail(str(error))

    def _reason(self) -> Exception:
        return PlaneBroken(self._failure) if self._failure else PlaneAborted()

    def _fail(self, failure: str) -> None:
        with self._guard:
            if not self._stopping.is_set() and not self._closed:
                self._failure = failure
                self._begin_stop()

    def _end_waits(self) -> None:
        self._over.set()

    def _leave_gpu(self) -> bool:
        """Abort the communicator, and wait until the GPU has done the enqueued steps."""
        # While nothing is under way no member takes the abort's signals for data.
        if self._number != self._finished:
            time.sleep(LEARN_WITHIN)
        with self._calling:
            pass  # the thread that calls NCCL has left it, and no other will
        # Not before: if a kernel of ours adds nothing, the step behind it sends other members data that is no result.
        self._stopped.value = 1
        end = time.monotonic() + STUCK_AFTER
        aborter = threading.Thread(target=self._abort_communicator, name="hvdlab-nccl-abort", daemon=True)
        try:
            aborter.start()
        except RuntimeError:  # the system has no thread left
            return False
        aborter.join(STUCK_AFTER)
        # Only then: the thread that enqueues may be in a call of the driver that returns when NCCL's kernels have ended.
        left = self._enqueuing.acquire(timeout=max(0.0, end - time.monotonic()))
        if left:
            self._enqueuing.release()
        return not aborter.is_alive() and left and self._drain_gpu(end)

    def _abort_communicator(self) -> None:
        with contextlib.suppress(DeviceFailed), self._device:  # if it has failed there is nothing to free
            self.communicator.abort()

    def _part(self) -> None:
        """Stop asking NCCL, and close the communicator, which takes half a second as a rule and ``CLOSE_WITHIN`` seconds at most."""
        self._over.set()
        self._monitor.join()
        if not self._stopping.is_set():
            # In a thread of its own: NCCL waits for members of the same host to leave their communicators, too.
            closer = threading.Thread(target=self._close_communicator, name="hvdlab-nccl-close", daemon=True)
            closer.start()
            closer.join(CLOSE_WITHIN)
            self._is_stuck = closer.is_alive()

    def _close_communicator(self) -> None:
        with contextlib.suppress(DeviceFailed), self._device:  # NCCL has freed all that it could by then
            self.communicator.close(SEND_WITHIN)

    def _free_host(self) -> None:
        # It exports the buffer of the map, which can't be closed before.
        del self._anchor
        with contextlib.suppress(BufferError):  # a traceback holds a view: it is unmapped when that goes
            self._host.close()
