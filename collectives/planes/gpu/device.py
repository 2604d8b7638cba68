"""The interface of a GPU for planes, and the memory of other processes that is open on it.

:mod:`driver` implements it by CUDA's driver; tests have a simulated GPU. All groups of a process share the open memory, as a rank may be in
several process sets with the same other rank. The driver refuses to map a piece of memory a second time while an older one at the same
address of the same process is mapped.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol

from hvdlab.collectives.types import DType, Reduction

HANDLE_BYTES = 64
"""Size of a handle by which another process opens an allocation."""


class DeviceFailed(Exception):
    """Error of the driver or its compiler, which refused a call: the GPU is out of memory, or an earlier kernel of this process failed."""


class Allocation(NamedTuple):
    """Piece of memory that was allocated in one piece.

    Attributes:
        base: Address of its first byte.
        nbytes: Size in bytes.
        serial: Number that no other allocation of this process ever has, whereas an address may be given out again.
    """

    base: int
    nbytes: int
    serial: int


class KernelLaunch(NamedTuple):
    """Launch of a kernel, with the table of its jobs in device memory.

    Attributes:
        dtype: Type of the reduced elements; ``None`` copies bytes.
        reduction: Operator, SUM, MIN, MAX or PRODUCT, and the factors for the elements that are read, and for the result.
        jobs, ins, outs: Number of jobs, and of the addresses that each reads and writes.
        chunk: Elements that a block works on at a time; bytes if they are copied.
        chunks: Number of chunks of all jobs.
        table: Address of the table, see ``kernels.cu``.
        stopped: Address of the first member's word, by which a member shows that it gave up.
        members: Number of members, each of which has such a word.
        stride: 32-bit words from one member's word to the next one's.
        times: Address of two 64-bit words for the begin and the end of the kernel, in nanoseconds of the GPU's clock.
    """

    dtype: DType | None
    reduction: Reduction
    jobs: int
    ins: int
    outs: int
    chunk: int
    chunks: int
    table: int
    stopped: int
    members: int
    stride: int
    times: int


class Device(Protocol):
    """GPU, from this process. Addresses, streams and events are numbers. Anything may raise ``DeviceFailed``.

    ``with device:`` makes it the calling thread's current device, which all methods below need. A method with a stream as its argument
    enqueues its work there and returns at once.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def identity(self) -> str:
        """Return the GPU's UUID: equal in all processes that see it."""
        ...

    @property
    def owner(self) -> int:
        """Return a random number of this process, of at most 64 bits."""
        ...

    @property
    def opened(self) -> OpenedPieces:
        """Return the pieces of other processes' memory that this process has open on this GPU."""
        ...

    def reaches(self, identity: str) -> bool:
        """Return whether its kernels can read and write the memory of another GPU."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Allocate uninitialised memory of the GPU; its address."""
        ...

    def free(self, pointer: int) -> None: ...

    def allocation_of(self, pointer: int) -> Allocation | None:
        """Return the allocation that the address belongs to; ``None`` if it was not allocated on a GPU in one piece."""
        ...

    def export(self, base: int) -> bytes | None:
        """Return a handle by which another process opens an allocation; ``None`` if this kind of memory has none."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; its address in this process."""
        ...

    def close(self, pointer: int) -> None:
        """Unmap memory at the address that :meth:`open` returned."""
        ...

    def register(self, address: int, nbytes: int) -> int:
        """Let the GPU read and write memory of the host; its address for the GPU."""
        ...

    def unregister(self, address: int) -> None: ...

    def new_stream(self) -> int:
        """Return a stream that no other one waits for by itself."""
        ...

    def end_stream(self, stream: int) -> None: ...

    def new_event(self) -> int:
        """Return an event without time, whose waiters sleep."""
        ...

    def end_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait_event(self, stream: int, event: int) -> None: ...

    def has_come(self, event: int) -> bool:
        """Return whether the event has come."""
        ...

    def is_idle(self, stream: int) -> bool:
        """Return whether all that was enqueued has been done."""
        ...

    def synchronize(self, event: int) -> None:
        """Sleep until the event has come."""
        ...

    def drained(self, stream: int) -> bool:
        """Return whether nothing is left to do: all that was enqueued has been done, or never will be, since the GPU failed."""
        ...

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Store a 32-bit word once all work enqueued before is done and visible to other processes and GPUs."""
        ...

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Make the stream wait until the 32-bit word is at least ``value``, compared as counters that may overflow: ``(int32)(word - value) >= 0``."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy memory of the GPU, or memory of the host that is registered."""
        ...

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        """Set bytes to zero."""
        ...

    def launch(self, launch: KernelLaunch, stream: int) -> None: ...


@dataclass(slots=True)
class OpenedMemory:
    """Piece of another process's memory that is open.

    Attributes:
        owner: Random number of the process that allocated it.
        base: Its address in that process.
        serial: Its number among all pieces that the process ever allocated.
        pointer: Its address in this process; 0 once it is unmapped.
        users: How many groups have it open.
    """

    owner: int
    base: int
    serial: int
    pointer: int
    users: int = 1


class OpenedPieces:
    """Pieces that are open on one GPU. Any thread, with the GPU as the thread's current device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._guard = threading.Lock()
        #: By owner and base address.
        self._open: dict[tuple[int, int], OpenedMemory] = {}

    def open(self, owner: int, base: int, serial: int, handle: bytes) -> OpenedMemory:
        """Map a piece, or use it as it is mapped already. Raises ``DeviceFailed`` if the driver refuses."""
        with self._guard:
            found = self._open.get((owner, base))
            if found is not None and found.serial == serial:
                found.users += 1
                return found
            if found is not None:
                # Its owner has freed it, so every operation that used it has ended, even if a group still has it in its table.
                self._unmap(found)
            opened = OpenedMemory(owner, base, serial, self._device.open(handle))
            self._open[owner, base] = opened
            return opened

    def release(self, piece: OpenedMemory) -> None:
        """Release a piece that a group needs no more."""
        with self._guard:
            piece.users -= 1
            # Without an address it is unmapped already: open() has met other memory of its owner at the same place.
            if not piece.users and piece.pointer:
                self._unmap(piece)

    def _unmap(self, piece: OpenedMemory) -> None:
        del self._open[piece.owner, piece.base]
        # Marked before the driver is asked: if it refuses, the piece is not unmapped a second time when its last user releases it.
        pointer, piece.pointer = piece.pointer, 0
        self._device.close(pointer)
