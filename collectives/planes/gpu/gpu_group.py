"""The life of a member of a group whose GPUs work together: operations on their way, their ends, giving up, and the end of the group.

:class:`~hvdlab.collectives.planes.gpu.ipc_group.IpcGroup` and :class:`~hvdlab.collectives.planes.gpu.nccl_group.NcclGroup` add how an operation
is enqueued, how its end is seen, and what keeps their GPU from coming to an end.

* ``run`` of a subclass enqueues an operation and puts it into the queue of ends. A thread, the *watcher*, waits for the ends in order.
* :meth:`GpuGroup.stop` marks the group as stopped and wakes a thread, the *drainer*. It waits until the GPU has nothing left to do for the group.
  Only then do the operations under way end, since their tensors could be written before.
* A GPU that does not come to the end of the group's work is *stuck*. Then the drainer ends the operations, and streams and memory are left as they are.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import ClassVar, Generic, Protocol, TypeVar

from hvdlab.collectives.planes.base import PendingCompletion, PlaneAborted
from hvdlab.collectives.planes.gpu.device import Device, DeviceFailed
from hvdlab.collectives.planes.gpu.gpu_plane import CudaBuffer
from hvdlab.collectives.planes.gpu.ipc_memory import RING

STUCK_AFTER = 10.0
"""Seconds that this member's GPU gets, after a stop, for work before the group's, such as a kernel of the user's."""
DRAIN_INTERVAL = 0.001
"""Seconds between two polls of the GPU after a stop: the driver has no event for "nothing is left"."""


class GpuOperationUnderWay(Protocol):
    """Operation that is enqueued.

    Attributes:
        number: Its number.
        pending: The completion that the caller has.
    """

    @property
    def number(self) -> int: ...

    @property
    def pending(self) -> PendingCompletion: ...


Begun = TypeVar("Begun", bound=GpuOperationUnderWay)


