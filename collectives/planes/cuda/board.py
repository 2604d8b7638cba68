"""The shared memory of a group: in it members announce where their tensors are, and how far their GPUs have come.

It has twice the words by which threads of the host wait for each other (:mod:`hvdlab.collectives.planes.shm.signals`): for the other
members to come to an operation, and for its end. Then it has for each member

* words with a cache line each: ``ready`` (its tensors may be used, up to this operation), which its GPU or its host writes and the
  workers' GPUs wait for; and words of the hosts alone: ``stopped`` (it has given up), ``quiet`` (its GPU writes nothing more);
* a table of the pieces of memory that its tensors are in, with the handles by which other members open them;
* places for the operations on their way: for each tensor the slot of its piece and the offset in it, and some numbers;
* the times of its kernels, by the GPU's clock.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.planes.cuda.device import HANDLE_BYTES
from hvdlab.collectives.planes.shm.layout import PAGE, WORD, Words

Array64 = npt.NDArray[np.uint64]

RING = 8
"""Operations that may be on their way; a member that would be further ahead waits for the end of an earlier one."""
TENSORS = 512
"""Tensors of an operation; a collective with more becomes several operations."""
ALLOCATIONS = 1024
"""Slots of a member's table: pieces of memory that others may have open at a time."""

_LINE = 128  # bytes; what a GPU writes of a neighbour's line must not slow this one down
READY, STOPPED, QUIET = range(3)
_FLAGS = 3


class BoardLayout(Words):
    """Offsets in bytes. ``members`` as in :class:`Words`."""

    @property
    def ends(self) -> int:
        """The words by which members wait for the end of an operation; those at 0 are for its begin."""
        return self.control_bytes

    @property
    def flags(self) -> int:
        return 2 * self.control_bytes

    def flag(self, which: int, member: int) -> int:
        """Offset of a word of 32 bits."""
        return self.flags + (which * self.members + member) * _LINE

    @property
    def stride(self) -> int:
        """32-bit words from a member's flag to the next one's."""
        return _LINE // 4

    @property
    def generations(self) -> int:
        """A word for each member that counts the changes of its table of allocations."""
        return _up(self.flags + _FLAGS * self.members * _LINE)

    @property
    def owners(self) -> int:
        """A random word for each member's process."""
        return self.generations + self.members * WORD

    @property
    def handles(self) -> int:
        return _up(self.owners + self.members * WORD)

    @property
    def versions(self) -> int:
        """A word for each slot of a table: 0 if it is empty, else one more than the serial number of the piece in it."""
        return self.handles + self.members * ALLOCATIONS * HANDLE_BYTES

    @property
    def bases(self) -> int:
        """A word for each slot of a table: the address of the piece in its owner's process."""
        return self.versions + self.members * ALLOCATIONS * WORD

    @property
    def places(self) -> int:
        return self.bases + self.members * ALLOCATIONS * WORD

    @property
    def numbers(self) -> int:
        return self.places + RING * self.members * TENSORS * 4 * WORD

    @property
    def times(self) -> int:
        return _up(self.numbers + RING * self.members * self.members * WORD)

    @property
    def size(self) -> int:
        return _up(self.times + RING * self.members * 2 * WORD)


def _up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE


class Board:
    """A member's view of the shared memory.

    Attributes:
        layout: Offsets of everything in the memory.
        address: Address of the memory in this process.
        generations: Changes of each member's table of allocations, by member.
        owners: Random words of the members' processes, by member.
        handles: Bytes of the handles, by member and allocation.
        versions, bases: Words of the allocations (see :class:`BoardLayout`), by member and allocation.
        places: By place of the ring, member and tensor: allocation and offset of the input, and of the output.
        numbers: By place, member, and member.
        times: By place and member: begin and end of a kernel.
    """

    def __init__(self, memory: mmap.mmap, members: int) -> None:
        self.layout = layout = BoardLayout(members)
        self._anchor = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._anchor)

        def view(offset: int, *shape: int) -> Array64:
            count = int(np.prod(shape))
            return np.frombuffer(memory, np.uint64, count, offset).reshape(shape)

        self.generations = view(layout.generations, members)
        self.owners = view(layout.owners, members)
        self.handles = np.frombuffer(
            memory, np.uint8, members * ALLOCATIONS * HANDLE_BYTES, layout.handles
        ).reshape(members, ALLOCATIONS, HANDLE_BYTES)
        self.versions = view(layout.versions, members, ALLOCATIONS)
        self.bases = view(layout.bases, members, ALLOCATIONS)
        self.places = view(layout.places, RING, members, TENSORS, 4)
        self.numbers = view(layout.numbers, RING, members, members)
        self.times = view(layout.times, RING, members, 2)
        flags = np.frombuffer(memory, np.uint32, _FLAGS * members * layout.stride, layout.flags)
        self._flags: list[npt.NDArray[np.uint32]] = list(
            flags.reshape(_FLAGS, members, layout.stride)[:, :, 0]
        )

    def flags(self, which: int) -> npt.NDArray[np.uint32]:
        """A flag of all members, to be read and stored by the host."""
        return self._flags[which]

    def close(self) -> None:
        """Release the memory."""
        del self.generations, self.owners, self.handles, self.versions, self.bases
        del self.places, self.numbers, self.times
        del self._flags, self._anchor
