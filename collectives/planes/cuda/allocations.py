"""Where the members' memory is: the pieces that a member lets other members open, and those that a worker has opened.

A tensor lies somewhere in a piece of memory that a framework's allocator got from the driver, and only a whole piece can be opened by
another process. So a member keeps a table of its pieces on the board, and announces in which of them a tensor lies, and where. Opening a
piece is slow, so a worker does it once for each piece.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from hvdlab.collectives.planes.cuda.board import ALLOCATIONS, Array64, Board
from hvdlab.collectives.planes.cuda.device import HANDLE_BYTES, Allocation, Device, DeviceFailed
from hvdlab.collectives.planes.cuda.opened import Opened

NOWHERE = ALLOCATIONS
"""Slot of a tensor without elements, of which nothing is read or written."""
_ANY_ADDRESS = 16


class Exports:
    """The pieces of memory of a member that other members may open. Used by one thread at a time."""

    def __init__(self, device: Device, board: Board, index: int) -> None:
        self._device, self._board, self._index = device, board, index
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
        board.owners[index] = device.owner

    def begin(self, operation: int, finished: int) -> None:
        """The tensors located next belong to this operation; operations up to ``finished`` need their pieces no more."""
        self._operation, self._finished = operation, finished
        self._seen.clear()
        self._withdraw_one_if_freed()

    def locate(self, pointer: int, nbytes: int) -> tuple[int, int] | None:
        """Where other members find a tensor: slot of its piece, and offset. ``None`` if they can't open the piece."""
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
            if used > self._finished:
                return None
            self._withdraw(oldest)
        slot = self._free.pop()
        self._known[found.base] = (slot, found, self._operation)
        self._publish(slot, found, handle)
        return slot

    def _publish(self, slot: int, piece: Allocation, handle: bytes) -> None:
        board = self._board
        self.bases[slot] = piece.base
        board.handles[self._index, slot] = np.frombuffer(handle, np.uint8, HANDLE_BYTES)
        board.bases[self._index, slot] = piece.base
        # After the handle: a worker that sees the version finds the handle.
        board.versions[self._index, slot] = piece.serial + 1
        board.generations[self._index] += np.uint64(1)

    def _withdraw(self, base: int) -> None:
        slot, _, _ = self._known.pop(base)
        self._board.versions[self._index, slot] = 0
        self._board.generations[self._index] += np.uint64(1)
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


class Imports:
    """The pieces that a worker has opened, and its own, which it need not open. One thread at a time."""

    def __init__(self, device: Device, board: Board, index: int, exports: Exports) -> None:
        self._device, self._board, self._index, self._exports = device, board, index, exports
        members = board.layout.members
        #: The generation of each member's table when it was last read; ``_versions`` likewise, by member and slot.
        self._generations = [0] * members
        self._versions = np.zeros((members, ALLOCATIONS), np.uint64)
        #: Pieces of other members, by member and slot.
        self._open: dict[tuple[int, int], Opened] = {}
        self.changes = 0
        """How often an address changed."""
        self.bases = np.zeros((members, ALLOCATIONS + 1), np.uint64)
        """Addresses in this process, by member and slot; 0 if the piece is not open."""
        self.bases[:, NOWHERE] = _ANY_ADDRESS
        #: Why a piece could not be opened, by member and slot.
        self._refused: dict[tuple[int, int], str] = {}

    def refresh(self) -> None:
        """Open and close what has changed since the last call."""
        for member, generation in enumerate(self._board.generations.tolist()):
            if generation != self._generations[member]:
                self._generations[member] = generation
                self._refresh(member)

    def _refresh(self, member: int) -> None:
        versions: Array64 = self._board.versions[member].copy()
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
        board = self._board
        owner, base = int(board.owners[member]), int(board.bases[member, slot])
        # Opening may fail for a piece that its member has withdrawn by now, or is replacing: no operation will use that piece.
        try:
            piece = self._device.opened.open(owner, base, serial, bytes(board.handles[member, slot]))
        except DeviceFailed as error:
            self._refused[member, slot] = str(error)
        else:
            self._open[member, slot] = piece
            self.bases[member, slot] = piece.pointer

    def why_closed(self, member: int) -> str:
        """What the driver said when it refused to open pieces of a member's."""
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
