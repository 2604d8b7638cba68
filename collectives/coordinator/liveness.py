"""Liveness: detection of peers that are dead, stopped or silent.

There are four signs, from the quickest to the slowest:

1. The end of its connection: the kernel closes the sockets of a process that ends on this host, however it ends.
2. The launcher's word (:class:`~hvdlab.collectives.protocol.messages.RankLost`), which also has the reason. Messages that the rank had
   written before are read first: one that sent Bye has not died.
3. Silence, after a ping, of a peer on another host: its connection can end without any packet.
4. Silence of a process of this host that is stopped, unless it is a pool's rank. A silent process that runs is only busy.

A peer that is paused for its user can be silent, perhaps with all its threads stopped.
"""

from __future__ import annotations

import contextlib
import logging
import select
from typing import Protocol

from hvdlab.collectives.coordinator.connections import Connection, Connections
from hvdlab.collectives.coordinator.events import Event, Received
from hvdlab.collectives.coordinator.membership import MembershipTable
from hvdlab.collectives.coordinator.process import ServerOptions
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.event_loop import NEVER
from hvdlab.collectives.protocol.codec import encode
from hvdlab.collectives.protocol.endpoint import ConnectionLost
from hvdlab.collectives.protocol.messages import Ping, RankLost
from hvdlab.collectives.system import process_state

_CHECKS = 10
"""Checks in the time after which a silent peer is pinged, at most: a ping may be late by a tenth of that."""


class WatchedJob(Protocol):
    """Job of the watched peers, as far as the watch depends on it."""

    @property
    def membership(self) -> MembershipTable: ...

    def is_paused(self, peer: int) -> bool:
        """Return whether the rank of this connection is paused for its user."""
        ...


class Liveness:
    """Watch over the introduced connections.

    Args:
        connections: The connections, to close those of dead peers.
        job: Membership of the job, and the ranks that are paused; it is only read.
        options: Times after which silent peers are pinged, and count as dead.
        log: Receives warnings for the operator.
    """

    def __init__(
        self,
        connections: Connections,
        job: WatchedJob,
        options: ServerOptions,
        log: logging.Logger,
    ) -> None:
        self._connections = connections
        self._job = job
        self._options = options
        self._log = log
        #: Number of the last ping; each round of pings has its own.
        self._ping = 0
        #: Time for which the last check has scheduled the next one.
        self._next = NEVER

    def read(self, connection: Connection, events: list[Event], now: float) -> None:
        """Append the messages that a peer has sent as events; close its connection if that has ended or breaks the protocol."""
        peer = connection.peer
        if peer not in self._connections.open:
            return
        try:
            for payload in connection.endpoint.receive():
                message = connection.decode(payload)
                # In front of the launcher's word, as the rank had written them before its end.
                if type(message) is RankLost and connection.client:
                    self._read_last_words(message, events)
                events.append(Received(peer, message))
            # Also if no message is complete yet: a large one that comes slowly is a sign of life.
            connection.heard = now
            connection.asked = None
        except ConnectionLost as error:
            detail = f" ({error})" if connection.tls else ""
            self._connections.peer_lost(connection, f"its connection ended without a goodbye{detail}", events)
        except ProtocolError as error:
            self._log.warning("%s is closed: %s", connection.name, error)
            self._connections.peer_lost(connection, f"it sent {error}", events, faulty=True)

    def _read_last_words(self, lost: RankLost, events: list[Event]) -> None:
        """Read the messages that a rank had written before its process ended: one that sent Bye has not died.

        They were written before the launcher could see the end, but can be unread where clients are read first.
        """
        rank = self._job.membership.ranks.get(lost.rank)
        connection = self._connections.open.get(rank.peer) if rank is not None else None
        # By process: a newer one of the same rank is read in its turn.
        if rank is None or connection is None or rank.pid != lost.pid:
            return
        # How the connection ended matters no more: the launcher knows better how the process did.
        with contextlib.suppress(ConnectionLost, ProtocolError):
            # A read can end within a large message: then it returns none, and its rest and the goodbye are still to be read.
            while (payloads := connection.endpoint.receive()) or _is_readable(connection):
                events += [Received(rank.peer, connection.decode(payload)) for payload in payloads]

    def check(self, now: float, events: list[Event]) -> None:
        """Ping peers that are silent, close those that have been silent for too long, and schedule the next check."""
        upcoming = NEVER
        options = self._options
        silent: list[Connection] = []
        # This process did not run (SIGSTOP, a suspended job): peers may have been stopped with it, so no ping counts as unanswered.
        resumed = now - self._next > options.ping_after
        # A copy: the end of a connection removes it.
        for connection in list(self._connections.open.values()):
            silence = now - connection.heard
            if resumed:
                connection.asked = None
            if silence < options.ping_after:
                upcoming = min(upcoming, connection.heard + options.ping_after)
            elif self._has_not_answered(connection, now):
                # This process can have been stopped between its wait and this check: then the answer is there, unread.
                if _is_readable(connection):
                    self.read(connection, events, now)
                    upcoming = min(upcoming, now + options.ping_after)
                    continue
                self._log.warning("%s has been silent for %.0f s", connection.name, silence)
                self._connections.peer_lost(connection, f"no sign of life for {silence:.0f} s", events)
            else:
                # Also one that has been silent for too long but can be busy: it is asked again.
                silent.append(connection)
                upcoming = min(upcoming, now + options.ping_after)
        # Each check inspects all connections. If thousands of peers were last heard at an instant each, each would otherwise have a
        # check of its own.
        self._next = max(upcoming, now + options.ping_after / _CHECKS)
        self._connections.schedule_check(self._next)
        if silent:
            self._ping += 1
            frame = encode(Ping(self._ping))
            for connection in silent:
                if connection.asked is None:
                    connection.asked = now
                self._connections.write(connection, frame)

    def _has_not_answered(self, connection: Connection, now: float) -> bool:
        """Return whether a peer that can't be busy or paused has been silent for too long, and has left a ping unanswered."""
        options = self._options
        # Silence alone proves nothing after a time in which this process did not run, and so sent no ping.
        if now - connection.heard < options.dead_after or connection.asked is None:
            return False
        if now - connection.asked < options.dead_after - options.ping_after:
            return False
        return not (self._job.is_paused(connection.peer) or may_be_busy(connection))


def _is_readable(connection: Connection) -> bool:
    """Return whether bytes of the peer, or its end, wait to be read."""
    unread = select.poll()
    unread.register(connection.endpoint.fileno(), select.POLLIN)
    return bool(unread.poll(0))


def may_be_busy(connection: Connection) -> bool:
    """Return whether a silent peer can only be busy: its process is on this host, and not stopped.

    The end of a local process closes its socket, so that silence alone proves nothing. A process that holds the interpreter
    for a minute is healthy and must not lose its place. Nor must a pool's rank that is stopped: it has its memory, and the user
    sees the stop and decides.
    """
    if not connection.pid:
        return False
    ended_or_stopped = ("Z", "X", "") if connection.tracked else ("T", "t", "Z", "X", "")
    return process_state(connection.pid) not in ended_or_stopped
