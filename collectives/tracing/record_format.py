"""The format of recorded batches: a rank's measurements, as typed events and as fixed 64-byte records; and the clocks of their times.

A batch stands alone: it carries the text of every name that its records use, so that a history may forget old
batches and a subscriber may come late. All numbers are little-endian::

    header       4s  magic "HVDS"            definition   I  id (never 0)
                 H   version                 (repeated)   H  length of the text in bytes
                 H   0                                    H  length of the call site in bytes
                 I   rank                                 …  both, in UTF-8
                 I   number of definitions
                 I   number of records       record       64 bytes, see SPAN and SMALL
                 Q   clock domain            (repeated)
                 Q   records lost because the ring was full, since the start
                 Q   records refused because their times were impossible, since the start

Times are nanoseconds of the rank's ``CLOCK_MONOTONIC``. Ranks with an equal clock domain share that clock.

A span's name and call site are one number, so that the place of a call costs nothing per span.

A span's later times are stored as distances from ``submitted``, in units of ``2**shift`` ns. The shift is 0, so
exact, up to 4.29 s, and otherwise the smallest that fits (a 10-minute wait has a resolution of 256 ns).

The span of a request to a parameter server has the same fields, three of them with another meaning:

=============== ====================================================================================================
process set     the store, its server, and whether the request is a pull; beyond all numbers of process sets
sequence        version of the value that a push made, or that a pull read: the low 32 bits
batch           of a push its staleness; of a pull a number that no other rank's pull has
=============== ====================================================================================================

Its ``ready`` and ``started`` are when the server began to carry out the request. It ``finished`` when the server had
applied a push, or when the worker had the pulled value; ``transfer`` is how long the server worked on the request.

:class:`Alignment` brings the clocks of several hosts to one time axis. The axis is the clock of the domain seen first.
Ranks of one domain share a clock, so nothing is estimated between them. Between domains, samples against the
coordinator's clock give an offset and a rigorous bound on its error.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.system import boot_id
from hvdlab.collectives.types import DType, OpKind


@dataclass(frozen=True, slots=True)
class Span:
    """Span of one tensor in one collective, as this rank saw it.

    ``(process_set, sequence, batch)`` names the plane operation and is equal on all members; tensors fused into one
    operation share it. They also share ``ready_ns``, ``started_ns``, ``finished_ns`` and the four durations, which were
    measured for the operation as a whole.

    Attributes:
        nbytes: Size of this tensor on this rank.
        submitted_ns: When this rank submitted it: its arrival.
        ready_ns: When the order to execute reached this rank; ``None`` if it failed before.
        started_ns: When the executor began with it; ``None`` if it failed before.
        finished_ns: When it was done, or when it failed.
        pack_ns: Sum of the time spent copying in. Pieces may interleave with those of the other phases.
        transfer_ns: Sum of the time spent moving and reducing.
        wait_ns: Sum of the time spent blocked on other members.
        unpack_ns: Sum of the time spent copying out.
        resolution_ns: Resolution of all times and durations but ``submitted_ns``; 1 for spans of up to 4.29 s.
        site: The user's line that submitted it, such as ``cell [7] line 4``; empty if it is not known.
    """

    name: str
    kind: OpKind
    dtype: DType
    process_set: int
    sequence: int
    batch: int
    nbytes: int
    submitted_ns: int
    ready_ns: int | None
    started_ns: int | None
    finished_ns: int
    pack_ns: int = 0
    transfer_ns: int = 0
    wait_ns: int = 0
    unpack_ns: int = 0
    ok: bool = True
    resolution_ns: int = 1
    site: str = ""


@dataclass(frozen=True, slots=True)
class CellBeginEvent:
    """Beginning of a cell on this rank."""

    cell: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class CellEndEvent:
    """End of a cell on this rank."""

    cell: str
    time_ns: int
    ok: bool


@dataclass(frozen=True, slots=True)
class AbortEvent:
    """Abort of a generation of a process set; ``text`` is the reason."""

    process_set: int
    generation: int
    time_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class Metric:
    """Number that the user reported; ``value`` may be infinite or NaN."""

    name: str
    value: float
    step: int | None
    time_ns: int


@dataclass(frozen=True, slots=True)
class ClockSample:
    """Sample of this rank's clock against the coordinator's at ``time_ns`` (here): coordinator - here = offset ± uncertainty."""

    time_ns: int
    offset_ns: int
    uncertainty_ns: int


@dataclass(frozen=True, slots=True)
class Members:
    """Number of members of a process set from this generation on, 0 if it is gone; ``plane`` moves their data."""

    process_set: int
    generation: int
    size: int
    time_ns: int
    plane: str = ""


Event = Span | CellBeginEvent | CellEndEvent | AbortEvent | Metric | ClockSample | Members


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Decoded batch: the header's fields and the records."""

    rank: int
    clock: int
    dropped: int
    refused: int
    events: tuple[Event, ...]


