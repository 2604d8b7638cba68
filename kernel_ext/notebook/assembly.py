"""Assembly of a pool, with the checks before it, and its end: processes, connections, routes of events between its parts.

The place where the launcher starts ranks, and whether the pool is kept, decide which processes there are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hvdlab.collectives import context, system
from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.collectives.coordinator.process import CoordinatorLaunch, CoordinatorProcess, settings_from
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError
from hvdlab.collectives.protocol.messages import MOST_RANKS
from hvdlab.collectives.settings import ABSENT_PLANES, PLANES, WorldEnvironment, free_port
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.forkserver.program import PROGRAM_NAME, decode_left
from hvdlab.kernel_ext.notebook import kept_pools
from hvdlab.kernel_ext.notebook.cells.dispatch import CellDispatcher
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.coordinator_recovery import CoordinatorRecovery
from hvdlab.kernel_ext.notebook.elastic import MembershipHistory, UnsyncedRanks
from hvdlab.kernel_ext.notebook.ipyparallel import launchers
from hvdlab.kernel_ext.notebook.ipyparallel.cluster import EngineRegistration, IpyparallelCluster
from hvdlab.kernel_ext.notebook.ipyparallel.launchers import PoolRequest
from hvdlab.kernel_ext.notebook.kept_pools import KeptPool, LauncherKeptPool, LocalKeptPool, adopt_ranks
from hvdlab.kernel_ext.notebook.membership import ElasticAdmission
from hvdlab.kernel_ext.notebook.output.transcript import TranscriptStore, kept_limit
from hvdlab.kernel_ext.notebook.prestart import PoolProcesses, Prestart, end_uninterrupted
from hvdlab.kernel_ext.notebook.rank_lifecycle import LEAVE_WITHIN, RankLifecycle
from hvdlab.kernel_ext.notebook.registry import KeptPoolRegistry
from hvdlab.kernel_ext.wire.cells import CrashOutput, SetOwner
from hvdlab.kernel_ext.wire.channel import JOIN, JOINED
from hvdlab.kernel_ext.wire.codec import TO_RANK, encode
from hvdlab.launch import registry
from hvdlab.launch.forkserver.children import REMEDIES, why_not
from hvdlab.launch.forkserver.messages import Exited, FromServer
from hvdlab.launch.hosts import parse_hosts
from hvdlab.launch.local import LocalStarter, check_loaded
from hvdlab.launch.options import parse
from hvdlab.launch.processes import last_lines, start_time
from hvdlab.launch.starter import Capability, Ended, Launcher, Started, Waiting


def default_size() -> int:
    """Return the number of usable cores, at least 2, so that there is a rank to communicate with."""
    # Not `os.cpu_count`: a batch system or a container can give this process fewer cores than the host has.
    return max(2, len(os.sched_getaffinity(0)))


def check_size(np: Any) -> int:
    """Return ``np`` if it is a number of ranks that a pool can have. Raises ``InvalidRequestError`` if not."""
    # True is an int, too, and would start a pool of one rank.
    if isinstance(np, bool) or not isinstance(np, int):
        raise InvalidRequestError(f"np={np!r} is no number of ranks; give a whole number, such as np=4.")
    if np < 1:
        raise InvalidRequestError(f"np={np}: a pool has at least one rank; pool.stop() ends all of them.")
    if np > MOST_RANKS:
        raise InvalidRequestError(f"np={np}: a pool has {MOST_RANKS} ranks at most.")
    return np


def open_standard_streams() -> None:
    """Open `/dev/null` for each of stdin, stdout and stderr that is closed.

    Otherwise the next sockets and pipes would get the numbers 0 to 2, and all children would use them as standard streams.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system gives the lowest number that is free, which is this one; children inherit it.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)


def check_not_in_rank() -> None:
    """Raise ``InvalidRequestError`` in a rank: each rank would start a pool of its own."""
    if context.in_rank_of_pool():
        raise InvalidRequestError(
            "this is a rank, and each rank would start a pool of its own; run the cell (or Pool.start) in the notebook, "
            "without %%hvd_run around it"
        )


def check_sees_ranks(what: str) -> None:
    """Check that this process is a notebook's, which has the ranks, and not one of the ranks itself.

    Args:
        what: The call or magic that needs the ranks, for the error's text.

    Raises:
        InvalidRequestError: This is a rank.
    """
    if context.in_rank_of_pool():
        raise InvalidRequestError(
            f"{what}: this is a rank, which does not see the others; run it in the notebook's own process: in a cell "
            "without %%hvd_run, or under %%local where cells run on the ranks"
        )


