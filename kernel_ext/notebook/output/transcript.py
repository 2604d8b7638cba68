"""The whole output of a cell, kept by the pool, to show it again or to look up output that was not shown.

A :class:`CellRecorder` records a cell while it runs; the :class:`TranscriptStore` forgets the oldest transcripts when there are too many.
A little of it is in memory, more goes into files. If no file can be written (the disk is full, no descriptor is left, the limit is
reached), later output is counted but not kept; the cell goes on as if nothing had happened.

``rank-3.txt`` has rank 3's stdout and stderr as text that one can read, ``rich`` the displays, and ``index`` one record for each
piece, in order. :func:`write_text` writes it as one text file. Files are opened for each write: a cell of many ranks needs no descriptor while nothing is written.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from hvdlab.collectives.settings import read_variable
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.cells.sink import KeptOutput, NullSink, OutputSink, Sinks, drain, each_sink
from hvdlab.kernel_ext.notebook.output.error_report import report
from hvdlab.kernel_ext.notebook.output.merge import HOLD, LineMerger, LineSplitter, Piece, Shown, Text, label
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, Clear, Display, Stream

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ANSI = re.compile(r"\x1b\[[0-9;]*m")

IN_MEMORY = 256 << 10
"""Bytes of a cell that need no file."""

AT_ONCE = 1 << 20
"""Bytes that are gathered for one write once there are files."""

AT_LATEST = 1.0
"""Seconds after the last write after which output that comes is written to the files."""

KEPT_BYTES = 2 << 30
"""Bytes in files of all cells together, unless ``HVDLAB_OUTPUT_KEPT`` says otherwise."""

KEPT_CELLS = 256
KEPT_IN_MEMORY = 32 << 20

LARGEST_VALUES = 1 << 20
"""Characters of the tables and pictures of a cell's values that are kept."""

