"""Consumers of recorded events in a rank: the subscription to the events of all ranks, the timeline file, exports of metrics."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hvdlab.collectives.engine.control_thread import ControlHandlers
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics.export import Export, Exporter, PointReader, same_target
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.tracing.timeline_file import TimelineFile

Sink = Callable[[int, bytes], None]

ANSWERS_WITHIN = 2.0
"""Seconds that all ranks have to send what they have recorded; a rank that is stopped, or keeps the interpreter busy, can't."""
FLUSHED_WITHIN = 1.0
"""Seconds that the control thread has to hand over the events that were recorded by now."""
REPLACED_WITHIN = 5.0
"""Seconds that an export has to write what it still holds before another one takes its place."""


@dataclass
class EventRequest:
    """Request of this rank for the events that all ranks have recorded. Control thread.

    Attributes:
        arrived: Set once the sinks have got them.
        missing: The ranks that have not answered.
    """

    arrived: threading.Event
    missing: set[int]


class Subscription:
    """Subscription of this rank to the events of all ranks, shared by all sinks. It lasts as long as there are sinks. Any thread."""

    def __init__(self, handlers: ControlHandlers) -> None:
        self._handlers = handlers
        self._numbers = itertools.count(1)
        #: Requests for which a thread waits, by number. Control thread.
        self._requests: dict[int, EventRequest] = {}
        handlers.callbacks.on(m.COLLECTED, self._on_answer)
        handlers.callbacks.pongs_behind_events.append(self._on_pong_behind_events)
        handlers.world.watchers.append(self._on_world)
        #: Held from a change of the sinks to the message about it: subscribing and its end must not overtake each other.
        self._lock = threading.Lock()
        #: Consumers of the events.
        self._sinks: list[Sink] = []

    def add(self, sink: Sink) -> None:
        """Call ``sink(rank, batch)`` on the control thread with each batch of any rank from now on."""
        callbacks = self._handlers.callbacks
        with self._lock:
            # Before the subscription: its first batch finds the sink.
            callbacks.event_sinks.append(sink)
            self._sinks.append(sink)
            if len(self._sinks) == 1:
                callbacks.reconnections.append(self._subscribe)
                self._subscribe()

    def _subscribe(self) -> None:
        self._handlers.send(m.Subscribe(True, history=False))

    def wait_for_events(self) -> None:
        """Wait until the sinks have got the events that all ranks have recorded by now, or :data:`ANSWERS_WITHIN` has passed."""
        control, number, arrived = self._handlers.control, next(self._numbers), threading.Event()
        if not control.thread.is_alive() or threading.current_thread() is control.thread:
            return  # nothing arrives any more, or meanwhile
        control.call(lambda: self._request(number, arrived))
        # With a limit: a rank does not answer while it is stopped, and the control thread can end meanwhile.
        arrived.wait(ANSWERS_WITHIN)
        # By the control thread, which iterates over the requests at each change of the world.
        control.call(lambda: self._requests.pop(number, None))

    def _request(self, number: int, arrived: threading.Event) -> None:
        self._handlers.send_events()
        ranks = self._handlers.world.alive
        self._requests[number] = EventRequest(arrived, set(ranks))
        if ranks:
            self._handlers.send(m.Post(m.COLLECT, number.to_bytes(8), ranks))
        else:
            self._ping_behind_events(number)

    def _on_answer(self, rank: int, body: bytes) -> None:
        number = int.from_bytes(body)
        if number in self._requests:
            self._requests[number].missing.discard(rank)
            self._ping_behind_events(number)

    def _on_world(self, world: m.World) -> None:
        alive = set(self._handlers.world.alive)
        for number, request in self._requests.items():
            request.missing &= alive  # a rank that leaves has sent its events before its goodbye
            self._ping_behind_events(number)

    def _ping_behind_events(self, number: int) -> None:
        """Ping the coordinator once all ranks have answered: its answer comes behind their events, which theirs can overtake."""
        if not self._requests[number].missing:
            self._handlers.send(m.Ping(number, after_events=True))

    def _on_pong_behind_events(self, number: int) -> None:
        if number in self._requests:
            self._requests[number].arrived.set()

    def remove(self, sink: Sink) -> None:
        """End the calls of this sink, also if :meth:`add` was interrupted."""
        callbacks = self._handlers.callbacks
        with self._lock:
            # An interrupt of add() can have come before any of its steps.
            for sinks in callbacks.event_sinks, self._sinks:
                if sink in sinks:
                    sinks.remove(sink)
            if not self._sinks:
                # A successor of the coordinator would otherwise send events that no sink gets.
                if self._subscribe in callbacks.reconnections:
                    callbacks.reconnections.remove(self._subscribe)
                self._handlers.send(m.Subscribe(False))


