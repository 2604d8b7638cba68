"""Messages of the Debug Adapter Protocol in a stream of bytes."""

from __future__ import annotations

MOST = 64 << 20
"""Bytes of the longest message that is taken."""

_HEAD_MOST = 1 << 10


class FramingError(Exception):
    """This is no message of the protocol."""


def frame(message: bytes) -> bytes:
    """The message with its header."""
    return b"Content-Length: %d\r\n\r\n%b" % (len(message), message)


class Unframer:
    """Finds the messages in what a socket gives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete with this data.

        Raises:
            FramingError: What came is no message, or one that is too long.
        """
        self._buffer += data
        found: list[bytes] = []
        while True:
            head = self._buffer.find(b"\r\n\r\n")
            if head < 0:
                if len(self._buffer) > _HEAD_MOST:
                    raise FramingError("no header")
                return found
            end = head + 4 + _length(bytes(self._buffer[:head]))
            if len(self._buffer) < end:
                return found
            found.append(bytes(self._buffer[head + 4 : end]))
            del self._buffer[:end]


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            length = int(value)
            if length > MOST:
                raise FramingError(f"a message of {length} bytes")
            return length
    raise FramingError("no Content-Length")
