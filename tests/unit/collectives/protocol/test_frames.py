"""Frames survive any cutting; bytes that are no frame are refused before it costs memory."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.codec import FRAME_LIMIT, HELLO_LIMIT, FrameDecoder, encode_frame


def feed_in_pieces(decoder: FrameDecoder, data: bytes, cuts: list[int]) -> list[bytes]:
    found: list[bytes] = []
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    for start, stop in pairwise(edges):
        found += [bytes(frame) for frame in decoder.feed(data[start:stop])]
    return found


@given(
    payloads=st.lists(st.binary(min_size=1, max_size=200), max_size=8),
    cuts=st.lists(st.integers(0, 1700), max_size=20),
)
def test_frames_are_found_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    decoder = FrameDecoder()
    data = b"".join(encode_frame(payload) for payload in payloads)
    assert feed_in_pieces(decoder, data, cuts) == payloads
    assert decoder.unfinished == 0


@given(payload=st.binary(min_size=1, max_size=50))
def test_a_frame_may_come_byte_by_byte(payload: bytes) -> None:
    decoder = FrameDecoder()
    frame = encode_frame(payload)
    for position in range(len(frame) - 1):
        assert decoder.feed(frame[position : position + 1]) == []
        assert decoder.unfinished == position + 1
    assert [bytes(f) for f in decoder.feed(frame[-1:])] == [payload]


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=10))
def test_garbage_gives_frames_or_a_protocol_error_and_nothing_else(data: bytes, cuts: list[int]) -> None:
    decoder = FrameDecoder(100)
    try:
        found = feed_in_pieces(decoder, data, cuts)
    except ProtocolError:
        return
    assert b"".join(encode_frame(f) for f in found) == data[: len(data) - decoder.unfinished]
    assert decoder.unfinished < 104


@pytest.mark.parametrize("length", [0, HELLO_LIMIT + 1, 0xFFFFFFFF])
def test_a_length_out_of_bounds_is_refused_from_its_header_alone(length: int) -> None:
    with pytest.raises(ProtocolError, match=str(length)):
        FrameDecoder(HELLO_LIMIT).feed(struct.pack("<I", length))


def test_the_limit_can_be_raised_later() -> None:
    decoder = FrameDecoder(10)
    decoder.feed(encode_frame(b"1234567890"))
    decoder.limit = FRAME_LIMIT
    assert len(decoder.feed(encode_frame(bytes(11)))) == 1


@pytest.mark.parametrize("size", [0, FRAME_LIMIT + 1])
def test_what_no_decoder_accepts_is_not_encoded(size: int) -> None:
    with pytest.raises(ProtocolError):
        encode_frame(bytes(size))


def test_a_large_frame_in_many_pieces_is_joined_once() -> None:
    payload = bytes(range(256)) * 40_000
    frame = encode_frame(payload)
    decoder = FrameDecoder()
    found = feed_in_pieces(decoder, frame, list(range(0, len(frame), 65536)))
    assert found == [payload]