@contextmanager
def limits_explained(what: str) -> Iterator[None]:
    """Turn an error by a limit of this process or host into one sentence, which begins with ``what``.

    Raises:
        StartError: A file could not be opened, or a thread or process not be started, for such a limit.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REMEDIES or isinstance(error, HvdlabError):
            raise
        raise StartError(f"{what}: {why_not(error)}") from error
    except RuntimeError as error:
        # CPython raises a plain RuntimeError for it, without a class or an errno to go by.
        if isinstance(error, HvdlabError) or "start new thread" not in str(error):
            raise
        raise StartError(f"{what}: {error}: {REMEDIES[errno.EAGAIN]}") from error


def check_plane(plane: str) -> None:
    """Raise ``InvalidRequestError`` for a data plane that does not exist."""
    usable = [name for name in PLANES if name != "local"]
    if plane not in usable:
        why = ABSENT_PLANES.get(plane, f"there is no data plane {plane!r}")
        raise InvalidRequestError(f"{why}; choose one of {', '.join(usable)}.")


def address_for(hosts: Iterable[str]) -> str:
    """Return the address of this host by which ranks on other hosts reach it.

    Args:
        hosts: The names of those hosts; empty if only the launcher knows them.

    Raises:
        StartError, InvalidRequestError: There is no such address.
    """
    named = list(hosts)
    if chosen := system.chosen_address(os.environ):
        return chosen
    if named and all(system.is_loopback(system.address_towards(name) or "0.0.0.0") for name in named):
        return system.LOOPBACK
    return system.outward_address(named)


def processes_for(
    local: bool, tcp_host: str | None, keep: bool, warm: Prestart | None, deadline: Deadline
) -> PoolProcesses:
    """Take the processes that were started ahead, or start them; with a new coordinator if ranks are far or the pool is kept.

    Args:
        local: Whether ranks are forked here.
        tcp_host: Address by which ranks of other hosts reach the coordinator; None if there are none.
        keep: Whether the pool outlives this process.
        warm: The processes that were started ahead; None if there are none.
        deadline: Time limit for all of it.

    Raises:
        StartError: A process did not start in time; nothing is left behind.
    """
    if warm is None:
        warm = Prestart.begin(preload=local)
    processes = warm.take(deadline)
    if tcp_host is None and not keep:
        return processes
    # Only at its start does a coordinator get its TLS port for other hosts, and the order to outlive this process.
    try:
        processes.client.close()
        processes.coordinator.close()
        processes.coordinator = CoordinatorProcess.start(
            keep=True,
            linger=keep,
            tcp_host=tcp_host,
            timeout=deadline.remaining() or 10,
        )
        processes.client = Client.connect(processes.coordinator.address, processes.coordinator.client_token)
    except BaseException:
        end_uninterrupted(processes.end_all)
        raise
    return processes


Progress = Callable[[str], None]

RANK_MODULE = "hvdlab.kernel_ext.rank"
"""The module that a rank runs if it is started as a program and not forked."""

ANSWER_WITHIN = 5.0
"""Seconds that :meth:`PoolParts.attach` waits for the answers of the ranks that it has found."""


INTERRUPT_DELAY = 0.3
"""Seconds that the stop button's interrupt of a kept pool waits.

