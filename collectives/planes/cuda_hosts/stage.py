"""Memory of the host between a GPU and a plane of the host."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.planes.cuda.device import Device, DeviceFailed
from hvdlab.collectives.planes.cuda.gpus import CudaBuffer

LEAST = 1 << 20
"""Bytes of the memory at least; it grows to the next power of two, since registering takes long."""

Bytes = npt.NDArray[np.uint8]


class Stage:
    """Copies between a GPU and memory of this process, in order, on a stream of its own. Belongs to one thread.

    Anything but :meth:`close` may raise ``DeviceFailed``.

    Args:
        device: The GPU.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: mmap.mmap | None = None
        self._anchor: ctypes.c_char | None = None
        self._address = self._mapped = 0
        with device:
            self._stream = device.new_stream()
            self._event = device.new_event()

    def room(self, nbytes: int) -> Bytes:
        """The first ``nbytes`` of the memory, uninitialised. They are valid until more is asked for."""
        if not nbytes:
            return np.empty(0, np.uint8)
        if self._memory is None or len(self._memory) < nbytes:
            self._let_go()
            size = 1 << max(nbytes - 1, LEAST - 1).bit_length()
            self._memory = mmap.mmap(-1, size)
            self._anchor = ctypes.c_char.from_buffer(self._memory)
            self._address = ctypes.addressof(self._anchor)
            with self._device:
                self._mapped = self._device.register(self._address, size)
        return np.frombuffer(self._memory, np.uint8, nbytes)

    def after(self, buffers: Iterable[CudaBuffer]) -> None:
        """Have the next copies wait for what must be done before these buffers are read or written."""
        with self._device:
            for event in {buffer.after.event for buffer in buffers if buffer.after is not None}:
                self._device.wait_event(self._stream, event)

    def fetch(self, at: int, pointer: int, nbytes: int) -> None:
        """Copy memory of the GPU to byte ``at`` of the room."""
        self.copy(self._mapped + at, pointer, nbytes)

    def bring(self, pointer: int, at: int, nbytes: int) -> None:
        """Copy from byte ``at`` of the room to memory of the GPU."""
        self.copy(pointer, self._mapped + at, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the GPU's memory."""
        if nbytes:
            with self._device:
                self._device.copy(target, source, nbytes, self._stream)

    def wait(self) -> None:
        """Return once all copies have been made."""
        with self._device:
            self._device.record(self._event, self._stream)
            self._device.synchronize(self._event)

    def _let_go(self) -> None:
        memory, self._memory, self._anchor = self._memory, None, None
        if memory is not None:
            with self._device:
                self._device.unregister(self._address)
            with contextlib.suppress(BufferError):  # an operation that a library could not end still has it
                memory.close()

    def close(self) -> None:
        """Free everything. If the GPU has not come to the last copy, which waits for a kernel of the user's, all is left to the process."""
        with contextlib.suppress(DeviceFailed):  # a GPU that has failed frees all when the process ends
            with self._device:
                if not self._device.drained(self._stream):
                    return
                self._device.end_event(self._event)
                self._device.end_stream(self._stream)
            self._let_go()
