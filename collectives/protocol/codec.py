"""Messages to frames, and payloads to messages of the expected direction."""

from __future__ import annotations

from typing import cast

import msgspec

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.frames import encode_frame
from hvdlab.collectives.protocol.messages import FromClient, FromRank, Hello, Message, ToPeer

_encoder = msgspec.msgpack.Encoder()
_hello = msgspec.msgpack.Decoder(Hello)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(cast("type[FromRank]", FromRank))
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(
    cast("type[FromClient]", FromClient)
)
_to_peer: msgspec.msgpack.Decoder[ToPeer] = msgspec.msgpack.Decoder(cast("type[ToPeer]", ToPeer))

Payload = bytes | memoryview

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises: for strings that are no UTF-8, and for nesting without end, these are exceptions of Python's own."""


def encode(message: Message) -> bytes:
    """The whole frame of a message. Raises ``ProtocolError`` if it, or a number in it, is too large to send."""
    try:
        payload = _encoder.encode(message)
    except OverflowError as error:
        raise ProtocolError(f"a {type(message).__name__} can't be sent: {error}") from error
    return encode_frame(payload)


def decode_hello(payload: Payload) -> Hello:
    """The first message of a connection. Raises ``ProtocolError`` if it is anything else."""
    try:
        return _hello.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"no Hello: {error}") from error


def decode_from_rank(payload: Payload) -> FromRank:
    """A message that a rank sent. Raises ``ProtocolError`` if ranks may not send it or it is malformed."""
    try:
        return _from_rank.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a rank: {error}") from error


def decode_from_client(payload: Payload) -> FromClient:
    """A message that a client sent. Raises ``ProtocolError`` if clients may not send it or it is malformed."""
    try:
        return _from_client.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a client: {error}") from error


def decode_to_peer(payload: Payload) -> ToPeer:
    """A message that the coordinator sent. Raises ``ProtocolError`` if it is malformed."""
    try:
        return _to_peer.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"no message of the coordinator: {error}") from error
