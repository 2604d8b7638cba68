"""The recorder of a rank: spans, cells and metrics are written where they happen, into a ring that never grows.

Recording is one ``struct.pack_into`` under a lock that no thread holds for longer than a copy. It allocates only a few
small integers and sends nothing: the control thread drains the ring in batches.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hvdlab.collectives.text import UNKNOWN_SITE
from hvdlab.collectives.tracing import record_format
from hvdlab.collectives.tracing.record_format import (
    BATCH_RECORDS,
    FLAG_FAILED,
    FLAG_HAS_STEP,
    RECORD_BYTES,
    SMALL,
    SMALL_FLOAT,
    SPAN,
    RecordType,
    Span,
    clock_domain,
)
from hvdlab.collectives.types import DType, OpKind

if TYPE_CHECKING:
    from hvdlab.collectives.planes.base import PhaseTimes

DEFAULT_CAPACITY = 65536
"""Records of a ring, of 64 bytes each: 4 MiB."""
MAX_NAMES = 8192
"""Names, with their call sites, in one table of a recorder."""

_SPAN_TYPE = int(RecordType.SPAN)
_METRIC_TYPE = int(RecordType.METRIC)
_pack_metric = SMALL_FLOAT.pack_into
_U32 = 0xFFFFFFFF
_UNKNOWN = (b"(unknown name id)", b"")


class Recorder:
    """Ring of one rank's records. Every method may be called from any thread; none blocks and none raises for bad values.

    When the ring is full the oldest records make room and are counted. A span whose times are impossible is refused
    and counted: it would be a lie on screen. Both counts travel with each batch.

    Args:
        rank: Rank that the batches are marked with; may be changed when the rank learns its number.
        capacity: Records to keep until drained, rounded up to a power of two; 64 bytes each.
        max_names: Different names (with their call sites) to keep, and as many of those before. Programs that use more between
            two drains lose some.
        enabled: Whether anything is recorded; may be set at any time.
    """

    def __init__(
        self,
        rank: int = 0,
        capacity: int = DEFAULT_CAPACITY,
        *,
        max_names: int = MAX_NAMES,
        enabled: bool = True,
    ) -> None:
        if capacity < 1 or max_names < 1:
            raise ValueError("capacity and max_names must be at least 1")
        self.rank = rank
        self.capacity = 1 << (capacity - 1).bit_length()
        self.enabled = enabled
        #: Records that made room for newer ones.
        self.dropped = 0
        #: Records whose values were impossible.
        self.refused = 0
        self._ring = bytearray(self.capacity * RECORD_BYTES)
        self._mask = self.capacity - 1
        #: Counts of all records ever written and ever drained. Their difference may exceed the capacity until the next
        #: drain, so that a writer overwrites the oldest record without reading ``_tail``.
        self._head = 0
        self._tail = 0
        #: Held while a record is written or copied out, and while a name is defined.
        self._lock = threading.Lock()
        #: Number of each name and call site. Numbers are never used again, so that a record can't get another's name.
        #: Once there are ``max_names``, a new table is begun.
        self._ids: dict[tuple[str, str], int] = {("", ""): 0}
        #: Texts of the numbers in ``_ids``, and those of the table before, for records that wait to be drained.
        self._texts: dict[int, tuple[bytes, bytes]] = {}
        self._texts_before: dict[int, tuple[bytes, bytes]] = {}
        self._next_id = 1
        self._max_names = max_names
        #: The numbers that the last batch used, and its definitions of them.
        self._defined: set[int] | None = None
        self._table = (0, b"")

    # -- names --------------------------------------------------------------------------------------------------------

    def name_id(self, name: str, site: str = "") -> int:
        """Return the number of ``name``, used at ``site``, in records of this recorder; to be used at once."""
        # Without the lock: numbers of a table never change, and a full table is replaced as a whole.
        ident = self._ids.get((name, site))
        return self._define(name, site) if ident is None else ident

    def _define(self, name: str, site: str) -> int:
        with self._lock:
            # Another thread may have defined it since the caller looked without the lock.
            if (name, site) in self._ids:
                return self._ids[name, site]
            if len(self._texts) >= self._max_names:
                # In this order: a thread that drains reads the new texts, then those before, without the lock.
                self._texts_before = self._texts
                self._ids, self._texts = {("", ""): 0}, {}
            # From 1 to 2**32 - 1: records have 32 bits for the number, and 0 is the empty name.
            ident, self._next_id = self._next_id, self._next_id % _U32 + 1
            known = "" if site == UNKNOWN_SITE else site
            self._texts[ident] = record_format.clean_text(name), record_format.clean_text(known)
            # After the text: from here on a thread without the lock may write records with this number, and a batch needs their text.
            self._ids[name, site] = ident
            return ident

    # -- spans --------------------------------------------------------------------------------------------------------

    def span(
        self,
        name_id: int,
        kind: OpKind | int,
        dtype: DType | int,
        process_set: int,
        sequence: int,
        batch: int,
        nbytes: int,
        submitted_ns: int,
        ready_ns: int,
        started_ns: int,
        finished_ns: int,
        phases: PhaseTimes,
        ok: bool = True,
    ) -> None:
        """Record one tensor of one collective; see :class:`~hvdlab.collectives.tracing.record_format.Span`.

        Its fields are positional and are packed as they come: an object for them would cost two fifths of a record.

        Times are ``time.monotonic_ns()``. A ``ready_ns`` or ``started_ns`` of 0 means that it failed before it got
        there. ``sequence`` and ``batch`` are those of the order to execute and equal on all members.
        """
        if not self.enabled:
            return
        try:
            if not submitted_ns <= ready_ns <= started_ns <= finished_ns:
                raise ValueError
            with self._lock:
                head = self._head
                try:
                    SPAN.pack_into(
                        self._ring,
                        (head & self._mask) * RECORD_BYTES,
                        _SPAN_TYPE,
                        kind,
                        dtype,
                        0 if ok else FLAG_FAILED,
                        name_id,
                        process_set,
                        sequence & _U32,
                        batch & _U32,
                        nbytes,
                        submitted_ns,
                        ready_ns - submitted_ns,
                        started_ns - submitted_ns,
                        finished_ns - submitted_ns,
                        phases.pack,
                        phases.transfer,
                        phases.wait,
                        phases.unpack,
                    )
                except struct.error:
                    # Before another thread drains: the fields in front of the one that did not fit have overwritten the oldest record.
                    self._drop_oldest()
                    raise
                # Last: another thread reads the head without the lock, for the number of records that it can drain.
                self._head = head + 1
        except (struct.error, ValueError):
            # Too long for 32 bits of nanoseconds, or it failed early, or impossible.
            one = (name_id, nbytes, submitted_ns)
            times = (ready_ns, started_ns, finished_ns)
            self._unusual(one, int(kind), int(dtype), (process_set, sequence, batch), times, phases, ok)

    def spans(
        self,
        kind: OpKind | int,
        dtype: DType | int,
        process_set: int,
        sequence: int,
        batch: int,
        ready_ns: int,
        started_ns: int,
        finished_ns: int,
        phases: PhaseTimes,
        ok: bool,
        tensors: Iterable[tuple[int, int, int]],
    ) -> None:
        """Record all tensors of a fused operation: ``(name_id, nbytes, submitted_ns)`` each, the rest in common."""
        if not self.enabled:
            return
        pack_into, ring, mask, number = SPAN.pack_into, self._ring, self._mask, int(kind)
        pack, transfer, wait, unpack = phases.pack, phases.transfer, phases.wait, phases.unpack
        element, flags = int(dtype), 0 if ok else FLAG_FAILED
        order = (process_set, sequence & _U32, batch & _U32)
        unusual = []
        with self._lock:
            head = self._head
            for tensor in tensors:
                name, nbytes, begin = tensor
                try:
                    if not begin <= ready_ns <= started_ns <= finished_ns:
                        raise ValueError
                    pack_into(
                        ring,
                        (head & mask) * RECORD_BYTES,
                        _SPAN_TYPE,
                        number,
                        element,
                        flags,
                        name,
                        *order,
                        nbytes,
                        begin,
                        ready_ns - begin,
                        started_ns - begin,
                        finished_ns - begin,
                        pack,
                        transfer,
                        wait,
                        unpack,
                    )
                    head += 1
                except (struct.error, ValueError):
                    unusual.append(tensor)
            self._head = head
            if unusual:
                self._drop_oldest()
        # Without the lock, which `_put()` acquires.
        for tensor in unusual:
            self._unusual(tensor, number, element, order, (ready_ns, started_ns, finished_ns), phases, ok)

    def _unusual(
        self,
        tensor: tuple[int, int, int],
        kind: int,
        dtype: int,
        order: tuple[int, int, int],
        times: tuple[int, int, int],
        phases: PhaseTimes,
        ok: bool,
    ) -> None:
        name_id, nbytes, submitted_ns = tensor
        ready_ns, started_ns, finished_ns = times
        process_set, sequence, batch = order
        try:
            record = record_format.pack_span(
                name_id,
                Span(
                    "",
                    OpKind(kind),
                    DType(dtype),
                    process_set,
                    sequence & _U32,
                    batch & _U32,
                    nbytes,
                    submitted_ns,
                    ready_ns or None,
                    started_ns or None,
                    finished_ns,
                    phases.pack,
                    phases.transfer,
                    phases.wait,
                    phases.unpack,
                    ok,
                ),
            )
        except (struct.error, ValueError):
            with self._lock:
                self.refused += 1
            return
        self._put(record)

    # -- small records ------------------------------------------------------------------------------------------------

    def cell_begin(self, cell: str) -> None:
        """Record that a cell begins to run, now."""
        self._put_small(RecordType.CELL_BEGIN, cell)

    def cell_end(self, cell: str, ok: bool) -> None:
        """Record that a cell ends, now."""
        self._put_small(RecordType.CELL_END, cell, flags=0 if ok else FLAG_FAILED)

    def abort(self, process_set: int, generation: int, text: str) -> None:
        """Record that generation ``generation`` of a process set ends, now; ``text`` is the reason in one sentence."""
        self._put_small(RecordType.ABORT, text, process_set, generation)

    def members(self, process_set: int, generation: int, size: int, plane: str = "") -> None:
        """Record that a process set has ``size`` members from ``generation`` on: readers then know when a collective is complete."""
        self._put_small(RecordType.MEMBERS, plane, process_set, generation, size)

    def clock(self, sent_ns: int, received_ns: int, coordinator_ns: int) -> None:
        """Record the coordinator's clock, asked for at ``sent_ns`` and answered at ``received_ns`` by this clock.

        The answer was made in between, hence the true offset is within half the round trip of the middle.
        """
        half = (received_ns - sent_ns + 1) // 2
        self._put_small(
            RecordType.CLOCK,
            "",
            0,
            0,
            coordinator_ns - (sent_ns + received_ns) // 2,
            half,
            time_ns=received_ns,
        )

    def metric(self, name: str, value: float, step: int | None = None, time_ns: int | None = None) -> None:
        """Record a number that views show over time, measured now or at ``time_ns``."""
        if not self.enabled:
            return
        # Before the lock, which `_define()` acquires.
        ident, flags = self.name_id(name), 0 if step is None else FLAG_HAS_STEP
        now = time.monotonic_ns() if time_ns is None else time_ns
        with self._lock:
            head = self._head
            place = (head & self._mask) * RECORD_BYTES
            try:
                _pack_metric(self._ring, place, _METRIC_TYPE, 0, 0, flags, ident, 0, 0, now, value, step or 0)
            except struct.error:
                self._drop_oldest()
                self.refused += 1
                return
            self._head = head + 1

    def _put_small(
        self,
        kind: RecordType,
        text: str,
        process_set: int = 0,
        number: int = 0,
        first: int = 0,
        second: int = 0,
        *,
        flags: int = 0,
        time_ns: int | None = None,
    ) -> None:
        if not self.enabled:
            return
        now = time.monotonic_ns() if time_ns is None else time_ns
        try:
            head = (kind, 0, 0, flags, self.name_id(text), process_set, number)
            record = SMALL.pack(*head, now, first, second)
        except struct.error:
            with self._lock:
                self.refused += 1
            return
        self._put(record)

    def _put(self, record: bytes) -> None:
        with self._lock:
            offset = (self._head & self._mask) * RECORD_BYTES
            self._ring[offset : offset + RECORD_BYTES] = record
            self._head += 1

    def _drop_oldest(self) -> None:
        """Drop the record in the place that the next one gets, if there is one: what could not be packed has overwritten it. Under the lock."""
        lost = self._head + 1 - self._tail - self.capacity
        if lost > 0:
            self.dropped += lost
            self._tail += lost

    # -- out ----------------------------------------------------------------------------------------------------------

    def pending(self) -> int:
        """Return how many records wait to be drained."""
        return min(self._head - self._tail, self.capacity)

    def drain(self) -> list[bytes]:
        """Return all records and forget them, as batches of at most ``BATCH_RECORDS``; each is in exactly one batch."""
        batches = []
        # Fixed before the loop, which would not end if other threads record as fast as this one copies.
        end = self._head
        while self._tail < end:
            with self._lock:
                # The lock is held for one batch at a time, so that a thread that records waits for a single copy.
                chunk = self._copy_out()
            if chunk:
                batches.append(self._frame(chunk))
        return batches

    def _copy_out(self) -> bytes:
        # Writers do not read the tail, and can have run past it: the records that they have overwritten are counted here.
        lost = self._head - self._tail - self.capacity
        if lost > 0:
            self.dropped += lost
            self._tail += lost
        count = min(self._head - self._tail, BATCH_RECORDS)
        begin = self._tail & self._mask
        first = min(count, self.capacity - begin)
        self._tail += count
        view = memoryview(self._ring)
        head = view[begin * RECORD_BYTES : (begin + first) * RECORD_BYTES]
        return bytes(head) + bytes(view[: (count - first) * RECORD_BYTES])

    def _frame(self, chunk: bytes) -> bytes:
        # The name is the second 32-bit word of every record.
        used = set(memoryview(chunk).cast("I")[1 :: RECORD_BYTES // 4])
        used.discard(0)
        # Steps of a training are alike: most batches have the names of the one before. Numbers are never used again.
        if used != self._defined:
            texts, before = self._texts, self._texts_before
            names = [(ident, *(texts.get(ident) or before.get(ident, _UNKNOWN))) for ident in sorted(used)]
            self._defined, self._table = used, record_format.define(names)
        lost = self.dropped, self.refused
        return record_format.frame_defined(self.rank, clock_domain(), *lost, *self._table, chunk)