MAGIC = b"HVDS"
VERSION = 2
RECORD_BYTES = 64
"""Bytes of each record: a fixed size, so that readers find records without decoding them."""
MAX_TEXT_BYTES = 1024
"""Bytes of a name or a call site at most."""
BATCH_RECORDS = 4096
"""Records of a batch at most; a recorder puts further ones into the next batch."""

HEADER = struct.Struct("<4sHHIIIQQQ")
DEFINITION = struct.Struct("<IHH")

# In all three layouts the type is the first byte and the name the second word: readers choose records, and the recorder finds
# the names that a batch needs, without unpacking them. `columns.RECORD` has the layout of SPAN as well. Changes need a new
# VERSION.
# type, kind, dtype, flags, name, process set, sequence, batch, bytes, submitted,
# then as distances: ready, started, finished; then durations: pack, transfer, wait, unpack.
SPAN = struct.Struct("<BBBBIIIIQQ7I")
# type, 0, 0, flags, name, process set, number, time, two values, padding.
SMALL = struct.Struct("<BBBBIIIQqq24x")
SMALL_FLOAT = struct.Struct("<BBBBIIIQdq24x")

# Looking up is several times faster than calling the enumeration.
_KINDS = {int(kind): kind for kind in OpKind}
_DTYPES = {int(dtype): dtype for dtype in DType}

FLAG_FAILED = 0x80
FLAG_NOT_STARTED = 0x40
FLAG_NOT_READY = 0x20
SHIFT_MASK = 0x1F
FLAG_HAS_STEP = 0x01

FIRST_GROUP = 1 << 31
"""From here on, the number of a process set stands for a parameter server's store."""
_SERVER_BITS = 10
_MOST_STALE = 0xFFFF
"""Largest staleness that a record shows; larger ones count as this."""


class RecordType(IntEnum):
    """First byte of a record."""

    SPAN = 1
    CELL_BEGIN = 2
    CELL_END = 3
    ABORT = 4
    METRIC = 5
    CLOCK = 6
    MEMBERS = 7


