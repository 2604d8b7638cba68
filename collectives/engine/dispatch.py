"""What the control thread does with the coordinator's messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hvdlab.collectives import logs
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
from hvdlab.collectives.engine.executor import Executor, Lane
from hvdlab.collectives.engine.guarded import GuardedState, complete
from hvdlab.collectives.engine.hooks import Hooks
from hvdlab.collectives.engine.lacking import Lacking
from hvdlab.collectives.engine.mailbox import Mailbox
from hvdlab.collectives.engine.posting import Seat
from hvdlab.collectives.engine.request import Result
from hvdlab.collectives.engine.slots import PlaneSlot
from hvdlab.collectives.engine.spans import SpanLog
from hvdlab.collectives.engine.state import RankState
from hvdlab.collectives.engine.store import EngineStore, Tickets
from hvdlab.collectives.engine.world import WorldView
from hvdlab.collectives.errors import Cause, CauseKind
from hvdlab.collectives.planes.base import PlaneContext
from hvdlab.collectives.planes.buffers import HOST
from hvdlab.collectives.planes.links import Links, plane_text, planes_text
from hvdlab.collectives.planes.scoped import ScopedStore
from hvdlab.collectives.planes.shm.board import MEMBERS, map_board
from hvdlab.collectives.planes.shm.layout import layout_from
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_to_peer
from hvdlab.collectives.protocol.endpoint import LOST, Endpoint
from hvdlab.collectives.protocol.member_lists import SHORTENED, KnownMembers

STUCK_AFTER = 2.0
"""Seconds that a plane has to obey an abort before the thread that is stuck in it is abandoned."""


class Dispatcher:
    """Carries out what messages ask for. Everything here runs on the control thread, unless said otherwise."""

    def __init__(
        self,
        guarded: GuardedState,
        endpoint: Endpoint,
        executor: Executor,
        spans: SpanLog,
        hooks: Hooks,
        address: str,
    ) -> None:
        self.world = WorldView()
        self.mailbox = Mailbox()
        self.control: Control | None = None  # set before it starts
        self.reconnect: Callable[[str], None] = self.give_up
        self._guarded = guarded
        self._endpoint = endpoint
        self._executor = executor
        self._spans = spans
        self._hooks = hooks
        self._address = address
        self._tickets = Tickets()
        self._members = KnownMembers()  # of this connection
        self.lacking = Lacking(self.send, self._call_later)
        self.mailbox.on(m.COLLECT, lambda sender, body: self._collect_events(body))
        self._handlers: dict[type, Callable[[m.Message], None]] = {
            m.Ping: self._on_ping,
            m.Pong: self._on_pong,
            m.StoreValue: self._on_store_value,
            m.Tune: self._on_tune,
            m.World: self.world.update,
            m.Mail: self.mailbox.deliver,
            m.Interrupt: self.mailbox.interrupt,
            m.Leave: self._on_leave,
            m.RankEvents: self.mailbox.events,
            m.Stalled: self.mailbox.stalled,
        }

    def receive(self) -> None:
        """Read and handle what has arrived."""
        for payload in self._endpoint.receive():
            message: m.Message = decode_to_peer(payload)
            if type(message) in SHORTENED:
                message = self._members.restore(message)
            handler = self._handlers.get(type(message))
            if handler is not None:
                handler(message)
            else:
                self._handle(message)

    def flush(self) -> None:
        self._guarded.flush()

    def run_hooks(self) -> None:
        self._hooks.run()

    def leader_torn(self) -> None:
        """Ring for the jobs that a leader put for the executor before Ctrl-C tore it away; it may not have done so itself."""
        self._executor.ring()

    def _handle(self, message: m.Message) -> None:
        effects = self._guarded.handle(message, time.monotonic_ns())
        if self.perform(effects):
            self._executor.ring()
        if isinstance(message, m.Configure):
            logs.configured(self._guarded.state.rank, message)
            planes = planes_text((message.plane, *message.device_planes.values()), {})
            self._spans.members(message.process_set, message.epoch, len(message.members), planes)
            if message.process_set == 0:
                self.world.configured([member.rank for member in message.members], message.epoch)
        elif isinstance(message, m.Dissolve):
            self._spans.dissolved(message.process_set)
        elif isinstance(message, m.Regrouped):
            self.world.regrouped(message.ticket)
        elif isinstance(message, m.Abort):
            logs.aborted(self._guarded.state.rank, message)
            # The orderly removal of a set ends its epoch by an abort as well. Where nothing was pending nothing has failed.
            removed = message.kind == CauseKind.MEMBERSHIP.value and not message.ranks
            if message.pending or not removed:
                self._spans.recorder.abort(message.process_set, message.epoch, message.text)
            self.schedule_events()

    def perform(self, effects: list[Effect]) -> bool:
        """Carry out effects. Returns whether there are jobs for the executor for which the caller has to ring."""
        work = False
        for effect in effects:
            if type(effect) is RunBatch:
                self._executor.put(effect)
                work = True
            else:
                self._perform(effect)
        return work

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Fail(entry, error):
                if error.__cause__ is None:
                    error.__cause__ = self._executor.error_of(entry.request.process_set, entry.epoch)
                complete(entry, None, error)
                if self._spans.failed(entry, time.monotonic_ns()):
                    self.schedule_events()
            case Succeed(entry, process_set):
                complete(entry, Result(process_set=process_set), None)
            case AbortPlane(process_set, epoch):
                busy = self._executor.abort(process_set, epoch)
                if busy is not None:
                    self._watch(*busy)
            case ClosePlanes(process_set, epoch):
                self._executor.close_older(process_set, epoch)
            case NewEpoch():
                self._new_epoch(effect)

    def _watch(self, lane: Lane, slot: PlaneSlot) -> None:
        """An aborted plane is in the middle of an operation: if it still is after a while, abandon its lane."""
        assert self.control is not None
        self.control.call_later(STUCK_AFTER, lambda: self._executor.abandon(lane, slot))

    def _call_later(self, seconds: float, call: Callable[[], None]) -> None:
        assert self.control is not None
        self.control.call_later(seconds, call)

    def store(self, process_set: int, epoch: int) -> EngineStore:
        """The rendezvous store of a process set's members in one epoch."""
        return EngineStore(process_set, epoch, self._tickets, self.send)

    def _new_epoch(self, effect: NewEpoch) -> None:
        memory = self._endpoint.take_descriptor() if effect.has_memory else -1
        if effect.index < 0:
            if memory >= 0:
                os.close(memory)
            return
        if effect.has_memory and memory == LOST:
            self.lacking.lost(effect.process_set, effect.epoch)
        else:
            self.lacking.came(effect.process_set)
        if memory >= 0:
            self._open_board(effect, memory)
        store = self.store(effect.process_set, effect.epoch)
        context = PlaneContext(
            effect.process_set,
            effect.epoch,
            effect.index,
            len(effect.members),
            tuple(member.rank for member in effect.members),
            tuple(member.host for member in effect.members),
            store,
            memory,
            self._address,
            effect.options,
            on_chunks=partial(self._chunks_measured, effect.process_set, effect.epoch),
        )
        self._executor.prepare(PlaneSlot(effect.plane, HOST, context, store.abort))
        for device, plane in effect.device_planes.items():
            apart = replace(
                context,
                store=ScopedStore(store, f"{device}/"),
                memory_fd=-1,
                on_links=partial(self._linked, effect.process_set, effect.epoch),
            )
            self._executor.prepare(PlaneSlot(plane, device, apart, store.abort))

    def _linked(self, process_set: int, epoch: int, links: Links) -> None:
        """A plane of GPUs has found out what its data goes over. Executor thread."""

        def record(state: RankState) -> None:
            state.linked(process_set, epoch, links)
            self._record_planes(state, process_set, epoch)

        self._guarded.tell(record)

    def _chunks_measured(self, process_set: int, epoch: int, chunk_bytes: int) -> None:
        """The plane of the host has measured which size of chunks suits the machine. Executor thread."""

        def record(state: RankState) -> None:
            state.chunks_measured(process_set, epoch, chunk_bytes)
            self._record_planes(state, process_set, epoch)

        self._guarded.tell(record)

    def _record_planes(self, state: RankState, process_set: int, epoch: int) -> None:
        # Under the lock: else the record of a newer epoch could come in between, and this one replace it.
        group = state.sets.get(process_set)
        if group is not None and group.epoch == epoch:
            host = plane_text(group.plane, group.chunk_bytes)
            planes = planes_text((host, *group.device_planes.values()), group.links)
            self._spans.members(process_set, epoch, len(group.members), planes)

    def _open_board(self, effect: NewEpoch, memory: int) -> None:
        members = len(effect.members)
        if not 1 < members <= MEMBERS:
            return
        place = layout_from(effect.options, members).size
        board = map_board(memory, place, members, effect.index, effect.epoch)
        if board is not None:
            seat = Seat(board, effect.process_set, effect.index, effect.members)
            self._guarded.tell(lambda state: state.seat(seat))

    def send(self, message: m.Message) -> None:
        """Send a message. Any thread."""
        self._guarded.tell(lambda state: state.post(message))

    def withdraw(self, process_set: int, text: str, kind: CauseKind = CauseKind.WITHDRAWN) -> None:
        """End the epoch of a process set. Any thread."""
        self._guarded.tell(lambda state: state.withdraw(process_set, kind, text))

    def _on_ping(self, message: m.Message) -> None:
        assert isinstance(message, m.Ping)
        now = time.monotonic_ns()
        self._endpoint.send(m.Pong(message.number, now))
        # The coordinator pings a rank from which it has heard nothing for a while: it may be stuck in an operation with others.
        self._guarded.tell(lambda state: state.tell_overdue(now))
        self.ask_clock()

    def ask_clock(self) -> None:
        """Compare clocks with the coordinator, if that is due."""
        question = self._spans.ask_clock()
        if question is not None:
            self._guarded.post(question)

    def _on_pong(self, message: m.Message) -> None:
        assert isinstance(message, m.Pong)
        self._spans.clock_answer(message)

    def _on_store_value(self, message: m.Message) -> None:
        assert isinstance(message, m.StoreValue)
        self._tickets.answer(message.ticket, message.value)

    def _on_tune(self, message: m.Message) -> None:
        assert isinstance(message, m.Tune)
        self._executor.tune(
            message.process_set, message.epoch, message.slice_bytes
        )  # before the order that follows

    # -- events ---------------------------------------------------------------------------------------------------

    def schedule_events(self) -> None:
        """Send what was recorded, soon but not too often. Any thread."""
        control = self.control
        if control is None:
            return
        try:
            if self._spans.claim():
                control.call(lambda: control.call_later(self._spans.INTERVAL, self._events_due))
        except BaseException:  # an interrupt, perhaps after claim() and before the call was queued
            self._spans.release()
            raise

    def _collect_events(self, body: bytes) -> None:
        """A client asks for what was recorded by now: send it, then the answer, on the same connection. Control thread."""
        self.send_events()
        self._guarded.post(m.Post(m.COLLECTED, body, ()))

    def _events_due(self) -> None:
        self._spans.release()
        # Where something is recorded all the time the threads that record it need not wake this one up for each flush.
        if self.send_events() and self._spans.claim():
            control = self.control
            assert control is not None
            control.call_later(self._spans.INTERVAL, self._events_due)

    def send_events(self) -> bool:
        """Send what was recorded until now. Returns whether there was anything. Control thread."""
        self.ask_clock()
        batches = self._spans.take()
        for batch in batches:
            self._guarded.post(m.Events(batch))
            self.mailbox.own_events(self._spans.recorder.rank, batch)
        return bool(batches)

    # -- the end --------------------------------------------------------------------------------------------------

    def connection_lost(self, reason: str) -> None:
        """Fail everything pending; what is submitted later is held until :attr:`reconnect` has found a successor, or has not."""
        text = (
            f"the coordinator is gone ({reason}), and what was in flight is lost with it; if another takes its place, "
            "the group goes on in a moment: run this again then"
        )
        logs.lost(self._guarded.state.rank, text)
        effects = self._guarded.suspend(Cause(CauseKind.COORDINATOR_LOST, (), text))
        self._tickets.abort()
        self.perform(effects)
        self.reconnect(reason)

    def reconnected(self, endpoint: Endpoint) -> None:
        """There is a successor of the coordinator: go on with this connection to it."""
        control = self.control
        assert control is not None
        with control.reading:  # no other thread may read from the connection meanwhile
            self._members = KnownMembers()
            self._guarded.resume(endpoint, self.world.alive, self.world.leaving)
        control.renewed()
        self.mailbox.reconnected()

    def _on_leave(self, message: m.Message) -> None:
        assert isinstance(message, m.Leave)
        self._handle(message)
        self.world.released(message.reason)
        self.mailbox.leave(message)

    def give_up(self, reason: str) -> None:
        """There is no successor: fail everything pending, and from now on whatever is submitted."""
        self._end(f"the coordinator is gone for good ({reason}); save what you need and restart the group")

    def fail(self, error: BaseException) -> None:
        """The control thread ends by an unexpected error: fail everything pending, and from now on whatever is submitted."""
        what = f"{type(error).__name__}: {error}"
        self._end(
            f"a thread of hvdlab failed in this process ({what}), which is a fault of hvdlab's; save what you need and restart it"
        )

    def _end(self, text: str) -> None:
        logs.lost(self._guarded.state.rank, text)
        self.lose(Cause(CauseKind.COORDINATOR_LOST, (), text))
        self.world.lost(text)
        self.mailbox.leave(m.Leave(text))

    def lose(self, cause: Cause) -> None:
        """Fail everything pending. On the control thread, or on the thread that closes the engine after that one's end."""
        effects = self._guarded.lose(cause)
        self._tickets.abort()
        self.perform(effects)
