"""The events of all ranks, subscribed to as long as something in this process takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hvdlab.collectives.engine.dispatch import Dispatcher
from hvdlab.collectives.engine.spans import SpanLog
from hvdlab.collectives.protocol import messages as m

Sink = Callable[[int, bytes], None]

LAST_EVENTS = 2.5 * SpanLog.INTERVAL
"""Seconds until what every rank has recorded by now has arrived here."""


class Subscription:
    """This rank's one subscription to the events of all ranks, shared by all sinks. Any thread."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._lock = threading.Lock()
        self._sinks: list[Sink] = []

    def add(self, sink: Sink) -> None:
        """Call ``sink(rank, batch)`` on the control thread with each batch of any rank from now on."""
        mailbox = self._dispatcher.mailbox
        with self._lock:
            mailbox.event_sinks.append(sink)
            self._sinks.append(sink)
            if len(self._sinks) == 1:
                mailbox.reconnections.append(self._subscribe)
                self._subscribe()

    def _subscribe(self) -> None:
        self._dispatcher.send(m.Subscribe(True, history=False))

    def settle(self) -> None:
        """Wait a moment, so that what other ranks have recorded but not sent yet can arrive."""
        control = self._dispatcher.control
        if control is not None and control.thread.is_alive():
            arrived = threading.Event()
            control.call(lambda: control.call_later(LAST_EVENTS, arrived.set))
            arrived.wait(4 * LAST_EVENTS)

    def remove(self, sink: Sink) -> None:
        """Call this sink no more."""
        mailbox = self._dispatcher.mailbox
        with self._lock:
            mailbox.event_sinks.remove(sink)
            self._sinks.remove(sink)
            if not self._sinks:
                mailbox.reconnections.remove(self._subscribe)
                self._dispatcher.send(m.Subscribe(False))