FREE_BYTES = 256 << 20
FREE_PART = 10
"""Bytes of the disk that stay free, and of a small disk the part of it that does, as its inverse: one in so many."""


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a cell: the lines of the report of its failure, or its values as a mime bundle."""

    report: tuple[str, ...] = ()
    values: Mapping[str, Any] | None = None

    @property
    def plain_report(self) -> tuple[str, ...]:
        """Return the report without colours."""
        return tuple(_ANSI.sub("", line) for line in self.report)


class Transcript:
    """The output of one run of a cell, in order of arrival. All methods may be called from any thread.

    Args:
        cell, label, ranks: The run's.
        directory: Where its files are made, if it needs any.
        store: Makes room before something is written to files; None for no limit.

    Attributes:
        total: Bytes that came.
        lost: Bytes that were not kept, and ``why``.
        ended: Ranks whose part has ended.
        ending: The report or the values at the cell's end; None while it runs.
        lock: Held while something is added or replayed.
    """

    def __init__(
        self,
        cell: str,
        label: str,
        ranks: Sequence[int],
        directory: str | Path,
        store: TranscriptStore | None = None,
    ) -> None:
        self.cell, self.label, self.ranks = cell, label, tuple(ranks)
        self.lock = threading.RLock()
        self.total = self.lost = 0
        self.why = ""
        self.ended: set[int] = set()
        self.ending: Ending | None = None
        self.began = time.time()
        self._store = store
        self._spool = Spool(directory)
        #: Entries that are in no file yet; if files can't be written, they stay here to the end.
        self._recent: list[Entry] = []
        self._recent_bytes = 0
        #: When the files were written last, by `time.monotonic()`.
        self._wrote_at = 0.0
        self._rich = 0  # displays and clears so far
        self._cleared: dict[int, int] = {}  # rank to the number of its last clear among those
        self._updated: dict[tuple[int, str], int] = {}  # display to the number of its last update

    # -- while the cell runs ------------------------------------------------------------------------------------------

    def add(self, rank: int, chunks: Sequence[Chunk]) -> None:
        """Append output of a rank."""
        with self.lock:
            for chunk in chunks:
                self._add(rank, chunk, _size(chunk))
                if not isinstance(chunk, Stream):
                    self._number(rank, chunk)
            self._settle()

    def note(self, text: str, *, warning: bool = False) -> None:
        """Append one line about the run itself."""
        with self.lock:
            self._add(WARNING if warning else NOTE, text, len(text))

    def begin(self, rank: int) -> None:
        """Expect output of this rank, too, from now on."""
        with self.lock:
            self.ranks = tuple(sorted({*self.ranks, rank}))
            self.ended.discard(rank)

    def end(self, rank: int) -> None:
        """Expect nothing more from this rank."""
        with self.lock:
            self.ended.add(rank)

    def finish(self, ending: Ending) -> None:
        """Store the cell's ending, and complete its files."""
        with self.lock:
            self.ending = ending
            if self._spool.size and not self.why:
                self._write()

    def flush(self) -> None:
        """Complete the files, if there are any."""
        with self.lock:
            if self._spool.size and not self.why:
                self._write()

    def _add(self, rank: int, what: Chunk | str, size: int) -> None:
        self.total += size
        if self.why:
            self.lost += size
            return
        self._recent.append((rank, what))
        self._recent_bytes += size

    def _settle(self) -> None:
        if self.why or self._recent_bytes <= IN_MEMORY:
            return
        late = time.monotonic() - self._wrote_at > AT_LATEST
        if not self._spool.size or late or self._recent_bytes >= AT_ONCE:
            self._write()

    def _write(self) -> None:
        if not self._recent:
            return
        self.why = self._store.make_room(self._recent_bytes) if self._store is not None else ""
        if self.why:
            return  # what is in memory stays there; what comes now is lost
        try:
            self._spool.append(self._recent)
        except OSError as error:
            self.why = f"{error.strerror or error}: {self._spool.directory}"
            return
        self._recent, self._recent_bytes, self._wrote_at = [], 0, time.monotonic()

    def _number(self, rank: int, chunk: Display | Clear) -> None:
        self._rich += 1
        if isinstance(chunk, Clear):
            self._cleared[rank] = self._rich
        elif chunk.update:
            self._updated[rank, chunk.display_id] = self._rich

    # -- afterwards ---------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.ending is None

    @property
    def in_memory(self) -> int:
        """Return the number of bytes that are in memory."""
        return self._recent_bytes

    @property
    def on_disk(self) -> int:
        """Return the number of bytes that are in files."""
        return self._spool.size

    @property
    def directory(self) -> Path | None:
        """Where ``rank-0.txt`` and so on are, if there are files."""
        return self._spool.directory if self._spool.size else None

    def entries(self) -> Iterator[Entry]:
        """Return the kept entries, in order, without displays that were cleared or updated since. The caller holds :attr:`lock`."""
        with ExitStack() as files:
            yield from self.snapshot(files)

    def snapshot(self, files: ExitStack) -> Iterator[Entry]:
        """Return the entries of now, as :meth:`entries` does, to be read without the lock: more can come meanwhile, or all be removed.

        Args:
            files: Gets the open files; closed when the entries are read.

        Raises:
            OSError: The files can't be read.
        """
        with self.lock:
            kept = chain(self._spool.open(files) if self._spool.size else (), tuple(self._recent))
            return _standing(kept, dict(self._cleared), dict(self._updated))

    def replay(self, sink: OutputSink, ranks: Sequence[int] | None = None) -> None:
        """Give a sink the kept output of these ranks (by default all) and of no others, as if they wrote it now.

        Raises:
            OSError: The files can't be read.
        """
        wanted = self.ranks if ranks is None else ranks
        with self.lock:
            for rank, what in self.entries():
                if isinstance(what, str):
                    sink.note(what, warning=rank == WARNING)
                elif rank in wanted:
                    sink.output(rank, (what,))
            for rank in wanted:
                if rank in self.ended:
                    sink.done(rank, None)

    def remove(self) -> None:
        """Forget everything."""
        with self.lock:
            self._recent, self._recent_bytes = [], 0
            self._spool.remove()
            # Output that still comes is then counted as lost, and makes no files again.
            self.why = self.why or "it was removed to make room"


