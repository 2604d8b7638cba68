"""Base of the planes of GPUs: the GPUs that this process sees, their buffers, and how members join.

Members join at the first operation, on the GPU that its tensors are on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
import uuid
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from hvdlab.collectives import system
from hvdlab.collectives.planes.base import (
    NVLINK,
    PCIE,
    PEER,
    SAME_GPU,
    UNKNOWN,
    Buffer,
    Links,
    Plane,
    PlaneAborted,
    PlaneBroken,
    PlaneContext,
)
from hvdlab.collectives.planes.gpu.device import Device, DeviceFailed
from hvdlab.collectives.types import DType

CUDA = "cuda"
"""The device class of the memory of NVIDIA's GPUs."""
SWITCH = "HVDLAB_CUDA"
"""The variable that, at 0, keeps this rank from working on CUDA tensors where they are."""
CHOICE = "HVDLAB_CUDA_PLANE"
"""The variable that selects the planes for CUDA tensors that this rank offers."""
DRIVERS = ("/proc/driver/nvidia/version", "/dev/dxg")
"""One of these is there where NVIDIA's driver is: on Linux, and on Linux under Windows."""

_KINDS = ("GPU", "MIG")


class Gpus(Protocol):
    """GPUs of this process. Any thread; anything may raise ``DeviceFailed``."""

    def why_unusable(self) -> str | None:
        """Return why this process can't use a GPU, in one sentence; ``None`` if it can."""
        ...

    def count(self) -> int:
        """Return how many GPUs there are."""
        ...

    def open(self, ordinal: int) -> Device:
        """Return the GPU of this number, always the same object."""
        ...

    def used_ordinal(self) -> int:
        """Return the number of the first GPU that this process uses already, or 0 if it uses none."""
        ...

    def ordinal_of(self, pointer: int) -> int:
        """Return the number of the GPU that an address belongs to."""
        ...


def why_off() -> str | None:
    """Return why this process does not work on CUDA tensors in place, found out without loading the driver; ``None`` if it may be able to."""
    if os.environ.get(SWITCH, "").strip() == "0":
        return f"CUDA tensors are copied through the host: {SWITCH}=0."
    return why_missing()


def is_wanted(plane: str) -> bool:
    """Return whether this process is to offer a plane, such as ``cuda/nccl``: all but those for CUDA tensors that its user did not ask for."""
    choice = os.environ.get(CHOICE, "").strip().lower()
    return choice in ("", "auto") or plane == f"{CUDA}/{choice}" or not plane.startswith(f"{CUDA}/")


def why_missing() -> str | None:
    """Return why planes can't work on CUDA tensors in place here: the machine or the installation lacks a part. ``None`` if it may work."""
    if not any(Path(path).exists() for path in DRIVERS):
        return "there is no NVIDIA driver on this machine."
    for module in ("cuda", "cuda.bindings"):
        if importlib.util.find_spec(module) is None:
            return "NVIDIA's bindings of the driver are missing: pip install 'hvdlab[gpu]'."
    return None


@cache
def gpus() -> Gpus:
    """Return this process's GPUs, by way of CUDA's driver."""
    from hvdlab.collectives.planes.gpu.driver import CudaGpus

    return CudaGpus()


class StreamMark:
    """Mark of the work that is on a stream when it is made.

    Args:
        device: The GPU.
        stream: The stream's address; 0 is the legacy default stream.

    Attributes:
        event: A CUDA event that comes when all of that work is done.
    """

    __slots__ = ("_device", "event")

    def __init__(self, device: Device, stream: int) -> None:
        self._device = device
        with device:
            self.event = device.new_event()
            device.record(self.event, stream)

    def __del__(self) -> None:
        # There is none if the driver has refused it, in __init__().
        event = getattr(self, "event", None)
        if event is not None:  # the driver keeps it until all work that waits for it is done
            with contextlib.suppress(DeviceFailed), self._device:
                self._device.end_event(event)


class CudaBuffer:
    """C-contiguous memory of a GPU, and when it may be used.

    Args:
        pointer: Address of the first element.
        shape: Extent of each dimension.
        dtype: Element type.
        ordinal: Which of this process's GPUs it is on.
        after: Mark of the work that must be done before the memory is read or written; ``None`` if it may be used at once.
        owner: Object that keeps the memory alive.
    """

    __slots__ = ("after", "dtype", "ordinal", "owner", "pointer", "shape")

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        dtype: DType,
        ordinal: int = 0,
        after: StreamMark | None = None,
        owner: object = None,
    ) -> None:
        self.pointer = pointer
        self.shape = shape
        self.dtype = dtype
        self.ordinal = ordinal
        self.after = after
        self.owner = owner

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for extent in self.shape:
            count *= extent
        return count

    @property
    def device(self) -> str:
        return CUDA


def buffer_on_stream(
    pointer: int, shape: tuple[int, ...], dtype: DType, ordinal: int, stream: int, owner: object
) -> CudaBuffer:
    """Return memory that may be used once the work that is on a stream now is done.

    Args:
        pointer: Address of the first element.
        shape: Extent of each dimension.
        dtype: Element type.
        ordinal: Number of the GPU, among those of this process, that the memory is on.
        stream: The stream's address; 0 is the legacy default stream.
        owner: Object that keeps the memory alive.

    Raises:
        DeviceFailed: The driver refused an event.
    """
    buffer = CudaBuffer(pointer, shape, dtype, ordinal, None, owner)
    if _unmarked.buffers is None:
        buffer.after = StreamMark(gpus().open(ordinal), stream)
    else:
        _unmarked.buffers.setdefault((ordinal, stream), []).append(buffer)
    return buffer


