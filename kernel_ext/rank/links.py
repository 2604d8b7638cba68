"""Which of an engine's connections to a controller are up, as ZeroMQ's monitors report.

ZeroMQ makes them in the background, and again after a controller's death, each at a time of its own. Until then what a
client asks an engine is dropped on its way, without a word to the client.
"""

from __future__ import annotations

import time

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

Socket = zmq.Socket[bytes]


class Links:
    """Connections of sockets. Main thread of the rank."""

    def __init__(self) -> None:
        self._monitors: dict[Socket, Socket] = {}
        self._wanted = 0
        self._up: set[tuple[Socket, bytes]] = set()

    def watch(self, socket: Socket) -> None:
        """Expect one more connection of this socket. Call it before the socket begins to connect."""
        if socket not in self._monitors:
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            self._monitors[socket] = socket.get_monitor_socket(events)
        self._wanted += 1

    async def established(self, seconds: float) -> bool:
        """Wait until all expected connections are up. Returns False if they are not after this many seconds."""
        poller = zmq.asyncio.Poller()
        for monitor in self._monitors.values():
            poller.register(monitor, zmq.POLLIN)
        until = time.monotonic() + seconds
        while not self._all_up():
            remaining = until - time.monotonic()
            if remaining <= 0:
                return False
            await poller.poll(int(remaining * 1000) + 1)
        return True

    def _all_up(self) -> bool:
        for socket, monitor in self._monitors.items():
            while monitor.poll(0):
                event = recv_monitor_message(monitor)
                link = (socket, event["endpoint"])
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    self._up.discard(link)
                else:
                    self._up.add(link)
        return len(self._up) >= self._wanted

    def forget(self) -> None:
        """All these connections were ended; expect as many others. Call it before the sockets begin to connect again."""
        self._all_up()  # takes what the monitors still have of the old ones
        self._up.clear()

    def close(self) -> None:
        """Watch no more."""
        for socket, monitor in self._monitors.items():
            # In this order: ZeroMQ's thread would block on a full monitor that is still enabled and has no reader.
            if not socket.closed:
                socket.disable_monitor()
            monitor.close(linger=0)
        self._monitors.clear()
