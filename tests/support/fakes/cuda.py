"""A simulated GPU for the plane `cuda/ipc`: memory that processes can open, streams that are threads, kernels that are numpy's.

Streams are as stubborn as a GPU's: they wait for words in memory and for events, and nothing stops them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.planes.gpu.device import (
    HANDLE_BYTES,
    Allocation,
    DeviceFailed,
    KernelLaunch,
    OpenedPieces,
)
from hvdlab.collectives.reduce import make_fold
from hvdlab.collectives.system import create_memory
from hvdlab.collectives.types import DType, ReduceOp

_ALIGNED = 1 << 63  # flag in an element count: all addresses of the job are multiples of 16


def word(address: int) -> Any:
    return ctypes.c_uint32.from_address(address)


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return memory as an array."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Stream:
    """Work in order, by a thread."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._left = 0
        self._guard = threading.Lock()
        self.failed: Exception | None = None
        self._thread = threading.Thread(target=self._execute, name="fake-stream", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        with self._guard:
            self._left += 1
        self._work.put(work)

    def _execute(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  # as with a GPU, a later call reports it
                self.failed = error
            del work
            with self._guard:
                self._left -= 1

    @property
    def drained(self) -> bool:
        return not self._left

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()


class FakeCuda:
    """See :class:`hvdlab.collectives.planes.gpu.device.Device`.

    Attributes:
        open_to_others: Whether other processes can open the memory of :meth:`allocate`, by default; as with
            `cuMemCreate` they can't.
    """

    identity = "GPU-fake"
    open_to_others: ClassVar[bool] = True
    _serials = itertools.count(1)

    def __init__(self, ordinal: int = 0) -> None:
        self._numbers = itertools.count(16)  # CUDA's default streams have smaller ones
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, threading.Event] = {}
        self._memory: dict[int, tuple[mmap.mmap, int, Allocation, bool]] = {}
        self._opened: dict[int, mmap.mmap] = {}
        self.owner = secrets.randbits(64)
        self.opened = OpenedPieces(self)

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def reaches(self, identity: str) -> bool:
        return identity == self.identity

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, opened: bool | None = None) -> int:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = create_memory("fake-cuda", size)
        memory = mmap.mmap(descriptor, size)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        shared = self.open_to_others if opened is None else opened
        self._memory[base] = (memory, descriptor, Allocation(base, size, next(self._serials)), shared)
        return base

    def free(self, pointer: int) -> None:
        memory, descriptor, _, _ = self._memory.pop(pointer)
        os.close(descriptor)
        with contextlib.suppress(BufferError):
            memory.close()

    def allocation_of(self, pointer: int) -> Allocation | None:
        return next(
            (a for _, _, a, _ in list(self._memory.values()) if a.base <= pointer < a.base + a.nbytes), None
        )

    def export(self, base: int) -> bytes | None:
        _, descriptor, allocation, shared = self._memory[base]
        if not shared and not self._is_arena(allocation):
            return None
        return f"{os.getpid()} {descriptor} {allocation.nbytes}".encode().ljust(HANDLE_BYTES)

    def _is_arena(self, allocation: Allocation) -> bool:
        return allocation.nbytes >= 1 << 20

    def open(self, handle: bytes) -> int:
        pid, descriptor, nbytes = handle.split()
        if int(pid) == os.getpid():
            raise DeviceFailed("a process can't open its own memory")
        try:
            found = os.open(f"/proc/{pid.decode()}/fd/{descriptor.decode()}", os.O_RDWR)
        except OSError as error:
            raise DeviceFailed(str(error)) from error
        memory = mmap.mmap(found, int(nbytes))
        os.close(found)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._opened[base] = memory
        return base

    def close(self, pointer: int) -> None:
        memory = self._opened.pop(pointer)
        with contextlib.suppress(BufferError):
            memory.close()

    def register(self, address: int, nbytes: int) -> int:
        return address

    def unregister(self, address: int) -> None: ...

    # -- order --------------------------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        number = next(self._numbers)
        self._streams[number] = Stream()
        return number

    def streams(self) -> list[int]:
        return list(self._streams)

    def end_stream(self, stream: int) -> None:
        self._streams.pop(stream).end()

    def new_event(self) -> int:
        number = next(self._numbers)
        self._events[number] = threading.Event()
        self._events[number].set()  # as with CUDA, one that was never recorded has come
        return number

    def end_event(self, event: int) -> None:
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        if stream < 16:
            return  # a default stream, on which nothing is ever put: all of it is done
        self._events[event].clear()
        self._put(stream, self._events[event].set)

    def wait_event(self, stream: int, event: int) -> None:
        recorded = self._events[event]  # it may be given back before the stream comes to it
        self._put(stream, lambda: recorded.wait() and None)

    def has_come(self, event: int) -> bool:
        return self._events[event].is_set()

    def is_idle(self, stream: int) -> bool:
        return self._streams[stream].drained

    def synchronize(self, event: int) -> None:
        self._events[event].wait()
        for stream in list(self._streams.values()):
            if stream.failed is not None:
                raise DeviceFailed(str(stream.failed))

    def drained(self, stream: int) -> bool:
        return self._streams[stream].drained

    def write_value(self, stream: int, address: int, value: int) -> None:
        def write() -> None:
            word(address).value = value

        self._put(stream, write)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        def wait() -> None:
            while (word(address).value - value) & 0xFFFFFFFF >= 1 << 31:
                time.sleep(0.0001)

        self._put(stream, wait)

    def _put(self, stream: int, work: Callable[[], object]) -> None:
        self._streams[stream].put(work)

    # -- work ---------------------------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._put(stream, lambda: ctypes.memmove(target, source, nbytes) and None)

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        self._put(stream, lambda: ctypes.memset(target, 0, nbytes) and None)

    def launch(self, launch: KernelLaunch, stream: int) -> None:
        self._put(stream, lambda: run_kernel(launch))


