"""Output of a rank that the pool may not have got yet, in memory that outlives the rank.

Output leaves a rank in batches, and mail may still be on its way when the rank is killed. So all that the rank writes in
a cell is copied first, for the price of a few bytes in memory, into an area that the process which forked it has, too:
after the rank's end that process reads there the bytes that the pool has not received (:func:`read`).

The area is a ring. It holds UTF-8, in which the bytes from 0xFA on never occur: they mark what follows. A number in the
header counts all bytes, and another says how far that is from the count of the cell's output, so that an ordinary
write is one copy and one number.

The window bounds the count of a cell's output that the pool has not got, so that count covers the bytes in the ring: a mark where
the stream changes counts as a byte of output, and a display counts as no fewer bytes than its record has. The methods that
write return the bytes for which they counted. Only marks that repeat the last one are in no count; they are few.

Bytes from a pipe (descriptors 1 and 2) are not even in this process's own memory before they are in the area: the
system moves them from the pipe to the end of the area's file, whose size says how much that is. So there is no moment in
which a rank that is killed has taken bytes out of the pipe and left them nowhere.

Other numbers of the header have to change together with the count of all bytes, although a kill may come between any
two stores. They are there twice: the second copies are written first, and are valid once the count has reached a value
that stands beside them. So the one store of the count changes all of them.
"""

from __future__ import annotations

import base64
import mmap
import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from hvdlab.kernel_ext.wire.cells import Chunk, Clear, CrashOutput, Display, Stream

HEADER = 4096
SLACK = 1 << 20
"""Bytes that the ring has beyond the window: for repeated marks, for text whose mark is overwritten, for the last display, and for
pipes, whose bytes may become longer as text."""
LARGEST = (8 << 20) + SLACK
"""Bytes of the ring at most. The system gives them as they are needed."""
KEPT = 1 << 20
"""If a cell has used more bytes than this, the memory is given back to the system when the next cell begins."""
MARK_EVERY = 64 << 10
"""Bytes from a stream's mark on within which texts need no mark of their own. Their mark must not be overwritten before them."""
LARGEST_DISPLAY = 64 << 10
"""Bytes of a display, encoded; larger ones are counted but not kept."""

_MOST = 1 << 56
_NEVER = 1 << 62
_LANDING = HEADER + LARGEST
"""Where in the area's file the bytes lie that came from a pipe and may not be in the ring yet."""

# Numbers of the header: all bytes in the ring; what the pool has taken; the ring's size; the length of the cell's name;
# which stream landed last; and from which count of all bytes on the second copies of the following are valid.
_HEAD, _TAKEN, _CAPACITY, _NAME, _LANDED_STREAM, _NEXT_AT = range(6)
_NOW, _NEXT = 6, 10
"""Where the two copies of these begin: by how much the count of all bytes is ahead of the output's, how many of the landed
bytes are in the ring, and the beginning of a character that the pipe of stdout, and that of stderr, gave last."""
_AHEAD, _LANDED, _CUT_OUT, _CUT_ERR = range(4)
_NUMBERS = _NEXT + 4
_CUTS = {"stdout": _CUT_OUT, "stderr": _CUT_ERR}
_CELL_AT = 128
_LONGEST_NAME = 255
_MARKS = {"stdout": b"\xfe", "stderr": b"\xff"}
"""Marks where the stream changes; each counts as one byte of output."""
_REPEATED = {"stdout": b"\xfa", "stderr": b"\xfb"}
"""Marks of the stream that goes on; they count as nothing."""
_STREAMS = {mark[0]: stream for marks in (_MARKS, _REPEATED) for stream, mark in marks.items()}
_COUNTED = frozenset(mark[0] for mark in _MARKS.values())
_DISPLAY: Final = 0xFD
_DISPLAY_FRAME: Final = 3 + 20
"""Bytes of a display's record beside its body, at most: three marks and a number."""
_PARTS = re.compile(rb"([\xfa\xfb\xfd-\xff])([^\xfa-\xff]*)")

_encode = msgspec.msgpack.Encoder().encode
_decode: msgspec.msgpack.Decoder[Display | Clear] = msgspec.msgpack.Decoder(Display | Clear)