class _Unmarked(threading.local):
    #: Within :func:`marked_together`: the buffers made so far, by the number of the GPU and the stream.
    buffers: dict[tuple[int, int], list[CudaBuffer]] | None = None


_unmarked = _Unmarked()


@contextlib.contextmanager
def marked_together() -> Iterator[None]:
    """Share one mark per stream: within the block :func:`buffer_on_stream` makes none for the calling thread; at its end all its buffers get theirs.

    Raises:
        DeviceFailed: The driver refused an event.
    """
    outer, _unmarked.buffers = _unmarked.buffers, {}
    try:
        yield
        # Only now: the one mark of a stream has to come behind the work for the last of its buffers.
        for (ordinal, stream), buffers in _unmarked.buffers.items():
            mark = StreamMark(gpus().open(ordinal), stream)
            for buffer in buffers:
                buffer.after = mark
    finally:
        _unmarked.buffers = outer


class MembersOfGpus(Protocol):
    """Member that joins the others, or has joined them."""

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
    """Data plane whose tensors are on one GPU of each member."""

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
        reason = why_off() or gpus().why_unusable()
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
        """Return the group, which this member has joined; it works on the GPU that the first of the buffers is on.

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
                # The abort came while this member joined, when there was no group to stop.
                group.stop()
        # Without the guard, which abort() needs: this waits for the other members.
        group.connect(deadline)
        others = [rank for index, rank in enumerate(self.context.ranks) if index != self.context.index]
        if others:
            self.context.on_links(self._links(others))

    def _links(self, others: Sequence[int]) -> Links:
        """Return the links between this member's GPU and those of the other ranks, once they have joined."""
        return {UNKNOWN: tuple(others)}

    def _device(self, ordinal: int | None) -> Device:
        """Return this member's GPU: the one that its first tensor is on; without a tensor, the first GPU that its process uses already."""
        if self._gpu is None:
            self._ordinal = gpus().used_ordinal() if ordinal is None else ordinal
            self._gpu = gpus().open(self._ordinal)
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
    """Return uninitialised memory of a GPU, which is freed when the buffer goes.

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
        # The driver refuses to allocate 0 bytes.
        owner = _Memory(device, max(1, buffer.nbytes))
    buffer.pointer, buffer.owner = owner.pointer, owner
    return buffer


def cuda_buffer(buffer: Buffer) -> CudaBuffer:
    """Return a buffer that a plane of GPUs was given."""
    assert isinstance(buffer, CudaBuffer), f"a buffer on {buffer.device} is not a GPU's"
    return buffer


def links_between(mine: str, identities: Sequence[str], ranks: Sequence[int]) -> Links:
    """Return the links to the GPUs of other ranks, whose memory this rank's GPU reaches. It needs some milliseconds if they are other GPUs.

    Args:
        mine: The UUID of this rank's GPU, as 32 hexadecimal digits.
        identities: Those of the other ranks' GPUs.
        ranks: These ranks.
    """
    others = sorted({identity for identity in identities if identity != mine})
    by_gpu = {mine: SAME_GPU} | (_asked(mine, others) if others else {})
    found: dict[str, list[int]] = {}
    for identity, rank in zip(identities, ranks, strict=True):
        found.setdefault(by_gpu[identity], []).append(rank)
    order = (SAME_GPU, NVLINK, PCIE, PEER)
    return {link: tuple(found[link]) for link in order if link in found}


def _asked(mine: str, others: Sequence[str]) -> dict[str, str]:
    # Where the library is missing, kernels still reach the other GPUs: that was found out by the driver, and only the link is unknown.
    library = system.open_nvml("What lies between GPUs is not known")
    if library is None:
        return dict.fromkeys(others, PEER)
    try:
        return {other: _link(library, mine, other) for other in others}
    finally:
        with contextlib.suppress(library.NVMLError):
            library.nvmlShutdown()


def _link(library: Any, mine: str, other: str) -> str:
    """Return the link between two GPUs; :data:`PEER` unless the library knows it.

    A status that is neither yes nor a reason for no proves nothing: PCIe does not follow from it.
    """
    try:
        here, there = _handle(library, mine), _handle(library, other)
        by_nvlink = library.nvmlDeviceGetP2PStatus(here, there, library.NVML_P2P_CAPS_INDEX_NVLINK)
        if by_nvlink == library.NVML_P2P_STATUS_OK:
            return NVLINK
        reads = library.nvmlDeviceGetP2PStatus(here, there, library.NVML_P2P_CAPS_INDEX_READ)
    except library.NVMLError:
        return PEER
    known = by_nvlink != library.NVML_P2P_STATUS_UNKNOWN
    return PCIE if known and reads == library.NVML_P2P_STATUS_OK else PEER


def _handle(library: Any, identity: str) -> Any:
    """Return the library's handle of a GPU or of an instance of a partitioned one. Raises ``NVMLError``."""
    text = str(uuid.UUID(hex=identity))
    try:
        return library.nvmlDeviceGetHandleByUUID(f"{_KINDS[0]}-{text}")
    except library.NVMLError:
        return library.nvmlDeviceGetHandleByUUID(f"{_KINDS[1]}-{text}")
