"""What follows from executed operations: ends of handles, spans, and news for the other members."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdlab.collectives.engine.effects import RunBatch
from hvdlab.collectives.engine.guarded import GuardedState
from hvdlab.collectives.engine.request import Result
from hvdlab.collectives.engine.spans import SpanLog
from hvdlab.collectives.planes.base import PhaseTimes

_monotonic_ns = time.monotonic_ns


class BatchOutcomes:
    """Receives the ends of batches from the executor, on whichever thread ran them.

    Args:
        guarded: The rank's state.
        spans: Where batches are recorded.
        schedule_events: Has the recorded spans sent.
    """

    def __init__(self, guarded: GuardedState, spans: SpanLog, schedule_events: Callable[[], None]) -> None:
        self._guarded, self._spans, self._schedule_events = guarded, spans, schedule_events

    def batch_done(self, batch: RunBatch, results: list[Result], started: int, phases: PhaseTimes) -> None:
        """A batch was executed. Called by whichever thread ran it."""
        finished = _monotonic_ns()
        self._guarded.finish(batch, results)
        if self._spans.batch(batch, started, finished, phases):
            self._schedule_events()

    def batch_unfinished(self, batch: RunBatch, started: int, phases: PhaseTimes) -> None:
        """A batch was not executed to its end; ``started`` is 0 if it was not begun. Its handles are ended elsewhere."""
        if self._spans.batch(batch, started, _monotonic_ns(), phases, ok=False):
            self._schedule_events()

    def batch_failed(self, batch: RunBatch, error: Exception) -> None:
        """The plane failed: tell the coordinator. The handles end on all members with the abort that follows."""
        text = f"{type(error).__name__}: {error}"
        self._guarded.tell(lambda state: state.plane_failed(batch.process_set, batch.epoch, text))
