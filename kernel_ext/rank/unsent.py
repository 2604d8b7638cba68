"""What a rank has written and nobody may have got yet, in memory that outlives it.

Output leaves a rank in batches, and mail may still be on its way when the rank is killed. So all that it writes in a
cell is copied first, for the price of a few bytes in memory, into an area that the process which forked it has, too:
after its end that process reads there what the pool has not received (:func:`read`).

The area is a ring. It holds UTF-8, in which the bytes from 0xFC on never occur: they say what follows. A number in the
header counts all bytes, and another tells how far that is from the count of the cell's output, so that an ordinary
write is one copy and one number.
"""

from __future__ import annotations

import base64
import mmap
import os
import re
from typing import Final, Self

import msgspec

from hvdlab.kernel_ext.messages.cells import Chunk, Clear, Display, Left, Stream

HEADER = 4096
SLACK = 1 << 20
"""Bytes that the ring has beyond what may be on its way at most: marks, and the beginning of what was overwritten."""
LARGEST = (8 << 20) + SLACK
"""Bytes of the ring at most. The system gives them as they are needed."""
KEPT = 1 << 20
"""What a cell has used beyond this is given back when the next one begins."""
MARK_EVERY = 64 << 10
"""Bytes after which it is said again which stream they are of, for who finds the beginning overwritten."""
LARGEST_DISPLAY = 64 << 10
"""Larger ones are counted but not kept."""

_MOST = 1 << 56
_HEAD, _AHEAD, _TAKEN, _CAPACITY, _NAME = range(5)
_CELL_AT = 64
_LONGEST_NAME = 255
_MARKS = {"stdout": b"\xfe", "stderr": b"\xff"}
_STREAMS = {0xFE: "stdout", 0xFF: "stderr"}
_DISPLAY: Final = 0xFD
_END: Final = 0xFC
_PARTS = re.compile(rb"([\xfd-\xff])([^\xfc-\xff]*)")

_encode = msgspec.msgpack.Encoder().encode
_decode: msgspec.msgpack.Decoder[Display | Clear] = msgspec.msgpack.Decoder(Display | Clear)


def make_area() -> int:
    """A descriptor of a new area, close-on-exec; -1 if the system has none to give.

    Raises:
        OSError: Too many files are open.
    """
    area = os.memfd_create("hvdlab-unsent", os.MFD_CLOEXEC)
    try:
        os.ftruncate(area, HEADER + LARGEST)
    except OSError:  # a limit on the size of files
        os.close(area)
        return -1
    return area