class GpuGroup(Generic[Begun]):
    """Member of a group whose GPUs work together. :meth:`stop` may come from any thread, operations from one at a time.

    A subclass calls :meth:`_open` once its own fields are there.

    Args:
        device: This member's GPU.

    Attributes:
        stream: The stream that an operation's tensors are awaited on.
    """

    kind: ClassVar[str]
    """The group's word in the names of its threads."""
    stream: int

    def __init__(self, device: Device) -> None:
        self._device = device
        #: Number of the operation that was begun last; they count from 1.
        self._number = 0
        #: Number of the last operation that has ended here. Under ``_guard``.
        self._finished = 0
        #: The operations whose ends the watcher waits for, in order; ``None`` ends the watcher.
        self._ends: SimpleQueue[Begun | None] = SimpleQueue()
        #: Held while something is enqueued. After a stop the drainer acquires it once; nothing is enqueued from then on.
        self._enqueuing = threading.Lock()
        self._guard = threading.Lock()
        #: An operation has ended, or the group has stopped.
        self._progress = threading.Condition(self._guard)
        #: Set once this member has given up.
        self._stopping = threading.Event()
        #: Operations that were begun and have not ended, by number. Under ``_guard``.
        self._under_way: dict[int, PendingCompletion] = {}
        #: Tensors of the operation that is being enqueued. If an interrupt ends that in the middle they stay here until the end of the
        #: group: GPUs may write to them, and their owner frees them with the last reference.
        self._being_enqueued: Sequence[CudaBuffer] = ()
        #: After a stop: no GPU writes to this member's tensors any more, as far as can be known.
        self._quiet = threading.Event()
        #: Wakes the drainer, at a stop or at the end.
        self._drainer_wanted = threading.Event()
        #: The GPU, or a library, does not come to the end of the group's work: streams and memory are left as they are.
        self._is_stuck = False
        self._closed = False
        #: Events that are used again.
        self._events: list[int] = []
        #: Gives the GPU's streams, events and memory back.
        self._resources = contextlib.ExitStack()

    # -- the beginning ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Acquire the GPU's resources, and start the watcher and the drainer."""
        self._watcher = threading.Thread(target=self._watch, name=f"hvdlab-{self.kind}-ends", daemon=True)
        # Not started by a stop: where the system has no thread left then, operations would wait for the drainer for ever.
        self._drainer = threading.Thread(target=self._drain, name=f"hvdlab-{self.kind}-drain", daemon=True)
        try:
            with self._device:
                self._acquire()
            self._watcher.start()
            self._drainer.start()
        except BaseException:
            self._ends.put(None)  # for those that were started
            self._drainer_wanted.set()
            self._abandon()
            self._release()
            raise

    def _acquire(self) -> None:
        """Acquire streams and memory, and leave to :attr:`_resources` how they are given back."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Leave the other members, as this one could not begin."""

    # -- operations ---------------------------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Return whether this member has given up."""
        return self._stopping.is_set()

    def _reason(self) -> Exception:
        """Return the error that operations raise, or end with, after a stop."""
        return PlaneAborted()

    def _await_place(self, number: int) -> None:
        """Wait until the operation that had this one's place in the ring has ended."""
        with self._progress:
            self._progress.wait_for(lambda: self._stopping.is_set() or self._finished >= number - RING)
        if self._stopping.is_set():
            raise self._reason()

    def _record(self, stream: int) -> int:
        """Return an event that comes when all that is on the stream now is done."""
        if self._events:
            event = self._events.pop()
        else:
            event = self._device.new_event()
            self._resources.callback(self._device.end_event, event)
        self._device.record(event, stream)
        return event

    def _add(self, begun: Begun) -> None:
        """Have the watcher wait for the end of an operation that is enqueued."""
        # Before the watcher gets it: _end() would otherwise remove it first, and it would stay here for ever.
        with self._guard:
            self._under_way[begun.number] = begun.pending
        self._ends.put(begun)
        self._being_enqueued = ()  # not before: from here on the watcher keeps them

    def clear(self, buffer: CudaBuffer) -> None:
        """Set a tensor of the next operation to zero.

        Raises:
            PlaneAborted, PlaneBroken: This member has given up.
        """
        with self._enqueuing, self._device:
            if self._stopping.is_set():
                raise self._reason()
            if buffer.after is not None:
                self._device.wait_event(self.stream, buffer.after.event)
            self._device.clear(buffer.pointer, buffer.nbytes, self.stream)

    # -- ends of operations -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Wait for the ends of operations, in order. A thread of its own."""
        while (begun := self._ends.get()) is not None:
            self._end(begun, self._outcome(begun))
            del begun  # it holds the tensors

    def _outcome(self, begun: Begun) -> Exception | None:
        """Wait for the end of an operation. Returns the error that it ends with."""
        raise NotImplementedError

    def _measure(self, begun: Begun) -> None:
        """Add the times of an operation that has ended well to its phases."""
        raise NotImplementedError

    def _end(self, begun: Begun, error: Exception | None) -> None:
        if error is None:
            self._measure(begun)
        with self._progress:
            self._finished = begun.number
            self._under_way.pop(begun.number, None)
            self._progress.notify_all()
        # Last, and without the lock, as :class:`Completion` promises: the callback can begin an operation, or stop the group.
        begun.pending.end(error)

    # -- giving up ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Give up: everything under way ends with ``PlaneAborted``. Any thread; never blocks; idempotent."""
        with self._guard:
            if not self._stopping.is_set() and not self._closed:
                self._begin_stop()

    def _begin_stop(self) -> None:
        """Mark the group as stopped, and wake the drainer. Under ``_guard``."""
        self._stopping.set()
        # After the mark: a thread or a GPU whose wait this ends finds the group stopped.
        self._end_waits()
        self._progress.notify_all()
        self._drainer_wanted.set()

    def _end_waits(self) -> None:
        """End the waits of this member's threads, and those of GPUs for it. Never blocks."""
        raise NotImplementedError

    def _drain(self) -> None:
        """After a stop, wait until the GPU has done the enqueued work, and let the operations under way end. A thread of its own."""
        self._drainer_wanted.wait()
        if not self._stopping.is_set():
            return  # the group ends in order
        self._is_stuck = not self._leave_gpu()
        with self._guard:
            pending = list(self._under_way.values())
        if pending or self._being_enqueued:
            self._await_others()
        self._quiet.set()
        if self._is_stuck:
            # The watcher can't end them: it waits for events that the GPU does not come to.
            for one in pending:
                one.end(self._reason())

    def _leave_gpu(self) -> bool:
        """Wait until nothing more is enqueued, and the GPU has nothing left to do. Return whether it came to that in time."""
        raise NotImplementedError

    def _await_others(self) -> None:
        """Wait for other members whose GPUs may write to this one's tensors."""

    def _drain_gpu(self, end: float) -> bool:
        """Return whether the GPU came to the end of the group's work by ``end`` (``time.monotonic()``)."""
        with contextlib.suppress(DeviceFailed), self._device:  # if it has failed its work is gone
            while not self._drained():
                if time.monotonic() > end:
                    return False
                self._push_on()
                time.sleep(DRAIN_INTERVAL)
        return True

    def _drained(self) -> bool:
        """Return whether the group's streams have nothing left to do."""
        return self._device.drained(self.stream)

    def _push_on(self) -> None:
        """End waits of the GPU that have come up meanwhile."""

    # -- the end of the group -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything. Idempotent. Waits for this member's GPU, after a stop ``STUCK_AFTER`` seconds at most."""
        with self._guard:
            if self._closed:
                return
            if self._under_way and not self._stopping.is_set():
                self._begin_stop()
            self._closed = True  # from here on stop() does nothing
        self._drainer_wanted.set()
        self._drainer.join()
        self._ends.put(None)
        self._part()
        if self._is_stuck:
            self._keep_memory()  # the GPU, or a library, may still use it
            return
        self._watcher.join()
        self._release()

    def _part(self) -> None:
        """Leave the other members, once nothing is under way."""

    def _keep_memory(self) -> None:
        """Free what the GPU and libraries do not use, of a group that is stuck."""

    def _release(self) -> None:
        # A GPU that has failed frees all when the process ends.
        with contextlib.suppress(DeviceFailed), self._device:
            self._resources.close()
        self._being_enqueued = ()
        self._free_host()

    def _free_host(self) -> None:
        """Free the memory of the host, once the GPU does not know it any more."""
        raise NotImplementedError
