"""Messages of the Debug Adapter Protocol in a stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.kernel_ext.debugger.framing import MOST, FramingError, Unframer, frame


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
    "bad",
    [
        b"x" * 2000,
        b"Content-Length: -1\r\n\r\n",
        b"Hello: 3\r\n\r\n",
        b"Content-Length: %d\r\n\r\n" % (MOST + 1),
    ],
)
def test_what_is_no_message_is_refused(bad: bytes) -> None:
    with pytest.raises(FramingError):
        Unframer().feed(bad)
