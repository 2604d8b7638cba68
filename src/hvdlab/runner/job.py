"""Runs a job: coordinator, starter, output and signals around the :class:`~hvdlab.runner.supervisor.Supervisor`.

All threads post to one :class:`EventQueue`: output, starts and ends of ranks, events of the coordinator, signals. The loop of
:class:`JobRun` alone reads from it and acts. :class:`CoordinatorSupervisor` replaces a coordinator that dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hvdlab.collectives.client import Client, CoordinatorLostError, Membership
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.failover.client_reconnect import ClientRecovery
from hvdlab.collectives.failures import UNCAUGHT_TOPIC, Uncaught
from hvdlab.collectives.settings import WorldEnvironment, free_port
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.time_limits import MOST_WAIT, RestartLimit
from hvdlab.launch.host_agent.connection import AgentLink
from hvdlab.launch.host_agent.rank_process import STDERR
from hvdlab.launch.host_discovery import (
    HostAsker,
    HostEvent,
    HostFailed,
    HostNotice,
    HostsAsked,
    HostsChanged,
    HostsFound,
    HostSource,
    HostTable,
    HostTick,
    NotFound,
)
from hvdlab.launch.hosts import is_local
from hvdlab.launch.local import LocalLauncher
from hvdlab.launch.processes import ExitStatus, OutputTail, readable
from hvdlab.launch.starter import Ended, Launcher, LaunchRequest, PlacingStarter, Started, Starter, Waiting
from hvdlab.runner import events as e
from hvdlab.runner.job_spec import JobSpec, find_launcher, own_address, program, variables
from hvdlab.runner.output import Sink, Writer, failure_lines, stall_line
from hvdlab.runner.supervisor import JobResult, Supervisor

_CLOSING = 5.0
"""Seconds within which the coordinator must end after :meth:`CoordinatorProcess.close`."""


class PostedHosts:
    """Answers of a source of hosts, posted to the loop of a job."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events

    def asked(self) -> None:
        self._events.post(HostsAsked())

    def found(self, slots: dict[str, int], /) -> None:
        self._events.post(HostsFound(slots))

    def failed(self, reason: str, /) -> None:
        self._events.post(NotFound(reason))


