"""Metrics that a rank hands to exporters."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.engine.dispatch import Dispatcher
from hvdlab.collectives.engine.subscribing import Subscription
from hvdlab.collectives.metrics.export import Export, Exporter, PointReader, same_target

FLUSHED_WITHIN = 1.0
"""Seconds that the control thread has to hand over what was recorded by now."""
REPLACED_WITHIN = 5.0
"""Seconds that an export has to write what it still holds before another one takes its place."""


class RankExport(Export):
    """An export of this rank's metrics, or of all ranks'. Ended by :meth:`close` or with the engine.

    Attributes:
        unaligned: How many points were left out because their host's clock could not be compared with this host's.
    """

    def __init__(self, exports: Exports, exporter: Exporter, names: Iterable[str], all_ranks: bool) -> None:
        super().__init__(exporter, names)
        self.all_ranks = all_ranks
        self.unaligned = 0
        self._exports = exports
        self._reader = PointReader()

    def feed(self, rank: int, batch: bytes) -> None:
        """Take in a batch that rank ``rank`` has recorded. Control thread."""
        self.put(self._reader.read(batch))
        self.unaligned = self._reader.dropped

    def close(self, timeout: float | None = None) -> bool:
        """Write what was recorded by now, close the exporter and end the thread. Idempotent.

        Returns:
            Whether that was done within ``timeout`` seconds; otherwise it goes on.
        """
        self._exports.remove(self)
        return super().close(timeout)


class Exports:
    """The exports of a rank. Any thread."""

    def __init__(self, dispatcher: Dispatcher, subscription: Subscription) -> None:
        self._dispatcher = dispatcher
        self._subscription = subscription
        self._lock = threading.Lock()
        self._open: list[RankExport] = []

    def add(self, exporter: Exporter, names: Iterable[str], all_ranks: bool) -> RankExport:
        """Hand metrics to ``exporter`` from now on, in place of another one with the same target."""
        for other in list(self._open):
            if same_target(other.exporter, exporter):
                other.close(REPLACED_WITHIN)
        export = RankExport(self, exporter, names, all_ranks)
        with self._lock:
            self._open.append(export)
        if all_ranks:
            self._subscription.add(export.feed)
        else:
            self._dispatcher.mailbox.own_event_sinks.append(export.feed)
        return export

    def remove(self, export: RankExport) -> None:
        """Hand over what was recorded by now, and nothing more."""
        with self._lock:
            if export not in self._open:
                return
            self._open.remove(export)
        self._flush()
        if export.all_ranks:
            self._subscription.settle()
            self._subscription.remove(export.feed)
        else:
            self._dispatcher.mailbox.own_event_sinks.remove(export.feed)

    def _flush(self) -> None:
        control = self._dispatcher.control
        if control is None or not control.thread.is_alive():
            return
        if threading.current_thread() is control.thread:
            self._dispatcher.send_events()
            return
        done = threading.Event()
        control.call(self._dispatcher.send_events)
        control.call(done.set)
        done.wait(FLUSHED_WITHIN)

    def close(self, timeout: float) -> None:
        """End them all, with what was recorded by now."""
        deadline = Deadline(timeout)
        for export in list(self._open):
            export.close(deadline.remaining())