class Unsent:
    """The rank's side. Whoever calls holds a lock around each call.

    Args:
        area: From :func:`make_area`. It must stay open: a successor of the process that reads finds it by its number.
    """

    def __init__(self, area: int) -> None:
        self._map = mmap.mmap(area, HEADER + LARGEST)
        self._numbers = memoryview(self._map)[:HEADER].cast("q")
        self._stream = ""
        self._capacity = LARGEST
        # Where in the map the byte of a number is, and up to where nothing but text need be thought of.
        self._shift = HEADER
        self._stop = 0

    @classmethod
    def make(cls) -> Self:
        """With an area of its own. Raises ``OSError``."""
        area = make_area()
        try:
            return cls(area)
        finally:
            os.close(area)

    def begin(self, cell: str, window: int) -> None:
        """Forget everything; what follows is of this cell, of which ``window`` bytes may be on their way at most."""
        numbers = self._numbers
        numbers[_NAME] = 0
        if numbers[_HEAD] > KEPT:
            self._map.madvise(mmap.MADV_REMOVE, HEADER, LARGEST)
        self._capacity = numbers[_CAPACITY] = min(LARGEST, window + SLACK)
        numbers[_HEAD] = numbers[_AHEAD] = numbers[_TAKEN] = 0
        self._stream, self._shift, self._stop = "", HEADER, 0
        name = cell.encode()[:_LONGEST_NAME]
        self._map[_CELL_AT : _CELL_AT + len(name)] = name
        numbers[_NAME] = len(name)

    def write(self, stream: str, text: str) -> None:
        """Text that can be encoded."""
        raw = text.encode()
        numbers = self._numbers
        head = numbers[_HEAD]
        at = head + self._shift
        end = at + len(raw)
        if end > self._stop or stream != self._stream:
            self._put(_MARKS.get(stream, _MARKS["stdout"]), counts=0)
            self._put(raw, counts=len(raw))
            self._look_ahead(stream)
        else:
            self._map[at:end] = raw
            numbers[_HEAD] = head + len(raw)

    def show(self, chunk: Display | Clear, size: int) -> None:
        """A display or a clear, which counts for ``size`` bytes."""
        body = _encode(chunk) if size <= LARGEST_DISPLAY else b""
        raw = b"\xfd%d;%s\xfc" % (size, base64.b64encode(body))
        self._stream = ""
        self._put(raw, counts=size)

    def taken(self, taken: int) -> None:
        """The pool has this much of the cell's output."""
        self._numbers[_TAKEN] = taken

    def reach(self, total: int) -> None:
        """So many bytes of output were counted until now. An interrupt may have led the count here astray."""
        self._numbers[_AHEAD] = self._numbers[_HEAD] - total

    def close(self) -> None:
        """Nobody is to read anything here."""
        self._numbers[_NAME] = 0
        self._numbers.release()
        self._map.close()

    def _look_ahead(self, stream: str) -> None:
        self._stream = stream
        head = self._numbers[_HEAD]
        at = HEADER + head % self._capacity
        self._shift = at - head
        self._stop = min(at + MARK_EVERY, HEADER + self._capacity)

    def _put(self, raw: bytes, counts: int) -> None:
        head = self._numbers[_HEAD]
        at, end = HEADER + head % self._capacity, HEADER + self._capacity
        first = raw[: end - at]
        self._map[at : at + len(first)] = first
        if rest := raw[len(first) :]:
            self._map[HEADER : HEADER + len(rest)] = rest
        self._numbers[_AHEAD] += len(raw) - counts
        self._numbers[_HEAD] = head + len(raw)


def read(area: int) -> Left | None:
    """What a process that has ended left there, after what it knew to be taken; ``None`` if it had begun no cell."""
    with mmap.mmap(area, HEADER + LARGEST, prot=mmap.PROT_READ) as found:
        with memoryview(found)[:HEADER] as header, header.cast("q") as numbers:
            head, ahead, taken, capacity, length = numbers[: _NAME + 1].tolist()
        sound = 0 < length <= _LONGEST_NAME and 0 < capacity <= LARGEST and 0 <= head - ahead <= _MOST
        if not sound or not 0 <= head <= _MOST:
            return None
        cell = found[_CELL_AT : _CELL_AT + length].decode("utf-8", "replace")
        if head <= capacity:
            raw = found[HEADER : HEADER + head]
        else:
            at = HEADER + head % capacity
            raw = found[at : HEADER + capacity] + found[HEADER:at]
    parts = [_part(kind[0], body) for kind, body in _PARTS.findall(raw)]
    chunks, sizes = tuple(chunk for chunk, _ in parts), tuple(size for _, size in parts)
    return Left(cell, head - ahead - sum(sizes), chunks, sizes).after(taken)


def _part(kind: int, body: bytes) -> tuple[Chunk | None, int]:
    if kind != _DISPLAY:
        return Stream(_STREAMS[kind], body.decode("utf-8", "replace")), len(body)
    size, _, encoded = body.partition(b";")
    try:
        raw = base64.b64decode(encoded)
        return (_decode.decode(raw) if raw else None), min(int(size), _MOST)
    except (ValueError, msgspec.MsgspecError):  # what crashes may write anywhere before it does
        return None, 0
