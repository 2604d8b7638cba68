"""Memory of one process that others of its host read in place, without a copy through a socket."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Self

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