def _standing(
    kept: Iterable[Entry], cleared: Mapping[int, int], updated: Mapping[tuple[int, str], int]
) -> Iterator[Entry]:
    """Yield the entries but the displays that were cleared or updated since; the mappings have the numbers of those events."""
    number = 0
    for rank, what in kept:
        if not isinstance(what, (Display, Clear)):
            yield rank, what
            continue
        number += 1
        gone = number < cleared.get(rank, 0)
        if isinstance(what, Display) and what.update:
            gone = gone or number < updated[rank, what.display_id]
        if not gone:
            yield rank, what


def _size(chunk: Chunk) -> int:
    if isinstance(chunk, Stream):
        return len(chunk.text)
    if isinstance(chunk, Clear):
        return 16
    return sum(len(value) if isinstance(value, str) else 64 for value in chunk.data.values())


_RECORD = struct.Struct("<iBI")  # rank, kind, bytes
_OUT, _ERR, _RICH, _NOTE = range(4)
_encode = msgspec.msgpack.Encoder().encode
_decode_rich: msgspec.msgpack.Decoder[Display | Clear] = msgspec.msgpack.Decoder(Display | Clear)

NOTE, WARNING = -1, -2
"""In place of a rank, for a line about the run itself."""

Entry = tuple[int, Chunk | str]
"""A rank and what it wrote, or :data:`NOTE` or :data:`WARNING` and a line about the run."""


