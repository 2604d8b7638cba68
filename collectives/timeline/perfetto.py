"""Trace events in Perfetto's own format: a quarter of the JSON's size, a sixteenth when it is deflated.

A trace is a sequence of protobuf messages ``TracePacket``, with times in ns. Few of its fields are needed here, so they are written by
hand: ``protos/perfetto/trace`` in Perfetto's repository has them all, with the numbers that are used below. What repeats
(names, categories, names and texts of arguments) is sent once per process and then referred to by number.
"""

from __future__ import annotations

import heapq
import itertools
import struct
import zlib
from collections.abc import Iterable
from typing import Any

from hvdlab.collectives.timeline.tracks import TraceEvent

VARINT, FIXED64, BYTES = 0, 1, 2

DEFLATE_LEVEL = 2  # twice as fast as 6, for a tenth more
TEXTS_KEPT = 65_536
ENCODED_KEPT = 8192

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
FLOW, LAST_OF_FLOW = 47, 48  # fields of an event
EXPLICIT = 3  # order of a track's children: by their sibling_order_rank
ASYNC_ORDER = 10_000
COUNTER_ORDER = 20_000


def varint(value: int) -> bytes:
    """Seven bits at a time, the least significant first; negative numbers as 64 bits."""
    if 0 <= value < 1 << 14:
        return _LAST[value]
    if 0 <= value < 1 << 28:
        return _MORE[value & 0x3FFF] + _LAST[value >> 14]
    value &= 0xFFFFFFFFFFFFFFFF
    out = b""
    while value >= 1 << 14:
        out += _MORE[value & 0x3FFF]
        value >>= 14
    return out + _LAST[value]


# Fourteen bits as they end a number, and as they are followed by more.
_LAST = [bytes([n]) if n < 128 else bytes([n & 127 | 128, n >> 7]) for n in range(1 << 14)]
_MORE = [bytes([n & 127 | 128, n >> 7 | 128]) for n in range(1 << 14)]
_pack_double = struct.Struct("<d").pack


def field(number: int, value: int | bytes | str) -> bytes:
    """One field of a message: an integer as varint, bytes and text with their length."""
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    data = value.encode("utf-8", "backslashreplace") if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def double(number: int, value: float) -> bytes:
    """A field of eight bytes."""
    return varint(number << 3 | FIXED64) + _pack_double(value)


def compressed(packets: bytes) -> bytes:
    """One packet that has these packets in it, deflated, which the format allows."""
    return field(1, field(50, zlib.compress(packets, DEFLATE_LEVEL)))


class PerfettoTrace:
    """Encodes trace events, as :mod:`~hvdlab.collectives.timeline.tracks` makes them. No I/O.

    What is encoded can be written piece by piece, in this order: every prefix of whole pieces is a trace.
    """

    def __init__(self) -> None:
        self._processes: dict[int, _Process] = {}
        self._uuids = itertools.count(1)

    def encode(self, events: Iterable[TraceEvent]) -> bytes:
        """Packets of these events. An asynchronous slice's begin must be followed by its end."""
        out: list[bytes] = []
        begin: TraceEvent | None = None
        for event in events:
            kind = event["ph"]
            if kind == "M":
                self._process(event["pid"]).describe(event, out)
                continue
            process = self._process(event["pid"])
            if not process.begun:
                process.begin(out)
            if kind == "b":
                begin = event
            elif kind == "e" and begin is not None:
                process.slice_async(begin, event, out)
            elif kind == "X":
                process.slice(event, out)
            else:
                process.moment(event, out)
        return b"".join(out)

    def _process(self, pid: int) -> _Process:
        process = self._processes.get(pid)
        if process is None:
            process = self._processes[pid] = _Process(pid, len(self._processes) + 1, self._uuids)
        return process