class JobRun:
    """One run of a job. Call :meth:`run` once.

    Args:
        job: The job to run.
        sink: Receiver of the ranks' output.
        err: Writer of the launcher's own lines; ``None`` drops them.
        verbose: Whether to print also where the coordinator listens and where ranks are started.
    """

    def __init__(self, job: JobSpec, sink: Sink, err: Writer | None, *, verbose: bool = False) -> None:
        self._job, self._sink, self._err = job, sink, err
        self._verbose = verbose
        self._supervisor = Supervisor(job.policy(), time.monotonic())
        #: The result so far, and whether the supervisor has finished.
        self._done = JobResult()
        self._finished = False
        #: The last lines of stderr, and the pieces of the function's result, by rank.
        self._tails: defaultdict[int, OutputTail] = defaultdict(OutputTail)
        self._results: defaultdict[int, bytearray] = defaultdict(bytearray)
        #: Ranks that were started and have not ended; a launcher may report an end twice. The starter's threads' own.
        self._running: set[int] = set()
        #: Host of each rank, where the launcher has reported it.
        self._hosts: dict[int, str] = {}
        #: The hosts that come and go; ``None`` for a job whose hosts are fixed.
        self._table = HostTable(job.cooldown, job.source_name) if job.source is not None else None
        #: Which hosts there are, if that has changed and the supervisor does not know yet.
        self._changed: e.Hosts | None = None
        #: Everything that other threads and signals report to the loop.
        self._events = EventQueue()
        self._client: Client | None = None
        self._starter: Starter | None = None

    def run(self) -> JobResult:
        """Run the job to its end.

        Raises:
            StartError, InvalidRequestError: The job could not be started.
        """
        with contextlib.ExitStack() as cleanup:
            # First, so that it runs last: the threads of everything below may post until they have ended.
            cleanup.callback(self._events.close)
            cleanup.enter_context(self._events.signals())
            cleanup.callback(self._sink.close)
            launcher, options = find_launcher(self._job)
            address = own_address(self._job, launcher)
            environ = {**os.environ, **variables(self._job)}
            # First: it comes up while the coordinator does.
            agent = self._start_agent(launcher)
            if agent is not None:
                cleanup.callback(agent.close, _CLOSING)
            coordinator = CoordinatorProcess.start(
                size=None if self._job.source is not None else self._job.size,
                tcp_host=address,
                keep=True,
                environ=environ,
            )
            try:
                self._client = Client.connect(coordinator.address, coordinator.client_token)
            except BaseException:
                coordinator.close()
                raise
            coordinator_supervisor = CoordinatorSupervisor(coordinator, self._client, self._events)
            # Runs after the two that follow: once the coordinator is closed, an attempt under way has
            # nothing to wait for.
            cleanup.callback(coordinator_supervisor.close)
            cleanup.callback(coordinator.close, _CLOSING)
            cleanup.callback(self._client.close)
            self._events.watch(self._client)
            for topic, take in self._job.mail.items():
                self._client.on_mail(topic, take)
            world = self._make_world(coordinator, address)
            self._starter = launcher.starter(self._request(world, self._client, options, agent), self)
            cleanup.callback(self._starter.close, 0.0)
            # Runs before the starter closes: its threads may wait in write() for the loop, which takes no
            # more.
            cleanup.callback(self._events.stop)
            if self._job.source is None:
                self._start(range(self._job.size))
                self._print_placement(launcher)
            else:
                cleanup.callback(self._ask(self._job.source).close)
            while not self._finished:
                readable(self._events.descriptor, self._timeout())
                for posted in self._events.take():
                    self._take(posted)
                self._on_host_event(HostTick())
                self._handle(e.JobTick())
            self._done.stopped = self._events.stopped
            return self._done

    # -- starting -----------------------------------------------------------------------------------------------------

    def _make_world(self, coordinator: CoordinatorProcess, address: str | None) -> WorldEnvironment:
        # Where hosts come and go, no rank's host is sure to stay, so the rendezvous is on the launcher's.
        first = "" if self._job.source is not None else self._job.host_of(0)
        master = (address or "127.0.0.1") if not first or is_local(first) else first
        port = free_port(address or "127.0.0.1")
        where = coordinator.tls_address if address else coordinator.address
        assert where is not None
        if self._verbose:
            self._print_notice(f"coordinator {where} (pid {coordinator.pid}); rendezvous at {master}:{port}")
        return WorldEnvironment(
            where, coordinator.token, coordinator.certificate, self._job.plane, master, port
        )

    def _start_agent(self, launcher: Launcher) -> AgentLink | None:
        """Start the agent of this host, if all ranks are its."""
        if isinstance(launcher, LocalLauncher) and self._job.source is None:
            return launcher.start_agent(stdin=self._job.stdin)
        return None

    def _request(
        self, world: WorldEnvironment, client: Client, options: dict[str, object], agent: AgentLink | None
    ) -> LaunchRequest:
        job = self._job
        return LaunchRequest(
            world,
            client,
            program=program(job, self._events),
            size=0 if job.source is not None else job.size,
            hosts=job.host_list,
            options=options,
            agent=agent,
        )

    def _start(self, ranks: Sequence[int]) -> None:
        assert self._starter is not None
        self._running.update(ranks)
        # After the ranks count as running: their ends may be reported at once, on another thread, and are dropped for all others.
        self._starter.start(ranks, self._job.size)

    def _ask(self, source: HostSource) -> HostAsker:
        """Start to ask a source for hosts; its answers are posted to the loop."""
        return HostAsker(source, PostedHosts(self._events))

    def _start_on(self, hosts: Mapping[int, str]) -> None:
        """Start ranks on these hosts. If a host's agent can't be started, only that host's ranks fail."""
        assert isinstance(self._starter, PlacingStarter)
        for host in dict.fromkeys(hosts.values()):
            ranks = [rank for rank, its in hosts.items() if its == host]
            for rank in ranks:
                # A new process of a rank must not be credited with the result and the last lines of an
                # earlier one.
                self._results.pop(rank, None)
                self._tails.pop(rank, None)
                self._hosts[rank] = host
            self._running.update(ranks)
            try:
                # As in `_start`, after the ranks count as running.
                self._starter.start_on(host, ranks, len(self._supervisor.living))
            except (StartError, InvalidRequestError) as error:
                self._running.difference_update(ranks)
                self._events.post(e.Unstartable(tuple(ranks), str(error)))

    def _print_notice(self, text: str) -> None:
        if self._err is not None:
            self._err.say(text)

    def _print_placement(self, launcher: Launcher) -> None:
        if not self._verbose:
            return
        if launcher.name not in ("local", "ssh"):  # other launchers place the ranks themselves
            self._print_notice(f"{launcher.name}: {format_ranks(range(self._job.size))}")
            return
        for index in self._job.used_hosts:
            ranks = (str(slot.rank) for slot in self._job.slots if slot.host == index)
            self._print_notice(f"{self._job.hosts[index].name}: ranks {', '.join(ranks)}")

    # -- reports ------------------------------------------------------------------------------------------------------

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Post the starter's reports; on its threads."""
        if isinstance(event, Waiting):
            self._events.post(e.RanksWaiting(event.text))
            return
        rank = event.rank
        if isinstance(event, Started):
            self._hosts[rank] = event.host
            # Before the loop learns of it: the report of the rank's death to the coordinator names the process by this.
            self._events.last_pid[rank] = event.pid
            self._events.post(e.Spawned(rank, event.pid))
        elif rank in self._running:
            self._running.discard(rank)
            # Without a code and a signal no process was seen to end: it never ran, or its agent was lost.
            if event.code is None and not event.signal:
                self._events.post(e.Unstartable((rank,), event.reason))
            else:
                text = "" if event.pid else event.reason
                self._events.post(e.ProcessEnded(rank, ExitStatus(event.code or 0, event.signal, text)))

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _timeout(self) -> float:
        hosts = self._table.deadline if self._table is not None else None
        now = time.monotonic()
        limits = [due for due in (self._supervisor.deadline, hosts) if due is not None]
        return max(0.0, min([now + MOST_WAIT, *limits]) - now)

    def _take(self, posted: QueuedEvent) -> None:
        match posted:
            case str():
                self._print_notice(posted)
            case OutputReceived(rank, stream, data):
                if stream == STDERR:
                    self._tails[rank].add(data)
                self._sink.write(rank, stream, data)
            case ResultReceived(rank, data):
                self._results[rank] += data
            case e.ProcessEnded(rank, outcome):
                self._sink.ended(rank)
                self._done.outcomes[rank] = outcome
                self._handle(posted)
            case e.RanksWaiting(text):
                if text:
                    self._print_notice(text)
                self._handle(posted)
            case HostsAsked() | HostsFound() | NotFound() | HostFailed() | HostTick():
                self._on_host_event(posted)
            case _:
                self._handle(posted)

    def _on_host_event(self, event: HostEvent) -> None:
        self._enter(event)
        self._handle_hosts()

    def _enter(self, event: HostEvent) -> None:
        """Pass an event to the table of hosts; the supervisor does not learn its effects yet."""
        if self._table is None:
            return
        for effect in self._table.handle(event, time.monotonic()):
            match effect:
                case HostNotice(text):
                    self._print_notice(text)
                case HostsChanged(slots, aside):
                    self._changed = e.Hosts(slots, aside)

    # -- effects ----------------------------------------------------------------------------------------------------------

    def _handle(self, event: e.Event) -> None:
        for effect in self._supervisor.handle(event, time.monotonic()):
            self._do(effect)
        self._handle_hosts()

    def _handle_hosts(self) -> None:
        """Let the supervisor know which hosts there are now.

        Hosts that its effects put aside change that, too, but only once all effects are carried out: the supervisor's effects in
        answer would otherwise overtake those that are left, and an older :class:`~hvdlab.runner.events.SetExpectedRanks` would undo a newer one.
        """
        while (changed := self._changed) is not None:
            self._changed = None
            for effect in self._supervisor.handle(changed, time.monotonic()):
                self._do(effect)

    def _do(self, effect: e.Effect) -> None:
        match effect:
            case e.Notice(text):
                self._done.failure.append(text)
                self._print_notice(text)
            case e.FailureReport():
                self._done.failed = effect.rank
                host = self._hosts.get(effect.rank) or self._supervisor.ranks[effect.rank].host
                self._done.failure = failure_lines(effect, self._tails, "" if is_local(host) else host)
                for line in self._done.failure:
                    self._print_notice(line)
            case e.SendSignal(ranks, number):
                assert self._starter is not None
                for rank in ranks:
                    self._starter.signal(rank, number)
            case e.Finish(code):
                self._finished = True
                self._done.code = code
                self._done.left = self._supervisor.left
                self._done.results = {rank: bytes(data) for rank, data in self._results.items()}
            case e.RestartRank(rank):
                self._respawn(rank)
            case e.StartOn(hosts):
                self._start_on(hosts)
            case e.HostUnusable(host, reason, hangs):
                if hangs and isinstance(self._starter, PlacingStarter):
                    self._starter.give_up(host)
                self._enter(HostFailed(host, reason))
            case e.ReportRankDeath() | e.SetExpectedRanks() | e.ReleaseRanks():
                self._send_to_coordinator(effect)

    def _respawn(self, rank: int) -> None:
        self._results.pop(rank, None)
        self._tails.pop(rank, None)
        try:
            self._start((rank,))
        except (StartError, InvalidRequestError) as error:
            self._running.discard(rank)
            self._events.post(e.Unstartable((rank,), str(error)))

    def _send_to_coordinator(self, effect: e.ReportRankDeath | e.SetExpectedRanks | e.ReleaseRanks) -> None:
        """Send the effect to the coordinator. If that is gone, its supervisor replaces it, or ends the job."""
        assert self._client is not None
        with contextlib.suppress(ConnectionError):
            if isinstance(effect, e.SetExpectedRanks):
                self._client.expect(effect.ranks)
            elif isinstance(effect, e.ReleaseRanks):
                self._client.release(effect.ranks)
            else:
                self._client.rank_lost(effect.rank, self._events.last_pid.get(effect.rank, 0), effect.reason)


