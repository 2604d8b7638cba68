"""Assembly of a pool, and its end: processes, connections, and the part that hears of each event.

Processes are chosen by where the launcher starts ranks and whether the pool is kept.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from hvdlab.collectives import system
from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.collectives.coordinator.process import CoordinatorLaunch, CoordinatorProcess, settings_from
from hvdlab.collectives.errors import (
    HvdlabError,
    InvalidRequestError,
    StartError,
    compact_ranks,
    format_ranks,
)
from hvdlab.collectives.settings import WorldEnvironment, free_port
from hvdlab.collectives.system import host_key
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.types import LEAVES
from hvdlab.kernel_ext.forkserver.program import PROGRAM_NAME, decode_left
from hvdlab.kernel_ext.launchers import names
from hvdlab.kernel_ext.launchers.cluster import Companion
from hvdlab.kernel_ext.launchers.foreign import PoolRequest
from hvdlab.kernel_ext.launchers.joining import Joining
from hvdlab.kernel_ext.notebook import checks, takeover
from hvdlab.kernel_ext.notebook.cells.dispatch import CellDispatcher
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.cells.sink import NullSink
from hvdlab.kernel_ext.notebook.coordinator_recovery import CoordinatorRecovery
from hvdlab.kernel_ext.notebook.kept_pools import (
    KeptPool,
    LauncherKeptPool,
    LocalKeptPool,
)
from hvdlab.kernel_ext.notebook.membership_history import ElasticState, MembershipChange, MembershipHistory
from hvdlab.kernel_ext.notebook.output.recorder import TranscriptStore, kept_limit
from hvdlab.kernel_ext.notebook.prestart import PoolProcesses, Prestart
from hvdlab.kernel_ext.notebook.rank_lifecycle import LEAVE_WITHIN, RankLifecycle
from hvdlab.kernel_ext.notebook.rank_states import RanksAdopted
from hvdlab.kernel_ext.notebook.registry import KeptPoolRegistry
from hvdlab.kernel_ext.notebook.unsynced import UnsyncedRanks
from hvdlab.kernel_ext.notebook.variables import transfer
from hvdlab.kernel_ext.wire.cells import CrashOutput, Late, SetOwner
from hvdlab.kernel_ext.wire.channel import JOIN, JOINED
from hvdlab.kernel_ext.wire.codec import TO_RANK, encode
from hvdlab.launch import registry
from hvdlab.launch.forkserver.messages import Exited, FromServer
from hvdlab.launch.hosts import parse_hosts
from hvdlab.launch.local import LocalStarter, check_loaded
from hvdlab.launch.options import parse
from hvdlab.launch.processes import last_lines, start_time, started_at
from hvdlab.launch.starter import Capability, Ended, Launcher, Started, Waiting


def address_for(hosts: Iterable[str]) -> str:
    """The address of this host by which ranks on other hosts reach it.

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


