"""Messages between the notebook and the debug servers of ranks, and the framing of the Debug Adapter Protocol.

A frontend and a rank's debug server exchange messages of this protocol, one of JSON in each :class:`DebugMessage`. They travel over the
connection that the rank has anyway: no port listens for them. Only between a rank and its own debugpy are they framed in a
stream of bytes.
"""

from __future__ import annotations

import re

import msgspec

from hvdlab.kernel_ext.wire.channel import Payload

DEBUG = "hvdlab.pool.debug"
"""Topic of this mail, in both directions."""


class OpenDebug(Payload, frozen=True):
    """Notebook to rank: start the debug server, if it is not there, for a session of this number."""

    session: int


class DebugOpened(Payload, frozen=True):
    """Rank to notebook: the debug server takes messages; or, with an ``error``, it does not."""

    session: int
    error: str = ""


class DebugMessage(Payload, frozen=True):
    """One message of the Debug Adapter Protocol, as JSON."""

    session: int
    message: bytes


class CloseDebug(Payload, frozen=True):
    """Notebook to rank: the session has ended, and stopped threads go on."""

    session: int


ToServer = OpenDebug | DebugMessage | CloseDebug
FromServer = DebugOpened | DebugMessage

decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_from_server = msgspec.msgpack.Decoder(FromServer).decode

MOST = 64 << 20
"""Bytes of the longest message that is accepted."""

HEAD_MOST = 1 << 10
"""Bytes of the longest head that is accepted."""

_END = b"\r\n\r\n"
# Eight digits are enough for MOST, and few enough for int().
_LENGTH = re.compile(rb"^content-length: ([0-9]{1,8})\r$", re.IGNORECASE | re.MULTILINE)


class FramingError(Exception):
    """Bytes that are no message of the protocol."""


def frame(message: bytes) -> bytes:
    """Return the message with its header."""
    return b"Content-Length: %d\r\n\r\n%b" % (len(message), message)


class Unframer:
    """Parser that finds the messages in the bytes of a socket."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        #: Bytes of the message whose head was complete and has left the buffer; None before a head is complete.
        self._length: int | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete with this data.

        Raises:
            FramingError: The bytes are no message, or one that is too long.
        """
        self._buffer += data
        found: list[bytes] = []
        while True:
            if self._length is None:
                self._length = self._take_head()
            if self._length is None or len(self._buffer) < self._length:
                return found
            found.append(bytes(self._buffer[: self._length]))
            del self._buffer[: self._length]
            self._length = None

    def _take_head(self) -> int | None:
        """Return the length that a complete head names, and remove the head from the buffer; None before that."""
        place = self._buffer.find(_END, 0, HEAD_MOST)
        if place < 0:
            if len(self._buffer) >= HEAD_MOST:
                raise FramingError("no header")
            return None
        head = bytes(self._buffer[: place + 2])
        named = _LENGTH.search(head)
        if named is None:
            raise FramingError("no Content-Length")
        length = int(named[1])
        if length > MOST:
            raise FramingError(f"a message of {length} bytes")
        del self._buffer[: place + len(_END)]
        return length
