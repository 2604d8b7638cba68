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
leaves its communicator alone for ``LEARN_WITHIN`` seconds. In that time the others learn that the epoch has ended, as all members do, and from then on
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
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from hvdlab.collectives.planes.base import PendingCompletion, PhaseTimes, PlaneAborted, PlaneBroken
from hvdlab.collectives.planes.gpu.device import Device, DeviceFailed, KernelLaunch
from hvdlab.collectives.planes.gpu.gpu_plane import CudaBuffer
from hvdlab.collectives.planes.gpu.jobs import table_of
from hvdlab.collectives.planes.gpu.nccl_library import Communicator
from hvdlab.collectives.types import DType, ReduceOp

RING = 8
"""Operations that may be on their way; a member that would be further ahead waits for the end of an earlier one."""
TABLE_BYTES = 1 << 17
"""Room for the tables of the launches of one operation."""
LEARN_WITHIN = 0.2
"""Seconds that the other members get to learn that the epoch has ended, before this member's communicator is aborted."""
STUCK_AFTER = 10.0
"""Seconds that this member's GPU gets, after a stop, for work before the group's, such as a kernel of the user's."""
SEND_WITHIN, CLOSE_WITHIN = 3.0, 6.0
"""Seconds that NCCL gets, when the group is closed, to send data that other members still wait for, and to free everything."""
CHECK_INTERVAL = 0.5
"""Seconds between two polls of whether NCCL has lost a connection, of which it has no event."""
_DRAIN_INTERVAL = 0.001
"""Seconds between two polls of the GPU after a stop: the driver has no event for "nothing is left"."""
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


