"""The way of CUDA tensors through the host, for members that have no other: each tensor is copied to pinned memory and back.

Bindings copy by themselves where a process set has no plane for CUDA tensors. This plane is for a set that was given one and lost it at
the check, when collectives had been submitted as those of CUDA tensors already: the ranks keep that device class, so none of them
disagrees with another about it.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Sequence
from time import monotonic_ns
from typing import ClassVar, NamedTuple

import numpy as np

from hvdlab.collectives.planes.base import (
    Buffer,
    HostArray,
    PhaseTimes,
    Plane,
    PlaneBroken,
    PlaneContext,
    storage_type,
)
from hvdlab.collectives.planes.gpu.device import Device, DeviceFailed
from hvdlab.collectives.planes.gpu.gpu_group import DRAIN_INTERVAL, STUCK_AFTER
from hvdlab.collectives.planes.gpu.gpu_plane import CUDA, CudaBuffer, allocated, cuda_buffer
from hvdlab.collectives.planes.host import HostPlane, leave_to_library
from hvdlab.collectives.planes.registry import SubgroupPlanes
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.types import DType, Reduction

HOST_PLANE = "host_plane"
"""The option that names the plane of the host which the process set has."""
_ALIGN = 256  # bytes
_LEAST_ROOM = 1 << 20  # bytes


class ArrayPlace(NamedTuple):
    """Where an array lies in pinned memory.

    Attributes:
        array: The array, one-dimensional, in storage type.
        address: Its address for the GPU.
    """

    array: HostArray
    address: int


class PinnedMemory:
    """Memory of the host that one GPU reads and writes, and the stream of its copies. One thread at a time, with the GPU as its current device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.stream = device.new_stream()
        self._memory: mmap.mmap | None = None
        self._address = self._mapped = 0
        #: Tensors of the copies on their way. If an interrupt ends the wait for these, the tensors stay here until :meth:`close`: the GPU
        #: may read and write them, and their owner frees them with the last reference.
        self._copied: Sequence[CudaBuffer] = ()

    def places(self, counts: Sequence[int], dtype: DType) -> list[ArrayPlace]:
        """Return arrays with these numbers of elements. Those of the last call are gone then."""
        kind = storage_type(dtype)
        begins, total = [], 0
        for count in counts:
            begins.append(total)
            total += -(-count * kind.itemsize // _ALIGN) * _ALIGN
        self._make_room(total)
        memory = self._memory
        assert memory is not None
        return [
            ArrayPlace(np.frombuffer(memory, kind, count, begin), self._mapped + begin)
            for count, begin in zip(counts, begins, strict=True)
        ]

    def _make_room(self, nbytes: int) -> None:
        if self._memory is not None and len(self._memory) >= nbytes:
            return
        self._unmap()
        memory = mmap.mmap(-1, 1 << max(nbytes - 1, _LEAST_ROOM - 1).bit_length())
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._mapped = self._device.register(address, len(memory))
        # Only now: _unmap() would unregister memory that the driver has just refused to register.
        self._memory, self._address = memory, address

    def fetch(self, buffers: Sequence[CudaBuffer], places: Sequence[ArrayPlace]) -> None:
        """Copy tensors to the host, once the work that makes them is done."""
        self._copied = buffers
        # A set, since tensors of one stream can share a mark.
        for event in {buffer.after.event for buffer in buffers if buffer.after is not None}:
            self._device.wait_event(self.stream, event)
        for buffer, place in zip(buffers, places, strict=True):
            if buffer.nbytes:
                self._device.copy(place.address, buffer.pointer, buffer.nbytes, self.stream)
        # The host reads the arrays next, and waits for no stream.
        self.finish()

    def store(self, places: Sequence[ArrayPlace], buffers: Sequence[CudaBuffer]) -> None:
        """Copy arrays to tensors, which may be read when this returns."""
        self._copied = buffers
        for event in {buffer.after.event for buffer in buffers if buffer.after is not None}:
            self._device.wait_event(self.stream, event)
        for place, buffer in zip(places, buffers, strict=True):
            if buffer.nbytes:
                self._device.copy(buffer.pointer, place.address, buffer.nbytes, self.stream)
        self.finish()

    def clear(self, buffer: CudaBuffer) -> None:
        """Set a tensor to zero."""
        self._copied = (buffer,)
        self._device.clear(buffer.pointer, buffer.nbytes, self.stream)
        self.finish()

    def finish(self) -> None:
        """Wait until the copies are done."""
        event = self._device.new_event()
        try:
            self._device.record(event, self.stream)
            self._device.synchronize(event)
        finally:
            self._device.end_event(event)
        self._copied = ()  # not before: an interrupted wait ends no copy

    def close(self) -> None:
        """Free everything. Waits for copies on their way, ``STUCK_AFTER`` seconds at most; a GPU that needs longer keeps all."""
        if self._copied and not self._drains():
            leave_to_library(self._memory, self._copied)
            return
        self._copied = ()
        self._unmap()
        self._device.end_stream(self.stream)

    def _drains(self) -> bool:
        """Return whether the copies come to their end in time."""
        deadline = Deadline(STUCK_AFTER)
        while not self._device.drained(self.stream):
            if deadline.expired:
                return False
            time.sleep(DRAIN_INTERVAL)
        return True

    def _unmap(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            # The mapping itself goes with the last array in it.
            self._device.unregister(self._address)


class StagedPlane(Plane):
    """Plane of CUDA tensors whose operations are those of a plane of the host, which it builds.

    Args:
        context: The process set; its option :data:`HOST_PLANE` names the plane of the host.
        device: This member's GPU.
        ordinal: Number of that GPU in this process.
    """

    name: ClassVar[str] = "cuda/staged"
    device: ClassVar[str] = CUDA

    def __init__(self, context: PlaneContext, device: Device, ordinal: int) -> None:
        super().__init__(context)
        self._gpu, self._ordinal = device, ordinal
        self._planes = SubgroupPlanes(context)
        self._host: HostPlane | None = None
        self._pinned: PinnedMemory | None = None

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def connect(self, timeout: float) -> None:
        me = self.context
        name = "local" if me.size == 1 else me.options.get(HOST_PLANE, "shm")
        try:
            self._host = self._planes.connect(name, range(me.size), me.index, "staged/", Deadline(timeout))
            with self._gpu:
                self._pinned = PinnedMemory(self._gpu)
        except (DeviceFailed, TimeoutError) as error:
            raise PlaneBroken(f"CUDA tensors through the host: {error}") from error

    # -- memory -----------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DType) -> CudaBuffer:
        try:
            return allocated(self._gpu, self._ordinal, shape, dtype)
        except DeviceFailed as error:
            raise _broken(error) from error

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> CudaBuffer:
        buffer = self.empty(shape, dtype)
        try:
            with self._gpu:
                self._memory.clear(buffer)
        except DeviceFailed as error:
            raise _broken(error) from error
        return buffer

    @property
    def _memory(self) -> PinnedMemory:
        assert self._pinned is not None, "the plane is not connected"
        return self._pinned

    @property
    def _plane(self) -> HostPlane:
        assert self._host is not None, "the plane is not connected"
        return self._host

    def _fetch(self, buffers: Sequence[CudaBuffer], places: Sequence[ArrayPlace], phases: PhaseTimes) -> None:
        started = monotonic_ns()
        try:
            with self._gpu:
                self._memory.fetch(buffers, places)
        except DeviceFailed as error:
            raise _broken(error) from error
        phases.pack += monotonic_ns() - started

    def _store(self, places: Sequence[ArrayPlace], buffers: Sequence[CudaBuffer], phases: PhaseTimes) -> None:
        started = monotonic_ns()
        try:
            with self._gpu:
                self._memory.store(places, buffers)
        except DeviceFailed as error:
            raise _broken(error) from error
        phases.unpack += monotonic_ns() - started

    def _places(self, counts: Sequence[int], dtype: DType) -> list[ArrayPlace]:
        try:
            with self._gpu:
                return self._memory.places(counts, dtype)
        except DeviceFailed as error:
            raise _broken(error) from error

    # -- operations ---------------------------------------------------------------------------------------------------

    def start_allreduce(
        self,
        ins: Sequence[Buffer],
        outs: Sequence[Buffer],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        places = self._places([_elements(source) for source in ins], dtype)
        self._fetch([cuda_buffer(source) for source in ins], places, phases)
        arrays = [place.array for place in places]
        self._plane.allreduce(arrays, arrays, dtype, reduction, phases)
        self._store(places, [cuda_buffer(out) for out in outs], phases)

    def start_allgather(self, send: Buffer, counts: Sequence[int], out: Buffer, phases: PhaseTimes) -> None:
        given, result = self._places([_elements(send), _elements(out)], out.dtype)
        self._fetch([cuda_buffer(send)], [given], phases)
        self._plane.allgather(given.array, counts, result.array, phases)
        self._store([result], [cuda_buffer(out)], phases)

    def start_broadcast(self, source: Buffer | None, out: Buffer, root: int, phases: PhaseTimes) -> None:
        places = self._places([_elements(out)], out.dtype)
        is_root = root == self.context.index
        if is_root:
            self._fetch([cuda_buffer(source or out)], places, phases)
        self._plane.broadcast(places[0].array, root, phases)
        # The root's own output has the data already, unless it was given apart from the input.
        if not is_root or source is not None:
            self._store(places, [cuda_buffer(out)], phases)

    def start_reducescatter(
        self,
        send: Buffer,
        counts: Sequence[int],
        out: Buffer,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        given, result = self._places([_elements(send), _elements(out)], dtype)
        self._fetch([cuda_buffer(send)], [given], phases)
        self._plane.reducescatter(given.array, counts, result.array, dtype, reduction, phases)
        self._store([result], [cuda_buffer(out)], phases)

    def start_alltoall(
        self,
        send: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Buffer,
        phases: PhaseTimes,
    ) -> None:
        given, result = self._places([_elements(send), _elements(out)], out.dtype)
        self._fetch([cuda_buffer(send)], [given], phases)
        self._plane.alltoall(given.array, send_counts, recv_counts, result.array, phases)
        self._store([result], [cuda_buffer(out)], phases)

    def start_barrier(self, phases: PhaseTimes) -> None:
        self._plane.barrier(phases)

    def tune(self, slice_bytes: int) -> None:
        if self._host is not None:
            self._host.tune(slice_bytes)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self._planes.abort()

    def close(self) -> None:
        # First: the host's plane works on arrays in the pinned memory.
        self._planes.close()
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            try:
                with self._gpu:
                    pinned.close()
            except DeviceFailed:
                return  # a GPU that has failed frees all when the process ends


def _elements(buffer: Buffer) -> int:
    return buffer.nbytes // buffer.dtype.itemsize


def _broken(error: DeviceFailed) -> PlaneBroken:
    return PlaneBroken(f"the GPU of this rank: {error}")
