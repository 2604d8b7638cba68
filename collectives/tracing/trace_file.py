"""Trace files: a recording as events of the Chrome trace format, saved, and read back into a recording.

The events have the same meaning as those of a timeline file, so that running ranks and a file answer the same
questions.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import uuid
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.text import visible
from hvdlab.collectives.tracing.chrome_trace import (
    ARRIVALS_PID,
    CLOCK_COMPARED,
    STORES,
    ChromeTrace,
    MatchedOperation,
    Placed,
    TraceEvent,
)
from hvdlab.collectives.tracing.columns import DISTANCES, FAILED, NOT_READY, NOT_STARTED, Rows, distance
from hvdlab.collectives.tracing.derived_series import ALGORITHM, BUS, LATE, SHARES
from hvdlab.collectives.tracing.record_format import (
    FIRST_GROUP,
    AbortEvent,
    CellBeginEvent,
    CellEndEvent,
    Event,
    Members,
    Metric,
    Span,
    encode,
)
from hvdlab.collectives.tracing.recording import Annotation, Recording
from hvdlab.collectives.types import DType, OpKind

Format = Literal["json", "json.gz"]
"""Chrome's trace format, and the same compressed."""

# Level 6 needs three times as long for a tenth less.
GZIP_LEVEL = 3

OPERATIONS_AT_ONCE = 64
"""Operations in one portion of events."""
ROWS_OF_FILE = 20_000_000
"""Rows that are read from a file at most."""
EVENTS_AT_ONCE = 2048
"""Events that wait at most before they go to the recording; and operations whose ranks are remembered."""
LINE_MOST = 1 << 20
"""Bytes of the longest line. An event has some hundred."""
RATIO_MOST = 100
"""How many times its size a packed trace may become, above :data:`UNPACKED_FREE`. Traces become some 10 to 30 times."""
UNPACKED_FREE = 64 << 20
"""Bytes that every packed trace may become."""
_DERIVED_NAMES = (LATE, *SHARES, ALGORITHM, BUS)

_KINDS = tuple(OpKind)
_DTYPES = tuple(DType)
_KINDS_OF_SLICES = {f"NEGOTIATE_{kind.name}": kind for kind in OpKind}
_DTYPES_BY_LABEL = {dtype.label: dtype for dtype in DType}

_NOTES = {
    "paused": ("PAUSED", "RESUMED"),
    "waiting": ("RANK_WAITS", "RANK_ADMITTED"),
    "joined": ("RANK_JOINED", ""),
    "left": ("RANK_LEFT", ""),
    "formed": ("GENERATION", ""),
}
"""Names of the beginning and the end of each kind of mark."""


# -- a recording as events ---------------------------------------------------------------------------------------------


def trace_events(recording: Recording) -> Iterator[list[TraceEvent]]:
    """Yield the events of all that a recording has now, in portions. Later rows are not in it.

    Unlike a file that is written while the job runs, this knows all rows before it begins: an operation has the rows of
    all ranks, whenever they came.
    """
    trace = ChromeTrace()
    _, rows = recording.rows_since(0)
    errors, since = recording.clock_errors(), recording.cleared_ns
    marks = [
        one for one in recording.annotations() if since is None or one.end_ns is None or one.end_ns > since
    ]
    yield _happenings(recording, trace, marks) + _clocks(recording, trace, rows, errors)
    for operations in _operations(recording, rows, errors):
        yield trace.operations(operations)
    yield _failures(recording, trace, rows, errors)
    end = trace.close()
    if recording.dropped:
        end += trace.note("RECORDS_LOST", {"records": recording.dropped})
    yield end


