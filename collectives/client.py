"""Client of the coordinator, as a notebook or launcher is one: membership, cells, mail and events of the ranks.

ClientConnection is one connection with the thread that reads it; Client continues over several of them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import selectors
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from hvdlab.collectives.errors import HvdlabError, ProtocolError, StartError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_to_peer
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.collectives.protocol.handshake import connect
from hvdlab.collectives.system import process_state
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.time_limits import Deadline, Heartbeat
from hvdlab.collectives.types import Membership, Stall

if TYPE_CHECKING:
    from hvdlab.collectives.tracing.recording import Recording

logger = logging.getLogger(__name__)

LABELS_KEPT = 10_000
"""Labels of cells that a client keeps: a notebook that runs for weeks must not grow by its cells."""
ANSWERS_WITHIN = 1.0
"""Seconds that ranks have to send what they have recorded; a rank that is stopped, or keeps the interpreter busy, can't."""

__all__ = ["Client", "CoordinatorLostError", "Membership", "Stall"]


class CoordinatorLostError(HvdlabError, ConnectionError):
    """The coordinator has ended, or this client was closed; it can't send the ranks anything any more."""


class Client:
    """Client of the coordinator: a connection with one thread of its own, on which all callbacks run.

    Callbacks must not block for long and must not call :meth:`close`, :meth:`flush` or other methods that
    wait for the coordinator. An exception in one is logged and stops neither the others nor the client. All methods can be
    called from any thread.

    When the connection is lost, :meth:`reconnect` connects to the coordinator again if that lives; if it does not, the process that
    started it can start a successor first (:mod:`hvdlab.collectives.failover.client_reconnect` does either).
    """

    def __init__(self, address: CoordinatorAddress, endpoint: Endpoint, welcome: m.Welcome) -> None:
        self._address = address
        #: Guards the fields that more than one thread changes, and wakes waits when they change.
        self._changed = threading.Condition()
        #: The last known membership; replaced as a whole, so that a reader needs no lock.
        self._membership = Membership()
        #: Ranks of the latest :meth:`expect`; ``None`` if this client has named none.
        self._expected: tuple[int, ...] | None = None
        #: Ranks that were released and are still expected, with their processes; a successor of the coordinator has to know.
        self._released: dict[int, int] = {}
        #: Whether a membership has arrived over the present connection.
        self._world_seen = False
        self._again = False  # whether this client has reconnected
        #: Reason for which the connection was lost; empty while it works.
        self._lost = ""
        self._losses: list[m.RankLost] = []  # since the coordinator was lost
        #: Whether :meth:`close` was called.
        self._closing = False
        #: Held during :meth:`reconnect`, of which one runs at a time.
        self._reconnecting = threading.Lock()
        #: Numbers and tickets for whose answers a call still waits: later answers are dropped.
        self._awaited: set[int] = set()
        #: Numbers of answered pings for which :meth:`flush` still waits.
        self._pongs: set[int] = set()
        #: Answers to the calls of :meth:`story` that wait, by ticket.
        self._stories: dict[int, m.Story] = {}
        #: Numbers for pings and tickets.
        self._numbers = itertools.count(1)
        #: Whether this client gets events, also from a successor.
        self._subscribed = False
        self._taken = 0  # the number of the last batch of events
        #: Calls for the thread of the present connection; those that are left at its end are for the next one.
        self._calls: deque[Callable[[], None]] = deque()
        # Callbacks are added and called on the client's thread only, by ``_call``, so that these lists need no lock.
        self._mail: dict[str, list[Callable[[int, bytes], Any]]] = {}
        self._on_membership: list[Callable[[Membership], Any]] = []
        #: By the token of each call of :meth:`collect_events` that waits: the ranks that have answered it.
        self._collected: dict[bytes, set[int]] = {}
        self._on_events: list[Callable[[int, bytes], Any]] = []
        self._on_stall: list[Callable[[Stall], Any]] = []
        self._on_returned: list[Callable[[int, int, float], Any]] = []
        self._on_paused: list[Callable[[Mapping[int, str]], Any]] = []
        self._paused: dict[int, str] = {}
        #: Unlike the others under ``_changed``: the connection's thread can have ended when one is added.
        self._on_lost: list[Callable[[str], Any]] = []
        #: Whether the callbacks of :meth:`on_lost` have been called, or are being called.
        self._loss_reported = False
        self._on_reconnected: list[Callable[[Membership], Any]] = []
        #: Names for users of the newest cells, by id. The recording reads them while this changes: never replace the dict.
        self._labels: OrderedDict[str, str] = OrderedDict()
        self._recording: Recording | None = None
        self._use(endpoint, welcome)

    def _use(self, endpoint: Endpoint, welcome: m.Welcome) -> None:
        # On another host a process id says nothing about a process of this one.
        pid = welcome.pid if self._address.is_local else 0
        self._welcome = welcome
        self._connection = ClientConnection(endpoint, pid, self)
        self._connection.start()

    @classmethod
    def connect(
        cls, address: str, token: str, *, certificate: str | None = None, timeout: float = 10
    ) -> Client:
        """Connect to the coordinator. Returns once the first membership has arrived.

        Args:
            address: ``unix:/path`` or ``tls:host:port``.
            token: The coordinator's secret for clients.
            certificate: PEM text of the coordinator's certificate (``tls`` only).
            timeout: Seconds for all steps together.

        Raises:
            StartError: No coordinator answers there, or the token is wrong.
            TimeoutError: The first membership did not come in time.
            CoordinatorLostError: The coordinator ended meanwhile.
        """
        deadline = Deadline(timeout)
        where = CoordinatorAddress(address, token, certificate)
        endpoint, welcome = where.connect(-1, deadline)
        client = cls(where, endpoint, welcome)
        try:
            client._wait(lambda: client._world_seen, deadline, "the first membership")
        except BaseException:
            client.close()
            raise
        return client

    # -- the world ------------------------------------------------------------------------------------------------

    def expect(self, ranks: Sequence[int]) -> None:
        """Send the coordinator the ranks that make up the world from now on. It orders living ranks that are not among them to leave.

        Raises:
            CoordinatorLostError: The coordinator is lost; :meth:`reconnect` sends the ranks to its successor.
        """
        # Under the lock: reconnect() has either not sent the ranks to the successor yet, or sending to it works already.
        with self._changed:
            self._expected = tuple(ranks)
            self._released = {rank: pid for rank, pid in self._released.items() if rank in self._expected}
        self._send(m.Expect(tuple(ranks)))

    def release(self, ranks: Sequence[int]) -> None:
        """Release ranks where elastic training lets the world change, at the next commit; at once if no rank trains.

        Raises:
            CoordinatorLostError: The coordinator is lost; :meth:`reconnect` sends the ranks to its successor.
        """
        with self._changed:  # as in expect()
            pids = {member.rank: member.pid for member in self._membership.members}
            self._released |= {rank: pids[rank] for rank in ranks if rank in pids}
        self._send(m.Release(tuple(ranks)))

    def membership(self) -> Membership:
        """Return the last known membership; if the coordinator is lost, the membership of that moment."""
        return self._membership

    def wait_for(self, condition: Callable[[Membership], bool], timeout: float | None = None) -> Membership:
        """Wait until the membership fulfils a condition, and return it.

        Args:
            condition: Returns whether a membership fulfils it.
            timeout: Seconds, or ``None`` for ever.

        Raises:
            TimeoutError: No membership did in time.
            CoordinatorLostError: The connection ended.
        """
        self._wait(lambda: condition(self._membership), Deadline(timeout), "the awaited membership")
        return self._membership

    def on_membership(self, callback: Callable[[Membership], Any]) -> None:
        """Call this with the present membership soon, and with each new one."""
        self._call(lambda: self._on_membership.append(callback))
        # The membership is read when this call runs. If the callback has got a newer one by then, it gets that twice, and never an older one.
        self._call(lambda: self._invoke(callback, self._membership))

    def rank_lost(self, rank: int, pid: int, reason: str) -> None:
        """Report to the coordinator how a rank's process ended (``killed by SIGKILL``): it only sees that the connection ended.

        While the coordinator is lost, this client keeps the report for the successor.
        """
        news = m.RankLost(rank, pid, reason)
        with self._changed:
            # Under the lock: reconnect() takes the losses out under it, so this one is either among them or sent to the successor.
            if self._lost and not self._closing:
                self._losses.append(news)
                return
        self._send(news)

    # -- cells ----------------------------------------------------------------------------------------------------

    def cell_started(
        self,
        cell: str,
        ranks: Sequence[int],
        *,
        label: str = "",
        mail: Sequence[tuple[str, bytes, Sequence[int]]] = (),
    ) -> None:
        """Report to the coordinator that a cell is about to be sent to these ranks. Does not wait.

        The coordinator knows the cell before it forwards mail that is sent afterwards: it handles the messages of a connection in order.
        So no rank that has the cell by mail can be ahead of it. A caller that sends the cell in another way calls :meth:`flush` before.

        Args:
            cell: The cell's id.
            ranks: The ranks that get it.
            label: The cell's name for users.
            mail: Topic, body and ranks of mail that follows, such as the cell itself; a short one leaves in the same system call.

        Raises:
            CoordinatorLostError: The connection ended.
            ProtocolError: Mail is too large; everything else was sent.
        """
        if label:
            self.label_cell(cell, label)
        self._send(
            m.CellStarted(cell, tuple(ranks)), *[m.Post(topic, body, tuple(to)) for topic, body, to in mail]
        )

    def label_cell(self, cell: str, label: str) -> None:
        """Set the name under which :attr:`recording` shows a cell.

        Args:
            cell: The cell's id.
            label: Its name for users, such as ``[7]``.
        """
        with self._changed:
            self._labels[cell] = label
            while len(self._labels) > LABELS_KEPT:
                self._labels.popitem(last=False)

    def flush(self, timeout: float = 10, *, events: bool = True) -> None:
        """Wait until the coordinator has handled everything that this client has sent before.

        With ``events``, also until the events are here that it had for this client by then.

        Raises:
            CoordinatorLostError: The connection ended.
            TimeoutError: The coordinator did not answer.
        """
        number = next(self._numbers)
        try:
            self._awaited.add(number)  # before the answer can come
            self._send(m.Ping(number, events))
            self._wait(lambda: number in self._pongs, Deadline(timeout), "the coordinator's answer")
        finally:
            with self._changed:
                self._awaited.discard(number)
                self._pongs.discard(number)

    def collect_events(self, timeout: float = 10) -> None:
        """Request the events that every rank has recorded by now, and wait until the callbacks of :meth:`on_events` have got them.

        Raises:
            CoordinatorLostError: The coordinator is gone.
            TimeoutError: A rank that lives, or the coordinator, did not answer; the events of all other ranks are there.
        """
        if silent := self._collect(timeout):
            raise TimeoutError(f"{format_ranks(silent)} did not send all events within {timeout:g} s")

    def _collect(self, timeout: float) -> tuple[int, ...]:
        """Do the same, and return the ranks that live and did not answer."""
        token, deadline = os.urandom(8), Deadline(timeout)
        asked = {member.rank for member in self._membership.members}
        answered: set[int] = set()
        with self._changed:
            self._collected[token] = answered

        def missing() -> set[int]:
            # A rank that has died in the meantime answers no more.
            return (asked & {member.rank for member in self._membership.members}) - answered

        try:
            if asked:
                self.post(m.COLLECT, token, sorted(asked))
            try:
                with contextlib.suppress(TimeoutError):
                    self._wait(lambda: not missing(), deadline, "all ranks' events")
                # Before the flush: an answer that comes during it can overtake its events.
                return tuple(sorted(missing()))
            finally:
                # A rank's events and answers are in order up to the coordinator; from there on answers can overtake events.
                self.flush(timeout)
        finally:
            with self._changed:
                del self._collected[token]

    def story(
        self,
        last: int = 20,
        *,
        rank: int | None = None,
        name: str = "",
        process_set: int | None = None,
        decision: int = 0,
        timeout: float = 10,
    ) -> tuple[m.Decision, ...]:
        """Return the coordinator's newest decisions and the entries that led to them, oldest first.

        Args:
            last: How many decisions there are at most, apart from their causes.
            rank: The rank that they are about; ``None`` for any.
            name: The tensor that they are about; empty for any.
            process_set: The process set that they are about; ``None`` for any.
            decision: The number of the one to return with its causes; 0 for any.
            timeout: Seconds to wait for the answer.

        Raises:
            CoordinatorLostError: The connection ended.
            TimeoutError: The coordinator did not answer.
        """
        ticket = next(self._numbers)
        subject = (-1 if rank is None else rank), name, (-1 if process_set is None else process_set)
        try:
            self._awaited.add(ticket)
            self._send(m.StoryRequest(ticket, last, *subject, decision))
            self._wait(lambda: ticket in self._stories, Deadline(timeout), "the coordinator's story")
        finally:
            with self._changed:
                self._awaited.discard(ticket)
                answer = self._stories.pop(ticket, None)
        return () if answer is None else answer.decisions

    def interrupt(self, ranks: Sequence[int]) -> None:
        """Interrupt these ranks: their engines' ``on_interrupt`` callbacks are called."""
        self._send(m.InterruptRanks(tuple(ranks)))

    # -- mail and events ------------------------------------------------------------------------------------------

    def post(self, topic: str, body: bytes, to: Sequence[int]) -> None:
        """Send mail to ranks; those that do not live get none."""
        self._send(m.Post(topic, body, tuple(to)))

    def on_mail(self, topic: str, callback: Callable[[int, bytes], Any]) -> None:
        """Call ``callback(sender, body)`` for mail of a topic; ``sender`` is a rank."""
        self._call(lambda: self._mail.setdefault(topic, []).append(callback))

    def on_events(self, callback: Callable[[int, bytes], Any]) -> None:
        """Call ``callback(rank, batch)`` for the ranks' event batches.

        The first callback registered gets the history first; a later one gets only later batches. So a caller that needs no
        history reads :attr:`recording` first, and waits until that has the history (:meth:`flush`).
        """
        # Before the subscription: the history goes to the callback that is registered when it comes.
        self._call(lambda: self._on_events.append(callback))
        with self._changed:
            if self._subscribed:
                return
            self._subscribed = True
        self._send(m.Subscribe(True))

    def off_events(self, callback: Callable[[int, bytes], Any]) -> None:
        """Remove a callback of :meth:`on_events`, apart from a call that is under way. Without effect if it is not registered."""
        self._call(lambda: self._off_events(callback))

    @property
    def recording(self) -> Recording:
        """Return the spans of all ranks, kept in this process from the first use on, with the history that the coordinator has.

        The recording continues with a successor of the coordinator, and stays readable when this client is closed. Needs numpy.
        """
        from hvdlab.collectives.tracing.recording import Recording

        with self._changed:
            made = self._recording is None
            if self._recording is None:
                self._recording = Recording()
            recording = self._recording
        if made:
            self._fill(recording)
        return recording

    def last_seen(self, rank: int, since_ns: int) -> str:
        """Return :meth:`Recording.last_seen` of a rank; empty if this process keeps no recording."""
        with self._changed:
            recording = self._recording
        return "" if recording is None else recording.last_seen(rank, since_ns)

    def adopt(self, recording: Recording) -> None:
        """Use this empty recording as :attr:`recording`. Without effect if there is one already."""
        with self._changed:
            if self._recording is not None:
                return
            self._recording = recording
        self._fill(recording)

    def _fill(self, recording: Recording) -> None:
        recording.labels = self._labels
        if self._closing:
            recording.close()
            return
        self.on_membership(recording.take_membership)
        self.on_paused(recording.take_paused)
        recording.take_paused(self._paused)
        # If the coordinator is lost, reconnect() subscribes with its successor.
        with contextlib.suppress(CoordinatorLostError):
            self.on_events(recording.feed)

    def gathered(self, timeout: float = ANSWERS_WITHIN) -> Recording:
        """Return :attr:`recording` with all that the ranks have recorded by now, except ranks that do not answer in ``timeout`` seconds.

        Its attribute ``silent`` names these ranks. Without a coordinator it has the events that came before that was lost.
        """
        recording = self.recording
        recording.silent = ()
        with contextlib.suppress(CoordinatorLostError, TimeoutError):
            recording.silent = self._collect(timeout)
        return recording

    def on_stall(self, callback: Callable[[Stall], Any]) -> None:
        """Call this with a :class:`Stall` when a collective has been waiting for long."""
        self._call(lambda: self._on_stall.append(callback))

    def on_returned(self, callback: Callable[[int, int, float], Any]) -> None:
        """Call ``callback(rank, pid, seconds)`` when a rank that counted as dead has connected again: the same process, with its memory.

        ``seconds`` is the time since its last sign of life before that. Mail to it in between can be lost.
        """
        self._call(lambda: self._on_returned.append(callback))

    @property
    def paused(self) -> Mapping[int, str]:
        """Return the ranks in which the user looks around, and why, as it reads after ``rank 3 is``. Waiting for them is no stall."""
        return self._paused

    def on_paused(self, callback: Callable[[Mapping[int, str]], Any]) -> None:
        """Call this with :attr:`paused` whenever that has changed."""
        self._call(lambda: self._on_paused.append(callback))

    def on_lost(self, callback: Callable[[str], Any]) -> None:
        """Call this with the reason whenever the coordinator is lost; not after :meth:`close`.

        If it is lost already, the callback is called at once, on the calling thread.
        """
        with self._changed:
            self._on_lost.append(callback)
            late = self._loss_reported and not self._closing
        if late:
            self._invoke(callback, self._lost)

    # -- a successor of the coordinator ---------------------------------------------------------------------------

    def reconnect(
        self,
        cells: Mapping[str, Sequence[int]] | None = None,
        timeout: float = 30,
        *,
        process: int = 0,
    ) -> Membership:
        """Connect to the coordinator, or to its successor, after the connection was lost, and wait for its world.

        The client reports which ranks were expected, which lived, and which had died. Callbacks stay registered; events
        continue after the last one that came, and mail that was on its way is lost. Until this has connected, sending raises
        ``CoordinatorLostError``, and until it returns the membership is the last one that came.

        Args:
            cells: The cells that run as far as the caller knows, each with its ranks.
            timeout: Seconds for all steps together.
            process: The coordinator's process, if it is on this host: its end ends the wait for its answer.

        Returns:
            The membership: ranks that have not come back have died.

        Raises:
            StartError: No coordinator answers.
            CoordinatorLostError: It was lost as well, or this client was closed. May be called again.
            TimeoutError: The connection was not lost at all, or the world was not there in time.
        """
        deadline = Deadline(timeout)
        with self._reconnecting:
            # The thread of the old connection ends by marking the loss. If it did so later, the new connection would count as lost.
            self._wait_lost(deadline)
            self._go_on(*self._address.connect(self.incarnation, deadline, process), cells or {})
            self._wait(lambda: self._world_seen, deadline, "the world of the coordinator's successor")
        membership = self._membership
        for callback in tuple(self._on_reconnected):
            self._call(partial(self._invoke, callback, membership))
        return membership

    def on_reconnected(self, callback: Callable[[Membership], Any]) -> None:
        """Call this with the membership after each :meth:`reconnect`."""
        self._call(lambda: self._on_reconnected.append(callback))

    @property
    def incarnation(self) -> int:
        """Return how many coordinators have died before the one that this client is connected to."""
        return self._welcome.incarnation

    def _go_on(self, endpoint: Endpoint, welcome: m.Welcome, cells: Mapping[str, Sequence[int]]) -> None:
        """Continue with this connection, and send first the facts that the coordinator or its successor has to know."""
        same = welcome.incarnation == self.incarnation
        with self._changed:
            losses, self._losses = self._losses, []
            if not same:
                self._taken = 0
            subscribe = m.Subscribe(self._subscribed, after=self._taken)
            before = self._lost, self._welcome, self._connection
            # Sent before the connection is in use: no message of another thread can come before these, and none between them.
            try:
                if self._closing:
                    raise CoordinatorLostError("this client was closed")
                for message in (*self._recollection(cells, same=same), *losses, subscribe):
                    endpoint.send(message)
                self._again = True
                # Before _use() starts the new connection's thread, whose first World message sets the first of them again.
                self._world_seen, self._lost, self._pongs = False, "", set()
                self._loss_reported = False
                self._use(endpoint, welcome)
            except BaseException as error:
                # Also after an interrupt, and for lack of a descriptor or a thread: as long as no thread reads, the coordinator is lost,
                # or waits would have no end. A new thread owns the connection.
                if not self._connection.thread.is_alive():
                    self._losses = losses  # the next successor has to know them as well
                    self._lost, self._welcome, self._connection = before
                    self._loss_reported = True
                    endpoint.close()
                if isinstance(error, ConnectionLost):
                    raise CoordinatorLostError(str(error)) from error
                raise

    def _wait_lost(self, deadline: Deadline) -> None:
        if threading.current_thread() is self._connection.thread:
            raise RuntimeError("reconnecting inside a callback of the client would wait for ever")
        self._connection.thread.join(deadline.remaining())
        if self._connection.thread.is_alive():
            raise TimeoutError(f"the connection was not lost within {deadline.seconds:g} s")

    def _recollection(self, cells: Mapping[str, Sequence[int]], *, same: bool) -> tuple[m.Recall, ...]:
        """Return the message for the coordinator, if there is one to send. A coordinator that is the ``same`` knows the deaths itself."""
        if same and self._expected is None and not (cells or self._released):
            return ()
        known = self._membership
        expected = known.expected if self._expected is None else self._expected
        running = tuple((cell, tuple(ranks)) for cell, ranks in cells.items())
        members = {member.rank: member.pid for member in known.members}
        # Only while the process that was released has the number: another one that came under it since is to stay.
        released = tuple(rank for rank, pid in sorted(self._released.items()) if members.get(rank) == pid)
        return (m.Recall(expected, known.members, () if same else known.deaths, running, released),)

    # -- the end --------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Return whether the connection has ended, from either side."""
        return bool(self._lost) or self._closing

    def close(self, timeout: float = 5) -> None:
        """Take leave of the coordinator and end the thread. Idempotent; the ranks continue."""
        with self._changed:
            first = not self._closing
            # From here on the end of the connection is no loss, and connection_ended() reports none.
            self._closing = True
        if first:
            with contextlib.suppress(CoordinatorLostError):
                self._send(m.Bye("closed"))
        # Also the second time: an interrupt can have come before it, and the thread would read for ever.
        self._connection.close()
        if threading.current_thread() is not self._connection.thread:
            self._connection.thread.join(timeout)
        if self._recording is not None:
            self._recording.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- any thread -----------------------------------------------------------------------------------------------

    def _send(self, *messages: m.Message) -> None:
        if self._lost:
            raise CoordinatorLostError(self._lost)
        try:
            self._connection.send(messages)
        except ConnectionLost as error:
            raise CoordinatorLostError(str(error)) from error

    def _call(self, call: Callable[[], None]) -> None:
        """Run this on the client's thread, after the calls that were queued before."""
        self._calls.append(call)
        self._connection.wake()

    def _wait(self, condition: Callable[[], bool], deadline: Deadline, what: str) -> None:
        if threading.current_thread() is self._connection.thread:
            raise RuntimeError(f"waiting for {what} inside a callback of the client would wait for ever")
        with self._changed:
            deadline.wait_for(self._changed, lambda: condition() or self._lost)
            # The condition first: an answer that came before the loss counts.
            if condition():
                return
            if self._lost:
                raise CoordinatorLostError(self._lost)
        raise TimeoutError(f"{what} did not come within {deadline.seconds:g} s")

    # -- the client's thread: its connection calls these ----------------------------------------------------------

    def run_calls(self) -> None:
        """Run the queued calls."""
        while self._calls:
            self._calls.popleft()()

    def connection_ended(self, reason: str) -> None:
        """Handle the end of the connection, as the last thing that its thread does.

        Args:
            reason: Why it has ended.
        """
        lost = not self._closing
        with self._changed:
            self._lost = reason
            self._changed.notify_all()
        self.run_calls()
        with self._changed:
            # Both under the lock: on_lost() has either added its callback by now, or finds the mark and makes the call itself.
            callbacks, self._loss_reported = tuple(self._on_lost), True
        if lost:
            for callback in callbacks:
                self._invoke(callback, reason)

    def handle_message(self, message: m.ToPeer) -> None:
        """Handle a message of the coordinator."""
        if isinstance(message, m.Mail) and message.topic == m.COLLECTED:
            with self._changed:
                # An answer that comes after its caller has given up goes into a set that nothing reads.
                self._collected.get(message.body, set()).add(message.sender)
                self._changed.notify_all()
        elif isinstance(message, m.Mail):
            for callback in self._mail.get(message.topic, ()):
                self._invoke(callback, message.sender, message.body)
        elif isinstance(message, m.RankEvents):
            self._taken = message.number
            for callback in self._on_events:
                self._invoke(callback, message.rank, message.batch)
        elif isinstance(message, m.World):
            self._take_world(message)
        elif isinstance(message, m.Returned):
            for on_returned in self._on_returned:
                self._invoke(on_returned, message.rank, message.pid, message.seconds)
        elif isinstance(message, m.Pong):
            if message.number == 0:
                return  # an answer to the heartbeat: it only shows that the coordinator lives
            with self._changed:
                # Under the lock, under which a call that waits no more removes its number.
                if message.number in self._awaited:
                    self._pongs.add(message.number)
                    self._changed.notify_all()
        elif isinstance(message, m.Story):
            with self._changed:
                if message.ticket in self._awaited:
                    self._stories[message.ticket] = message
                    self._changed.notify_all()
        elif isinstance(message, m.Stalled):
            c = message.collective
            stall = Stall(
                message.process_set, message.seconds, c.kind, c.name, c.waited, c.missing, c.sites, c.joined
            )
            for on_stall in self._on_stall:
                self._invoke(on_stall, stall)
        elif isinstance(message, m.PausedRanks):
            self._paused = dict(zip(message.ranks, message.reasons, strict=False))
            for on_paused in self._on_paused:
                self._invoke(on_paused, self._paused)

    def _off_events(self, callback: Callable[[int, bytes], Any]) -> None:
        with contextlib.suppress(ValueError):  # it was not registered, or is not any more
            self._on_events.remove(callback)

    def _take_world(self, message: m.World) -> None:
        if message.restoring and self._again:
            return  # these are on their way to the coordinator's successor
        membership = Membership(
            message.expected,
            message.members,
            message.deaths,
            message.generation,
            message.waiting,
            message.formed,
            message.leaving,
            message.restoring,
            message.kept,
        )
        with self._changed:
            self._membership = membership
            self._forget_released(message.expected)
            self._world_seen = True
            self._changed.notify_all()
        for callback in self._on_membership:
            self._invoke(callback, membership)

    def _forget_released(self, expected: Collection[int]) -> None:
        """Forget released ranks that the coordinator has let go: its successor would wait for them. Call it with the lock."""
        if gone := self._released.keys() - expected:
            self._released = {rank: pid for rank, pid in self._released.items() if rank not in gone}
            if self._expected is not None:
                self._expected = tuple(rank for rank in self._expected if rank not in gone)

    def _invoke(self, callback: Callable[..., Any], *arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception:  # a bug in a callback must not end the thread, on which all others run
            logger.exception("a callback of the hvdlab client failed")


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """Address of the coordinator, with the secret and the role by which a peer is let in."""

    address: str
    token: str
    certificate: str | None
    role: str = "client"

    @property
    def is_local(self) -> bool:
        """Return whether the coordinator is on this host."""
        return self.address.startswith("unix:")

    def connect(self, incarnation: int, deadline: Deadline, process: int = 0) -> tuple[Endpoint, m.Welcome]:
        """Return a connection, as a peer that was connected to this incarnation of the coordinator before, or to none (-1).

        Args:
            incarnation: How many coordinators had died before the one that this peer was connected to.
            deadline: Limit of all steps together.
            process: The coordinator's process, if its end is to end the wait. The connection alone would not: a starter keeps the
                listening socket, in whose queue it stays for a successor.
        """
        hello = m.Hello(m.PROTOCOL_VERSION, self.token, self.role, pid=os.getpid(), incarnation=incarnation)
        with _shut_down_with(process) as opened:
            return connect(
                self.address, hello, certificate=self.certificate, deadline=deadline, opened=opened
            )


@contextlib.contextmanager
def _shut_down_with(process: int) -> Iterator[Callable[[socket.socket], None] | None]:
    """Yield a function to call with each socket of an attempt to connect: the latest is shut down when this process ends."""
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
        events = select.poll()  # select() refuses descriptors from 1024 on
        events.register(ended, select.POLLIN)
        events.register(finish_reader, select.POLLIN)
        if ended in dict(events.poll()):
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


class ClientConnection:
    """Connection to one coordinator, from :meth:`start` to its end, and the thread that reads it.

    Args:
        endpoint: The connection, which this object owns from now on.
        pid: The coordinator's process if it is on this host, 0 otherwise.
        client: The client, which handles the messages, the queued calls and the end on the thread.

    Attributes:
        thread: The thread that reads.
    """

    def __init__(self, endpoint: Endpoint, pid: int, client: Client) -> None:
        self._endpoint, self._pid, self._client = endpoint, pid, client
        self._closing = False
        #: Whether the selector reports room for more bytes.
        self._watches_room = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self.thread = threading.Thread(target=self._run, name="hvdlab-client", daemon=True)

    def start(self) -> None:
        self.thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def send(self, messages: Sequence[m.Message]) -> None:
        """Send messages, in order. Raises :class:`ConnectionLost`."""
        if not self._endpoint.send_all(messages):
            self.wake()  # the thread has to watch for room

    def wake(self) -> None:
        """Wake the thread, so that it runs the queued calls."""
        # A full pipe wakes as well as one more byte; a closed one means that the thread has ended.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def close(self) -> None:
        """End the connection, once all earlier messages have gone out."""
        self._closing = True
        self.wake()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the connection to the coordinator was closed"
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_reader, selectors.EVENT_READ)
                selector.register(self._endpoint, selectors.EVENT_READ)
                heartbeat = Heartbeat(time.monotonic())
                self._receive()  # bytes that came along with the handshake do not make the socket readable
                while not self._closing:
                    self._step(selector, heartbeat)
                self._linger()
        except (ConnectionLost, ProtocolError) as error:
            reason = f"the coordinator is lost: {error}"
        finally:
            self._endpoint.close()
            self._wake_reader.close()
            self._wake_writer.close()
            self._client.connection_ended(reason)

    def _is_stopped(self) -> bool:
        return self._pid > 0 and process_state(self._pid) in ("T", "t")

    def _step(self, selector: selectors.BaseSelector, heartbeat: Heartbeat) -> None:
        if self._watches_room != (waits := bool(self._endpoint.backlog)):
            selector.modify(self._endpoint, selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0))
            self._watches_room = waits
        for key, mask in selector.select(heartbeat.timeout(time.monotonic())):
            if key.fileobj is self._wake_reader:
                self._wake_reader.recv(4096)
                continue
            if mask & selectors.EVENT_WRITE:
                self._endpoint.flush()
            if mask & selectors.EVENT_READ:
                # Before the messages are read: a part of one is a sign of life as well.
                heartbeat.heard(time.monotonic())
                self._receive()
        self._client.run_calls()
        # After everything that has come is read: a client that was stopped itself finds the coordinator's answers before it counts the silence.
        now = time.monotonic()
        if heartbeat.asks(now):
            self._endpoint.send(m.Ping(0))
        elif heartbeat.overdue(now) and (reason := heartbeat.lost(now, stopped=self._is_stopped())):
            raise ConnectionLost(reason)

    def _receive(self) -> None:
        self._client.run_calls()  # a callback that was registered before a question must get the answer: register it first
        for payload in self._endpoint.receive():
            message = decode_to_peer(payload)
            if isinstance(message, m.Ping):
                self._endpoint.send(m.Pong(message.number, time.monotonic_ns()))
            else:
                self._client.handle_message(message)

    def _linger(self) -> None:
        """Wait until the messages sent before close() have gone out, for a second at most."""
        # A coordinator that is stopped reads nothing; closing the notebook must not wait for it.
        deadline = time.monotonic() + 1.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._endpoint, selectors.EVENT_WRITE)
            while not self._endpoint.flush():
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return
