"""Process of a server: sockets and time around :class:`~hvdlab.collectives.kvstore.servers.state.ParameterServerState`.

It belongs to a job, and ends with the job's coordinator unless that has a successor. No rank owns it: the first worker of its host that
notices its end starts it again, on the same socket.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import math
import os
import select
import shutil
import signal
import socket
import ssl
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hvdlab.collectives.client import CoordinatorAddress
from hvdlab.collectives.coordinator.connections import RejectionLog
from hvdlab.collectives.errors import ProtocolError, StartError
from hvdlab.collectives.event_loop import READ, WRITE, EventLoop, WakeUp
from hvdlab.collectives.kvstore.arrays import Array
from hvdlab.collectives.kvstore.servers import messages as m
from hvdlab.collectives.kvstore.servers.memory import SharedFile
from hvdlab.collectives.kvstore.servers.starting import ServerLaunch
from hvdlab.collectives.kvstore.servers.state import (
    Disconnect,
    Event,
    ParameterServerState,
    ServerReceived,
    ServerTick,
    WorkerArrived,
    WorkerDied,
    WorkerDisconnected,
)
from hvdlab.collectives.protocol import messages as jobs
from hvdlab.collectives.protocol.codec import FRAME_LIMIT, HELLO_LIMIT, decode_to_peer
from hvdlab.collectives.protocol.endpoint import LOST, ConnectionLost, Endpoint, server_context
from hvdlab.collectives.protocol.handshake import NobodyThereError, RefusedError
from hvdlab.collectives.protocol.messages import Message
from hvdlab.collectives.system import name_process, require_own_peer
from hvdlab.collectives.text import operator_log
from hvdlab.collectives.time_limits import Deadline

STRANGERS = 256
"""Connections over the network without a token at a time, beyond those of workers. Each costs some 50 KiB."""
HELLO_SECONDS = 0.5
"""Seconds that a connection has to show its token even if others need its place."""
INTRODUCE_WITHIN = 10.0
"""Seconds that a connection has for the TLS handshake and its first message."""
_TRY_AGAIN_SECONDS = 0.1
"""Pause between two tries to reach the coordinator or its successor."""
_LOG = operator_log("parameter server")
_ACCEPT_AGAIN_SECONDS = 0.2
"""Time until the server accepts again after it had no descriptor or no place left for a new connection."""


class CopiedArena:
    """Arena of a worker on another host, as far as it was sent."""

    remote = True

    def __init__(self) -> None:
        self._bytes = np.zeros(0, np.uint8)

    def array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        count = math.prod(shape)
        if min(shape, default=0) < 0 or offset < 0 or offset % dtype.itemsize:
            raise ProtocolError(f"there is no array {dtype}{list(shape)} at {offset}")
        end = offset + count * dtype.itemsize
        self._reach(end)
        return self._bytes[offset:end].view(dtype).reshape(shape)

    def write(self, offset: int, data: bytes) -> None:
        if offset < 0:
            raise ProtocolError(f"{len(data)} bytes at {offset}")
        self._reach(offset + len(data))
        self._bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def _reach(self, end: int) -> None:
        # 64 GiB. A worker's number alone must not make the server ask for any amount of memory.
        if end > FRAME_LIMIT << 8:
            raise ProtocolError(f"an arena of {end} bytes")
        if end > len(self._bytes):
            larger = np.zeros(max(end, 2 * len(self._bytes)), np.uint8)
            larger[: len(self._bytes)] = self._bytes
            self._bytes = larger


class SharedArena:
    """Arena of a worker on this host."""

    remote = False

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self.array = file.array

    def write(self, offset: int, data: bytes) -> None:
        raise ProtocolError("a worker that shares its arena sends no bytes of it")


class _Connection:
    """Accepted socket, of a worker or of a stranger."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock, self.number = sock, number
        #: The TLS handshake is not over.
        self.shaking = isinstance(sock, ssl.SSLSocket)
        #: Until when it has to show its token.
        self.deadline = time.monotonic() + INTRODUCE_WITHIN
        #: It has shown its token.
        self.open = False
        #: Requests up to this number may be repeated ones; see Attach.
        self.repeats = 0
        self.endpoint = Endpoint(sock, descriptors=True, limit=HELLO_LIMIT)
        self.arena: SharedArena | CopiedArena | None = None

    def fileno(self) -> int:
        return self.endpoint.fileno()


