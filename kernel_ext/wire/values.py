"""Values between the pool and its ranks: the messages, and memory that is read in place.

A process reads memory of another one of its host (:class:`SharedBuffer`) without a copy through a socket. The pickles are those of
:mod:`~hvdlab.kernel_ext.wire.pickling`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Self

import msgspec

from hvdlab.kernel_ext.wire.channel import Payload, RankReply, RankRequest
from hvdlab.kernel_ext.wire.compare import SharedRange


class SharedBuffer:
    """Memory that other processes of this host can look into, by ``/proc/<pid>/fd``; freed with this object."""

    def __init__(self, size: int) -> None:
        self.size = size
        label = f"hvdlab-{secrets.token_hex(8)}"
        self._name = f"/memfd:{label} (deleted)"
        self._descriptor = os.memfd_create(label)
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, size)
        self._memory = mmap.mmap(self._descriptor, size)

    def write(self, data: memoryview) -> SharedRange:
        """Put data at its beginning; returns where to find it."""
        self._memory[: len(data)] = data
        return SharedRange(os.getpid(), self._descriptor, self._name, len(data))

    def fill(self, write: Callable[[memoryview], int]) -> SharedRange:
        """Have ``write`` put data at its beginning and return how many bytes; returns where to find them."""
        with memoryview(self._memory) as target:
            length = write(target)
        return SharedRange(os.getpid(), self._descriptor, self._name, length)


def copy_to(target: memoryview, data: memoryview) -> int:
    """Copy data to the beginning of ``target``. Returns how many bytes."""
    target[: len(data)] = data
    return len(data)


class ChunkBuffer:
    """Buffer for chunks that go to another process: in shared memory if that process can map it, or within the message.

    Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: SharedBuffer | None = None

    def put(
        self,
        size: int,
        write: Callable[[memoryview], int],
        *,
        share: bool,
        plain: memoryview | None = None,
    ) -> tuple[bytes | None, SharedRange | None]:
        """Make a chunk. It is valid until the next one.

        Args:
            size: Bytes of the chunk at most.
            write: Writes the chunk to the beginning of memory, and returns how many bytes.
            share: Whether the other process can map memory of this one.
            plain: The chunk, if it is in one piece already: it then goes into the message without another copy.

        Returns:
            The chunk's bytes or the memory that has them; the other one is None.
        """
        if share:
            with (
                self._lock,
                contextlib.suppress(OSError),
            ):  # no descriptor or no memory is left: it goes as a message
                if self._shared is None or self._shared.size < size:
                    # First: the smaller buffer is freed before the larger one is made.
                    self._shared = None
                    self._shared = SharedBuffer(size)
                return None, self._shared.fill(write)
        if plain is not None:
            return bytes(plain), None
        data = bytearray(size)
        write(memoryview(data))
        return bytes(data), None

    def free(self) -> None:
        """Free the shared memory."""
        with self._lock:
            self._shared = None


