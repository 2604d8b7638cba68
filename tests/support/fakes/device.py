"""A device that is none: a device class of its own, whose memory only its plane reads, and whose work ends later.

Its plane has one thread, as a device has a stream: operations are put there and executed in order, over shared memory
that the members make themselves. The thread can be held, so that tests say when work goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np

from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import (
    Buffer,
    HostArray,
    PendingCompletion,
    PhaseTimes,
    Plane,
    PlaneAborted,
    PlaneContext,
    storage_type,
)
from hvdlab.collectives.planes.hierarchical import HierarchicalPlane
from hvdlab.collectives.types import DType, Reduction

DEVICE, PLANE = "fake", "fake/thread"

GO_ON = threading.Event()
"""Work of this process's planes goes on while it is set."""
GO_ON.set()


class FakeBuffer:
    """Memory of the device. Nothing of numpy's is in reach of the engine."""

    def __init__(self, memory: HostArray, dtype: DType) -> None:
        self._memory = memory
        self.dtype = dtype

    @property
    def pointer(self) -> int:
        return int(self._memory.ctypes.data)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        return self._memory.shape

    @property
    def device(self) -> str:
        return DEVICE


def on_device(array: HostArray, dtype: DType) -> FakeBuffer:
    return FakeBuffer(array.copy(), dtype)


def memory_of(buffer: Any) -> HostArray:
    assert isinstance(buffer, FakeBuffer), buffer
    memory: HostArray = buffer._memory.reshape(-1)
    return memory


class FakeDevicePlane(Plane):
    """Operations that end later, from a thread of the plane."""

    name: ClassVar[str] = PLANE
    device: ClassVar[str] = DEVICE

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context)
        self._inner = HierarchicalPlane(context)
        self._work: SimpleQueue[tuple[Callable[[], None], PendingCompletion] | None] = SimpleQueue()
        self._under_way: dict[PendingCompletion, None] = {}
        self._guard = threading.Lock()
        self._aborted = False
        self._thread: threading.Thread | None = None

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def connect(self, timeout: float) -> None:
        self._inner.connect(timeout)
        self._thread = threading.Thread(target=self._execute, name="fake-device")
        self._thread.start()

    def _execute(self) -> None:
        while (job := self._work.get()) is not None:
            work, pending = job
            error: Exception | None = None
            while not (GO_ON.wait(0.01) or self._aborted):  # an abort ends a real device's work, too
                pass
            try:
                work()
            except Exception as raised:  # noqa: BLE001  (any error goes to the executor)
                error = raised
            self._end(pending, error)
            # The error's traceback leads here, and the operation under way has the error: a circle around the memory.
            error = job = None
            del work, pending

    def _end(self, pending: PendingCompletion, error: Exception | None) -> None:
        with self._guard:
            self._under_way.pop(pending, None)
        pending.end(error)

    def _start(self, work: Callable[[], None]) -> PendingCompletion:
        pending = PendingCompletion()
        with self._guard:
            if self._aborted:
                raise PlaneAborted
            self._under_way[pending] = None
        self._work.put((work, pending))
        return pending

    # -- operations -----------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DType) -> FakeBuffer:
        return FakeBuffer(np.empty(shape, storage_type(dtype)), dtype)

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> FakeBuffer:
        return FakeBuffer(np.zeros(shape, storage_type(dtype)), dtype)

    def start_allreduce(
        self,
        ins: Sequence[Buffer],
        outs: Sequence[Buffer],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> PendingCompletion:
        sources, targets = [memory_of(b) for b in ins], [memory_of(b) for b in outs]
        return self._start(lambda: self._inner.allreduce(sources, targets, dtype, reduction, phases))

    def start_allgather(
        self, send: Buffer, counts: Sequence[int], out: Buffer, phases: PhaseTimes
    ) -> PendingCompletion:
        return self._start(lambda: self._inner.allgather(memory_of(send), counts, memory_of(out), phases))

    def start_broadcast(
        self, source: Buffer | None, out: Buffer, root: int, phases: PhaseTimes
    ) -> PendingCompletion:
        def broadcast() -> None:
            if source is not None:
                np.copyto(memory_of(out), memory_of(source))
            self._inner.broadcast(memory_of(out), root, phases)

        return self._start(broadcast)

    def start_reducescatter(
        self,
        send: Buffer,
        counts: Sequence[int],
        out: Buffer,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> PendingCompletion:
        source, target = memory_of(send), memory_of(out)
        return self._start(
            lambda: self._inner.reducescatter(source, counts, target, dtype, reduction, phases)
        )

    def start_alltoall(
        self,
        send: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Buffer,
        phases: PhaseTimes,
    ) -> PendingCompletion:
        source, target = memory_of(send), memory_of(out)
        return self._start(lambda: self._inner.alltoall(source, send_counts, recv_counts, target, phases))

    def start_barrier(self, phases: PhaseTimes) -> PendingCompletion:
        return self._start(lambda: self._inner.barrier(phases))

    # -- ends -----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        with self._guard:
            self._aborted = True
            under_way = list(self._under_way)
            self._under_way.clear()
        self._inner.abort()
        for pending in under_way:
            pending.end(PlaneAborted())

    def close(self) -> None:
        self.abort()
        self._work.put(None)
        if self._thread is not None:
            self._thread.join()
        self._inner.close()


def register() -> None:
    """Have this process offer the plane to the coordinator from its next connection on."""
    registry._CLASSES[PLANE] = (__name__, "FakeDevicePlane", "")
