"""The interface of a data plane: its operations, the arrays and buffers that it gets, its rendezvous store, its words for users.

A plane moves bytes between the members of one process set during one generation, for tensors of one *device class*: a process set
whose tensors are on the host and on devices has a plane for each. The rank's executor builds, drives and closes it, on one thread
at a time: the one that holds its lane (called the executor thread below; it may be a user's thread that waits). Only
:meth:`Plane.abort` may be called from another thread. After an abort the plane is spent: it is closed and a new one is built
for the next generation.

``index`` is a member's position in the process set, not its rank.

Example:
    >>> from hvdlab.collectives.planes.base import Plane
    >>> from hvdlab.collectives.planes.host import LocalPlane
    >>> issubclass(LocalPlane, Plane), LocalPlane.unavailable()
    (True, None)
"""

from __future__ import annotations

import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.system import create_memory
from hvdlab.collectives.text import compact_ranks
from hvdlab.collectives.types import DType, Reduction


class PlaneAborted(Exception):
    """Raised on the executor thread by a plane operation that :meth:`Plane.abort` ended."""


class PlaneBroken(Exception):
    """Raised on the executor thread when the plane itself failed (a lost connection, no memory)."""


class KeyValue(ABC):
    """Rendezvous store of one process set and generation, kept by the coordinator. Blocking, any thread."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Store the value of a key; the last one counts."""

    @abstractmethod
    def get(self, key: str, timeout: float) -> bytes:
        """Return the value of a key, and wait until it exists. Raises ``TimeoutError`` after ``timeout`` seconds, ``PlaneAborted`` on abort."""

    def abort(self) -> None:
        """End the waits of this and all later calls. Never blocks; does nothing in a store whose waits end by their limits alone."""
        return


def _nothing_to_do(known: object, /) -> None: ...


class ScopedStore(KeyValue):
    """Part of the rendezvous store: keys of ``store`` that begin with ``prefix``."""

    def __init__(self, store: KeyValue, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, timeout: float) -> bytes:
        return self._store.get(self._prefix + key, timeout)

    def abort(self) -> None:
        self._store.abort()


@dataclass(frozen=True, slots=True)
class PlaneContext:
    """Facts about the process set and generation that a plane is built for.

    Attributes:
        process_set: Id of the process set.
        generation: Generation of the process set; a plane lives for one generation.
        index: This member's position.
        size: Number of members.
        ranks: Rank of each member, by position.
        hosts: Host key of each member, by position; equal keys share memory.
        store: Rendezvous store, scoped to this process set and generation.
        memory_fd: An open memfd shared by all members, or -1. The plane takes it over and closes it.
        address: Address that this rank's data-plane sockets bind to; never a wildcard.
        options: Settings of the plane, such as ``chunk_bytes``; equal on all members.
        on_links: A plane of GPUs calls it, on the executor thread, once it knows the links that its data goes over.
        on_chosen: A plane that chooses among others calls it with the name to show, on the executor thread, once it has; an empty name stands for none.
        on_chunks: A plane that measures which size of chunks suits the machine calls it with the bytes, on the executor thread, once it has.
    """

    process_set: int
    generation: int
    index: int
    size: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    store: KeyValue | None = None
    memory_fd: int = -1
    address: str = "127.0.0.1"
    options: dict[str, str] = field(default_factory=dict)
    on_links: Callable[[Links], None] = _nothing_to_do
    on_chosen: Callable[[str], None] = _nothing_to_do
    on_chunks: Callable[[int], None] = _nothing_to_do


@dataclass(slots=True)
class PhaseTimes:
    """Nanoseconds (``time.monotonic_ns``) that one plane operation spent, measured by the plane.

    Pipelined planes add up the pieces of each phase.

    Attributes:
        pack: Time for copying inputs to where they are sent from.
        transfer: Time for moving and reducing bytes.
        unpack: Time for copying results to the outputs.
        wait: Time spent blocked on other members.
    """

    pack: int = 0
    transfer: int = 0
    unpack: int = 0
    wait: int = 0


Ended = Callable[[Exception | None], None]


class Completion(Protocol):
    """Operation on its way, which goes on without the thread that began it. The operations of one plane end in the order in which they were begun."""

    def on_end(self, ended: Ended, /) -> None:
        """Register ``ended(error)`` to be called once the operation has ended, at once if it has already. May be called once only.

        The plane calls it exactly once, on any thread, under no lock that an operation of the plane takes: with ``None`` if the outputs
        are there, with :class:`PlaneAborted` after an abort, or with any other error that ended the operation.
        """