class SharedBufferReader:
    """Reader of other processes' shared buffers, and of chunks."""

    def __init__(self) -> None:
        self._open: dict[str, mmap.mmap] = {}

    def read(self, shared: SharedRange, target: memoryview) -> None:
        """Copy the shared bytes to ``target``. Raises ``OSError`` if there is no such window."""
        with memoryview(self._look(shared)) as view:
            target[:] = view[: shared.length]

    @contextlib.contextmanager
    def look(self, shared: SharedRange) -> Iterator[memoryview]:
        """Return the shared memory itself, uncopied. Raises ``OSError`` if there is no such window."""
        with memoryview(self._look(shared)) as view, view[: shared.length] as part:
            yield part

    @contextlib.contextmanager
    def chunk(self, data: bytes | None, shared: SharedRange | None) -> Iterator[memoryview]:
        """Give the bytes of a chunk, which are in the message or in shared memory, uncopied.

        Raises:
            OSError: The memory can't be mapped.
        """
        if shared is None:
            yield memoryview(data or b"")
        else:
            with self.look(shared) as view:
                yield view

    def _look(self, shared: SharedRange) -> mmap.mmap:
        memory = self._open.get(shared.name)
        if memory is None:
            path = f"/proc/{shared.pid}/fd/{shared.memory}"
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # By its random name: after the end of a process, another one may have the numbers of both.
                if os.readlink(f"/proc/self/fd/{descriptor}") != shared.name:
                    raise OSError(f"{path} is not {shared.name}")
                memory = self._open[shared.name] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
        return memory

    def close(self) -> None:
        """Look no longer."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


NOT_SHARED = "the memory of the pool's process can't be looked into"


class PushValue(RankRequest, frozen=True):
    """Bind ``names[i]`` to the value pickled in ``pickles[i]``.

    With a ``transfer_id`` the pool has brought one pickle of all values and its buffers before, as :class:`WriteChunk`.
    """

    names: tuple[str, ...]
    pickles: tuple[bytes, ...]
    transfer_id: int = 0


class WriteChunk(RankRequest, frozen=True):
    """A piece of the value that a :class:`PushValue` or a :class:`LoadSnapshot` with this ``transfer_id`` will take: ``data`` of one part at an offset.

    ``sizes`` are the bytes of all parts. The rank answers with a :class:`Acked`; from then on ``shared`` memory may change.
    """

    transfer_id: int
    sizes: tuple[int, ...]
    part: int
    offset: int
    data: bytes
    shared: SharedRange | None = None


class PullValue(RankRequest, frozen=True):
    """Evaluate each expression and send the values back."""

    names: tuple[str, ...]


class ReadChunk(RankRequest, frozen=True):
    """Ask for a :class:`TransferChunk` of the parts that the :class:`Value` with ticket ``transfer_id`` did not carry.

    ``share`` says that the pool is on the rank's host and can look into its memory.
    """

    transfer_id: int
    part: int
    offset: int
    length: int
    share: bool = False


class ReleaseTransfer(Payload, frozen=True):
    """The pool no longer needs anything of this transfer."""

    transfer_id: int


class TakeSnapshot(RankRequest, frozen=True):
    """Ask for all variables and modules of a rank, also while it runs a cell: :class:`Snapshot`."""


class Snapshot(RankReply, frozen=True):
    """Answer to TakeSnapshot: ``sizes`` are the bytes of its parts, which the pool fetches (:class:`ReadChunk`) and then releases.

    ``names`` and ``modules`` are in it; ``failed`` has name to reason for the variables that are not. With an ``error`` there is nothing.
    """

    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""


class LoadSnapshot(RankRequest, frozen=True):
    """Bind the variables of another rank, which the pool has brought as :class:`WriteChunk` of this transfer: :class:`SnapshotLoaded`.

    The rank binds it when it enters a cell that it joins.
    """

    transfer_id: int


class SnapshotLoaded(RankReply, frozen=True):
    """Answer to LoadSnapshot: modules that could not be imported, with the reasons; ``error`` says why nothing was taken, if so.

    ``missing``: parts of the transfer did not arrive, as where the coordinator died that was to pass them on.
    """

    failed: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""
    missing: bool = False


class Acked(RankReply, frozen=True):
    """Answer to PushValue and WriteChunk, and to a question about an examination that can't be answered.

    ``error`` is empty if all is well.
    """

    error: str = ""


class Value(RankReply, frozen=True):
    """Answer to PullValue: pickles by name, or an error line for the names that could not be sent.

    A value that is too large for a message has neither, but ``sizes``: the bytes of a pickle and of its buffers, which the
    pool fetches (:class:`ReadChunk`) and then releases (:class:`ReleaseTransfer`). Only in the answer about a single name.
    """

    pickles: tuple[bytes | None, ...]
    errors: tuple[str, ...]
    sizes: tuple[int, ...] = ()


class TransferChunk(RankReply, frozen=True):
    """Answer to ReadChunk; with neither if the rank no longer keeps the value. ``shared`` memory is valid until the next one."""

    data: bytes | None
    shared: SharedRange | None = None


def rough_size(size: int) -> str:
    """``2.0 GiB``."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size} bytes"
