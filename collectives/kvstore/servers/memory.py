"""Memory that outlives a server: files in memory which the workers of its host hold as well.

The memory of a store is one file::

    head      magic number; end of the valid bytes; offset of the record of the store that counts
    place*    header (length of the record, bytes of the place), record, and behind the record of a key its block

A block has two slots and a word that selects the slot that counts. A slot has a version, the last sequence number applied for each worker,
the value and the optimizer's states. An update is written to the other slot, then that word is changed: a server that is killed between
two instructions leaves the value before the update or the one after it, with the sequence numbers that belong to it.

The record of the store has two places: an update is written to the one that does not count. A block that another one of its key has
replaced leaves its place to later blocks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.kvstore.arrays import Array
from hvdlab.collectives.kvstore.base import Key
from hvdlab.collectives.kvstore.optimizer_state import OptimizerSpec
from hvdlab.collectives.protocol.codec import MALFORMED
from hvdlab.collectives.protocol.messages import Message

ALIGNMENT = 64
"""Bytes to which places and arrays are aligned: a cache line."""
PAGE = 4096
"""Bytes; files grow by whole pages."""
# "hvdkv1" in ASCII, and the version of the layout: it has to be raised with each change below, as a server may read the file
# that one of another version has written.
_MAGIC = 0x6876646B76310003
_HEADER = 16
"""Bytes before a record: its length, and the bytes of its place."""
# Places are multiples of ALIGNMENT, so that the lowest bits of their size can mark their contents.
_OF_STORE, _FREE, _MARKS = 1, 2, ALIGNMENT - 1
_TYPES = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})

Words = npt.NDArray[np.uint64]


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """Return the next multiple of ``to``, in bytes."""
    return -(-size // to) * to


def element_type(name: str) -> np.dtype[Any]:
    """Return the element type of this name, such as ``f4``. Raises ``ProtocolError`` if there is none."""
    if name not in _TYPES:
        raise ProtocolError(f"there is no element type {name!r}")
    return np.dtype(name)


class SharedFile:
    """File in memory that several processes map; it can grow, not shrink.

    Args:
        descriptor: Descriptor of the file; taken over.

    Raises:
        ProtocolError: The file might shrink, which would kill processes that read it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolError(f"what should be a file in memory is something else: {error}") from error
        # A read behind the end of a file that has shrunk is a SIGBUS, which no `except` catches: each process that maps it would end.
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("a file in memory that may shrink can't be shared")
        self._mapped = 0

    @classmethod
    def create(cls, name: str) -> SharedFile:
        """Create a new, empty file; ``/proc`` shows ``name``."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(descriptor)

    @property
    def size(self) -> int:
        """Return the size of the file now, in bytes; any process that has it may have grown it."""
        return os.fstat(self.descriptor).st_size

    def grow(self, size: int) -> None:
        """Make the file at least ``size`` bytes large; new bytes read as zeros.

        It at least doubles: each map costs a descriptor as long as an array of it lives, and unused bytes cost no memory.
        """
        if size > self.size:
            os.ftruncate(self.descriptor, aligned(max(size, 2 * self.size), PAGE))

    def array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return a part of it as an array that stays valid when the file grows. Raises ``ProtocolError`` if it is not inside."""
        count = 1
        for length in shape:
            count *= length
        if min(shape, default=0) < 0 or offset < 0 or offset % dtype.itemsize:
            raise ProtocolError(f"there is no array {dtype}{list(shape)} at {offset}")
        if count == 0:
            return np.empty(shape, dtype)
        end = offset + count * dtype.itemsize
        if end > self._mapped:
            size = self.size
            if end > size:
                raise ProtocolError(f"an array ends at {end}, but its file at {size}")
            # Arrays of the old map keep that map alive; both maps are the same memory.
            self._map, self._mapped = mmap.mmap(self.descriptor, size), size
        assert self._map is not None
        return np.frombuffer(self._map, dtype, count, offset).reshape(shape)

    def close(self) -> None:
        """Close the file; arrays stay valid as long as they are referenced. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor, self._map, self._mapped = -1, None, 0

    def __del__(self) -> None:
        self.close()


# -- records ----------------------------------------------------------------------------------------------------------


class StoreRecord(Message, frozen=True):
    """Record of a store.

    Attributes:
        workers: The workers that use it, by rank.
        generation: Number of optimizers that it has had; the states of a slot belong to one of these.
        optimizer: The present optimizer; None before the first.
        gone: The workers that use it no more.
    """

    workers: tuple[int, ...]
    generation: int = 0
    optimizer: OptimizerSpec | None = None
    gone: tuple[int, ...] = ()


class KeyRecord(Message, frozen=True):
    """Record of a key. Of several for one key the one with the highest ``serial`` counts.

    Attributes:
        shape, dtype: Of the value.
        states: Element types and shapes of the arrays that the optimizer keeps for the key.
        block: Offset of the block.
        serial: Number of blocks that the key had before.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    states: tuple[tuple[str, tuple[int, ...]], ...]
    block: int
    serial: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[StoreRecord | KeyRecord] = msgspec.msgpack.Decoder(StoreRecord | KeyRecord)


