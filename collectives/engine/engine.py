"""The engine: one rank's connection to the coordinator, with its control and executor threads."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.engine.control import Control
from hvdlab.collectives.engine.effects import (
    AbortPlane,
    ClosePlanes,
    Effect,
    Fail,
    NewEpoch,
    RunBatch,
    Succeed,
)
from hvdlab.collectives.engine.entry import ENDED, EXECUTING, Entry
from hvdlab.collectives.engine.executor import Executor
from hvdlab.collectives.engine.handle import Handle
from hvdlab.collectives.engine.hosts import Place, host_key, place
from hvdlab.collectives.engine.mailbox import Mailbox
from hvdlab.collectives.engine.request import PendingCollective, Request, Result
from hvdlab.collectives.engine.slots import PlaneSlot
from hvdlab.collectives.engine.spans import SpanLog
from hvdlab.collectives.engine.state import RankState
from hvdlab.collectives.engine.store import EngineStore, Tickets
from hvdlab.collectives.engine.world import WorldView
from hvdlab.collectives.errors import (
    Cause,
    CauseKind,
    HvdlabError,
    NotInitializedError,
)
from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import Phases, PlaneContext
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_to_peer
from hvdlab.collectives.protocol.connect import connect
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.sites import call_site

BLOCKED_AFTER = 0.5
"""Seconds of waiting after which the coordinator is told that the user's thread is blocked."""
STUCK_AFTER = 2.0
"""Seconds that a plane has to obey an abort before its thread is abandoned."""

_monotonic_ns = time.monotonic_ns


