"""Sessions with the debug servers of a pool's ranks, over the pool's connection."""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

from hvdlab.collectives.client import Client, CoordinatorLostError, Membership
from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.codec import encode
from hvdlab.kernel_ext.wire.debug import DEBUG, Close, FromServer, Open, Said, decode_from_server

Heard = Callable[[int, FromServer], None]
"""``heard(rank, mail)``, called on the client's thread; it must not block."""

_desks: weakref.WeakKeyDictionary[Client, Desk] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def desk_of(client: Client) -> Desk:
    """The one desk of a pool."""
    with _making:
        desk = _desks.get(client)
        if desk is None:
            desk = _desks[client] = Desk(client)
        return desk


class Desk:
    """Hands mail of debug servers to the sessions that it is for."""

    def __init__(self, client: Client) -> None:
        self._post = weakref.WeakMethod(client.post)
        self._numbers = itertools.count(1 + (secrets.randbits(30) << 16))
        self._sessions: dict[int, Session] = {}
        self._pids: dict[int, int] = {}
        client.on_mail(DEBUG, self._take)
        client.on_membership(self._members)

    def session(self, heard: Heard, gone: Callable[[int, str], None]) -> Session:
        """Begin a session.

        Args:
            heard: Gets the messages of debug servers.
            gone: ``gone(rank, reason)``: a rank has ended. On the client's thread as well.
        """
        session = Session(self, next(self._numbers), heard, gone)
        self._sessions[session.number] = session
        return session

    def forget(self, session: Session) -> None:
        self._sessions.pop(session.number, None)

    def send(self, payload: Payload, ranks: Sequence[int]) -> None:
        post = self._post()
        if post is not None:
            post(DEBUG, encode(payload), ranks)

    def _take(self, rank: int, body: bytes) -> None:
        mail = decode_from_server(body)
        session = self._sessions.get(mail.session)
        if session is not None:
            session.heard(rank, mail)

    def _members(self, membership: Membership) -> None:
        before, self._pids = self._pids, {member.rank: member.pid for member in membership.members}
        for rank in lost_ranks(before, self._pids):
            for session in tuple(self._sessions.values()):
                session.gone(rank, "it has ended")


def lost_ranks(before: Mapping[int, int], now: Mapping[int, int]) -> list[int]:
    """Ranks that are gone, or have another process than before."""
    return [rank for rank, pid in before.items() if now.get(rank) != pid]


class Session:
    """One frontend's dealings with any number of ranks. Any thread."""

    def __init__(self, desk: Desk, number: int, heard: Heard, gone: Callable[[int, str], None]) -> None:
        self._desk, self.number = desk, number
        self.heard, self.gone = heard, gone

    def open(self, rank: int) -> None:
        """Have the rank's debug server listen; it answers with :class:`~.messages.Opened`."""
        self._send(Open(self.number), rank)

    def say(self, rank: int, message: bytes) -> None:
        """Send a message of the Debug Adapter Protocol to the rank's debug server."""
        self._send(Said(self.number, message), rank)

    def leave(self, rank: int) -> None:
        """End the session of this rank: what is stopped goes on."""
        self._send(Close(self.number), rank)

    def close(self) -> None:
        """Take no more mail."""
        self._desk.forget(self)

    def _send(self, payload: Payload, rank: int) -> None:
        try:
            self._desk.send(payload, (rank,))
        except CoordinatorLostError:
            self.gone(rank, "the coordinator is lost")
