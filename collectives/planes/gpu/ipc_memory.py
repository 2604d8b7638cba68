"""Memory that members of a group open to each other, and the shared memory in which they announce it.

A tensor lies somewhere in a piece of memory that a framework's allocator got from the driver, and only a whole piece can be opened by
another process. So a member keeps a table of its pieces in the shared memory, and announces in which of them a tensor lies, and where.
Opening a piece is slow, so a worker does it once for each piece.

The shared memory has twice the words by which threads of the host wait for each other (:mod:`hvdlab.collectives.planes.shm.signals`): for the other
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
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.planes.gpu.device import HANDLE_BYTES, Allocation, Device, DeviceFailed, OpenedMemory
from hvdlab.collectives.planes.shm.layout import PAGE, WORD, Words

Array64 = npt.NDArray[np.uint64]

RING = 8
"""Operations that may be on their way; a member that would be further ahead waits for the end of an earlier one."""
TENSORS = 512
"""Tensors of an operation; a collective with more becomes several operations."""
ALLOCATIONS = 1024
"""Slots of a member's table: pieces of memory that others may have open at a time."""

_LINE = 128  # bytes; a GPU that writes a neighbour's words must not slow this member's line down
READY, STOPPED, QUIET = range(3)
_FLAGS = 3


class GpuAnnouncementsLayout(Words):
    """Offsets in bytes. ``members`` as in :class:`Words`."""

    @property
    def ends(self) -> int:
        """Return the words by which members wait for the end of an operation; those at 0 are for its begin."""
        return self.control_bytes

    @property
    def flags(self) -> int:
        return 2 * self.control_bytes

    def flag(self, which: int, member: int) -> int:
        """Return the offset of a word of 32 bits."""
        return self.flags + (which * self.members + member) * _LINE

    @property
    def stride(self) -> int:
        """Return 32-bit words from a member's flag to the next one's."""
        return _LINE // 4

    @property
    def generations(self) -> int:
        """Return a word for each member that counts the changes of its table of allocations."""
        return _up(self.flags + _FLAGS * self.members * _LINE)

    @property
    def owners(self) -> int:
        """Return a random word for each member's process."""
        return self.generations + self.members * WORD

    @property
    def handles(self) -> int:
        return _up(self.owners + self.members * WORD)

    @property
    def versions(self) -> int:
        """Return a word for each slot of a table: 0 if it is empty; otherwise one more than the serial number of the piece in it."""
        return self.handles + self.members * ALLOCATIONS * HANDLE_BYTES

    @property
    def bases(self) -> int:
        """Return a word for each slot of a table: the address of the piece in its owner's process."""
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


class GpuAnnouncements:
    """View that a member has of the shared memory.

    Attributes:
        layout: Offsets of everything in the memory.
        address: Address of the memory in this process.
        generations: Changes of each member's table of allocations, by member.
        owners: Random words of the members' processes, by member.
        handles: Bytes of the handles, by member and allocation.
        versions, bases: Words of the allocations (see :class:`GpuAnnouncementsLayout`), by member and allocation.
        places: By place of the ring, member and tensor: allocation and offset of the input, and of the output.
        numbers: By place, member, and member.
        times: By place and member: begin and end of a kernel.
    """

    def __init__(self, memory: mmap.mmap, members: int) -> None:
        self.layout = layout = GpuAnnouncementsLayout(members)
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
        """Return a flag of all members, to be read and stored by the host."""
        return self._flags[which]

    def close(self) -> None:
        """Release the memory."""
        del self.generations, self.owners, self.handles, self.versions, self.bases
        del self.places, self.numbers, self.times
        del self._flags, self._anchor


NOWHERE = ALLOCATIONS
"""Slot of a tensor without elements, of which nothing is read or written."""
_ANY_ADDRESS = 16  # not 0, which stands for a piece that is not open