class Engine:
    """One rank of a world. Made by :meth:`connect`; safe to use from any thread unless said otherwise.

    Attributes:
        rank: This rank.
        settings: What it was started with.
        recorder: Spans and metrics of this rank.
    """

    def __init__(self, settings: Settings, endpoint: Endpoint, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        self._state = RankState(rank)
        # Held around every use of the state, and while sending, so that the order of announcements is that of
        # submissions. Held for microseconds only.
        self._lock = threading.Lock()
        self._endpoint = endpoint
        self._flush_wanted = False
        self._torn = False
        self._finishing: tuple[Entry, ...] = ()
        self._unusable: HvdlabError | None = None
        self._tickets = Tickets()
        self.world = WorldView()
        self.mailbox = Mailbox()
        self._place: tuple[int, Place] | None = None
        self._spans = SpanLog(rank, settings.record)
        self.recorder = self._spans.recorder
        self._executor = Executor(self, str(rank))
        self._control = Control(endpoint, self, str(rank))
        self._closed = threading.Event()
        self._handlers: dict[type, Callable[[m.Message], None]] = self._message_handlers()
        _engines.add(self)
        self._control.start()

    @classmethod
    def connect(cls, settings: Settings, *, timeout: float | None = None) -> Engine:
        """Connect to the coordinator as a rank. Does not wait for other ranks.

        Raises:
            StartError: Nobody answers there, or the coordinator refused.
        """
        if settings.coordinator is None:
            raise NotInitializedError("HVDLAB_COORDINATOR")
        hello = m.Hello(
            m.PROTOCOL_VERSION,
            settings.token,
            "rank",
            settings.rank,
            host_key(),
            os.getpid(),
            settings.address,
            registry.offered(),
            settings.plane,
            settings.cells_tracked,
        )
        deadline = Deadline(settings.start_timeout if timeout is None else timeout)
        endpoint, welcome = connect(
            settings.coordinator, hello, certificate=settings.certificate, deadline=deadline
        )
        return cls(settings, endpoint, welcome.rank)

    # -- the world ------------------------------------------------------------------------------------------------

    def wait_for_world(self, timeout: float) -> None:
        """Wait until all expected ranks are members of the world.

        Raises:
            StartError: Some are not there after ``timeout`` seconds; the text names them.
        """
        self.world.wait_complete(timeout, self.rank)

    @property
    def size(self) -> int:
        """Living members of the world."""
        return len(self.ranks()) or 1

    def ranks(self, process_set: int = 0) -> tuple[int, ...]:
        """Ranks of a process set's members, by position; empty if this rank does not know it."""
        group = self._state.sets.get(process_set)
        return group.ranks if group is not None else ()

    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """Ids of the process sets that this rank knows, and their ranks."""
        with self._lock:
            return {group.id: group.ranks for group in self._state.sets.values()}

    @property
    def local_rank(self) -> int:
        given = self.settings.local_rank
        return self._where().local_rank if given is None else given

    @property
    def local_size(self) -> int:
        return self._where().local_size

    @property
    def cross_rank(self) -> int:
        given = self.settings.cross_rank
        return self._where().cross_rank if given is None else given

    @property
    def cross_size(self) -> int:
        return self._where().cross_size

    def _where(self) -> Place:
        group = self._state.sets.get(0)
        if group is None or group.index < 0:
            return Place(0, 1, 0, 1)
        if self._place is None or self._place[0] != group.epoch:
            hosts = [member.host for member in group.members]
            self._place = (group.epoch, place(self.rank, group.ranks, hosts))
        return self._place[1]

    def add_process_set(self, ranks: Sequence[int], timeout: float | None = None) -> int:
        """Make a process set of these ranks; every rank of the world calls it alike. Returns its id."""
        chosen = tuple(sorted(set(ranks)))
        name = f"process_set.add.{','.join(map(str, chosen))}"
        return self.run(Request(OpKind.ADD_PROCESS_SET, name, ranks=chosen), timeout).process_set

    def remove_process_set(self, process_set: int, timeout: float | None = None) -> None:
        """Remove a process set; every rank of the world calls it alike."""
        name = f"process_set.remove.{process_set}"
        self.run(Request(OpKind.REMOVE_PROCESS_SET, name, root=process_set), timeout)

    # -- collectives ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """Submit a collective and return at once.

        It is announced by the control thread, or by the next wait if that is sooner, together with what else was
        submitted by then.

        Raises:
            InvalidRequestError: It is wrong on this rank alone; nothing was sent.
            DuplicateNameError: The name is in flight on this rank; every rank's pending one fails.
            AbortedError: The coordinator is lost.
        """
        handle = Handle(self, request, request.site or call_site(2), _monotonic_ns())
        self._submit(handle)
        if not self._flush_wanted:
            self._flush_wanted = True
            self._control.wake()
        return handle

    def run(self, request: Request, timeout: float | None = None) -> Result:
        """Submit, announce at once and wait: the quick way for one blocking collective. Raises what ``wait`` does."""
        handle = Handle(self, request, request.site or call_site(2), _monotonic_ns())
        self._submit(handle)
        self._flush_wanted = True
        return handle.wait(timeout)

    def submit_group(self, requests: Sequence[Request]) -> list[Handle]:
        """Submit the tensors of a group: all or, if one of them is refused, none. Raises what ``submit`` does."""
        now, site = _monotonic_ns(), call_site(2)
        handles = [Handle(self, request, request.site or site, now) for request in requests]
        submitted = 0
        try:
            for handle in handles:
                self._submit(handle)
                submitted += 1
        except BaseException:
            # Nothing was sent yet only if the control thread had no reason to; the rest of the group would wait for
            # ever, so what was submitted is withdrawn.
            if submitted:
                self._interrupted(handles[0])
            raise
        if handles and not self._flush_wanted:
            self._flush_wanted = True
            self._control.wake()
        return handles

    def _submit(self, handle: Handle) -> None:
        if self._unusable is not None:
            raise self._unusable
        try:
            with self._lock:
                self._enter()
                try:
                    self._state.submit(handle)
                except HvdlabError:
                    self._torn = False
                    raise
                self._torn = False
        except BaseException:
            self._control.wake()  # a duplicate has to be told, an interrupted submission to be mended
            raise

    def _enter(self) -> None:
        """Begin to change the state (lock held). An exception before ``_torn`` is reset leaves work for the next."""
        if self._torn:
            self._mend()
        self._torn = True

    def _mend(self) -> None:
        # Ctrl-C hit the user's thread in the middle of a change. What it was about to do is unknown, so the epoch is
        # given up; whoever takes the lock next does this.
        self._state.mend(f"rank {self.rank} was interrupted")
        for entry in self._finishing:
            if entry.phase == ENDED:
                interrupted = Cause(CauseKind.INTERRUPTED, (self.rank,), f"rank {self.rank} was interrupted")
                self._complete(entry, None, self._state.aborted(entry, interrupted))
        self._finishing = ()

    def flush(self) -> None:
        """Send what is queued. Any thread.

        Raises:
            ConnectionLost: The coordinator is gone; the control thread finds that out by itself as well.
        """
        with self._lock:
            if self._torn:
                self._mend()
                self._torn = False
            self._flush_wanted = False
            if self._state.has_messages:
                send = self._endpoint.send
                for message in self._state.take_messages():
                    send(message)

    def _flush_quietly(self) -> None:
        try:
            self.flush()
        except ConnectionLost:
            self._control.wake()
        if self._endpoint.backlog:
            self._control.wake()  # it waits until the socket takes more

    def wait_for(self, handle: Handle, timeout: float | None) -> None:
        """Wait until the handle has ended; see :meth:`Handle.wait`."""
        try:
            if self._flush_wanted:
                self._flush_quietly()
            ended = handle._lock
            first = BLOCKED_AFTER if timeout is None or timeout > BLOCKED_AFTER else max(timeout, 0.0)
            if not ended.acquire(timeout=first) and not self._wait_long(handle, timeout):
                raise TimeoutError(
                    f"{handle.request.kind.label} `{handle.name}` ({handle.site}) is still in flight after "
                    f"{timeout:g} s"
                )
            ended.release()
        except KeyboardInterrupt:
            self._interrupted(handle)
            raise
        finally:
            if handle._done and handle._lock.locked():
                handle.open()  # an exception came between the two; others may wait, too

    def _wait_long(self, handle: Handle, timeout: float | None) -> bool:
        """Second part of a wait: the coordinator knows that this thread is blocked, to find deadlocks."""
        if timeout is not None and timeout <= BLOCKED_AFTER:
            return False
        self._tell(lambda: self._state.blocked(handle, BLOCKED_AFTER))
        try:
            return handle._lock.acquire(timeout=-1 if timeout is None else timeout - BLOCKED_AFTER)
        finally:
            self._tell(lambda: self._state.unblocked(handle))

    def _interrupted(self, handle: Handle) -> None:
        text = f"rank {self.rank} was interrupted in {handle.request.kind.label} `{handle.name}`"

        def withdraw() -> None:
            if handle.phase != ENDED:
                self._state.withdraw(handle.request.process_set, CauseKind.INTERRUPTED, text, handle.site)

        self._tell(withdraw)

    def _tell(self, change: Callable[[], None]) -> None:
        with self._lock:
            self._enter()
            change()
            self._torn = False
        self._flush_quietly()

    def pending(self) -> list[PendingCollective]:
        """Collectives in flight on this rank, oldest first. Any thread, also while others are stuck."""
        now = _monotonic_ns()
        with self._lock:
            return [
                PendingCollective(
                    entry.name,
                    entry.request.kind.label,
                    entry.site,
                    (now - entry.submitted) / 1e9,
                    entry.phase == EXECUTING,
                    group.id,
                )
                for group in self._state.sets.values()
                for entry in group.pending
            ]

    # -- cells and mail -------------------------------------------------------------------------------------------

    def begin_cell(self, cell: str) -> None:
        """A cell begins to run here."""
        self._spans.recorder.cell_begin(cell)
        self._tell(lambda: self._state.post(m.CellBegin(cell)))

    def end_cell(self, cell: str, error: str | None = None) -> None:
        """A cell ended here; ``error`` is one line that says how it failed."""
        self._spans.recorder.cell_end(cell, error is None)
        self._tell(lambda: self._state.post(m.CellEnd(cell, error or "")))
        self._schedule_events()

    def post(self, topic: str, body: bytes, to: Sequence[int] | None = None) -> None:
        """Send mail to ranks, or to all clients if ``to`` is ``None``. Silently lost if the coordinator is gone."""
        self._tell(lambda: self._state.post(m.Post(topic, body, tuple(to or ()))))

    def on_mail(self, topic: str, callback: Callable[[int, bytes], None]) -> None:
        """Call ``callback(sender, body)`` on the control thread; it must not block. Sender -1 is a client."""
        self.mailbox.on(topic, callback)

    def on_interrupt(self, callback: Callable[[], None]) -> None:
        """Call this on the control thread when the notebook interrupts this rank."""
        self.mailbox.interrupts.append(callback)

    def on_leave(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` on the control thread when this rank is told to leave, or the coordinator is lost."""
        self.mailbox.leaves.append(callback)

    # -- the control thread's side --------------------------------------------------------------------------------

    def receive(self) -> None:
        """Read and handle what has arrived. Control thread."""
        for payload in self._endpoint.receive():
            message = decode_to_peer(payload)
            handler = self._handlers.get(type(message))
            if handler is not None:
                handler(message)
            else:
                self._handle(message)

    def _handle(self, message: m.Message) -> None:
        with self._lock:
            if self._torn:
                self._mend()
                self._torn = False
            effects = self._state.handle(message, _monotonic_ns())
        ring = False
        for effect in effects:
            if type(effect) is RunBatch:
                self._executor.put(effect)
                ring = True
            else:
                self._perform(effect)
        if ring:
            self._executor.ring()
        kind = type(message)
        if kind is m.Configure or kind is m.Abort:
            self._epoch_changed(message)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Fail(entry, error):
                if error.__cause__ is None:
                    group = effect.entry.request.process_set
                    error.__cause__ = self._executor.error_of(group, entry.epoch)
                self._complete(entry, None, error)
            case Succeed(entry, process_set):
                self._complete(entry, Result(process_set=process_set), None)
            case AbortPlane(process_set, epoch):
                busy = self._executor.abort(process_set, epoch)
                if busy is not None and busy.running is not None:
                    slot = busy.running
                    self._control.call_later(STUCK_AFTER, lambda: self._abandon_if_stuck(busy, slot))
            case ClosePlanes(process_set, epoch):
                self._executor.close_older(process_set, epoch)
            case NewEpoch():
                self._new_epoch(effect)

    def _abandon_if_stuck(self, lane: object, slot: PlaneSlot) -> None:
        self._executor.abandon(lane, slot)  # type: ignore[arg-type]  # what Executor.abort returned

    def _complete(self, entry: Entry, result: Result | None, error: Exception | None) -> None:
        assert isinstance(entry, Handle)
        entry.complete(result, error)

    def _new_epoch(self, effect: NewEpoch) -> None:
        memory = self._endpoint.take_descriptor() if effect.has_memory else -1
        if effect.index < 0:
            if memory >= 0:
                os.close(memory)
            return
        slot: PlaneSlot
        store = EngineStore(effect.process_set, effect.epoch, self._tickets, self._send, lambda: slot.aborted)
        context = PlaneContext(
            effect.process_set,
            effect.epoch,
            effect.index,
            len(effect.members),
            tuple(member.rank for member in effect.members),
            tuple(member.host for member in effect.members),
            store,
            memory,
            self.settings.address,
            effect.options,
        )
        slot = PlaneSlot(effect.plane, context, self._tickets.abort)
        self._executor.prepare(slot)

    def _epoch_changed(self, message: m.Message) -> None:
        if isinstance(message, m.Configure):
            self.recorder.members(message.process_set, message.epoch, len(message.members))
            if message.process_set == 0:
                self.world.configured([member.rank for member in message.members])
        elif isinstance(message, m.Abort):
            self.recorder.abort(message.process_set, message.epoch, message.text)
            self._schedule_events()

    def _send(self, message: m.Message) -> None:
        self._tell(lambda: self._state.post(message))

    def _message_handlers(self) -> dict[type, Callable[[m.Message], None]]:
        return {
            m.Ping: self._on_ping,
            m.Pong: self._on_pong,
            m.StoreValue: self._on_store_value,
            m.World: self.world.update,
            m.Mail: self.mailbox.deliver,
            m.Interrupt: self.mailbox.interrupt,
            m.Leave: self.mailbox.leave,
            m.RankEvents: self.mailbox.events,
            m.Stalled: self.mailbox.stalled,
        }

    def _on_ping(self, message: m.Message) -> None:
        assert isinstance(message, m.Ping)
        self._endpoint.send(m.Pong(message.number, _monotonic_ns()))

    def _on_pong(self, message: m.Message) -> None:
        assert isinstance(message, m.Pong)
        self._spans.clock_answer(message)

    def _on_store_value(self, message: m.Message) -> None:
        assert isinstance(message, m.StoreValue)
        self._tickets.answer(message.ticket, message.value)

    def connection_lost(self, reason: str) -> None:
        """Everything pending fails, and so does whatever is submitted later. Control thread."""
        if self._closed.is_set():
            return
        text = f"the coordinator is gone ({reason}); restart the group"
        cause = Cause(CauseKind.COORDINATOR_LOST, (), text)
        self._lose(cause)
        self.world.lost(text)
        self.mailbox.leave(m.Leave(text))

    def _lose(self, cause: Cause) -> None:
        with self._lock:
            effects = self._state.lose(cause)
            self._torn = False
        self._tickets.abort()
        for effect in effects:
            self._perform(effect)

    # -- the executor's side --------------------------------------------------------------------------------------

    def batch_done(self, batch: RunBatch, results: list[Result], started: int, phases: Phases) -> None:
        """A batch was executed. Whichever thread ran it."""
        finished = _monotonic_ns()
        entries = batch.entries
        with self._lock:
            self._enter()
            self._finishing = entries
            finish = self._state.finish
            for entry, result in zip(entries, results, strict=True):
                if finish(entry):
                    entry.complete(result, None)  # type: ignore[attr-defined]  # entries are handles here
            self._finishing = ()
            self._torn = False
        if self._spans.batch(batch, started, finished, phases):
            self._schedule_events()

    def batch_failed(self, batch: RunBatch, error: Exception) -> None:
        """The plane failed: all members are told, and this rank's handles end with the abort that follows."""
        text = f"data plane failed on rank {self.rank}: {type(error).__name__}: {error}"
        self._tell(lambda: self._state.plane_failed(batch.process_set, batch.epoch, text))

    # -- events ---------------------------------------------------------------------------------------------------

    def _schedule_events(self) -> None:
        if self._spans.claim():
            self._control.call(lambda: self._control.call_later(self._spans.INTERVAL, self._send_events))

    def _send_events(self) -> None:
        for batch in self._spans.take():
            self._state_post(m.Events(batch))

    def _state_post(self, message: m.Message) -> None:
        with self._lock:
            self._state.post(message)

    # -- end ------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self, timeout: float = 5.0) -> None:
        """Leave the world in order and end all threads. Idempotent. Handles in flight fail."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._unusable = NotInitializedError("the engine of this rank")
        self._control.call(self._say_bye)
        self._control.stop(timeout)
        self._lose(Cause(CauseKind.SHUTDOWN, (self.rank,), f"rank {self.rank} shut down"))
        self._executor.close(timeout)
        _engines.discard(self)

    def _say_bye(self) -> None:
        for batch in self._spans.take():
            self._state_post(m.Events(batch))
        self._state_post(m.Bye("shutdown"))

    def _after_fork(self) -> None:
        """In a forked child: its copy of the connection is closed, silently, and nothing works any more."""
        self._unusable = NotInitializedError(
            "a rank's engine in a forked process (only the process that called it can use it)"
        )
        self._closed.set()
        self._lock = threading.Lock()
        self._endpoint.forget()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _forked() -> None:
    for engine in list(_engines):
        engine._after_fork()
    _engines.clear()


os.register_at_fork(after_in_child=_forked)
