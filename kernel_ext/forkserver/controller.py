"""ipyparallel's controller in one process, without a heartbeat.

ipyparallel runs nine processes (hub, schedulers, heart monitor) and lets the monitor ping every engine every three
seconds to find dead ones. Here a rank's end is known from the operating system at once, so the hub needs no monitor,
the schedulers are threads and handlers of one loop, and nothing runs while nothing happens.

Its ports lie outside the range that the system gives to any program that connects to another. Ranks and clients go on connecting
to a controller that has died. On a port of that range they could reach another program, or themselves: TCP connects a socket to
itself if the system gives it the port that it connects to. A port outside that range only gets another owner if a program names it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq
from ipyparallel.controller.app import IPController  # type: ignore[import-untyped]  # has no types
from traitlets import default, observe
from zmq.devices.monitoredqueuedevice import ThreadMonitoredQueue

from hvdlab.launch.forkserver.messages import PORTS_TAKEN

FOREVER = 10**9
"""Seconds: longer than any pool lives."""

SUBSCRIBED_WITHIN = 0.5
"""Seconds that a client that has connected gets to subscribe to news of engines, before there are any."""
LISTENS_WITHIN = 10.0
"""Seconds that a queue's thread gets to take its ports."""

PORTS = 32
"""Number of ports that are chosen for the controller: more than it uses."""
LOWEST = 10000
"""Below it there are many programs' usual ports."""
HIGHEST = 30000
"""Clusters forward ports from here on, though no program listens there."""
ENOUGH = 1000
"""With this many ports to choose from, two controllers that choose at the same time are unlikely to take the same one."""

SYSTEM = Path("/proc/sys/net/ipv4")
"""Where Linux shows its range of outgoing ports."""


def outgoing(system: Path = SYSTEM) -> range:
    """Return the ports that the system gives away by itself; an empty range if they can't be read."""
    try:
        low, high = map(int, (system / "ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return range(0)
    return range(low, high + 1)


def candidates(given_away: range) -> range:
    """Return the ports to choose from; an empty range if the system gives nearly all away."""
    if not given_away:
        return range(0)
    below, above = range(LOWEST, min(HIGHEST, given_away.start)), range(given_away.stop, 65536)
    return max((ports for ports in (below, above) if len(ports) >= ENOUGH), key=len, default=range(0))


def choose(count: int, among: range | None = None) -> list[int]:
    """Choose free ports that the system does not give away. There may be fewer than ``count``, or none.

    Args:
        count: Number of ports to choose.
        among: The ports to choose from; by default :func:`candidates` of this system.
    """
    among = candidates(outgoing()) if among is None else among
    found: list[int] = []
    for port in random.SystemRandom().sample(among, min(len(among), 20 * count)):
        if len(found) == count:
            break
        if _is_free(port):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    """Return whether no program has the port, on any address. Binds it for a moment, without listening."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


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
    """ipyparallel's controller on one loop: it reports on a socket that it is up, and reads there of engines that come and go."""

    name = "ipcontroller"
    _last_client = float("-inf")
    _failure: BaseException | None = None
    #: The beginning of a line whose end has not been read.
    _unread = b""

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
        return choose(PORTS)

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
        """Announce an engine to clients: it has registered, and listens."""
        # A client gets the list of engines first and then subscribes to news of others: none must come in between.
        wait = self._last_client + SUBSCRIBED_WITHIN - self.loop.time()
        if wait > 0:
            self.loop.call_later(wait, self._finish, engine)
            return
        for heart, connector in list(self.hub.incoming_registrations.items()):
            if connector.id == engine:
                self.hub.finish_registration(heart)

    def _forget(self, engine: int) -> None:
        """Unregister an engine whose process has ended, perhaps in the middle of its registration."""
        self.hub.unregister_engine(b"", {"content": {"id": engine}})

    def start(self) -> None:
        """Run until SIGTERM, or until the fork server is gone."""
        self.loop.add_handler(self._channel.fileno(), self._read_channel, self.loop.READ)
        # By the loop, which runs once the queues' threads have been started below.
        self.loop.add_callback(self._report_up)
        super().start()
        if self._failure is not None:
            raise self._failure

    def _report_up(self) -> None:
        try:
            # The queues bind their ports on their own threads. Without this wait the controller would report
            # that it is up although another program has one of its ports, and no rank could join.
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

    def _read_channel(self, descriptor: int, events: int) -> None:
        try:
            data = self._channel.recv(65536)
        except BlockingIOError:
            return
        if not data:
            self.loop.remove_handler(descriptor)
            self.loop.stop()
            return
        # The channel is a stream: while this loop was busy, more lines may have come than one read takes, which cuts the last one.
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            (self._finish if line.startswith(b"+") else self._forget)(int(line[1:]))


def run_forked(argv: tuple[str, ...], channel: int) -> int:
    """Run the controller in a child of the fork server. Returns the exit code.

    Args:
        argv: Options of ipcontroller.
        channel: Descriptor of the connection to the fork server.
    """
    os.nice(5)  # ranks go first while it starts
    asyncio.set_event_loop(asyncio.new_event_loop())
    app = PoolController.instance()
    app.watch(socket.socket(fileno=channel))
    try:
        app.initialize([*argv])
        app.start()
    except zmq.ZMQError as error:
        if error.errno != PORTS_TAKEN:
            raise
        print(f"A port that the controller needs is taken: {error}", file=sys.stderr)
        return PORTS_TAKEN
    return 0