@dataclass(frozen=True, slots=True)
class ValueSlot:
    """One of the two slots of a key's block.

    Attributes:
        head: Version; generation of the optimizer that the states belong to; updates by it.
        applied: The last sequence number that was applied, for each worker of the store.
        value: The value.
        states: The arrays of the optimizer.
    """

    head: Words
    applied: Words
    value: Array
    states: tuple[Array, ...]

    def copy_to(self, other: ValueSlot) -> None:
        """Copy everything but the version."""
        other.head[1:] = self.head[1:]
        other.applied[:] = self.applied
        np.copyto(other.value, self.value)
        for mine, its in zip(self.states, other.states, strict=True):
            np.copyto(its, mine)


class Block:
    """Two slots of a key, of which one counts. Made by :class:`StoreMemory`.

    Attributes:
        record: Describes the contents of the slots.
        place: Where the record is in the file.
        current_word: A word in the file, whose lowest bit selects the slot that counts.
    """

    def __init__(self, file: SharedFile, record: KeyRecord, workers: int, place: int) -> None:
        self.record, self.place = record, place
        self.current_word: Words = file.array(record.block, np.dtype(np.uint64), (1,))
        at = record.block + ALIGNMENT
        self._slots = []
        for _ in (0, 1):
            slot, at = _slot_at(file, at, record, workers)
            self._slots.append(slot)

    @property
    def current(self) -> ValueSlot:
        """Return the slot that counts."""
        return self._slots[int(self.current_word[0]) & 1]

    @property
    def other(self) -> ValueSlot:
        """Return the slot that does not count, and may be written to."""
        return self._slots[1 - (int(self.current_word[0]) & 1)]

    def commit(self) -> None:
        """Let the other slot count from now on, with the next version."""
        # The word is written last: a server that dies before that leaves the old value, one that dies after it the new one.
        self.other.head[0] = self.current.head[0] + np.uint64(1)
        self.current_word[0] ^= np.uint64(1)


def _slot_at(file: SharedFile, at: int, record: KeyRecord, workers: int) -> tuple[ValueSlot, int]:
    words = np.dtype(np.uint64)
    head = file.array(at, words, (3,))
    at += 3 * 8
    applied = file.array(at, words, (workers,))
    at = aligned(at + workers * 8)
    arrays = []
    for name, shape in ((record.dtype, record.shape), *record.states):
        array = file.array(at, element_type(name), shape)
        arrays.append(array)
        at = aligned(at + array.nbytes)
    return ValueSlot(head, applied, arrays[0], tuple(arrays[1:])), at


def _block_size(record: KeyRecord, workers: int) -> int:
    # Has to reach as far as `_slot_at()` goes, for both slots, behind the word that selects one of them.
    slot = aligned((3 + workers) * 8)
    for name, shape in ((record.dtype, record.shape), *record.states):
        slot += aligned(element_type(name).itemsize * int(np.prod(shape, dtype=np.int64)))
    return ALIGNMENT + 2 * (slot + ALIGNMENT)


