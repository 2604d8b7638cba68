"""Callbacks that the control thread makes: mail, interrupts, leaving, events of other ranks, stalls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from hvdlab.collectives.protocol import messages as m


class Mailbox:
    """The callbacks for each kind of news. They run on the control thread and must not block.

    A callback that raises is reported as an uncaught exception of the thread; the others and the thread go on.

    Attributes:
        event_sinks: Get the events of all ranks, if this rank has subscribed to them.
        own_event_sinks: Get the events that this rank itself sends.
    """

    def __init__(self) -> None:
        self._topics: dict[str, list[Callable[[int, bytes], None]]] = {}
        self.interrupts: list[Callable[[], None]] = []
        self.native_waits: list[Callable[[], None]] = []
        self.reconnections: list[Callable[[], None]] = []
        self._leaves: list[Callable[[str], None]] = []
        self._leaving: str | None = None  # why this rank is to leave, once it is
        self._leave_guard = threading.Lock()  # of the two above
        self.event_sinks: list[Callable[[int, bytes], None]] = []
        self.own_event_sinks: list[Callable[[int, bytes], None]] = []
        self.stalls: list[Callable[[m.Stalled], None]] = []

    def on(self, topic: str, callback: Callable[[int, bytes], None]) -> None:
        self._topics.setdefault(topic, []).append(callback)

    def deliver(self, message: m.Message) -> None:
        assert isinstance(message, m.Mail)
        for callback in tuple(self._topics.get(message.topic, ())):
            _call(callback, message.sender, message.body)

    def interrupt(self, message: m.Message) -> None:
        for callback in tuple(self.interrupts):
            _call(callback)

    def end_native_waits(self) -> None:
        for callback in tuple(self.native_waits):
            _call(callback)

    def reconnected(self) -> None:
        for callback in tuple(self.reconnections):
            _call(callback)

    def on_leave(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` when this rank is to leave; at once, on this thread, if it is already."""
        with self._leave_guard:
            self._leaves.append(callback)
            reason = self._leaving
        if reason is not None:
            _call(callback, reason)

    def leave(self, message: m.Message) -> None:
        assert isinstance(message, m.Leave)
        with self._leave_guard:
            self._leaving = message.reason
            callbacks = tuple(self._leaves)
        for callback in callbacks:
            _call(callback, message.reason)

    def events(self, message: m.Message) -> None:
        assert isinstance(message, m.RankEvents)
        for sink in tuple(self.event_sinks):
            _call(sink, message.rank, message.batch)

    def own_events(self, rank: int, batch: bytes) -> None:
        for sink in tuple(self.own_event_sinks):
            _call(sink, rank, batch)

    def stalled(self, message: m.Message) -> None:
        assert isinstance(message, m.Stalled)
        for callback in tuple(self.stalls):
            _call(callback, message)


def _call(callback: Callable[..., None], *args: object) -> None:
    try:
        callback(*args)
    except Exception:  # noqa: BLE001  (reported; a bug in a callback must not end the rank's control thread)
        kind, value, trace = sys.exc_info()
        assert kind is not None
        threading.excepthook(threading.ExceptHookArgs((kind, value, trace, threading.current_thread())))
