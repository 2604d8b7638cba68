"""The engine: one rank's connection to the coordinator, with its control and executor threads."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from hvdlab.collectives import logs
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.dtypes import DType, OpKind
from hvdlab.collectives.engine.affinity import bind
from hvdlab.collectives.engine.control import Control
from hvdlab.collectives.engine.direct import Direct
from hvdlab.collectives.engine.dispatch import Dispatcher
from hvdlab.collectives.engine.executor import Executor
from hvdlab.collectives.engine.exports import Exports
from hvdlab.collectives.engine.groups import Groups
from hvdlab.collectives.engine.guarded import GuardedState
from hvdlab.collectives.engine.handle import Handle
from hvdlab.collectives.engine.hooks import Hooks
from hvdlab.collectives.engine.hosts import host_key
from hvdlab.collectives.engine.leading import Leader
from hvdlab.collectives.engine.leaving import settle
from hvdlab.collectives.engine.outcomes import BatchOutcomes
from hvdlab.collectives.engine.reconnecting import Reconnecting
from hvdlab.collectives.engine.regrouping import Regrouping
from hvdlab.collectives.engine.request import PendingCollective, Request, Result
from hvdlab.collectives.engine.spans import SpanLog
from hvdlab.collectives.engine.state import RankState
from hvdlab.collectives.engine.subscribing import Subscription
from hvdlab.collectives.engine.timeline import TimelineTap
from hvdlab.collectives.engine.waiting import Waiter
from hvdlab.collectives.errors import Cause, CauseKind, CollectiveError, NotInitializedError
from hvdlab.collectives.metrics.of_rank import sampler_of_rank
from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import KeyValue, Phases
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.protocol.handshake import connect, own_versions
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.text import call_site

_monotonic_ns = time.monotonic_ns


class Engine(Groups):
    """One rank of a world. Made by :meth:`connect`; safe to use from any thread unless said otherwise.

    Attributes:
        rank: This rank.
        settings: The settings that the rank was started with.
        recorder: Spans and metrics of this rank.
        failed_cells: How many cells (or attempts of elastic training) have ended here with an error, so that bindings can
            drop what one left half done.
        cells_begun: How many cells have begun here.
        elastic: This rank's part in elastic training.
        exports: The exports that hand this rank's metrics, or those of all ranks, to exporters.
        farewell: Why this rank leaves; the coordinator passes it to the other ranks when it does.
        hooks: Completion hooks that are due.
        interrupt_held_in: The number, as ``cells_begun`` counts, of the cell in which an interrupt came that can't be raised, as
            native code waits for the one that would raise it; that code's collectives are to be withdrawn. 0 for none.
        sent_through_native: The latest errors of collectives that bindings passed to a framework's native code, which keeps
            their text and not their type.
    """

    def __init__(self, settings: Settings, endpoint: Endpoint, rank: int, generation: int = 0) -> None:
        self.hooks = Hooks(rank, self._wake)
        guarded = GuardedState(rank, endpoint, self._wake, self.hooks, settings.cache_capacity)
        super().__init__(rank, settings, guarded)
        self.failed_cells = self.cells_begun = self.interrupt_held_in = 0
        self.farewell = "shutdown"
        self.sent_through_native: deque[CollectiveError] = deque(maxlen=8)
        self._spans = SpanLog(rank, settings.record, remote=endpoint.secure)
        self.recorder = self._spans.recorder
        self._endpoint = endpoint
        self._submit = guarded.submit
        self._closed = threading.Event()
        outcomes = BatchOutcomes(guarded, self._spans, lambda: self._dispatcher.schedule_events())
        self._executor = Executor(outcomes, self.hooks, str(rank))
        self._dispatcher = Dispatcher(
            guarded, endpoint, self._executor, self._spans, self.hooks, settings.address
        )
        self._control = self._dispatcher.control = Control(endpoint, self._dispatcher, str(rank))
        hello = introduction(settings, rank)
        self._reconnecting = Reconnecting(
            settings, hello, generation, self._dispatcher, self._control, self._may_return
        )
        self._leader = Leader(guarded, endpoint, self._control, self._executor)
        self._direct = Direct(guarded, self._executor, self._spans, self._dispatcher.schedule_events)
        self._waiter = Waiter(rank, guarded, self._leader, self._executor, self.hooks, self._direct)
        self.wait_for = self._waiter.wait_for
        subscription = Subscription(self._dispatcher)
        self._timeline = TimelineTap(subscription)
        self.exports = Exports(self._dispatcher, subscription)
        self.elastic = Regrouping(rank, guarded, self._dispatcher.world)
        _engines.add(self)
        self._control.start()
        self._control.call(self._dispatcher.ask_clock)
        interval = settings.metrics_interval if settings.record else 0.0
        self._sampler = sampler_of_rank(self.metric, interval, rank)

    @classmethod
    def connect(cls, settings: Settings, *, timeout: float | None = None) -> Engine:
        """Connect to the coordinator as a rank. Does not wait for other ranks.

        Args:
            settings: Where the coordinator is, and all else that the engine goes by.
            timeout: Seconds that connecting may take; ``None`` for ``settings.start_timeout``.

        Raises:
            NotInitializedError: The settings name no coordinator.
            StartError: No coordinator answers there, or it refused this rank.
        """
        if settings.coordinator is None:
            raise NotInitializedError("HVDLAB_COORDINATOR")
        logs.set_up(settings.log_level, hide_time=settings.log_hide_time)
        hello = introduction(settings, settings.rank)
        deadline = Deadline(settings.start_timeout if timeout is None else timeout)
        endpoint, welcome = connect(
            settings.coordinator,
            hello,
            certificate=settings.certificate,
            deadline=deadline,
            dead_after=settings.dead_after,
        )
        return cls(settings, endpoint, welcome.rank, welcome.generation)

    def _wake(self) -> None:
        self._control.wake()

    def _may_return(self) -> bool:
        """Whether this rank can come back when the others have gone on without it, since there is a point at which it takes part again.

        That is where training begins again, or the next cell. A script does not say where its collectives belong.
        """
        return self.settings.cells_tracked or self._guarded.state.elastic

    # -- the world ------------------------------------------------------------------------------------------------

    def wait_for_world(self, timeout: float) -> None:
        """Wait until all expected ranks are members of the world.

        Raises:
            StartError: Some are not there after ``timeout`` seconds, or have died before; the text names them.
        """
        settings = self.settings
        self._dispatcher.world.wait_complete(timeout, self.rank, settings.elastic_timeout, settings.size or 0)
        if settings.thread_affinity:
            bind(settings.thread_affinity, self.local_rank, [self._control.thread, *self._executor.threads])
        self._begin_mpi()

    def on_world(self, callback: Callable[[], None]) -> None:
        """Call this on the control thread when ranks of the world have come, left or died; it must not block."""
        self._dispatcher.world.watchers.append(lambda world: callback())

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that live, as far as is known; one that has died or left may be in a process set for a moment yet."""
        return self._dispatcher.world.alive

    def death_of(self, rank: int) -> str:
        """How a rank has ended, as far as is known; empty if it lives, or has left in order."""
        last = self._dispatcher.world.last
        deaths = last.deaths if last is not None else ()
        return next((death.reason for death in deaths if death.rank == rank), "")

    def world_store(self) -> KeyValue:
        """Values that the members of the world exchange in its present epoch; see :meth:`wait_for_world`."""
        return self._dispatcher.store(0, self._guarded.state.sets[0].epoch)

    def _begin_mpi(self) -> None:
        """Load MPI if the world uses it: loading waits for all of MPI's processes, and later only some ranks might do it."""
        world = self._guarded.state.sets.get(0)
        if world is None or world.plane not in ("mpi", "hierarchical"):
            return
        if all("mpi" in member.planes for member in world.members):
            registry.why_unavailable("mpi")  # why MPI can't be loaded is said by the first collective

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

    def submit(self, request: Request, *, announce: bool = True, at_once: bool = False) -> Handle:
        """Submit a collective and return at once.

        The control thread announces it, or the next wait or :meth:`flush` if that is sooner, together with all that was
        submitted by then. Without ``announce`` only such a wait or :meth:`flush` announces it, or the next submission.

        Args:
            request: What to do, and with which tensor.
            announce: Whether the control thread is woken to announce it.
            at_once: Whether the caller waits for it next: the control thread is not woken then, and the wait may go the direct way.

        Raises:
            InvalidRequestError: It is wrong on this rank alone; nothing was sent.
            DuplicateNameError: The name is in flight on this rank; every rank's pending one fails.
            AbortedError: The coordinator is lost, or elastic training has to begin again.
            NotInitializedError: The engine is closed.
        """
        handle = Handle(self, request, request.site or call_site(2), _monotonic_ns())
        self._submit(handle)
        if at_once:
            handle.at_once = self.settings.direct
        elif announce:
            self._guarded.want_flush()
        return handle

    def run(self, request: Request, timeout: float | None = None) -> Result:
        """Submit, announce at once and wait: the quick way for one blocking collective. Raises what ``wait`` does."""
        self.hooks.refuse_to_wait()
        handle = Handle(self, request, request.site or call_site(2), _monotonic_ns())
        try:
            if timeout is not None or not self.settings.direct or not self._direct.run(handle):
                self._submit(handle)
            return handle.wait(timeout)
        except KeyboardInterrupt:
            self._waiter.abandon(handle)
            raise

    def join(self, process_set: int = 0) -> int:
        """Take part with zeros in what the other members do, until all have joined.

        The other members need not wait for this rank any more: allreduces with SUM or AVERAGE (which still divides by all
        members) and barriers go on without its call. Other collectives fail with ``JoinedRanksError`` on the ranks that
        submit them.

        Returns:
            The rank that joined last; the same on all.

        Raises:
            AbortedError: A member died, left, failed or was interrupted before all had joined.
        """
        return self.run(Request(OpKind.JOIN, process_set=process_set)).last_joined

    def submit_group(self, requests: Sequence[Request], *, announce: bool = True) -> list[Handle]:
        """Submit the tensors of a group. If one is refused, the others are withdrawn. Raises what ``submit`` does."""
        now, site = _monotonic_ns(), call_site(2)
        handles = [Handle(self, request, request.site or site, now) for request in requests]
        submitted = 0
        try:
            for handle in handles:
                self._submit(handle)
                submitted += 1
        except BaseException:
            if submitted:  # those would wait for ever for the rest of their group
                self._guarded.withdraw(handles[0], CauseKind.WITHDRAWN, "a tensor of its group was refused")
            raise
        if announce:
            self._guarded.want_flush()
        return handles

    def flush(self) -> None:
        """Announce what was submitted by now, without waiting for it."""
        self._guarded.flush_direct()

    def withdraw(self, text: str, process_set: int = 0, kind: CauseKind = CauseKind.WITHDRAWN) -> None:
        """Give up on everything pending in a process set: it fails on all ranks with ``text``; the set goes on."""
        self._dispatcher.withdraw(process_set, text, kind)

    def tell_blocked(self, handle: Handle, seconds: float) -> None:
        """See :meth:`Handle.tell_blocked`. Any thread; does not wait."""
        self._guarded.tell(lambda state: state.blocked(handle, seconds))

    def tell_unblocked(self, handle: Handle) -> None:
        """See :meth:`Handle.tell_unblocked`. Any thread; does not wait."""
        self._guarded.tell(lambda state: state.unblocked(handle))

    def pending(self) -> list[PendingCollective]:
        """Return the collectives in flight on this rank, oldest first. Any thread, also while others are stuck."""
        return self._guarded.pending(_monotonic_ns())

    # -- looking around -------------------------------------------------------------------------------------------

    def pause(self, reason: str = "being looked at") -> None:
        """The user looks around in this rank: until :meth:`resume` no clock of a stall runs on any rank, and the coordinator
        says to no rank that it waits in vain for this one.

        May be called again for another reason before that. Any thread; does not wait.
        """
        self._guarded.tell(lambda state: state.paused((*state.memory.paused, reason)))

    def resume(self, reason: str = "being looked at") -> None:
        """End the pause that :meth:`pause` began for this reason; without one nothing happens. Any thread; does not wait."""

        def resume(state: RankState) -> None:
            left = list(state.memory.paused)
            if reason in left:
                left.remove(reason)
                state.paused(tuple(left))

        self._guarded.tell(resume)

    @property
    def paused(self) -> str:
        """Why the user looks around here, as it reads after ``rank 3 is``; empty if the rank is not paused."""
        reasons = self._guarded.state.memory.paused
        return reasons[-1] if reasons else ""

    # -- metrics --------------------------------------------------------------------------------------------------

    def metric(self, name: str, value: float, step: int | None = None, time_ns: int | None = None) -> None:
        """Record a number and see to it that it is sent; ``time_ns`` is when it was measured, by default now."""
        self.recorder.metric(name, value, step, time_ns)
        self._dispatcher.schedule_events()

    def introduce_group(self, group: int) -> None:
        """Let the timeline know that each request of this group is one rank's alone; see :meth:`record_request`."""
        self._spans.members(group, 0, 1)

    def record_request(
        self,
        name: str,
        site: str,
        kind: OpKind,
        dtype: DType,
        group: int,
        sequence: int,
        batch: int,
        nbytes: int,
        times: tuple[int, int, int],
        phases: Phases,
        ok: bool,
    ) -> None:
        """Record what was asked of a parameter server, and see to it that it is sent.

        The arguments are those of :meth:`~hvdlab.collectives.engine.spans.SpanLog.request`.
        """
        if self._spans.request(name, site, kind, dtype, group, sequence, batch, nbytes, times, phases, ok):
            self._dispatcher.schedule_events()

    # -- cells and mail -------------------------------------------------------------------------------------------

    def begin_cell(self, cell: str) -> None:
        """A cell begins to run here."""
        self.cells_begun += 1
        self._dispatcher.lacking.look()  # the cell before may have closed what was open
        self.recorder.cell_begin(cell)
        self._guarded.tell(lambda state: state.begin_cell(cell))

    def hold_interrupt(self) -> None:
        """The running cell is interrupted, and native code that must not be left by an exception is in the way.

        Bindings withdraw what that code waits for from now on; :meth:`end_native_waits` has them withdraw what it waits for
        already. Called by a signal's handler, so it takes no lock.
        """
        self.interrupt_held_in = self.cells_begun

    def interrupt_is_held(self) -> bool:
        """Whether :meth:`hold_interrupt` was called in the running cell. Any thread."""
        return self.interrupt_held_in == self.cells_begun > 0

    def end_native_waits(self) -> None:
        """Have bindings withdraw the collectives that native code may be waiting for. Any thread; does not wait."""
        self._control.call(self._dispatcher.mailbox.end_native_waits)

    def end_cell(self, cell: str, error: str | None = None) -> None:
        """A cell ended here; ``error`` is one line that says how it failed."""
        self.failed_cells += error is not None
        self.recorder.cell_end(cell, error is None)
        self._guarded.tell(lambda state: state.end_cell(cell, error or ""))
        self._dispatcher.schedule_events()

    def post(self, topic: str, body: bytes, to: Sequence[int] | None = None) -> None:
        """Send mail to ranks, or to all clients if ``to`` is ``None``. Silently lost if the coordinator is gone."""
        self._dispatcher.send(m.Post(topic, body, tuple(to or ())))

    def on_mail(self, topic: str, callback: Callable[[int, bytes], None]) -> None:
        """Call ``callback(sender, body)`` on the control thread; it must not block. Sender -1 is a client."""
        self._dispatcher.mailbox.on(topic, callback)

    def on_interrupt(self, callback: Callable[[], None]) -> None:
        """Call this on the control thread when the notebook interrupts this rank."""
        self._dispatcher.mailbox.interrupts.append(callback)

    def on_native_waits(self, callback: Callable[[], None]) -> None:
        """Call this on the control thread to withdraw collectives that native code may be waiting for, without Python's lock.

        That is when the notebook interrupts this rank, and again for an interrupt that is held (:meth:`hold_interrupt`).
        """
        self.on_interrupt(callback)
        self._dispatcher.mailbox.native_waits.append(callback)

    def on_leave(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` on the control thread when this rank is to leave.

        That is also when the coordinator is lost and has no successor. If it has happened already, this calls the callback.
        """
        self._dispatcher.mailbox.on_leave(callback)

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        """Call this on the control thread when this rank has found the coordinator's successor.

        Mail that was on its way when the coordinator died may be lost; mail that this rank posted since then has been sent.
        """
        self._dispatcher.mailbox.reconnections.append(callback)

    @property
    def waits_for_successor(self) -> bool:
        """Whether a coordinator that was lost may be replaced, or has been."""
        return self.settings.reattach > 0 and self._guarded.state.lost is None

    @property
    def generation(self) -> int:
        """How many coordinators have died before the one that this rank is connected to."""
        return self._reconnecting.generation

    # -- timeline -------------------------------------------------------------------------------------------------

    def start_timeline(self, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Write the events of all ranks to a Chrome trace from now on.

        Raises:
            InvalidRequestError: One is being written already.
            OSError: The file can't be created.
        """
        self._timeline.start(path, mark_cycles)

    def stop_timeline(self) -> None:
        """Complete the file, with what every rank has recorded by now. Raises ``OSError`` if the disk failed."""
        self._timeline.stop()

    # -- end ------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self, timeout: float = 5.0) -> None:
        """Leave the world in order and end all threads. Idempotent.

        What is executing is finished first. Handles in flight then fail, on the other ranks as well.

        Raises:
            InvalidRequestError: A completion hook calls it.
        """
        if self._closed.is_set():
            return
        self.hooks.refuse_to_wait()
        self._guarded.unusable = NotInitializedError("the engine of this rank")
        if self._sampler is not None:
            self._sampler.close(timeout)
        on_control = threading.current_thread() is self._control.thread
        settle(self._guarded, self.rank, self.farewell, None if on_control else Deadline(timeout))
        self._timeline.stop()
        self.exports.close(timeout)
        self._closed.set()
        self._reconnecting.cancel(timeout)
        self._control.call(self._say_bye)
        self._control.stop(timeout)
        self._dispatcher.lose(Cause(CauseKind.SHUTDOWN, (self.rank,), f"rank {self.rank} shut down"))
        self._executor.close(timeout)
        self.hooks.run()
        self._leader.close()
        self._control.close()
        _engines.discard(self)

    def _say_bye(self) -> None:
        self._dispatcher.send_events()
        self._guarded.post(m.Bye(self.farewell))

    def _after_fork(self) -> None:
        self._closed.set()
        self.hooks.after_fork()
        self._guarded.after_fork(NotInitializedError("a rank's engine in a forked process"))
        self._control.after_fork()


def introduction(settings: Settings, rank: int) -> m.Hello:
    """The message that a rank sends first on a new connection."""
    return m.Hello(
        m.PROTOCOL_VERSION,
        settings.token,
        "rank",
        rank,
        host_key(),
        os.getpid(),
        settings.address,
        # MPI and NCCL make connections of their own; the coordinator can't know whether those are encrypted.
        tuple(
            plane
            for plane in registry.offered(settings.plane)
            if plane not in ("mpi", "cuda/nccl") or not settings.require_encryption
        ),
        settings.plane,
        settings.cells_tracked,
        versions=own_versions(),
    )


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _forked() -> None:
    # Two processes on one connection would be one rank that says everything twice.
    for engine in list(_engines):
        engine._after_fork()
    _engines.clear()


os.register_at_fork(after_in_child=_forked)
