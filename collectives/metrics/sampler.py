"""Sampling at equal intervals, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hvdlab.collectives.metrics.process import Values

LEAST_INTERVAL = 0.01
REPEATED = 10.0
"""Seconds after which a value that has hardly changed is recorded again."""
_TOLERANCES = {"cpu": 1.0, "utilisation": 1.0, "rss": 1 << 20, "memory": 1 << 20}
"""Largest difference at which a metric of that kind still counts as unchanged: percentage points, bytes."""

Record = Callable[[str, float, None, int], None]

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Something to sample."""

    def sample(self) -> Values:
        """Name and value of each metric, measured now. Raises ``OSError`` if that is not possible (any more)."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class Thinning:
    """Which samples are recorded: each, unless it is hardly different from the last that was.

    Otherwise an idle rank would fill the history with samples which say that it is idle.
    """

    def __init__(self, repeated_ns: int = int(REPEATED * 1e9)) -> None:
        self._repeated_ns = repeated_ns
        self._recorded: dict[str, float] = {}
        self._at_ns = 0

    def wanted(self, values: Values, now_ns: int) -> bool:
        """Whether to record these."""
        if now_ns - self._at_ns < self._repeated_ns and not self._changed(values):
            return False
        self._recorded, self._at_ns = dict(values), now_ns
        return True

    def _changed(self, values: Values) -> bool:
        if len(values) != len(self._recorded):
            return True
        for name, value in values:
            before = self._recorded.get(name)
            if before is None or abs(value - before) > _TOLERANCES.get(name.rpartition("/")[2], 0):
                return True
        return False


class Sampler:
    """Samples sources until it is closed.

    Args:
        record: Called with name, value, no step and the time in ns; must neither block nor raise.
        sources: Makes the sources; called on the sampler's thread, since looking for devices may take a while.
        interval: Seconds between two samples; 0.01 at least.
        label: Goes into the thread's name; the rank.
    """

    def __init__(
        self,
        record: Record,
        sources: Callable[[], Sequence[Source]],
        interval: float,
        label: str,
    ) -> None:
        self._record = record
        self._make_sources = sources
        self._interval = max(interval, LEAST_INTERVAL)
        self._thinning = Thinning()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hvdlab-metrics-{label}", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """End it. Idempotent."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        sources = list(self._make_sources())
        try:
            due = time.monotonic()
            while sources:
                due = max(due + self._interval, time.monotonic())  # missed samples are not made up for
                if self._closing.wait(due - time.monotonic()):
                    return
                self._sample(sources)
        finally:
            for source in sources:
                source.close()

    def _sample(self, sources: list[Source]) -> None:
        now = time.monotonic_ns()
        values: Values = []
        for source in list(sources):
            try:
                values += source.sample()
            except OSError as error:
                logger.warning("%s is not sampled any more: %s", type(source).__name__, error)
                sources.remove(source)
                source.close()
        if values and self._thinning.wanted(values, now):
            for name, value in values:
                self._record(name, value, None, now)