class JobObserver:
    """Connection of the server to the coordinator, which reports which ranks have died, and when the job is over."""

    def __init__(self, launch: ServerLaunch, news: deque[Event | None], wakeup: WakeUp) -> None:
        self._coordinator = CoordinatorAddress(
            launch.coordinator, launch.coordinator_token, launch.coordinator_certificate or None, "observer"
        )
        self._reattach, self._events, self._wakeup = launch.reattach, news, wakeup
        #: Process ids of members, by rank.
        self._known: dict[int, int] = {}
        #: The coordinator's incarnation; -1 before the first connection.
        self._incarnation = -1
        self._endpoint: Endpoint | None = None

    def start(self) -> None:
        """Connect, then follow the job on a thread. Raises ``StartError`` if there is no coordinator."""
        self._connect(Deadline(10))
        threading.Thread(target=self._follow, name="hvdlab-job", daemon=True).start()

    def _connect(self, deadline: Deadline) -> None:
        self._endpoint, welcome = self._coordinator.connect(self._incarnation, deadline)
        self._incarnation = welcome.incarnation

    def _follow(self) -> None:
        try:
            while True:
                try:
                    self._read()
                except (ConnectionLost, ProtocolError):
                    self._reconnect()
        except (StartError, OSError, TimeoutError):
            self._notify(None)  # the job is over

    def _read(self) -> None:
        endpoint = self._endpoint
        assert endpoint is not None
        poll = select.poll()
        poll.register(endpoint, select.POLLIN)
        while True:
            for payload in endpoint.receive():
                message = decode_to_peer(payload)
                if isinstance(message, jobs.Ping):
                    endpoint.send(jobs.Pong(message.number, time.monotonic_ns()))
                # A successor that still restores the world lists the ranks that have come to it so far; the others are on their way,
                # not dead.
                elif isinstance(message, jobs.World) and not message.restoring:
                    self._report_ends(message)
            poll.poll()

    def _reconnect(self) -> None:
        """Connect again, to the same coordinator or to its successor; try repeatedly, since no event announces a successor."""
        assert self._endpoint is not None
        self._endpoint.close()
        deadline = Deadline(3 * self._reattach)
        while True:
            try:
                return self._connect(deadline)
            except (NobodyThereError, RefusedError):
                raise
            except StartError:
                if deadline.expired:
                    raise
            time.sleep(_TRY_AGAIN_SECONDS)

    def _report_ends(self, world: jobs.World) -> None:
        members = {member.rank: member.pid for member in world.members}
        ends = {(death.rank, death.pid): death.reason for death in world.deaths}
        for rank, pid in self._known.items():
            if members.get(rank) != pid:
                self._notify(WorkerDied(rank, pid, ends.pop((rank, pid), "")))
        for (rank, pid), reason in ends.items():
            if (rank, pid) not in self._known.items() and members.get(rank) != pid:
                self._notify(WorkerDied(rank, pid, reason))
        self._known = members

    def _notify(self, news: Event | None) -> None:
        # Before the wake-up: the loop reads the queue once it is awake.
        self._events.append(news)
        self._wakeup.wake()


