"""Messages of the Debug Adapter Protocol in a stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.kernel_ext.wire.debug import HEAD_MOST, MOST, FramingError, Unframer, frame


@given(st.lists(st.binary(max_size=200), max_size=6), st.lists(st.integers(1, 50), min_size=1))
def test_messages_come_out_however_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream, unframer, found = b"".join(map(frame, messages)), Unframer(), []
    place = 0
    while stream:
        cut = cuts[place % len(cuts)]
        found += unframer.feed(stream[:cut])
        stream, place = stream[cut:], place + 1
    assert found == messages


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 2\r\n\r\n",
        b"content-length: 2\r\nContent-Type: application/json; charset=utf-8\r\n\r\n",
        b"Content-Type: x\r\nContent-Length: 0002\r\n\r\n",
    ],
)
def test_heads_that_debuggers_write(head: bytes) -> None:
    unframer = Unframer()
    assert [one for byte in head + b"{}" for one in unframer.feed(bytes([byte]))] == [b"{}"]
    assert unframer.feed(head + b"{}" + head + b"[]" + head) == [b"{}", b"[]"]


WRONG = [
    b"\r\n\r\n",
    b"Content-Length: -1\r\n\r\n",
    b"Content-Length: \r\n\r\n",
    b"Content-Type: x\r\n\r\n",
    b"Content-Length: " + b"9" * 500 + b"\r\n\r\n",
    b"Content-Length: %d\r\n\r\n" % (MOST + 1),
    b"x" * HEAD_MOST,
]


@pytest.mark.parametrize("bad", WRONG, ids=range(len(WRONG)))
def test_bytes_that_are_no_message_are_refused(bad: bytes) -> None:
    with pytest.raises(FramingError):
        Unframer().feed(bad)
    with pytest.raises(FramingError):
        Unframer().feed(b"Content-Length: 2\r\n\r\n{}" + bad)