class ExportedMemory:
    """Pieces of a member's memory that other members may open. Used by one thread at a time."""

    def __init__(self, device: Device, announcements: GpuAnnouncements, index: int) -> None:
        self._device, self._announcements, self._index = device, announcements, index
        #: By base address, the least recently used first: slot of the table, the piece, and the last operation that used it.
        self._known: OrderedDict[int, tuple[int, Allocation, int]] = OrderedDict()
        self._free = list(range(ALLOCATIONS - 1, -1, -1))
        #: Serial numbers of pieces that no other process can open.
        self._closed: set[int] = set()
        #: Address of each piece, by slot.
        self.bases: dict[int, int] = {}
        #: The operation that tensors are located for, and the last one that has ended.
        self._operation = self._finished = 0
        #: Pieces of this operation: begin, end, slot. Many tensors lie in the same piece, and asking the driver for it takes longer.
        self._seen: list[tuple[int, int, int]] = []
        announcements.owners[index] = device.owner

    def begin(self, operation: int, finished: int) -> None:
        """Begin an operation, to which the tensors located next belong; operations up to ``finished`` need their pieces no more."""
        self._operation, self._finished = operation, finished
        # Between operations a piece can be freed, and another one come to lie at its address.
        self._seen.clear()
        self._withdraw_one_if_freed()

    def locate(self, pointer: int, nbytes: int) -> tuple[int, int] | None:
        """Return where other members find a tensor: slot of its piece, and offset. ``None`` if they can't open the piece."""
        if not nbytes:
            return NOWHERE, 0
        for base, end, slot in self._seen:
            if base <= pointer and pointer + nbytes <= end:
                return slot, pointer - base
        found = self._device.allocation_of(pointer)
        if found is None or found.serial in self._closed or pointer + nbytes > found.base + found.nbytes:
            return None
        published = self._slot(found)
        if published is None:
            return None
        self._seen.append((found.base, found.base + found.nbytes, published))
        return published, pointer - found.base

    def publish(self, base: int) -> int:
        """Let other members open a piece for as long as the group exists. Returns its slot.

        Raises:
            DeviceFailed: Other processes can't open this kind of memory, or the table is full.
        """
        handle, found = self._device.export(base), self._device.allocation_of(base)
        if handle is None or found is None or not self._free:
            raise DeviceFailed("the GPU's memory can't be opened by other processes on this system")
        slot = self._free.pop()
        self._publish(slot, found, handle)
        return slot

    def _slot(self, found: Allocation) -> int | None:
        known = self._known.get(found.base)
        if known is not None and known[1].serial == found.serial:
            self._known[found.base] = (known[0], found, self._operation)
            self._known.move_to_end(found.base)
            return known[0]
        # A new piece is rare. It may be where freed ones were, which others can't open before they have closed those.
        self._withdraw_freed()
        handle = self._device.export(found.base)
        if handle is None:
            self._closed.add(found.serial)
            return None
        if not self._free:
            oldest, (_, _, used) = next(iter(self._known.items()))
            # An operation under way may still read the piece. Then the tensor is copied to memory of the group's own (IpcGroup._stage).
            if used > self._finished:
                return None
            self._withdraw(oldest)
        slot = self._free.pop()
        self._known[found.base] = (slot, found, self._operation)
        self._publish(slot, found, handle)
        return slot

    def _publish(self, slot: int, piece: Allocation, handle: bytes) -> None:
        announcements = self._announcements
        self.bases[slot] = piece.base
        announcements.handles[self._index, slot] = np.frombuffer(handle, np.uint8, HANDLE_BYTES)
        announcements.bases[self._index, slot] = piece.base
        # After the handle: a worker that sees the version finds the handle.
        announcements.versions[self._index, slot] = piece.serial + 1
        # Last of all: a worker that finds a new generation finds the version, too.
        announcements.generations[self._index] += np.uint64(1)

    def _withdraw(self, base: int) -> None:
        slot, _, _ = self._known.pop(base)
        # In the order of _publish(): a worker that finds the new generation finds the slot empty.
        self._announcements.versions[self._index, slot] = 0
        self._announcements.generations[self._index] += np.uint64(1)
        self._free.append(slot)

    def _withdraw_one_if_freed(self) -> None:
        """Withdraw the longest unused piece if it was freed: the driver keeps its memory for as long as a worker has it open."""
        if not self._known:
            return
        base, (slot, allocation, used) = next(iter(self._known.items()))
        if used > self._finished:
            return
        if self._is_freed(allocation):
            self._withdraw(base)
        else:
            self._known[base] = (slot, allocation, used)
            self._known.move_to_end(base)

    def _withdraw_freed(self) -> None:
        for base, (_, allocation, _) in list(self._known.items()):
            if self._is_freed(allocation):
                self._withdraw(base)

    def _is_freed(self, piece: Allocation) -> bool:
        found = self._device.allocation_of(piece.base)
        return found is None or found.serial != piece.serial