class ParameterServer:
    """Event loop of a server: it listens, and carries out the decisions of the state.

    Args:
        launch: The settings.
    """

    def __init__(self, launch: ServerLaunch) -> None:
        self._launch = launch
        self._state = ParameterServerState(_import_optimizers(launch))
        self._loop: EventLoop[_Connection | socket.socket | WakeUp] = EventLoop()
        self._connections: dict[int, _Connection] = {}
        #: Answers of this step by connection, sent together: one system call, and one wake-up of the worker, for all of them.
        self._answers: dict[int, list[bytes]] = {}
        #: Number of the last connection.
        self._numbers = 0
        #: For the TLS listener; None without one.
        self._context: ssl.SSLContext | None = None
        #: Wakes the loop, for the thread of :class:`JobObserver` and SIGTERM.
        self._wakeup = WakeUp()
        #: Events of the job; None when it is over.
        self._events: deque[Event | None] = deque()
        self._rejections = RejectionLog(_LOG, self._loop)
        #: Listeners at which the server accepts nothing for a while, or until a connection ends.
        self._waiting: list[socket.socket] = []
        #: The loop ends after this step; the job is over as well.
        self._ending = self._over = False

    def serve(self) -> bool:
        """Run until the job is over, or SIGTERM comes. Returns whether the job is over."""
        self._listen()
        # Before the server is ready: its starter learns of a server that finds no coordinator as of a failed start.
        JobObserver(self._launch, self._events, self._wakeup).start()
        signal.set_wakeup_fd(self._wakeup.writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._terminate)
        with contextlib.suppress(
            BrokenPipeError
        ):  # the worker that started the server has died meanwhile; other workers use it
            os.write(1, b"ready\n")
        os.dup2(2, 1)  # no process reads the pipe any more, and an optimizer of the user's may print
        while not self._ending:  # SIGTERM's handler changes it
            self._step()
        for connection in list(self._connections.values()):
            connection.endpoint.close()
        self._state.close()
        return self._over

    def _terminate(self, number: int, frame: object) -> None:
        self._ending = True  # and workers start another one

    def _listen(self) -> None:
        launch = self._launch
        local = socket.socket(fileno=launch.listener)
        local.setblocking(False)
        self._loop.register(local, READ, local)
        if launch.tls_listener >= 0:
            self._context = server_context(Path(launch.directory), launch.certificate, launch.key)
            remote = socket.socket(fileno=launch.tls_listener)
            remote.setblocking(False)
            self._loop.register(remote, READ, remote)
        self._loop.register(self._wakeup, READ, self._wakeup)

    def _step(self) -> None:
        now = time.monotonic()
        due = min(
            [
                self._state.next_tick(),
                self._loop.next_call,
                *(c.deadline for c in self._connections.values() if not c.open),
            ]
        )
        for target, events in self._loop.wait(None if due == math.inf else max(0.0, due - now)):
            if isinstance(target, socket.socket):
                self._accept(target)
            elif isinstance(target, WakeUp):
                target.drain()
            else:
                self._serve(target, events)
                # After each connection: a worker gets its answers before the requests of the next one are carried out.
                self._send_answers()
        while self._events:
            event = self._events.popleft()
            if event is None:
                self._ending = self._over = True
            else:
                self._handle(event)
        if due <= time.monotonic():
            self._pass_time()
        self._send_answers()

    def _pass_time(self) -> None:
        now = time.monotonic()
        self._handle(ServerTick())
        for connection in list(self._connections.values()):
            if not connection.open and connection.deadline <= now:
                self._reject(connection, f"it did not introduce itself within {INTRODUCE_WITHIN:g} s")
        self._loop.call_due(now)

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        if listener.family != socket.AF_UNIX and not self._has_room_for_stranger():
            self._accept_later(listener, "too many have not shown a token yet")
            return
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone already
            return
        except OSError as error:
            self._make_room(listener, error)
            return
        try:
            sock.setblocking(False)
            if listener.family == socket.AF_UNIX:
                require_own_peer(sock)
            elif self._context is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.getpeername()  # one that has gone before it was accepted can't be wrapped
                sock = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError as error:
            self._rejections.add(f"a connection is closed: {error}")
            sock.close()
            return
        self._numbers += 1
        connection = _Connection(sock, self._numbers)
        self._connections[connection.number] = connection
        self._loop.register(connection, READ, connection)

    def _has_room_for_stranger(self) -> bool:
        """Return whether one more connection without a token may stay; the oldest that has had its time ends for it."""
        strangers = [one for one in self._connections.values() if not one.open]
        if len(strangers) < STRANGERS:
            return True
        return self._end_oldest(strangers, "others need its place")

    def _end_oldest(self, strangers: Sequence[_Connection], reason: str) -> bool:
        """Close the connection that has owed its token for longest. Returns whether one has had enough time to show it."""
        until = time.monotonic() + INTRODUCE_WITHIN - HELLO_SECONDS
        oldest = next((one for one in strangers if one.deadline <= until), None)
        if oldest is None:
            return False
        self._reject(oldest, reason)
        return True

    def _make_room(self, listener: socket.socket, error: OSError) -> None:
        """Free a descriptor, as none is left: close the oldest connection that owes its token, or let newcomers wait."""
        strangers = [one for one in self._connections.values() if not one.open]
        if not self._end_oldest(strangers, f"its place is needed: {error}"):
            self._accept_later(listener, str(error))

    def _accept_later(self, listener: socket.socket, reason: str) -> None:
        """Let newcomers wait at the listener for a while, or until a connection ends: it would be readable all the time."""
        self._rejections.add(f"new connections have to wait: {reason}")
        self._loop.unregister(listener)
        self._waiting.append(listener)
        self._loop.call_at(time.monotonic() + _ACCEPT_AGAIN_SECONDS, self._accept_again)

    def _accept_again(self) -> None:
        while self._waiting:
            listener = self._waiting.pop()
            self._loop.register(listener, READ, listener)

    def _serve(self, connection: _Connection, events: int) -> None:
        if connection.endpoint.closed:
            return
        try:
            if connection.shaking and not self._handshake_done(connection):
                return
            if events & WRITE and connection.endpoint.flush():
                self._loop.modify(connection, READ)
            for payload in connection.endpoint.receive():
                if connection.open:
                    self._receive(connection, m.decode_from_worker(payload))
                else:
                    self._attach(connection, m.decode_attach(payload))
                if connection.number not in self._connections:
                    return  # it broke the protocol
        except ConnectionLost:
            self._drop(connection)
        # Workers name the sizes of arenas and frames: where there is no memory for one, only that worker loses its
        # connection.
        except (ProtocolError, OSError, MemoryError) as error:
            self._reject(connection, str(error) or "there is no memory for what it sent")

    def _handshake_done(self, connection: _Connection) -> bool:
        assert isinstance(connection.sock, ssl.SSLSocket)
        try:
            connection.sock.do_handshake()
        except ssl.SSLWantReadError:
            self._loop.modify(connection, READ)
            return False
        except ssl.SSLWantWriteError:
            self._loop.modify(connection, READ | WRITE)
            return False
        self._loop.modify(connection, READ)
        connection.shaking = False
        return True

    def _attach(self, connection: _Connection, message: m.Attach) -> None:
        # Compared in constant time, and as bytes: compare_digest() refuses text that is not ASCII, which a
        # stranger can send.
        if message.version != m.VERSION or not hmac.compare_digest(
            message.token.encode(), self._launch.token.encode()
        ):
            connection.endpoint.send_frame(m.encode(m.AttachRefused("wrong version or token")))
            raise ProtocolError("it showed a wrong token, or has another version")
        if message.shared:
            connection.arena = SharedArena(SharedFile(_descriptor(connection.endpoint)))
        else:
            connection.arena = CopiedArena()
        connection.open = True
        connection.repeats = message.repeats
        # Only now: the frames of a connection without a token stay small.
        connection.endpoint.limit = FRAME_LIMIT
        connection.endpoint.send_frame(m.encode(m.Attached(os.getpid())))
        self._handle(WorkerArrived(connection.number, message.rank, message.pid, connection.arena))

    def _receive(self, connection: _Connection, message: m.FromWorker) -> None:
        file = None
        if isinstance(message, m.Bring):
            file = SharedFile(_descriptor(connection.endpoint))
        received = ServerReceived(connection.number, message, file)
        if 0 < getattr(message, "sequence", 0) <= connection.repeats:
            self._handle_repeated(connection, received, message.sequence)  # type: ignore[union-attr]
        else:
            self._handle(received)

    def _handle_repeated(self, connection: _Connection, received: ServerReceived, sequence: int) -> None:
        """Send the worker the request's number before carrying it out: it may be the request that ended the server before this one."""
        self._send_answers()
        self._send(connection, m.encode(m.RequestBegun(sequence)))
        self._handle(received)
        # Behind the answer: as long as the worker has not got that, this request can be the one that ends the server.
        self._answers.setdefault(connection.number, []).append(m.encode(m.RequestBegun(0)))

    def _reject(self, connection: _Connection, reason: str) -> None:
        self._rejections.add(f"a connection was turned away: {reason}")
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.endpoint.closed:
            return
        self._loop.unregister(connection)
        connection.endpoint.close()
        del self._connections[connection.number]
        # Its descriptor is free now, for a newcomer that waits because none was left.
        self._accept_again()
        if connection.open:
            self._handle(WorkerDisconnected(connection.number))

    # -- effects ------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        began = time.monotonic_ns()
        effects = self._state.handle(event, began / 1e9)
        took = time.monotonic_ns() - began
        for effect in effects:
            connection = self._connections.get(effect.peer)
            if connection is None:
                continue
            if isinstance(effect, Disconnect):
                if effect.reason:
                    self._reject(connection, effect.reason)
                else:
                    self._drop(connection)
                continue
            message = effect.message
            if isinstance(message, m.RequestDone):
                message = msgspec.structs.replace(message, began=began, took=took)
            self._answers.setdefault(effect.peer, []).append(_encoded(message))
            if effect.file is not None:
                # The descriptor goes with the last frame; those before it are sent first, to keep their order.
                *before, last = self._answers.pop(effect.peer)
                self._send(connection, b"".join(before))
                self._send(connection, last, effect.file.descriptor)

    def _send_answers(self) -> None:
        answers, self._answers = self._answers, {}
        for number, frames in answers.items():
            connection = self._connections.get(number)
            if connection is not None:
                self._send(connection, b"".join(frames))

    def _send(self, connection: _Connection, frames: bytes, descriptor: int = -1) -> None:
        try:
            if frames and not connection.endpoint.send_frame(frames, descriptor):
                self._loop.modify(connection, READ | WRITE)
        except ConnectionLost:
            return  # reading finds its end, too


