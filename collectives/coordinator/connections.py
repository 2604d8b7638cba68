"""Connections: the accepted sockets of the server, their phases, sending, timeouts, and the log of strangers."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable

from hvdlab.collectives.coordinator.event_history import LaggingSubscriber
from hvdlab.collectives.coordinator.events import Event, PeerLost
from hvdlab.collectives.coordinator.process import ServerOptions
from hvdlab.collectives.event_loop import NEVER, READ, WRITE, CallScheduler, EventLoop
from hvdlab.collectives.protocol.codec import FRAME_LIMIT, HELLO_LIMIT, decode_from_client, decode_from_rank
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.collectives.protocol.messages import FromClient, FromRank, Hello
from hvdlab.collectives.system import peer_credentials
from hvdlab.collectives.text import visible
from hvdlab.collectives.time_limits import Clock

SHAKING, STRANGER, OPEN, CLOSING = range(4)


EVERYTHING = -1
"""For :attr:`Connection.members_sent`: each message to it carries all descriptions of members."""


MOST_STRANGERS = 256
"""Connections over the network that can owe their Hello at a time, beyond the number of expected ranks. Each costs some 80 KiB."""


_HELLO_SECONDS = 0.5
"""Seconds that a stranger has for its Hello even if others need its place."""


LOGGED_PER_MINUTE = 5
"""Lines of a minute; the rest is only counted, or any process that reaches the port could fill the log."""


LONGEST_REJECTION = 300
"""Characters of a line at most: some lines contain a stranger's text."""


MINUTE = 60.0
"""Seconds for which :data:`LOGGED_PER_MINUTE` holds."""