class Spool:
    """Files in a directory of their own, which is made with the first write.

    Args:
        directory: That directory.

    Attributes:
        size: Bytes in the files.
    """

    def __init__(self, directory: str | Path) -> None:
        self._place = directory
        self.size = 0
        #: Whether the directory can be there; most cells need none.
        self._is_made = False

    @cached_property
    def directory(self) -> Path:
        """Return the directory, which need not be there."""
        # Made when it is needed: with the spool it would be a twentieth of the work for a cell that prints nothing.
        return Path(self._place)

    def text_file(self, rank: int) -> Path:
        """Return the file with a rank's output; there is none if it wrote nothing."""
        return self.directory / f"rank-{rank}.txt"

    def append(self, entries: Sequence[Entry]) -> None:
        """Write entries at the end.

        Raises:
            OSError: They could not be written, or not all of them. None of them is in the index then; nothing more
                must be appended.
        """
        self._is_made = True
        # No directories above these: once the pool's directory is removed, it must not come back.
        for directory in (self.directory.parent, self.directory):
            directory.mkdir(mode=0o700, exist_ok=True)
        data: dict[Path, list[bytes]] = {}
        index = bytearray()
        for rank, what in entries:
            kind, raw = _raw(what)
            data.setdefault(self._file(rank, kind), []).append(raw)
            index += _RECORD.pack(rank, kind, len(raw))
        for path, pieces in data.items():
            self._write(path, b"".join(pieces))
        # Last: after a failure above, no record refers to bytes that are missing.
        self._write(self.directory / "index", bytes(index))

    def entries(self) -> Iterator[Entry]:
        """Yield the appended entries, in order; a piece at a time is in memory."""
        with ExitStack() as files:
            yield from self.open(files)

    def open(self, files: ExitStack) -> Iterator[Entry]:
        """Return the entries of now, in order. They can be read although more are appended, or the files removed, meanwhile.

        Args:
            files: Gets the open files.

        Raises:
            OSError: A file can't be opened.
        """
        index = self.directory / "index"
        if not index.exists():  # the first write failed
            return iter(())
        # All of them now: their names may be gone before their first entry is read.
        opened = {path: files.enter_context(path.open("rb")) for path in self.directory.iterdir()}
        # The last record can be cut short, by a disk that was full in the middle of it.
        records = os.fstat(opened[index].fileno()).st_size // _RECORD.size
        return self._read(opened, opened[index], records)

    def _read(
        self, files: Mapping[Path, BufferedReader], index: BufferedReader, records: int
    ) -> Iterator[Entry]:
        for _ in range(records):
            rank, kind, length = _RECORD.unpack(index.read(_RECORD.size))
            yield rank, _entry(kind, files[self._file(rank, kind)].read(length))

    def remove(self) -> None:
        """Delete the files."""
        if self._is_made:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.size = 0

    def _file(self, rank: int, kind: int) -> Path:
        return self.text_file(rank) if kind in (_OUT, _ERR) else self.directory / "rich"

    def _write(self, path: Path, raw: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(raw)
            while view:
                written = os.write(fd, view)
                self.size += written
                view = view[written:]
        finally:
            os.close(fd)


def _raw(what: Chunk | str) -> tuple[int, bytes]:
    if isinstance(what, str):
        return _NOTE, what.encode("utf-8", "backslashreplace")
    if isinstance(what, Stream):
        return _ERR if what.name == "stderr" else _OUT, what.text.encode("utf-8", "backslashreplace")
    return _RICH, _encode(what)


def _entry(kind: int, raw: bytes) -> Chunk | str:
    if kind == _RICH:
        return _decode_rich.decode(raw)
    text = raw.decode("utf-8", "replace")
    return text if kind == _NOTE else Stream("stderr" if kind == _ERR else "stdout", text)


_HELD = 4 << 20
"""Characters that may wait for the same lines of other ranks; they take the place of time here."""


def write_text(transcript: Transcript, path: Path, ranks: Sequence[int], *, merge: bool = True) -> int:
    """Write the output of these ranks, labelled as in a notebook, and of displays their text form. Return the bytes.

    Raises:
        OSError: The file can't be written.
    """
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file, ExitStack() as files:
        # Without the lock: the disk may be slow, and all mail of the pool waits for output that comes after the cell's end.
        for piece in _pieces(transcript.snapshot(files), ranks, merge=merge):
            file.write(_text(piece, labelled=len(ranks) > 1))
        return file.tell()


def last_lines(transcript: Transcript, ranks: Sequence[int], count: int) -> dict[int, str]:
    """Return the last lines of each of these ranks, both streams together."""
    lines: dict[int, deque[str]] = {rank: deque(maxlen=count) for rank in ranks}
    splitters = {rank: LineSplitter() for rank in ranks}
    ends: dict[int, str] = dict.fromkeys(ranks, "")
    with transcript.lock:
        for rank, what in transcript.entries():
            if rank in lines and isinstance(what, Stream) and what.text:
                lines[rank].extend(splitters[rank].feed(what.text, 0.0))
                ends[rank] = "\n" if what.text.endswith("\n") else ""
    for rank, splitter in splitters.items():
        lines[rank].extend(splitter.flush())
    return {rank: "\n".join(kept) + (ends[rank] if kept else "") for rank, kept in lines.items()}


def _pieces(entries: Iterable[Entry], ranks: Sequence[int], *, merge: bool) -> Iterator[Piece]:
    merger = LineMerger(ranks, merge=merge)
    now = 0.0
    for rank, what in entries:
        now += HOLD * len(what.text) / _HELD if isinstance(what, Stream) else 0.0
        if isinstance(what, str):
            yield from merger.take(now)
            yield Text("stderr", f"{what}\n")
        elif rank in merger.ranks:
            merger.feed(rank, (what,), now)
            yield from merger.take(now)
    for rank in ranks:
        merger.end(rank, now)
    yield from merger.take_all(now)


def _text(piece: Piece, *, labelled: bool) -> str:
    if isinstance(piece, Text):
        return piece.text
    if isinstance(piece, Shown):
        prefix = label(piece.ranks) if labelled else ""
        lines = str(piece.display.data.get("text/plain", "")).splitlines()
        return "".join(f"{prefix}{line}\n" for line in lines)
    return ""


class ShowLate(Protocol):
    """View of the output of ranks after the end of a cell."""

    def __call__(self, rank: int, chunks: tuple[Chunk, ...], shown: Callable[[], None]) -> None:
        """Have it shown, and then call ``shown``: the rank waits for that before it sends much more. Any thread; does not block."""


class GuardedSink(OutputSink):
    """Sink that passes everything on until the inner sink raises; from then on nothing is shown.

    A run that stopped there would never end: its ranks would wait for room for their output, and the user for the ranks.

    Args:
        sink: The inner sink.
    """

    def __init__(self, sink: OutputSink) -> None:
        self._failure: Exception | None = None
        self._sink = sink

    @property
    def failure(self) -> Exception | None:
        """Return the first exception that the inner sink raised; None if it raised none."""
        return self._failure

    def set_transcript(self, transcript: KeptOutput) -> None:
        self._guard(lambda: self._sink.set_transcript(transcript))

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self._guard(lambda: self._sink.output(rank, chunks))

    def began(self, rank: int) -> None:
        self._guard(lambda: self._sink.began(rank))

    def done(self, rank: int, done: CellDone | None) -> None:
        self._guard(lambda: self._sink.done(rank, done))

    def note(self, text: str, *, warning: bool = False) -> None:
        self._guard(lambda: self._sink.note(text, warning=warning))

    def status(self, text: str, *, final: bool) -> None:
        self._guard(lambda: self._sink.status(text, final=final))

    def flush(self) -> None:
        self._guard(self._sink.flush)

    def shorten(self) -> None:
        self._guard(self._sink.shorten)

    def tick(self, now: float) -> float | None:
        return self._guard(lambda: self._sink.tick(now))

    def backlog(self) -> int:
        return self._guard(self._sink.backlog) or 0

    def finished(self, results: CellResults) -> None:
        self._guard(lambda: self._sink.finished(results))

    def _guard(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # whatever a caller's sink raises
            self._failure = self._failure or error
            self._sink = NullSink()
            return None


class CellRecorder(OutputSink):
    """Sink of a run, which records everything and passes it on to any number of sinks, each behind a guard of its own.

    An exception, of a sink or of the recording, stops neither the run nor another sink; :attr:`failure` has the first one.

    Args:
        transcript: Where the run is recorded.
        sinks: They show the run, each of them all ranks. A sink is called after those before it.
    """

    def __init__(self, transcript: Transcript, sinks: Sinks) -> None:
        self.transcript = transcript
        self._failure: Exception | None = None
        self._own = tuple(map(GuardedSink, each_sink(sinks)))
        #: Sinks that were added later, with their ranks: a new tuple each time, since the driver also
        #: iterates without the lock.
        self._attached: tuple[tuple[GuardedSink, frozenset[int]], ...] = ()
        self._wake: Callable[[], None] | None = None
        self._late: ShowLate | None = None
        for sink in each_sink(sinks):
            sink.set_transcript(transcript)

    @property
    def failure(self) -> Exception | None:
        """Return the first exception of the recording or of a sink that the run began with; None if there is none."""
        return self._failure or next((sink.failure for sink in self._own if sink.failure is not None), None)

    def driven(self, wake: Callable[[], None]) -> None:
        """Set the callback by which :meth:`attach` has the driver of the run call :meth:`tick` soon."""
        self._wake = wake

    def show_late(self, show: ShowLate | None) -> None:
        """Give output of ranks after the end of their cell to ``show``."""
        self._late = show

    def late(self, rank: int, chunks: tuple[Chunk, ...], shown: Callable[[], None]) -> None:
        """Show output that a thread, task or subprocess of the cell has written on this rank after the cell's end. Any thread.

        Args:
            rank: The rank.
            chunks: The output.
            shown: Called once it is shown, or recorded if it is not to be shown.
        """
        if rank in self.transcript.ranks:
            with self.transcript.lock:
                self.transcript.add(rank, chunks)
            if self._late is not None:
                self._late(rank, chunks, shown)
                return
        shown()

    def attach(self, sinks: Sinks, ranks: Sequence[int]) -> bool:
        """Show the output of these ranks so far, and all that follows, on further sinks as well.

        Any thread. Once the cell has ended, the sinks get all and no ending, and the caller calls their ``tick``.

        Returns:
            Whether the cell's driver calls the sinks from now on: the cell has not ended.
        """
        with self.transcript.lock:
            running = self.transcript.running
            for sink in each_sink(sinks):
                sink.set_transcript(self.transcript)
                self.transcript.replay(sink, ranks)
                if running:
                    self._attached = (*self._attached, (GuardedSink(sink), frozenset(ranks)))
        # The driver can be asleep without a time limit, and the new sink may have output to show.
        if self._wake is not None:
            self._wake()
        return running

    # -- the driver's thread ------------------------------------------------------------------------------------------

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        with self.transcript.lock:
            self._record(lambda: self.transcript.add(rank, chunks))
            for sink in self._showing(rank):
                sink.output(rank, chunks)

    def began(self, rank: int) -> None:
        with self.transcript.lock:
            self._record(lambda: self.transcript.begin(rank))
            for sink in self._own:  # the others were attached for ranks that the user chose
                sink.began(rank)

    def done(self, rank: int, done: CellDone | None) -> None:
        with self.transcript.lock:
            self.transcript.end(rank)
            for sink in self._showing(rank):
                sink.done(rank, done)

    def note(self, text: str, *, warning: bool = False) -> None:
        with self.transcript.lock:
            self._record(lambda: self.transcript.note(text, warning=warning))
            for sink in self._all():
                sink.note(text, warning=warning)

    def status(self, text: str, *, final: bool) -> None:
        with self.transcript.lock:
            if text and final:
                self._record(lambda: self.transcript.note(text))
            for sink in self._all():
                sink.status(text, final=final)

    def tick(self, now: float) -> float | None:
        return min([at for sink in self._all() if (at := sink.tick(now)) is not None], default=None)

    def flush(self) -> None:
        for sink in self._all():
            sink.flush()

    def backlog(self) -> int:
        return max((sink.backlog() for sink in self._all()), default=0)

    def shorten(self) -> None:
        for sink in self._all():
            sink.shorten()

    def finished(self, results: CellResults) -> None:
        with self.transcript.lock:
            self._record(lambda: self.transcript.finish(_ending(results)))
            if self.transcript.running:  # the values' own code made _ending fail
                self.transcript.finish(Ending())
        for sink, _ in self._attached:
            drain(sink)  # it may have come after the driver's last `tick`; from here on none can come
        for sink in self._all():
            sink.finished(results)
        for sink, _ in self._attached:
            if sink.failure is not None:
                logger.error(
                    "what showed cell %s as well failed", self.transcript.cell, exc_info=sink.failure
                )

    def _record(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # the driver must get to the end of the run, which raises this
            self._failure = self._failure or error

    def _all(self) -> tuple[GuardedSink, ...]:
        attached = self._attached
        return (*self._own, *[sink for sink, _ in attached]) if attached else self._own

    def _showing(self, rank: int) -> tuple[GuardedSink, ...]:
        """Return the sinks that show this rank."""
        attached = self._attached
        return (*self._own, *[sink for sink, ranks in attached if rank in ranks]) if attached else self._own


class TranscriptStore:
    """The recorded cells of a pool.

    Args:
        directory: Where files are made; its owner removes it.
        limit: Bytes of all files together; 0 for no files.
    """

    def __init__(self, directory: Path, limit: int = KEPT_BYTES) -> None:
        self._directory, self._limit = directory, limit
        self._lock = threading.Lock()
        self._recorders: dict[str, CellRecorder] = {}
        #: Those whose memory is added up, since they run or have output there: where hundreds of cells print nothing, these are few.
        self._measured: dict[str, CellRecorder] = {}

    def record(self, cell: str, label: str, ranks: Sequence[int], sinks: Sinks) -> CellRecorder:
        """Return the sink for a run that is about to begin; it shows the run on ``sinks``."""
        name = f"cell-{label.strip('[]')}-{cell}" if label.strip("[]").isalnum() else f"cell-{cell}"
        transcript = Transcript(cell, label, ranks, f"{self._directory}/{name}", self)
        recorder = CellRecorder(transcript, sinks)
        with self._lock:
            self._recorders[cell] = self._measured[cell] = recorder
            self._forget_old()
        return recorder

    def all(self) -> list[CellRecorder]:
        """Return the recorders that are kept, oldest first."""
        with self._lock:
            return list(self._recorders.values())

    def find(self, name: str = "") -> CellRecorder | None:
        """Return the last run of a cell, by its number or id; without a name the last one that wrote something."""
        for recorder in reversed(self.all()):
            transcript = recorder.transcript
            if (
                name.strip("[]") in (transcript.label.strip("[]"), transcript.cell)
                if name
                else _has_any(transcript)
            ):
                return recorder
        return None

    def late(self, rank: int, cell: str, chunks: tuple[Chunk, ...], shown: Callable[[], None]) -> None:
        """Show output of a rank after the end of a cell; see :meth:`CellRecorder.late`. Output of a forgotten cell is dropped. Any thread."""
        with self._lock:
            recorder = self._recorders.get(cell)
        if recorder is None:
            shown()
            return
        recorder.late(rank, chunks, shown)
        with self._lock:
            # After the output: a cell that began in between would have found none and dropped the recorder from this table.
            if self._recorders.get(cell) is recorder:
                self._measured[cell] = recorder

    def forget(self, cell: str) -> None:
        """Drop the recorder of a cell that did not begin, if it is kept."""
        with self._lock:
            self._recorders.pop(cell, None)  # the pool may have been stopped meanwhile
            self._measured.pop(cell, None)

    def close(self) -> None:
        """Forget everything, files included."""
        for recorder in self.all():
            recorder.transcript.remove()
        with self._lock:
            self._recorders.clear()
            self._measured.clear()

    # -- room ---------------------------------------------------------------------------------------------------------

    def _forget_old(self) -> None:
        memory = 0
        for cell, recorder in list(self._measured.items()):
            memory += recorder.transcript.in_memory
            if not recorder.transcript.running and not recorder.transcript.in_memory:
                del self._measured[cell]
        if len(self._recorders) <= KEPT_CELLS and memory <= KEPT_IN_MEMORY:
            return
        for cell in list(self._recorders):
            if len(self._recorders) <= KEPT_CELLS and memory <= KEPT_IN_MEMORY:
                return
            recorder = self._recorders[cell]
            in_memory = recorder.transcript.in_memory
            if not recorder.transcript.running and self._forget(cell):
                memory -= in_memory

    def make_room(self, size: int) -> str:
        """Return why ``size`` more bytes must not be written; empty if they may. Forgets older cells to make room.

        A transcript calls this with its lock held.
        """
        with self._lock:
            used = sum(r.transcript.on_disk for r in self._recorders.values()) + size
            for cell, recorder in list(self._recorders.items()):
                if used <= self._limit:
                    break
                on_disk = recorder.transcript.on_disk
                if on_disk and not recorder.transcript.running and self._forget(cell):
                    used -= on_disk
            if used > self._limit:
                return f"HVDLAB_OUTPUT_KEPT allows {self._limit:,} bytes"
        return self._disk_full(size)

    def _disk_full(self, size: int) -> str:
        try:
            disk = os.statvfs(self._directory.parent)
        except OSError as error:
            return f"{error.strerror}: {self._directory.parent}"
        reserve = min(FREE_BYTES, disk.f_blocks * disk.f_frsize // FREE_PART)
        free = disk.f_bavail * disk.f_frsize
        return f"only {free >> 20} MiB are free in {self._directory.parent}" if free - size < reserve else ""

    def _forget(self, cell: str) -> bool:
        """Forget a cell, unless it is being shown. Returns whether it was forgotten."""
        transcript = self._recorders[cell].transcript
        # Without waiting: a cell that writes has its transcript's lock and waits, in `make_room`, for the store's.
        if not transcript.lock.acquire(blocking=False):
            return False
        try:
            transcript.remove()
        finally:
            transcript.lock.release()
        del self._recorders[cell]
        self._measured.pop(cell, None)
        return True


def kept_limit(environ: Mapping[str, str]) -> int:
    """Return the bytes of files that may be kept, as the user wants it.

    Raises:
        InvalidRequestError: A variable's value is not valid.
    """
    size = read_variable("HVDLAB_OUTPUT_KEPT", environ)
    return KEPT_BYTES if size is None else int(size)  # type: ignore[arg-type]  # it is a number


def _has_any(transcript: Transcript) -> bool:
    return bool(
        transcript.total or transcript.running or (transcript.ending and transcript.ending != Ending())
    )


def _ending(results: CellResults) -> Ending:
    if lines := report(results):
        return Ending(report=tuple(lines))
    if not results.has_values:
        return Ending()
    values = {"text/plain": repr(results)}
    if (html := results._repr_html_()) is not None and len(html) <= LARGEST_VALUES:
        values["text/html"] = html
    return Ending(values=values)