def make_area() -> int:
    """Return a descriptor of a new area, close-on-exec; -1 if the system allows none of this size.

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


class CrashRing:
    """The rank's side. The caller holds a lock around each call.

    Args:
        area: Descriptor from :func:`make_area`. It must stay open: what lands goes there, and a successor of the fork
            server finds it by its number.
    """

    def __init__(self, area: int) -> None:
        self._area = area
        self._map = mmap.mmap(area, _LANDING)
        self._numbers = memoryview(self._map)[:HEADER].cast("q")
        # A new area has zeros, by which the second copies would be valid from the beginning.
        self._numbers[_NEXT_AT] = _NEVER
        self._stream = ""
        self._capacity = LARGEST
        # Add _shift to a count of bytes for its place in the map; up to _stop a write needs no mark and no wrap-around.
        self._shift = HEADER
        self._stop = 0

    def begin(self, cell: str, window: int) -> None:
        """Forget everything, and begin with this cell, of which at most ``window`` bytes are on their way at a time."""
        numbers = self._numbers
        self._stream = ""  # first: with the count of all bytes at zero, the next text's place is another
        numbers[_NAME] = 0
        if numbers[_HEAD] > KEPT:
            self._map.madvise(mmap.MADV_REMOVE, HEADER, LARGEST)
        self._capacity = numbers[_CAPACITY] = min(LARGEST, window + SLACK)
        numbers[_HEAD] = numbers[_TAKEN] = 0
        numbers[_NOW + _AHEAD] = 0
        self._shift, self._stop = HEADER, 0
        # The name's length last: until then there is no cell to read here, and a reader never finds a name with another's bytes.
        name = cell.encode()[:_LONGEST_NAME]
        self._map[_CELL_AT : _CELL_AT + len(name)] = name
        numbers[_NAME] = len(name)

    def write(self, stream: str, text: str) -> int:
        """Keep text of a stream. Returns the bytes of output for which it counts: its own, and one if the stream changes.

        Args:
            stream: ``stdout`` or ``stderr``.
            text: No longer than the ring, and encodable as UTF-8.
        """
        raw = text.encode()
        numbers = self._numbers
        head = numbers[_HEAD]
        at = head + self._shift
        end = at + len(raw)
        if end > self._stop or stream != self._stream:
            return self._put_marked(stream, raw)
        self._map[at:end] = raw
        # After the copy: a rank that is killed between the two has written nothing, instead of bytes of an older text.
        numbers[_HEAD] = head + len(raw)
        return len(raw)

    def splice_in(self, stream: str, pipe: int, limit: int) -> bytes:
        """Take bytes out of a stream's pipe into the area, from which :meth:`append_spliced` takes them.

        Bytes that were spliced in before and not appended (an interrupt came between) are returned first.

        Args:
            limit: Bytes to take at most; those that are left from before can be more.

        Raises:
            BlockingIOError: The pipe is empty.
            OSError: The system can't, or has no room for them; they are still in the pipe.
        """
        numbers = self._numbers
        landed = os.fstat(self._area).st_size - _LANDING
        known = numbers[_NOW + _LANDED]
        if landed <= known:
            if landed:
                # The file before the number: after a kill between the two, no byte may count as unread again.
                os.ftruncate(self._area, _LANDING)
            numbers[_NOW + _LANDED] = known = 0
            # Before the splice: whenever bytes have landed, the area already names their stream.
            numbers[_LANDED_STREAM] = _CUTS[stream]
            landed = os.splice(pipe, self._area, limit, offset_dst=_LANDING, flags=os.SPLICE_F_NONBLOCK)
        elif numbers[_LANDED_STREAM] != _CUTS[stream]:
            raise BlockingIOError  # the bytes of the other stream come first
        return os.pread(self._area, landed - known, _LANDING + known)

    def append_spliced(self, stream: str, text: str, size: int, cut: bytes) -> int:
        """Put the ``size`` bytes that :meth:`splice_in` returned last, which are this text of its stream, into the ring.

        Args:
            cut: The beginning of a character in which the bytes end, if they do: it is not in the text.

        Returns the bytes of output for which the text counts, as :meth:`write` does.
        """
        numbers, raw = self._numbers, text.encode()
        packed = int.from_bytes(cut, "little") << 8 | len(cut)
        also = {_LANDED: numbers[_NOW + _LANDED] + size, _CUTS[stream]: packed}
        if raw and (stream != self._stream or numbers[_HEAD] + self._shift + len(raw) > self._stop):
            return self._put_marked(stream, raw, also)
        self._put(raw, 0, also)
        return len(raw)

    def append_display(self, chunk: Display | Clear, size: int) -> int:
        """Keep a display or a clear; of one that is too large, only its size.

        Args:
            chunk: The display or clear.
            size: Bytes of output for which it counts at least; an estimate, which need not include data that are not text.

        Returns the bytes of output for which it counts: no fewer than its record has.
        """
        encoded = _encode(chunk) if size <= LARGEST_DISPLAY else b""
        # In base64, as the bytes of MessagePack could be mistaken for marks.
        body = base64.b64encode(encoded) if len(encoded) <= LARGEST_DISPLAY else b""
        size = max(size, len(encoded), len(body) + _DISPLAY_FRAME)
        raw = b"\xfd%d;%s\xfc" % (size, body)
        self._stream = ""
        self._put(raw, len(raw) - size)
        return size

    def acknowledge(self, taken: int) -> None:
        """Store that the pool has this much of the cell's output."""
        self._numbers[_TAKEN] = taken

    def set_total(self, total: int) -> None:
        """Set the bytes of the cell's output so far. A KeyboardInterrupt between a copy and its count can leave the count here wrong."""
        self._numbers[_NOW + _AHEAD] = self._numbers[_HEAD] - total

    def close(self) -> None:
        """Leave nothing to read here: the cell's name is taken out."""
        # First: a reader that comes later finds no cell, and prints nothing that the pool has had.
        self._numbers[_NAME] = 0
        self._numbers.release()
        self._map.close()

    def _put_marked(self, stream: str, text: bytes, also: Mapping[int, int] | None = None) -> int:
        """Put a stream's mark and its text into the ring. Returns the bytes of output for which they count."""
        repeated = stream == self._stream
        raw = (_REPEATED if repeated else _MARKS)[stream] + text
        # First, and set again last: whatever an interrupt leaves undone here, the next text has a mark of its own.
        self._stream = ""
        self._put(raw, int(repeated), also)
        head = self._numbers[_HEAD]
        at = HEADER + head % self._capacity
        self._shift = at - head
        self._stop = min(at - len(raw) + MARK_EVERY, HEADER + self._capacity)
        self._stream = stream
        return len(raw) - repeated

    def _put(self, raw: bytes, uncounted: int, also: Mapping[int, int] | None = None) -> None:
        """Put bytes into the ring, of which ``uncounted`` are no output; below zero if they count for more than they are.

        ``also`` has numbers of the header, and their new values, that change in the same instant.
        """
        numbers = self._numbers
        head = numbers[_HEAD]
        at, end = HEADER + head % self._capacity, HEADER + self._capacity
        first = raw[: end - at]
        self._map[at : at + len(first)] = first
        if rest := raw[len(first) :]:
            self._map[HEADER : HEADER + len(rest)] = rest
        ahead = numbers[_NOW + _AHEAD] + uncounted
        # First, since an interrupt may have cut an earlier call short here: the second copies must not be valid while
        # they are written.
        numbers[_NEXT_AT] = _NEVER
        numbers[_NEXT:_NUMBERS] = numbers[_NOW:_NEXT]
        numbers[_NEXT + _AHEAD] = ahead
        for number, value in (also or {}).items():
            numbers[_NEXT + number] = value
        numbers[_NEXT_AT] = head + len(raw)
        numbers[_HEAD] = head + len(raw)  # this one store makes the bytes and the second copies valid
        numbers[_NOW:_NEXT] = numbers[_NEXT:_NUMBERS]
        numbers[_NEXT_AT] = _NEVER