def _encoded(message: Message) -> bytes:
    """Return the frame of a message; of an answer that can't be sent, that of an error in its place."""
    try:
        return m.encode(message)
    except ProtocolError as error:
        if not isinstance(message, m.RequestDone | m.RequestFailed | m.Stock):
            raise
        return m.encode(m.RequestFailed(message.sequence, str(error)))


def _import_optimizers(launch: ServerLaunch) -> str:
    """Import the modules of the user's optimizers, which register themselves; returns which failed, and why."""
    failed = []
    sys.path += [entry for entry in launch.path if entry not in sys.path]
    ready = os.dup(1)
    os.dup2(2, 1)  # the starter reads stdout, and waits for "ready" there
    try:
        for name in launch.optimizers:
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001  (user's code; set_optimizer fails with this text)
                for line in traceback.format_exc().splitlines():
                    _LOG.warning("%s", line)
                failed.append(f"import {name} failed on a server: {type(error).__name__}: {error}")
        sys.stdout.flush()
    finally:
        os.dup2(ready, 1)
        os.close(ready)
    return "; ".join(failed)


def _descriptor(endpoint: Endpoint) -> int:
    descriptor = endpoint.take_descriptor()
    if descriptor == LOST:
        raise ProtocolError("this process has as many open files as it may have")
    return descriptor


def main() -> int:
    """Run a server with the settings on standard input; returns the exit status."""
    # Ctrl-C in a terminal reaches all processes of the group; the values have to outlive it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = sys.stdin.buffer.readline()
    if not settings:
        return 1  # the worker that started this server was killed first: another worker starts another server
    launch = msgspec.json.decode(settings, type=ServerLaunch)
    name_process("hvdlab-server", "hvdlab parameter server")
    try:
        over = ParameterServer(launch).serve()
    except StartError as error:
        _LOG.warning("%s", error)
        return 1
    # Otherwise a worker starts another server, from the settings in that directory.
    if over:
        shutil.rmtree(launch.directory, ignore_errors=True)
    return 0
