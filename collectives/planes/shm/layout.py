"""How a shared segment is divided, and how buffers are cut into chunks.

Imports no numpy: the coordinator sizes the segment with :func:`segment_size`.

::

    page 0…   doorbell | arrived[members] | reduced[members] | targets[members] | needs[2][members]
    then      slots of member 0 | slots of member 1 | …, each half a page into a page
    then      the board (:mod:`agreement_board`): words like those of page 0 | two areas with a place for each member

The half page is there because x86 copies slowly (down to a fortieth, where ``rep movsb`` does it) if the target lies
a little further into its page than the source into its own. Large tensors begin near the start of a page, so this way
both directions, into a slot and out of it, are far from that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hvdlab.collectives.planes.base import HostArray

CHUNK_BYTES = 512 * 1024
"""Default size of a chunk."""
PAIR_CHUNK_BYTES = 256 * 1024
"""That of two members: their slots and the buffers in use then stay in a 1 MiB second-level cache."""
FEW = 8
"""Up to so many members slots have room for chunks of twice the default's size, for ``plane.ChunkChoice``."""
# More slots, for a member to run up to 16 steps ahead of late ones, cost four members on idle cores 5 %.
SLOTS = 5
"""Default number of slots per member; see :mod:`schedules` for how it limits how far ahead a member may run."""

BOARD_BYTES = 1024 * 1024
"""Bytes of all members' tensors on the board at most, for :data:`FEW` members: as many as each member reduces by itself in the time that
the steps of the pipeline take in Python. They are in a second-level cache."""
MANY_BOARD_BYTES = 256 * 1024
"""The same for more members, which are likely to share cores: there each of them reads all tensors."""
LARGEST_PLACE = 512 * 1024
"""Bytes of the largest tensor on the board."""
LONE_PLACE = 64 * 1024
"""The same for a single member, whose plane copies a tensor once and not twice."""

PAGE = 4096  # bytes
PHASE = PAGE // 2
LINE = 64  # bytes of a cache line
WORD = 8  # bytes


