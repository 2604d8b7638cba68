"""Spans of executed and failed operations on their way to the recorder, flushes of it, and samples of the clock."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import ClassVar, Protocol

from hvdlab.collectives.engine.entries import Entry, RunBatch
from hvdlab.collectives.planes.base import PhaseTimes
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.tracing.record_format import ClockSamples
from hvdlab.collectives.tracing.recorder import Recorder
from hvdlab.collectives.types import DType, OpKind

UNTIMED_BYTES = 4096
"""Up to this size a member that computes a result by itself spends its time in Python, and no phase is recorded."""
_NO_PHASES = PhaseTimes()
"""Times of a collective in which no plane took part. Never changed."""


class EventFlusher(Protocol):
    """Sender of recorded events, as far as the threads that record them use it."""

    def schedule_events(self) -> None:
        """Schedule the sending of recorded events, soon but not too often. Any thread."""
        ...


class SpanLog:
    """Log of a rank's spans: the recorder, the context of its batches, and whether a flush of it is scheduled.

    A listener that comes later gets no earlier batches. So each batch repeats its context: how this rank's clock compares with
    the coordinator's, and how many members the process sets of its operations have.

    Args:
        rank: This rank.
        enabled: Whether anything is recorded.
        remote: Whether this rank's clock can differ from the coordinator's, so that the two have to be compared.

    Attributes:
        recorder: The recorder.
        flusher: Sends what is recorded here. Set by it before the first record.
    """

    INTERVAL: ClassVar[float] = 0.05
    """Seconds between two flushes, at least; a reader that tails a timeline file sees a span after one such interval and its way."""
    CLOCK_INTERVAL: ClassVar[float] = 30.0
    """Seconds between two questions for the coordinator's clock, at least."""

    def __init__(self, rank: int, enabled: bool, *, remote: bool = False) -> None:
        self.recorder = Recorder(rank, enabled=enabled)
        self.flusher: EventFlusher
        self._remote = remote
        #: Held while a flush is scheduled.
        self._due = threading.Lock()
        #: Answers of the coordinator about its clock.
        self._samples = ClockSamples()
        #: Number of the last question for the clock, and its time in ns.
        self._asked = (0, 0)
        #: Generation, size and plane of each process set.
        self._members: dict[int, tuple[int, int, str]] = {}
        #: Process sets with operations since the last flush.
        self._touched: set[int] = set()

    # -- operations -----------------------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Return whether anything is recorded."""
        return self.recorder.enabled

    def batch(
        self, batch: RunBatch, started: int, finished: int, phases: PhaseTimes, ok: bool = True
    ) -> bool:
        """Record a batch that was executed, or failed. Return whether there is something to flush.

        Args:
            batch: The batch.
            started: Time of its begin in ns; 0 if it failed before.
            finished: Time at which it was done or failed, in ns.
            phases: Times that the plane measured.
            ok: Whether it was executed to its end.
        """
        recorder = self.recorder
        if not recorder.enabled:
            return False
        self._touched.add(batch.process_set)
        name_id = recorder.name_id
        first = batch.entries[0]
        request = first.request
        if len(batch.entries) == 1:
            recorder.span(
                name_id(request.label or first.name, first.site),
                request.kind,
                request.dtype,
                batch.process_set,
                batch.sequence,
                batch.batch,
                request.input.nbytes if request.input is not None else 0,
                first.submitted,
                first.received,
                started,
                finished,
                phases,
                ok,
            )
            return True
        recorder.spans(
            request.kind,
            request.dtype,
            batch.process_set,
            batch.sequence,
            batch.batch,
            first.received,
            started,
            finished,
            phases,
            ok,
            [
                (
                    name_id(e.request.label or e.name, e.site),
                    0 if e.request.input is None else e.request.input.nbytes,
                    e.submitted,
                )
                for e in batch.entries
            ],
        )
        return True

    def posted(self, entry: Entry, sequence: int, finished: int) -> bool:
        """Record a collective that the members agreed on and computed in shared memory. Return whether no flush is scheduled for it.

        Args:
            entry: The collective; it began when all had posted it.
            sequence: Its number, equal on all members.
            finished: Time at which it was done, in ns.
        """
        recorder, request = self.recorder, entry.request
        if not recorder.enabled:
            return False
        self._touched.add(request.process_set)
        nbytes = request.input.nbytes if request.input is not None else 0
        recorder.span(
            recorder.name_id(request.label or entry.name, entry.site),
            request.kind,
            request.dtype,
            request.process_set,
            sequence,
            0,
            nbytes,
            entry.submitted,
            entry.received,
            entry.received,
            finished,
            _NO_PHASES if nbytes <= UNTIMED_BYTES else PhaseTimes(transfer=finished - entry.received),
        )
        # Not claimed here: schedule_events() does that, which the caller calls next.
        return not self._due.locked()

    def failed(self, entry: Entry, now: int) -> bool:
        """Record a collective that failed at ``now`` (ns) before it was ordered. Return whether there is something to flush.

        One that was ordered is recorded by the thread that executes it, with its times.
        """
        if entry.received or not self.recorder.enabled:
            return False
        request = entry.request
        self.recorder.span(
            self.recorder.name_id(request.label or entry.name, entry.site),
            request.kind,
            request.dtype,
            request.process_set,
            0,
            0,
            request.input.nbytes if request.input is not None else 0,
            entry.submitted,
            0,
            0,
            now,
            PhaseTimes(),
            ok=False,
        )
        return True

    def request(
        self,
        name: str,
        site: str,
        kind: OpKind,
        dtype: DType,
        group: int,
        sequence: int,
        batch: int,
        nbytes: int,
        times: tuple[int, int, int],
        phases: PhaseTimes,
        ok: bool,
    ) -> bool:
        """Record a request to a parameter server. Return whether there is something to flush.

        Args:
            name, site: Its key, and the user's line.
            kind, dtype, nbytes: The operation, its element type, and its size in bytes.
            group, sequence, batch: The numbers of :mod:`~hvdlab.collectives.tracing.record_format`.
            times: When it was asked for, when the server began with it (0 if never), and when it ended, in ns.
            phases: Times that the server measured.
            ok: Whether the server did it.
        """
        recorder = self.recorder
        if not recorder.enabled:
            return False
        self._touched.add(group)
        called, began, finished = times
        recorder.span(
            recorder.name_id(name, site),
            kind,
            dtype,
            group,
            sequence,
            batch,
            nbytes,
            called,
            began,
            began,
            finished,
            phases,
            ok,
        )
        return True

    # -- flushing -------------------------------------------------------------------------------------------------

    def claim_flush(self) -> bool:
        """Return whether the caller has to schedule the next flush, since none is scheduled."""
        # The cheap check first: this is called for each operation. A lock as the mark: two threads can't both acquire it.
        return not self._due.locked() and self._due.acquire(blocking=False)

    def release_flush(self) -> None:
        """Allow the next :meth:`claim_flush`."""
        with contextlib.suppress(RuntimeError):  # no thread had claimed it
            self._due.release()

    def take(self) -> list[bytes]:
        """Remove and return the batches that were recorded since the last call. Control thread."""
        # Otherwise the context alone would make a batch at each flush.
        if self.recorder.pending():
            self._add_context()
        return self.recorder.drain()

    def _add_context(self) -> None:
        # Exchanged in one statement, while other threads add to the set; one that they add late is in the next batch.
        touched, self._touched = self._touched, set()
        for process_set in touched:
            if process_set in self._members:
                self.recorder.members(process_set, *self._members[process_set])
        now = time.monotonic_ns()
        sample = self._samples.best(now) if self._remote else (now, now, now)
        if sample is not None:
            self.recorder.clock(*sample)

    def members(self, process_set: int, generation: int, size: int, plane: str = "") -> None:
        """Keep and record the members of a process set, or of a store's group of requests. Any thread."""
        self._members[process_set] = (generation, size, plane)
        self.recorder.members(process_set, generation, size, plane)

    def dissolved(self, process_set: int) -> None:
        """Record the end of a process set. Control thread."""
        if (known := self._members.pop(process_set, None)) is not None:
            self.recorder.members(process_set, known[0] + 1, 0)

    # -- clocks ---------------------------------------------------------------------------------------------------

    def ask_clock(self) -> m.Ping | None:
        """Return the question to send to the coordinator now; ``None`` if it is not time to ask again. Control thread."""
        if not self._remote or not self.recorder.enabled:
            return None
        number, asked = self._asked
        now = time.monotonic_ns()
        if number and now < asked + self.CLOCK_INTERVAL * 1e9:
            return None
        self._asked = (number + 1, now)
        return m.Ping(number + 1)

    def clock_answer(self, message: m.Pong) -> None:
        """Keep the coordinator's answer to :meth:`ask_clock`; one to an older question is dropped. Control thread."""
        number, asked = self._asked
        # Of older questions the time is not kept: with that of the last one, their answers would give a wrong offset.
        if message.number == number:
            self._samples.add(asked, time.monotonic_ns(), message.clock)
