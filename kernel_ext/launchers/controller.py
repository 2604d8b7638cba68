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
import sys
from concurrent.futures import Future
from typing import Any

import zmq
from ipyparallel.controller.app import IPController  # type: ignore[import-untyped]  # has no types
from traitlets import default, observe
from zmq.devices.monitoredqueuedevice import ThreadMonitoredQueue

from hvdlab.kernel_ext.launchers import ports

FOREVER = 10**9
"""Seconds."""

SUBSCRIBED_WITHIN = 0.5
"""Seconds that a client that has connected gets to subscribe to news of engines, before there are any."""


PORTS = 32
"""How many ports are chosen for the controller: more than it uses."""

LISTENS_WITHIN = 10.0
"""Seconds that a queue's thread gets to take its ports."""


class Queue(ThreadMonitoredQueue):
    """A queue in a thread, which takes its ports on that thread.

    Attributes:
        listens: Completed when the queue has its ports; fails if it can't have them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]  # half of pyzmq has types
        self.listens: Future[None] = Future()

    def _setup_sockets(self) -> Any:  # the one step between the thread's start and its loop
        try:
            sockets = super()._setup_sockets()  # type: ignore[no-untyped-call]  # half of pyzmq has types
        except BaseException as error:
            self.listens.set_exception(error)
            raise
        self.listens.set_result(None)
        return sockets


class _NoHeartMonitor:
    """Stands where :class:`IPController` keeps the process of its heart monitor."""

    def start(self) -> None:
        """Nothing to start."""


class PoolController(IPController):  # type: ignore[misc]  # ipyparallel is untyped
    """A controller that says on a socket when it is up, and hears there which engines have come and gone."""

    name = "ipcontroller"
    _last_client = float("-inf")
    _failure: BaseException | None = None

    def watch(self, channel: socket.socket) -> None:
        """Use this connection to the fork server. Call before ``initialize``."""
        channel.setblocking(False)
        self._channel = channel

    @observe("use_threads")
    def _use_threads_changed(self, change: Any) -> None:
        """Use queues whose start can be awaited: if one fails, the controller is not up."""
        self.mq_class = f"{__name__}.{Queue.__name__}"

    @default("ports")
    def _choose_ports(self) -> list[int]:
        """Return ports for all queues."""
        return ports.choose(PORTS)

    def init_hub(self) -> None:
        """Make the hub."""
        super().init_hub()
        self.heartmonitor_process = _NoHeartMonitor()
        self.hub.engine_state_file = ""  # it would stay behind
        # Never: an engine may be busy with a cell before it completes its registration, and the fork server reports its end.
        self.hub.registration_timeout = FOREVER
        answer = self.hub.query_handlers["connection_request"]

        def client_connects(*request: Any) -> None:
            self._last_client = self.loop.time()
            answer(*request)

        self.hub.query_handlers["connection_request"] = client_connects

    def _finish(self, engine: int) -> None:
        """An engine that has registered listens now: let clients learn of it."""
        # A client gets the list of engines first and then subscribes to news of others: none must come in between.
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
        """Run until SIGTERM, or until the fork server is gone."""
        self.loop.add_handler(self._channel.fileno(), self._hear, self.loop.READ)
        self.loop.add_callback(self._say_up)
        super().start()
        if self._failure is not None:
            raise self._failure

    def _say_up(self) -> None:
        try:
            for queue in self.children:
                queue.listens.result(LISTENS_WITHIN)
        except (zmq.ZMQError, TimeoutError) as error:
            self._failure = error
            self.loop.stop()
        else:
            self._channel.send(b"up\n")

    def init_signal(self) -> None:
        """End on SIGTERM; Ctrl-C is no business of the controller's."""
        signal.signal(signal.SIGTERM, self.handle_signal)

    def cleanup_connection_files(self) -> None:
        """Leave them to the pool: they may be another controller's by now, which has the same names for its files."""

    def terminate_children(self) -> None:
        """Nothing to do: there are no child processes."""

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
    """Be the controller, in a child of the fork server. ``argv``: ipcontroller's options."""
    os.nice(5)  # ranks go first while it starts
    asyncio.set_event_loop(asyncio.new_event_loop())
    app = PoolController.instance()
    app.watch(socket.socket(fileno=channel))
    try:
        app.initialize([*argv])
        app.start()
    except zmq.ZMQError as error:
        if error.errno != ports.TAKEN:
            raise
        print(f"A port that the controller needs is taken: {error}", file=sys.stderr)
        return ports.TAKEN
    return 0
