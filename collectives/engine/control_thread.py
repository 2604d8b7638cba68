"""Control thread: reads the coordinator's messages, sends queued messages, and keeps timers. It never blocks on work.

:class:`Control` is the loop, :class:`ControlHandlers` has the handlers of messages and of the connection's ends. User code and
bindings get news by :class:`Callbacks`, and :class:`SharedMemoryRetry` asks again for memory that could not be received. Planes get
values of the coordinator's rendezvous store by :class:`EngineStore`.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hvdlab.collectives.engine.entries import (
    AbortPlane,
    ClosePlanes,
    CompletionHooks,
    Effect,
    Fail,
    NewGeneration,
    RunBatch,
    Succeed,
)
from hvdlab.collectives.engine.executor import Executor, PlaneSlot, WorkQueue
from hvdlab.collectives.engine.locked_state import LockedState, complete
from hvdlab.collectives.engine.process_set_view import BoardMember, SetState, device_plane_names
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Result
from hvdlab.collectives.engine.span_log import SpanLog
from hvdlab.collectives.engine.world_view import WorldView, log_abort, log_generation, log_loss
from hvdlab.collectives.errors import Cause, CauseKind, ProtocolError
from hvdlab.collectives.planes.base import (
    HOST,
    KeyValue,
    Links,
    PlaneAborted,
    PlaneContext,
    ScopedStore,
    plane_text,
    planes_text,
)
from hvdlab.collectives.planes.shm.agreement_board import MEMBERS, map_board
from hvdlab.collectives.planes.shm.layout import layout_from
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import FRAME_LIMIT, decode_to_peer
from hvdlab.collectives.protocol.endpoint import LOST, ConnectionLost, Endpoint
from hvdlab.collectives.protocol.member_lists import SHORTENED, KnownMembers
from hvdlab.collectives.text import LOG

Call = Callable[[], object]

GOODBYE_WITHIN = 2.0
"""Seconds that the coordinator has to read the rank's goodbye."""
STUCK_AFTER = 2.0
"""Seconds that a plane has to obey an abort before the thread that is stuck in it is abandoned."""
RETRY_INTERVAL = 0.5
"""Seconds between two checks whether descriptors are free; the kernel does not notify a process of that."""
NEEDED_DESCRIPTORS = 3
"""Descriptors that the memory takes at most: the received one, and one for each of the two mappings. With fewer the next generation
would lack its memory as well, and the rank would ask for another one."""
LARGEST_BODY = FRAME_LIMIT - (1 << 20)
"""Bytes of the body of mail at most. The rest of the frame is for its topic and the ranks that it is for."""