class ImportedMemory:
    """Pieces that a worker has opened, and its own, which it need not open. One thread at a time."""

    def __init__(
        self, device: Device, announcements: GpuAnnouncements, index: int, exports: ExportedMemory
    ) -> None:
        self._device, self._announcements, self._index, self._exports = device, announcements, index, exports
        members = announcements.layout.members
        #: The generation of each member's table when it was last read; ``_versions`` likewise, by member and slot.
        self._generations = [0] * members
        self._versions = np.zeros((members, ALLOCATIONS), np.uint64)
        #: Pieces of other members, by member and slot.
        self._open: dict[tuple[int, int], OpenedMemory] = {}
        self.changes = 0
        """How often an address changed."""
        self.bases = np.zeros((members, ALLOCATIONS + 1), np.uint64)
        """Addresses in this process, by member and slot; 0 if the piece is not open."""
        self.bases[:, NOWHERE] = _ANY_ADDRESS
        #: Why a piece could not be opened, by member and slot.
        self._refused: dict[tuple[int, int], str] = {}

    def refresh(self) -> None:
        """Open and close the pieces that have changed since the last call."""
        # The generations are read before the versions: a change that comes in between is read at the next call.
        for member, generation in enumerate(self._announcements.generations.tolist()):
            if generation != self._generations[member]:
                self._generations[member] = generation
                self._refresh(member)

    def _refresh(self, member: int) -> None:
        versions: Array64 = self._announcements.versions[member].copy()
        changed = np.flatnonzero(versions != self._versions[member]).tolist()
        # All that is gone is closed before anything is opened, which may be at the same place.
        for slot in changed:
            self._release(member, slot)
        self._versions[member] = versions
        self.changes += 1
        for slot in changed:
            if versions[slot]:
                self._acquire(member, slot, int(versions[slot]) - 1)

    def _acquire(self, member: int, slot: int, serial: int) -> None:
        if member == self._index:
            self.bases[member, slot] = self._exports.bases[slot]
            return
        announcements = self._announcements
        owner, base = int(announcements.owners[member]), int(announcements.bases[member, slot])
        # Opening may fail for a piece that its member has withdrawn by now, or is replacing: no operation will use that piece.
        try:
            piece = self._device.opened.open(owner, base, serial, bytes(announcements.handles[member, slot]))
        except DeviceFailed as error:
            self._refused[member, slot] = str(error)
        else:
            self._open[member, slot] = piece
            self.bases[member, slot] = piece.pointer

    def why_closed(self, member: int) -> str:
        """Return the driver's reason for not opening a member's pieces."""
        return "; ".join(sorted({text for (whose, _), text in self._refused.items() if whose == member}))

    def _release(self, member: int, slot: int) -> None:
        self._refused.pop((member, slot), None)
        self.bases[member, slot] = 0
        piece = self._open.pop((member, slot), None)
        if piece is not None:
            self._device.opened.release(piece)

    def close(self) -> None:
        """Close everything."""
        for member, slot in list(self._open):
            self._release(member, slot)