def run_kernel(it: KernelLaunch) -> None:
    """Compute as ``kernels.cu`` does, element by element like the host's folds."""
    times = (ctypes.c_uint64 * 2).from_address(it.times)
    times[0] = time.monotonic_ns()
    if any(word(it.stopped + 4 * it.stride * member).value for member in range(it.members)):
        return
    width = it.ins + it.outs
    table = bytes_at(it.table, 8 * (2 * it.jobs + 1 + it.jobs * width)).view(np.uint64).tolist()
    firsts, counts, addresses = (
        table[: it.jobs + 1],
        table[it.jobs + 1 : 2 * it.jobs + 1],
        table[2 * it.jobs + 1 :],
    )
    kind = np.dtype(np.uint8) if it.dtype is None else storage_type(it.dtype)
    op, prescale, postscale = it.reduction
    fold = make_fold(it.dtype or DType.U8, op if it.dtype is not None else ReduceOp.MAX)
    for job in range(it.jobs):
        count = counts[job] & ~_ALIGNED
        assert firsts[job + 1] - firsts[job] == -(-count // it.chunk), "chunks of a job"
        where = addresses[job * width : (job + 1) * width]
        assert bool(counts[job] & _ALIGNED) == all(address % 16 == 0 for address in where), "alignment"
        arrays = [bytes_at(address, count * kind.itemsize).view(kind) for address in where]
        result = arrays[0].copy()
        if it.dtype is not None:
            fold(arrays[: it.ins], result, prescale, postscale)
        for out in arrays[it.ins :]:
            out[:] = result
    times[1] = time.monotonic_ns()


class FakeGpus:
    """See :class:`hvdlab.collectives.planes.gpu.gpu_plane.Gpus`: one GPU.

    Attributes:
        gpus: How many GPUs there seem to be.
    """

    def __init__(self) -> None:
        self.gpus = 1
        self.device = FakeCuda()

    def why_unusable(self) -> str | None:
        return None

    def count(self) -> int:
        return self.gpus

    def open(self, ordinal: int) -> FakeCuda:
        assert ordinal == 0, "there is one GPU"
        return self.device

    def used_ordinal(self) -> int:
        return 0

    def ordinal_of(self, pointer: int) -> int:
        if self.device.allocation_of(pointer) is None:
            raise DeviceFailed("the address belongs to no GPU")
        return 0


def install() -> FakeCuda:
    """Give this process a simulated GPU, which it offers to the coordinator from its next connection on, unless
    configured not to."""
    os.environ.setdefault(gpu_plane.SWITCH, "1")
    found = FakeGpus()
    gpu_plane.gpus = lambda: found  # type: ignore[assignment]
    gpu_plane.why_missing = lambda: None
    return found.device
