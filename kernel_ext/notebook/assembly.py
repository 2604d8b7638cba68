"""Assembly of a pool, and its end: processes, connections, and the part that hears of each event.

Processes are chosen by where the launcher starts ranks and whether the pool is kept.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from hvdlab.collectives import system
from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.collectives.coordinator.process import CoordinatorLaunch, CoordinatorProcess, settings_from
from hvdlab.collectives.errors import (
    InvalidRequestError,
    StartError,
    format_ranks,
)
from hvdlab.collectives.settings import WorldEnvironment, free_port
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.forkserver.program import PROGRAM_NAME, decode_left
from hvdlab.kernel_ext.launchers import names
from hvdlab.kernel_ext.launchers.cluster import Companion
from hvdlab.kernel_ext.launchers.foreign import PoolRequest
from hvdlab.kernel_ext.launchers.joining import Joining
from hvdlab.kernel_ext.notebook import checks, takeover
from hvdlab.kernel_ext.notebook.cells.dispatch import CellDispatcher
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.coordinator_recovery import CoordinatorRecovery
from hvdlab.kernel_ext.notebook.elastic_admission import ElasticAdmission
from hvdlab.kernel_ext.notebook.kept_pools import (
    KeptPool,
    LauncherKeptPool,
    LocalKeptPool,
    adopt_ranks,
)
from hvdlab.kernel_ext.notebook.membership_history import MembershipHistory
from hvdlab.kernel_ext.notebook.output.recorder import TranscriptStore, kept_limit
from hvdlab.kernel_ext.notebook.prestart import PoolProcesses, Prestart
from hvdlab.kernel_ext.notebook.rank_lifecycle import LEAVE_WITHIN, RankLifecycle
from hvdlab.kernel_ext.notebook.registry import KeptPoolRegistry
from hvdlab.kernel_ext.notebook.unsynced import UnsyncedRanks
from hvdlab.kernel_ext.wire.cells import CrashOutput, SetOwner
from hvdlab.kernel_ext.wire.channel import JOIN, JOINED
from hvdlab.kernel_ext.wire.codec import TO_RANK, encode
from hvdlab.launch import registry
from hvdlab.launch.forkserver.messages import Exited, FromServer
from hvdlab.launch.hosts import parse_hosts
from hvdlab.launch.local import LocalStarter, check_loaded
from hvdlab.launch.options import parse
from hvdlab.launch.processes import last_lines, start_time
from hvdlab.launch.starter import Capability, Ended, Launcher, Started, Waiting


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
        local: Ranks are forked here.
        tcp_host: Where ranks of other hosts reach the coordinator; None if there are none.
        keep: Whether the pool outlives this process.

    Raises:
        StartError: A process did not start in time; nothing is left behind.
    """
    if warm is None:
        warm = Prestart.begin(preload=local)
    processes = warm.take(deadline)
    if tcp_host is None and not keep:
        return processes
    # A coordinator learns only when it is started that it needs a TLS port for other hosts, or that it outlives this process.
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
        processes.end_all()
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
    """The parts of a pool, connected. Made by :meth:`start` and :meth:`attach`.

    Attributes:
        launcher, plane: The names that the caller of ``Pool.start`` gave.
        launch: What starts the ranks, and what it can do.
        client: The connection to the coordinator.
        group: The ranks.
        runs: The cells.
        transcripts: What the cells wrote.
        companion: ipyparallel's controller, which has the same ranks as engines.
        resumed: Cells of a kept pool that the process which had the pool before has left running.
        joining: Which ranks are engines of ipyparallel.
        newcomers: Ranks that were started after others and have learnt nothing from them.
        history: When ranks came and went.
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
        self.joining = Joining(
            lambda rank, request: self.runs.post(JOIN, request.encode(), [rank]), failed=self._could_not_join
        )
        self.resumed: list[CellHandle] = []
        self.history = MembershipHistory()
        self.newcomers = UnsyncedRanks(self.history.announce)
        named = parse_hosts(hosts) if hosts else []
        self.group = RankLifecycle(
            processes.client, died=self._died, ready=self._is_ready, left=self._has_left, hosts=named
        )
        # These files go with the coordinator's directory, which is removed at the pool's end, also if this process dies.
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
        self.companion = Companion(
            processes.fork_server, self.group.pids, self.joining.connected, lost=self.runs.notice
        )
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
            give_up=self._break,
            rebuilt=self._rebuilt,
            near=launcher.forks,
        )
        if keeping is not None and not begun:
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
        """Start everything, ranks included. Raises what ``Pool.start`` does, and has left nothing behind then."""
        found = names.find(launcher)
        values = parse(found.name, found.options(), options) if options else {}
        found.check(size, hosts)
        checks.check_plane(plane)
        held: LauncherKeptPool | None = None
        if keep is not None:
            remedy = "start the pool without keep, or with the launcher `local` or `ray`."
            found.capabilities.require(Capability.KEEP, found.name, remedy)
            if registry.keeper(found.name) is None:
                keep = KeptPoolRegistry().free_name(keep)
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
            processes.end_all()
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
            self.close()
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
        show: takeover.Show | None = None,
    ) -> PoolParts:
        """Take over a pool that was kept. Raises what ``Pool.attach`` does, and has left the pool as it was then."""
        keeping: KeptPool = (
            LocalKeptPool.claim(name) if launcher == names.LOCAL else LauncherKeptPool.claim(name, launcher)
        )
        processes: PoolProcesses | None = None
        try:
            progress("finding the ranks")
            processes = keeping.connect(deadline)
            self = cls(processes, names.find(launcher), keeping.plane, "", {}, keeping)
        except BaseException:
            if processes is not None:
                keeping.disconnect(processes)
            keeping.release()
            raise
        try:
            self.group.reconnected()
            self._claim_output(self.group.pids())
            left, self.resumed = takeover.resume_cells(
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
            self.note_kept()
            self.admission.record_arrivals("attach", self.group.pids())
            if without := {rank for cell in left if cell.order is not None for rank in cell.without}:
                self.admission.admit_to_elastic_cells(sorted(without), deadline.remaining() or ANSWER_WITHIN)
        except BaseException:
            self.leave()
            raise
        return self

    def _claim_output(self, ranks: Iterable[int]) -> None:
        """Tell ranks that this process takes what they write; they need its id, since they outlive it."""
        pid, near = os.getpid(), self.keeping is None or self.keeping.near
        self.runs.post(TO_RANK, encode(SetOwner(pid, start_time(pid), near)), tuple(ranks))

    @property
    def _coordinator_was_replaced(self) -> bool:
        """Whether the coordinator died while no process had this pool."""
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

    # -- what each part reports to the others ---------------------------------------------------------------------

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Handle the starter's report of a rank. Any thread."""
        if isinstance(event, Waiting):
            self.group.set_launch_wait(event.text)
            return
        if isinstance(event, Ended) and event.left is not None:
            event = self._take_left(event, decode_left(event.left))
        if not self.launch.forks:  # the fork server tells the controller about its own children
            if isinstance(event, Ended):
                self.companion.rank_gone(event.rank)
                self.joining.gone(event.rank)
            else:
                self.companion.ranks_changed()
        self.group.handle(event)

    def _hear(self, event: FromServer) -> None:
        if isinstance(self._starter, LocalStarter):
            self._starter.hear(event)
        if isinstance(event, Exited):
            self.joining.gone(event.number)
        self.companion.hear(event)

    def _take_left(self, event: Ended, left: CrashOutput) -> Ended:
        """Show what a rank could not send before it ended, under its cell.

        If no cell waits for it, what it wrote to its standard error is put among its last words instead.
        """
        if self.runs.deliver_crash_output(event.rank, left):
            return event
        unread = "".join(text.text for text in left.rest if text.name == "stderr")
        return replace(event, tail=last_lines(f"{event.tail}\n{unread}")) if unread else event

    def _joined(self, rank: int, answer: bytes) -> None:
        if self.joining.answered(rank, answer.decode()):
            self.companion.rank_joined(rank)

    def _could_not_join(self, rank: int, why: str) -> None:
        self.runs.notice(f"rank {rank} is out of reach for ipyparallel ({why}); cells run on it as before")

    def _is_ready(self, rank: int) -> None:
        if self.keeping is not None:
            self._claim_output([rank])
        self._ready_ns[rank] = time.monotonic_ns()
        self.joining.add([rank])
        self.history.announce()

    def _died(self, rank: int, reason: str) -> None:
        self.joining.gone(rank)
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

    def _has_left(self, rank: int, died: str) -> None:
        """End the rank's part in all cells: it has left, as the pool wanted, or died on the way to the commit at which it was to."""
        self.joining.gone(rank)
        self._record_end("died" if died else "left", rank, died or "the pool was resized")
        self.runs.rank_died(rank, died or "it left the pool", left=not died)

    def _fork_server_lost(self, reason: str) -> None:
        try:
            self.processes.fork_server.respawn()
        except StartError as error:
            self._break(
                f"the process that ranks are forked from ended ({reason}), and no other one starts: {error}"
            )
            return
        self.note_kept()
        self.runs.notice(
            f"the process that ranks are forked from ended ({reason.splitlines()[0].split(';')[0]}) and was replaced; "
            "the ranks and their variables are intact"
        )

    def _rebuilt(self) -> None:
        self.joining.ask_again()
        self.note_kept()

    def note_kept(self) -> None:
        """Write down that a process, or the size, has changed, for the process that attaches to the kept pool later."""
        if self.keeping is not None and not self._closed:
            self.keeping.update(self.processes, len(self.group.members.wanted))

    def _lost_hold(self, reason: str) -> None:
        """The pool's launcher has given it to another process, or ended it."""
        assert self.keeping is not None
        self.client.close()  # first: ranks that count as ended here are another notebook's, and the coordinator must not hear of it
        self._break(f"the pool `{self.keeping.name}` is lost to this notebook: {reason}")

    def _break(self, reason: str) -> None:
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

    def leave(self) -> None:
        """Called when this process ends, drops the pool or detaches: the ranks of a kept pool stay, all else ends."""
        if self.keeping is None:
            self.close()
        elif self._claim_end():
            self.rebuilder.close()
            self.companion.close(keep=self.keeping.near)
            with contextlib.suppress(CoordinatorLostError):  # what keeps the pool tells its ranks
                self.runs.leave()
                self.runs.post(TO_RANK, encode(SetOwner(0, 0)), tuple(self.group.pids()))
            self._end_runs("the notebook has let go of the pool; what runs there goes on")
            self.keeping.disconnect(self.processes)
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
        """End everything. Idempotent; does nothing in a forked child of the pool's process."""
        if self.keeping is not None and self.keeping.lost:
            self.leave()  # it is another notebook's
            return
        if not self._claim_end():
            return
        self.rebuilder.close()
        with contextlib.suppress(CoordinatorLostError):
            self.client.expect(())
        self._starter.close(LEAVE_WITHIN)
        self.companion.close()
        self._end_runs("the pool was stopped")
        self.processes.end_all()
        self.rebuilder.join()
        if self.keeping is not None:
            self.keeping.forget()


def _stall_time() -> float | None:
    """Return the seconds after which a line under a cell says what it waits for, by the coordinator's settings; None: never."""
    launch = CoordinatorLaunch("", "", "", 0, **settings_from(os.environ))
    return launch.stall_seconds if launch.stall_seconds and not launch.stall_disable else None