def _happenings(recording: Recording, trace: ChromeTrace, marks: list[Annotation]) -> list[TraceEvent]:
    out: list[TraceEvent] = []
    for mark in marks:
        if mark.kind == "cell":
            out += trace.introduce(mark.rank)
            out += trace.happening(mark.rank, CellBeginEvent(mark.text, mark.begin_ns))
            if mark.end_ns is not None:
                out += trace.happening(mark.rank, CellEndEvent(mark.text, mark.end_ns, mark.ok))
        elif mark.kind == "abort":
            out += trace.introduce(mark.rank)
            out += trace.happening(mark.rank, AbortEvent(0, 0, mark.begin_ns, mark.text))
        else:
            begin, end = _NOTES[mark.kind]
            out += trace.rank_note(mark.rank, begin, mark.begin_ns, {"why": mark.text})
            if end and mark.end_ns is not None:
                out += trace.rank_note(mark.rank, end, mark.end_ns, {})
    for series in recording.series():
        if series.name.startswith(_DERIVED_NAMES):
            continue  # that is in the spans, and nothing was measured at their times
        out += trace.introduce(series.rank)
        for point in recording.points(series.rank, series.name).tolist():
            time_ns, value, step, *_ = point
            if recording.cleared_ns is not None and time_ns <= recording.cleared_ns:
                continue
            metric = Metric(series.name, value, None if math.isnan(step) else int(step), time_ns)
            out += trace.happening(series.rank, metric)
    return out


def _clocks(recording: Recording, trace: ChromeTrace, rows: Rows, errors: dict[int, int]) -> list[TraceEvent]:
    """Return, for each rank whose clock had to be compared, by how much its times may be off."""
    hosts = {member.rank: member.host for member in recording.membership.members}
    out: list[TraceEvent] = []
    for rank, error_ns in sorted(errors.items()):
        own = rows["arrival"][rows["rank"] == rank]
        first = int(own.min()) if len(own) else recording.origin_ns or 0
        host = {"host": hosts[rank].split("#")[0]} if rank in hosts else {}
        out += trace.rank_note(rank, CLOCK_COMPARED, first, {"error_us": error_ns / 1000, **host})
    return out


def _operations(recording: Recording, rows: Rows, errors: dict[int, int]) -> Iterator[list[MatchedOperation]]:
    """Yield operations with the spans of all ranks, in the order in which they were ordered first."""
    matched = np.flatnonzero(rows["flags"] & NOT_READY == 0)
    if not len(matched):
        return
    order, begins = _grouped(rows, matched, 2 * max(errors.values(), default=0))
    ends = [*begins[1:].tolist(), len(order)]
    for first in range(0, len(begins), OPERATIONS_AT_ONCE):
        last = min(first + OPERATIONS_AT_ONCE, len(begins))
        low, high = int(begins[first]), ends[last - 1]
        own = rows[order[low:high]]
        placed = _placed(recording, own, errors)
        portion: list[MatchedOperation] = []
        for number in range(first, last):
            begin, end = int(begins[number]) - low, ends[number] - low
            operation = MatchedOperation(0.0, int(own["size"][begin]) or None)
            for rank, span in placed[begin:end]:
                operation.ranks.setdefault(rank, []).append(span)
            portion.append(operation)
        yield portion