Jupyter interrupts a kernel before it asks it to shut down, some milliseconds later, and the ranks of a kept pool are to go on then.
"""


class PoolParts:
    """Parts of a pool, connected. Made by :meth:`start` and :meth:`attach`.

    Attributes:
        launcher, plane: The names that the caller of ``Pool.start`` gave.
        launch: The launcher that starts the ranks, with its capabilities.
        client: The connection to the coordinator.
        hosts: The hosts that the caller named, as text; empty for this host.
        keeping: The pool's entry among kept pools; None if it ends with this process.
        broken: The reason why the pool can't go on; empty while it can.
        group: The life of each rank.
        runs: The cells.
        transcripts: The output of the cells, on disk.
        companion: ipyparallel's controller, which has the same ranks as engines.
        resumed: Cells of a kept pool that the pool's earlier owner has left running.
        joining: Registration of ranks as engines of ipyparallel.
        newcomers: Ranks that were started after others and lack their variables.
        history: Record of the times at which ranks came and went.
        rebuilder: Replaces a coordinator that has died.
        admission: Admits new ranks to the elastic cells that run.
        processes: The processes and the connection that the pool stands on.
    """

    def __init__(
        self,
        processes: PoolProcesses,
        launcher: Launcher,
        plane: str,
        hosts: str,
        options: Mapping[str, object],
        keeping: KeptPool | None = None,
        *,
        begun: bool = False,
    ) -> None:
        self.launch = launcher
        self.launcher, self.plane, self.hosts = launcher.name, plane, hosts
        self.keeping = keeping
        self._ports = keeping.ports if keeping is not None else ("127.0.0.1", free_port())
        self.client: Client = processes.client
        self.broken = ""
        self.processes = processes
        self._pid = os.getpid()
        self._closing = threading.Lock()
        #: Rank to the time at which its process was ready (``CLOCK_MONOTONIC``, ns).
        self._ready_ns: dict[int, int] = {}
        self._closed = False
        self.joining = EngineRegistration(self)
        self.resumed: list[CellHandle] = []
        self.history = MembershipHistory()
        self.newcomers = UnsyncedRanks(self.history)
        named = parse_hosts(hosts) if hosts else []
        self.group = RankLifecycle(processes.client, self, hosts=named)
        # Output of cells goes with the coordinator's directory, which is removed at the pool's end, also if this process dies.
        self.transcripts = TranscriptStore(processes.coordinator.directory / "output", kept_limit(os.environ))
        self.runs = CellDispatcher(
            processes.client,
            self.group,
            self.transcripts,
            stall_time=_stall_time(),
            replaceable=Capability.SINGLE_RANKS in launcher.capabilities,
            newcomers=self.newcomers,
            kept=keeping is not None,
        )
        self.companion = IpyparallelCluster(processes.fork_server, self)
        self.admission = ElasticAdmission(
            processes.client, self.group, self.runs, self.newcomers, self.history
        )
        if keeping is not None:
            self.runs.interrupt_delay = INTERRUPT_DELAY
        starter = keeping.starter() if keeping is not None else None
        self._starter = launcher.starter(self._request(options), self) if starter is None else starter
        self.companion.set_starter(self._starter)
        self.group.set_starter(self._starter)
        self.rebuilder = CoordinatorRecovery(
            processes.coordinator,
            processes.client,
            self.group,
            self.runs,
            self,
            near=launcher.forks,
        )
        if keeping is not None and not begun:
            # Before `follow` and `listen`: they report ends, and those of ranks that the group does
            # not know are dropped.
            adopt_ranks(keeping, processes, self.group)
        if keeping is not None:
            keeping.follow(self, self._lost_hold)
        processes.client.on_membership(self.history.record_membership)
        processes.client.on_mail(JOINED, self._joined)
        processes.fork_server.listen(self._hear, self._fork_server_lost)

    @classmethod
    def start(
        cls,
        size: int,
        launcher: str,
        plane: str,
        hosts: str,
        options: Mapping[str, str],
        warm: Prestart | None,
        keep: str | None,
        deadline: Deadline,
        progress: Progress,
    ) -> PoolParts:
        """Start all processes, ranks included. Raises the errors of ``Pool.start``; nothing is left behind then."""
        found = launchers.find(launcher)
        values = parse(found.name, found.options(), options) if options else {}
        found.check(size, hosts)
        check_plane(plane)
        held: LauncherKeptPool | None = None
        if keep is not None:
            remedy = "start the pool without keep, or with the launcher `local` or `ray`."
            found.capabilities.require(Capability.KEEP, found.name, remedy)
            if registry.keeper(found.name) is None:
                # For its error, before anything is started. The pool gets its name when its ranks are there.
                KeptPoolRegistry().free_name(keep)
            else:
                progress("beginning what keeps the ranks")
                held = LauncherKeptPool.begin(found.name, keep, size, plane, RANK_MODULE, values, deadline)
        progress("starting the coordinator")
        try:
            processes = (
                cls._processes_here(found, hosts, keep is not None, warm, deadline)
                if held is None
                else held.connect(deadline, warm)
            )
        except BaseException:
            if held is not None:
                held.forget()
            raise
        try:
            if found.forks:
                progress("importing what the ranks share")
                check_loaded(processes.fork_server.wait_loaded(deadline))
            self = cls(processes, found, plane, hosts, values, held, begun=True)
        except BaseException:
            end_uninterrupted(processes.end_all)
            raise
        try:
            progress(f"starting {size} ranks")
            self.group.set_ranks(range(size), deadline, progress=progress)
            self.admission.record_arrivals("start", range(size))
            if keep is not None:
                self.runs.interrupt_delay = INTERRUPT_DELAY
                self.keeping = held or LocalKeptPool.begin(
                    processes, keep, size=size, plane=plane, ports=self._ports, deadline=deadline
                )
                self._claim_output(range(size))
        except BaseException:
            end_uninterrupted(self.close)
            raise
        return self

    @staticmethod
    def _processes_here(
        launcher: Launcher, hosts: str, keep: bool, warm: Prestart | None, deadline: Deadline
    ) -> PoolProcesses:
        named = parse_hosts(hosts) if hosts else []
        tcp_host = address_for(h.name for h in named) if launcher.is_far(hosts) else None
        return processes_for(launcher.forks, tcp_host, keep, warm, deadline)

    @classmethod
    def attach(
        cls,
        name: str,
        launcher: str,
        deadline: Deadline,
        progress: Progress,
        show: kept_pools.Show | None = None,
    ) -> PoolParts:
        """Take over a pool that was kept. Raises the errors of ``Pool.attach``; the pool is then left as it was."""
        keeping: KeptPool = (
            LocalKeptPool.claim(name)
            if launcher == launchers.LOCAL
            else LauncherKeptPool.claim(name, launcher)
        )
        processes: PoolProcesses | None = None
        try:
            progress("finding the ranks")
            processes = keeping.connect(deadline)
            self = cls(processes, launchers.find(launcher), keeping.plane, "", {}, keeping)
        except BaseException:
            if processes is not None:
                keeping.disconnect(processes)
            keeping.release()
            raise
        try:
            self.group.reconnected()
            self._claim_output(self.group.pids())
            left, self.resumed = kept_pools.resume_cells(
                self.client, self.group, self.runs, self.transcripts, self.newcomers, show
            )
            members = self.group.members
            running = {handle.cell: handle.ranks for handle in self.resumed}
            self.runs.resync((*members.wanted, *members.let_go), running)
            for handle in self.resumed:
                handle.drive_in_background()
            progress("waiting for the ranks")
            if silent := self.group.wait_answered(Deadline(ANSWER_WITHIN)):
                self.runs.notice(f"{format_ranks(silent)} did not answer yet; `%hvd_pool status` tells when")
            if self._coordinator_was_replaced:
                self.runs.notice(
                    "the coordinator ended, and was replaced, before this notebook attached: collectives that were in flight then failed"
                )
            self.update_kept_entry()
            self.admission.record_arrivals("attach", self.group.pids())
            if without := {rank for cell in left if cell.order is not None for rank in cell.without}:
                self.admission.admit_to_elastic_cells(sorted(without), deadline.remaining() or ANSWER_WITHIN)
        except BaseException:
            end_uninterrupted(self.detach)
            raise
        return self

    def _claim_output(self, ranks: Iterable[int]) -> None:
        """Send ranks the id of this process, which takes their output from now on; they watch it, since they outlive it."""
        pid, near = os.getpid(), self.keeping is None or self.keeping.near
        self.runs.post(TO_RANK, encode(SetOwner(pid, start_time(pid), near)), tuple(ranks))

    @property
    def _coordinator_was_replaced(self) -> bool:
        """Return whether the coordinator died while no process had this pool."""
        return self.keeping is not None and self.keeping.replaced(self.processes)

    def _request(self, options: Mapping[str, object]) -> PoolRequest:
        coordinator = self.processes.coordinator
        far = self.launch.is_far(self.hosts)
        world = WorldEnvironment(
            coordinator=(coordinator.tls_address or "") if far else coordinator.address,
            token=coordinator.token,
            certificate=coordinator.certificate if far else None,
            plane=self.plane,
            master_address=coordinator.tls_address.split(":")[1]
            if far and coordinator.tls_address
            else self._ports[0],
            master_port=self._ports[1],
        )
        return PoolRequest(
            world,
            self.client,
            fork_server=self.processes.fork_server,
            module=RANK_MODULE,
            forked=PROGRAM_NAME,
            hosts=self.hosts,
            options=options,
            companion=self.companion,
        )

    # -- reports of one part to the others ------------------------------------------------------------------------

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Handle the starter's report of a rank. Any thread."""
        if isinstance(event, Waiting):
            self.group.set_launch_wait(event.text)
            return
        if isinstance(event, Ended) and event.left is not None:
            event = self._take_left(event, decode_left(event.left))
        if not self.launch.forks:  # the fork server reports its own children to the controller by itself
            if isinstance(event, Ended):
                self.companion.rank_gone(event.rank)
                self.joining.remove(event.rank)
            else:
                self.companion.ranks_changed()
        self.group.handle(event)

    def _hear(self, event: FromServer) -> None:
        if isinstance(self._starter, LocalStarter):
            self._starter.hear(event)
        if isinstance(event, Exited):
            self.joining.remove(event.number)
        self.companion.on_forkserver_event(event)

    def _take_left(self, event: Ended, left: CrashOutput) -> Ended:
        """Show output that a rank could not send before it ended, under its cell.

        If no cell waits for the rank, the unsent part of its standard error is added to the last lines of its end instead.
        """
        if self.runs.deliver_crash_output(event.rank, left):
            return event
        unread = "".join(text.text for text in left.rest if text.name == "stderr")
        return replace(event, tail=last_lines(f"{event.tail}\n{unread}")) if unread else event

    def _joined(self, rank: int, answer: bytes) -> None:
        if self.joining.resolve(rank, answer.decode()):
            self.companion.rank_joined(rank)

    # -- for ipyparallel: ClusterOwner and RegisteringRanks ----------------------------------------------------------

    def rank_pids(self) -> Mapping[int, int]:
        """Return rank to process id of the ranks that live."""
        return self.group.pids()

    def set_controller(self, connection: str) -> None:
        """Have ranks register with the controller of this connection information; with none if it is empty."""
        self.joining.set_connection(connection)

    def controller_lost(self, line: str) -> None:
        """Show the user this line on a controller that has died."""
        self.runs.notice(line)

    def request_engine(self, rank: int, request: str) -> None:
        """Send a rank the request to register with the controller."""
        self.runs.post(JOIN, request.encode(), [rank])

    def engine_failed(self, rank: int, why: str) -> None:
        """Show the user that a rank could not register."""
        self.runs.notice(f"rank {rank} is out of reach for ipyparallel ({why}); cells run on it as before")

    # -- for the ranks' life and the recovery: LifecycleObserver and RecoveryObserver -------------------------------

    def rank_ready(self, rank: int) -> None:
        """Let ipyparallel and the views have a rank that takes cells from now on. Any thread."""
        if self.keeping is not None:
            self._claim_output([rank])
        self._ready_ns[rank] = time.monotonic_ns()
        self.joining.add([rank])
        self.history.announce()

    def rank_lost(self, rank: int, reason: str) -> None:
        """End the part of a rank that was ready and is lost, in all cells, with all that is known of its end. Any thread."""
        self.joining.remove(rank)
        member = self.group.members.get(rank)
        tail, detail = (member.tail, member.detail) if member is not None else ("", "")
        ready = self._ready_ns.pop(rank, None)
        if ready is not None and (seen := self.client.last_seen(rank, ready)):
            detail = f"{detail}; last seen in {seen}" if detail else f"last seen in {seen}"
        self._record_end("died", rank, reason)
        self.runs.rank_died(rank, reason, tail, detail)

    def _record_end(self, what: str, rank: int, reason: str) -> None:
        if not self._closed:
            self.admission.record_end(what, rank, reason)

    def rank_left(self, rank: int, died: str) -> None:
        """End the rank's part in all cells: it has left by the pool's order, or died before the commit at which it was to leave."""
        self.joining.remove(rank)
        self._record_end("died" if died else "left", rank, died or "the pool was resized")
        self.runs.rank_died(rank, died or "it left the pool", left=not died)

    def _fork_server_lost(self, reason: str) -> None:
        try:
            self.processes.fork_server.respawn()
        except StartError as error:
            self.recovery_failed(
                f"the process that ranks are forked from ended ({reason}), and no other one starts: {error}"
            )
            return
        self.update_kept_entry()
        self.runs.notice(
            f"the process that ranks are forked from ended ({reason.splitlines()[0].split(';')[0]}) and was replaced; "
            "the ranks and their variables are intact"
        )

    def coordinator_restored(self) -> None:
        """Repeat the requests to register, and record the coordinator's process: it can be another one. The recovery's thread."""
        self.joining.resend_pending()
        self.update_kept_entry()

    def update_kept_entry(self) -> None:
        """Record a change of a process, or of the size, for the process that attaches to the kept pool later.

        A failure is shown as a notice, and the next change writes all of it: the pool itself lacks nothing.
        """
        if self.keeping is None or self._closed:
            return
        try:
            self.keeping.update(self.processes, len(self.group.members.wanted))
        except StartError as error:
            self.runs.notice(
                f"a change of the kept pool could not be recorded for the next notebook: {error}"
            )

    def _lost_hold(self, reason: str) -> None:
        """Break the pool for this process: its launcher has given it to another process, or ended it."""
        assert self.keeping is not None
        # First: ranks that count as ended here are another notebook's, and the coordinator must not get a report of that.
        self.client.close()
        self.recovery_failed(f"the pool `{self.keeping.name}` is lost to this notebook: {reason}")

    def recovery_failed(self, reason: str) -> None:
        """Give the pool up, for this reason. Any thread."""
        if not self._closed:
            self.broken = reason
            self.group.broken(reason)

    # -- checks ---------------------------------------------------------------------------------------------------

    def check_resizable(self, size: int) -> None:
        """Raise ``InvalidRequestError`` if the pool can't get this size."""
        now = len(self.group.members.wanted)
        if size != now:
            self.launch.capabilities.require(
                Capability.RESIZE, self.launcher, f"stop the pool of {now} and start one of {size}."
            )
        self.launch.check(size, self.hosts, already=min(now, size))

    def check_dropped(self, size: int) -> None:
        """Raise ``InvalidRequestError`` if a living rank would end, with its variables, in place of a lost one."""
        ending = [rank for rank in self.group.ready() if rank >= size]
        lost = [rank for rank in self.group.members.lost if rank < size]
        if not ending or not lost:
            return
        are, one, them = ("is", "it", "its") if len(lost) == 1 else ("are", "them", "their")
        raise InvalidRequestError(
            f"{format_ranks(lost)} {are} lost, but {format_ranks(ending)} would end, with all variables there, since ranks are "
            f"numbered from 0; `%hvd_pool repair` or pool.repair() replaces {one} first, under {them} old "
            f"number{'' if len(lost) == 1 else 's'}"
        )

    def check_replaceable(self) -> None:
        """Raise ``InvalidRequestError`` if single ranks can't be started."""
        self.launch.capabilities.require(
            Capability.SINGLE_RANKS, self.launcher, "stop the pool and start it anew."
        )

    # -- the end --------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Detach this process from the pool, since it ends, drops the pool or detaches: only the ranks of a kept pool stay."""
        if self.keeping is None:
            self.close()
        elif self._claim_end():
            self.rebuilder.close()
            self.companion.close(keep=self.keeping.near)
            with contextlib.suppress(CoordinatorLostError):  # then the keeper of the pool informs its ranks
                # Before `_end_runs`, by which this process would have its cells discarded: the next one
                # asks ranks for them.
                self.runs.keep_cells_on_ranks()
                self.runs.post(TO_RANK, encode(SetOwner(0, 0)), tuple(self.group.pids()))
            self._end_runs("the notebook has let go of the pool; what runs there goes on")
            self.keeping.disconnect(self.processes)
            # After the connections are closed: from here on another process can claim the pool.
            self.keeping.release()
            self.rebuilder.join()

    def _claim_end(self) -> bool:
        """Return whether the caller is the one that ends the pool. False in a forked child of the pool's process."""
        with self._closing:
            if self._closed or os.getpid() != self._pid:
                return False
            self._closed = True
            self.runs.silence()
            return True

    def _end_runs(self, reason: str) -> None:
        for rank in self.group.pids():
            self.runs.rank_died(rank, reason)

    def close(self) -> None:
        """End ranks and processes. Idempotent; does nothing in a forked child of the pool's process."""
        if self.keeping is not None and self.keeping.lost:
            self.detach()  # it is another notebook's
            return
        if not self._claim_end():
            return
        # First: a coordinator that ends on purpose must not be replaced.
        self.rebuilder.close()
        # A world of no ranks: the coordinator orders all of them to leave, and only those that stay are killed.
        with contextlib.suppress(CoordinatorLostError):
            self.client.expect(())
        self._starter.close(LEAVE_WITHIN)
        self.companion.close()
        # Threads that wait for cells go on before their connection ends.
        self._end_runs("the pool was stopped")
        self.processes.end_all()
        self.rebuilder.join()
        if self.keeping is not None:
            self.keeping.forget()


def _stall_time() -> float | None:
    """Return the seconds after which a line under a cell names the ranks that it waits for, by the settings; None: never."""
    launch = CoordinatorLaunch("", "", "", 0, **settings_from(os.environ))
    return launch.stall_seconds if launch.stall_seconds and not launch.stall_disable else None
