"""A worker's connection to one server: requests are numbered, answered, and repeated if the server had to be started again.

The user's threads send and read by themselves: there is no thread between them and the server. A thread of the link's own only waits
for the connection's end, so that it starts a server that has died again, and repeats the requests that it did not answer, also while
the user's code computes.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import HvdlabError, KVStoreError, ProtocolError, StartError
from hvdlab.collectives.kvstore.arrays import Array
from hvdlab.collectives.kvstore.keys import Key
from hvdlab.collectives.kvstore.servers import messages as m
from hvdlab.collectives.kvstore.servers.launch import Place
from hvdlab.collectives.kvstore.servers.memory import PAGE, SharedFile
from hvdlab.collectives.kvstore.servers.spans import RequestSpan, ServerClock
from hvdlab.collectives.kvstore.servers.starting import SOCKET, Starter
from hvdlab.collectives.kvstore.servers.state import PIECE
from hvdlab.collectives.logs import LOG
from hvdlab.collectives.protocol.endpoint import (
    LOST,
    ConnectionLost,
    Endpoint,
    client_context,
    require_same_certificate,
)
from hvdlab.collectives.protocol.handshake import TlsAddress, parse_address
from hvdlab.collectives.protocol.messages import Message
from hvdlab.collectives.system import process_state, require_own_peer

RECOVER_WITHIN = 120.0
"""Seconds that a server which is gone may take to come back, as long as a worker lives that can start it: what it kept is not lost."""
_CONNECT_SECONDS = 5.0
"""Seconds for one try to connect: while the network is gone the system's own tries are ever longer apart, up to a minute."""
_LOOK_MILLISECONDS = 1000
STALL_SECONDS = 10.0
"""Seconds after which a worker logs that its server is gone, and after which it logs that again."""
_MOST_ENDS = 8
"""Ends of the server while it carried out the same repeated request, after which the request fails and is not sent again.

More than a few: a server that is killed again and again from outside may be at the same large request a few times.
"""
_LONGEST_RESTART_PAUSE_SECONDS = 0.8
"""Pause before a server that ended so is started again, which begins with the second end and doubles."""
_TRY_AGAIN_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 3.2
"""Pause between two tries to have the server back, and how long it becomes while it doubles."""
SILENT_SECONDS = 2.0
"""Seconds without an answer after which a worker asks whether its server is there at all; a server that does not answer is logged."""
_NAMED_KEYS = 8
_SWEEP_FROM = 8
_HELD, _HELD_BYTES = 4, 64 << 10
"""Requests that are sent together at most, and the size in bytes of the largest of them: a server should begin with the first soon."""
_IN_FLIGHT = 256 << 20
"""Bytes of unanswered requests above which a worker waits for answers before it sends more."""

Answer = m.Done | m.Failed | m.Stock