class Connections:
    """Accepted sockets, with the event loop and the timeouts that watch them.

    Attributes:
        loop: Its targets are connections, or functions to call.
        listeners: Sockets that accept connections.
        open: Connections that were introduced, by peer.
        lost: Events about connections that ended while the server sent to them.
        next_check: Time at which :meth:`check_timeouts` is due.
        rejections: Logs, for the operator, the connections that were not let in.
        met: Whether any peer was ever introduced.
    """

    def __init__(self, options: ServerOptions, log: logging.Logger) -> None:
        self.loop: EventLoop[Connection | Callable[[], None]] = EventLoop()
        self.listeners: list[socket.socket] = []
        self.open: dict[int, Connection] = {}
        self.lost: list[Event] = []
        self.next_check = NEVER
        self.met = False
        #: The server's settings.
        self._options = options
        #: Called with a warning for the operator.
        self._log = log
        self.rejections = RejectionLog(log, self.loop)
        self._transient: dict[Connection, None] = {}  # neither introduced yet nor quite closed
        #: Number of the next connection.
        self._next_peer = 1

    @property
    def idle(self) -> bool:
        """Return whether no rank or client is connected, or about to be. Observers don't count: the coordinator does not stay for them."""
        return not self._transient and all(connection.observer for connection in self.open.values())

    # -- beginnings -----------------------------------------------------------------------------------------------

    def add(self, sock: socket.socket) -> None:
        """Watch a new socket; it has to introduce itself in time.

        Raises:
            OSError: The kernel watches no further socket, for lack of memory or by its limit. Nothing has changed then.
        """
        deadline = time.monotonic() + self._options.hello_timeout
        connection = Connection(sock, self._next_peer, deadline)
        self.loop.register(connection, READ, connection)
        self._next_peer += 1
        self._set_deadline(connection, deadline)

    def has_place_for_stranger(self) -> bool:
        """Return whether one more connection over the network can be accepted; the oldest that has had its time ends for it.

        Any process that reaches the port costs memory until it shows the token. A Unix socket lets in only this user.
        """
        # All ranks of a job can come at once, and each is a stranger until its Hello: they must not displace one another.
        bound = MOST_STRANGERS + (self._options.state.size or 0)
        return len(self._transient) < bound or self.close_oldest_stranger()

    def introduce(self, connection: Connection, hello: Hello) -> None:
        """Open a connection that has shown a valid token in ``hello``."""
        del self._transient[connection]
        connection.phase = OPEN
        connection.client, connection.observer = hello.role == "client", hello.role == "observer"
        connection.tracked = hello.cells_tracked
        # Ranks get short lists of members from now on; clients and observers, which are few, get whole ones.
        if not (connection.client or connection.observer):
            connection.members_sent = 0
        connection.name = f"rank {hello.rank}" if hello.role == "rank" else f"{hello.role} {connection.peer}"
        connection.endpoint.limit = FRAME_LIMIT  # only now: a stranger's frames stay small
        connection.heard = time.monotonic()
        self.open[connection.peer] = connection
        # Never reset: a successor that no peer has ever found leaves the directory to the next one when its
        # starter ends.
        self.met = True
        self.schedule_check(connection.heard + self._options.ping_after)

    def _set_deadline(self, connection: Connection, deadline: float) -> None:
        connection.deadline = deadline
        self._transient[connection] = None
        self.schedule_check(deadline)

    # -- ends -----------------------------------------------------------------------------------------------------

    def close_now(self, connection: Connection) -> None:
        """Close a connection now. Without effect if it is closed already: results of the loop's last wait can still name it."""
        if connection.endpoint.closed:
            return
        connection.phase = CLOSING
        self._transient.pop(connection, None)
        # Before the close: the next accepted socket can get the same descriptor.
        self.loop.unregister(connection)
        connection.endpoint.close()

    def close_oldest_stranger(self) -> bool:
        """Close the connection that has owed its Hello for longest. Return false if none has had enough time to send it."""
        until = time.monotonic() + self._options.hello_timeout - _HELLO_SECONDS
        # In the order of acceptance, hence of deadlines.
        for connection in self._transient:
            if connection.phase != CLOSING and connection.deadline <= until:
                self.rejections.add(
                    f"{connection.name} is closed: it has not said Hello, and others need its place"
                )
                self.close_now(connection)
                return True
        return False

    def peer_lost(
        self, connection: Connection, reason: str, events: list[Event], *, faulty: bool = False
    ) -> None:
        """Close a connection that was introduced, and append the event; ``faulty`` if the peer broke the protocol."""
        del self.open[connection.peer]
        self.close_now(connection)
        # From the last bytes: a peer on another host can be cut off long before its connection ends here.
        silence = time.monotonic() - connection.heard
        events.append(PeerLost(connection.peer, reason, silence, faulty))

    def close_after_flush(self, connection: Connection) -> None:
        """Close a connection after its backlog has been sent; the server does not read from it any more."""
        # Not open from now on: later effects of this batch send it nothing.
        self.open.pop(connection.peer, None)
        if connection.broken or not connection.endpoint.backlog:
            self.close_now(connection)
            return
        connection.phase = CLOSING
        self._set_deadline(connection, time.monotonic() + self._options.hello_timeout)
        self.loop.modify(connection, WRITE)

    def close(self) -> None:
        """Close every socket, after one attempt to send its backlog."""
        for target in self.loop:
            if isinstance(target, Connection):
                with contextlib.suppress(ConnectionLost):
                    # Once, without a wait: a peer that does not read must not delay the end of this process.
                    target.endpoint.flush()
                target.endpoint.close()
        for listener in self.listeners:
            listener.close()
        self.open.clear()
        self._transient.clear()
        self.loop.close()

    # -- sending --------------------------------------------------------------------------------------------------

    def write(
        self, connection: Connection, frame: bytes, descriptor: int = -1, *, bulk: bool = False
    ) -> None:
        """Send a frame now or as soon as the peer reads; a ``bulk`` frame after all other frames that wait."""
        if connection.broken:
            return
        try:
            if connection.endpoint.send_frame(frame, descriptor, bulk=bulk):
                return
        except ConnectionLost:
            connection.broken = True  # earlier bytes of the peer are read first; then its end of file comes
            return
        except OSError as error:
            # No descriptor is left for the copy in the backlog (EMFILE). Without this frame the next ones mean nothing to the peer,
            # so it is lost; raised, the error would end the coordinator for all.
            if connection.phase == OPEN:
                self._log.warning("%s is dropped: %s", connection.name, error)
                self.peer_lost(connection, f"it could not be sent a descriptor ({error})", self.lost)
            return
        if not connection.writing:
            connection.writing = True
            self.loop.modify(connection, READ | WRITE)
        if connection.endpoint.backlog > self._options.backlog_limit and connection.phase == OPEN:
            # Into ``lost``, not the present events: the state is in the middle of handling those.
            self._log.warning("%s is dropped: it does not read what it is sent", connection.name)
            self.peer_lost(connection, "it did not read what it was sent", self.lost)

    def flush(self, connection: Connection) -> None:
        """Send the backlog as far as the socket accepts it; close a connection in phase ``CLOSING`` after the last byte."""
        try:
            done = connection.endpoint.flush()
        except ConnectionLost:
            # The rest can't be sent, and the loop would report a broken socket as writable again and again.
            connection.broken = done = True
        if not done:
            return
        if connection.phase == CLOSING:
            self.close_now(connection)
        elif connection.writing:
            connection.writing = False
            self.loop.modify(connection, READ)

    # -- time -----------------------------------------------------------------------------------------------------

    def schedule_check(self, when: float) -> None:
        """Schedule :meth:`check_timeouts` for ``when`` (``time.monotonic()``) at the latest."""
        self.next_check = min(self.next_check, when)

    def check_timeouts(self, now: float) -> None:
        """Close connections that did not introduce themselves, or did not read their backlog, in time; set :attr:`next_check`."""
        upcoming = NEVER
        # A copy: `close_now()` removes from it.
        for connection in list(self._transient):
            if now < connection.deadline:
                upcoming = min(upcoming, connection.deadline)
                continue
            # A closing peer has shown its token, or was refused with the reason, and only reads too slowly: no line for the operator.
            if connection.phase != CLOSING:
                self.rejections.add(
                    f"{connection.name} is closed: no Hello within {self._options.hello_timeout:g} s"
                )
            self.close_now(connection)
        self.next_check = upcoming


