from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.planes.shm.layout import (
    CHUNK_BYTES,
    SLOTS,
    AgreementBoardLayout,
    ChunkSlice,
    SegmentLayout,
    cut,
    layout_from,
    segment_size,
)


@pytest.mark.parametrize("members", [1, 2, 3, 8, 65])
def test_nothing_overlaps(members: int) -> None:
    layout = SegmentLayout(members, chunk_bytes=8192, slots=5)
    rows = [(layout.row(n), layout.row(n) + members * 8) for n in range(5)]
    slots = [(layout.slot(m, s), layout.slot(m, s) + 8192) for m in range(members) for s in range(5)]
    areas = [(0, 4), *rows, *slots]
    assert all(end <= start for (_, end), (start, _) in pairwise(areas))
    assert slots[-1][1] <= layout.size


@pytest.mark.parametrize("members", [1, 2, 3, 8, 65])
def test_the_board_lies_behind_the_slots_and_nothing_of_it_overlaps(members: int) -> None:
    layout, board = SegmentLayout(members, chunk_bytes=8192, slots=5), AgreementBoardLayout(members)
    rows = [(board.row(n), board.row(n) + members * 8) for n in range(5)]
    tensors = [(board.area(parity), board.area(parity) + members * board.place_bytes) for parity in range(2)]
    areas = [(0, 4), *rows, *tensors]
    assert all(end <= start for (_, end), (start, _) in pairwise(areas))
    assert tensors[-1][1] <= board.size
    assert layout.size + board.size == segment_size(members, 8192, 5)


def test_counters_start_on_cache_lines_and_the_segment_on_pages() -> None:
    layout = SegmentLayout(9)
    assert all(layout.row(n) % 64 == 0 for n in range(5))
    assert layout.size % 4096 == 0
    assert layout.size >= 9 * CHUNK_BYTES * SLOTS


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((0,), "member"),
        ((2, 4096, 4), "slots"),
        ((2, 1000), "chunk_bytes"),
        ((65, 4096), "65 members"),
        ((2, 0), "chunk"),
    ],
)
def test_impossible_layouts_are_refused(arguments: tuple[int, ...], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        segment_size(*arguments)


def test_options_override_the_defaults() -> None:
    assert layout_from({}, 2) == SegmentLayout(2)
    assert layout_from({"chunk_bytes": "65536", "slots": "8"}, 2) == SegmentLayout(2, 65536, 8)


def test_the_coordinator_can_size_a_segment_without_numpy() -> None:
    code = (
        "import sys; from hvdlab.collectives.planes.shm.layout import segment_size; segment_size(8);"
        "from hvdlab.collectives.types import check_supported; assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 16))
def test_every_element_is_in_one_chunk_and_the_chunks_are_full(lengths: list[int], chunk: int) -> None:
    chunks = list(cut(lengths, chunk))
    found = sorted(
        (piece.buffer, element)
        for pieces in chunks
        for piece in pieces
        for element in range(piece.start, piece.start + piece.length)
    )
    assert found == [(buffer, element) for buffer, length in enumerate(lengths) for element in range(length)]
    for pieces in chunks:
        ends = [piece.at + piece.length for piece in pieces]
        assert [piece.at for piece in pieces] == [0, *ends[:-1]]
        assert ends[-1] == chunk or pieces is chunks[-1]
    assert len(chunks) == -(-sum(lengths) // chunk)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 16))
def test_whole_chunks_of_a_buffer_are_its_own(lengths: list[int], chunk: int) -> None:
    alone = [pieces[0] for pieces in cut(lengths, chunk) if pieces[0].length == chunk]
    for buffer, length in enumerate(lengths):
        for start in range(0, length - chunk + 1, chunk):
            assert ChunkSlice(buffer, start, 0, chunk) in alone
