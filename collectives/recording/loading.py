"""A trace file, read back into a recording: what can be asked of running ranks can be asked of a file."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hvdlab.collectives.dtypes import DType, OpKind
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.recording.recording import Recording
from hvdlab.collectives.text import visible
from hvdlab.collectives.timeline.events import CellBegin, CellEnd, Event, Members, Metric, Span
from hvdlab.collectives.timeline.records import encode
from hvdlab.collectives.timeline.tracks import ARRIVALS_PID, CLOCK_COMPARED, STORES, TraceEvent

ROWS_KEPT = 20_000_000
AT_ONCE = 2048
LINE_MOST = 1 << 20
"""Bytes of the longest line. An event has some hundred."""
RATIO_MOST = 100
"""How many times its size a packed trace may become, above :data:`UNPACKED_FREE`. Traces become some 10 to 30 times."""
UNPACKED_FREE = 64 << 20
"""Bytes that every packed trace may become."""

_KINDS = {f"NEGOTIATE_{kind.name}": kind for kind in OpKind}
_DTYPES = {dtype.label: dtype for dtype in DType}


def load(path: Path) -> Recording:
    """Read a trace that this library has written as ``.json`` or ``.json.gz``, complete or not.

    Spans come back as they were, cells and metrics too, and what was saved afterwards also tells the errors of the clocks.

    Raises:
        InvalidRequestError: It is no such trace, or it unpacks to far more than one.
        OSError: It can't be read.
    """
    reader = _Reader()
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file: BinaryIO = raw
            if packed:
                file = io.BufferedReader(_Unpacked(raw, os.fstat(raw.fileno()).st_size))
            for event in events(file):
                reader.take(event)
        recording = reader.finish()
    except _NO_TRACE as error:
        said = visible(str(error), 300)
        raise InvalidRequestError(f"{path} is no trace of hvdlab: {type(error).__name__}: {said}") from None
    if not reader.seen:
        raise InvalidRequestError(f"{path} is no trace of hvdlab: it has no rank's events")
    return recording


_NO_TRACE = (
    *(msgspec.DecodeError, RecursionError),  # of a line
    *(EOFError, zlib.error),  # of a packed file
    *(LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error),  # of an event
)


class _Unpacked(io.RawIOBase):
    """A packed file that a few bytes can't make huge."""

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


def events(file: BinaryIO) -> Iterator[TraceEvent]:
    """Events of a file with one per line, whose end may be missing.

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
    """Puts the slices of each tensor together again."""

    def __init__(self) -> None:
        self.seen = False
        self._recording = Recording(ROWS_KEPT)
        self._waiting: dict[int, list[Event]] = defaultdict(list)
        self._begun: TraceEvent | None = None
        # Tensors that were ordered, by rank and when; and the time of the order of what begins next.
        self._ordered: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        self._queued: dict[tuple[int, int], int] = {}
        self._sizes: dict[int, int] = {}
        self._ranks: dict[tuple[int, int, int], set[int]] = {}
        self._count = 0

    def take(self, event: TraceEvent) -> None:
        kind, rank = event["ph"], event["pid"]
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
            self._put(rank, CellBegin(event["args"]["cell"], _ns(event["ts"])))
        elif kind == "E":
            cell = event["name"].removeprefix("CELL ")
            self._put(rank, CellEnd(cell, _ns(event["ts"]), event["args"]["status"] != "failed"))
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
        tensor = {**args, "kind": _KINDS[begun["name"]], "arrival": begin}
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
            self._sizes[process_set] = len(members)
        if len(self._ranks) > AT_ONCE:
            del self._ranks[next(iter(self._ranks))]

    def _put(self, rank: int, event: Event) -> None:
        self.seen = True
        self._waiting[rank].append(event)
        self._count += 1
        if self._count >= AT_ONCE:
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
        _DTYPES[tensor["dtype"]],
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
