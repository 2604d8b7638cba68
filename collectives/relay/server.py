"""The shell around a relay's state: the ranks' sockets, the connection to the coordinator, clock and one poller."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterable

from hvdlab.collectives.coordinator.connection import CLOSING, OPEN, Connection
from hvdlab.collectives.coordinator.connections import NEVER, Connections
from hvdlab.collectives.coordinator.doors import Doors
from hvdlab.collectives.coordinator.events import Event as PeerEvent
from hvdlab.collectives.coordinator.events import PeerLost
from hvdlab.collectives.coordinator.options import ServerOptions
from hvdlab.collectives.coordinator.poller import READ, WRITE
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.codec import decode_hello
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.collectives.protocol.frames import FRAME_LIMIT, HELLO_LIMIT, encode_frame
from hvdlab.collectives.protocol.messages import Bye
from hvdlab.collectives.relay.events import (
    CloseConnection,
    Effect,
    Ended,
    Event,
    Heard,
    Opened,
    SendDown,
    SendUp,
    Tick,
    Told,
)
from hvdlab.collectives.relay.state import RelayState

BACKLOG = 4 << 20
"""If more bytes than this wait for the coordinator, the relay does not read from its ranks, which then keep what they have to say."""


class RelayServer:
    """Serves the ranks of a host until the coordinator's connection ends, or the starter and then the last rank are gone.

    Args:
        up: The connection to the coordinator, which has let this relay in.
        log: Takes warnings for the operator.
    """

    def __init__(self, up: Endpoint, log: Callable[[str], None]) -> None:
        # The coordinator asks ranks for signs of life, and gives up those that are silent. The relay does neither.
        self.connections = Connections(ServerOptions("", ping_after=NEVER, dead_after=NEVER), log)
        self._state = RelayState()
        self._doors = Doors(self.connections)
        self._poller = self.connections.poller
        self._up, self._log = up, log
        self._up_writing = False
        self._lost = False  # the coordinator
        self._alone = False  # the starter has gone
        self._starter = self._answers = -1
        self._room = select.poll()
        self._poller.register(up, READ, self._serve_up)
        self._room.register(up, select.POLLIN | select.POLLOUT)

    # -- set-up ---------------------------------------------------------------------------------------------------

    def listen(self, sock: socket.socket) -> None:
        """Accept ranks on a listening socket. Takes the socket over."""
        self._doors.open(sock)

    def answer(self, questions: int, answers: int) -> None:
        """Answer the starter, which asks for signs of life by a byte each; at the end of file it has gone.

        Args:
            questions: Descriptor that the bytes come from.
            answers: Descriptor that they are written to again.
        """
        self._starter, self._answers = questions, answers
        self._poller.register(questions, READ, self._read_starter)
        self._room.register(questions, select.POLLIN)

    def _read_starter(self) -> None:
        asked = os.read(self._starter, 4096)
        if asked:
            try:
                os.write(self._answers, asked)
                return
            except BrokenPipeError:
                pass  # it is gone, too
        self._alone = True
        self._poller.unregister(self._starter)
        self._room.unregister(self._starter)

    # -- the loop -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve; closes every socket before it returns."""
        try:
            self._read_up()  # what came along with the handshake does not make the socket readable
            while not self._lost and not (self._alone and self.connections.idle):
                if self._up.backlog > BACKLOG:
                    self._wait_for_room()
                else:
                    self._serve_once()
        finally:
            self._part()

    def _serve_once(self) -> None:
        connections = self.connections
        ready = self._poller.wait(self._timeout())
        now = time.monotonic()
        for target, mask in ready:
            if not isinstance(target, Connection):
                target()
                continue
            if mask & WRITE:
                connections.flush(target)
            if mask & READ and target.phase != CLOSING:
                self._read(target, now)
        if now >= connections.next_sweep:
            connections.sweep(now, connections.lost)
        due = self._state.next_deadline()
        if due is not None and now >= due:
            self._handle(Tick(), now)
        self._take_lost(now)

    def _timeout(self) -> float | None:
        held = self._state.next_deadline()
        due = min(NEVER if held is None else held, self.connections.next_sweep)
        return None if due == NEVER else max(0.0, due - time.monotonic())

    def _wait_for_room(self) -> None:
        """Wait until the coordinator reads again, or has something to say, and leave all ranks waiting meanwhile."""
        for descriptor, _ in self._room.poll():
            if descriptor == self._starter:
                self._read_starter()
            else:
                self._serve_up()
        self._take_lost(time.monotonic())

    # -- ranks ----------------------------------------------------------------------------------------------------

    def _read(self, connection: Connection, now: float) -> None:
        introduced = connection.phase == OPEN
        try:
            for payload in connection.endpoint.receive():
                if connection.endpoint.closed:
                    return  # the coordinator wants it closed
                if not introduced:
                    self._introduce(connection, payload)
                    introduced = True
                self._handle(Heard(connection.peer, bytes(payload)), now)
        except ConnectionLost:
            if introduced:
                self._lose(connection, "its connection ended without a goodbye", now)
            else:
                self.connections.drop(connection)
        except ProtocolError as error:
            if introduced:
                self._lose(connection, f"it sent {error}", now, faulty=True)
            else:
                self.connections.turned_away.tell(f"{connection.name} is closed: {error}")
                self.connections.drop(connection)

    def _introduce(self, connection: Connection, payload: memoryview) -> None:
        hello = decode_hello(payload)
        if hello.role != "rank":
            raise ProtocolError(f"only ranks may be behind a relay, and it wants to be a {hello.role[:20]!r}")
        self.connections.introduce(connection, hello)
        # What goes on to the coordinator has to fit into a frame together with the numbers of the ranks that sent it.
        connection.endpoint.limit = FRAME_LIMIT - HELLO_LIMIT
        self._state.handle(Opened(connection.peer), 0.0)

    def _lose(self, connection: Connection, reason: str, now: float, *, faulty: bool = False) -> None:
        lost: list[PeerEvent] = []
        if connection.peer in self.connections.open:
            self.connections.lose(connection, reason, lost, faulty=faulty)
        self._end(lost, now)

    def _take_lost(self, now: float) -> None:
        """Take in the ends of connections that were noticed while something was sent over them."""
        while self.connections.lost:
            lost, self.connections.lost = self.connections.lost, []
            self._end(lost, now)

    def _end(self, lost: Iterable[PeerEvent], now: float) -> None:
        for event in lost:
            assert isinstance(event, PeerLost)
            self._handle(Ended(event.peer, event.reason, event.faulty), now)

    # -- the coordinator ------------------------------------------------------------------------------------------

    def _serve_up(self) -> None:
        try:
            if self._up_writing and self._up.flush():
                self._watch_up(writing=False)
        except ConnectionLost:
            self._lost = True
            return
        self._read_up()

    def _read_up(self) -> None:
        now = time.monotonic()
        try:
            for payload in self._up.receive():
                self._handle(Told(bytes(payload)), now)
        except ConnectionLost:
            self._lost = True
        except ProtocolError as error:
            self._log(f"the coordinator sent {error}; ending")
            self._lost = True

    def _watch_up(self, *, writing: bool) -> None:
        self._up_writing = writing
        self._poller.modify(self._up, READ | WRITE if writing else READ)

    # -- effects --------------------------------------------------------------------------------------------------

    def _handle(self, event: Event, now: float) -> None:
        for effect in self._state.handle(event, now):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        open_ = self.connections.open
        if isinstance(effect, SendUp):
            try:
                if not self._lost and not self._up.send(effect.message) and not self._up_writing:
                    self._watch_up(writing=True)
            except ConnectionLost:
                self._lost = True
        elif isinstance(effect, SendDown):
            frame = encode_frame(effect.payload)
            for peer in effect.connections:
                if peer in open_:
                    self.connections.write(open_[peer], frame)
        elif isinstance(effect, CloseConnection) and effect.connection in open_:
            self.connections.finish(open_[effect.connection])

    # -- the end --------------------------------------------------------------------------------------------------

    def _part(self) -> None:
        """Leave without a rank behind, or let the ranks go to the coordinator, or its successor, by themselves."""
        if not self._lost and self.connections.idle:
            self._perform_goodbye()
        self._up.close()
        self.connections.close()

    def _perform_goodbye(self) -> None:
        try:
            self._up.send(Bye("the last rank has gone"))
        except ConnectionLost:
            self._lost = True
