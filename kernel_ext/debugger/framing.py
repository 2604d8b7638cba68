"""Messages of the Debug Adapter Protocol in a stream of bytes."""

from __future__ import annotations

import re

MOST = 64 << 20
"""Bytes of the longest message that is taken."""

HEAD_MOST = 1 << 10
"""Bytes of the longest head that is taken."""

_LENGTH, _TYPE = b"content-length: ", b"content-type: "
_END = b"\r\n"
# Eight digits are enough for MOST, and few enough for int().
_VALUES = {_LENGTH: re.compile(rb"[0-9]{1,8}"), _TYPE: re.compile(rb"[ -~]+")}


class FramingError(Exception):
    """This is no message of the protocol."""


def frame(message: bytes) -> bytes:
    """The message with its header."""
    return b"Content-Length: %d\r\n\r\n%b" % (len(message), message)


class Unframer:
    """Finds the messages in the bytes of a socket, and refuses anything else at the first byte that is wrong.

    A head consists of one ``Content-Length: N`` line and at most one ``Content-Type`` line. A request of HTTP, which a web
    page can have its browser send to any port, begins with other bytes whatever the page does.

    Args:
        most: Bytes of the longest message that is taken. May be changed between messages.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._buffer = bytearray()
        #: Bytes of the message whose head was complete and has left the buffer; None before a head is complete.
        self._length: int | None = None

    @property
    def pending(self) -> int:
        """Bytes that were fed and belong to no complete message yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete with this data.

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
        """The length that the head says, once it is complete; the head leaves the buffer."""
        head, blank, _ = bytes(self._buffer[: HEAD_MOST + 1]).partition(_END + _END)
        lines = (head if not blank else head + _END).split(_END)
        values: dict[bytes, bytes] = {}
        for line in lines[:-1]:
            name = next((one for one in _VALUES if line[: len(one)].lower() == one), b"")
            if not name or name in values or not _VALUES[name].fullmatch(line[len(name) :]):
                raise FramingError("no header")
            values[name] = line[len(name) :]
        if not blank:
            blank_begins = values and lines[-1] == b"\r"
            if len(self._buffer) > HEAD_MOST or not (blank_begins or _may_become_line(lines[-1])):
                raise FramingError("no header")
            return None
        if _LENGTH not in values:
            raise FramingError("no Content-Length")
        length = int(values[_LENGTH])
        if length > self.most:
            raise FramingError(f"a message of {length} bytes")
        del self._buffer[: len(head) + len(blank)]
        return length


def _may_become_line(begun: bytes) -> bool:
    """Whether a line of a head can begin with this."""
    for name, value in _VALUES.items():
        if begun[: len(name)].lower() == name[: len(begun)]:
            rest = begun[len(name) :].removesuffix(b"\r")
            return not rest or value.fullmatch(rest) is not None
    return False
