"""Engine: one rank's connection to the coordinator, with its control and executor threads."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from hvdlab.collectives.engine.control_thread import Control, ControlHandlers
from hvdlab.collectives.engine.coordinator_bypass import CoordinatorBypass
from hvdlab.collectives.engine.entries import EXECUTING, BoardEntry, CompletionHooks, Handle
from hvdlab.collectives.engine.executor import Executor
from hvdlab.collectives.engine.inline_execution import HandleWaiter, InlineExecutor
from hvdlab.collectives.engine.locked_state import BatchOutcomes, LockedState
from hvdlab.collectives.engine.process_set_view import PostedRequest, device_plane_names
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import PendingCollective, Request, Result
from hvdlab.collectives.engine.span_log import SpanLog
from hvdlab.collectives.engine.telemetry import MetricExports, Subscription, TimelineTap
from hvdlab.collectives.engine.world_view import ElasticMembership
from hvdlab.collectives.errors import Cause, CauseKind, CollectiveError, NotInitializedError
from hvdlab.collectives.failover.rank_reconnect import RankReconnect
from hvdlab.collectives.metrics.sampler import sample_rank
from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import HostArray, KeyValue, Links, PhaseTimes, plane_text
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.protocol.handshake import connect, own_versions
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.system import HostPosition, bind_threads, host_key, host_position
from hvdlab.collectives.text import call_site, set_up_log
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.types import DType, OpKind, ReduceOp

_monotonic_ns = time.monotonic_ns


class Engine:
    """Engine of one rank of a world. Made by :meth:`connect`; safe to use from any thread unless a method names one.

    Attributes:
        rank: This rank.
        settings: The settings that the rank was started with.
        recorder: Spans and metrics of this rank.
        failed_cells: How many cells (or attempts of elastic training) have ended here with an error, so that bindings can
            drop their unfinished work.
        closed: Whether :meth:`close` has got past its operations, or this is a forked child.
        cells_begun: How many cells have begun here.
        elastic: This rank's part in elastic training.
        exports: The exports that hand this rank's metrics, or those of all ranks, to exporters.
        farewell: Why this rank leaves; the coordinator passes it to the other ranks when it does.
        hooks: Completion hooks that are due.
        interrupt_held_in: The number, as ``cells_begun`` counts, of the cell in which an interrupt came that can't be raised, as
            native code waits for the one that would raise it; that code's collectives are to be withdrawn. 0 for none.
        sent_through_native: The latest errors of collectives that bindings passed to a framework's native code, which keeps
            their text and not their type.
        wait_for: As :meth:`HandleWaiter.wait_for`.
    """

    def __init__(self, settings: Settings, endpoint: Endpoint, rank: int, incarnation: int = 0) -> None:
        self._control = Control(endpoint, str(rank))
        self.hooks = CompletionHooks(rank, self._control)
        locked = LockedState(rank, endpoint, self._control, self.hooks, settings.cache_capacity)
        self.rank, self.settings = rank, settings
        self._locked = locked
        #: Position on the host in a generation of the world; computed again once that has changed.
        self._place: tuple[int, HostPosition] | None = None
        self.failed_cells = self.cells_begun = self.interrupt_held_in = 0
        self.farewell = "shutdown"
        self.sent_through_native: deque[CollectiveError] = deque(maxlen=8)
        self._spans = SpanLog(rank, settings.record, remote=endpoint.secure)
        self.recorder = self._spans.recorder
        self._endpoint = endpoint
        #: A bound method, looked up once: it is called for every tensor.
        self._submit = locked.submit
        self.closed = False
        #: The thread in the middle of :meth:`close`, or that was interrupted there; 0 for none.
        self._closer = 0
        outcomes = BatchOutcomes(locked, self._spans)
        self._executor = Executor(outcomes, self.hooks, str(rank))
        self._handlers = ControlHandlers(
            locked, endpoint, self._executor, self._spans, self.hooks, settings.address, self._control
        )
        hello = introduction(settings, rank)
        #: Finds a successor after the loss of the coordinator.
        self._reconnecting = RankReconnect(settings, hello, incarnation, self._handlers, self._control)
        self._inline = InlineExecutor(locked, endpoint, self._control, self._executor)
        self._bypass = CoordinatorBypass(locked, self._executor, self._spans)
        self._waiter = HandleWaiter(rank, locked, self._inline, self._executor, self.hooks, self._bypass)
        self.wait_for = self._waiter.wait_for
        subscription = Subscription(self._handlers)
        #: The timeline file, if this rank writes one.
        self._timeline = TimelineTap(subscription)
        self.exports = MetricExports(self._handlers, subscription)
        self.elastic = ElasticMembership(rank, locked, self._handlers.world)
        # The thread starts last: its handlers use all the parts above.
        # Before the thread starts: a process that is forked from here on must not go on with this connection.
        _engines.add(self)
        self._control.start(self._handlers)
        self._control.call(self._handlers.ask_clock)
        interval = settings.metrics_interval if settings.record else 0.0
        #: Samples the resources of this process; ``None`` if it is switched off.
        self._sampler = sample_rank(self.metric, interval, rank)

    @classmethod
    def connect(cls, settings: Settings, *, timeout: float | None = None) -> Engine:
        """Connect to the coordinator as a rank. Does not wait for other ranks.

        Args:
            settings: The address of the coordinator, and all other settings of the engine.
            timeout: Seconds for connecting; ``None`` for ``settings.start_timeout``.

        Raises:
            NotInitializedError: The settings name no coordinator.
            StartError: No coordinator answers there, or it refused this rank.
        """
        if settings.coordinator is None:
            raise NotInitializedError("HVDLAB_COORDINATOR")
        set_up_log(settings.log_level, hide_time=settings.log_hide_time)
        hello = introduction(settings, settings.rank)
        deadline = Deadline(settings.start_timeout if timeout is None else timeout)
        endpoint, welcome = connect(
            settings.coordinator,
            hello,
            certificate=settings.certificate,
            deadline=deadline,
            dead_after=settings.dead_after,
        )
        return cls(settings, endpoint, welcome.rank, welcome.incarnation)

    # -- the world ------------------------------------------------------------------------------------------------

    def wait_for_world(self, timeout: float) -> None:
        """Wait until all expected ranks are members of the world.

        Raises:
            StartError: Some are not there after ``timeout`` seconds, or have died before; the text names them.
        """
        settings = self.settings
        self._handlers.world.wait_complete(timeout, self.rank, settings.elastic_timeout, settings.size or 0)
        if settings.thread_affinity:
            bind_threads(
                settings.thread_affinity, self.local_rank, [self._control.thread, *self._executor.threads]
            )
        self._begin_mpi()

    def on_world(self, callback: Callable[[], None]) -> None:
        """Call this on the control thread when ranks of the world have come, left or died; it must not block."""
        self._handlers.world.watchers.append(lambda world: callback())

    @property
    def living(self) -> tuple[int, ...]:
        """Return the ranks that live, as far as this rank knows. A process set can still contain a dead one for a moment."""
        return self._handlers.world.alive

    def death_of(self, rank: int) -> str:
        """Return how a rank has ended, as far as this rank knows; empty if it lives, or has left in order."""
        last = self._handlers.world.last
        deaths = last.deaths if last is not None else ()
        return next((death.reason for death in deaths if death.rank == rank), "")

    def world_store(self) -> KeyValue:
        """Return the store of values that the members of the world exchange in its present generation; see :meth:`wait_for_world`."""
        return self._handlers.store(0, self._locked.state.sets[0].generation)

    def first_store(self) -> KeyValue:
        """Return the store of the generation with which the world began: its members meet there also if one learns of the next before."""
        present = self._locked.state.sets[0].generation
        return self._handlers.store(0, self._handlers.world.first_generation or present)

    def _begin_mpi(self) -> None:
        """Load MPI if the world uses it: loading waits for all of MPI's processes, and later perhaps only some ranks load it."""
        world = self._locked.state.sets.get(0)
        if world is None or world.plane not in ("mpi", "hierarchical"):
            return
        if all("mpi" in member.planes for member in world.members):
            registry.why_unavailable("mpi")  # the first collective reports why MPI can't be loaded

    # -- process sets ---------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Return the number of living members of the world."""
        return len(self.ranks()) or 1

    def ranks(self, process_set: int = 0) -> tuple[int, ...]:
        """Return the ranks of a process set's members, by position; empty if this rank does not know it."""
        group = self._locked.state.sets.get(process_set)
        return group.ranks if group is not None else ()

    def generation(self) -> int:
        """Return the world's generation: as long as it is the same, so are the world's members."""
        group = self._locked.state.sets.get(0)
        return group.generation if group is not None else -1

    @property
    def failure(self) -> Cause | None:
        """Return the cause with which all submissions of this rank fail until the ranks of elastic training restart, or ``None``."""
        return self._locked.state.failure

    def processes(self) -> tuple[int, tuple[tuple[int, str, int], ...]]:
        """Return the world's generation, and its members' processes as (rank, host, process id). A rank that was replaced has another process."""
        group = self._locked.state.sets.get(0)
        if group is None:
            return -1, ()
        return group.generation, tuple((member.rank, member.host, member.pid) for member in group.members)

    def plane(self, process_set: int = 0) -> str:
        """Return the name of the data plane of a process set; empty if this rank does not know it."""
        group = self._locked.state.sets.get(process_set)
        return group.plane if group is not None else ""

    def plane_text(self, process_set: int = 0) -> str:
        """Return the data plane, with the size of its chunks once that was measured: ``shm in chunks of 512 KiB``."""
        group = self._locked.state.sets.get(process_set)
        return plane_text(group.plane, group.chunk_bytes) if group is not None else ""

    def device_plane(self, process_set: int, device: str) -> str:
        """Return the name of the data plane for tensors on a device class; empty if there is none: stage them through the host.

        The next generation has perhaps no such plane, if it has other members; requests that were submitted for it then fail with
        ``InvalidRequestError`` on all ranks.
        """
        group = self._locked.state.sets.get(process_set)
        return group.device_planes.get(device, "") if group is not None else ""

    def device_planes(self, process_set: int = 0) -> tuple[str, ...]:
        """Return the names of the data planes for tensors that are not on the host, as they are shown.

        An empty name stands for one that was given up: the tensors are copied through the host.
        """
        group = self._locked.state.sets.get(process_set)
        return device_plane_names(group) if group is not None else ()

    def links(self, process_set: int = 0) -> Links:
        """Return the connections to the GPUs of the other ranks; empty until these have joined the plane for CUDA tensors."""
        group = self._locked.state.sets.get(process_set)
        return group.links if group is not None else {}

    def planes(self, process_set: int = 0) -> tuple[str, ...]:
        """Return the data plane, or the parts of the hierarchical one: the plane within hosts and that between them."""
        group = self._locked.state.sets.get(process_set)
        if group is None:
            return ()
        if group.plane != "hierarchical":
            return (group.plane,)
        return group.options.get("inner", "shm"), group.options.get("outer", "gloo")

    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of the process sets that this rank knows, by id."""
        # Copied in one step of the interpreter: the control thread adds and removes sets, and this thread has no lock.
        return {id: group.ranks for id, group in dict(self._locked.state.sets).items()}

    def knows_process_set(self, process_set: int) -> bool:
        """Return whether a process set that was added still exists, with or without this rank.

        One that was being added or removed when the coordinator died can vanish once a successor has restored the world.
        """
        return process_set in self._locked.state.failover.sets

    def added_process_sets(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each added process set that still exists, by id; also of those without this rank."""
        return dict(self._locked.state.failover.sets)

    @property
    def local_rank(self) -> int:
        """Return the position among the ranks of this host."""
        given = self.settings.local_rank
        return self._where().local_rank if given is None else given

    def local_rank_in(self, process_set: int) -> int:
        """Return the position among those ranks of this host that are in a process set to which this rank belongs."""
        group = self._locked.state.sets[process_set]
        return host_position(self.rank, group.ranks, [member.host for member in group.members]).local_rank

    @property
    def local_size(self) -> int:
        """Return the number of living ranks of this host."""
        return self._where().local_size

    @property
    def cross_rank(self) -> int:
        """Return the position among the hosts that have a rank with this local rank."""
        given = self.settings.cross_rank
        return self._where().cross_rank if given is None else given

    @property
    def cross_size(self) -> int:
        """Return the number of hosts that have a rank with this local rank."""
        return self._where().cross_size

    def _where(self) -> HostPosition:
        group = self._locked.state.sets.get(0)
        if group is None or group.index < 0:
            return HostPosition(0, 1, 0, 1)
        # Any thread comes here without a lock, so generation and position are one object: no thread reads one of each world.
        if self._place is None or self._place[0] != group.generation:
            hosts = [member.host for member in group.members]
            self._place = (group.generation, host_position(self.rank, group.ranks, hosts))
        return self._place[1]

    def add_process_set(self, ranks: Sequence[int], timeout: float | None = None) -> int:
        """Add a process set of these ranks, and return its id. Every rank of the world calls it alike."""
        # In one order on all ranks: the name, by which the coordinator matches the requests, is made of it.
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

        The control thread announces it, or the next wait or :meth:`flush` if that is sooner, together with all requests
        that were submitted by then. Without ``announce`` only such a wait or :meth:`flush` announces it, or the next submission.

        Args:
            request: The request.
            announce: Whether the control thread is woken to announce it.
            at_once: Whether the caller waits for it next: the control thread is not woken then, and the wait can bypass the coordinator.

        Raises:
            InvalidRequestError: It is wrong on this rank alone; nothing was sent.
            DuplicateNameError: The name is in flight on this rank; every rank's pending one fails.
            AbortedError: The coordinator is lost, elastic training has to restart, or the process set has lost a member since the last
                submission.
            NotInitializedError: The engine is closed.
        """
        handle = Handle(self, request, request.site or call_site(2), _monotonic_ns())
        if self.hooks.inside and self.hooks.run_here:
            request.internal = True  # an error of the submission would be logged, and the user's program would not learn of a loss
        self._submit(handle)
        if at_once:
            handle.at_once = self.settings.direct
        elif announce:
            self._locked.want_flush()
        return handle

    def run(self, request: Request, timeout: float | None = None) -> Result:
        """Submit, announce at once and wait: the quick way for one blocking collective. Raises as ``wait`` does."""
        # Before anything is submitted: a refusal must leave nothing in flight.
        self.hooks.refuse_to_wait()
        return self._run(Handle(self, request, request.site or call_site(2), _monotonic_ns()), timeout)

    def _run(self, handle: Handle, timeout: float | None) -> Result:
        try:
            if timeout is not None or not self.settings.direct or not self._bypass.run(handle):
                self._submit(handle)
            return handle.wait(timeout)
        except KeyboardInterrupt:
            self._waiter.withdraw_after_interrupt(handle)
            raise

    def allreduce(
        self, source: HostArray, out: HostArray, name: str | None, op: ReduceOp, process_set: int = 0
    ) -> bool:
        """Reduce an array by the shortest way, if this rank has posted such an allreduce before: without the checks of a request.

        Args:
            source: C-contiguous array in storage type, not of bfloat16.
            out: Array for the result, of the same shape and type; it may be ``source``.
            name: Tensor name, equal on all ranks; ``None`` for an anonymous one.
            op: Reduction operator. There are no scale factors.
            process_set: Id of the process set.

        Returns:
            Whether ``out`` has the result. Otherwise nothing was done, and the caller has to :meth:`run` a request.

        Raises:
            MismatchError, AbortedError, KeyboardInterrupt: As :meth:`Handle.wait`.
            InvalidRequestError: The calling thread is in a completion hook.
        """
        if self.hooks.inside:
            self.hooks.refuse_to_wait()
        # Without the lock: post_reduction() compares the board again under it.
        group = self._locked.state.sets.get(process_set)
        member = None if group is None else group.board_member
        if member is None or not self.settings.direct:
            return False
        key = name, source.dtype, source.shape, op
        try:
            reduction = member.reductions.get(key)
        except TypeError:
            return False  # a name that can't be a key is none; run() refuses it
        if reduction is None:
            known = member.plane_reductions.get(key)
            if known is None:
                return False
            self._run(Handle(self, known.with_tensors(source, out), call_site(2), _monotonic_ns()), None)
            return True
        entry = BoardEntry(reduction.request, reduction.name, call_site(2), _monotonic_ns())
        try:
            number = self._locked.post_reduction(entry, member, reduction, source)
            if not number:
                return False
            if not self._bypass.reduce(entry, member, reduction, number, out):
                self._go_on(
                    entry,
                    PostedRequest(member, number, reduction.layout.parts[number & 1]),
                    reduction.with_tensors(source, out),
                )
        except KeyboardInterrupt:
            self._waiter.withdraw_after_interrupt(entry.handle or entry)
            raise
        return True

    def _go_on(self, entry: BoardEntry, posting: PostedRequest, request: Request) -> None:
        """Wait for the end of an allreduce that was not agreed at once, or that has failed."""
        handle = Handle(self, request, entry.site, entry.submitted)
        self._bypass.hand_over(entry, handle, posting)
        handle.wait()

    def join(self, process_set: int = 0) -> int:
        """Join: contribute zeros to the collectives of the other members, until all have joined.

        The other members need not wait for this rank any more: allreduces with SUM or AVERAGE (which still divides by all
        members) and barriers continue without its call. Other collectives fail with ``JoinedRanksError`` on the ranks that
        submit them.

        Returns:
            The rank that joined last; the same on all.

        Raises:
            AbortedError: A member died, left, failed or was interrupted before all had joined.
        """
        # Without a limit in time: a join can't be taken back, as the others rely on this rank's zeros from then on.
        return self.run(Request(OpKind.JOIN, process_set=process_set)).last_joined

    def submit_group(self, requests: Sequence[Request], *, announce: bool = True) -> list[Handle]:
        """Submit the tensors of a group. If one is refused, the others are withdrawn. Raises as ``submit`` does."""
        # Once for all tensors: they come from one line of the user's, for which the stack is walked once.
        now, site = _monotonic_ns(), call_site(2)
        handles = [Handle(self, request, request.site or site, now) for request in requests]
        submitted = 0
        try:
            for handle in handles:
                self._submit(handle)
                submitted += 1
        except BaseException:
            if submitted:  # those would wait for ever for the rest of their group
                self._locked.withdraw(handles[0], CauseKind.WITHDRAWN, "a tensor of its group was refused")
            raise
        if announce:
            self._locked.want_flush()
        return handles

    def flush(self) -> None:
        """Announce all submitted requests, without waiting for them."""
        self._locked.flush_direct()

    def withdraw(self, text: str, process_set: int = 0, kind: CauseKind = CauseKind.WITHDRAWN) -> None:
        """Give up on everything pending in a process set: it fails on all ranks with ``text``; the set remains."""
        self._handlers.withdraw(process_set, text, kind)

    def acknowledge_losses(self) -> None:
        """Record that the program knows the present ranks: another error has named the lost ones, or it begins with those that live.

        Otherwise the next submission raises the loss of a rank, once, if nothing was pending when it was lost.
        """
        self._locked.change(RankState.acknowledge_losses)

    def tell_blocked(self, handle: Handle, seconds: float) -> None:
        """Report a blocked thread, as :meth:`Handle.tell_blocked` does. Any thread; does not wait."""
        self._locked.update(RankState.report_waiting, handle, seconds)

    def tell_unblocked(self, handle: Handle) -> None:
        """Report the end of that wait, as :meth:`Handle.tell_unblocked` does. Any thread; does not wait."""
        self._locked.update(RankState.report_done_waiting, handle)

    def pending(self) -> list[PendingCollective]:
        """Return the collectives in flight on this rank, oldest first. Any thread, also while others are stuck."""
        return self._locked.pending(_monotonic_ns())

    # -- pauses -------------------------------------------------------------------------------------------

    def pause(self, reason: str = "being looked at") -> None:
        """Pause this rank, in which a user inspects something, until :meth:`resume`.

        Meanwhile no clock of a stall runs on any rank, and the coordinator reports no wait for this one as stalled.

        Pauses for several reasons add up, and each has its own :meth:`resume`. Any thread; does not wait.
        """
        self._locked.update(lambda state: state.paused((*state.failover.paused, reason)))

    def resume(self, reason: str = "being looked at") -> None:
        """End the pause that :meth:`pause` began for this reason. Without effect if there is none. Any thread; does not wait."""

        def resume(state: RankState) -> None:
            left = list(state.failover.paused)
            if reason in left:
                left.remove(reason)
                state.paused(tuple(left))

        self._locked.update(resume)

    @property
    def paused(self) -> str:
        """Return the reason of the pause, as it reads after ``rank 3 is``; empty if the rank is not paused."""
        reasons = self._locked.state.failover.paused
        return reasons[-1] if reasons else ""

    # -- metrics --------------------------------------------------------------------------------------------------

    def metric(self, name: str, value: float, step: int | None = None, time_ns: int | None = None) -> None:
        """Record a number and schedule its sending; ``time_ns`` is the time of its measurement, by default now."""
        self.recorder.metric(name, value, step, time_ns)
        self._handlers.schedule_events()

    def introduce_group(self, group: int) -> None:
        """Record that each request of this group is one rank's alone, for the timeline; see :meth:`record_request`."""
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
        phases: PhaseTimes,
        ok: bool,
    ) -> None:
        """Record a request to a parameter server, and schedule the sending of the record.

        The arguments are those of :meth:`~hvdlab.collectives.engine.span_log.SpanLog.request`.
        """
        if self._spans.request(name, site, kind, dtype, group, sequence, batch, nbytes, times, phases, ok):
            self._handlers.schedule_events()

    # -- cells and mail -------------------------------------------------------------------------------------------

    def begin_cell(self, cell: str, *, announced: bool = False) -> None:
        """Begin a cell on this rank.

        Args:
            cell: The cell's id.
            announced: Whether the coordinator had the cell of the client that sent it: then this rank's own message waits for the next
                one that leaves, since it changes nothing.
        """
        # Also ends an interrupt that is held: it was for the cell before (see interrupt_is_held()).
        self.cells_begun += 1
        self._handlers.memory_retry.retry_now()  # perhaps the cell before has closed files
        self.recorder.cell_begin(cell)
        report = self._locked.change if announced else self._locked.update
        report(RankState.begin_cell, cell)

    @property
    def runs_cell(self) -> bool:
        """Return whether a cell runs here; always true for a rank without tracked cells, such as that of a script. Any thread."""
        return not self.settings.cells_tracked or bool(self.cells)

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the ids of the cells that run here. Any thread."""
        return self._locked.state.failover.cells

    def hold_interrupt(self) -> None:
        """Mark the running cell as interrupted while native code runs that must not be left by an exception.

        Bindings withdraw the collectives for which that code waits from now on; :meth:`end_native_waits` has them withdraw those
        for which it waits already. Called by a signal's handler, so it acquires no lock.
        """
        # The interrupted thread can hold any lock of this process, and would wait for itself.
        self.interrupt_held_in = self.cells_begun

    def interrupt_is_held(self) -> bool:
        """Return whether :meth:`hold_interrupt` was called in the running cell. Any thread."""
        return self.interrupt_held_in == self.cells_begun > 0

    def end_native_waits(self) -> None:
        """Call the bindings' callbacks, which withdraw the collectives that native code waits for. Any thread; does not wait."""
        self._control.call(self._handlers.callbacks.end_native_waits)

    def end_cell(self, cell: str, error: str | None = None, *, more: bool = False) -> None:
        """End a cell on this rank.

        Args:
            cell: The cell's id.
            error: One line about how it failed; None if it did not fail.
            more: Whether mail is posted right after: the message then leaves with that.
        """
        self.failed_cells += error is not None
        self.recorder.cell_end(cell, error is None)
        report = self._locked.change if more else self._locked.update
        report(RankState.end_cell, cell, error or "")
        # After the report: the coordinator has to get mail that a callback posts behind it.
        if error is not None and self._handlers.callbacks.cell_failures:
            self._control.call(lambda: self._handlers.callbacks.cell_failed(cell))
        self._handlers.schedule_events()

    def post(self, topic: str, body: bytes, to: Sequence[int] | None = None) -> None:
        """Send mail to ranks, or to all clients if ``to`` is ``None``. Silently lost if the coordinator is gone."""
        self._handlers.send(m.Post(topic, body, tuple(to or ())))

    def on_mail(self, topic: str, callback: Callable[[int, bytes], None]) -> None:
        """Call ``callback(sender, body)`` on the control thread; it must not block. Sender -1 is a client."""
        self._handlers.callbacks.on(topic, callback)

    def on_abort(self, callback: Callable[[m.Abort], None]) -> None:
        """Call this on the control thread when a generation of a process set was aborted, also if nothing was pending here; it must not block."""
        self._handlers.callbacks.aborts.append(callback)

    def on_cell_failed(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(cell)`` on the control thread when a cell has failed on this rank; it must not block.

        The coordinator gets mail that it posts after the message about the cell's end.
        """
        self._handlers.callbacks.cell_failures.append(callback)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call this on the control thread after some time; it must not block. Any thread. A closed engine calls nothing."""
        run = self._handlers.callbacks.run
        self._control.call(lambda: self._control.call_later(seconds, lambda: run(call)))

    def call_on_control(self, call: Callable[[], None]) -> None:
        """Call this on the control thread, between two messages of the coordinator; it must not block. Any thread."""
        self._control.call(lambda: self._handlers.callbacks.run(call))

    def on_interrupt(self, callback: Callable[[], None]) -> None:
        """Call this on the control thread when the notebook interrupts this rank."""
        self._handlers.callbacks.interrupts.append(callback)

    def on_native_waits(self, callback: Callable[[], None]) -> None:
        """Call this on the control thread to withdraw collectives for which native code waits without Python's lock.

        That is when the notebook interrupts this rank, and again for an interrupt that is held (:meth:`hold_interrupt`).
        """
        self.on_interrupt(callback)
        self._handlers.callbacks.native_waits.append(callback)

    def on_leave(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` on the control thread when this rank is to leave.

        That is also when the coordinator is lost and has no successor. If it has happened already, this calls the callback.
        """
        self._handlers.callbacks.on_leave(callback)

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        """Call this on the control thread when this rank has found the coordinator's successor.

        Mail that was on its way when the coordinator died is perhaps lost; mail that this rank posted since then has been sent. The successor
        keeps mail for ranks that come later.
        """
        self._handlers.callbacks.reconnections.append(callback)

    @property
    def waits_for_successor(self) -> bool:
        """Return whether a lost coordinator can still be replaced, or has been."""
        return self.settings.reattach > 0 and self._locked.state.lost is None

    @property
    def incarnation(self) -> int:
        """Return how many coordinators have died before the one that this rank is connected to."""
        return self._reconnecting.incarnation

    # -- timeline -------------------------------------------------------------------------------------------------

    def start_timeline(self, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Write the events of all ranks to a Chrome trace from now on.

        Raises:
            InvalidRequestError: One is being written already.
            OSError: The file can't be created.
        """
        self._timeline.start(path, mark_cycles)

    def stop_timeline(self) -> None:
        """Complete the file, with the events that every rank has recorded by now. Raises ``OSError`` if the disk failed."""
        self._timeline.stop()

    # -- end ------------------------------------------------------------------------------------------------------

    def close(self, timeout: float = 5.0) -> None:
        """Leave the world in order and end all threads. Idempotent; a thread that was interrupted in it finishes it by another call.

        Operations that execute are finished first. Handles in flight then fail, on the other ranks as well.

        Raises:
            InvalidRequestError: A completion hook calls it.
            OSError: The timeline file could not be written; the rank has left all the same.
        """
        # Another thread closes it, or all is done. The thread that was interrupted halfway begins again: each step can be repeated.
        if self.closed and self._closer != threading.get_ident():
            return
        self.hooks.refuse_to_wait()
        # The order is an argument. Submissions are refused first, so that _drain() finds an end. Consumers of events close while the
        # control thread still serves them. The goodbye is its last call. Handles that are left fail before the planes close, and hooks
        # run after the last handle has ended. Descriptors are freed once no thread can use them.
        self._locked.unusable = NotInitializedError("the engine of this rank")
        if self._sampler is not None:
            self._sampler.close(timeout)
        on_control = threading.current_thread() is self._control.thread
        _drain(self._locked, self.rank, self.farewell, None if on_control else Deadline(timeout))
        try:
            self._timeline.stop()
            self.exports.close(timeout)
        finally:  # also if the disk failed: the other ranks must not wait for this one
            self._leave(timeout)

    @property
    def leaving(self) -> bool:
        """Return whether :meth:`close` has begun, or this is a forked child: nothing can be submitted any more."""
        return self._locked.unusable is not None

    def _leave(self, timeout: float) -> None:
        """Take leave of the coordinator, and end all threads."""
        self._closer = threading.get_ident()  # before the mark, which alone would end the next call at once
        self.closed = True
        self._reconnecting.cancel(timeout)
        self._control.call(self._say_bye)
        self._control.stop(timeout)
        self._handlers.fail_pending(Cause(CauseKind.SHUTDOWN, (self.rank,), f"rank {self.rank} shut down"))
        self._executor.close(timeout)
        self.hooks.run()
        self._inline.close()
        self._control.close()
        _engines.discard(self)
        self._closer = 0

    def _say_bye(self) -> None:
        self._handlers.send_events()  # in front of the goodbye: the coordinator reads nothing behind it
        self._locked.queue_message(m.Bye(self.farewell))

    def _after_fork(self) -> None:
        self.closed = True
        self.hooks.after_fork()
        self._locked.after_fork(NotInitializedError("a rank's engine in a forked process"))
        self._control.after_fork()


def introduction(settings: Settings, rank: int) -> m.Hello:
    """Return the message that a rank sends first on a new connection."""
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
        # Ranks send each other functions and objects, which another Python, torch or hvdlab may not understand: the coordinator refuses such ranks.
        versions=own_versions(),
    )


def _drain(locked: LockedState, rank: int, why: str, deadline: Deadline | None) -> None:
    """Wait for the operations that are executing, then give up all other entries, on all ranks.

    A rank that leaves finishes its operations, since the other members are in the middle of them, too. Perhaps the coordinator is
    ordering an announced entry at this very moment, and other ranks would then wait for this one in the plane. So announced
    entries are given up, too. Nothing may be submitted meanwhile.

    Args:
        locked: The rank's state.
        rank: This rank.
        why: Why it leaves, as the other ranks read it.
        deadline: How long to wait; ``None``, without a wait, if the calling thread is needed for the operations to end.
    """
    try:
        if deadline is not None:
            _finish_executing(locked, deadline)
    finally:  # also after an interrupt of the wait: the other ranks must not wait for this one
        locked.update(_give_up, f"rank {rank} left the job ({why})")


def _finish_executing(locked: LockedState, deadline: Deadline) -> None:
    executing: list[Handle] = []

    def find(state: RankState) -> None:
        executing[:] = [
            entry
            for group in state.sets.values()
            for entry in group.pending
            if entry.phase == EXECUTING and isinstance(entry, Handle)
        ]

    locked.update(find)
    while executing:
        for handle in executing:
            left = deadline.remaining()
            if not handle.done_lock.acquire(timeout=-1 if left is None else left):
                return
            # Opened again: the users' threads that wait for this handle have to get through as well.
            handle.release_waiters()
        locked.update(find)  # orders that have come in the meantime


def _give_up(state: RankState, text: str) -> None:
    for group in list(state.sets.values()):
        # Also where nothing is pending: other members would wait at the board for this rank's next post.
        group.close_board()
        if group.pending:
            state.withdraw(group.id, CauseKind.RANK_LEFT, text)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _forked() -> None:
    # Two processes on one connection would be one rank that sends everything twice.
    for engine in list(_engines):
        engine._after_fork()
    _engines.clear()


os.register_at_fork(after_in_child=_forked)
