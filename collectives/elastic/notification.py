"""Notifies states that the world is about to change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from hvdlab.collectives import context
from hvdlab.collectives.elastic.interrupts import HostUpdateResult
from hvdlab.collectives.engine.engine import Engine


class Listener(Protocol):
    """Is notified of changes of the world; a :class:`~hvdlab.collectives.elastic.State`."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None: ...


class NotificationManager:
    """Passes on the coordinator's news of the world: that a rank waits to be let in, or leaves with its host.

    Lost ranks are not among the news: collectives fail then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._engine: Engine | None = None
        self._unwatch: Callable[[], None] | None = None
        #: The ranks that wait, and those that leave, as listeners were notified last.
        self._notified_waiting: tuple[int, ...] = ()
        self._notified_leaving: tuple[int, ...] = ()

    def __reduce__(self) -> str:
        """Each process has its own: an elastic function that comes to another rank uses the one there."""
        return "notification_manager"

    def init(self) -> None:
        """Listen to the engine of this process, if it has one."""
        engine = context.engine() if context.is_initialized() else None
        with self._lock:
            if engine is self._engine:
                return
            if self._unwatch is not None:
                self._unwatch()
            self._engine, self._notified_waiting, self._notified_leaving = engine, (), ()
            self._unwatch = None if engine is None else engine.elastic.watch(self._on_world)

    def register_listener(self, listener: Listener) -> None:
        """Notify this listener from now on, and now of ranks that wait or leave already."""
        with self._lock:
            self._listeners.append(listener)
        self.remind(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Notify this listener no longer."""
        with self._lock:
            self._listeners[:] = [other for other in self._listeners if other is not listener]

    def remind(self, listener: Listener) -> None:
        """Notify this listener of ranks that wait or leave now; a reset makes it forget them.

        This rank itself does not count: it waits no more, though it may hear of that only later.
        """
        engine = self._engine
        if engine is not None and set(engine.elastic.waiting) - {engine.rank}:
            listener.on_hosts_updated(time.time(), HostUpdateResult.added)
        if engine is not None and engine.elastic.leaving:
            listener.on_hosts_updated(time.time(), HostUpdateResult.removed)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notify all listeners of a change. Any thread."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)

    def _on_world(self, waiting: tuple[int, ...], leaving: tuple[int, ...]) -> None:
        come, gone = set(waiting) - set(self._notified_waiting), set(leaving) - set(self._notified_leaving)
        self._notified_waiting, self._notified_leaving = waiting, leaving
        if come:
            self.handle_hosts_updated(time.time(), HostUpdateResult.added)
        if gone:
            self.handle_hosts_updated(time.time(), HostUpdateResult.removed)


notification_manager = NotificationManager()
"""The manager of this process: there is one, as there is one engine."""
