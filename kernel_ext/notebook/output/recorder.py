"""The transcripts of a pool: it records every cell while it runs, and forgets the oldest when there are too many."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from hvdlab.collectives.variables import read_variables
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.cells.sink import KeptOutput, NullSink, OutputSink, Sinks, each_sink
from hvdlab.kernel_ext.notebook.output.error_report import report
from hvdlab.kernel_ext.notebook.output.transcript import Ending, Transcript
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk


class ShowLate(Protocol):
    """View of the output of ranks after the end of a cell."""

    def __call__(self, rank: int, chunks: tuple[Chunk, ...], shown: Callable[[], None]) -> None:
        """Have it shown, and then call ``shown``: the rank waits for that before it sends much more. Any thread; does not block."""


logger = logging.getLogger(__name__)

KEPT_BYTES = 2 << 30
"""Bytes in files of all cells together, unless ``HVDLAB_OUTPUT_KEPT`` says otherwise."""

KEPT_CELLS = 256
KEPT_IN_MEMORY = 32 << 20

LARGEST_VALUES = 1 << 20
"""Characters of the tables and pictures of a cell's values that are kept."""

FREE_BYTES = 256 << 20
FREE_PART = 10
"""What is left free on the disk: these bytes, or one part in so many of a small one."""


T = TypeVar("T")


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

    def attach(self, sinks: Sinks, ranks: Sequence[int]) -> None:
        """Show the output of these ranks so far, and all that follows, on further sinks as well.

        Any thread. Once the cell has ended, the sinks get all and no ending.
        """
        with self.transcript.lock:
            for sink in each_sink(sinks):
                sink.set_transcript(self.transcript)
                self.transcript.replay(sink, ranks)
                if self.transcript.running:
                    self._attached = (*self._attached, (GuardedSink(sink), frozenset(ranks)))
        if self._wake is not None:
            self._wake()

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
            self._record(lambda: self.transcript.end(rank))
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
        times = [sink.tick(now) for sink in self._all()]
        return min((at for at in times if at is not None), default=None)

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

    def _all(self) -> Iterator[GuardedSink]:
        yield from self._own
        for sink, _ in self._attached:
            yield sink

    def _showing(self, rank: int) -> Iterator[GuardedSink]:
        """Yield the sinks that show this rank."""
        yield from self._own
        for sink, ranks in self._attached:
            if rank in ranks:
                yield sink


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

    def record(self, cell: str, label: str, ranks: Sequence[int], sinks: Sinks) -> CellRecorder:
        """Return the sink for a run that is about to begin; it shows the run on ``sinks``."""
        name = f"cell-{label.strip('[]')}-{cell}" if label.strip("[]").isalnum() else f"cell-{cell}"
        transcript = Transcript(cell, label, ranks, self._directory / name, self._room)
        recorder = CellRecorder(transcript, sinks)
        with self._lock:
            self._recorders[cell] = recorder
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
        else:
            recorder.late(rank, chunks, shown)

    def forget(self, cell: str) -> None:
        """Drop the recorder of a cell that did not begin."""
        with self._lock:
            del self._recorders[cell]

    def close(self) -> None:
        """Forget everything, files included."""
        for recorder in self.all():
            recorder.transcript.remove()
        with self._lock:
            self._recorders.clear()

    # -- room ---------------------------------------------------------------------------------------------------------

    def _forget_old(self) -> None:
        memory = sum(r.transcript.in_memory for r in self._recorders.values())
        for cell, recorder in list(self._recorders.items()):
            if len(self._recorders) <= KEPT_CELLS and memory <= KEPT_IN_MEMORY:
                return
            if not recorder.transcript.running:
                memory -= recorder.transcript.in_memory
                self._forget(cell)

    def _room(self, size: int) -> str:
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
        if not transcript.lock.acquire(blocking=False):
            return False
        try:
            transcript.remove()
        finally:
            transcript.lock.release()
        del self._recorders[cell]
        return True


def kept_limit(environ: Mapping[str, str]) -> int:
    """Return the bytes of files that may be kept, as the user wants it.

    Raises:
        InvalidRequestError: A variable's value is not valid.
    """
    return int(read_variables(environ).get("HVDLAB_OUTPUT_KEPT", KEPT_BYTES))  # type: ignore[arg-type]  # it is a number


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