class Connection:
    """Accepted socket, from the handshake to the last byte.

    Attributes:
        peer: Number of this connection; never used again.
        phase: ``SHAKING`` (TLS handshake), ``STRANGER`` (no Hello yet), ``OPEN`` or ``CLOSING`` (only sends its
            backlog).
        name: For log lines.
        client: Whether the peer is a client.
        observer: Whether the peer is an observer, which only learns which ranks live. A peer that is neither is a rank.
        tracked: Whether it is a rank of a pool.
        deadline: Time (``time.monotonic()``) by which it has to leave its present phase, unless that is ``OPEN``.
        heard: Time at which the last bytes came.
        asked: Time of the first ping since then, or ``None``.
        writing: Whether the selector watches for writability.
        broken: Whether sending has failed; the end of the connection comes up when reading.
        sock, endpoint: The socket, and the end of the connection that reads and writes frames on it.
        tls: Whether it comes over the network, over TLS.
        pid: Process id of the peer, if it is of this host; otherwise 0.
        subscriber: Its progress in reading events, if it gets any.
        members_sent: Which descriptions of members the server has sent it, as numbered by
            :class:`~hvdlab.collectives.protocol.member_lists.SentMembers`.
    """

    __slots__ = (
        "asked", "broken", "client", "deadline", "endpoint", "heard", "members_sent", "name", "observer", "peer", "phase", "pid", "sock",
        "subscriber", "tls", "tracked", "writing",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, peer: int, deadline: float) -> None:
        self.sock = sock
        self.peer = peer
        self.tls = isinstance(sock, ssl.SSLSocket)
        self.phase = SHAKING if self.tls else STRANGER
        self.name = f"connection {peer}"
        self.client = self.observer = self.tracked = False
        self.deadline = deadline
        self.heard = 0.0
        self.asked: float | None = None
        self.writing = False
        self.broken = False
        self.subscriber: LaggingSubscriber | None = None
        self.members_sent = EVERYTHING
        self.pid = 0 if self.tls else _peer_pid(sock)
        self.endpoint = Endpoint(sock, limit=HELLO_LIMIT)

    def fileno(self) -> int:
        return self.endpoint.fileno()

    def decode(self, payload: memoryview) -> FromRank | FromClient:
        return decode_from_client(payload) if self.client or self.observer else decode_from_rank(payload)

    def shake(self) -> bool:
        """Continue the TLS handshake. Return whether it is done. Raises ``OSError`` if it failed."""
        assert isinstance(self.sock, ssl.SSLSocket)
        try:
            self.sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        self.phase = STRANGER
        return True


def _peer_pid(sock: socket.socket) -> int:
    """Return the process id at the other end of a Unix socket, or 0 if the system does not report it."""
    try:
        return peer_credentials(sock)[0]
    except OSError:
        return 0


class RejectionLog:
    """Log of rejected connections, a few lines each minute.

    Args:
        log: Receives the lines for the operator.
        scheduler: Calls at the end of each minute.
        clock: Returns the time, in seconds.
    """

    def __init__(
        self,
        log: logging.Logger,
        scheduler: CallScheduler,
        clock: Clock = time.monotonic,
    ) -> None:
        self._log, self._scheduler, self._clock = log, scheduler, clock
        #: Lines that were logged in this minute.
        self._logged = 0
        #: Rejections that were only counted in this minute.
        self._counted = 0
        #: The text of the last of these.
        self._last = ""

    def add(self, text: str) -> None:
        """Log the rejection of a connection, or only count it after the first ones of a minute."""
        text = visible(text, LONGEST_REJECTION)
        if self._logged == 0:
            self._scheduler.call_at(self._clock() + MINUTE, self._minute_over)
        if self._logged < LOGGED_PER_MINUTE:
            self._logged += 1
            self._log.warning("%s", text)
        else:
            self._counted += 1
            self._last = text

    def _minute_over(self) -> None:
        counted, last, self._counted, self._last = self._counted, self._last, 0, ""
        # Before `add()`, which begins the next minute if it finds 0 here.
        self._logged = 0
        if counted == 1:
            self.add(last)
        elif counted:
            self.add(f"{counted} more connections were turned away within a minute, the last: {last}")