class Control:
    """Loop of the control thread: one epoll with the coordinator's socket and a wake-up.

    Attributes:
        socket_owner: Held by a user's thread that polls the socket (see :mod:`~hvdlab.collectives.engine.inline_execution`), from
            before :meth:`pause_reading` until after :meth:`resume_reading`.
        reading: Held by the thread that reads from the connection.
        thread: The control thread.
    """

    def __init__(self, endpoint: Endpoint, label: str) -> None:
        self._endpoint = endpoint
        #: Set by :meth:`start`.
        self._handlers: ControlHandlers
        #: The socket in the epoll, or -1 while the connection is lost.
        self._fd = endpoint.fileno()
        #: Eventfd that wakes the thread, or -1 after :meth:`close`.
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: Watches the socket and the wake-up. Any thread may modify it: the kernel does so also while the control thread waits.
        self._epoll = select.epoll()
        self._epoll.register(self._fd, select.EPOLLIN)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        #: Calls for the thread to make, in order; appended by any thread.
        self._calls: deque[Call] = deque()
        #: Heap of calls with their times in seconds of ``time.monotonic``; the number keeps calls of one time in order.
        self._timers: list[tuple[float, int, Call]] = []
        #: Numbers for the heap.
        self._order = itertools.count()
        #: Whether the thread has to end.
        self._stopping = False
        #: Whether the connection is lost, and no successor has been found yet.
        self._lost = False
        #: Whether the epoll watches for room in the socket, too.
        self._writable = False
        # Two locks: a user's thread owns the socket for as long as it waits, but holds ``reading`` only while it reads.
        self.socket_owner = threading.Lock()
        self.reading = threading.Lock()
        # How often reading was paused, and the number of the last pause that was followed by a resume. If they differ and no
        # thread owns the socket, Ctrl-C has interrupted its owner.
        self._paused = self._resumed = 0
        #: Guards ``_wakeup``.
        self._closing = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"hvdlab-control-{label}", daemon=True)

    def start(self, handlers: ControlHandlers) -> None:
        """Start the thread.

        Args:
            handlers: The handlers of messages, flushes and ends, which it calls.
        """
        self._handlers = handlers
        self.thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the thread, so that it flushes. Any thread; one write."""
        # Under a lock: after close() the descriptor's number can belong to another file of this process.
        with self._closing:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def call(self, call: Call) -> None:
        """Run this on the control thread."""
        self._calls.append(call)
        self.wake()

    def stop(self, timeout: float) -> None:
        """Flush, and end the thread."""
        self._stopping = True  # before the wake-up, which the thread handles once
        self.wake()
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout)

    def close(self) -> None:
        """Free the descriptors, after the thread has ended. Wake-ups have no effect from then on."""
        with self._closing:
            wakeup, self._wakeup = self._wakeup, -1
        if wakeup >= 0:
            self._epoll.close()
            os.close(wakeup)

    def after_fork(self) -> None:
        """Close a forked child's copies of the parent's descriptors; that does not end anything."""
        self._closing = threading.Lock()
        self.close()
        self._endpoint.forget()

    def pause_reading(self) -> bool:
        """Hand the watch for messages over to the calling thread. Return false if there is no connection to watch."""
        # First, so that the control thread notices an interrupt of the caller anywhere behind it.
        self._paused += 1
        try:
            self._epoll.modify(self._fd, select.EPOLLOUT if self._writable else 0)
        except (OSError, ValueError):  # unregistered or closed
            return False
        return True

    def resume_reading(self) -> None:
        """Have the control thread watch for messages again, and handle those that the caller has read ahead."""
        # Read first: a pause that begins while this runs must not count as resumed.
        paused = self._paused
        try:
            self._epoll.modify(self._fd, select.EPOLLIN | (select.EPOLLOUT if self._writable else 0))
        except (OSError, ValueError):
            return
        finally:
            self._resumed = paused
        # Bytes that were read ahead do not make the socket readable.
        if self._endpoint.early:
            self.wake()

    # -- the control thread ---------------------------------------------------------------------------------------

    def renewed(self) -> None:
        """Watch the new connection of the endpoint, whose old one was lost."""
        self._fd = self._endpoint.fileno()
        self._writable = False
        self._epoll.register(self._fd, select.EPOLLIN)
        self._lost = False  # before the guard, which does nothing while the connection is lost
        self._guard(self._receive)  # bytes that came along with the handshake do not make the socket readable

    def call_later(self, seconds: float, call: Call) -> None:
        """Run this on the control thread after some time. Control thread only."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), call))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
            self._run_calls()  # the goodbye is one, and must not depend on where this thread was when stop() was called
            self._guard(self._flush)
            self._wait_for_close()
        except BaseException as error:
            # A fault of ours. No other thread would end the handles on which the rank's threads wait.
            self._lost = True
            self._handlers.fail(error)
            raise
        finally:
            self._endpoint.close()

    def _step(self) -> None:
        for fd, _events in self._epoll.poll(self._timeout()):
            if fd == self._fd:
                self._guard(self._receive)
            else:
                # Before the queues below are emptied: a call that is added after this read wakes the thread again.
                os.eventfd_read(self._wakeup)
        if self._paused != self._resumed and not self.socket_owner.locked():
            self._resume_after_interrupt()
        if self._endpoint.early:
            self._guard(self._receive)
        self._run_calls()
        # After the calls, which add timers: one that is due at once runs in this step.
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        # The flush is last: calls, timers and hooks queue messages, and no wake-up follows for those.
        self._handlers.run_hooks()
        self._guard(self._flush)

    def _resume_after_interrupt(self) -> None:
        """Resume reading in place of a thread that was interrupted before it could do so.

        That thread has woken this one on its way out, or the end of its operation does. If another thread pauses reading right
        now, both watch the socket; that does no harm.
        """
        self.resume_reading()
        self._guard(self._receive)
        self._handlers.wake_executor()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _receive(self) -> None:
        with self.reading:
            self._handlers.receive()

    def _timeout(self) -> float:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1

    def _flush(self) -> None:
        self._handlers.flush()
        waiting = self._endpoint.backlog > 0 and not self._endpoint.flush()
        if waiting != self._writable:
            self._writable = waiting
            self._epoll.modify(self._fd, select.EPOLLIN | (select.EPOLLOUT if waiting else 0))

    def _wait_for_close(self) -> None:
        """Wait until the coordinator has closed the connection: it has read the goodbye then.

        A process that connects again right away under the same rank would find that rank taken otherwise.
        """
        deadline = time.monotonic() + GOODBYE_WITHIN
        # Not the epoll: a wake-up that no thread reads any more would make each of its waits return at once.
        watch = select.poll()
        if not self._lost:
            watch.register(self._fd, select.POLLIN)
        while not self._lost and (left := deadline - time.monotonic()) > 0:
            waiting = self._endpoint.backlog > 0
            watch.modify(self._fd, select.POLLIN | (select.POLLOUT if waiting else 0))
            try:
                watch.poll(left * 1000)
                if waiting:
                    self._endpoint.flush()
                with self.reading:
                    self._endpoint.receive()  # messages to a rank that has left are dropped
            except (ConnectionLost, ProtocolError):
                return

    def _guard(self, step: Call) -> None:
        """Run a step that uses the connection; if that is lost, call ``connection_lost`` once and continue without it."""
        if self._lost:
            return
        try:
            step()
        except (ConnectionLost, ProtocolError) as error:
            self._lost = True
            self._epoll.unregister(self._fd)
            self._fd = -1  # no thread may watch it any more: the number can become another file's
            self._handlers.connection_lost(str(error))