class Region:
    """A part of the outbox: ``offset`` and the power of two that is its size."""

    __slots__ = ("offset", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.size = offset, size


class Ticket:
    """A request and its answer.

    Attributes:
        message: The request.
        answer: The answer; ``None`` until it has come.
        region: The memory that goes with it.
        sent: Bytes at the region's beginning that are for the server.
        keeps: Whether the caller reads the region after the answer, and frees it; else the answer's arrival frees it.
        span: What is recorded of it.
        ends: How often the server has ended while it carried this request out again.
    """

    __slots__ = ("answer", "ends", "keeps", "message", "region", "sent", "span")

    def __init__(
        self, message: Message, region: Region | None, sent: int, *, keeps: bool, span: RequestSpan | None
    ) -> None:
        self.message, self.region, self.sent, self.keeps = message, region, sent, keeps
        self.span = span
        self.answer: Answer | None = None
        self.ends = 0


class _Outbox:
    """Memory for data to and from the server, shared with a server of this host."""

    def __init__(self, *, shared: bool) -> None:
        self.file = SharedFile.create("hvdlab-outbox")
        self.shared = shared
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def allocate(self, nbytes: int) -> Region:
        size = max(PAGE, 1 << (nbytes - 1).bit_length()) if nbytes else PAGE
        free = self._free.get(size)
        if free:
            return Region(free.pop(), size)
        offset, self._end = self._end, self._end + size
        self.file.grow(self._end)
        return Region(offset, size)

    def free(self, region: Region) -> None:
        self._free.setdefault(region.size, []).append(region.offset)


class _LinkLock(threading.Condition):
    """A condition that an interrupt comes through as itself, wherever it hits a thread that waits without the lock.

    ``with`` would raise ``RuntimeError`` in place of ``KeyboardInterrupt`` where the lock was not taken again.
    """

    def __exit__(self, *raised: Any) -> None:  # noqa: PYI036  (as the base class has it)
        try:
            super().__exit__(*raised)
        except RuntimeError:
            if raised[0] is None:
                raise

    def acquire_again(self) -> None:
        """Take the lock that this thread has given up, then raise the interrupt that came meanwhile."""
        interrupt: BaseException | None = None
        while not self._is_owned():  # type: ignore[attr-defined]  # an interrupt may come right behind acquire()
            try:
                self.acquire()
            except BaseException as error:  # noqa: BLE001  (raised below)
                interrupt = error
        if interrupt is not None:
            raise interrupt


class ServerLink:
    """The connection of this rank to one server, for all stores. Any thread.

    Args:
        engine: This rank's engine.
        place: Where the server is.
        local: Whether that is this host.
        starter: Starts the server again.

    Attributes:
        engine: This rank's engine.
        place: Where the server is.
        pid: Process id of the server; 0 before the first connection.
        local: Whether the server is on this host.
        stock: The keys of each store that the server has, in part at least, and the bytes of their values, as this worker knows.
        neighbours: The workers of the server's host: only they can start it again.
    """

    def __init__(self, engine: Engine, place: Place, starter: Starter, *, local: bool) -> None:
        self.place, self.pid = place, 0
        self.local = local
        self.stock: dict[int, dict[Key, int]] = {}
        self.neighbours: set[int] = set()
        self.engine, self._starter = engine, starter
        self._rank = engine.rank
        self._changed = _LinkLock()
        #: The thread that makes the connection again, which gives the lock up between two tries; 0 if none does.
        self._recovering = 0
        self._endpoint: Endpoint | None = None
        self._poll = select.poll()
        #: Whether a thread waits for the socket; others wait for that thread.
        self._reading = False
        self._sequence = 0
        self._unanswered: dict[int, Ticket] = {}
        #: The repeated request that the server carries out, as it announced last; 0 for none.
        self._begun = 0
        #: Bytes of the regions of unanswered requests.
        self._in_flight = 0
        #: At how many unanswered requests to look for answers next: a busy server has not answered each of them at once.
        self._sweep_from = _SWEEP_FROM
        #: How many blocks of :meth:`together` are open, and the requests that were held back in them, oldest first.
        self._holding = 0
        self._held: list[Ticket] = []
        self._outbox = _Outbox(shared=local)
        #: The memory of stores, which outlives a server of this host because its workers have it.
        self._files: dict[int, SharedFile] = {}
        #: How many objects of this process use each store.
        self._uses: dict[int, int] = {}
        #: Stores that are used no more; the garbage collector adds them, on any thread and at any point, so without the lock.
        self._closing: deque[int] = deque()
        self._lost: HvdlabError | None = None
        #: When the server was heard last.
        self._heard = time.monotonic()
        #: The question whether the server is there, and after how many seconds of silence to log that next.
        self._probe: Ticket | None = None
        self._say_after = SILENT_SECONDS
        self._clock = ServerClock(local=local)
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        with self._changed:
            self._recover()
        threading.Thread(target=self._watch, name="hvdlab-kv", daemon=True).start()

    # -- requests -----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Region:
        """Memory of ``nbytes`` bytes or more for a request; it belongs to the ticket afterwards."""
        with self._changed:
            return self._outbox.allocate(nbytes)

    def free(self, region: Region) -> None:
        """Give memory back that a ticket kept."""
        with self._changed:
            self._outbox.free(region)

    def array(self, region: Region, dtype: np.dtype[Any], shape: tuple[int, ...], skip: int = 0) -> Array:
        """The memory of a request as an array, ``skip`` bytes behind its beginning."""
        return self._outbox.file.array(region.offset + skip, dtype, shape)

    def request(
        self,
        make: Callable[[int], Message],
        region: Region | None = None,
        sent: int = 0,
        *,
        keeps: bool = False,
        span: RequestSpan | None = None,
    ) -> Ticket:
        """Send a request; does not wait for the answer.

        Args:
            make: Makes the message from its sequence number.
            region: The memory that goes with it.
            sent: Bytes of it that the server reads.
            keeps: Whether the caller frees the region; else it is freed when the answer comes.
            span: What to record of it once it is answered.

        Raises:
            KVStoreError: The server is lost.
        """
        with self._changed:
            self._require_usable()
            if len(self._unanswered) >= self._sweep_from:
                self._sweep()
                self._sweep_from = len(self._unanswered) + _SWEEP_FROM
            self._sequence += 1
            ticket = Ticket(make(self._sequence), region, sent, keeps=keeps, span=span)
            self._unanswered[self._sequence] = ticket
            self._in_flight += region.size if region is not None else 0
            if self._holding and sent <= _HELD_BYTES and self.local:
                self._held.append(ticket)
            else:
                self._carry_out(lambda: self._transmit(ticket))
            if len(self._held) == _HELD:
                self._carry_out(self._send_held)
        return ticket

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Hold back small requests made inside, and send them together: when this worker waits for one of them, or at the end.

        Otherwise a server that the first of two wakes takes the processor from the thread that is about to send the second.
        """
        with self._changed:
            self._holding += 1
        try:
            yield
        finally:
            with self._changed:
                self._holding -= 1
                if self._held:
                    self._carry_out(self._send_held)

    def wait(self, ticket: Ticket) -> Answer:
        """Wait for an answer, and return it.

        Raises:
            KVStoreError: The server is lost.
        """
        begun = time.monotonic()
        with self._changed:
            while ticket.answer is None:
                self._require_usable()
                self._look_after_server(begun)
                if self._held:
                    self._carry_out(self._send_held)
                if self._reading:
                    self._changed.wait(1.0)
                else:
                    self._read_once()
            return ticket.answer

    def take_answers(self) -> None:
        """Take in the answers that have come; does not wait."""
        with self._changed:
            self._require_usable()
            self._carry_out(self._take)

    def use(self, store: int, *, makes_memory: bool, message: Callable[[int], Message]) -> Ticket:
        """Open a store; the worker that ``makes_memory`` creates the store's memory and brings it to a server of its host."""
        with self._changed:
            self._uses[store] = self._uses.get(store, 0) + 1
        if makes_memory and self.local:
            with self._changed:
                self._require_usable()
                file = self._files[store] = SharedFile.create(f"hvdlab-kv-{store:x}")
                self._carry_out(lambda: self._send(m.Bring(store), file))
        return self.request(message)

    def has(self, store: int, key: Key, nbytes: int) -> None:
        """A key of this store, or a part of one, is there from now on."""
        keys = self.stock.setdefault(store, {})
        keys[key] = keys.get(key, 0) + nbytes

    @property
    def lost(self) -> bool:
        """Whether the server is gone and does not come back. Any thread."""
        return self._lost is not None

    def close_store(self, store: int) -> None:
        """Use a store no more. Does not wait, and takes no lock."""
        self._closing.append(store)
        self._wake()

    def close(self) -> None:
        """End the connection. Requests that wait fail."""
        with self._changed:
            if self._lost is None:
                self._lost = KVStoreError("the connection to the parameter server was closed")
                if self._endpoint is not None:
                    with contextlib.suppress(ConnectionLost):
                        self._endpoint.send_frame(m.encode(m.Leave()))
                    self._endpoint.close()
            self._changed.notify_all()
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_writer, b"\0")
        except OSError:  # a full pipe wakes as well; a closed one has no thread any more
            return

    # -- the connection; all with the lock ----------------------------------------------------------------------------

    def _require_usable(self) -> None:
        if self._lost is None and self.engine.closed:
            self._lost = KVStoreError("the world that the parameter server belongs to has ended")
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))

    def _look_after_server(self, begun: float) -> None:
        """While this worker waits, since ``begun``: ask a silent server whether it is there, then log its name."""
        now = time.monotonic()
        silent = now - max(begun, self._heard)
        if silent < SILENT_SECONDS:
            return
        if self._probe is None or self._probe.answer is not None:
            self._sequence += 1
            store = next(iter(self.stock), 0)
            probe = self._probe = Ticket(
                m.StockRequest(self._sequence, store), None, 0, keeps=False, span=None
            )
            self._unanswered[self._sequence] = probe
            self._carry_out(lambda: self._transmit(probe))
        elif (
            not self._may_come_back()
        ):  # nothing says so where a host is cut off, but its workers are known to be gone
            self._carry_out(self._notice_loss)
        elif silent >= self._say_after:
            self._say_silent(silent)

    def _say_silent(self, seconds: float) -> None:
        self._say_after = 2 * seconds
        stopped = self.local and process_state(self.pid) in ("T", "t")
        what = (
            f"it is stopped (kill -CONT {self.pid} lets it go on)"
            if stopped
            else "it may be stopped or overloaded"
        )
        LOG.warning("%s has not answered for %.0f s: %s", self._name(), seconds, what)

    def _name(self) -> str:
        return f"the parameter server of {self.place.host.partition('#')[0]} (process {self.pid})"

    def _notice_loss(self) -> None:
        raise ConnectionLost("all workers of its host have died")

    def _lose(self, error: Exception) -> None:
        keys = [key for store in self.stock.values() for key in store]
        named = ", ".join(repr(key) for key in keys[:_NAMED_KEYS])
        more = f" and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
        kept = f", which kept the values of {named}{more}" if keys else ""
        text = f"{self._name()} is lost{kept}: {error}"
        self._lost = KVStoreError(text)
        self._held.clear()
        LOG.warning("%s", text)

    def _carry_out(self, step: Callable[[], None]) -> None:
        """Do something with the connection. If that is lost, connect again, which repeats all unanswered requests.

        An exception from outside (Ctrl-C) may come in the middle of a frame: such a connection is given up.
        """
        try:
            if self._endpoint is None:
                raise ConnectionLost("there is none")
            step()
        except ConnectionLost:
            self._recover()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()  # the watching thread notices
            self._endpoint = None

    def _send(self, message: Message, file: SharedFile | None = None) -> None:
        self._send_frames(m.encode(message), -1 if file is None else file.descriptor)

    def _send_frames(self, frames: bytes, descriptor: int = -1) -> None:
        assert self._endpoint is not None
        sent = self._endpoint.send_frame(frames, descriptor)
        begun = time.monotonic()
        while not sent:
            if not self._wait_for(select.POLLOUT | select.POLLIN):
                silent = time.monotonic() - max(begun, self._heard)
                if silent >= self._say_after:
                    self._say_silent(silent)
            self._take()  # or else both might wait for each other
            sent = self._endpoint.flush()

    def _send_held(self) -> None:
        """Send the requests that were held back, in order. If the connection is lost meanwhile, all unanswered ones are repeated."""
        assert self._endpoint is not None
        now = time.monotonic_ns()
        for ticket in self._held:
            if ticket.span is not None:
                ticket.span.sent = now
        frames = b"".join([m.encode(ticket.message) for ticket in self._held])
        self._held.clear()
        self._send_frames(frames)

    def _transmit(self, ticket: Ticket) -> None:
        if self._held:
            self._send_held()  # a worker's requests must arrive in their order
        region = ticket.region
        if region is not None and not self._outbox.shared:
            data = self._outbox.file.array(region.offset, np.dtype(np.uint8), (ticket.sent,))
            for first in range(0, ticket.sent, PIECE):
                self._send(m.Data(region.offset + first, data[first : first + PIECE].tobytes()))
        if ticket.span is not None:
            ticket.span.sent = time.monotonic_ns()
        self._send(ticket.message)

    def _wait_for(self, events: int) -> bool:
        endpoint = self._endpoint
        if endpoint is None:
            raise ConnectionLost("there is none")
        poll = select.poll()
        poll.register(endpoint, events)
        return bool(poll.poll(_LOOK_MILLISECONDS))

    def _read_once(self) -> None:
        """Wait for the socket without the lock, then take what has come."""
        self._reading = True
        endpoint, poll = self._endpoint, self._poll
        try:
            if endpoint is None:
                raise ConnectionLost("there is none")
            if self._held:
                self._send_held()
            self._changed.release()
            try:
                poll.poll(_LOOK_MILLISECONDS)
            finally:
                self._changed.acquire_again()
            if self._endpoint is endpoint:
                self._take()
        except ConnectionLost:
            self._recover()
        except BaseException:
            self._give_up()
            raise
        finally:
            self._reading = False
            self._changed.notify_all()

    def _sweep(self) -> None:
        """Take answers that have come; while very much is unanswered, wait for some."""
        self._carry_out(self._take)
        while self._in_flight > _IN_FLIGHT and not self._reading:
            self._require_usable()
            self._read_once()

    def _take(self) -> None:
        endpoint = self._endpoint
        if endpoint is None:
            raise ConnectionLost("there is none")
        try:
            for payload in endpoint.receive():
                self._handle(endpoint, m.decode_to_worker(payload))
        except ProtocolError as error:
            raise ConnectionLost(str(error)) from error

    def _handle(self, endpoint: Endpoint, message: m.ToWorker) -> None:
        self._heard = time.monotonic()
        if self._say_after != SILENT_SECONDS:
            self._say_after = SILENT_SECONDS
            LOG.warning("%s answers again", self._name())
        if isinstance(message, m.Done | m.Failed | m.Stock):
            self._answer(message)
        elif isinstance(message, m.Begun):
            self._begun = message.sequence
        elif isinstance(message, m.Data):
            data = np.frombuffer(message.data, np.uint8)
            self._outbox.file.array(message.offset, data.dtype, data.shape)[:] = data
        elif isinstance(message, m.Share):
            self._keep_memory(message.store, endpoint.take_descriptor())

    def _answer(self, message: Answer) -> None:
        ticket = self._unanswered.pop(message.sequence, None)
        if ticket is None:
            return  # it was repeated, and this is the second answer
        ticket.answer = message
        if ticket.span is not None and not isinstance(message, m.Stock):
            ticket.span.answered(message, self._clock)
        if ticket.region is not None:
            self._in_flight -= ticket.region.size
            if not ticket.keeps:
                self._outbox.free(ticket.region)
        self._changed.notify_all()

    def _keep_memory(self, store: int, descriptor: int) -> None:
        """Keep the memory of a store for a successor of the server."""
        if descriptor == LOST:
            # Not an error of the request: other workers of the host have the memory, too.
            LOG.warning(
                "this process has as many open files as it may have, and does not keep the values of a store in case %s ends; "
                "raise `ulimit -n`",
                self._name(),
            )
            return
        self._files.setdefault(store, SharedFile(descriptor))

    # -- making it again ----------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Connect, start the server first if it is gone, and repeat what was not answered. One thread does it, others wait for it."""
        own = threading.get_ident()
        while self._recovering not in (0, own):
            self._changed.wait(1.0)
            self._require_usable()
            if self._endpoint is not None:
                return  # all unanswered requests were repeated over it
        self._recovering = own
        try:
            self._recover_alone()
        finally:
            self._recovering = 0  # without the lock, if an interrupt came in a pause
            if self._changed.acquire(blocking=False):
                self._changed.notify_all()
                self._changed.release()

    def _recover_alone(self) -> None:
        deadline = Deadline(self._patience())
        began = said = time.monotonic()
        pause = _TRY_AGAIN_SECONDS
        with contextlib.suppress(ConnectionLost):
            self._take()  # what the server sent before it ended, such as Begun
        self._give_up()
        server, begun, self._begun = self.pid, self._begun, 0
        suspect = self._unanswered.get(begun)
        if suspect is not None and suspect.ends:
            self._changed.wait(min(_TRY_AGAIN_SECONDS * 2**suspect.ends, _LONGEST_RESTART_PAUSE_SECONDS))
        while True:
            self._require_usable()
            try:
                self._endpoint = self._connect(deadline)
                if self.pid != server:
                    server = self.pid
                    self._count_end(begun)
                self._poll = select.poll()
                self._poll.register(self._endpoint, select.POLLIN)
                self._held.clear()  # they are among those that are unanswered
                for store, file in self._files.items():
                    self._send(m.Bring(store), file)
                for number in sorted(self._unanswered):
                    ticket = self._unanswered.get(number)
                    if ticket is not None:  # answered while others were sent
                        self._transmit(ticket)
                self._wake()  # the watching thread has to watch another one
                return
            except (ConnectionLost, OSError, StartError, ProtocolError) as error:
                cause = error
                self._give_up()
                if deadline.expired or not self._may_come_back():
                    self._lose(error)
                    self._changed.notify_all()
                    self._require_usable()
            except BaseException:
                self._give_up()
                raise
            if time.monotonic() >= said + STALL_SECONDS:
                said = time.monotonic()
                LOG.warning("%s has been gone for %.0f s: %s", self._name(), said - began, cause)
            # There is no event for a server's return. Without the lock, so that an interrupt reaches threads that wait.
            self._changed.wait(pause)
            if self.local:  # each try starts a process
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _count_end(self, begun: int) -> None:
        """The server has ended while it carried out this request. Fail the request if that has happened too often."""
        ticket = self._unanswered.get(begun)
        if ticket is None:
            return
        ticket.ends += 1
        if ticket.ends < _MOST_ENDS:
            return
        message: Any = ticket.message
        kind, key = type(message).__name__, getattr(message, "key", None)
        about = "" if key is None else f" of key {key!r}"
        failure = (
            f"the parameter server of {self.place.host.partition('#')[0]} ended each time it carried out this request "
            f"({kind}{about}), {ticket.ends + 1} times by now, and the request is not sent again; the server's output on stderr, "
            "or the kernel's log if memory was short, says why"
        )
        self._answer(m.Failed(begun, failure))

    def _patience(self) -> float:
        """Seconds that the server may be gone.

        One of another host may also be out of reach because this worker is cut off. The coordinator lets it in again
        ``HVDLAB_CUT_OFF`` seconds after the engine has missed it, which is up to ``HVDLAB_DEAD_AFTER`` seconds after the cut: it must
        not find that it has lost its servers meanwhile.
        """
        if self.local or not self.pid:
            return RECOVER_WITHIN
        settings = self.engine.settings
        return max(RECOVER_WITHIN, settings.dead_after + settings.cut_off)

    def _may_come_back(self) -> bool:
        if self.local:
            return os.path.isdir(self.place.directory)
        return not self.neighbours or not self.neighbours.isdisjoint(self.engine.living)

    def _connect(self, deadline: Deadline) -> Endpoint:
        sock = self._open(deadline)
        endpoint = Endpoint(sock, descriptors=True)
        try:
            repeats = max(self._unanswered, default=0)
            attach = m.Attach(m.VERSION, self.place.token, self._rank, os.getpid(), self.local, repeats)
            descriptor = self._outbox.file.descriptor if self.local else -1
            endpoint.send_frame(m.encode(attach), descriptor)
            self._await_attached(endpoint, deadline)
        except BaseException:
            endpoint.close()
            raise
        return endpoint

    def _await_attached(self, endpoint: Endpoint, deadline: Deadline) -> None:
        poll = select.poll()
        poll.register(endpoint, select.POLLIN)
        while True:
            for payload in endpoint.receive():  # nothing comes behind it before we send more
                answer = m.decode_to_worker(payload)
                if isinstance(answer, m.Refused):
                    raise StartError(f"The parameter server refused: {answer.reason}")
                if isinstance(answer, m.Attached):
                    self.pid = answer.pid
                    return
            deadline.check("the answer of the parameter server")
            left = deadline.remaining()
            poll.poll(None if left is None else left * 1000)

    def _open(self, deadline: Deadline) -> socket.socket:
        if self.local:
            return self._open_local(deadline)
        where = parse_address(self.place.tls_address)
        assert isinstance(where, TlsAddress)
        left = deadline.remaining()
        seconds = _CONNECT_SECONDS if left is None else min(left, _CONNECT_SECONDS)
        plain = socket.create_connection((where.host, where.port), seconds)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secure: ssl.SSLSocket = client_context(self.place.certificate).wrap_socket(plain)
        except BaseException:
            plain.close()
            raise
        try:
            require_same_certificate(secure, self.place.certificate)
        except BaseException:
            secure.close()
            raise
        return secure

    def _open_local(self, deadline: Deadline) -> socket.socket:
        left = deadline.remaining()
        self._starter.ensure(self.place, RECOVER_WITHIN if left is None else left)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(left)
            sock.connect(os.path.join(self.place.directory, SOCKET))
            require_own_peer(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    # -- the watching thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._lost is not None:
                    break
                endpoint = self._endpoint
                try:
                    self._send_closing()
                    if endpoint is None:
                        self._recover()
                        continue
                except HvdlabError:
                    continue  # threads that wait raise it
                poll = select.poll()
                poll.register(self._wake_reader, select.POLLIN)
                poll.register(endpoint, select.POLLRDHUP)
            found = poll.poll()
            if any(descriptor == self._wake_reader for descriptor, _ in found):
                os.read(self._wake_reader, 4096)
                continue
            with self._changed:
                if self._endpoint is endpoint:
                    with contextlib.suppress(ConnectionLost):
                        self._take()  # what the server sent before it ended, such as Begun
                    self._give_up()
        # First forget the number, or else _wake() might write a byte to a file that has the same number later.
        writer, self._wake_writer = self._wake_writer, -1
        os.close(writer)
        os.close(self._wake_reader)

    def _send_closing(self) -> None:
        while self._closing:
            store = self._closing.popleft()
            self._uses[store] = self._uses.get(store, 1) - 1
            if self._uses[store] > 0:
                continue
            del self._uses[store]
            self.stock.pop(store, None)
            file = self._files.pop(store, None)
            if file is not None:
                file.close()
            if self._endpoint is not None:
                self._carry_out(lambda number=store: self._send(m.Close(number)))  # type: ignore[misc]