class PendingCompletion:
    """Completion that a thread of the plane ends. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_ended = False
        self._error: Exception | None = None
        self._ended: Ended | None = None

    def on_end(self, ended: Ended, /) -> None:
        """Have ``ended`` called as :class:`Completion` says."""
        with self._lock:
            self._ended = ended
            if not self._has_ended:
                return
        # Without the lock, as :class:`Completion` promises. The outcome does not change any more: end() stores it once.
        ended(self._error)

    def end(self, error: Exception | None = None) -> None:
        """End the operation, with an ``error`` if it failed; the first call counts."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended, self._error = True, error
            ended = self._ended
        if ended is not None:
            ended(error)


class Plane(ABC):
    """Data plane. Every operation is collective: all members begin it in the same order.

    An operation returns ``None`` if its handles are done: the outputs are there, or the device orders all that reads them behind
    them (they are in the stream that the user's work goes to). Otherwise it returns a
    :class:`Completion` and goes on by itself; the executor begins the next operation meanwhile. The caller leaves the buffers as
    they are until the operation has ended.

    All operations raise :class:`PlaneAborted`, or end with it, once :meth:`abort` was called (outputs are then undefined) and
    :class:`PlaneBroken` if the plane itself failed. No memory is written to any more once an operation has ended.

    Args:
        context: The process set and generation that it is built for.
    """

    name: ClassVar[str]
    device: ClassVar[str]
    """The device class of the buffers that the plane takes."""

    def __init__(self, context: PlaneContext) -> None:
        self.context = context

    @classmethod
    @abstractmethod
    def unavailable(cls) -> str | None:
        """Return why this plane can't be used in this process, in one sentence with the remedy; ``None`` if it can."""

    @abstractmethod
    def connect(self, timeout: float) -> None:
        """Join the other members. Collective; raises ``PlaneBroken`` after ``timeout`` seconds."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Return an uninitialised tensor of this shape and dtype on the plane's device."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Return a tensor of zeros of this shape and dtype on the plane's device."""

    @abstractmethod
    def start_allreduce(
        self,
        ins: Sequence[Buffer],
        outs: Sequence[Buffer],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> Completion | None:
        """Reduce element by element over all members.

        The buffers of a call are fused: ``ins[i]`` and ``outs[i]`` have equal length and may be the same memory
        (in place); no other overlap. Integers are scaled in float64 and truncated. f16 and bf16 accumulate in
        float32 and are rounded once. Every member gets the same bits.

        Args:
            dtype: Type of the elements.
            reduction: Operator, SUM, MIN, MAX or PRODUCT (for an average see :meth:`Reduction.summed`), and factors.
            phases: Gets the time of each phase.

        Returns:
            ``None`` if its handles are done, otherwise the :class:`Completion`.
        """

    @abstractmethod
    def start_allgather(
        self, send: Buffer, counts: Sequence[int], out: Buffer, phases: PhaseTimes
    ) -> Completion | None:
        """Concatenate the members' ``send`` (``counts[i]`` elements each) in member order into ``out``.

        Args:
            phases: Gets the time of each phase.

        Returns:
            ``None`` if its handles are done, otherwise the :class:`Completion`.
        """

    @abstractmethod
    def start_broadcast(
        self, source: Buffer | None, out: Buffer, root: int, phases: PhaseTimes
    ) -> Completion | None:
        """Copy the buffer of member ``root`` (a position) to ``out`` of all members: its ``source`` if it gives one, otherwise its ``out``.

        Args:
            phases: Gets the time of each phase.

        Returns:
            ``None`` if its handles are done, otherwise the :class:`Completion`.
        """

    @abstractmethod
    def start_reducescatter(
        self,
        send: Buffer,
        counts: Sequence[int],
        out: Buffer,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> Completion | None:
        """Reduce ``send`` (``sum(counts)`` elements) and leave slice ``i`` (``counts[i]`` elements) in ``out`` of member ``i``.

        Args:
            dtype, reduction: As for :meth:`start_allreduce`.
            phases: Gets the time of each phase.

        Returns:
            ``None`` if its handles are done, otherwise the :class:`Completion`.
        """

    @abstractmethod
    def start_alltoall(
        self,
        send: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Buffer,
        phases: PhaseTimes,
    ) -> Completion | None:
        """Send the ``j``-th piece of ``send`` to member ``j``; ``out`` gets the pieces in member order.

        Args:
            send_counts: Elements of each piece of ``send``, by member.
            recv_counts: Elements that come from each member.
            phases: Gets the time of each phase.

        Returns:
            ``None`` if its handles are done, otherwise the :class:`Completion`.
        """

    @abstractmethod
    def start_barrier(self, phases: PhaseTimes) -> Completion | None:
        """Start a barrier: it ends once all members have begun it.

        Args:
            phases: Gets the time of each phase.

        Returns:
            ``None`` if its handles are done, otherwise the :class:`Completion`.
        """

    def tune(self, slice_bytes: int) -> None:  # noqa: B027  (ignoring it is right for most planes)
        """Move ``slice_bytes`` bytes at a time from the next operation on; 0 is the plane's own choice.

        Called on the executor thread, after :meth:`connect`, by all members at the same place in the order. A plane
        that cuts nothing into slices ignores it; a plane may keep within limits of its own.
        """

    @abstractmethod
    def abort(self) -> None:
        """End operations that are on their way, and all later ones, with ``PlaneAborted``. Any thread; never blocks; idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Free everything this member holds. Executor thread; idempotent; never waits for other members.

        When this is called, every operation has ended or has been aborted.
        """


# -- a plane in words --------------------------------------------------------------------------------------------------


Links = Mapping[str, tuple[int, ...]]
"""The ranks that are reached by each kind of link, one of the words below. Empty as long as no rank was reached."""

SAME_GPU = "same GPU"
NVLINK = "NVLink"
PCIE = "PCIe"
PEER = "peer access, link unknown"
"""The GPUs read each other's memory; the link between them can't be found out."""
UNKNOWN = "link unknown"
THROUGH_HOST = "CUDA tensors through the host"
"""There is no plane for CUDA tensors: they are copied to the host and back."""


def links_text(links: Links) -> str:
    """Return ``NVLink`` if all ranks are reached by it; otherwise the ranks by their links: ``same GPU: 1; NVLink: 2-3``.

    Args:
        links: The ranks by kind of link; at least one kind.
    """
    if len(links) == 1:
        return next(iter(links))
    return "; ".join(f"{link}: {compact_ranks(ranks)}" for link, ranks in links.items())


def plane_text(plane: str, chunk_bytes: int) -> str:
    """Return a plane of the host, with the size of its chunks where that was measured: ``shm in chunks of 512 KiB``.

    Args:
        plane: Its name.
        chunk_bytes: Size of its chunks in bytes; 0 if it was not measured.
    """
    return f"{plane} in chunks of {chunk_bytes // 1024} KiB" if chunk_bytes else plane


def planes_text(planes: Iterable[str], links: Links) -> str:
    """Return the planes of a process set, with the links of the last one: ``shm, cuda/ipc (NVLink)``.

    Args:
        planes: Their names, those for devices last; empty ones are left out.
        links: The links of CUDA tensors, by kind; empty if no rank was reached.
    """
    text = ", ".join(filter(None, planes))
    return f"{text} ({links_text(links)})" if links else text


# -- memory that the members of a host share ---------------------------------------------------------------------------

# The coordinator hands out descriptors over Unix sockets, which end at its host. On other hosts the first member makes an anonymous
# file (memfd), and publishes its descriptor in the rendezvous store. The other members open it by way of ``/proc/PID/fd``, which the
# kernel allows to processes of the same user. So the segment never has a name, and nothing is left behind, whichever process dies
# and when.

_KEY = "memory"


def publish_memfd(store: KeyValue, name: str, size: int) -> int:
    """Make a segment and offer it to the members of this host.

    Args:
        store: Rendezvous store of these members alone.
        name: Beginning of the segment's name, which only the kernel shows.
        size: Its size in bytes.

    Returns:
        Its descriptor, which the caller closes once the other members have opened it.

    Raises:
        PlaneBroken: The system gives no memory or no descriptor.
    """
    # Random, since open_memfd() recognises the segment by it: numbers of processes and descriptors are used again.
    unique = f"{name}-{secrets.token_hex(8)}"
    try:
        descriptor = create_memory(unique, size)
    except OSError as error:
        raise PlaneBroken(f"shared memory: no segment of {size} bytes could be made: {error}") from error
    store.set(_KEY, f"{os.getpid()} {descriptor} {unique}".encode())
    return descriptor


def open_memfd(store: KeyValue, timeout: float) -> int:
    """Open the segment that the first member of this host offers.

    Args:
        store: Rendezvous store of these members alone.
        timeout: Seconds to wait for the offer.

    Returns:
        Its descriptor, which the caller closes.

    Raises:
        PlaneBroken: It can't be opened from here; the text names likely causes.
        TimeoutError: Nothing was offered in time.
    """
    pid, number, unique = store.get(_KEY, timeout).decode().split()
    path = f"/proc/{pid}/fd/{number}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PlaneBroken(
            f"shared memory: process {pid} has the segment of this host, but {path} can't be opened ({error}); ranks that "
            "count as one host must run as one user and see each other's processes, else set HVDLAB_HOST differently, or HVDLAB_PLANE=gloo"
        ) from error
    # The kernel shows the name that a memfd was made with; only this one has the random name.
    if unique not in os.readlink(f"/proc/self/fd/{descriptor}"):
        os.close(descriptor)
        raise PlaneBroken(
            f"shared memory: {path} is not the segment that was offered; are ranks of different machines given the same "
            "HVDLAB_HOST?"
        )
    return descriptor


# -- arrays and buffers ------------------------------------------------------------------------------------------------

# Memory that planes work on, wherever it is, and the numpy types that hold the core's element types. A tensor of the host is a numpy
# array in *storage* type (``uint16`` for bfloat16, ``bool`` for bool), so that neither the engine nor a plane needs a framework. A
# tensor on a device is only known by its address.

_STORAGE: dict[DType, np.dtype[Any]] = {
    DType.BOOL: np.dtype(np.bool_),
    DType.U8: np.dtype(np.uint8),
    DType.I8: np.dtype(np.int8),
    DType.I16: np.dtype(np.int16),
    DType.I32: np.dtype(np.int32),
    DType.I64: np.dtype(np.int64),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(np.uint16),
    DType.F32: np.dtype(np.float32),
    DType.F64: np.dtype(np.float64),
}
# Without BF16: a uint16 array of a user's holds integers, and the core has no such element type.
_FROM_NUMPY = {storage: dtype for dtype, storage in _STORAGE.items() if dtype is not DType.BF16}


def storage_type(dtype: DType) -> np.dtype[Any]:
    """Return the numpy type that holds elements of a type; ``uint16`` holds bfloat16's bits.

    Args:
        dtype: The core's element type.
    """
    return _STORAGE[dtype]


def dtype_of(array: npt.NDArray[Any]) -> DType | None:
    """Return the core's element type of a numpy array, or ``None`` if the core has none for it.

    Args:
        array: Of any shape and dtype. One of ``uint16`` has none: its elements are integers, not bfloat16.
    """
    return _FROM_NUMPY.get(array.dtype)


HOST = "cpu"
"""The device class of the host's memory."""

HostArray: TypeAlias = npt.NDArray[Any]
"""C-contiguous, in storage type."""

HostArrays: TypeAlias = Sequence[HostArray] | HostArray
"""Equally long flat arrays in storage type. A two-dimensional array, of any strides, stands for its rows."""


class Buffer(Protocol):
    """C-contiguous memory on one device. A plane treats it as one-dimensional; its shape does not matter."""

    @property
    def pointer(self) -> int:
        """Return the address of the first element, in the address space of the device."""
        ...

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the extent of each dimension, in elements."""
        ...

    @property
    def dtype(self) -> DType:
        """Return the type of the elements."""
        ...

    @property
    def device(self) -> str:
        """Return the device class, such as ``cpu`` or ``cuda``; the same as that of the plane that works on it."""
        ...


class HostBuffer:
    """Buffer that is a numpy array.

    Args:
        array: In storage type, C-contiguous.
        dtype: Element type.
    """

    __slots__ = ("array", "dtype")

    def __init__(self, array: HostArray, dtype: DType) -> None:
        self.array = array
        self.dtype = dtype

    @property
    def pointer(self) -> int:
        """Return the address of the first element."""
        address: int = self.array.__array_interface__["data"][0]
        return address

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self.array.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the extent of each dimension, in elements."""
        return self.array.shape

    @property
    def device(self) -> str:
        """Return the device class of the host."""
        return HOST


Tensor: TypeAlias = HostArray | Buffer
"""The tensors in requests and results: an array of the host, or a buffer of any device."""


def buffer_of(tensor: Tensor, dtype: DType) -> Buffer:
    """Return a tensor as planes work on it: a buffer on a device as it is, and an array in one dimension, without a copy.

    Args:
        tensor: C-contiguous.
        dtype: Its element type.
    """
    # Arrays are C-contiguous, so this is a view: the plane writes into the user's own output.
    return HostBuffer(tensor.reshape(-1), dtype) if isinstance(tensor, np.ndarray) else tensor


def host_view(tensor: Tensor | Buffer) -> HostArray:
    """Return the array of a tensor of the host, without a copy.

    Args:
        tensor: An array, or the buffer of one.

    Raises:
        TypeError: It is on another device.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, HostBuffer):
        return tensor.array
    raise TypeError(f"a buffer on {tensor.device} can't be read by the host")
