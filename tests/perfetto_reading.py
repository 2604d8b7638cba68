"""Reads Perfetto's format as its documentation describes it, knowing nothing of how ours is written.

Strict where Perfetto's importer is lenient: what it would silently leave out is a problem here.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

BOOTTIME = 6


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at ``at``, and where the next field begins."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int, a float, or bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        value: Any
        if kind == 0:
            value, at = varint(data, at)
        elif kind == 1:
            (value,) = struct.unpack_from("<d", data, at)
            at += 8
        elif kind == 2:
            length, at = varint(data, at)
            assert at + length <= len(data), "a field is longer than its message"
            value = data[at : at + length]
            at += length
        else:
            raise AssertionError(f"field {number} has wire type {kind}")
        yield number, value


def message(data: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for number, value in fields(data):
        found.setdefault(number, []).append(value)
    return found


@dataclass
class Slice:
    process: str
    track: str
    name: str
    begin: int
    end: int
    args: dict[str, Any]
    flows: list[int]


@dataclass
class Track:
    name: str
    parent: int
    process: str | None
    counter: bool
    order: int
    open: list[Slice] = field(default_factory=list)
    busy: int = 0


@dataclass
class Sequence:
    cleared: bool = False
    clocks: dict[int, int] = field(default_factory=lambda: {BOOTTIME: 0})
    default_clock: int = BOOTTIME
    texts: dict[tuple[int, int], str] = field(default_factory=dict)


@dataclass
class Found:
    slices: list[Slice] = field(default_factory=list)
    counts: list[tuple[str, str, int, float]] = field(default_factory=list)
    tracks: dict[int, Track] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    sequences: dict[int, Sequence] = field(default_factory=dict)


def read(data: bytes) -> Found:
    found = Found()
    for packet in _packets(data):
        _take(found, packet)
    return found


def problems(found: Found) -> list[str]:
    """What an importer would leave out, or show wrongly."""
    left = [f"{s.name} on {s.track} has no end" for track in found.tracks.values() for s in track.open]
    return found.wrong + left


def _packets(data: bytes) -> Iterator[dict[int, list[Any]]]:
    for number, value in fields(data):
        assert number == 1, "a trace has only packets"
        packet = message(value)
        if 50 in packet:
            yield from _packets(zlib.decompress(packet[50][0]))
        else:
            yield packet


def _take(found: Found, packet: dict[int, list[Any]]) -> None:
    sequence = found.sequences.setdefault(packet[10][0], Sequence())
    if packet.get(13, [0])[0] & 1:
        sequence.cleared, sequence.texts = True, {}
    if not sequence.cleared:
        found.wrong.append("a packet of a sequence that has not begun")
    if 59 in packet:
        sequence.default_clock = message(packet[59][0])[58][0]
    if 6 in packet:
        clocks = {(c := message(one))[1][0]: c[2][0] for one in message(packet[6][0])[1]}
        sequence.clocks = {number: clocks[BOOTTIME] - at for number, at in clocks.items()}
    for data in packet.get(12, []):
        for kind, entry in fields(data):
            one = message(entry)
            key = (kind, one[1][0])
            if key in sequence.texts:
                found.wrong.append(f"text {key} is defined twice")
            sequence.texts[key] = one[2][0].decode()
    if 60 in packet:
        _describe(found, message(packet[60][0]))
    if 11 in packet:
        at = packet[8][0] + sequence.clocks[packet.get(58, [sequence.default_clock])[0]]
        _event(found, sequence, at, message(packet[11][0]))


def _describe(found: Found, track: dict[int, list[Any]]) -> None:
    uuid = track[1][0]
    process = message(track[3][0])[6][0].decode() if 3 in track else None
    if uuid in found.tracks:
        found.wrong.append(f"track {uuid} is described twice")
    name = track.get(2, [b""])[0].decode()
    found.tracks[uuid] = Track(name, track.get(5, [0])[0], process, 8 in track, track.get(12, [0])[0])


def _event(found: Found, sequence: Sequence, at: int, event: dict[int, list[Any]]) -> None:
    kind, uuid = event[9][0], event[11][0]
    track = found.tracks[uuid]
    process = track.process or found.tracks[track.parent].process or ""
    name = sequence.texts[2, event[10][0]] if 10 in event else ""
    args = dict(_argument(sequence, message(one)) for one in event.get(4, []))
    if kind == 4:
        found.counts.append((process, track.name, at, event[44][0]))
        if not track.counter:
            found.wrong.append("a count on a track that is no counter")
        return
    if track.counter:
        found.wrong.append("a slice on a counter")
    if kind in (1, 2) and at < track.busy:
        found.wrong.append(f"{name} on {track.name} comes {track.busy - at} ns before what was there")
    track.busy = max(at, track.busy)
    if kind == 2:
        if not track.open:
            found.wrong.append(f"an end without a begin on {track.name}")
            return
        ended = track.open.pop()
        ended.end, ended.args = at, ended.args | args
        return
    # Eight bytes are read as a float; these are numbers.
    flows = [struct.unpack("<Q", struct.pack("<d", one))[0] for one in event.get(47, []) + event.get(48, [])]
    begun = Slice(process, track.name, name, at, at, args, flows)
    found.slices.append(begun)
    if kind == 1:
        track.open.append(begun)


def _argument(sequence: Sequence, one: dict[int, list[Any]]) -> tuple[str, Any]:
    name = sequence.texts[3, one[1][0]] if 1 in one else ""
    return name, _value(sequence, one)


def _value(sequence: Sequence, one: dict[int, list[Any]]) -> Any:
    if 12 in one:
        return [_value(sequence, message(entry)) for entry in one[12]]
    if 11 in one:
        return dict(_argument(sequence, message(entry)) for entry in one[11])
    if 17 in one:
        return sequence.texts[29, one[17][0]]
    for number in (2, 3, 5):
        if number in one:
            return one[number][0]
    if 4 in one:
        value = one[4][0]
        return value - 2**64 if value >> 63 else value
    return one[6][0].decode()
