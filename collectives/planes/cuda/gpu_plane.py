"""What planes of GPUs have in common: their members join at the first operation, on the GPU that its tensors are on."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from hvdlab.collectives.dtypes import DType
from hvdlab.collectives.planes.base import Plane, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.buffers import Buffer
from hvdlab.collectives.planes.cuda import gpus
from hvdlab.collectives.planes.cuda.device import Device, DeviceFailed
from hvdlab.collectives.planes.cuda.gpus import CUDA, CudaBuffer
from hvdlab.collectives.planes.links import UNKNOWN, Links


class MembersOfGpus(Protocol):
    """A member that joins the others, or has joined them."""

    def connect(self, deadline: float) -> None:
        """Wait for the other members. Raises ``PlaneBroken`` at the deadline (``time.monotonic()``)."""
        ...

    def clear(self, buffer: CudaBuffer) -> None:
        """Set a tensor of the next operation to zero."""
        ...

    def stop(self) -> None:
        """Give up: everything under way ends with ``PlaneAborted``. Any thread; never blocks; idempotent."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...


Joined = TypeVar("Joined", bound=MembersOfGpus)


class GpuPlane(Plane, Generic[Joined]):
    """A data plane whose tensors are on one GPU of each member."""

    device: ClassVar[str] = CUDA
    most_members: ClassVar[int]
    """How many members a group may have."""

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context)
        self._guard = threading.Lock()
        self._aborted = False
        self._group: Joined | None = None
        #: The GPU that this member's tensors are on, once that is known.
        self._gpu: Device | None = None
        self._ordinal = 0
        self._timeout = 30.0

    @classmethod
    def unavailable(cls) -> str | None:
        reason = gpus.why_off(cls.name) or gpus.gpus().why_unusable()
        return f"The plane `{cls.name}` can't be used: {reason}" if reason else None

    def connect(self, timeout: float) -> None:
        self._timeout = timeout
        if self.context.size > self.most_members:
            raise PlaneBroken(f"a kernel of `{self.name}` takes no addresses of {self.context.size} ranks")
        if self._aborted:
            raise PlaneAborted

    # -- joining ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _join(self, device: Device, deadline: float) -> Joined:
        """Begin to join the other members; :meth:`MembersOfGpus.connect` is called next.

        Raises:
            PlaneBroken: These GPUs can't be connected.
            DeviceFailed: The driver refused something.
            TimeoutError: A member did not come until the deadline.
        """

    def _joined(self, buffers: Sequence[CudaBuffer]) -> Joined:
        """The group, which this member has joined; it works on the GPU that the first of the buffers is on.

        Raises:
            PlaneAborted: The plane was aborted.
            PlaneBroken: The members can't be connected, or a buffer is on another GPU than this member's tensors so far.
        """
        if self._aborted:
            raise PlaneAborted
        if self._group is None:
            self._connect(next((buffer.ordinal for buffer in buffers), None))
        assert self._group is not None
        elsewhere = next((b.ordinal for b in buffers if b.ordinal != self._ordinal), None)
        if elsewhere is not None:
            raise PlaneBroken(
                f"this rank's tensors were on GPU {self._ordinal} so far, and one is on GPU {elsewhere}: "
                "a process set works on one GPU of each rank"
            )
        return self._group

    def _connect(self, ordinal: int | None) -> None:
        deadline = time.monotonic() + self._timeout
        try:
            group = self._join(self._device(ordinal), deadline)
        except (DeviceFailed, TimeoutError) as error:
            raise PlaneBroken(f"the plane `{self.name}`: {error}") from error
        with self._guard:
            self._group = group
            if self._aborted:
                group.stop()
        group.connect(deadline)
        others = [rank for index, rank in enumerate(self.context.ranks) if index != self.context.index]
        if others:
            self.context.on_links(self._links(others))

    def _links(self, others: Sequence[int]) -> Links:
        """What data goes over between this member's GPU and those of the other ranks, once they have joined."""
        return {UNKNOWN: tuple(others)}

    def _device(self, ordinal: int | None) -> Device:
        """This member's GPU: the one that its first tensor is on; without a tensor, the first GPU that its process uses already."""
        if self._gpu is None:
            self._ordinal = gpus.gpus().used_ordinal() if ordinal is None else ordinal
            self._gpu = gpus.gpus().open(self._ordinal)
        return self._gpu

    # -- memory -----------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DType) -> CudaBuffer:
        try:
            return allocated(self._device(None), self._ordinal, shape, dtype)
        except DeviceFailed as error:
            raise PlaneBroken(f"the GPU of this rank: {error}") from error

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> CudaBuffer:
        buffer = self.empty(shape, dtype)
        self._joined([buffer]).clear(buffer)
        return buffer

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        with self._guard:
            self._aborted = True
            if self._group is not None:
                self._group.stop()

    def close(self) -> None:
        with self._guard:
            self._aborted = True
            group = self._group
        if group is not None:
            group.close()


class _Memory:
    """Memory of the GPU that is freed when this object goes."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.pointer = device.allocate(nbytes)
        weakref.finalize(
            self, _free, device, self.pointer
        ).atexit = False  # the driver frees all by itself then


def _free(device: Device, pointer: int) -> None:
    with contextlib.suppress(DeviceFailed), device:  # after a failure all memory of the process is gone
        device.free(pointer)


def allocated(device: Device, ordinal: int, shape: tuple[int, ...], dtype: DType) -> CudaBuffer:
    """Uninitialised memory of a GPU, which is freed when the buffer goes.

    Args:
        device: The GPU.
        ordinal: Its number in this process.
        shape: Extent of each dimension.
        dtype: Element type.

    Raises:
        DeviceFailed: The GPU has no memory left.
    """
    buffer = CudaBuffer(0, shape, dtype, ordinal)
    with device:
        owner = _Memory(device, max(1, buffer.nbytes))
    buffer.pointer, buffer.owner = owner.pointer, owner
    return buffer


def cuda_buffer(buffer: Buffer) -> CudaBuffer:
    """A buffer that a plane of GPUs was given."""
    assert isinstance(buffer, CudaBuffer), f"a buffer on {buffer.device} is not a GPU's"
    return buffer