def clean_text(text: str) -> bytes:
    """Return a name in UTF-8, cut to ``MAX_TEXT_BYTES`` at a character; lone surrogates are escaped."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > MAX_TEXT_BYTES:
        data = data[:MAX_TEXT_BYTES].decode("utf-8", "ignore").encode()
    return data


def span_scale(longest_ns: int) -> int:
    """Return the smallest shift with which a duration fits 32 bits."""
    return max(0, longest_ns.bit_length() - 32)


def frame(
    rank: int,
    clock: int,
    dropped: int,
    refused: int,
    names: Iterable[tuple[int, bytes, bytes]],
    records: bytes,
) -> bytes:
    """Put definitions (number, text, call site) and packed records together into one batch."""
    return frame_defined(rank, clock, dropped, refused, *define(names), records)


def define(names: Iterable[tuple[int, bytes, bytes]]) -> tuple[int, bytes]:
    """Return how many definitions there are, and the part of a batch that holds them."""
    found = [DEFINITION.pack(ident, len(text), len(site)) + text + site for ident, text, site in names]
    return len(found), b"".join(found)


def frame_defined(
    rank: int, clock: int, dropped: int, refused: int, definitions: int, table: bytes, records: bytes
) -> bytes:
    """Put the result of :func:`define` and packed records together into one batch."""
    count = len(records) // RECORD_BYTES
    head = HEADER.pack(MAGIC, VERSION, 0, rank, definitions, count, clock, dropped, refused)
    return head + table + records


_COUNT, _LOST = 5, 7
_MOST_LOST = (1 << 64) - 1


def count_of(batch: bytes) -> int:
    """Return how many records a batch has by its header; 0 if it has no header."""
    return int(HEADER.unpack_from(batch)[_COUNT]) if len(batch) >= HEADER.size else 0


def with_lost(batch: bytes, more: int) -> bytes:
    """Return the batch with ``more`` added to its lost records. A batch without a header is returned as it is."""
    if len(batch) < HEADER.size:
        return batch
    fields = list(HEADER.unpack_from(batch))
    # A rank can send any number: one that does not fit any more would end the coordinator, which adds here.
    fields[_LOST] = min(fields[_LOST] + more, _MOST_LOST)
    return HEADER.pack(*fields) + batch[HEADER.size :]


def pack_span(name_id: int, span: Span) -> bytes:
    """Pack one record of a span of any length. Raises ``ValueError`` when its times are out of order."""
    base, end = span.submitted_ns, span.finished_ns
    ready = base if span.ready_ns is None else span.ready_ns
    started = ready if span.started_ns is None else span.started_ns
    phases = (span.pack_ns, span.transfer_ns, span.wait_ns, span.unpack_ns)
    if not 0 <= base <= ready <= started <= end or min(phases) < 0:
        raise ValueError("a span's times must be in order and its phases not negative")
    distances = (ready - base, started - base, end - base, *phases)
    shift = span_scale(max(distances))
    # 32 bits, shifted by 31 at most: 2**63 ns.
    if shift > SHIFT_MASK:
        raise ValueError("a span may not be longer than 292 years")
    flags = (
        shift
        | (0 if span.ok else FLAG_FAILED)
        | (FLAG_NOT_READY if span.ready_ns is None else 0)
        | (FLAG_NOT_STARTED if span.started_ns is None else 0)
    )
    return SPAN.pack(
        RecordType.SPAN,
        span.kind,
        span.dtype,
        flags,
        name_id,
        span.process_set,
        span.sequence,
        span.batch,
        span.nbytes,
        base,
        # All are rounded down by the same shift, so that they stay in order.
        *(d >> shift for d in distances),
    )


def encode(
    rank: int, events: Sequence[Event], *, clock: int = 0, dropped: int = 0, refused: int = 0
) -> bytes:
    """Pack events into one batch. Meant for tools and tests; a rank records with ``Recorder`` instead.

    Raises ``ValueError`` or ``struct.error`` for values that the format cannot hold.
    """
    ids: dict[tuple[bytes, bytes], int] = {}

    def ident(event: Event) -> int:
        texts = clean_text(_text_of(event)), clean_text(event.site if isinstance(event, Span) else "")
        return ids.setdefault(texts, len(ids) + 1) if any(texts) else 0

    records = b"".join(_pack(event, ident(event)) for event in events)
    names = ((number, text, site) for (text, site), number in ids.items())
    return frame(rank, clock, dropped, refused, names, records)


def _text_of(event: Event) -> str:
    match event:
        case (
            Span(name=text)
            | Metric(name=text)
            | AbortEvent(text=text)
            | CellBeginEvent(cell=text)
            | CellEndEvent(cell=text)
        ):
            return text
        case Members(plane=text):
            return text
        case ClockSample():
            return ""


def _pack(event: Event, name: int) -> bytes:
    match event:
        case Span():
            return pack_span(name, event)
        case CellBeginEvent():
            return SMALL.pack(RecordType.CELL_BEGIN, 0, 0, 0, name, 0, 0, event.time_ns, 0, 0)
        case CellEndEvent():
            flags = 0 if event.ok else FLAG_FAILED
            return SMALL.pack(RecordType.CELL_END, 0, 0, flags, name, 0, 0, event.time_ns, 0, 0)
        case AbortEvent():
            return SMALL.pack(
                RecordType.ABORT, 0, 0, 0, name, event.process_set, event.generation, event.time_ns, 0, 0
            )
        case Metric():
            flags, step = (0, 0) if event.step is None else (FLAG_HAS_STEP, event.step)
            return SMALL_FLOAT.pack(
                RecordType.METRIC, 0, 0, flags, name, 0, 0, event.time_ns, event.value, step
            )
        case ClockSample():
            values = (event.time_ns, event.offset_ns, event.uncertainty_ns)
            return SMALL.pack(RecordType.CLOCK, 0, 0, 0, name, 0, 0, *values)
        case Members():
            group = (event.process_set, event.generation)
            return SMALL.pack(RecordType.MEMBERS, 0, 0, 0, name, *group, event.time_ns, event.size, 0)


class Head(NamedTuple):
    """Head of a batch: all but its records.

    Attributes:
        rank, clock, dropped, refused: The header's fields.
        names, sites: Text and call site by number.
        start: Offset at which the records begin.
    """

    rank: int
    clock: int
    dropped: int
    refused: int
    names: dict[int, str]
    sites: dict[int, str]
    start: int


class Definitions:
    """Newest tables of definitions that were read, by their bytes: each is read once, however often it comes.

    Args:
        limit: How many to remember.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[bytes, tuple[dict[int, str], dict[int, str]]] = {}

    def find(self, table: bytes) -> tuple[dict[int, str], dict[int, str]] | None:
        """Return names and sites of a table that was read before; the same objects each time."""
        return self._known.get(table)

    def remember(self, table: bytes, names: dict[int, str], sites: dict[int, str]) -> None:
        """Add a table that was read; the oldest makes room."""
        self._known[table] = (names, sites)
        if len(self._known) > self._limit:
            del self._known[next(iter(self._known))]


