"""The wire format: messages to frames, and frames to messages of the expected direction. No I/O.

A frame is a length (unsigned, 32 bits, little endian) and that many bytes of payload, a message in MessagePack. A peer that has not
introduced itself may send small frames only, so that a stranger can't make the coordinator hold much memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.messages import FromClient, FromRank, Hello, Message, ToPeer

HELLO_LIMIT = 64 * 1024
"""Largest payload before Hello was accepted, in bytes: the memory that one stranger can occupy."""
FRAME_LIMIT = 256 * 1024 * 1024
"""Largest payload afterwards, in bytes. It bounds the memory that a faulty length costs, and exceeds all real messages."""

_LENGTH = struct.Struct("<I")
_pack_length = _LENGTH.pack
_unpack_length = _LENGTH.unpack_from


def encode_frame(payload: bytes) -> bytes:
    """Return the frame that carries ``payload``.

    Raises:
        ProtocolError: The payload is empty or above :data:`FRAME_LIMIT`.
    """
    if not 0 < len(payload) <= FRAME_LIMIT:
        raise ProtocolError(
            f"a message of {len(payload)} bytes can't be sent; the limit is {FRAME_LIMIT} bytes"
        )
    return _pack_length(len(payload)) + payload


class FrameDecoder:
    """Decoder of a stream of bytes, cut anywhere, into payloads.

    Args:
        limit: Largest payload that is accepted, in bytes; can be assigned later.
    """

    __slots__ = ("_have", "_need", "_parts", "limit")

    def __init__(self, limit: int = FRAME_LIMIT) -> None:
        self.limit = limit
        # Pieces of an unfinished frame are joined once, when it is complete, so that a large frame costs one copy.
        self._parts: list[bytes] = []
        #: Bytes of these pieces, and bytes of the whole frame; of its length only, as long as that is not complete.
        self._have = 0
        self._need = 0

    @property
    def unfinished(self) -> int:
        """Return the bytes received of a frame that is not complete yet."""
        return self._have

    def feed(self, data: bytes) -> list[memoryview]:
        """Add the next bytes and return the payloads that are complete now, in order.

        Raises:
            ProtocolError: A frame is empty or above the limit. The decoder can't go on then.
        """
        if self._parts:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return []
            data = b"".join(self._parts)
            self._parts.clear()
            self._have = 0
        frames: list[memoryview] = []
        view = memoryview(data)
        start, end, need = 0, len(data), 4
        # Frames that are complete are handed out as views: a read with many small ones copies nothing.
        while end - start >= 4:
            (length,) = _unpack_length(data, start)
            if not 0 < length <= self.limit:
                raise ProtocolError(
                    f"a frame announces {length} bytes; between 1 and {self.limit} are allowed"
                )
            stop = start + 4 + length
            if stop > end:
                need = 4 + length
                break
            frames.append(view[start + 4 : stop])
            start = stop
        if start < end:
            # A copy of the rest: a view would keep the whole buffer of the read alive for some bytes of a frame.
            self._parts.append(data[start:])
            self._have, self._need = end - start, need
        return frames


Payload = bytes | memoryview
MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding: those for strings that are no UTF-8, and for nesting without end, are Python's own."""


def pack(message: msgspec.Struct) -> bytes:
    r"""Return a message in MessagePack. A half of a surrogate pair, which UTF-8 can't express, is sent as its escape, such as ``\ud800``."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        # Names are the user's, and names of files need not be UTF-8. An error here, on the control thread, would end the rank.
        return _encoder.encode(_escaped(msgspec.to_builtins(message, builtin_types=_BYTES)))


_BYTES = (bytes, bytearray, memoryview)


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value


def encode(message: Message) -> bytes:
    """Return the whole frame of a message. Raises ``ProtocolError`` if it, or a number in it, is too large, or of a type that can't be sent."""
    try:
        payload = pack(message)
    except (OverflowError, TypeError) as error:
        raise ProtocolError(f"a {type(message).__name__} can't be sent: {error}") from error
    return encode_frame(payload)


class MessageDecoder(Generic[MessageT]):
    """Decoder of the messages that one side of a connection may send.

    Args:
        messages: The union of their classes.
        refusal: Beginning of the error text for all other payloads.
    """

    def __init__(self, messages: object, refusal: str) -> None:
        # The union is the check: a message that this side may not send has no tag in it.
        self._decode: Callable[[Payload], MessageT] = msgspec.msgpack.Decoder(
            cast("type[MessageT]", messages)
        ).decode
        self._refusal = refusal

    def decode(self, payload: Payload) -> MessageT:
        """Return the message. Raises ``ProtocolError`` if the sender may not send it, or it is malformed."""
        try:
            return self._decode(payload)
        except MALFORMED as error:
            raise ProtocolError(f"{self._refusal}: {error}") from error


decode_hello = MessageDecoder[Hello](Hello, "no Hello").decode
"""Return the first message of a connection. Raises ``ProtocolError`` for anything but ``Hello``."""
decode_from_rank = MessageDecoder[FromRank](FromRank, "no message of a rank").decode
decode_from_client = MessageDecoder[FromClient](FromClient, "no message of a client").decode
decode_to_peer = MessageDecoder[ToPeer](ToPeer, "no message of the coordinator").decode
