"""A connection as the coordinator's server sees it."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

from hvdlab.collectives.protocol.codec import HELLO_LIMIT, decode_from_client, decode_from_rank
from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.protocol.messages import FromClient, FromRank
from hvdlab.collectives.system import peer_credentials, process_state

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.watchers import Watcher

SHAKING, STRANGER, OPEN, CLOSING = range(4)
EVERYTHING = -1
"""For :attr:`Connection.members_sent`: each message to it carries all descriptions of members."""


class Connection:
    """An accepted socket, from the handshake to the last byte.

    Attributes:
        peer: Number of this connection; never used again.
        phase: ``SHAKING`` (TLS handshake), ``STRANGER`` (no Hello yet), ``OPEN`` or ``CLOSING`` (only sends what is
            left).
        name: For log lines.
        client: Whether the peer is a client.
        observer: Whether the peer is an observer, which only learns which ranks there are. A peer that is neither is a rank.
        tracked: Whether it is a rank of a pool.
        deadline: When (``time.monotonic()``) it has to have left its present phase, unless that is ``OPEN``.
        heard: When the last bytes came.
        writing: Whether the selector watches for writability.
        broken: Whether sending has failed; the end of the connection is noticed when reading.
        watcher: How it keeps up with the events, if it gets any.
        members_sent: Which descriptions of members the server has sent it, as numbered by
            :class:`~hvdlab.collectives.protocol.member_lists.SentMembers`.
    """

    __slots__ = (
        "broken", "client", "deadline", "endpoint", "heard", "members_sent", "name", "observer", "peer", "phase", "pid", "sock",
        "tls", "tracked", "watcher", "writing",
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
        self.writing = False
        self.broken = False
        self.watcher: Watcher | None = None
        self.members_sent = EVERYTHING
        self.pid = 0 if self.tls else _peer_pid(sock)
        self.endpoint = Endpoint(sock, limit=HELLO_LIMIT)

    def fileno(self) -> int:
        return self.endpoint.fileno()

    def decode(self, payload: memoryview) -> FromRank | FromClient:
        return decode_from_client(payload) if self.client or self.observer else decode_from_rank(payload)

    def shake(self) -> bool:
        """Go on with the TLS handshake. Returns whether it is done; raises ``OSError`` if it failed."""
        assert isinstance(self.sock, ssl.SSLSocket)
        try:
            self.sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        self.phase = STRANGER
        return True

    def may_live(self) -> bool:
        """Whether a silent peer can only be busy: its process is on this host, and not stopped.

        The end of a local process closes its socket, so silence alone says nothing; a process that holds the interpreter
        for a minute is healthy and must not lose its place. Nor must a pool's rank that is stopped: it has its memory, and the user,
        to whom that is shown, decides.
        """
        if not self.pid:
            return False
        return process_state(self.pid) not in (("Z", "X", "") if self.tracked else ("T", "t", "Z", "X", ""))


def _peer_pid(sock: socket.socket) -> int:
    """Process id at the other end of a Unix socket, or 0 if the system does not tell."""
    try:
        return peer_credentials(sock)[0]
    except OSError:
        return 0
