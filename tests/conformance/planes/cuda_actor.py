"""The planes of GPUs with arrays: they are put on a GPU, and a plane's results there are copied back.

Tensors lie at odd places of their allocations by turns, so that those that a kernel reads line by line and those that it reads
element by element both occur; on the simulated GPU some are in memory that other processes can't open.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, ClassVar

from conformance.planes.actor import Array, CollectiveActor, PlaneActor
from hvdlab.collectives.planes.base import Completion, HostArray, PhaseTimes, Plane, PlaneContext
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.planes.gpu.gpu_plane import CudaBuffer, StreamMark
from hvdlab.collectives.planes.gpu.ipc_plane import CudaPlane
from hvdlab.collectives.planes.gpu.nccl_plane import NcclPlane
from hvdlab.collectives.planes.gpu.staged_plane import StagedPlane
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.types import DType, Reduction
from support.fakes import cuda as fake_cuda
from support.fakes import nccl as fake_nccl


def fake_actor(target: str, context: PlaneContext) -> CollectiveActor:
    """On the simulated GPU."""
    fake_cuda.install()
    return PlaneActor(ThroughGpu(CudaPlane(context), FakeMemory()))


def real_actor(target: str, context: PlaneContext) -> CollectiveActor:
    """On the first GPU."""
    return PlaneActor(ThroughGpu(CudaPlane(context), RealMemory()))


def fake_nccl_actor(target: str, context: PlaneContext) -> CollectiveActor:
    """`cuda/nccl` on the simulated GPU, with a simulated NCCL."""
    fake_nccl.install(fake_cuda.install())
    return PlaneActor(ThroughGpu(NcclPlane(context), FakeMemory()))


def real_nccl_actor(target: str, context: PlaneContext) -> CollectiveActor:
    """`cuda/nccl` on the first GPU. Where members share it, each needs an ``NCCL_HOSTID`` of its own."""
    return PlaneActor(ThroughNccl(NcclPlane(context), RealMemory()))


def fake_staged_actor(target: str, context: PlaneContext) -> CollectiveActor:
    """Return the way through the host, on the simulated GPU."""
    return PlaneActor(ThroughGpu(StagedPlane(context, fake_cuda.install(), 0), FakeMemory()))


class FakeMemory:
    """Arrays on the simulated GPU."""

    def __init__(self) -> None:
        self.device: Any = None

    def use(self, device: Any) -> None:
        self.device = device

    def put(self, array: Array, dtype: DType, shift: int) -> CudaBuffer:
        pointer = self.device.allocate(array.nbytes + shift + 1, opened=shift != 8)
        ctypes.memmove(pointer + shift, array.ctypes.data, array.nbytes)
        return CudaBuffer(pointer + shift, array.shape, dtype, owner=pointer)

    def get(self, buffer: CudaBuffer, array: Array) -> None:
        ctypes.memmove(array.ctypes.data, buffer.pointer, array.nbytes)

    def free(self, buffer: CudaBuffer) -> None:
        self.device.free(buffer.owner)


class RealMemory(FakeMemory):
    """Arrays on a GPU."""

    def put(self, array: Array, dtype: DType, shift: int) -> CudaBuffer:
        from cuda.bindings import driver

        with self.device:
            pointer = self.device.allocate(array.nbytes + shift + 1)
            if array.nbytes:
                (status,) = driver.cuMemcpyHtoD(pointer + shift, array.ctypes.data, array.nbytes)
                assert status == 0, status
        # The copy may still be on its way: the driver returns once it has read the array.
        return CudaBuffer(
            pointer + shift, array.shape, dtype, after=StreamMark(self.device, 0), owner=pointer
        )

    def get(self, buffer: CudaBuffer, array: Array) -> None:
        from cuda.bindings import driver

        if array.nbytes:
            with self.device:
                (status,) = driver.cuMemcpyDtoH(array.ctypes.data, buffer.pointer, array.nbytes)
                assert status == 0, status

    def free(self, buffer: CudaBuffer) -> None:
        with self.device:
            self.device.free(buffer.owner)


class ThroughGpu(HostPlane):
    """GPU plane that acts as one of the host."""

    name: ClassVar[str] = "through-gpu"

    def __init__(self, plane: Plane, memory: FakeMemory) -> None:
        super().__init__(plane.context)
        self._plane, self._memory = plane, memory
        self._shifts = itertools.cycle((0, 8, 16, 2, 0, 4, 32))
        self._live: dict[int, CudaBuffer] = {}

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def connect(self, timeout: float) -> None:
        self._plane.connect(timeout)
        self._memory.use(gpu_plane.gpus().open(0))
        self.barrier(PhaseTimes())

    def allreduce(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        sources = [self._put(a, dtype) for a in ins]
        targets = [s if i is o else self._put(o, dtype) for i, o, s in zip(ins, outs, sources, strict=True)]
        self._end(
            self._plane.start_allreduce(sources, targets, dtype, reduction, phases),
            sources,
            list(zip(targets, outs, strict=True)),
        )

    def allgather(self, send: HostArray, counts: Sequence[int], out: HostArray, phases: PhaseTimes) -> None:
        source, target = self._put(send), self._put(out)
        self._end(self._plane.start_allgather(source, counts, target, phases), [source], [(target, out)])

    def broadcast(self, buffer: HostArray, root: int, phases: PhaseTimes) -> None:
        target = self._put(buffer)
        self._end(self._plane.start_broadcast(None, target, root, phases), [], [(target, buffer)])

    def reducescatter(
        self,
        send: HostArray,
        counts: Sequence[int],
        out: HostArray,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        source, target = self._put(send, dtype), self._put(out, dtype)
        begun = self._plane.start_reducescatter(source, counts, target, dtype, reduction, phases)
        self._end(begun, [source], [(target, out)])

    def alltoall(
        self,
        send: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: HostArray,
        phases: PhaseTimes,
    ) -> None:
        source, target = self._put(send), self._put(out)
        begun = self._plane.start_alltoall(source, send_counts, recv_counts, target, phases)
        self._end(begun, [source], [(target, out)])

    def barrier(self, phases: PhaseTimes) -> None:
        self._end(self._plane.start_barrier(phases), [], [])

    @property
    def gave_up(self) -> bool:
        return bool(getattr(self._plane, "gave_up", False))

    def abort(self) -> None:
        self._plane.abort()

    def close(self) -> None:
        self._plane.close()
        self._free(list(self._live.values()))  # those of operations that failed

    def _put(self, array: HostArray, dtype: DType | None = None) -> CudaBuffer:
        shift = -(-next(self._shifts) // array.itemsize) * array.itemsize
        buffer = self._memory.put(array, BY_SIZE[array.itemsize] if dtype is None else dtype, shift)
        self._live[buffer.pointer] = buffer
        return buffer

    def _free(self, buffers: Sequence[CudaBuffer]) -> None:
        for buffer in buffers:
            if self._live.pop(buffer.pointer, None) is not None:
                self._memory.free(buffer)

    def _end(
        self,
        completion: Completion | None,
        sources: Sequence[CudaBuffer],
        targets: Sequence[tuple[CudaBuffer, HostArray]],
    ) -> None:
        """Wait for the end, and copy back."""
        errors: SimpleQueue[Exception | None] = SimpleQueue()
        if completion is not None:
            completion.on_end(errors.put)
            error = errors.get()
            if error is not None:
                raise error
        for target, out in targets:
            self._memory.get(target, out)
        self._free([*sources, *(target for target, _ in targets)])


class ThroughNccl(ThroughGpu):
    """GPU plane with NCCL itself, which keeps a socket of a communicator that is aborted because another member has died:
    descriptors may be left."""

    _was_aborted = False

    @property
    def gave_up(self) -> bool:
        return self._was_aborted

    def abort(self) -> None:
        self._was_aborted = True
        super().abort()


BY_SIZE = {1: DType.U8, 2: DType.I16, 4: DType.I32, 8: DType.I64}
"""Of what is only moved the size of elements is all that counts."""
