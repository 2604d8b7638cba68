"""The interface of a GPU for the plane. :mod:`driver` implements it by CUDA's driver; tests have a simulated GPU."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hvdlab.collectives.dtypes import DType, ReduceOp

if TYPE_CHECKING:
    from hvdlab.collectives.planes.cuda.opened import OpenedPieces

HANDLE_BYTES = 64
"""Size of a handle by which another process opens an allocation."""


class DeviceFailed(Exception):
    """The driver, or its compiler, refused a call: the GPU is out of memory, or an earlier kernel of this process failed."""


class Allocation(NamedTuple):
    """Memory that was allocated in one piece.

    Attributes:
        base: Address of its first byte.
        nbytes: Size in bytes.
        serial: Number that no other allocation of this process ever has, whereas an address may be given out again.
    """

    base: int
    nbytes: int
    serial: int


class Launch(NamedTuple):
    """A kernel, with the table of its jobs in device memory.

    Attributes:
        dtype: What is reduced; ``None`` copies bytes.
        op: SUM, MIN, MAX or PRODUCT.
        jobs, ins, outs: Number of jobs, and of the addresses that each reads and writes.
        chunk: Elements that a block works on at a time; bytes if they are copied.
        chunks: Number of chunks of all jobs.
        prescale, postscale: Factors for what is read and for the result.
        table: Address of the table, see ``kernels.cu``.
        stopped: Address of the first member's word that says that the member gave up.
        members: Number of members, each of which has such a word.
        stride: 32-bit words from one member's word to the next one's.
        times: Address of two 64-bit words for the begin and the end of the kernel, in nanoseconds of the GPU's clock.
    """

    dtype: DType | None
    op: ReduceOp
    jobs: int
    ins: int
    outs: int
    chunk: int
    chunks: int
    prescale: float
    postscale: float
    table: int
    stopped: int
    members: int
    stride: int
    times: int


class Device(Protocol):
    """A GPU, from this process. Addresses, streams and events are numbers. Anything may raise ``DeviceFailed``.

    ``with device:`` makes it the calling thread's current device, which all methods below need. A method that takes a stream
    enqueues its work there and returns at once.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def identity(self) -> str:
        """The GPU's UUID: equal in all processes that see it."""
        ...

    @property
    def owner(self) -> int:
        """A random number of this process, of at most 64 bits."""
        ...

    @property
    def opened(self) -> OpenedPieces:
        """The pieces of other processes' memory that this process has open on this GPU."""
        ...

    def reaches(self, identity: str) -> bool:
        """Whether its kernels can read and write the memory of another GPU."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Allocate uninitialised memory of the GPU; its address."""
        ...

    def free(self, pointer: int) -> None: ...

    def allocation_of(self, pointer: int) -> Allocation | None:
        """The allocation that the address belongs to; ``None`` if it was not allocated on a GPU in one piece."""
        ...

    def export(self, base: int) -> bytes | None:
        """A handle by which another process opens an allocation; ``None`` if this kind of memory has none."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; its address in this process."""
        ...

    def close(self, pointer: int) -> None:
        """Unmap what :meth:`open` returned."""
        ...

    def register(self, address: int, nbytes: int) -> int:
        """Let the GPU read and write memory of the host; its address for the GPU."""
        ...

    def unregister(self, address: int) -> None: ...

    def new_stream(self) -> int:
        """A stream that no other one waits for by itself."""
        ...

    def end_stream(self, stream: int) -> None: ...

    def new_event(self) -> int:
        """An event without time, whose waiters sleep."""
        ...

    def end_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait_event(self, stream: int, event: int) -> None: ...

    def has_come(self, event: int) -> bool:
        """Whether the event has come."""
        ...

    def is_idle(self, stream: int) -> bool:
        """Whether all that was enqueued has been done."""
        ...

    def synchronize(self, event: int) -> None:
        """Sleep until the event has come."""
        ...

    def drained(self, stream: int) -> bool:
        """Whether nothing is left to do: all that was enqueued has been done, or never will be, since the GPU failed."""
        ...

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Store a 32-bit word once all work enqueued before is done and visible to other processes and GPUs."""
        ...

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Go on once the 32-bit word is at least ``value``, compared as counters that may overflow: ``(int32)(word - value) >= 0``."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy memory of the GPU, or memory of the host that is registered."""
        ...

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        """Set bytes to zero."""
        ...

    def launch(self, launch: Launch, stream: int) -> None: ...
