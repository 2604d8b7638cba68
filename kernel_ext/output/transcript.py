"""Everything that a cell has shown, kept by the pool, to show it again or to look up what was not shown.

A little of it is in memory, more goes into files (:mod:`hvdlab.kernel_ext.output.spool`). If no file can be written
(the disk is full, no descriptor is left, the limit is reached) what comes then is counted but not kept; the cell goes
on as if nothing had happened.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdlab.kernel_ext.cells.sink import OutputSink
from hvdlab.kernel_ext.output.spool import NOTE, WARNING, Entry, Spool
from hvdlab.kernel_ext.wire.cells import Chunk, Clear, Display, Stream

_ANSI = re.compile(r"\x1b\[[0-9;]*m")

IN_MEMORY = 256 << 10
"""Bytes of a cell that need no file."""

AT_ONCE = 1 << 20
"""Bytes that are gathered for one write once there are files."""

AT_LATEST = 1.0
"""Seconds after the last write after which output that comes is written to the files."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a cell left at its end: the lines of a report that it failed, or its values as a mime bundle."""

    report: tuple[str, ...] = ()
    values: Mapping[str, Any] | None = None

    @property
    def plain_report(self) -> tuple[str, ...]:
        """The report without colours."""
        return tuple(_ANSI.sub("", line) for line in self.report)


class Transcript:
    """The output of one run of a cell, in order of arrival. All methods may be called from any thread.

    Args:
        cell, label, ranks: The run's.
        directory: Where its files are made, if it needs any.
        room: ``room(bytes)`` says why that many more must not be written to files, or nothing.

    Attributes:
        total: Bytes that came.
        lost: Bytes that were not kept, and ``why``.
        ended: Ranks whose part has ended.
        ending: What the cell left at its end; None while it runs.
        lock: Held while something is added or replayed.
    """

    def __init__(
        self,
        cell: str,
        label: str,
        ranks: Sequence[int],
        directory: Path,
        room: Callable[[int], str] = lambda size: "",
    ) -> None:
        self.cell, self.label, self.ranks = cell, label, tuple(ranks)
        self.lock = threading.RLock()
        self.total = self.lost = 0
        self.why = ""
        self.ended: set[int] = set()
        self.ending: Ending | None = None
        self.began = time.time()
        self._room = room
        self._spool = Spool(directory)
        self._recent: list[Entry] = []
        self._recent_bytes = 0
        self._wrote_at = 0.0
        self._rich = 0  # displays and clears so far
        self._cleared: dict[int, int] = {}  # rank to the number of its last clear among those
        self._updated: dict[tuple[int, str], int] = {}  # display to the number of its last update

    # -- while the cell runs ------------------------------------------------------------------------------------------

    def add(self, rank: int, chunks: Sequence[Chunk]) -> None:
        """A rank wrote."""
        with self.lock:
            for chunk in chunks:
                self._add(rank, chunk, _size(chunk))
                if not isinstance(chunk, Stream):
                    self._number(rank, chunk)
            self._settle()

    def note(self, text: str, *, warning: bool = False) -> None:
        """One line about the run itself."""
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
        """The cell is over; what its files lack is written."""
        with self.lock:
            self.ending = ending
            if self._spool.size and not self.why:
                self._write()

    def flush(self) -> None:
        """Write what the files lack, if there are files."""
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
        self.why = self._room(self._recent_bytes)
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
        """Bytes that are in memory."""
        return self._recent_bytes

    @property
    def on_disk(self) -> int:
        """Bytes that are in files."""
        return self._spool.size

    @property
    def directory(self) -> Path | None:
        """Where ``rank-0.txt`` and so on are, if there are files."""
        return self._spool.directory if self._spool.size else None

    def entries(self) -> Iterator[Entry]:
        """What was kept, in order, without displays that were cleared or updated since. The caller holds :attr:`lock`."""
        number = 0
        for rank, what in self._all():
            if not isinstance(what, (Display, Clear)):
                yield rank, what
                continue
            number += 1
            gone = number < self._cleared.get(rank, 0)
            if isinstance(what, Display) and what.update:
                gone = gone or number < self._updated[rank, what.display_id]
            if not gone:
                yield rank, what

    def _all(self) -> Iterator[Entry]:
        if self._spool.size:
            yield from self._spool.entries()
        yield from self._recent

    def replay(self, sink: OutputSink, ranks: Sequence[int] | None = None) -> None:
        """Give a sink what was kept of these ranks (by default all) and of no others, as if they wrote it now.

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
            self.why = self.why or "it was removed to make room"


def _size(chunk: Chunk) -> int:
    if isinstance(chunk, Stream):
        return len(chunk.text)
    if isinstance(chunk, Clear):
        return 16
    return sum(len(value) if isinstance(value, str) else 64 for value in chunk.data.values())