@dataclass(frozen=True, slots=True)
class Words:
    """Offsets of the words by which members signal each other.

    Attributes:
        members: Members of the process set.
    """

    members: int

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one array with a word per member, in whole cache lines."""
        return _round_up(self.members * WORD, LINE)

    def row(self, number: int) -> int:
        """Return the offset of the ``number``-th array of words; the doorbell has the cache line before the first."""
        return LINE + number * self.row_bytes

    @property
    def control_bytes(self) -> int:
        # Five rows: arrived, reduced, targets, and needs for each of the two parities.
        return _round_up(self.row(5), PAGE)


@dataclass(frozen=True, slots=True)
class SegmentLayout(Words):
    """Offsets in bytes within a segment for ``members`` members.

    Attributes:
        chunk_bytes: Size of a slot, in whole pages; at least ``LINE`` for each member.
        slots: Slots per member, at least 5, which the three-stage pipeline needs to overlap.
    """

    chunk_bytes: int = CHUNK_BYTES
    slots: int = SLOTS

    def __post_init__(self) -> None:
        if self.members < 1:
            raise ValueError(f"a segment needs at least one member, not {self.members}")
        if self.slots < 5:
            raise ValueError(f"a member needs at least 5 slots, not {self.slots}")
        if self.chunk_bytes < LINE * self.members or self.chunk_bytes % PAGE or self.chunk_bytes <= 0:
            raise ValueError(
                f"chunk_bytes must be a multiple of {PAGE}, at least {LINE} for each of the {self.members} members, "
                f"not {self.chunk_bytes}"
            )

    def slot(self, member: int, slot: int) -> int:
        """Return the offset of a slot."""
        return self.control_bytes + PHASE + (member * self.slots + slot) * self.chunk_bytes

    @property
    def size(self) -> int:
        """Return the bytes of the whole segment, in whole pages."""
        return _round_up(self.slot(self.members, 0), PAGE)


@dataclass(frozen=True, slots=True)
class AgreementBoardLayout(Words):
    """Offsets within the board, which lies behind the slots: words, then two areas with a place of each member for small tensors."""

    @property
    def place_bytes(self) -> int:
        """Return the size of a place, in whole pages: the more members, the less each of them can reduce by itself."""
        if self.members == 1:
            return LONE_PLACE
        together = BOARD_BYTES if self.members <= FEW else MANY_BOARD_BYTES
        return min(max(together // self.members // PAGE * PAGE, PAGE), LARGEST_PLACE)

    def area(self, parity: int) -> int:
        """Return the offset of an area."""
        return self.control_bytes + parity * self.members * self.place_bytes

    @property
    def size(self) -> int:
        """Return the bytes of the board, in whole pages."""
        return self.area(2)


def slot_bytes(members: int) -> int:
    """Return the default size of a slot."""
    return 2 * CHUNK_BYTES if 2 < members <= FEW else CHUNK_BYTES


def segment_size(members: int, chunk_bytes: int | None = None, slots: int = SLOTS) -> int:
    """Return the bytes of the memfd for a group, with its board. A page costs memory only once it is touched.

    Raises:
        ValueError: Fewer than 1 member or 5 slots, or chunks that are not whole pages or too small for the members.
    """
    chunk_bytes = slot_bytes(members) if chunk_bytes is None else chunk_bytes
    return SegmentLayout(members, chunk_bytes, slots).size + AgreementBoardLayout(members).size


def layout_from(options: Mapping[str, str], members: int) -> SegmentLayout:
    """Return the layout for ``PlaneContext.options`` (``chunk_bytes``, ``slots``); all members must have the same."""
    chunk_bytes = int(options.get("chunk_bytes", slot_bytes(members)))
    return SegmentLayout(members, chunk_bytes, int(options.get("slots", SLOTS)))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class ChunkSlice(NamedTuple):
    """Part of one buffer within a chunk, in elements.

    Attributes:
        buffer: Which buffer of the list.
        start: First element within the buffer.
        at: First element within the chunk.
        length: Number of elements.
    """

    buffer: int
    start: int
    at: int
    length: int


def cut(lengths: Sequence[int], chunk: int) -> Iterator[list[ChunkSlice]]:
    """Yield the slices of each chunk of at most ``chunk`` elements; empty buffers give none.

    As much of a buffer as fills whole chunks has these for itself, from its first element on. The rest of all buffers is put together,
    in order, so there are as many chunks as if all were. Chunks of one slice need fewer copies, and are copied from one
    offset into a page to another that suits it (see above).
    """
    slices: list[ChunkSlice] = []
    at = 0
    for buffer, length in enumerate(lengths):
        start = length // chunk * chunk
        # Where pieces of several tensors shared chunks, 21 % of the bytes of ResNet-50's gradients were copied once more; so 5 % are.
        for whole in range(0, start, chunk):
            yield [ChunkSlice(buffer, whole, 0, chunk)]
        while start < length:
            taken = min(length - start, chunk - at)
            slices.append(ChunkSlice(buffer, start, at, taken))
            start += taken
            at += taken
            if at == chunk:
                yield slices
                slices, at = [], 0
    if slices:
        yield slices


def part(buffers: Sequence[HostArray], first: int, count: int) -> list[HostArray]:
    """Return views of ``count`` elements from the ``first`` one on, where all buffers' elements are counted one after another."""
    views = []
    for buffer in buffers:
        if first < len(buffer) and count:
            view = buffer[first : first + count]
            views.append(view)
            count -= len(view)
        first = max(0, first - len(buffer))
    return views


def slice_bounds(count: int, members: int, grain: int) -> list[int]:
    """Return ``members + 1`` bounds that divide ``count`` elements about evenly, on multiples of ``grain``."""
    # Each bound is rounded down, so they never decrease. If there are fewer grains than members some slices are empty, and the last
    # one is not.
    bounds = [count * m // members // grain * grain for m in range(members)]
    bounds.append(count)
    return bounds