def read_head(data: bytes, known: Definitions | None = None) -> Head:
    """Read all of a batch but its records. Raises :class:`ProtocolError` if their number does not fit either.

    Args:
        data: The batch.
        known: Remembers definitions that were read before, so that they are not read again.
    """
    try:
        magic, version, _, rank, definitions, count, clock, dropped, refused = HEADER.unpack_from(data)
    except struct.error:
        raise ProtocolError(f"event batch: {len(data)} bytes are shorter than a header") from None
    if magic != MAGIC:
        raise ProtocolError("event batch: it does not begin with HVDS")
    if version != VERSION:
        raise ProtocolError(
            f"event batch: version {version}, this hvdlab reads {VERSION}; use one version everywhere"
        )
    table = (
        b""
        if known is None
        else bytes(data[HEADER.size : max(HEADER.size, len(data) - count * RECORD_BYTES)])
    )
    # One more than the definitions: 0 is the empty name. The count is compared since another one would divide the same bytes
    # differently.
    if known is not None and (found := known.find(table)) is not None and len(found[0]) == definitions + 1:
        return Head(rank, clock, dropped, refused, *found, HEADER.size + len(table))
    names, sites, start = _read_names(data, definitions)
    if len(data) != start + count * RECORD_BYTES:
        raise ProtocolError(f"event batch: {len(data)} bytes do not fit {count} records")
    if known is not None:
        known.remember(table, names, sites)
    return Head(rank, clock, dropped, refused, names, sites, start)


