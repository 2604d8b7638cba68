"""Connection of a worker to one server: requests are numbered, answered, and repeated over a new connection.

The user's threads send and read by themselves: there is no thread between them and the server. A thread of the link only waits for the
connection's end. It then starts a server that has died again and repeats the unanswered requests, also while the user's code computes.
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

from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import HvdlabError, KVStoreError, ProtocolError, StartError
from hvdlab.collectives.kvstore.arrays import Array
from hvdlab.collectives.kvstore.base import Key
from hvdlab.collectives.kvstore.servers import messages as m
from hvdlab.collectives.kvstore.servers.memory import PAGE, SharedFile
from hvdlab.collectives.kvstore.servers.spans import RequestSpan, ServerClock
from hvdlab.collectives.kvstore.servers.starting import SOCKET, ServerAddress, ServerStarter
from hvdlab.collectives.kvstore.servers.state import TRANSFER_BYTES
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
from hvdlab.collectives.text import LOG
from hvdlab.collectives.time_limits import Deadline

RECOVER_WITHIN = 120.0
"""Seconds that a server which is gone may take to come back, as long as a worker lives that can start it: its values are not lost."""
_CONNECT_SECONDS = 5.0
"""Seconds for one try to connect: while the network is gone the system's own tries are ever longer apart, up to a minute."""
_POLL_MILLISECONDS = 1000
"""Milliseconds after which a waiting worker checks again whether its world has ended, or the server is silent."""
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
"""Seconds without an answer after which a worker probes its server; a server that does not answer is logged."""
_NAMED_KEYS = 8
"""Keys that the error of a lost server names at most."""
_SWEEP_FROM = 8
"""Unanswered requests by which their number may grow before a worker that sends reads answers."""
_BATCH_REQUESTS, _BATCH_BYTES = 4, 64 << 10
"""Requests that are sent together at most, and the size in bytes of the largest of them: a server should begin with the first soon."""
_IN_FLIGHT = 256 << 20
"""Bytes of unanswered requests above which a worker waits for answers before it sends more."""

Answer = m.RequestDone | m.RequestFailed | m.Stock


