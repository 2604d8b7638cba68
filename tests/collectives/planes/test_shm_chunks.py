"""How buffers are cut into chunks: every element once, large buffers for themselves, no chunk more than needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.planes.shm.chunks import Piece, cut


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
            assert Piece(buffer, start, 0, chunk) in alone
