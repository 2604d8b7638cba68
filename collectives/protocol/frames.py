"""Frames: a length (unsigned, 32 bits, little endian) and that many bytes of payload. No I/O here.

A peer that has not introduced itself may send small frames only, so that a stranger can't make the coordinator
hold much memory.
"""

from __future__ import annotations

import struct

from hvdlab.collectives.errors import ProtocolError

HELLO_LIMIT = 64 * 1024
"""Largest payload before Hello was accepted, in bytes."""
FRAME_LIMIT = 256 * 1024 * 1024
"""Largest payload afterwards, in bytes."""

_LENGTH = struct.Struct("<I")
_pack_length = _LENGTH.pack
_unpack_length = _LENGTH.unpack_from


def encode_frame(payload: bytes) -> bytes:
    """The frame that carries ``payload``.

    Raises:
        ProtocolError: The payload is empty or above :data:`FRAME_LIMIT`.
    """
    if not 0 < len(payload) <= FRAME_LIMIT:
        raise ProtocolError(
            f"a message of {len(payload)} bytes can't be sent; the limit is {FRAME_LIMIT} bytes"
        )
    return _pack_length(len(payload)) + payload


class FrameDecoder:
    """Turns a stream of bytes, cut anywhere, into payloads.

    Args:
        limit: Largest payload that is accepted, in bytes; may be assigned later.
    """

    __slots__ = ("_have", "_need", "_parts", "limit")

    def __init__(self, limit: int = FRAME_LIMIT) -> None:
        self.limit = limit
        # Pieces of an unfinished frame are joined once, when it is complete, so that a large frame costs one copy.
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 0

    @property
    def unfinished(self) -> int:
        """Bytes held of a frame that is not complete yet."""
        return self._have

    def feed(self, data: bytes) -> list[memoryview]:
        """Take the next bytes and return the payloads that are complete now, in order.

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
            self._parts.append(data[start:])
            self._have, self._need = end - start, need
        return frames