def decode(data: bytes) -> RecordBatch:
    """Read one batch. Raises :class:`ProtocolError` for anything that is not exactly one valid batch."""
    head = read_head(data)
    events = tuple(read_record(data, offset, head) for offset in range(head.start, len(data), RECORD_BYTES))
    return RecordBatch(head.rank, head.clock, head.dropped, head.refused, events)


def _read_names(data: bytes, count: int) -> tuple[dict[int, str], dict[int, str], int]:
    names, sites = {0: ""}, {0: ""}
    offset = HEADER.size
    try:
        for _ in range(count):
            ident, length, more = DEFINITION.unpack_from(data, offset)
            middle = offset + DEFINITION.size + length
            if ident in names or middle + more > len(data):
                raise ProtocolError("event batch: a name is defined twice or cut off")
            names[ident] = data[middle - length : middle].decode()
            sites[ident] = data[middle : middle + more].decode()
            offset = middle + more
    except (struct.error, UnicodeDecodeError):
        raise ProtocolError("event batch: a name is cut off or not UTF-8") from None
    return names, sites, offset


def read_record(data: bytes, offset: int, head: Head) -> Event:
    """Read the record at ``offset``. Raises :class:`ProtocolError` if it is not a valid one."""
    try:
        if data[offset] == RecordType.SPAN:
            return _read_span(data, offset, head)
        return _read_small(data, offset, head.names)
    except KeyError as error:
        raise ProtocolError(f"event batch: name {error.args[0]} is not defined") from None
    except ValueError as error:
        raise ProtocolError(f"event batch: {error}") from None


def _read_span(data: bytes, offset: int, head: Head) -> Span:
    _, kind, dtype, flags, name, process_set, sequence, batch, nbytes, base, *distances = SPAN.unpack_from(
        data, offset
    )
    shift = flags & SHIFT_MASK
    if shift:
        distances = [d << shift for d in distances]
    ready, started, finished, pack, transfer, wait, unpack = distances
    if kind not in _KINDS or dtype not in _DTYPES:
        raise ValueError("a span has an unknown kind or element type")
    if not ready <= started <= finished:
        raise ValueError("the times of a span are out of order")
    return Span(
        head.names[name],
        _KINDS[kind],
        _DTYPES[dtype],
        process_set,
        sequence,
        batch,
        nbytes,
        base,
        None if flags & FLAG_NOT_READY else base + ready,
        None if flags & FLAG_NOT_STARTED else base + started,
        base + finished,
        pack,
        transfer,
        wait,
        unpack,
        not flags & FLAG_FAILED,
        1 << shift,
        head.sites[name],
    )


def _read_small(data: bytes, offset: int, names: dict[int, str]) -> Event:
    kind, _, _, flags, name, process_set, number, time_ns, first, second = SMALL.unpack_from(data, offset)
    match kind:
        case RecordType.CELL_BEGIN:
            return CellBeginEvent(names[name], time_ns)
        case RecordType.CELL_END:
            return CellEndEvent(names[name], time_ns, not flags & FLAG_FAILED)
        case RecordType.ABORT:
            return AbortEvent(process_set, number, time_ns, names[name])
        case RecordType.METRIC:
            value = SMALL_FLOAT.unpack_from(data, offset)[8]
            return Metric(names[name], value, second if flags & FLAG_HAS_STEP else None, time_ns)
        case RecordType.CLOCK:
            if second < 0:
                raise ValueError("a clock sample has a negative uncertainty")
            return ClockSample(time_ns, first, second)
        case RecordType.MEMBERS:
            if first < 0:
                raise ValueError("a process set has a negative size")
            return Members(process_set, number, first, time_ns, names[name] if name else "")
    raise ValueError(f"unknown record type {kind}")