class CrashRemains(NamedTuple):
    """Remains of a process that has ended, from its area.

    Attributes:
        left: Output of its last cell that the process did not know the pool to have.
        unread: Stream to the bytes that the process had taken out of its pipe and not put into the ring; the pipe may have
            more.
    """

    left: CrashOutput
    unread: Mapping[str, bytes]


def read(area: int) -> CrashRemains | None:
    """Return the remains of a process that has ended, without the part that it knew to be taken; ``None`` if it had begun no cell."""
    with mmap.mmap(area, _LANDING, prot=mmap.PROT_READ) as found:
        with memoryview(found)[:HEADER] as header, header.cast("q") as view:
            numbers: list[int] = view[:_NUMBERS].tolist()
        head, taken, capacity, length, landed_stream, next_at = numbers[:_NOW]
        # The process may have been killed after its store to the head and before it had copied the second copies back.
        beside = numbers[_NEXT:] if head >= next_at else numbers[_NOW:_NEXT]
        ahead = beside[_AHEAD]
        # Code that crashes may have overwritten the header: only values that a rank can have stored are used.
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
    unread = {name: _cut(beside[number]) for name, number in _CUTS.items()}
    for name, number in _CUTS.items():
        if number == landed_stream:
            unread[name] += _landed(area, beside[_LANDED])
    return CrashRemains(CrashOutput(cell, head - ahead - sum(sizes), chunks, sizes).after(taken), unread)


def _cut(packed: int) -> bytes:
    length = packed & 0xFF
    return (packed >> 8 & 0xFFFFFFFF).to_bytes(4, "little")[:length] if length <= 4 else b""


def _landed(area: int, known: int) -> bytes:
    size = os.fstat(area).st_size - _LANDING
    return os.pread(area, min(size - known, LARGEST), _LANDING + known) if 0 <= known < size else b""


def _part(kind: int, body: bytes) -> tuple[Chunk | None, int]:
    if kind != _DISPLAY:
        return Stream(_STREAMS[kind], body.decode("utf-8", "replace")), len(body) + (kind in _COUNTED)
    size, _, encoded = body.partition(b";")
    try:
        raw = base64.b64decode(encoded)
        return (_decode.decode(raw) if raw else None), min(int(size), _MOST)
    except (ValueError, msgspec.MsgspecError):  # what crashes may write anywhere before it does
        return None, 0
