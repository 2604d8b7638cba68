"""The GPUs that this process sees, and how bindings hand their memory to a plane."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

from hvdlab.collectives.dtypes import DType
from hvdlab.collectives.planes.cuda.device import Device, DeviceFailed

CUDA = "cuda"
"""The device class of the memory of NVIDIA's GPUs."""
SWITCH = "HVDLAB_CUDA"
"""The variable that, at 1, has this rank work on CUDA tensors where they are, and at 0 keeps it from that."""
CHOICE = "HVDLAB_CUDA_PLANE"
"""The variable that says which of the planes for CUDA tensors this rank offers."""
IPC = "cuda/ipc"
"""The plane for ranks that share a GPU."""
DRIVERS = ("/proc/driver/nvidia/version", "/dev/dxg")
"""One of these is there where NVIDIA's driver is: on Linux, and on Linux under Windows."""
GPUS = "/proc/driver/nvidia/gpus"
"""On Linux the driver has a folder here for each GPU of the machine."""


class Gpus(Protocol):
    """All GPUs of this process. Any thread; anything may raise ``DeviceFailed``."""

    def why_unusable(self) -> str | None:
        """Why this process can't use a GPU, in one sentence; ``None`` if it can."""
        ...

    def open(self, ordinal: int) -> Device:
        """The GPU of this number, always the same object."""
        ...

    def used_ordinal(self) -> int:
        """Number of the first GPU that this process uses already, or 0 if it uses none."""
        ...

    def ordinal_of(self, pointer: int) -> int:
        """Number of the GPU that an address belongs to."""
        ...


def why_off(plane: str) -> str | None:
    """Why this process does not work on CUDA tensors in place by a plane, found out without loading the driver; ``None`` if it may be able to."""
    setting = os.environ.get(SWITCH, "").strip()
    if setting == "0":
        return f"CUDA tensors are copied through the host: {SWITCH}=0."
    missing = why_missing()
    if missing is not None or setting == "1":
        return missing
    # No plane was ever run on several GPUs, which is what NCCL is for.
    if plane != IPC:
        return f"it has to be asked for by {SWITCH}=1."
    found = _gpus_of_machine()
    if found != 1:
        return (
            f"CUDA tensors are copied through the host unless {SWITCH}=1 (this machine shows {found} GPUs)."
        )
    return None


def _gpus_of_machine() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(GPUS))
    return 0


def is_wanted(plane: str) -> bool:
    """Whether this process is to offer a plane, such as ``cuda/nccl``: all but those for CUDA tensors that its user did not ask for."""
    choice = os.environ.get(CHOICE, "").strip().lower()
    return choice in ("", "auto") or plane == f"{CUDA}/{choice}" or not plane.startswith(f"{CUDA}/")


def why_missing() -> str | None:
    """Why CUDA tensors can't be worked on in place here: what the machine or the installation lacks; ``None`` if it may work."""
    if not any(Path(path).exists() for path in DRIVERS):
        return "there is no NVIDIA driver on this machine."
    for module in ("cuda", "cuda.bindings"):
        if importlib.util.find_spec(module) is None:
            return "NVIDIA's bindings of the driver are missing: pip install 'hvdlab[gpu]'."
    return None


@cache
def gpus() -> Gpus:
    """This process's GPUs, by way of CUDA's driver."""
    from hvdlab.collectives.planes.cuda.driver import CudaGpus

    return CudaGpus()


class StreamMark:
    """The work that is on a stream when the mark is made.

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
        event = getattr(self, "event", None)
        if event is not None:  # the driver keeps it until what waits for it has been done
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
    """Memory that may be used once the work that is on a stream now is done.

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
    """Within it, :func:`buffer_on_stream` makes no marks for the calling thread; at its end there is one for each stream, which all its buffers share.

    Raises:
        DeviceFailed: The driver refused an event.
    """
    outer, _unmarked.buffers = _unmarked.buffers, {}
    try:
        yield
        for (ordinal, stream), buffers in _unmarked.buffers.items():
            mark = StreamMark(gpus().open(ordinal), stream)
            for buffer in buffers:
                buffer.after = mark
    finally:
        _unmarked.buffers = outer