class ControlHandlers:
    """Handlers of the coordinator's messages and of the connection's ends. Control thread, unless a method names another.

    Attributes:
        world: The world as this rank sees it.
        callbacks: The callbacks of users and bindings.
        control: The loop.
        reconnect: Called with the reason when the connection is lost; looks for a successor of the coordinator.
        memory_retry: Asks again for memory that could not be received.
    """

    def __init__(
        self,
        locked: LockedState,
        endpoint: Endpoint,
        executor: Executor,
        spans: SpanLog,
        hooks: CompletionHooks,
        address: str,
        control: Control,
    ) -> None:
        self.world = WorldView()
        self.callbacks = Callbacks()
        self.control = control
        self.reconnect: Callable[[str], None] = self.give_up
        self._locked = locked
        self._endpoint = endpoint
        self._executor = executor
        self._spans, spans.flusher = spans, self
        self._hooks = hooks
        self._address = address
        #: Waits for values of the rendezvous store.
        self._tickets = StoreWaits()
        self._members = KnownMembers()  # of this connection
        self.memory_retry = SharedMemoryRetry(self)
        self.callbacks.on(m.COLLECT, self._collect_events)
        #: Handlers of messages that do not concern the state; all others go to :class:`RankState`.
        self._handlers: dict[type, Callable[[m.Message], None]] = {
            m.Ping: self._on_ping,
            m.Pong: self._on_pong,
            m.StoreValue: self._on_store_value,
            m.Tune: self._on_tune,
            m.World: self.world.update,
            m.Mail: self.callbacks.deliver,
            m.Interrupt: self.callbacks.interrupt,
            m.Leave: self._on_leave,
            m.RankEvents: self.callbacks.events,
            m.Stalled: self.callbacks.stalled,
        }

    def receive(self) -> None:
        """Read and handle the messages that have arrived."""
        for payload in self._endpoint.receive():
            message: m.Message = decode_to_peer(payload)
            if type(message) in SHORTENED:
                message = self._members.restore(message)
            handler = self._handlers.get(type(message))
            if handler is not None:
                handler(message)
            else:
                self._handle(message)

    @property
    def elastic(self) -> bool:
        """Return whether this rank trains elastically. Any thread."""
        return self._locked.state.elastic

    def flush(self) -> None:
        self._locked.flush()

    def run_hooks(self) -> None:
        self._hooks.run()

    def wake_executor(self) -> None:
        """Wake the executor for jobs that an interrupted thread has enqueued; perhaps that thread did not wake it."""
        self._executor.wake()

    def _handle(self, message: m.Message) -> None:
        effects = self._locked.handle(message, time.monotonic_ns())
        # Without the lock: effects build planes' slots, end handles and write to eventfds.
        if self.perform(effects):
            self._executor.wake()
        if isinstance(message, m.Configure):
            log_generation(self._locked.state.rank, message)
            planes = planes_text((message.plane, *message.device_planes.values()), {})
            self._spans.members(message.process_set, message.generation, len(message.members), planes)
            if message.process_set == 0:
                self.world.configured([member.rank for member in message.members], message.generation)
        elif isinstance(message, m.Dissolve):
            self._spans.dissolved(message.process_set)
        elif isinstance(message, m.Regrouped):
            self.world.regrouped(message.ticket)
        elif isinstance(message, m.Abort):
            log_abort(self._locked.state.rank, message)
            if message.process_set == 0:
                self.world.aborted()
            # The orderly removal of a set ends its generation by an abort as well. Where nothing was pending nothing has failed.
            removed = message.kind == CauseKind.MEMBERSHIP.value and not message.ranks
            if message.pending or not removed:
                self._spans.recorder.abort(message.process_set, message.generation, message.text)
            self.schedule_events()
            self.callbacks.aborted(message)

    def perform(self, effects: list[Effect]) -> bool:
        """Carry out effects. Return whether there are jobs for which the caller has to wake the executor."""
        work = False
        for effect in effects:
            if type(effect) is RunBatch:
                self._executor.enqueue(effect)
                work = True
            else:
                self._perform(effect)
        return work

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Fail(entry, error):
                # The plane's own exception, on the rank where it failed; the coordinator's cause has only its text.
                if error.__cause__ is None:
                    error.__cause__ = self._executor.error_of(entry.request.process_set, entry.generation)
                # Before the record, for which no thread waits.
                self._executor.fail(entry, error)
                if self._spans.failed(entry, time.monotonic_ns()):
                    self.schedule_events()
            case Succeed(entry, process_set):
                complete(entry, Result(process_set=process_set), None)
            case AbortPlane(process_set, generation):
                for queue, slot in self._executor.abort(process_set, generation):
                    self._watch(queue, slot)
            case ClosePlanes(process_set, generation):
                self._executor.close_older(process_set, generation)
            case NewGeneration():
                self._new_generation(effect)

    def _watch(self, queue: WorkQueue, slot: PlaneSlot) -> None:
        """Abandon the queue of an aborted plane if its operation has not ended after :data:`STUCK_AFTER` seconds."""
        self.control.call_later(STUCK_AFTER, lambda: self._executor.abandon(queue, slot))

    def store(self, process_set: int, generation: int) -> EngineStore:
        """Return the rendezvous store of a process set's members in one generation."""
        return EngineStore(process_set, generation, self._tickets, self)

    def _new_generation(self, effect: NewGeneration) -> None:
        # Also where this rank is no member: the descriptors are in the order of the messages that announce them.
        memory = self._endpoint.take_descriptor() if effect.has_memory else -1
        if effect.index < 0:
            if memory >= 0:
                os.close(memory)
            return
        if effect.has_memory and memory == LOST:
            self.memory_retry.memory_missing(effect.process_set, effect.generation)
        else:
            # Also where there is no memory in this generation: the one that lacked it is over.
            self.memory_retry.memory_received(effect.process_set)
        if memory >= 0 or len(effect.members) == 1:
            self._open_board(effect, memory)
        store = self.store(effect.process_set, effect.generation)
        context = PlaneContext(
            effect.process_set,
            effect.generation,
            effect.index,
            len(effect.members),
            tuple(member.rank for member in effect.members),
            tuple(member.host for member in effect.members),
            store,
            memory,
            self._address,
            effect.options,
            on_chunks=partial(self._chunks_measured, effect.process_set, effect.generation),
        )
        self._executor.prepare(PlaneSlot(effect.plane, HOST, context))
        for device, plane in effect.device_planes.items():
            apart = replace(
                context,
                # Keys of its own: planes of several device classes use one store.
                store=ScopedStore(store, f"{device}/"),
                memory_fd=-1,  # one plane owns the descriptor, that of the host
                options={**effect.options, "host_plane": effect.plane},
                on_links=partial(self._linked, effect.process_set, effect.generation),
                on_chosen=partial(self._plane_chosen, effect.process_set, effect.generation, device),
            )
            self._executor.prepare(PlaneSlot(plane, device, apart))

    def _linked(self, process_set: int, generation: int, links: Links) -> None:
        """Keep and record the connections that a plane of GPUs has found. Executor thread."""

        def record(state: RankState) -> None:
            group = state.set_in(process_set, generation)
            if group is not None:
                group.links = links
                self._record_planes(group)

        self._locked.update(record)

    def _plane_chosen(self, process_set: int, generation: int, device: str, name: str) -> None:
        """Keep and record the name of the plane that is used for a device class. Executor thread."""

        def record(state: RankState) -> None:
            group = state.set_in(process_set, generation)
            if group is not None:
                group.shown_planes[device] = name
                self._record_planes(group)

        self._locked.update(record)

    def _chunks_measured(self, process_set: int, generation: int, chunk_bytes: int) -> None:
        """Keep and record the size of chunks that the plane of the host has measured as the best. Executor thread."""

        def record(state: RankState) -> None:
            group = state.set_in(process_set, generation)
            if group is not None:
                group.chunk_bytes = chunk_bytes
                self._record_planes(group)

        self._locked.update(record)

    def _record_planes(self, group: SetState) -> None:
        # Under the lock: otherwise the record of a newer generation could come in between, and this one replace it.
        host = plane_text(group.plane, group.chunk_bytes)
        planes = planes_text((host, *device_plane_names(group)), group.links)
        self._spans.members(group.id, group.generation, len(group.members), planes)

    def _open_board(self, effect: NewGeneration, memory: int) -> None:
        members = len(effect.members)
        if members > MEMBERS:
            return
        # One member agrees with itself at once, in memory of its own: it waits for no coordinator.
        place = layout_from(effect.options, members).size if members > 1 else 0
        board = map_board(memory if members > 1 else -1, place, members, effect.index, effect.generation)
        if board is not None:
            member = BoardMember(board, effect.process_set, effect.index, effect.members)
            self._locked.update(RankState.attach_board, member)

    def send(self, message: m.Message) -> None:
        """Send a message. Any thread. Raises ``ProtocolError``, and sends nothing, if it carries more than a message can."""
        size = len(message.body) if isinstance(message, m.Post) else 0
        # Here, since perhaps another thread sends it, which can't raise the error where the message was made.
        if size > LARGEST_BODY:
            raise ProtocolError(f"mail of {size} bytes can't be sent; the limit is {LARGEST_BODY} bytes")
        self._locked.update(RankState.queue_message, message)

    def withdraw(self, process_set: int, text: str, kind: CauseKind = CauseKind.WITHDRAWN) -> None:
        """End the generation of a process set. Any thread."""
        self._locked.update(RankState.withdraw, process_set, kind, text)

    def _on_ping(self, message: m.Message) -> None:
        assert isinstance(message, m.Ping)
        now = time.monotonic_ns()
        self._endpoint.send(m.Pong(message.number, now))
        # The coordinator pings a rank that has been silent for a while: it is perhaps stuck in an operation with others.
        self._locked.update(RankState.report_oldest_executing, now)
        self.ask_clock()

    def ask_clock(self) -> None:
        """Compare clocks with the coordinator, if that is due."""
        question = self._spans.ask_clock()
        if question is not None:
            self._locked.queue_message(question)

    def _on_pong(self, message: m.Message) -> None:
        assert isinstance(message, m.Pong)
        if message.after_events:
            self.callbacks.pong_behind_events(message.number)
        else:
            self._spans.clock_answer(message)

    def _on_store_value(self, message: m.Message) -> None:
        assert isinstance(message, m.StoreValue)
        self._tickets.answer(message.ticket, message.value)

    def _on_tune(self, message: m.Message) -> None:
        assert isinstance(message, m.Tune)
        self._executor.tune(
            message.process_set, message.generation, message.slice_bytes
        )  # before the order that follows

    # -- events ---------------------------------------------------------------------------------------------------

    def schedule_events(self) -> None:
        """Schedule the sending of recorded events, soon but not too often. Any thread."""
        control = self.control
        try:
            if self._spans.claim_flush():
                control.call(lambda: control.call_later(self._spans.INTERVAL, self._events_due))
        except BaseException:  # an interrupt, perhaps after claim_flush() and before the call was queued
            self._spans.release_flush()
            raise

    def _collect_events(self, sender: int, body: bytes) -> None:
        """Send the events that were recorded by now, then the answer to the rank or client that asks, on the same connection."""
        self.send_events()
        self._locked.queue_message(m.Post(m.COLLECTED, body, (sender,) if sender >= 0 else ()))

    def _events_due(self) -> None:
        # Before the events are taken: a thread that records one later then schedules the next flush.
        self._spans.release_flush()
        # Where events are recorded all the time, the threads that record them need not wake this one for each flush.
        if self.send_events() and self._spans.claim_flush():
            self.control.call_later(self._spans.INTERVAL, self._events_due)

    def send_events(self) -> bool:
        """Send the events that were recorded by now. Return whether there were any. Control thread."""
        self.ask_clock()
        batches = self._spans.take()
        for batch in batches:
            self._locked.queue_message(m.Events(batch))
            self.callbacks.own_events(self._spans.recorder.rank, batch)
        return bool(batches)

    # -- the end --------------------------------------------------------------------------------------------------

    def connection_lost(self, reason: str) -> None:
        """Fail everything pending, and hold later submissions until the search of :attr:`reconnect` for a successor has ended."""
        text = (
            f"the coordinator is gone ({reason}), and what was in flight is lost with it; if another takes its place, "
            "the group goes on in a moment: run this again then"
        )
        log_loss(self._locked.state.rank, text)
        effects = self._locked.disconnect(Cause(CauseKind.COORDINATOR_LOST, (), text))
        self._tickets.abort()
        self.world.aborted()
        self.perform(effects)
        self.reconnect(reason)

    def reconnected(self, endpoint: Endpoint) -> None:
        """Continue with this connection to a successor of the coordinator."""
        control = self.control
        with control.reading:  # no other thread may read from the connection meanwhile
            self._members = KnownMembers()  # the successor has described no member yet
            self._locked.reconnect(endpoint, self.world.alive, self.world.leaving)
        control.renewed()
        self.callbacks.reconnected()

    def _on_leave(self, message: m.Message) -> None:
        assert isinstance(message, m.Leave)
        # The state first, so that callbacks find this rank dismissed.
        self._handle(message)
        self.world.released(message.reason)
        self.callbacks.leave(message)

    def give_up(self, reason: str) -> None:
        """Fail everything pending, and each later submission, since there is no successor."""
        self._end(f"the coordinator is gone for good ({reason}); save what you need and restart the group")

    def fail(self, error: BaseException) -> None:
        """Fail everything pending, and each later submission, since the control thread ends by an unexpected error."""
        what = f"{type(error).__name__}: {error}"
        self._end(
            f"a thread of hvdlab failed in this process ({what}), which is a fault of hvdlab's; save what you need and restart it"
        )
        self._executor.end_failing()  # the timers of this thread, which bound that wait, have ended with it

    def _end(self, text: str) -> None:
        log_loss(self._locked.state.rank, text)
        self.fail_pending(Cause(CauseKind.COORDINATOR_LOST, (), text))
        self.world.lost(text)
        self.callbacks.leave(m.Leave(text))

    def fail_pending(self, cause: Cause) -> None:
        """Fail everything pending. On the control thread, or on the thread that closes the engine after that one's end."""
        effects = self._locked.close(cause)
        self._tickets.abort()
        self.perform(effects)


