"""The interface of a GPU for the plane. :mod:`driver` implements it by CUDA's driver; tests have a simulated GPU."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, Protocol

from hvdlab.collectives.dtypes import DType, ReduceOp

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
        chunks: How many there are.
        prescale, postscale: Factors for what is read and for the result.
        table: Address of the table, see ``kernels.cu``.
        stopped, members, stride: Address of a word for each member that says that it gave up, and words from one to the next.
        times: Address of two words for the begin and the end, in the GPU's nanoseconds.
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

    def reaches(self, identity: str) -> bool:
        """Whether its kernels can read and write the memory of another GPU."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Memory, uninitialised."""
        ...

    def free(self, pointer: int) -> None: ...

    def allocation_of(self, pointer: int) -> Allocation | None:
        """The allocation that the address belongs to; ``None`` if it was not allocated on a GPU in one piece."""
        ...

    def export(self, base: int) -> bytes | None:
        """A handle by which another process opens an allocation; ``None`` if this kind of memory has none."""
        ...

    def open(self, handle: bytes) -> int:
        """The address, here, of another process's allocation."""
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

    def synchronize(self, event: int) -> None:
        """Sleep until the event has come."""
        ...

    def drained(self, stream: int) -> bool:
        """Whether nothing is left to do: all that was enqueued has been done, or never will be, since the GPU failed."""
        ...

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Store a 32-bit word once all before it has been done and is visible to other processes and GPUs."""
        ...

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Go on once the word is at least ``value``, in the sense of a counter that may run over."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy memory; either may be the host's that is registered."""
        ...

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        """Set bytes to zero."""
        ...

    def launch(self, launch: Launch, stream: int) -> None: ...
