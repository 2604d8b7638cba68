"""Handing metrics to exporters: their interface, and a thread for each, so that a slow one does not hold up the training."""

from __future__ import annotations

import fnmatch
import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics.points import Point

MOST_WAITING = 100_000
MOST_AT_ONCE = 1_000

logger = logging.getLogger(__name__)


class Exporter(Protocol):
    """Writes metrics somewhere. Both methods are called on one thread, one after the other.

    An exporter may also have an attribute ``target``, a text that says where it writes: exporting to it again replaces
    the export before.
    """

    def write(self, points: Sequence[Point]) -> None:
        """Write these points, at most 1,000. It may take its time. If it raises, the points count as failed; later ones are tried."""
        ...

    def close(self) -> None:
        """No more points come. Called once."""
        ...


def checked(exporter: Exporter) -> None:
    """Raise ``InvalidRequestError`` if this is no exporter."""
    for method in ("write", "close"):
        if not callable(getattr(exporter, method, None)) or isinstance(exporter, type):
            what = exporter.__name__ + " itself" if isinstance(exporter, type) else type(exporter).__name__
            raise InvalidRequestError(
                f"an exporter has the methods write(points) and close(), such as those of hvdlab.exporters; this is {what}."
            )


def patterns(names: str | Sequence[str]) -> tuple[str, ...]:
    """One or several patterns as several."""
    return (names,) if isinstance(names, str) else tuple(names)


def same_target(one: Exporter, other: Exporter) -> bool:
    """Whether two exporters write to the same place, as far as they tell."""
    target = getattr(one, "target", None)
    return type(one) is type(other) and target is not None and target == getattr(other, "target", None)


class Export:
    """Metrics on their way to an exporter, until :meth:`close`.

    Args:
        exporter: Where they go.
        names: Patterns (as of :mod:`fnmatch`) of the metrics that are wanted.
        limit: Points that may wait; older ones make room.

    Attributes:
        exporter: Where they go.
        names: Patterns of the metrics that are wanted.
        exported: Points that were written.
        dropped: Points that made room, as the exporter was too slow.
        failed: Points that the exporter could not write.
        error: The exporter's last error.
    """

    def __init__(self, exporter: Exporter, names: Iterable[str] = ("*",), limit: int = MOST_WAITING) -> None:
        self.exported = self.dropped = self.failed = 0
        self.error: Exception | None = None
        self.exporter = exporter
        self.names = tuple(names)
        self._wanted: dict[str, bool] = {}
        self._limit = limit
        self._waiting: deque[Point] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name=f"hvdlab-export-{type(exporter).__name__}", daemon=True
        )
        self._thread.start()

    def put(self, points: Iterable[Point]) -> None:
        """Hand points over. Any thread; never waits. Ignored after :meth:`close`."""
        wanted = [point for point in points if self._wants(point.name)]
        if not wanted:
            return
        with self._changed:
            if self._closing:
                return
            self._waiting.extend(wanted)
            while len(self._waiting) > self._limit:
                self._waiting.popleft()
                self.dropped += 1
            self._changed.notify()

    def _wants(self, name: str) -> bool:
        found = self._wanted.get(name)
        if found is None:
            if len(self._wanted) > 10_000:
                self._wanted.clear()
            found = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)
            self._wanted[name] = found
        return found

    @property
    def closed(self) -> bool:
        return self._closing

    def close(self, timeout: float | None = None) -> bool:
        """Write what waits, close the exporter and end the thread. Idempotent.

        Returns:
            Whether that was done within ``timeout`` seconds; otherwise it goes on.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def __repr__(self) -> str:
        lost = f", {self.dropped} dropped" if self.dropped else ""
        bad = f", {self.failed} failed: {self.error!r}" if self.failed else ""
        state = ", closed" if self._closing else ""
        return f"<Export to {type(self.exporter).__name__}: {self.exported} points{lost}{bad}{state}>"

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while points := self._take():
            try:
                self.exporter.write(points)
                self.exported += len(points)
            except Exception as error:  # noqa: BLE001  (it is logged, and must not end the export of what follows)
                self.failed += len(points)
                self._fail(error, "could not write metrics")
        try:
            self.exporter.close()
        except Exception as error:  # noqa: BLE001  (it is logged; this thread has no caller to raise it to)
            self._fail(error, "could not be closed")

    def _fail(self, error: Exception, what: str) -> None:
        # A broken exporter would raise the same with each batch.
        if self.error is None or type(self.error) is not type(error):
            logger.warning("%s %s", type(self.exporter).__name__, what, exc_info=error)
        self.error = error

    def _take(self) -> list[Point]:
        """The next points; none once all are out and it is being closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_AT_ONCE))]
