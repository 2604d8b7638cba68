"""From executed batches to the recorder, and when its batches are due."""

from __future__ import annotations

import threading
from typing import ClassVar

from hvdlab.collectives.engine.effects import RunBatch
from hvdlab.collectives.planes.base import Phases
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.timeline.spans import Recorder


class SpanLog:
    """The recorder of a rank and whether a flush of it is under way."""

    INTERVAL: ClassVar[float] = 0.1
    """Seconds between two flushes, at least."""

    def __init__(self, rank: int, enabled: bool) -> None:
        self.recorder = Recorder(rank, enabled=enabled)
        self._due = threading.Lock()

    def batch(self, batch: RunBatch, started: int, finished: int, phases: Phases) -> bool:
        """Record an executed batch; whether there is something to flush."""
        recorder = self.recorder
        if not recorder.enabled:
            return False
        name_id = recorder.name_id
        first = batch.entries[0]
        request = first.request
        if len(batch.entries) == 1:
            recorder.span(
                name_id(first.name),
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
            True,
            [
                (name_id(e.name), 0 if e.request.input is None else e.request.input.nbytes, e.submitted)
                for e in batch.entries
            ],
        )
        return True

    def claim(self) -> bool:
        """Whether the caller is to schedule the next flush: nobody has since the last."""
        return not self._due.locked() and self._due.acquire(blocking=False)

    def take(self) -> list[bytes]:
        """What was recorded since the last time. Control thread."""
        if self._due.locked():
            self._due.release()
        return self.recorder.drain()

    def clock_answer(self, message: m.Pong) -> None:
        """The coordinator's clock; see :meth:`Recorder.clock`."""