class StoreMemory:
    """Memory of one store, in a file that its workers hold as well.

    Args:
        file: Empty, or written by a server before; taken over.

    Attributes:
        file: The file.
        store: How the store is used; ``None`` before :meth:`describe`.
        blocks: The keys that it has.

    Raises:
        ProtocolError: The file has other content.
    """

    def __init__(self, file: SharedFile) -> None:
        self.file = file
        self.store: StoreRecord | None = None
        self.blocks: dict[Key, Block] = {}
        #: Where the record of the store may be written next, and the bytes there; 0 if there is no such place.
        self._spare, self._spare_size = 0, 0
        #: The places of blocks that count no more: the bytes of each, and where it begins; in order, to find the smallest that fits.
        self._free: list[tuple[int, int]] = []
        if file.size == 0:
            file.grow(PAGE)
        head = self._head()
        if head[0] == 0:  # the file is new, or the server that made it was killed while it did
            head[1] = ALIGNMENT
            head[0] = _MAGIC  # last: a file without it was never used
        if head[0] != _MAGIC:
            raise ProtocolError("a file in memory is not that of a store")
        self._read()

    def _head(self) -> Words:
        """Return the magic number, the end of the valid bytes, and the offset of the store's record that counts, or 0."""
        return self.file.array(0, np.dtype(np.uint64), (3,))

    def _header(self, at: int) -> Words:
        """Return the length of a record, and the bytes of its place, whose lowest bits mark its contents."""
        return self.file.array(at, np.dtype(np.uint64), (2,))

    def _read(self) -> None:
        """Read the records and blocks of the server before this one."""
        _, end, counting = (int(word) for word in self._head())
        if counting:
            record = self._record(counting)
            if not isinstance(record, StoreRecord):
                raise ProtocolError("a record of a store is damaged")
            # First: the size of the blocks below follows from the number of workers.
            self.store = record
        at = ALIGNMENT
        while at < end:
            marked = int(self._header(at)[1])
            size = marked & ~_MARKS
            if size <= 0 or at + size > min(
                end, self.file.size
            ):  # valid bytes were written, so the file has them
                raise ProtocolError("a record of a store is damaged")
            if marked & _FREE:
                insort(self._free, (size, at))
            elif not marked & _OF_STORE:
                self._use(at)
            # The largest place that does not count: it has room for the longest record.
            elif at != counting and size > self._spare_size:
                self._spare, self._spare_size = at, size
            at += size

    def _record(self, at: int) -> StoreRecord | KeyRecord:
        data = self.file.array(at + _HEADER, np.dtype(np.uint8), (int(self._header(at)[0]),))
        try:
            return _decoder.decode(data.tobytes())
        except MALFORMED as error:
            raise ProtocolError(f"a record of a store is damaged: {error}") from error

    def _use(self, at: int) -> None:
        record = self._record(at)
        if not isinstance(record, KeyRecord) or self.store is None:
            raise ProtocolError("a record of a store is damaged")
        other = self.blocks.get(record.key)
        if other is not None:
            # The server before was killed when the newer one counted and the older one was not marked yet.
            older = at if record.serial < other.record.serial else other.place
            self._release(older)
            if older == at:
                return
        self.blocks[record.key] = Block(self.file, record, len(self.store.workers), at)

    def describe(self, record: StoreRecord) -> None:
        """Write the record of the store, which counts from now on."""
        if record == self.store:
            return
        data = _encoder.encode(record)
        place, room = self._spare, self._spare_size
        if _HEADER + len(data) > room:
            # Room for a longer one, so that a record that grows by and by leaves few places behind.
            place, room = int(self._head()[1]), aligned(_HEADER + 2 * len(data))
            self._write(place, data, room | _OF_STORE)
            self._end_at(place + room)
        else:
            self._write(place, data, room | _OF_STORE)
        before = int(self._head()[2])
        # Last, and one store: a server that is killed before it leaves the record before.
        self._head()[2] = place
        self._spare, self._spare_size = before, int(self._header(before)[1]) & ~_MARKS if before else 0
        self.store = record

    def add(self, record: KeyRecord) -> Block:
        """Add a block for a key; the caller fills its current slot, then calls :meth:`keep`. ``block`` and ``serial`` are set here."""
        assert self.store is not None
        workers = len(self.store.workers)
        older = self.blocks.get(record.key)
        record = msgspec.structs.replace(record, serial=0 if older is None else older.record.serial + 1)
        # The place of the block is a longer number than none.
        room = aligned(_HEADER + len(_encoder.encode(record)) + 16)
        size = room + aligned(_block_size(record, workers))
        fitting = bisect_left(self._free, (size, 0))
        start = int(self._head()[1])
        # A place of more than twice the size is left to larger blocks: these would need new memory.
        if fitting < len(self._free) and self._free[fitting][0] <= 2 * size:
            start = self._free[fitting][1]
        self.file.grow(start + size)
        block = Block(self.file, msgspec.structs.replace(record, block=start + room), workers, start)
        # An earlier block or server may have written here: clear the words that the caller does not set.
        block.current_word[0] = 0
        for slot in (block.current, block.other):
            for words in (slot.head, slot.applied):
                words[:] = 0
        return block

    def keep(self, block: Block) -> None:
        """Let a block that :meth:`add` made count from now on, in place of an older one of its key."""
        data, start, end = _encoder.encode(block.record), block.place, int(self._head()[1])
        if start == end:
            size = aligned(_block_size(block.record, len(block.current.applied)))
            self._write(end, data, block.record.block - end + size)
            # Last: the block counts once the valid bytes reach behind it.
            self._end_at(block.record.block + size)
        else:
            room = int(self._header(start)[1]) & ~_MARKS
            self._write(start, data, room | _FREE)
            # Last, and one store: from now on it counts, as its serial number is higher.
            self._header(start)[1] = room
            self._free.remove((room, start))
        older = self.blocks.get(block.record.key)
        self.blocks[block.record.key] = block
        if older is not None:
            # Only now: a server that is killed before this leaves both, and the serial numbers decide.
            self._release(older.place)

    def _release(self, at: int) -> None:
        """Mark the place of a block that counts no more: another block may be written there."""
        header = self._header(at)
        header[1] |= np.uint64(_FREE)
        insort(self._free, (int(header[1]) & ~_MARKS, at))

    def _write(self, at: int, data: bytes, marked_size: int) -> None:
        """Write a record that does not count yet."""
        self.file.grow(at + max(marked_size & ~_MARKS, _HEADER + len(data)))
        self._header(at)[:] = (len(data), marked_size)
        self.file.array(at + _HEADER, np.dtype(np.uint8), (len(data),))[:] = np.frombuffer(data, np.uint8)

    def _end_at(self, end: int) -> None:
        self._head()[1] = end

    def close(self) -> None:
        """Close the memory."""
        self.blocks.clear()
        self.file.close()
