"""Each direction of the protocol accepts its own messages and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol import codec
from hvdlab.collectives.protocol import messages as m

Decode = Callable[[bytes], object]
DECODERS: list[tuple[Decode, object]] = [
    (codec.decode_from_rank, m.FromRank),
    (codec.decode_from_client, m.FromClient),
    (codec.decode_to_peer, m.ToPeer),
]


def payload(message: m.Message) -> bytes:
    return codec.encode(message)[4:]


@pytest.mark.parametrize(("decode", "union"), DECODERS)
def test_every_message_of_a_direction_survives(decode: Decode, union: object) -> None:
    for kind in get_args(union):
        example = msgspec.convert(_example(kind), kind)
        assert decode(payload(example)) == example


def _example(kind: type) -> list[object]:
    """Return the shortest array that is a message of this kind."""
    fields = msgspec.structs.fields(kind)
    values: list[object] = [kind.__name__]
    for field in fields:
        if not field.required:
            break
        values.append(_value(field.type))
    return values


def _value(type: object) -> object:
    if type is m.AbortedCollective:
        return [0, "x", [0], [1]]
    samples: dict[object, object] = {int: 1, str: "x", bytes: b"x", float: 0.5, bool: True}
    if type in samples:
        return samples[type]
    return {} if "dict" in str(type) else []


def test_messages_of_another_direction_are_refused() -> None:
    with pytest.raises(ProtocolError):
        codec.decode_from_rank(payload(m.Expect((0,))))
    with pytest.raises(ProtocolError):
        codec.decode_from_client(payload(m.Announce(0, 1, (0,))))
    with pytest.raises(ProtocolError):
        codec.decode_to_peer(payload(m.CellBegin("1")))
    with pytest.raises(ProtocolError):
        codec.decode_hello(payload(m.Ping(1)))


@given(data=st.binary(min_size=1, max_size=100))
@example(data=b"\xdd\0\0\0\1\xa7\0\0\0\0\0\0\x80")  # a tag that is no UTF-8
@example(data=b"\x91" * 100_000)  # nested without end
@pytest.mark.parametrize("decode", [codec.decode_hello, *(decode for decode, _ in DECODERS)])
def test_garbage_is_a_protocol_error(decode: Decode, data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert isinstance(message, m.Message)


def test_a_shorter_message_of_an_older_peer_takes_defaults() -> None:
    old = msgspec.msgpack.encode(["Pong", 7])
    assert codec.decode_to_peer(old) == m.Pong(7, 0)


def test_halves_of_surrogate_pairs_are_sent_as_their_escapes() -> None:
    # A name of the user's, and of a file: an error would end the control thread of the rank that sends it.
    mail = m.Mail("loss\ud800", 1, b"\xff\x00")
    assert codec.decode_to_peer(payload(mail)) == m.Mail("loss\\ud800", 1, b"\xff\x00")
    signature = m.Abort(0, 1, "raised", (1,), "a\udc80", "f\udc80.py:3")
    decoded = codec.decode_to_peer(payload(signature))
    assert isinstance(decoded, m.Abort)
    assert (decoded.text, decoded.site, decoded.ranks) == ("a\\udc80", "f\\udc80.py:3", (1,))