class CoordinatorSupervisor:
    """Supervisor of the coordinator of a job.

    Args:
        coordinator: Its process, started with ``keep``.
        client: The launcher's connection to it.
        events: Gets a line when another coordinator has taken over, or the old one was connected to again, and the loss if
            neither was possible.
    """

    def __init__(self, coordinator: CoordinatorProcess, client: Client, events: EventQueue) -> None:
        self._client = client
        self._recovery = ClientRecovery(coordinator, client)
        self._events = events
        #: Successors within the last minute: a coordinator that dies at once each time is given up.
        self._restarts = RestartLimit()
        #: Guards ``_closing`` and ``_thread``. The other lock lets one recovery run at a time: a second loss
        #: can come during one.
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._closing = False
        self._thread: threading.Thread | None = None
        client.on_lost(self._begin)

    def close(self) -> None:
        """Let no successor take over any more, and wait for an attempt under way.

        Call it after the coordinator was closed: then no attempt has anything to wait for.
        """
        with self._lock:
            self._closing = True
        if self._thread is not None:
            self._thread.join()

    def _begin(self, reason: str) -> None:
        """Begin the recovery of a lost connection. On the client's thread, which must not wait for it."""
        with self._lock:
            if not self._closing:
                self._thread = threading.Thread(target=self._replace, args=(reason,), name="hvdlab-keeper")
                self._thread.start()

    def _replace(self, reason: str) -> None:
        with self._one_at_a_time:
            # Only now: the recovery that held the lock may have connected it again.
            if self._client.closed and not self._closing:
                self._recover(reason)

    def _recover(self, reason: str) -> None:
        began = time.monotonic()
        if self._restarts.reached:
            self._events.coordinator_lost(
                f"{reason}; it has ended {self._restarts.most} times within a minute"
            )
            return
        self._restarts.add()
        try:
            recovered = self._recovery.run()
        except CoordinatorLostError:
            return  # the connection was lost again: _begin() was called for that, too
        except (StartError, TimeoutError, OSError) as error:
            if not self._closing:
                self._events.coordinator_lost(f"{reason}; no other one could take over: {error}")
        else:
            seconds = time.monotonic() - began
            if recovered.replaced:
                self._events.post(
                    f"{reason}; another coordinator took over within {seconds:.1f} s. What ranks were doing together at "
                    "that moment has failed; those that can, go on"
                )
            else:
                self._restarts.forget_last()  # the coordinator lives, so this was no death
                self._events.post(
                    f"{reason}; it lives, and was connected to again within {seconds:.1f} s. The ranks did not notice"
                )