class StoreRequest(NamedTuple):
    """Numbers of a span of a request to a parameter server.

    Attributes:
        store: Number of the store, equal on all workers.
        server: Number of the server.
        version: Version of the value that a push made or a pull read; the low 32 bits.
        staleness: Pushes of other workers that were applied after the value from which this push was computed; at most 65535.
    """

    store: int
    server: int
    version: int
    staleness: int


def group_of(store: int, server: int, kind: OpKind) -> int:
    """Return the number in place of a process set's, for a store's requests of one kind to one server."""
    number = (store << _SERVER_BITS | server) << 1 | (kind is OpKind.PULL)
    return FIRST_GROUP | number & (FIRST_GROUP - 1)


def push_batch(staleness: int) -> int:
    """Return the number in place of a batch's, for a push."""
    return min(staleness, _MOST_STALE)


def request_of(span: Span) -> StoreRequest:
    """Return the request that the span of a push or pull describes."""
    number = span.process_set & (FIRST_GROUP - 1)
    server = number >> 1 & (1 << _SERVER_BITS) - 1
    staleness = span.batch & _MOST_STALE if span.kind is OpKind.PUSH else 0
    return StoreRequest(number >> _SERVER_BITS + 1, server, span.sequence, staleness)


SAMPLES_KEPT = 8
"""Samples of this process's clock."""
DRIFT = 20e-6
"""Seconds per second by which the clocks of two hosts may drift apart, as common quartz does."""

DOMAIN_SAMPLES_KEPT = 16
"""Samples of a domain. Old ones go stale as clocks drift, so the best of the newest few is used."""

Sample = tuple[int, int, int]
"""When the question was sent, when the answer came, and the coordinator's time in between; in ns."""


class ClockSamples:
    """Newest samples of this process's clock against the coordinator's."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)

    def add(self, sent_ns: int, received_ns: int, coordinator_ns: int) -> None:
        """Add a sample: when the coordinator was asked, when it answered, and its time."""
        self._samples.append((sent_ns, received_ns, coordinator_ns))

    def best(self, now_ns: int) -> Sample | None:
        """Return the sample with the least error at ``now_ns``: its answer was quick, and not too long ago."""

        def error(sample: Sample) -> float:
            sent, received, _ = sample
            return (received - sent) / 2 + DRIFT * (now_ns - received)

        return min(self._samples, key=error, default=None)


@cache
def clock_domain() -> int:
    """Return a number that is equal for all processes whose ``CLOCK_MONOTONIC`` is the same clock.

    These are the processes of one boot of one machine, in one time namespace. Where that can't be read, the number is
    this process's alone: its clock is then aligned by measured samples.
    """
    boot = boot_id() or f"{os.getpid()} {time.time_ns()}"
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        namespace = ""
    return int.from_bytes(hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=8).digest(), "little")


class Alignment:
    """Offsets of clock domains, from the samples of ranks."""

    def __init__(self) -> None:
        #: The domain whose clock is the common axis.
        self.reference: int | None = None
        #: The newest samples of each domain.
        self._samples: dict[int, deque[ClockSample]] = {}

    def observe(self, domain: int, sample: ClockSample | None = None) -> None:
        """Add a domain, and a sample of its clock if there is one; the first domain becomes the reference."""
        if self.reference is None:
            self.reference = domain
        if sample is not None:
            self._samples.setdefault(domain, deque(maxlen=DOMAIN_SAMPLES_KEPT)).append(sample)

    def offset(self, domain: int) -> tuple[int, int] | None:
        """Return the nanoseconds to add to a time of ``domain``, and their greatest error; ``None`` while unknown."""
        if domain == self.reference:
            return 0, 0
        own = self._best(domain)
        reference = None if self.reference is None else self._best(self.reference)
        if own is None or reference is None:
            return None
        return own.offset_ns - reference.offset_ns, own.uncertainty_ns + reference.uncertainty_ns

    def _best(self, domain: int) -> ClockSample | None:
        return min(self._samples.get(domain, ()), key=lambda sample: sample.uncertainty_ns, default=None)
