"""ipyparallel's controller in one process, without a heartbeat.

ipyparallel runs nine processes (hub, schedulers, heart monitor) and lets the monitor ping every engine every three
seconds to find dead ones. Here a rank's end is known from the operating system at once, so the hub needs no monitor,
the schedulers are threads and handlers of one loop, and nothing runs while nothing happens.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

from ipyparallel.controller.app import IPController  # type: ignore[import-untyped]  # has no types

FOREVER = 10**9
"""Seconds."""

SUBSCRIBED_WITHIN = 0.5
"""Seconds that a client that has connected gets to subscribe to news of engines, before there are any."""


class _NoHeartMonitor:
    """Stands where :class:`IPController` keeps the process of its heart monitor."""

    def start(self) -> None:
        """Nothing to start."""


class PoolController(IPController):  # type: ignore[misc]  # ipyparallel is untyped
    """A controller that says on a socket when it is up, and hears there which engines have come and gone."""

    name = "ipcontroller"
    _last_client = float("-inf")

    def watch(self, channel: socket.socket) -> None:
        """Use this connection to the warm process. Call before ``initialize``."""
        channel.setblocking(False)
        self._channel = channel

    def init_hub(self) -> None:
        """Make the hub."""
        super().init_hub()
        self.heartmonitor_process = _NoHeartMonitor()
        self.hub.engine_state_file = ""  # it would stay behind
        # An engine may be busy with a cell before it completes its registration; its end would be told.
        self.hub.registration_timeout = FOREVER
        answer = self.hub.query_handlers["connection_request"]

        def client_connects(*request: Any) -> None:
            self._last_client = self.loop.time()
            answer(*request)

        self.hub.query_handlers["connection_request"] = client_connects

    def _finish(self, engine: int) -> None:
        """An engine that has registered listens now, which clients may learn."""
        # A client gets the list of engines first and subscribes to news of others then: none must come in between.
        wait = self._last_client + SUBSCRIBED_WITHIN - self.loop.time()
        if wait > 0:
            self.loop.call_later(wait, self._finish, engine)
            return
        for heart, connector in list(self.hub.incoming_registrations.items()):
            if connector.id == engine:
                self.hub.finish_registration(heart)

    def _forget(self, engine: int) -> None:
        """An engine's process has ended, perhaps in the middle of its registration."""
        self.hub.unregister_engine(b"", {"content": {"id": engine}})

    def start(self) -> None:
        """Run until told to stop, or until the warm process is gone."""
        self.loop.add_handler(self._channel.fileno(), self._hear, self.loop.READ)
        self.loop.add_callback(self._channel.send, b"up\n")
        super().start()

    def init_signal(self) -> None:
        """End on SIGTERM; Ctrl-C is no business of the controller's."""
        signal.signal(signal.SIGTERM, self.handle_signal)

    def cleanup_connection_files(self) -> None:
        """The pool's business: who takes this one's place, because the warm process has died, needs them."""

    def terminate_children(self) -> None:
        """There are none."""

    def _hear(self, descriptor: int, events: int) -> None:
        try:
            data = self._channel.recv(65536)
        except BlockingIOError:
            return
        if not data:
            self.loop.remove_handler(descriptor)
            self.loop.stop()
            return
        # Each line is short enough to come in one piece.
        for line in data.split():
            (self._finish if line.startswith(b"+") else self._forget)(int(line[1:]))


def run_forked(argv: tuple[str, ...], channel: int) -> int:
    """Be the controller, in a child of the warm process. ``argv``: ipcontroller's options."""
    os.nice(5)  # ranks go first while it starts
    asyncio.set_event_loop(asyncio.new_event_loop())
    app = PoolController.instance()
    app.watch(socket.socket(fileno=channel))
    app.initialize([*argv])
    app.start()
    return 0