def base_for(
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
    base = warm.take(deadline)
    if tcp_host is None and not keep:
        return base
    # A coordinator learns only when it is started that it needs a TLS port for other hosts, or that it outlives this process.
    try:
        base.client.close()
        base.coordinator.close()
        base.coordinator = CoordinatorProcess.start(
            keep=True,
            linger=keep,
            tcp_host=tcp_host,
            timeout=deadline.remaining() or 10,
        )
        base.client = Client.connect(base.coordinator.address, base.coordinator.client_token)
    except BaseException:
        base.close()
        raise
    return base


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
    """

    def __init__(
        self,
        base: PoolProcesses,
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
        self.client: Client = base.client
        self.broken = ""
        self._base = base
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._news: list[str] = []
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
            base.client, died=self._died, ready=self._is_ready, left=self._has_left, hosts=named
        )
        self.companion = Companion(base.fork_server, self.group.pids, self.joining.connected, lost=self.tell)
        self.runs = CellDispatcher(
            base.client,
            reason=self._why_lost,
            local_pid=self._local_pid,
            stall_time=_stall_time(),
            replaceable=Capability.SINGLE_RANKS in launcher.capabilities,
            newcomers=self.newcomers,
            late=self._wrote_late,
            untold=lambda text: self._news.append(text),
        )
        # These files go with the coordinator's directory, which is removed at the pool's end, also if this process dies.
        self.transcripts = TranscriptStore(base.coordinator.directory / "output", kept_limit(os.environ))
        if keeping is not None:
            self.runs.interrupt_delay = INTERRUPT_DELAY
        starter = keeping.starter() if keeping is not None else None
        self._starter = launcher.starter(self._request(options), self) if starter is None else starter
        self.companion.use(self._starter)
        self.group.use(self._starter)
        self.rebuilder = CoordinatorRecovery(
            base.coordinator,
            base.client,
            self.group,
            self.runs,
            tell=self.tell,
            give_up=self._break,
            rebuilt=self._rebuilt,
            near=launcher.forks,
        )
        if keeping is not None and not begun:
            self._find(keeping)
        if keeping is not None:
            keeping.follow(self, self._lost_hold)
        base.client.on_membership(self.history.world)
        base.client.on_mail(JOINED, self._joined)
        base.fork_server.listen(self._hear, self._fork_server_lost)

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
            base = (
                cls._base_here(found, hosts, keep is not None, warm, deadline)
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
                check_loaded(base.fork_server.wait_loaded(deadline))
            self = cls(base, found, plane, hosts, values, held, begun=True)
        except BaseException:
            base.close()
            raise
        try:
            progress(f"starting {size} ranks")
            self.group.want(range(size), deadline, progress=progress)
            self._note_arrivals("start", range(size))
            if keep is not None:
                self.runs.interrupt_delay = INTERRUPT_DELAY
                self.keeping = held or LocalKeptPool.begin(
                    base, keep, size=size, plane=plane, ports=self._ports, deadline=deadline
                )
                self._own(range(size))
        except BaseException:
            self.close()
            raise
        return self

    @staticmethod
    def _base_here(
        launcher: Launcher, hosts: str, keep: bool, warm: Prestart | None, deadline: Deadline
    ) -> PoolProcesses:
        named = parse_hosts(hosts) if hosts else []
        tcp_host = address_for(h.name for h in named) if launcher.is_far(hosts) else None
        return base_for(launcher.forks, tcp_host, keep, warm, deadline)

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
        base: PoolProcesses | None = None
        try:
            progress("finding the ranks")
            base = keeping.connect(deadline)
            self = cls(base, names.find(launcher), keeping.plane, "", {}, keeping)
        except BaseException:
            if base is not None:
                keeping.disconnect(base)
            keeping.release()
            raise
        try:
            self.group.reconnected()
            left = self._take_cells_over(show)
            members = self.group.members
            running = {handle.cell: handle.ranks for handle in self.resumed}
            self.runs.resync((*members.wanted, *members.let_go), running)
            for handle in self.resumed:
                handle.drive_in_background()
            progress("waiting for the ranks")
            if silent := self.group.wait_answered(Deadline(ANSWER_WITHIN)):
                self.tell(f"{format_ranks(silent)} did not answer yet; `%hvd_pool status` tells when")
            if self._coordinator_was_replaced:
                self.tell(
                    "the coordinator ended, and was replaced, before this notebook attached: collectives that were in flight then failed"
                )
            self.note_kept()
            self._note_arrivals("attach", self.group.pids())
            if without := {rank for cell in left if cell.order is not None for rank in cell.without}:
                self.bring_in(sorted(without), deadline.remaining() or ANSWER_WITHIN)
        except BaseException:
            self.leave()
            raise
        return self

    def _take_cells_over(self, show: takeover.Show | None) -> list[takeover.OrphanedCell]:
        """Go on with the cells that the process before this one has left, and return them.

        Without ``show`` these are only the elastic ones that run: ranks must be able to join and leave them.
        """
        self._own(self.group.pids())
        pids = self.group.pids()
        left, interrupted = takeover.find(self.runs.questions, pids)
        for cell in left:  # also those that are not resumed: their ranks are shown as running them
            if cell.label:
                # A cell of this notebook may have the same number.
                self.client.label_cell(cell.cell, f"{cell.label} of the notebook before")
        if show is None:
            interrupted += tuple(cell.label or cell.cell for cell in left if cell.interrupted)
            left = [cell for cell in left if cell.order is not None and cell.running]
        for label in interrupted:
            self.tell(f"cell {label} {takeover.INTERRUPTED}")
        came = {rank for cell in left if cell.order is not None for rank in (*cell.joined, *cell.without)}
        self.newcomers.found({rank: started_at(pids[rank]) for rank in came})
        leaving = self.group.members.let_go
        self.resumed = [
            takeover.go_on(
                cell, self.runs, self.transcripts, NullSink() if show is None else show(cell), leaving
            )
            for cell in left
        ]
        return left

    def _own(self, ranks: Iterable[int]) -> None:
        """Tell ranks that this process takes what they write; they need its id, since they outlive it."""
        pid, near = os.getpid(), self.keeping is None or self.keeping.near
        self.runs.post(TO_RANK, encode(SetOwner(pid, start_time(pid), near)), tuple(ranks))

    @property
    def _coordinator_was_replaced(self) -> bool:
        """Whether the coordinator died while no process had this pool."""
        return self.keeping is not None and self.keeping.replaced(self._base)

    def _find(self, keeping: KeptPool) -> None:
        """Take in the ranks that another process has started. Missing ones have ended while no process had the pool."""
        pids, ended = dict(keeping.living(self._base)), keeping.ended()
        world = self.client.membership()
        wanted = tuple(rank for rank in world.expected or pids if rank not in world.leaving)
        if keeping.replaced(self._base):
            # The successor has never heard of ranks that ended before it started: go by the pool's size. The process before this one may
            # have ended in the middle of a resize, and ranks live that it has not counted yet.
            uncounted = pids.keys() & set(world.expected)
            known = {*range(keeping.size), *uncounted} - set(world.leaving)
            wanted = tuple(sorted(known))
        self.group.handle(RanksAdopted(wanted, pids, world.leaving))
        for rank in set(wanted) - set(pids):
            absent = "it ended while no notebook was attached"
            known_end = ended.get(rank)
            self.group.handle(
                Ended(rank, 0, absent)
                if known_end is None
                else replace(known_end, pid=0, reason=f"{absent}: {known_end.reason}")
            )

    def _request(self, options: Mapping[str, object]) -> PoolRequest:
        coordinator = self._base.coordinator
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
            fork_server=self._base.fork_server,
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
            self.group.waits(event.text)
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
        if self.runs.left_behind(event.rank, left):
            return event
        unread = "".join(text.text for text in left.rest if text.name == "stderr")
        return replace(event, tail=last_lines(f"{event.tail}\n{unread}")) if unread else event

    def _joined(self, rank: int, answer: bytes) -> None:
        if self.joining.answered(rank, answer.decode()):
            self.companion.rank_joined(rank)

    def _could_not_join(self, rank: int, why: str) -> None:
        self.tell(f"rank {rank} is out of reach for ipyparallel ({why}); cells run on it as before")

    def _is_ready(self, rank: int) -> None:
        if self.keeping is not None:
            self._own([rank])
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
        self._note_end("died", rank, reason)
        self.runs.rank_died(rank, reason, tail, detail)

    def _has_left(self, rank: int, died: str) -> None:
        """End the rank's part in all cells: it has left, as the pool wanted, or died on the way to the commit at which it was to."""
        self.joining.gone(rank)
        self._note_end("died" if died else "left", rank, died or "the pool was resized")
        self.runs.rank_died(rank, died or "it left the pool", left=not died)

    def _wrote_late(self, rank: int, late: Late) -> None:
        self.transcripts.late(rank, late.cell, late.chunks, shown=lambda: self.runs.credit_late(rank, late))

    def _why_lost(self, rank: int) -> str:
        member = self.group.members.get(rank)
        return member.reason if member is not None else "it left the pool"

    def _local_pid(self, rank: int) -> int | None:
        """The process of a rank on this host."""
        members = self.client.membership().members
        return next((m.pid for m in members if m.rank == rank and m.host == host_key()), None)

    def _fork_server_lost(self, reason: str) -> None:
        try:
            self._base.fork_server.respawn()
        except StartError as error:
            self._break(
                f"the process that ranks are forked from ended ({reason}), and no other one starts: {error}"
            )
            return
        self.note_kept()
        self.tell(
            f"the process that ranks are forked from ended ({reason.splitlines()[0].split(';')[0]}) and was replaced; "
            "the ranks and their variables are intact"
        )

    def _rebuilt(self) -> None:
        self.joining.ask_again()
        self.note_kept()

    def note_kept(self) -> None:
        """Write down that a process, or the size, has changed, for the process that attaches to the kept pool later."""
        if self.keeping is not None and not self._closed:
            self.keeping.update(self._base, len(self.group.members.wanted))

    def came(self, how: str, ranks: Sequence[int]) -> None:
        """These ranks are new; if the pool has no other rank, none of them counts as a newcomer."""
        self._note_arrivals(how, ranks)
        self.newcomers.came(how, ranks, self.group.members.wanted)

    def _note_arrivals(self, how: str, ranks: Iterable[int]) -> None:
        pids = self.group.pids()
        hosts = {member.rank: member.host for member in self.client.membership().members}
        for rank in ranks:
            self.history.add(MembershipChange(rank, "joined", how, hosts.get(rank, ""), pids.get(rank, 0)))

    def _note_end(self, what: str, rank: int, reason: str) -> None:
        came = self.history.arrival(rank)
        if came is not None and not self._closed:
            self.history.add(MembershipChange(rank, what, reason, came.host, came.pid))

    def check_elastic(self, size: int) -> None:
        """Raises ``InvalidRequestError`` if an elastic cell that runs can't do with this many ranks."""
        for cell, (bounds, _) in self.runs.elastic().items():
            bounds.check_size(size, self.runs.label(cell))

    def bring_in(self, ranks: Sequence[int], patience: float) -> None:
        """Let these ranks, which are new, take part in the elastic cells that run: they are first sent what the others know.

        If a rank can't take part, a line under the cell says so, and the others go on without it. ``patience`` is how many
        seconds a rank has for each answer and each piece.
        """
        new = tuple(rank for rank in ranks if rank in self.group.ready())
        brought: tuple[int, ...] | None = None
        for cell, (_, running) in self.runs.elastic().items():
            sources = [rank for rank in running if rank not in new and rank in self.group.ready()]
            if not new or not sources:
                continue
            if brought is None:  # a rank keeps what it was brought until it begins a cell
                brought = self._bring_known(sources, new, patience)
            if brought:
                self.runs.join(cell, brought)

    def _bring_known(self, sources: Sequence[int], new: Sequence[int], patience: float) -> tuple[int, ...]:
        """Bring to ``new`` what one of ``sources`` knows; if that rank dies meanwhile, what the next one knows.

        What did not reach a rank, as where a coordinator died that was to pass it on, is brought once more.

        Returns those of ``new`` that have it.
        """
        again = True
        waiting = list(sources)
        while waiting:
            source = waiting.pop(0)
            try:
                brought = transfer.bring_known(self.runs.questions, source, new, patience, near=self.near())
            except HvdlabError as error:
                why = str(error)
                if self._why_lost(source):
                    continue
                break
            if again and any(not self._why_lost(rank) for rank in brought.missed):
                again = False
                waiting.insert(0, source)
                continue
            for name, reason in brought.failed.items():
                self.tell(f"not brought to {format_ranks(new)}: {name} ({reason})")
            for rank, reason in brought.refused.items():
                if not self._why_lost(rank):  # the end of a lost rank is reported anyway
                    self._tell_apart([rank], reason)
            return tuple(rank for rank in new if rank not in brought.refused)
        self._tell_apart(new, why)
        return ()

    def _tell_apart(self, ranks: Sequence[int], why: str) -> None:
        """Tell the user that these ranks don't take part in the elastic cells that run."""
        self.tell(
            f"{format_ranks(ranks)} can't take part: {why}; `%hvd_pool restart {compact_ranks(ranks)}` tries again"
        )

    def near(self) -> set[int]:
        """Ranks that share memory with this process."""
        return {m.rank for m in self.client.membership().members if m.host == host_key()}

    def tell(self, text: str) -> None:
        """Show this to the user: under the cells that run, else before the next cell. Any thread."""
        if not self._closed and not self.runs.tell(text):
            self._news.append(text)

    def news(self) -> list[str]:
        """Return the texts that :meth:`tell` could not show, since no cell ran. Each is returned once."""
        news, self._news = self._news, []
        return news

    def _lost_hold(self, reason: str) -> None:
        """The pool's launcher has given it to another process, or ended it."""
        assert self.keeping is not None
        self.client.close()  # first: ranks that count as ended here are another notebook's, and the coordinator must not hear of it
        self._break(f"the pool `{self.keeping.name}` is lost to this notebook: {reason}")

    def _break(self, reason: str) -> None:
        if not self._closed:
            self.broken = reason
            self.group.broken(reason)

    def elastic_state(self, newcomers: tuple[int, ...]) -> ElasticState:
        """Return the ranks that there are, since when and from where, those that are awaited, and the history of the others."""
        members, world, history = self.group.members, self.client.membership(), self.history
        runs = self.runs
        states: dict[int, str] = {}
        for rank in members.wanted:
            member = members.get(rank)
            if member is None:
                continue
            if member.reason:
                states[rank] = f"lost: {member.reason}"
            elif rank in world.waiting:
                states[rank] = "waits to be let in"
            else:
                states[rank] = member.state.value
        states |= dict.fromkeys((rank for rank in members.let_go if rank not in states), LEAVES)
        return ElasticState(
            generation=world.epoch,
            cells=[(runs.label(cell), *found) for cell, found in runs.elastic().items()],
            members=states,
            awaited=tuple(rank for rank in members.wanted if rank not in members.ready),
            arrivals={rank: came for rank in states if (came := history.arrival(rank)) is not None},
            history=history.all(),
            newcomers=newcomers,
        )

    # -- checks ---------------------------------------------------------------------------------------------------

    def check_resizable(self, size: int) -> None:
        """Raises ``InvalidRequestError`` if the pool can't get this size."""
        now = len(self.group.members.wanted)
        if size != now:
            self.launch.capabilities.require(
                Capability.RESIZE, self.launcher, f"stop the pool of {now} and start one of {size}."
            )
        self.launch.check(size, self.hosts, already=min(now, size))

    def check_dropped(self, size: int) -> None:
        """Raises ``InvalidRequestError`` if a living rank would end, with its variables, in place of a lost one."""
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
        """Raises ``InvalidRequestError`` if single ranks can't be started."""
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
            self.keeping.disconnect(self._base)
            self.keeping.release()
            self.rebuilder.join()

    def _claim_end(self) -> bool:
        """Whether the caller is the one that ends the pool. False in a forked child of the pool's process."""
        with self._closing:
            if self._closed or os.getpid() != self._pid:
                return False
            self._closed = True
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
        self._base.close()
        self.rebuilder.join()
        if self.keeping is not None:
            self.keeping.forget()


def _stall_time() -> float | None:
    """Seconds after which a line under a cell says what it waits for, by the coordinator's settings; None: never."""
    launch = CoordinatorLaunch("", "", "", 0, **settings_from(os.environ))
    return launch.stall_seconds if launch.stall_seconds and not launch.stall_disable else None
