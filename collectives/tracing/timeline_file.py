"""A Chrome trace on disk that grows while the job runs and can be opened at any moment.

The file is the array form of the format, whose closing bracket may be missing: one event per line, whole lines per
write. A process that is killed leaves a file that trace viewers open; ``close`` makes it strict JSON.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from pathlib import Path

import msgspec

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.time_limits import wall_offset
from hvdlab.collectives.tracing.chrome_trace import HOLD_SECONDS, ChromeTrace, TraceEvent
from hvdlab.collectives.tracing.record_format import decode

QUEUED_BYTES = 128 * 1024 * 1024
"""Bytes of batches that may wait for the disk; more than the history that a late subscriber gets at once."""
WRITE_BYTES = 65536
"""Bytes of events that are collected for one write."""
CLOCK = "start_time_since_epoch_in_micros"
EXIT_SECONDS = 10.0
"""Seconds that the end of the process waits for a disk that is stuck."""


class TimelineFile:
    """File with the events of all ranks, written on a thread of its own.

    :meth:`feed` never waits: batches with which the disk can't keep up are dropped and counted in the trace. A disk error ends
    the writing; the file stays readable as far as it was written, and :meth:`close` raises the error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mark_cycles: bool = False,
        hold: float = HOLD_SECONDS,
        queued_bytes: int = QUEUED_BYTES,
    ) -> None:
        self.path = Path(path)
        #: Batches that were dropped as the disk could not keep up.
        self.dropped = 0
        self._trace = ChromeTrace(mark_cycles=mark_cycles, hold=hold)
        #: Batches that wait to be written; ``None`` ends the thread.
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        #: Bytes that may still be queued. Under ``_lock``.
        self._room = queued_bytes
        self._lock = threading.Lock()
        self._closing = False
        #: Set when the thread is done with the file.
        self._done = threading.Event()
        #: The error that ended the writing.
        self._error: Exception | None = None
        #: Batches that could not be read.
        self._rejected = 0
        #: Bytes of whole events in the file: a file that could not be written to its end is cut here.
        self._size = 0
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._thread = threading.Thread(target=self._run, name="hvdlab-timeline", daemon=True)
        atexit.register(self._close_at_exit)
        self._thread.start()

    @classmethod
    def start(
        cls, path: str | os.PathLike[str], *, mark_cycles: bool = False, hold: float = HOLD_SECONDS
    ) -> TimelineFile:
        """Create (or empty) the file and begin to write.

        Args:
            path: Where to write. Its directory must exist.
            mark_cycles: Mark each order to execute, as Horovod's ``mark_cycles`` does.
            hold: Seconds to wait for the other ranks' records of an operation before it is written without them.

        Raises:
            OSError: The file can't be created.
        """
        return cls(path, mark_cycles=mark_cycles, hold=hold)

    def feed(self, rank: int, batch: bytes) -> None:
        """Add a batch of ``Recorder.drain``. Any thread; never blocks; ignored after :meth:`close`."""
        if self._closing:
            return
        with self._lock:
            if len(batch) > self._room:
                self.dropped += 1
                return
            # Before the batch is queued: the thread gives its bytes back as soon as it has the batch.
            self._room -= len(batch)
        self._queue.put((rank, batch))

    def close(self, timeout: float | None = None) -> None:
        """Write all that was fed so far, complete the file and end the thread. May be called again, also after it failed.

        Args:
            timeout: Seconds to wait for the disk; ``None`` waits without limit.

        Raises:
            OSError: Writing had failed; the file holds the events that were written before. So does any other error of the
                conversion, which would be a fault of hvdlab's.
            TimeoutError: The disk needs longer; the writing goes on.
        """
        self._closing = True
        # One None is enough, but an interrupt may have come before an earlier call put it: a second one does no harm.
        self._queue.put(None)
        # Not by join(): if that is interrupted, it marks the thread as ended although it is not.
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self.path} could not be completed within {timeout} s")
        self._thread.join()
        atexit.unregister(self._close_at_exit)
        if self._error is not None:
            raise self._error

    def _close_at_exit(self) -> None:
        self.close(EXIT_SECONDS)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._put(b"[")
            self._loop()
            self._finish()
        except Exception as error:  # noqa: BLE001  (raised by close(); without it, batches would pile up, and close() report success)
            self._error = error
            self._salvage()
            self._discard()
        finally:
            os.close(self._fd)
            # After the file was closed: a caller of `close()` can move or remove it.
            self._done.set()

    def _loop(self) -> None:
        while True:
            deadline = self._trace.deadline()
            try:
                item = self._queue.get(
                    timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
                )
            except queue.Empty:
                self._write(self._trace.expire(time.monotonic()))
                continue
            if item is None:
                return
            self._convert(*item)
            self._write(self._trace.expire(time.monotonic()))

    def _convert(self, rank: int, data: bytes) -> None:
        with self._lock:
            self._room += len(data)
        try:
            batch = decode(data)
            if batch.rank != rank:
                raise ProtocolError(f"event batch: rank {rank} sent one of rank {batch.rank}")
        except ProtocolError:
            self._rejected += 1
            return
        self._write(self._trace.feed(batch, time.monotonic()))

    def _finish(self) -> None:
        self._write(self._trace.close())
        for name, count in (("BATCHES_DROPPED", self.dropped), ("BATCHES_NOT_READABLE", self._rejected)):
            if count:
                self._write(self._trace.note(name, {"batches": count}))
        self._put(b"\n]\n")

    # -- the file -----------------------------------------------------------------------------------------------------

    def _write(self, events: list[TraceEvent]) -> None:
        encode = msgspec.json.encode
        # Only the bracket is in the file, so these are the first events.
        if events and self._size == 1:
            events = [_with_clock(events[0]), *events[1:]]
        pending = bytearray()
        for event in events:
            # In front of the event, so that the file can end behind any of them.
            pending += b",\n" if self._size + len(pending) > 1 else b"\n"
            pending += encode(event)
            if len(pending) >= WRITE_BYTES:
                self._put(pending)
                pending = bytearray()
        if pending:
            self._put(pending)

    def _put(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        # Only once all is written: after an error the file is cut behind the events before.
        self._size += len(data)

    def _salvage(self) -> None:
        """Cut the file behind its last whole event after an error, and close the array, if the disk allows that."""
        try:
            os.ftruncate(self._fd, self._size)
            os.pwrite(self._fd, b"\n]\n" if self._size else b"[]\n", self._size)
        except OSError:
            # The file stays without its bracket, which viewers accept; the first error is the one to report.
            return

    def _discard(self) -> None:
        """Drop the batches that come until :meth:`close`, so that they don't pile up."""
        while self._queue.get() is not None:
            pass


def _with_clock(event: TraceEvent) -> TraceEvent:
    """Return the first event with the time of day at 0 of the time axis, under the name that it has in Horovod's timeline."""
    zero = int(wall_offset() * 1e6)
    return {**event, "args": {**event.get("args", {}), CLOCK: zero}}