class _Process:
    """One process: its tracks and its sequence of packets, which has texts of its own."""

    def __init__(self, pid: int, sequence: int, uuids: itertools.count[int]) -> None:
        self.begun = False
        self._pid = pid
        self._uuids = uuids
        self._uuid = next(uuids)
        self._name = f"process {pid}"
        self._threads: dict[int, str] = {}
        self._tail = field(10, sequence)
        self._texts = _Texts()
        self._encoded: dict[tuple[str, str | int], bytes] = {}
        self._names: dict[tuple[int, str], bytes] = {}
        self._tracks: dict[tuple[str, int | str], int] = {}
        self._heads: dict[tuple[int, int, str, str], bytes] = {}
        self._ends: dict[int, bytes] = {}
        self._lanes: dict[str, list[tuple[int, int]]] = {}  # heaps: busy until when, and which track

    # -- the process and its tracks -----------------------------------------------------------------------------------

    def describe(self, event: TraceEvent, out: list[bytes]) -> None:
        """Take in what a metadata event says."""
        if event["name"] == "process_name":
            self._name = event["args"]["name"]
        elif event["name"] == "thread_name":
            self._threads[event["tid"]] = event["args"]["name"]

    def begin(self, out: list[bytes]) -> None:
        """Describe the process of this sequence. Must come before its other packets."""
        self.begun = True
        # Sequence flags: nothing was said before.
        out.append(self._packet(field(13, 1)))
        process = field(1, self._pid) + field(6, self._name)
        self._describe_track(self._uuid, field(3, process) + field(11, EXPLICIT), out)

    def _describe_track(self, uuid: int, description: bytes, out: list[bytes]) -> None:
        out.append(self._packet(field(60, field(1, uuid) + description)))

    def _packet(self, body: bytes) -> bytes:
        body += self._tail
        return b"\x0a" + varint(len(body)) + body

    def _track(self, kind: str, key: int | str, name: str, order: int, out: list[bytes]) -> int:
        uuid = self._tracks.get((kind, key))
        if uuid is None:
            uuid = self._tracks[kind, key] = self._new_track(name, order, b"", out)
        return uuid

    def _new_track(self, name: str, order: int, more: bytes, out: list[bytes]) -> int:
        uuid = next(self._uuids)
        place = field(5, self._uuid) + field(12, order)
        self._describe_track(uuid, field(2, name) + place + more, out)
        return uuid

    def _thread(self, tid: int, out: list[bytes]) -> int:
        uuid = self._tracks.get(("thread", tid))
        return (
            self._track("thread", tid, self._threads.get(tid, f"{tid}"), tid, out) if uuid is None else uuid
        )

    def _lane(self, name: str, begin: int, end: int, out: list[bytes]) -> int:
        """A track for a slice that may overlap others of its name: those with one name are shown as one."""
        lanes = self._lanes.setdefault(name, [])
        if lanes and lanes[0][0] <= begin:
            uuid = lanes[0][1]
            heapq.heapreplace(lanes, (end, uuid))
        else:
            uuid = self._new_track(name, ASYNC_ORDER, b"", out)
            heapq.heappush(lanes, (end, uuid))
        return uuid

    # -- events -------------------------------------------------------------------------------------------------------

    def slice(self, event: TraceEvent, out: list[bytes]) -> None:
        begin = round(event["ts"] * 1000)
        uuid = self._thread(event["tid"], out)
        out.append(self._event(BEGIN, uuid, begin, event))
        out.append(self._end(uuid, begin + round(event["dur"] * 1000)))

    def slice_async(self, first: TraceEvent, last: TraceEvent, out: list[bytes]) -> None:
        begin, end = round(first["ts"] * 1000), round(last["ts"] * 1000)
        uuid = self._lane(first["name"], begin, end, out)
        out.append(self._event(BEGIN, uuid, begin, first))
        out.append(self._end(uuid, end))

    def moment(self, event: TraceEvent, out: list[bytes]) -> None:
        kind, at = event["ph"], round(event["ts"] * 1000)
        if kind == "C":
            self._count(event, at, out)
        elif kind == "E":
            uuid = self._thread(event["tid"], out)
            out.append(self._event(END, uuid, at, event))
        elif kind == "i" and event["s"] == "p":
            out.append(self._event(INSTANT, self._uuid, at, event))
        else:
            uuid = self._thread(event["tid"], out)
            out.append(self._event(BEGIN if kind == "B" else INSTANT, uuid, at, event))

    def _count(self, event: TraceEvent, at: int, out: list[bytes]) -> None:
        name = event["name"]
        uuid = self._tracks.get(("counter", name))
        if uuid is None:
            uuid = self._tracks["counter", name] = self._new_track(name, COUNTER_ORDER, field(8, b""), out)
        track_event = field(9, COUNTER) + field(11, uuid) + double(44, event["args"]["value"])
        out.append(self._packet(field(8, at) + field(11, track_event)))

    def _event(self, kind: int, uuid: int, at: int, event: TraceEvent) -> bytes:
        texts = self._texts
        key = (kind, uuid, event["name"], event["cat"])
        head = self._heads.get(key)
        if head is None:
            head = field(9, kind) + field(11, uuid)
            if kind != END:
                head += field(10, texts.number(texts.NAME, event["name"]))
                head += field(3, texts.number(texts.CATEGORY, event["cat"]))
            self._heads[key] = head
        args = event["args"]
        if args:
            head += self._arguments(args)
        if "bind_id" in event:  # an arrow; one that leads here ends here
            number = FLOW if event.get("flow_out") else LAST_OF_FLOW
            head += varint(number << 3 | FIXED64) + int(event["bind_id"], 16).to_bytes(8, "little")
        body = b"\x40" + varint(at) + b"\x5a" + varint(len(head)) + head
        if texts.new:
            body += texts.take()
        return self._packet(body)

    def _end(self, uuid: int, at: int) -> bytes:
        tail = self._ends.get(uuid)
        if tail is None:
            tail = self._ends[uuid] = field(11, field(9, END) + field(11, uuid)) + self._tail
        time = varint(at)
        return b"\x0a" + varint(1 + len(time) + len(tail)) + b"\x40" + time + tail

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _arguments(self, args: dict[str, Any]) -> bytes:
        """The encoded arguments. Most are looked up here, without a call for each: arguments are half of all work."""
        parts, encoded, starts = [], self._encoded, self._names
        for item in args.items():
            name, value = item
            kind = type(value)
            data = None
            if kind is float:
                start = starts.get((-4, name))
                data = start + _pack_double(value) if start is not None else None
            elif kind is str or kind is int:
                data = encoded.get(item)
            if data is None:
                data = self._annotation(4, name, value)
                # Texts and sizes come again and again.
                if (kind is str or kind is int) and len(encoded) < ENCODED_KEPT:
                    encoded[item] = data
            parts.append(data)
        return b"".join(parts)

    def _annotation(self, number: int, name: str, value: Any) -> bytes:
        """An argument, or an entry of one, as field ``number`` of what it belongs to."""
        kind = type(value)
        if kind is float:
            start = self._names.get((-number, name))
            if start is None:
                named = self._named(name)
                start = varint(number << 3 | BYTES) + varint(len(named) + 9) + named + b"\x29"
                self._names[-number, name] = start
            return start + _pack_double(value)
        if kind is int:
            named = self._named(name)
            data = varint(value)
            return varint(number << 3 | BYTES) + varint(len(named) + 1 + len(data)) + named + b"\x20" + data
        return field(number, self._named(name) + self._value(value))

    def _named(self, name: str) -> bytes:
        named = self._names.get((0, name))
        if named is None:
            named = self._names[0, name] = field(1, self._texts.number(_Texts.ARGUMENT, name))
        return named

    def _value(self, value: Any) -> bytes:
        if isinstance(value, bool):
            return field(2, int(value))
        if isinstance(value, str):
            number = self._texts.number(_Texts.TEXT, value)
            return field(17, number) if number else field(6, value)
        if isinstance(value, int):
            return field(4, value)
        if isinstance(value, float):
            return double(5, value)
        if isinstance(value, list):
            return b"".join([field(12, self._value(one)) for one in value])
        if isinstance(value, dict):
            return b"".join([self._annotation(11, key, one) for key, one in value.items()])
        return field(6, str(value))


class _Texts:
    """Numbers for the texts of a sequence; definitions of numbers given out since the last packet go along with the next."""

    # Fields of InternedData.
    CATEGORY, NAME, ARGUMENT, TEXT = 1, 2, 3, 29

    def __init__(self) -> None:
        self.new: list[bytes] = []
        self._numbers: dict[tuple[int, str], int] = {}

    def number(self, kind: int, text: str) -> int:
        """0 if there are too many already; only for the values of arguments, which can do without."""
        number = self._numbers.get((kind, text))
        if number is None:
            if kind == self.TEXT and len(self._numbers) >= TEXTS_KEPT:
                return 0
            number = self._numbers[kind, text] = len(self._numbers) + 1
            self.new.append(field(kind, field(1, number) + field(2, text)))
        return number

    def take(self) -> bytes:
        """The field of a packet with which those are sent."""
        data = field(12, b"".join(self.new))
        self.new.clear()
        return data