class Region:
    """Part of the arena: ``offset`` and the power of two that is its size."""

    __slots__ = ("offset", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.size = offset, size


class ServerRequest:
    """Request and its answer.

    Attributes:
        message: The request.
        answer: The answer; ``None`` until it has come.
        region: The memory that goes with it.
        sent: Bytes at the region's beginning that are for the server.
        keeps: The caller reads the region after the answer, and frees it. Otherwise the answer's arrival frees it.
        span: The span to record once it is answered.
        ends: Ends of the server while it carried out this repeated request.
    """

    __slots__ = ("answer", "ends", "keeps", "message", "region", "sent", "span")

    def __init__(
        self, message: Message, region: Region | None, sent: int, *, keeps: bool, span: RequestSpan | None
    ) -> None:
        self.message, self.region, self.sent, self.keeps = message, region, sent, keeps
        self.span = span
        self.answer: Answer | None = None
        self.ends = 0


class _WorkerArena:
    """Memory for data to and from the server, shared with a server of this host; see :class:`TransferArena` in ``state``.

    Attributes:
        file: The file in memory.
        shared: The server maps it; without, bytes are sent as :class:`Data`.
    """

    def __init__(self, *, shared: bool) -> None:
        self.file = SharedFile.create("hvdlab-outbox")
        self.shared = shared
        #: Offsets of free regions, by size: a power of two fits the next request of like size, so that nothing has to be merged.
        self._free: dict[int, list[int]] = {}
        #: End of the last region.
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
    """Condition that lets an interrupt through as itself, wherever it hits a thread that waits without the lock.

    ``with`` would raise ``RuntimeError`` in place of ``KeyboardInterrupt`` where the lock was not taken again.
    """

    def __exit__(self, *raised: Any) -> None:  # noqa: PYI036  (as the base class has it)
        try:
            super().__exit__(*raised)
        except RuntimeError:
            if raised[0] is None:
                raise

    def acquire_again(self) -> None:
        """Acquire the lock that this thread has given up, then raise the interrupt that came meanwhile."""
        interrupt: BaseException | None = None
        while not self._is_owned():  # type: ignore[attr-defined]  # an interrupt may come right behind acquire()
            try:
                self.acquire()
            except BaseException as error:  # noqa: BLE001  (raised below)
                interrupt = error
        if interrupt is not None:
            raise interrupt


class ServerLink:
    """Connection of this rank to one server, for all stores. Any thread.

    Args:
        engine: This rank's engine.
        address: The server's address.
        local: The server is on this host.
        starter: Starts the server again.

    Attributes:
        address: The server's address.
        pid: Process id of the server; 0 before the first connection.
        local: The server is on this host.
        stock: By store the keys of which the server has a shard, and the bytes of their values, as far as this worker knows.
        neighbours: The workers of the server's host: only they can start it again.
    """

    def __init__(
        self, engine: Engine, address: ServerAddress, starter: ServerStarter, *, local: bool
    ) -> None:
        self.address, self.pid = address, 0
        self.local = local
        self.stock: dict[int, dict[Key, int]] = {}
        self.neighbours: set[int] = set()
        self._engine, self._starter = engine, starter
        self._rank = engine.rank
        #: Guards all attributes below but ``_closing``; notified of answers, of a new connection, and of the server's loss.
        self._changed = _LinkLock()
        #: The thread that makes the connection again, which gives the lock up between two tries; 0 if none does.
        self._recovering = 0
        #: The connection; None while there is none.
        self._endpoint: Endpoint | None = None
        #: Waits for the endpoint's bytes; replaced with it.
        self._poll = select.poll()
        #: A thread waits for the socket; others wait for that thread.
        self._reading = False
        #: Number of the last request.
        self._sequence = 0
        #: Requests by number, which a new connection repeats in order.
        self._unanswered: dict[int, ServerRequest] = {}
        #: The repeated request that the server carries out, as it announced last; 0 for none.
        self._begun = 0
        #: Bytes of the regions of unanswered requests.
        self._in_flight = 0
        #: Number of unanswered requests at which to read answers next: a busy server does not answer each of them at once.
        self._sweep_from = _SWEEP_FROM
        #: Open blocks of :meth:`batched`.
        self._open_batches = 0
        #: Requests that wait in them for more, oldest first.
        self._batch: list[ServerRequest] = []
        #: Memory for gradients and values of this worker's requests.
        self._arena = _WorkerArena(shared=local)
        #: The memory of stores, which outlives a server of this host because its workers have it.
        self._files: dict[int, SharedFile] = {}
        #: Objects of this process that use each store, counted.
        self._uses: dict[int, int] = {}
        #: Stores that are used no more; the garbage collector adds them, on any thread and at any point, so without the lock.
        self._closing: deque[int] = deque()
        #: Why the server is lost for good; None as long as it is not.
        self._lost: HvdlabError | None = None
        #: When the server sent something last.
        self._last_heard = time.monotonic()
        #: The request that asks whether the server lives.
        self._probe: ServerRequest | None = None
        #: Seconds of silence after which to log it next.
        self._warn_after = SILENT_SECONDS
        #: The server's clock, for spans.
        self._clock = ServerClock(local=local)
        #: Pipe by which other threads wake the watching thread.
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        try:
            with self._changed:
                self._recover()
        except BaseException:
            # The watching thread, which closes them otherwise, has not begun.
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            raise
        threading.Thread(target=self._watch, name="hvdlab-kv", daemon=True).start()

    # -- requests -----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Region:
        """Return memory of ``nbytes`` bytes or more for a request; it belongs to the request afterwards."""
        with self._changed:
            return self._arena.allocate(nbytes)

    def free(self, region: Region) -> None:
        """Give memory back that a request kept."""
        with self._changed:
            self._arena.free(region)

    def array(self, region: Region, dtype: np.dtype[Any], shape: tuple[int, ...], skip: int = 0) -> Array:
        """Return the memory of a request as an array, from ``skip`` bytes behind its beginning."""
        return self._arena.file.array(region.offset + skip, dtype, shape)

    def request(
        self,
        make: Callable[[int], Message],
        region: Region | None = None,
        sent: int = 0,
        *,
        keeps: bool = False,
        span: RequestSpan | None = None,
    ) -> ServerRequest:
        """Send a request; does not wait for the answer.

        Args:
            make: Makes the message from its sequence number.
            region: The memory that goes with it.
            sent: Bytes of it that the server reads.
            keeps: The caller frees the region. Otherwise the answer's arrival frees it.
            span: The span to record once it is answered.

        Raises:
            KVStoreError: The server is lost.
        """
        with self._changed:
            self._require_usable()
            if len(self._unanswered) >= self._sweep_from:
                self._receive_when_busy()
                self._sweep_from = len(self._unanswered) + _SWEEP_FROM
            self._sequence += 1
            request = ServerRequest(make(self._sequence), region, sent, keeps=keeps, span=span)
            # Before it is sent: if the connection is lost on the way, the next one repeats it.
            self._unanswered[self._sequence] = request
            self._in_flight += region.size if region is not None else 0
            if self._open_batches and sent <= _BATCH_BYTES and self.local:
                self._batch.append(request)
            else:
                self._with_reconnect(lambda: self._transmit(request))
            if len(self._batch) == _BATCH_REQUESTS:
                self._with_reconnect(self._send_batch)
        return request

    @contextlib.contextmanager
    def batched(self) -> Iterator[None]:
        """Send small requests made inside together: when this worker waits for one of them, or at the end.

        Otherwise the first of two requests wakes a server, which gets the processor before this thread has sent the second.
        """
        with self._changed:
            self._open_batches += 1
        try:
            yield
        finally:
            with self._changed:
                self._open_batches -= 1
                if self._batch:
                    self._with_reconnect(self._send_batch)

    def wait(self, request: ServerRequest) -> Answer:
        """Wait for an answer, and return it.

        Raises:
            KVStoreError: The server is lost.
        """
        begun = time.monotonic()
        with self._changed:
            while request.answer is None:
                self._require_usable()
                self._probe_if_silent(begun)
                if self._batch:
                    self._with_reconnect(self._send_batch)
                if self._reading:
                    # With a limit, as in the poll of the thread that reads: the end of the world notifies neither.
                    self._changed.wait(1.0)
                else:
                    self._read_once()
            return request.answer

    def receive_answers(self) -> None:
        """Receive the answers that have come; does not wait."""
        with self._changed:
            self._require_usable()
            self._with_reconnect(self._receive)

    def open_store(
        self, store: int, *, makes_memory: bool, message: Callable[[int], Message]
    ) -> ServerRequest:
        """Open a store; the worker that ``makes_memory`` creates the store's memory and brings it to a server of its host."""
        with self._changed:
            self._uses[store] = self._uses.get(store, 0) + 1
        if makes_memory and self.local:
            with self._changed:
                self._require_usable()
                file = self._files[store] = SharedFile.create(f"hvdlab-kv-{store:x}")
                self._with_reconnect(lambda: self._send(m.Bring(store), file))
        return self.request(message)

    def record_key(self, store: int, key: Key, nbytes: int) -> None:
        """Record that the server has a key of this store, or a shard of one, from now on."""
        keys = self.stock.setdefault(store, {})
        keys[key] = keys.get(key, 0) + nbytes

    @property
    def lost(self) -> bool:
        """Return whether the server is gone for good. Any thread."""
        return self._lost is not None

    def close_store(self, store: int) -> None:
        """Close a store for this worker. Does not wait, and acquires no lock."""
        # Before the wake-up, after which the watching thread looks for it once.
        self._closing.append(store)
        self._wake()

    def close(self) -> None:
        """End the connection. Requests that wait fail."""
        with self._changed:
            if self._lost is None:
                self._lost = KVStoreError("the connection to the parameter server was closed")
                if self._endpoint is not None:
                    with contextlib.suppress(ConnectionLost):
                        self._endpoint.send_frame(m.encode(m.LeaveServer()))
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
        if self._lost is None and self._engine.closed:
            self._lost = KVStoreError("the world that the parameter server belongs to has ended")
        if self._lost is not None:
            # A new exception for each raise: many threads may raise it, and one object would collect all their tracebacks.
            raise type(self._lost)(str(self._lost))

    def _probe_if_silent(self, begun: float) -> None:
        """Probe a silent server, then log its name; for a worker that waits since ``begun``."""
        now = time.monotonic()
        silent = now - max(begun, self._last_heard)
        if silent < SILENT_SECONDS:
            return
        if self._probe is None or self._probe.answer is not None:
            self._sequence += 1
            store = next(iter(self.stock), 0)
            probe = self._probe = ServerRequest(
                m.StockRequest(self._sequence, store), None, 0, keeps=False, span=None
            )
            # Among the requests, so that its answer counts like any other; it carries no memory and changes nothing on the server.
            self._unanswered[self._sequence] = probe
            self._with_reconnect(lambda: self._transmit(probe))
        elif (
            not self._may_come_back()
        ):  # a host that is cut off sends no end of the connection, but its workers are known to be gone
            self._with_reconnect(self._raise_host_lost)
        elif silent >= self._warn_after:
            self._warn_of_silence(silent)

    def _warn_of_silence(self, seconds: float) -> None:
        self._warn_after = 2 * seconds
        stopped = self.local and process_state(self.pid) in ("T", "t")
        what = (
            f"it is stopped (kill -CONT {self.pid} lets it go on)"
            if stopped
            else "it may be stopped or overloaded"
        )
        LOG.warning("%s has not answered for %.0f s: %s", self._name(), seconds, what)

    def _name(self) -> str:
        return f"the parameter server of {self.address.host.partition('#')[0]} (process {self.pid})"

    def _raise_host_lost(self) -> None:
        raise ConnectionLost("all workers of its host have died")

    def _mark_lost(self, error: Exception) -> None:
        keys = [key for store in self.stock.values() for key in store]
        named = ", ".join(repr(key) for key in keys[:_NAMED_KEYS])
        more = f" and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
        kept = f", which kept the values of {named}{more}" if keys else ""
        text = f"{self._name()} is lost{kept}: {error}"
        self._lost = KVStoreError(text)
        # Otherwise batched() would try to send the requests that are left at its end.
        self._batch.clear()
        LOG.warning("%s", text)

    def _with_reconnect(self, step: Callable[[], None]) -> None:
        """Run a step with the connection. If that is lost, connect again, which repeats all unanswered requests.

        An exception from outside (Ctrl-C) may come in the middle of a frame: such a connection is dropped.
        """
        try:
            if self._endpoint is None:
                raise ConnectionLost("there is none")
            step()
        except ConnectionLost:
            self._recover()
        except BaseException:
            self._drop_connection()
            raise

    def _drop_connection(self) -> None:
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
                silent = time.monotonic() - max(begun, self._last_heard)
                if silent >= self._warn_after:
                    self._warn_of_silence(silent)
            self._receive()  # otherwise both might wait for each other
            sent = self._endpoint.flush()

    def _send_batch(self) -> None:
        """Send the requests of the batch, in order. If the connection is lost meanwhile, all unanswered ones are repeated."""
        assert self._endpoint is not None
        now = time.monotonic_ns()
        for request in self._batch:
            if request.span is not None:
                request.span.sent = now
        frames = b"".join([m.encode(request.message) for request in self._batch])
        self._batch.clear()
        self._send_frames(frames)

    def _transmit(self, request: ServerRequest) -> None:
        if self._batch:
            self._send_batch()  # a worker's requests must arrive in their order
        region = request.region
        if region is not None and not self._arena.shared:
            data = self._arena.file.array(region.offset, np.dtype(np.uint8), (request.sent,))
            for first in range(0, request.sent, TRANSFER_BYTES):
                self._send(m.Data(region.offset + first, data[first : first + TRANSFER_BYTES].tobytes()))
        if request.span is not None:
            request.span.sent = time.monotonic_ns()
        self._send(request.message)

    def _wait_for(self, events: int) -> bool:
        endpoint = self._endpoint
        if endpoint is None:
            raise ConnectionLost("there is none")
        poll = select.poll()
        poll.register(endpoint, events)
        return bool(poll.poll(_POLL_MILLISECONDS))

    def _read_once(self) -> None:
        """Wait for the socket without the lock, then receive."""
        self._reading = True
        endpoint, poll = self._endpoint, self._poll
        try:
            if endpoint is None:
                raise ConnectionLost("there is none")
            if self._batch:
                self._send_batch()
            self._changed.release()
            try:
                poll.poll(_POLL_MILLISECONDS)
            finally:
                self._changed.acquire_again()
            # While this thread waited without the lock, another one may have made a new connection.
            if self._endpoint is endpoint:
                self._receive()
        except ConnectionLost:
            self._recover()
        except BaseException:
            self._drop_connection()
            raise
        finally:
            self._reading = False
            self._changed.notify_all()

    def _receive_when_busy(self) -> None:
        """Receive answers; while too many bytes are unanswered, wait for some."""
        self._with_reconnect(self._receive)
        while self._in_flight > _IN_FLIGHT and not self._reading:
            self._require_usable()
            self._read_once()

    def _receive(self) -> None:
        endpoint = self._endpoint
        if endpoint is None:
            raise ConnectionLost("there is none")
        try:
            for payload in endpoint.receive():
                self._handle(endpoint, m.decode_to_worker(payload))
        except ProtocolError as error:
            # The stream can't be read any further. As after the end of the connection, all unanswered requests are repeated over a
            # new one.
            raise ConnectionLost(str(error)) from error

    def _handle(self, endpoint: Endpoint, message: m.ToWorker) -> None:
        self._last_heard = time.monotonic()
        if self._warn_after != SILENT_SECONDS:
            self._warn_after = SILENT_SECONDS
            LOG.warning("%s answers again", self._name())
        if isinstance(message, m.RequestDone | m.RequestFailed | m.Stock):
            self._answer(message)
        elif isinstance(message, m.RequestBegun):
            self._begun = message.sequence
        elif isinstance(message, m.Data):
            data = np.frombuffer(message.data, np.uint8)
            self._arena.file.array(message.offset, data.dtype, data.shape)[:] = data
        elif isinstance(message, m.SharedStoreMemory):
            self._keep_memory(message.store, endpoint.take_descriptor())

    def _answer(self, message: Answer) -> None:
        request = self._unanswered.pop(message.sequence, None)
        if request is None:
            return  # the request was repeated, and this is the second answer
        request.answer = message
        if request.span is not None and not isinstance(message, m.Stock):
            request.span.answered(message, self._clock)
        if request.region is not None:
            self._in_flight -= request.region.size
            # Not before the answer: the server reads these bytes until then, and a new connection sends them again.
            if not request.keeps:
                self._arena.free(request.region)
        self._changed.notify_all()

    def _keep_memory(self, store: int, descriptor: int) -> None:
        """Keep the memory of a store for a successor of the server."""
        if descriptor == LOST:
            # No error of the request: other workers of the host have the memory, too.
            LOG.warning(
                "this process has as many open files as it may have, and does not keep the values of a store in case %s ends; "
                "raise `ulimit -n`",
                self._name(),
            )
            return
        # A new connection brings the file once more. `setdefault()` keeps the first object, and the end of the other one closes its
        # descriptor.
        self._files.setdefault(store, SharedFile(descriptor))

    # -- making it again ----------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Connect again and repeat the unanswered requests; start a server of this host first. One thread does it, others wait for it."""
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
        deadline = Deadline(self._recovery_seconds())
        began = warned = time.monotonic()
        pause = _TRY_AGAIN_SECONDS
        with contextlib.suppress(ConnectionLost):
            self._receive()  # the server may have sent RequestBegun before it ended
        self._drop_connection()
        # Set back before the next connection: `_begun` then names only requests that the new server has begun.
        server, begun, self._begun = self.pid, self._begun, 0
        suspect = self._unanswered.get(begun)
        if suspect is not None and suspect.ends:
            self._changed.wait(min(_TRY_AGAIN_SECONDS * 2**suspect.ends, _LONGEST_RESTART_PAUSE_SECONDS))
        while True:
            self._require_usable()
            try:
                self._endpoint = self._connect(deadline)
                # The same process: only the connection was lost, and no request is to blame for that.
                if self.pid != server:
                    server = self.pid
                    self._count_end(begun)
                self._poll = select.poll()
                self._poll.register(self._endpoint, select.POLLIN)
                self._batch.clear()  # they are among those that are unanswered
                # The memory goes first: a new server refuses requests of this host for stores that it does not have.
                for store, file in self._files.items():
                    self._send(m.Bring(store), file)
                # In the order of their numbers: the server takes a push whose number is below the last that it applied to the key for
                # a repeated one, and would answer it without applying it.
                for number in sorted(self._unanswered):
                    request = self._unanswered.get(number)
                    if request is not None:  # answered while others were sent
                        self._transmit(request)
                self._wake()  # the watching thread has to watch another one
                return
            except (ConnectionLost, OSError, StartError, ProtocolError) as error:
                cause = error
                self._drop_connection()
                if deadline.expired or not self._may_come_back():
                    self._mark_lost(error)
                    self._changed.notify_all()
                    self._require_usable()
            except BaseException:
                self._drop_connection()
                raise
            if time.monotonic() >= warned + STALL_SECONDS:
                warned = time.monotonic()
                LOG.warning("%s has been gone for %.0f s: %s", self._name(), warned - began, cause)
            # There is no event for a server's return. Without the lock, so that an interrupt reaches threads that wait.
            self._changed.wait(pause)
            if self.local:  # each try starts a process
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _count_end(self, begun: int) -> None:
        """Count an end of the server while it carried out this request. Fail the request if there were too many."""
        request = self._unanswered.get(begun)
        if request is None:
            return
        request.ends += 1
        if request.ends < _MOST_ENDS:
            return
        message: Any = request.message
        kind, key = type(message).__name__, getattr(message, "key", None)
        about = "" if key is None else f" of key {key!r}"
        failure = (
            f"the parameter server of {self.address.host.partition('#')[0]} ended each time it carried out this request "
            f"({kind}{about}), {request.ends + 1} times by now, and the request is not sent again; the server's output on stderr, "
            "or the kernel's log if memory was short, says why"
        )
        self._answer(m.RequestFailed(begun, failure))

    def _recovery_seconds(self) -> float:
        """Return the seconds that the server may be gone.

        One of another host may also be out of reach because this worker is cut off. The coordinator lets it in again
        ``HVDLAB_CUT_OFF`` seconds after the engine has missed it, which is up to ``HVDLAB_DEAD_AFTER`` seconds after the cut: it must
        not find that it has lost its servers meanwhile.
        """
        if self.local or not self.pid:
            return RECOVER_WITHIN
        settings = self._engine.settings
        return max(RECOVER_WITHIN, settings.dead_after + settings.cut_off)

    def _may_come_back(self) -> bool:
        if self.local:
            return os.path.isdir(self.address.directory)
        return not self.neighbours or not self.neighbours.isdisjoint(self._engine.living)

    def _connect(self, deadline: Deadline) -> Endpoint:
        sock = self._open_socket(deadline)
        endpoint = Endpoint(sock, descriptors=True)
        try:
            repeats = max(self._unanswered, default=0)
            attach = m.Attach(m.VERSION, self.address.token, self._rank, os.getpid(), self.local, repeats)
            descriptor = self._arena.file.descriptor if self.local else -1
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
                if isinstance(answer, m.AttachRefused):
                    raise StartError(f"The parameter server refused: {answer.reason}")
                if isinstance(answer, m.Attached):
                    self.pid = answer.pid
                    return
            deadline.check("the answer of the parameter server")
            left = deadline.remaining()
            poll.poll(None if left is None else left * 1000)

    def _open_socket(self, deadline: Deadline) -> socket.socket:
        if self.local:
            return self._open_local_socket(deadline)
        where = parse_address(self.address.tls_address)
        assert isinstance(where, TlsAddress)
        left = deadline.remaining()
        seconds = _CONNECT_SECONDS if left is None else min(left, _CONNECT_SECONDS)
        plain = socket.create_connection((where.host, where.port), seconds)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secure: ssl.SSLSocket = client_context(self.address.certificate).wrap_socket(plain)
        except BaseException:
            plain.close()
            raise
        try:
            require_same_certificate(secure, self.address.certificate)
        except BaseException:
            secure.close()
            raise
        return secure

    def _open_local_socket(self, deadline: Deadline) -> socket.socket:
        left = deadline.remaining()
        self._starter.ensure_running(self.address, RECOVER_WITHIN if left is None else left)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(left)
            sock.connect(os.path.join(self.address.directory, SOCKET))
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
                # Only the end of the connection: answers are read by the threads that wait for them.
                poll.register(endpoint, select.POLLRDHUP)
            found = poll.poll()
            if any(descriptor == self._wake_reader for descriptor, _ in found):
                os.read(self._wake_reader, 4096)
                continue
            with self._changed:
                if self._endpoint is endpoint:
                    with contextlib.suppress(ConnectionLost):
                        self._receive()  # the server may have sent RequestBegun before it ended
                    self._drop_connection()
        # Forget the number first: otherwise _wake() might write a byte to a file that has the same number later.
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
                self._with_reconnect(lambda number=store: self._send(m.CloseStore(number)))  # type: ignore[misc]