MOST_HELD = 4 << 20
"""Bytes of output that may wait for the loop; while there are more, the threads that read from ranks wait."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class OutputReceived:
    """A rank wrote to stdout (1) or stderr (2)."""

    rank: int
    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ResultReceived:
    """Event: the next piece of a rank's result."""

    rank: int
    data: bytes


QueuedEvent = e.Event | OutputReceived | ResultReceived | HostEvent | str
"""Events that other threads post to the loop; a ``str`` is one of the launcher's own lines."""


class EventQueue:
    """A queue that a selector can wait for.

    Attributes:
        descriptor: Readable when there is something to :meth:`take`.
        last_pid: Process id that each rank joined with last.
        stopped: The first signal that arrived, or 0.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        # The writing end, too: a signal handler that waited for room would wait for the loop that it
        # interrupts.
        os.set_blocking(self._writer, False)
        self.last_pid: dict[int, int] = {}
        self.stopped = 0
        # Not a queue.Queue: a signal can interrupt the loop while that holds the lock, which the handler
        # would need.
        self._queue: deque[QueuedEvent] = deque()
        self._room = threading.Condition()
        #: Bytes of output in the queue, and whether :meth:`stop` was called; guarded by ``_room``.
        self._held, self._closed = 0, False
        #: Process of each rank in the world as it was posted last, and whether a first world was posted.
        self._members: dict[int, int] = {}
        self._formed = False
        #: Ranks that were cut off, have connected again, and are not in the world yet.
        self._back: set[int] = set()
        #: Newcomers that wait to be let in, with their processes.
        self._arrived: set[tuple[int, int]] = set()
        #: Released ranks that the coordinator keeps in training, with their processes.
        self._kept: set[tuple[int, int]] = set()

    def post(self, event: QueuedEvent) -> None:
        """Queue an event, from another thread or a signal handler. The loop can ignore events after :meth:`stop`."""
        # Before the byte: the loop that it wakes must find the event.
        self._queue.append(event)
        with contextlib.suppress(BlockingIOError):  # the pipe is full, which wakes the loop as well
            os.write(self._writer, b"\0")

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Post a rank's output. Waits while ``MOST_HELD`` bytes are queued, so that a slow reader holds the rank up."""
        with self._room:
            self._room.wait_for(lambda: self._held < MOST_HELD or self._closed)
            self._held += len(data)
        self.post(OutputReceived(rank, stream, data))

    def returned(self, rank: int, data: bytes) -> None:
        """Post a piece of a rank's result."""
        self.post(ResultReceived(rank, data))

    def take(self) -> Iterator[QueuedEvent]:
        """Yield the events that have arrived, in the order in which they were posted."""
        with contextlib.suppress(BlockingIOError):
            # The bytes before the events: one that is queued after the loop has a byte of its own, which wakes the reader again.
            os.read(self.descriptor, 4096)
        while self._queue:
            posted = self._queue.popleft()
            # The bytes count as held until the loop has handled them and comes back here.
            yield posted
            if isinstance(posted, OutputReceived):
                with self._room:
                    self._held -= len(posted.data)
                    self._room.notify_all()

    def stop(self) -> None:
        """Stop accepting events: wake the threads that wait in :meth:`write`, and let none wait again."""
        with self._room:
            self._closed = True
            self._room.notify_all()

    def close(self) -> None:
        """Close the pipe. Nothing may be posted after that."""
        os.close(self.descriptor)
        os.close(self._writer)

    def watch(self, client: Client) -> None:
        """Post the coordinator's reports on the ranks."""
        client.on_membership(self._on_membership)
        client.on_mail(UNCAUGHT_TOPIC, self._on_uncaught)
        client.on_returned(self._on_returned)
        client.on_stall(lambda stall: self.post(stall_line(stall)))

    def coordinator_lost(self, reason: str) -> None:
        """Post that the coordinator is lost, without a successor."""
        self.post(e.CoordinatorLost(reason))

    def _on_membership(self, membership: Membership) -> None:
        members = {member.rank: member.pid for member in membership.members}
        self.last_pid.update(members)
        self._back &= members.keys() - set(membership.formed)
        # One that waits until elastic training lets it in has not joined yet, nor has one that goes back to its last commit before that.
        out = self._back.union(membership.waiting)
        now = {rank: pid for rank, pid in members.items() if rank not in out}
        # Ends before beginnings: a rank whose process was replaced has both, and ends up as connected.
        for rank, pid in self._members.items():
            if now.get(rank) != pid:
                reasons = [
                    death.reason for death in membership.deaths if (death.rank, death.pid) == (rank, pid)
                ]
                self.post(e.RankDisconnected(rank, next(filter(_tells, reasons), "")))
        for rank, pid in now.items():
            if self._members.get(rank) != pid:
                self.post(e.Connected(rank))
        self._members = now
        # After its ranks have joined: this event sets a time limit for the ranks that have not.
        if membership.formed and not self._formed:
            self._formed = True
            self.post(e.Formed())
        arrived = {
            (rank, members[rank]) for rank in membership.waiting if rank in members.keys() - self._back
        }
        for rank, _ in sorted(arrived - self._arrived):
            self.post(e.RankArrived(rank))
        self._arrived = arrived
        # One that is not there any more was kept to its end: the program may have ended on it.
        kept = {(rank, pid) for rank, pid in members.items() if rank in membership.kept}
        kept |= self._kept - members.items()
        for changed, stay in ((kept - self._kept, True), (self._kept - kept, False)):
            if changed:
                self.post(e.RanksKept(tuple(sorted([rank for rank, _ in changed])), stay))
        self._kept = kept

    def _on_returned(self, rank: int, pid: int, seconds: float) -> None:
        self._back.add(rank)
        self.post(e.RankReturned(rank, seconds))

    def _on_uncaught(self, rank: int, body: bytes) -> None:
        said = msgspec.json.decode(body, type=Uncaught)
        self.post(e.Reported(rank, said.error, said.culprits))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn signals into events. Does nothing on other threads than the main one.

        A signal that is ignored, as SIGHUP is under nohup, stays ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def take(number: int, frame: object) -> None:
            self.stopped = self.stopped or number
            self.post(e.Stopped(number))

        taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, take) for number in taken}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _tells(reason: str) -> bool:
    """Return whether a death's reason adds to the fact that the process has ended: on ends, the host's agent knows more."""
    return reason.startswith("no sign of life")