def _grouped(
    rows: Rows, matched: NDArray[np.intp], error_ns: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the indices of the rows, operation after operation and in each as they came; and where each operation begins."""
    columns = [rows[name][matched] for name in ("batch", "sequence", "generation", "set")]
    # Requests to parameter servers are for one key each, while collectives of one number are fused.
    columns.insert(0, np.where(rows["set"][matched] >= FIRST_GROUP, rows["op"][matched], 0))
    by_key = np.lexsort(columns)
    order = matched[by_key]
    new = np.zeros(len(order), np.bool_)
    for column in columns:
        ordered = column[by_key]
        new[1:] |= ordered[1:] != ordered[:-1]
    group = np.cumsum(new, dtype=np.int64)
    arrival = rows["arrival"][order]
    group = _by_causality(group, arrival, arrival + distance(rows[order], "finished") + error_ns)
    ready = _least(group, arrival + distance(rows[order], "ready"))
    final = np.lexsort((order, group, ready[group]))
    groups = group[final]
    return order[final], np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))


def _by_causality(
    group: NDArray[np.int64], arrival: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Divide groups of which a rank asked for something when another was done with it: the number was used again."""
    while True:
        late = arrival > _least(group, end)[group]
        if not late.any():
            return group
        group = np.unique(group * 2 + late, return_inverse=True)[1]


def _least(group: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(found, group, values)
    return found


def _placed(recording: Recording, rows: Rows, errors: dict[int, int]) -> list[tuple[int, Placed]]:
    names, sites = recording.names, recording.sites
    found = []
    columns = [distance(rows, name).tolist() for name in DISTANCES]
    plain = [rows[name].tolist() for name in ("set", "sequence", "batch", "nbytes", "arrival")]
    kinds = zip(*(rows[name].tolist() for name in ("name", "kind", "dtype", "flags", "rank")), strict=True)
    for (name, kind, dtype, flags, rank), rest, times in zip(
        kinds, zip(*plain, strict=True), zip(*columns, strict=True), strict=True
    ):
        process_set, sequence, batch, nbytes, arrival = rest
        ready, started, finished, pack, transfer, wait, unpack = times
        span = Span(
            names[name],
            _KINDS[kind],
            _DTYPES[dtype],
            process_set,
            sequence,
            batch,
            nbytes,
            arrival,
            None if flags & NOT_READY else arrival + ready,
            None if flags & NOT_STARTED else arrival + started,
            arrival + finished,
            pack,
            transfer,
            wait,
            unpack,
            not flags & FAILED,
            site=sites[name],
        )
        found.append((rank, Placed(span, 0, errors.get(rank, 0))))
    return found


def _failures(
    recording: Recording, trace: ChromeTrace, rows: Rows, errors: dict[int, int]
) -> list[TraceEvent]:
    out: list[TraceEvent] = []
    for rank, placed in _placed(recording, rows[rows["flags"] & NOT_READY != 0], errors):
        out += trace.introduce(rank) + trace.failed(rank, placed)
    return out


# -- saving ------------------------------------------------------------------------------------------------------------


def format_of(path: str | os.PathLike[str], format: str | None = None) -> Format:
    """Return the format of a file, by its name unless it is given. Raises ``InvalidRequestError`` if there is none such."""
    name = os.path.basename(os.fspath(path))
    for known in get_args(Format):
        if format == known or (format is None and name.endswith(f".{known}")):
            found: Format = known
            return found
    asked = f"a trace can't be written as `{format}`" if format else f"`{name}` says no format of a trace"
    raise InvalidRequestError(f"{asked}: use .json or .json.gz (the same, compressed)")


def save_recording(recording: Recording, path: str | os.PathLike[str], format: str | None = None) -> Path:
    """Write all that a recording has now. The file is there once it is whole, in place of one of the same name.

    Args:
        recording: The recording to write.
        path: The file to write; the end of its name (``.json`` or ``.json.gz``) chooses the format.
        format: ``"json"`` or ``"json.gz"``, for any end of the name; by default the name chooses.

    Returns:
        The file's whole path.

    Raises:
        InvalidRequestError: There is no such format.
        OSError: The file could not be written; no unfinished file is left.
    """
    chosen, target = format_of(path, format), Path(path).absolute()
    # In the same directory, so that it can replace the target; no other process chooses this random name.
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        with unfinished.open("xb") as file:
            write_trace(trace_events(recording), file, chosen)
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return target


def write_trace(portions: Iterable[list[TraceEvent]], file: IO[bytes], format: Format) -> None:
    """Write events as one trace. Raises ``OSError``."""
    if format == "json.gz":
        # Without a name: gzip would write that of the draft, which is random, into the file.
        with gzip.GzipFile("", "wb", GZIP_LEVEL, file, mtime=0) as packed:
            for piece in _json(portions):
                packed.write(piece)
        return
    for piece in _json(portions):
        file.write(piece)


def _json(portions: Iterable[list[TraceEvent]]) -> Iterator[bytes]:
    """Yield the array form of the format, an event per line."""
    encoder, between = msgspec.json.Encoder(), b"[\n"
    for portion in portions:
        if portion:
            yield between + b",\n".join(map(encoder.encode, portion))
            between = b",\n"
    yield b"[]\n" if between == b"[\n" else b"\n]\n"


# -- loading -----------------------------------------------------------------------------------------------------------


def load_trace(path: Path) -> Recording:
    """Read a trace that this library has written as ``.json`` or ``.json.gz``, complete or not.

    Spans come back as they were, cells and metrics too, and a file that was saved afterwards also has the errors of the clocks.

    Raises:
        InvalidRequestError: It is no such trace, or it unpacks to far more than one.
        OSError: It can't be read.
    """
    reader = _Reader()
    try:
        with path.open("rb") as raw:
            # By the first bytes: the file can have been renamed.
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file: BinaryIO = raw
            if packed:
                file = io.BufferedReader(_Unpacked(raw, os.fstat(raw.fileno()).st_size))
            for event in read_events(file):
                reader.add(event)
        recording = reader.finish()
    except _NO_TRACE as error:
        reason = visible(str(error), 300)
        raise InvalidRequestError(f"{path} is no trace of hvdlab: {type(error).__name__}: {reason}") from None
    if not reader.seen:
        raise InvalidRequestError(f"{path} is no trace of hvdlab: it has no rank's events")
    return recording


_NO_TRACE = (
    *(msgspec.DecodeError, RecursionError),  # of a line
    *(EOFError, zlib.error),  # of a packed file
    *(LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error),  # of an event
)


class _Unpacked(io.RawIOBase):
    """Packed file that a few bytes can't make huge."""

    def __init__(self, raw: BinaryIO, size: int) -> None:
        self._file = gzip.GzipFile(fileobj=raw)
        self._left = max(UNPACKED_FREE, RATIO_MOST * size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise ValueError("it unpacks to far more than a trace does")
        return count


def read_events(file: BinaryIO) -> Iterator[TraceEvent]:
    """Yield the events of a file with one per line, whose end may be missing.

    Raises:
        ValueError: A line is longer than that of an event, or no JSON.
    """
    decoder = msgspec.json.Decoder(dict[str, Any])
    while line := file.readline(LINE_MOST):
        if len(line) == LINE_MOST and not line.endswith(b"\n"):
            raise ValueError(f"a line of more than {LINE_MOST} bytes")
        text = line.strip().removeprefix(b"[").removesuffix(b",").strip()
        if text in (b"", b"]", b"[]"):
            continue
        try:
            yield decoder.decode(text)
        except msgspec.DecodeError:
            if line.endswith(b"\n"):
                raise
            return  # the last line of a process that was killed


class _Reader:
    """Reader that puts the slices of each tensor together again."""

    def __init__(self) -> None:
        self.seen = False
        self._recording = Recording(ROWS_OF_FILE)
        #: Events that the recording does not have yet, by rank.
        self._waiting: dict[int, list[Event]] = defaultdict(list)
        #: The slice whose end is the next event of its kind.
        self._begun: TraceEvent | None = None
        # Tensors that were ordered, by rank and when; and the time of the order of the operation that begins next.
        self._ordered: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        self._queued: dict[tuple[int, int], int] = {}
        #: The most ranks that have had a part in one operation, by process set.
        self._sizes: dict[int, int] = {}
        #: Ranks of the newest operations, by process set, sequence and batch.
        self._ranks: dict[tuple[int, int, int], set[int]] = {}
        self._count = 0

    def add(self, event: TraceEvent) -> None:
        kind, rank = event["ph"], event["pid"]
        # No ranks: arrivals and slices of servers repeat events of ranks, and the writer's are about the file.
        if rank >= ARRIVALS_PID:
            return
        if kind == "b":
            self._begun = event
        elif kind == "e" and self._begun is not None:
            self._slice(rank, self._begun, _ns(event["ts"]))
        elif kind == "X" and event["cat"] == "collectives":
            self._operation(rank, event)
        elif kind == "X" and event["cat"] == STORES:
            self._request(rank, event)
        elif kind == "B":
            self._put(rank, CellBeginEvent(event["args"]["cell"], _ns(event["ts"])))
        elif kind == "E":
            cell = event["name"].removeprefix("CELL ")
            self._put(rank, CellEndEvent(cell, _ns(event["ts"]), event["args"]["status"] != "failed"))
        elif kind == "C":
            self._put(rank, Metric(event["name"], float(event["args"]["value"]), None, _ns(event["ts"])))
        elif kind == "i" and event["name"] == CLOCK_COMPARED:
            self._recording.take_clock_error(rank, _ns(event["args"]["error_us"]))

    def _slice(self, rank: int, begun: TraceEvent, end: int) -> None:
        begin, args = _ns(begun["ts"]), begun["args"]
        if begun["name"] == "QUEUE":
            self._queued[rank, end] = begin
            if args.get("status") == "failed":  # it never began
                self._complete(rank, begin, args, None, end)
            return
        tensor = {**args, "kind": _KINDS_OF_SLICES[begun["name"]], "arrival": begin}
        if args.get("status") == "failed":
            self._put(rank, _span(tensor, {}, None, None, end))
        else:
            self._ordered[rank, end].append(tensor)

    def _operation(self, rank: int, event: TraceEvent) -> None:
        started = _ns(event["ts"])
        ready = self._queued.pop((rank, started), started)
        self._complete(rank, ready, event["args"], started, started + _ns(event["dur"]))

    def _request(self, rank: int, event: TraceEvent) -> None:
        args, called = event["args"], _ns(event["ts"])
        ok = args["status"] == "ok"
        began = called + _ns(args["waited_us"]) if ok else None
        tensor = {**args, "kind": OpKind[event["name"]], "arrival": called}
        self._put(rank, _span(tensor, args, began, began, called + _ns(event["dur"])))

    def _complete(
        self, rank: int, ready: int, args: dict[str, Any], started: int | None, finished: int
    ) -> None:
        self._learn_size(args, rank, args["batch"])
        for tensor in self._ordered.pop((rank, ready), []):
            self._put(rank, _span(tensor, args, ready, started, finished))

    def _learn_size(self, args: dict[str, Any], rank: int, batch: int) -> None:
        members = self._ranks.setdefault((args["process_set"], args["sequence"], batch), set())
        members.add(rank)
        process_set = args["process_set"]
        if len(members) > self._sizes.get(process_set, 0):
            # Events do not have the sizes of process sets: the most ranks that have taken part in one operation stand for it.
            self._sizes[process_set] = len(members)
        if len(self._ranks) > EVENTS_AT_ONCE:
            del self._ranks[next(iter(self._ranks))]

    def _put(self, rank: int, event: Event) -> None:
        self.seen = True
        self._waiting[rank].append(event)
        self._count += 1
        if self._count >= EVENTS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        # All ranks together: records of a rank that come much later than the others' are matched with none of them.
        for rank, waiting in self._waiting.items():
            sizes: list[Event] = [Members(number, 0, size, 0) for number, size in self._sizes.items()]
            self._recording.feed(rank, encode(rank, sizes + waiting))
        self._waiting.clear()
        self._count = 0

    def finish(self) -> Recording:
        self._flush()
        self._recording.close()
        return self._recording


def _ns(micros: float) -> int:
    return round(micros * 1000)


def _span(
    tensor: dict[str, Any], operation: dict[str, Any], ready: int | None, started: int | None, finished: int
) -> Span:
    return Span(
        tensor["tensor"],
        tensor["kind"],
        _DTYPES_BY_LABEL[tensor["dtype"]],
        tensor["process_set"],
        operation.get("sequence", 0),
        operation.get("batch", 0),
        tensor["bytes"],
        tensor["arrival"],
        ready,
        started,
        finished,
        _ns(operation.get("pack_us", 0.0)),
        _ns(operation.get("transfer_us", 0.0)),
        _ns(operation.get("wait_us", 0.0)),
        _ns(operation.get("unpack_us", 0.0)),
        ok=operation.get("status", "failed") == "ok",
        site=tensor.get("site", ""),
    )
