"""A client's connection to the coordinator: how it is made, and the one thread that reads it and makes all calls."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hvdlab.collectives.errors import ProtocolError, StartError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_to_peer
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.collectives.protocol.handshake import connect
from hvdlab.collectives.system import process_state
from hvdlab.collectives.time_limits import Deadline, Heartbeat


@dataclass(frozen=True, slots=True)
class Door:
    """How to get to the coordinator."""

    address: str
    token: str
    certificate: str | None
    role: str = "client"

    @property
    def here(self) -> bool:
        """Whether the coordinator is on this host."""
        return self.address.startswith("unix:")

    def enter(self, generation: int, deadline: Deadline, process: int = 0) -> tuple[Endpoint, m.Welcome]:
        """Connect as a peer that was connected to this generation of the coordinator before, or to none (-1).

        Args:
            generation: How many coordinators had died before the one that this peer was connected to.
            deadline: Limit of all steps together.
            process: The coordinator's process, if its end is to end the wait. The connection alone would not: a starter keeps the
                listening socket, in whose queue it stays for a successor.
        """
        hello = m.Hello(m.PROTOCOL_VERSION, self.token, self.role, pid=os.getpid(), generation=generation)
        with _shut_down_with(process) as opened:
            return connect(
                self.address, hello, certificate=self.certificate, deadline=deadline, opened=opened
            )


@contextlib.contextmanager
def _shut_down_with(process: int) -> Iterator[Callable[[socket.socket], None] | None]:
    """Yield a function that takes each socket of an attempt to connect: the latest is shut down when this process ends."""
    if not process:
        yield None
        return
    try:
        ended = os.pidfd_open(process)
    except OSError:  # it has been waited for already, or no descriptor is left: the deadline ends the wait
        yield None
        return
    finish_reader, finish = os.pipe()
    sockets: list[socket.socket] = []
    over = threading.Event()

    def opened(sock: socket.socket) -> None:
        # The socket is stored before the event is read, and watch() sets that before it reads the sockets: one of them sees it.
        sockets.append(sock)
        if over.is_set():
            raise StartError("The coordinator has ended before it answered.")

    def watch() -> None:
        ready, _, _ = select.select([ended, finish_reader], [], [])
        if ended in ready:
            over.set()
            for sock in sockets[-1:]:
                with contextlib.suppress(OSError):  # not connected yet, or closed again
                    sock.shutdown(socket.SHUT_RDWR)

    watcher = threading.Thread(target=watch, name="hvdlab-successor", daemon=True)
    watcher.start()
    try:
        yield opened
    finally:
        os.write(finish, b"\0")
        watcher.join()
        for descriptor in (ended, finish_reader, finish):
            os.close(descriptor)


class Link:
    """One connection, from :meth:`start` to its end.

    Args:
        endpoint: The connection; taken over.
        pid: The coordinator's process if it is on this host, else 0.
        calls: Calls for the thread to run; those that are left at the end are for the next link.
        take: Called on the thread with each message.
        ended: Called on the thread with the reason, as the last thing that it does.

    Attributes:
        thread: The thread that reads.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        pid: int,
        calls: deque[Callable[[], None]],
        take: Callable[[m.ToPeer], None],
        ended: Callable[[str], None],
    ) -> None:
        self._endpoint, self._pid = endpoint, pid
        self._calls, self._take, self._ended = calls, take, ended
        self._closing = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self.thread = threading.Thread(target=self._run, name="hvdlab-client", daemon=True)

    def start(self) -> None:
        self.thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def send(self, message: m.Message) -> None:
        """Send a message. Raises :class:`ConnectionLost`."""
        if not self._endpoint.send(message):
            self.wake()  # the thread has to watch for room

    def wake(self) -> None:
        """Let the thread look for calls."""
        # A full pipe wakes as well as one more byte; a closed one means that the thread has ended.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def close(self) -> None:
        """End the connection, once what was sent before has gone out."""
        self._closing = True
        self.wake()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the connection to the coordinator was closed"
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_reader, selectors.EVENT_READ)
                selector.register(self._endpoint, selectors.EVENT_READ)
                heartbeat = Heartbeat(time.monotonic(), self._is_stopped)
                self._receive()  # what came along with the handshake does not make the socket readable
                while not self._closing:
                    self._step(selector, heartbeat)
                self._linger()
        except (ConnectionLost, ProtocolError) as error:
            reason = f"the coordinator is lost: {error}"
        finally:
            self._endpoint.close()
            self._wake_reader.close()
            self._wake_writer.close()
            self._ended(reason)

    def _is_stopped(self) -> bool:
        return self._pid > 0 and process_state(self._pid) in ("T", "t")

    def _step(self, selector: selectors.BaseSelector, heartbeat: Heartbeat) -> None:
        writing = selectors.EVENT_WRITE if self._endpoint.backlog else 0
        selector.modify(self._endpoint, selectors.EVENT_READ | writing)
        for key, mask in selector.select(heartbeat.timeout(time.monotonic())):
            if key.fileobj is self._wake_reader:
                self._wake_reader.recv(4096)
                continue
            if mask & selectors.EVENT_WRITE:
                self._endpoint.flush()
            if mask & selectors.EVENT_READ:
                heartbeat.heard(time.monotonic())
                self._receive()
        self.run_calls()
        now = time.monotonic()
        if heartbeat.asks(now):
            self._endpoint.send(m.Ping(0))
        elif reason := heartbeat.lost(now):
            raise ConnectionLost(reason)

    def run_calls(self) -> None:
        """Run the queued calls. On the thread."""
        while self._calls:
            self._calls.popleft()()

    def _receive(self) -> None:
        self.run_calls()  # a callback that was registered before a question must get the answer: register it first
        for payload in self._endpoint.receive():
            message = decode_to_peer(payload)
            if isinstance(message, m.Ping):
                self._endpoint.send(m.Pong(message.number, time.monotonic_ns()))
            else:
                self._take(message)

    def _linger(self) -> None:
        """Let what was sent before close() go out, but not for ever."""
        deadline = time.monotonic() + 1.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._endpoint, selectors.EVENT_WRITE)
            while not self._endpoint.flush():
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return