class Callbacks:
    """Callbacks of users and bindings, by kind of news. They run on the control thread and must not block.

    A callback that raises is reported as an uncaught exception of the thread; the other callbacks and the thread continue. Each list is
    copied before its callbacks are called, since these, and other threads, add to it.

    Attributes:
        interrupts: Called when the notebook interrupts this rank.
        native_waits: Called to withdraw collectives for which perhaps native code waits.
        reconnections: Called when this rank has found the coordinator's successor.
        stalls: Get the coordinator's reports of stalled collectives.
        aborts: Get the ends of generations that the coordinator has aborted, after all pending entries have failed.
        cell_failures: Get the ids of cells that have failed on this rank, after the coordinator's message about them.
        event_sinks: Get the events of all ranks, if this rank has subscribed to them.
        own_event_sinks: Get the events that this rank itself sends.
        pongs_behind_events: Get the number of each answer of the coordinator to a ping with ``after_events``.
    """

    def __init__(self) -> None:
        #: Callbacks for mail, by topic.
        self._topics: dict[str, list[Callable[[int, bytes], None]]] = {}
        self.interrupts: list[Callable[[], None]] = []
        self.native_waits: list[Callable[[], None]] = []
        self.reconnections: list[Callable[[], None]] = []
        #: Callbacks of :meth:`on_leave`.
        self._leaves: list[Callable[[str], None]] = []
        self._leaving: str | None = None  # why this rank is to leave, once it is
        self._leave_guard = threading.Lock()  # of the two above
        self.event_sinks: list[Callable[[int, bytes], None]] = []
        self.own_event_sinks: list[Callable[[int, bytes], None]] = []
        self.pongs_behind_events: list[Callable[[int], None]] = []
        self.stalls: list[Callable[[m.Stalled], None]] = []
        self.aborts: list[Callable[[m.Abort], None]] = []
        self.cell_failures: list[Callable[[str], None]] = []

    def on(self, topic: str, callback: Callable[[int, bytes], None]) -> None:
        self._topics.setdefault(topic, []).append(callback)

    def deliver(self, message: m.Message) -> None:
        assert isinstance(message, m.Mail)
        for callback in tuple(self._topics.get(message.topic, ())):
            _call(callback, message.sender, message.body)

    def interrupt(self, message: m.Message) -> None:
        for callback in tuple(self.interrupts):
            _call(callback)

    def end_native_waits(self) -> None:
        for callback in tuple(self.native_waits):
            _call(callback)

    def reconnected(self) -> None:
        for callback in tuple(self.reconnections):
            _call(callback)

    def on_leave(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` when this rank is to leave; at once, on this thread, if it has the order already."""
        # Each callback is called once: leave() sees it in the list, or this thread sees the reason.
        with self._leave_guard:
            self._leaves.append(callback)
            reason = self._leaving
        if reason is not None:
            _call(callback, reason)

    def leave(self, message: m.Message) -> None:
        assert isinstance(message, m.Leave)
        with self._leave_guard:
            self._leaving = message.reason
            callbacks = tuple(self._leaves)
        for callback in callbacks:
            _call(callback, message.reason)

    def events(self, message: m.Message) -> None:
        assert isinstance(message, m.RankEvents)
        for sink in tuple(self.event_sinks):
            _call(sink, message.rank, message.batch)

    def pong_behind_events(self, number: int) -> None:
        for callback in tuple(self.pongs_behind_events):
            _call(callback, number)

    def own_events(self, rank: int, batch: bytes) -> None:
        for sink in tuple(self.own_event_sinks):
            _call(sink, rank, batch)

    def stalled(self, message: m.Message) -> None:
        assert isinstance(message, m.Stalled)
        for callback in tuple(self.stalls):
            _call(callback, message)

    def run(self, call: Callable[[], None]) -> None:
        """Run a binding's call on this thread, which continues if it raises."""
        _call(call)

    def aborted(self, message: m.Abort) -> None:
        for callback in tuple(self.aborts):
            _call(callback, message)

    def cell_failed(self, cell: str) -> None:
        for callback in tuple(self.cell_failures):
            _call(callback, cell)


def _call(callback: Callable[..., None], *args: object) -> None:
    try:
        callback(*args)
    except BaseException as error:  # reported; a bug in a callback must not end the rank's control thread
        exits = not isinstance(error, Exception)
        # On a user's thread, as by on_leave(): the interrupt is the user's.
        if exits and threading.current_thread() is threading.main_thread():
            raise
        if exits:  # such as sys.exit(), which the hook below passes over
            LOG.error("a callback raised %s on a thread of hvdlab's, which goes on", type(error).__name__)
        threading.excepthook(
            threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
        )


class SharedMemoryRetry:
    """Retry after EMFILE: a process set's memory could not be received, as this process had no free descriptor.

    It checks every :data:`RETRY_INTERVAL` seconds for :data:`NEEDED_DESCRIPTORS` free descriptors, then asks the coordinator for a new generation, which
    sends the memory again.

    Args:
        handlers: Send the requests, and have the control thread, on which the checks are made.
    """

    def __init__(self, handlers: ControlHandlers) -> None:
        self._handlers = handlers
        #: Generation whose memory is missing, by process set.
        self._generations: dict[int, int] = {}
        #: Whether a check is scheduled.
        self._scheduled = False

    def memory_missing(self, process_set: int, generation: int) -> None:
        """Begin to retry for the memory of a generation. Control thread."""
        self._generations[process_set] = generation
        self._retry_later()

    def memory_received(self, process_set: int) -> None:
        """End retrying, since a newer generation has its memory. Control thread."""
        self._generations.pop(process_set, None)

    def retry_now(self) -> None:
        """Ask for new generations if enough descriptors are free now. Any thread; a request that comes too late names an ended generation."""
        if self._generations and _has_descriptors():
            while True:
                # Not ``while self._generations``: the main thread and the control thread can come here at once, and one takes the last.
                try:
                    process_set, generation = self._generations.popitem()
                except KeyError:
                    return
                self._handlers.send(m.Renew(process_set, generation))

    def _retry_later(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._handlers.control.call_later(RETRY_INTERVAL, self._retry)

    def _retry(self) -> None:
        self._scheduled = False
        self.retry_now()
        if self._generations:
            self._retry_later()


def _has_descriptors() -> bool:
    found = []
    # By opening them: other files of the process count for the limit, too, and their number changes at any moment.
    try:
        for _ in range(NEEDED_DESCRIPTORS):
            found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        for descriptor in found:
            os.close(descriptor)
    return True


class StoreWaits:
    """Waits for values of the rendezvous store, by ticket. Any thread."""

    def __init__(self) -> None:
        #: Numbers for tickets.
        self._numbers = itertools.count(1)
        #: Waits by ticket.
        self._waiting: dict[int, StoreWait] = {}

    def new(self, scope: tuple[int, int]) -> StoreWait:
        ticket = StoreWait(next(self._numbers), scope)
        self._waiting[ticket.number] = ticket
        return ticket

    def answer(self, number: int, value: bytes) -> None:
        ticket = self._waiting.pop(number, None)
        if ticket is not None:
            ticket.end(value)

    def forget(self, ticket: StoreWait) -> None:
        self._waiting.pop(ticket.number, None)

    def abort(self, scope: tuple[int, int] | None = None) -> None:
        """End the waits of a process set and generation, or all."""
        # A copy: the threads that wait remove their tickets meanwhile.
        for ticket in list(self._waiting.values()):
            if scope is None or ticket.scope == scope:
                ticket.end(None)


class StoreWait:
    """Pending wait for one value; ``value`` stays ``None`` if the wait was aborted."""

    def __init__(self, number: int, scope: tuple[int, int]) -> None:
        self.number = number
        self.scope = scope
        self.value: bytes | None = None
        # Held until the end: a bare lock is the cheapest object to wait on.
        self._ended = _thread.allocate_lock()
        self._ended.acquire()

    def end(self, value: bytes | None) -> None:
        if self._ended.locked():
            self.value = value
            # The control thread ends it with an answer, and a user's thread with an abort: the second finds it released.
            with contextlib.suppress(RuntimeError):
                self._ended.release()

    def wait(self, timeout: float) -> bool:
        return self._ended.acquire(timeout=timeout)


class EngineStore(KeyValue):
    """Rendezvous values of one process set and generation; blocking, any thread but the control thread."""

    def __init__(
        self,
        process_set: int,
        generation: int,
        tickets: StoreWaits,
        handlers: ControlHandlers,
    ) -> None:
        #: Process set and generation.
        self._scope = (process_set, generation)
        self._tickets = tickets
        self._handlers = handlers
        #: Whether the generation has ended.
        self._aborted = False

    def set(self, key: str, value: bytes) -> None:
        self._handlers.send(m.StoreSet(*self._scope, key, value))

    def get(self, key: str, timeout: float) -> bytes:
        ticket = self._tickets.new(self._scope)
        try:
            # The ticket is added before the flag is read, and abort() sets the flag before it reads the tickets: one of them sees it.
            if self._aborted:
                raise PlaneAborted(f"generation {self._scope[1]} has ended")
            self._handlers.send(m.StoreGet(*self._scope, key, ticket.number))
            if not ticket.wait(timeout):
                raise TimeoutError(f"no member has set `{key}` within {timeout:g} s")
        finally:
            # Also after the limit: a value that comes later finds no ticket, and is dropped.
            self._tickets.forget(ticket)
        if ticket.value is None:
            raise PlaneAborted(f"generation {self._scope[1]} has ended")
        return ticket.value

    def abort(self) -> None:
        """End the waits of this and all later calls. Any thread."""
        self._aborted = True
        self._tickets.abort(self._scope)
