"""How a list of buffers is cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdlab.collectives.planes.buffers import HostArray


class Piece(NamedTuple):
    """A part of one buffer within a chunk, in elements.

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


def cut(lengths: Sequence[int], chunk: int) -> Iterator[list[Piece]]:
    """The pieces of each chunk of at most ``chunk`` elements; empty buffers give none.

    As much of a buffer as fills whole chunks has these for itself, from its first element on. The rest of all buffers is put together,
    in order, so there are as many chunks as if all were. Chunks of one piece need fewer copies, and are copied from one
    offset into a page to another that suits it (:mod:`layout`).
    """
    pieces: list[Piece] = []
    at = 0
    for buffer, length in enumerate(lengths):
        start = length // chunk * chunk
        for whole in range(0, start, chunk):
            yield [Piece(buffer, whole, 0, chunk)]
        while start < length:
            taken = min(length - start, chunk - at)
            pieces.append(Piece(buffer, start, at, taken))
            start += taken
            at += taken
            if at == chunk:
                yield pieces
                pieces, at = [], 0
    if pieces:
        yield pieces


def part(buffers: Sequence[HostArray], first: int, count: int) -> list[HostArray]:
    """Views of ``count`` elements from the ``first`` one on, where all buffers' elements are counted one after another."""
    views = []
    for buffer in buffers:
        if first < len(buffer) and count:
            view = buffer[first : first + count]
            views.append(view)
            count -= len(view)
        first = max(0, first - len(buffer))
    return views


def slice_bounds(count: int, members: int, grain: int) -> list[int]:
    """``members + 1`` bounds that divide ``count`` elements about evenly, on multiples of ``grain``."""
    bounds = [count * m // members // grain * grain for m in range(members)]
    bounds.append(count)
    return bounds