class NcclGroup:
    """Member of a group that NCCL connects.

    :meth:`run` belongs to one thread at a time; only code that it calls may call the steps. :meth:`stop` may come from any thread.

    Args:
        device: This member's GPU.
        communicator: NCCL's, which is being made; the group frees it.
    """

    def __init__(self, device: Device, communicator: Communicator) -> None:
        self._device = device
        self.communicator = communicator
        #: Number of the operation that was begun last; they count from 1.
        self._number = 0
        #: Number of the last operation that has ended here. Under ``_guard``.
        self._finished = 0
        #: The operations whose ends the watcher waits for, in order; ``None`` ends the watcher.
        self._ends: SimpleQueue[_Enqueued | None] = SimpleQueue()
        #: Held while an operation is enqueued. After a stop the thread that drains the GPU acquires it once; nothing is enqueued from then on.
        #: It is acquired before ``_calling``.
        self._enqueuing = threading.Lock()
        #: Held during each call of NCCL. Once it is stopped only the thread that aborts the communicator makes any.
        self._calling = threading.Lock()
        self._guard = threading.Lock()
        #: An operation has ended, or the group has stopped.
        self._progress = threading.Condition(self._guard)
        #: Set once this member has given up.
        self._stopping = threading.Event()
        #: Set once this member has given up or closes the group: nothing is left to be asked of NCCL.
        self._over = threading.Event()
        #: The failure, if that is why the group has stopped.
        self._failure = ""
        #: Operations that were begun and have not ended, by number. Under ``_guard``.
        self._under_way: dict[int, PendingCompletion] = {}
        #: After a stop: the GPU writes to the tensors no more, as far as can be known.
        self._quiet = threading.Event()
        self._drainer: threading.Thread | None = None
        #: The GPU is busy with other work, and does not come to the end of the group's, or NCCL does not: stream and memory are left as they are.
        self._is_stuck = False
        self._closed = False
        #: Events that are used again.
        self._events: list[int] = []
        #: Memory of the GPU between the steps of an operation; memory that has become too small stays, since enqueued steps use it.
        self._scratch = (0, 0)
        #: Bytes of the tables of this operation that are taken.
        self._table_bytes = 0
        #: Gives the GPU's streams, events and memory back.
        self._resources = contextlib.ExitStack()
        self._host = mmap.mmap(-1, RING * TABLE_BYTES + mmap.PAGESIZE)
        self._anchor = ctypes.c_char.from_buffer(self._host)
        try:
            with device:
                self._acquire()
        except BaseException:
            self._abort_communicator()
            self._release()
            raise
        self._watcher = threading.Thread(target=self._watch, name="hvdlab-nccl-ends", daemon=True)
        self._watcher.start()
        self._monitor = threading.Thread(target=self._ask, name="hvdlab-nccl-monitor", daemon=True)
        self._monitor.start()

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
        device, number = self._device, self._number + 1
        self._await_place(number)
        self._number, self._table_bytes = number, 0
        self._wait_for(tensors)
        enqueue()
        event = self._events.pop() if self._events else self._new_event()
        device.record(event, self.stream)
        pending = PendingCompletion()
        with self._guard:
            self._under_way[number] = pending
        self._ends.put(_Enqueued(number, event, pending, phases, started, tensors))
        return pending

    def _new_event(self) -> int:
        event = self._device.new_event()
        self._resources.callback(self._device.end_event, event)
        return event

    def _await_place(self, number: int) -> None:
        """Wait until the operation whose tables were in the same place has ended."""
        with self._progress:
            self._progress.wait_for(lambda: self._stopping.is_set() or self._finished >= number - RING)
        if self._stopping.is_set():
            raise self._reason()

    def _wait_for(self, tensors: Sequence[CudaBuffer]) -> None:
        """Make the stream wait for all work that comes before the tensors are read or written."""
        for event in {tensor.after.event for tensor in tensors if tensor.after is not None}:
            self._device.wait_event(self.stream, event)

    def clear(self, buffer: CudaBuffer) -> None:
        """Set a tensor of the next operation to zero."""
        with self._enqueuing, self._device:
            if self._stopping.is_set():
                raise self._reason()
            self._wait_for([buffer])
            self._device.clear(buffer.pointer, buffer.nbytes, self.stream)

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
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """Launch our kernel: for each job, reduce the arrays at all addresses but the last, and write the result there.

        Args:
            counts: Elements of each job.
            addresses: Of the arrays of each job; equally many for all.
            dtype: Type of the elements; ``None`` copies bytes.
            op, prescale, postscale: How to reduce.
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
                op=op,
                jobs=table.jobs,
                ins=len(addresses[0]) - 1,
                outs=1,
                chunk=table.chunk,
                chunks=table.chunks,
                prescale=prescale,
                postscale=postscale,
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

    def _watch(self) -> None:
        """Wait for the ends of operations, in order. A thread of its own."""
        while (enqueued := self._ends.get()) is not None:
            self._end(enqueued, self._outcome(enqueued))
            del enqueued  # it holds the tensors

    def _outcome(self, enqueued: _Enqueued) -> Exception | None:
        try:
            with self._device:
                self._device.synchronize(enqueued.event)
        except DeviceFailed as failure:
            return PlaneBroken(f"the GPU of this rank: {failure}")
        self._events.append(enqueued.event)
        if not self._stopping.is_set():
            return None
        self._quiet.wait()
        return self._reason()

    def _end(self, enqueued: _Enqueued, error: Exception | None) -> None:
        if error is None:
            enqueued.phases.transfer += time.monotonic_ns() - enqueued.started
        with self._progress:
            self._finished = enqueued.number
            self._under_way.pop(enqueued.number, None)
            self._progress.notify_all()
        enqueued.pending.end(error)

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
        """Return the error that operations raise, or end with, after a stop."""
        return PlaneBroken(self._failure) if self._failure else PlaneAborted()

    def _fail(self, failure: str) -> None:
        with self._guard:
            if not self._stopping.is_set() and not self._closed:
                self._failure = failure
                self._begin_stop()

    def stop(self) -> None:
        """Give up: everything under way ends with ``PlaneAborted``. Any thread; never blocks; idempotent."""
        with self._guard:
            if not self._stopping.is_set() and not self._closed:
                self._begin_stop()

    def _begin_stop(self) -> None:
        self._stopping.set()
        self._over.set()
        self._progress.notify_all()
        self._drainer = threading.Thread(target=self._drain, name="hvdlab-nccl-drain", daemon=True)
        self._drainer.start()

    def _drain(self) -> None:
        """Abort the communicator, wait until the GPU has done the enqueued steps, and let the operations under way end. A thread of its own."""
        if self._number != self._finished:
            time.sleep(LEARN_WITHIN)
        with self._calling:
            pass  # the thread that calls NCCL has left it, and no other will
        # Not before: if a kernel of ours adds nothing, the step behind it sends other members data that is no result.
        self._stopped.value = 1
        end = time.monotonic() + STUCK_AFTER
        aborter = threading.Thread(target=self._abort_communicator, name="hvdlab-nccl-abort", daemon=True)
        aborter.start()
        aborter.join(STUCK_AFTER)
        # Only then: the thread that enqueues may be in a call of the driver that returns when NCCL's kernels have ended.
        left = self._enqueuing.acquire(timeout=max(0.0, end - time.monotonic()))
        if left:
            self._enqueuing.release()
        self._is_stuck = aborter.is_alive() or not left or not self._drain_gpu(end)
        with self._guard:
            pending = list(self._under_way.values())
        self._quiet.set()
        if self._is_stuck:
            # The watcher can't end them: it waits for events that the GPU does not come to.
            for one in pending:
                one.end(self._reason())

    def _abort_communicator(self) -> None:
        with contextlib.suppress(DeviceFailed), self._device:  # if it has failed there is nothing to free
            self.communicator.abort()

    def _drain_gpu(self, end: float) -> bool:
        """Whether the GPU came to the end of our work in time."""
        with contextlib.suppress(DeviceFailed), self._device:  # if it has failed its work is gone
            while not self._device.drained(self.stream):
                if time.monotonic() > end:
                    return False
                time.sleep(_DRAIN_INTERVAL)
        return True

    def close(self) -> None:
        """Free everything. Idempotent.

        It waits for this member's GPU and for NCCL's work on the host, half a second as a rule; after a stop ``STUCK_AFTER`` seconds
        at most, otherwise ``CLOSE_WITHIN``.
        """
        with self._guard:
            if self._closed:
                return
            if self._under_way and not self._stopping.is_set():
                self._begin_stop()
            self._closed = True  # from here on stop() does nothing
            self._over.set()
        if self._drainer is not None:
            self._drainer.join()
        self._monitor.join()
        self._ends.put(None)
        if self._drainer is None:
            # In a thread of its own: NCCL waits for members of the same host to leave their communicators, too.
            closer = threading.Thread(target=self._close_communicator, name="hvdlab-nccl-close", daemon=True)
            closer.start()
            closer.join(CLOSE_WITHIN)
            self._is_stuck = closer.is_alive()
        if self._is_stuck:
            return  # the GPU, or NCCL, may still use all the rest
        self._watcher.join()
        self._release()

    def _close_communicator(self) -> None:
        with contextlib.suppress(DeviceFailed), self._device:  # NCCL has freed all that it could by then
            self.communicator.close(SEND_WITHIN)

    def _release(self) -> None:
        # A GPU that has failed frees all when the process ends.
        with contextlib.suppress(DeviceFailed), self._device:
            self._resources.close()
        # It exports the buffer of the map, which can't be closed before.
        del self._anchor
        with contextlib.suppress(BufferError):  # a traceback holds a view: it is unmapped when that goes
            self._host.close()
