"""Memory of one process that others of its host read in place, without a copy through a socket."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
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


class SharedBufferReader:
    """Other processes' windows, as this one looks into them."""

    def __init__(self) -> None:
        self._open: dict[str, mmap.mmap] = {}

    def read(self, shared: SharedRange, target: memoryview) -> None:
        """Copy what is shared to ``target``. Raises ``OSError`` if there is no such window."""
        with memoryview(self._look(shared)) as view:
            target[:] = view[: shared.length]

    @contextlib.contextmanager
    def look(self, shared: SharedRange) -> Iterator[memoryview]:
        """The shared memory itself, uncopied. Raises ``OSError`` if there is no such window."""
        with memoryview(self._look(shared)) as view, view[: shared.length] as part:
            yield part

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
