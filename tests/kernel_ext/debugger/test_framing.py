"""Messages of the Debug Adapter Protocol in a stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.kernel_ext.debugger.framing import HEAD_MOST, MOST, FramingError, Unframer, frame


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


WRONG = {
    b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}": 1,
    b"GET / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}": 1,
    b"CONNECT a:1 HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}": 4,
    b"\r\n\r\n": 1,
    b"Content-Length: -1\r\n\r\n": 17,
    b"Content-Length: 1 \r\n\r\n": 18,
    b"Content-Length:2\r\n\r\n{}": 16,
    b"Content-Length: \r\n": 18,
    b"Content-Length: 2\n\n{}": 18,
    b"Content-Length: 2\r\r": 19,
    b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n": 38,
    b"Content-Length: 2\r\nHost: a\r\n\r\n{}": 20,
    b"Content-Type: x\r\n\r\n": 19,
    b"Content-Type: \x1b[2J\r\n": 15,
    b"Content-Length: " + b"9" * 5000: 25,
    b"Content-Length: %d\r\n\r\n" % (MOST + 1): 28,
    b"Content-Type: " + b"x" * 2000: HEAD_MOST + 1,
}


@pytest.mark.parametrize("bad", WRONG, ids=range(len(WRONG)))
def test_what_is_no_message_is_refused_at_its_first_wrong_byte(bad: bytes) -> None:
    unframer = Unframer()
    assert unframer.feed(bad[: WRONG[bad] - 1]) == []
    with pytest.raises(FramingError):
        unframer.feed(bad[WRONG[bad] - 1 : WRONG[bad]])
    with pytest.raises(FramingError):
        Unframer().feed(bad)
    with pytest.raises(FramingError):
        Unframer().feed(b"Content-Length: 2\r\n\r\n{}" + bad)


def test_a_long_head_is_refused_also_when_it_is_complete() -> None:
    with pytest.raises(FramingError):
        Unframer().feed(b"Content-Type: " + b"x" * 2000 + b"\r\nContent-Length: 2\r\n\r\n{}")


def test_the_longest_message_is_said() -> None:
    unframer = Unframer(2)
    assert unframer.feed(frame(b"{}")) == [b"{}"]
    with pytest.raises(FramingError):
        unframer.feed(frame(b"{ }"))