class TimelineTap:
    """Timeline file of a rank, if one is open. It gets the events of all ranks. Any thread."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        #: Guards ``_file``: of two threads that start or stop at the same time one wins.
        self._lock = threading.Lock()
        self._file: TimelineFile | None = None

    def start(self, path: str | os.PathLike[str], mark_cycles: bool) -> None:
        """Begin to write. Raises ``InvalidRequestError`` if a file is open, ``OSError`` if it can't be created."""
        with self._lock:
            if self._file is not None:
                raise InvalidRequestError(
                    f"a timeline is being written to {self._file.path}; stop_timeline() it first."
                )
            self._file = TimelineFile.start(path, mark_cycles=mark_cycles)
            # At exit this runs before the file closes by itself, which would not wait for events that have not arrived yet.
            atexit.register(self.stop)
            self._subscription.add(self._file.feed)

    def stop(self) -> None:
        """Complete the file, with the events that all ranks have recorded by now. Raises ``OSError`` if it could not be written."""
        # The wait is outside the lock, so that another file can be started meanwhile.
        with self._lock:
            file, self._file = self._file, None
        if file is None:
            return
        atexit.unregister(self.stop)
        try:
            self._subscription.wait_for_events()
        finally:  # also if Ctrl-C ends the wait: no later call finds the file, which would grow for good
            self._subscription.remove(file.feed)
            file.close()


class RankExport(Export):
    """Export of this rank's metrics, or of all ranks'. Ended by :meth:`close` or with the engine.

    Attributes:
        unaligned: How many points were left out because their host's clock could not be compared with this host's.
    """

    def __init__(
        self, exports: MetricExports, exporter: Exporter, names: Iterable[str], all_ranks: bool
    ) -> None:
        super().__init__(exporter, names)
        self.all_ranks = all_ranks
        self.unaligned = 0
        self._exports = exports
        #: Decoder of this rank's or all ranks' batches, with their clocks.
        self._reader = PointReader()

    def feed(self, rank: int, batch: bytes) -> None:
        """Queue the points of a batch that rank ``rank`` has recorded. Control thread."""
        self.put(self._reader.read(batch))
        self.unaligned = self._reader.dropped

    def close(self, timeout: float | None = None) -> bool:
        """Write the points that were recorded by now, close the exporter and end the thread. Idempotent.

        Returns:
            Whether that was done within ``timeout`` seconds; otherwise the export continues to close.
        """
        try:
            # Before its thread ends: this hands it the points that were recorded by now, and ends the calls of feed().
            self._exports.remove(self)
        finally:  # also if Ctrl-C ends the wait for those points: the engine does not close it any more
            closed = super().close(timeout)
        return closed


class MetricExports:
    """Exports of metrics of one rank. Any thread."""

    def __init__(self, handlers: ControlHandlers, subscription: Subscription) -> None:
        self._handlers = handlers
        self._subscription = subscription
        #: Guards ``_open``: an export is removed once, by its own close() or by that of the engine.
        self._lock = threading.Lock()
        #: Held while an export takes another one's place: two threads that add the same target at once would both write to it.
        self._adding = threading.Lock()
        #: Exports that are not closed.
        self._open: list[RankExport] = []

    def add(self, exporter: Exporter, names: Iterable[str], all_ranks: bool) -> RankExport:
        """Hand metrics to ``exporter`` from now on, in place of another one with the same target."""
        with self._adding:
            # The other one is closed first: two writers of one file or server would mix.
            # A copy: close() removes the export from the list.
            for other in list(self._open):
                if same_target(other.exporter, exporter):
                    other.close(REPLACED_WITHIN)
            export = RankExport(self, exporter, names, all_ranks)
            with self._lock:
                self._open.append(export)
        if all_ranks:
            self._subscription.add(export.feed)
        else:
            self._handlers.callbacks.own_event_sinks.append(export.feed)
        return export

    def remove(self, export: RankExport) -> None:
        """End an export, after it has got the points that were recorded by now."""
        with self._lock:
            if export not in self._open:
                return
            self._open.remove(export)
        try:
            self._flush()
            if export.all_ranks:
                self._subscription.wait_for_events()
        finally:
            if export.all_ranks:
                self._subscription.remove(export.feed)
            elif export.feed in self._handlers.callbacks.own_event_sinks:
                self._handlers.callbacks.own_event_sinks.remove(export.feed)

    def _flush(self) -> None:
        control = self._handlers.control
        if not control.thread.is_alive():
            return
        if threading.current_thread() is control.thread:  # it would wait for itself
            self._handlers.send_events()
            return
        done = threading.Event()
        control.call(self._handlers.send_events)
        control.call(done.set)
        # With a limit: the control thread can end before it comes to these calls.
        done.wait(FLUSHED_WITHIN)

    def close(self, timeout: float) -> None:
        """Close all exports, with the points that were recorded by now."""
        deadline = Deadline(timeout)
        # A copy, as in add(): close() removes the export from the list.
        for export in list(self._open):
            export.close(deadline.remaining())
