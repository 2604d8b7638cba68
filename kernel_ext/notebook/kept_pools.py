"""Pools that outlive their notebook: how they are kept, found again, and ended by a process that never used them.

The processes of a :class:`LocalKeptPool` are on this host. Those of a :class:`LauncherKeptPool` are on a cluster (today: Ray): the
launcher's keeper process, not this host's fork server, watches the coordinator while no notebook is attached.
:func:`main` is the command ``hvdlab pools``.

The process that attaches to a kept pool also goes on with the cells that the previous one has left: it shows the output
that ranks still have of them (:func:`resume_cells`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from hvdlab._version import __version__
from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorLaunch, CoordinatorProcess, Listeners
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.failover.supervisor import server_of, take_over
from hvdlab.collectives.settings import WorldEnvironment
from hvdlab.collectives.system import host_key, process_state
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.forkserver.program import PROGRAM_NAME
from hvdlab.kernel_ext.notebook.cells.cell_events import DeadlineReached, PoolNews
from hvdlab.kernel_ext.notebook.cells.dispatch import CellDispatcher
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.cells.sink import Sinks
from hvdlab.kernel_ext.notebook.elastic import UnsyncedRanks
from hvdlab.kernel_ext.notebook.ipyparallel.launchers import LOCAL
from hvdlab.kernel_ext.notebook.output.transcript import TranscriptStore
from hvdlab.kernel_ext.notebook.prestart import PoolCoordinator, PoolProcesses, Prestart
from hvdlab.kernel_ext.notebook.rank_lifecycle import RankLifecycle
from hvdlab.kernel_ext.notebook.rank_states import RanksAdopted
from hvdlab.kernel_ext.notebook.registry import KeptPoolEntry, KeptPoolRegistry, Process, table
from hvdlab.kernel_ext.notebook.requests import RankRequests
from hvdlab.kernel_ext.wire.cells import ListRetainedCells, RetainedCell, RetainedCells, RunCell, SetOwner
from hvdlab.kernel_ext.wire.codec import TO_RANK, encode
from hvdlab.launch import registry as launchers
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.kept import AttachedJob, KeepRequest, KeptJob, LeaseOwner, no_such_pool
from hvdlab.launch.processes import (
    describe_signal,
    exit_status,
    open_process,
    readable,
    start_time,
    started_at,
)
from hvdlab.launch.starter import Ended, RankObserver, Starter

ANSWER_WITHIN = 5.0
"""Seconds that a coordinator has to hand over its socket."""
END_WITHIN = 5.0
"""Seconds that a coordinator has to end by itself."""


class AttachedCoordinator:
    """The process of a coordinator that another process has started. Attributes are those of ``CoordinatorProcess``.

    Attributes:
        replaced: Whether it is another coordinator than the pool's file names: that one died while no process used the pool.
    """

    tls_address = None
    certificate = None

    def __init__(self, kept: KeptPoolEntry) -> None:
        self.address, self.directory = kept.address, Path(kept.directory)
        self.token, self.client_token = kept.token, kept.client_token
        # The entry can name a coordinator that died while no process used the pool: the socket's owner is the one of now.
        pid = server_of(self.directory, ANSWER_WITHIN)
        first = Process.of(pid) if pid else kept.coordinator
        self.replaced = first != kept.coordinator
        self._first = first.pid
        # A descriptor: this process need not be its parent, so another process can get its number later.
        self._process = open_process(first.pid, first.started)
        self._successor: CoordinatorProcess | None = None
        self._launch: CoordinatorLaunch | None = None
        self._listeners: Listeners | None = None
        with contextlib.suppress(OSError):  # then it can't have a successor
            self._launch, listener = take_over(self.directory, ANSWER_WITHIN)
            self._listeners = Listeners(self.directory, "", listener)

    @property
    def pid(self) -> int:
        return self._first if self._successor is None else self._successor.pid

    def ending(self) -> str:
        """Return how the coordinator ended, as far as that can be known; empty as long as it runs."""
        if self._successor is not None:
            return self._successor.ending()
        if self._process >= 0 and not readable(self._process, 0):
            return ""
        status = exit_status(self._process, self.pid) if self._process >= 0 else None
        if status is None:
            return "its exit status is unknown"
        code = os.waitstatus_to_exitcode(status)
        return describe_signal(-code) if code < 0 else f"exit status {code}"

    def respawn(self, timeout: float = 10) -> None:
        """Kill the process of this coordinator, if it lives, and start a successor. Raises ``StartError``."""
        if self._successor is not None:
            self._successor.respawn(timeout)
            return
        if self._launch is None or self._listeners is None:
            raise StartError("it did not hand over what a successor needs")
        # First: two coordinators must not accept connections on the same sockets.
        self._end(((signal.SIGKILL, END_WITHIN),))
        self._successor = CoordinatorProcess.succeed(self._launch, self._listeners, timeout)

    def release(self) -> None:
        """Leave the coordinator to itself. Idempotent."""
        descriptor, self._process = self._process, -1
        if descriptor >= 0:
            os.close(descriptor)
        if self._successor is not None:
            self._successor.release()
        elif self._listeners is not None:
            self._listeners.close()

    def close(self) -> None:
        """End the coordinator and remove the files that it has left. Idempotent."""
        if self._successor is not None:
            self._successor.close()
        elif self._listeners is not None:
            self._listeners.close()  # first, or else ranks that lose the connection would wait for a successor
        self._end(((signal.SIGTERM, END_WITHIN), (signal.SIGKILL, END_WITHIN)))
        self.release()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, signals: Sequence[tuple[signal.Signals, float]]) -> None:
        if self._process < 0:
            return
        for number, seconds in signals:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)
            if readable(self._process, seconds):
                break
        with contextlib.suppress(ChildProcessError):  # this very process may have started it
            os.waitpid(self._first, os.WNOHANG)


class KeptPool(Protocol):
    """A kept pool, while this process uses it.

    Attributes:
        near: Whether this host's fork server forked the ranks, and stays with them and the coordinator.
    """

    near: bool

    @property
    def name(self) -> str:
        """Return the name that users know the pool by."""
        ...

    @property
    def plane(self) -> str:
        """Return the data plane that the user asked for."""
        ...

    @property
    def size(self) -> int:
        """Return the number of ranks when this process began to use the pool, or as it was noted since."""
        ...

    @property
    def ports(self) -> tuple[str, int]:
        """Return ``MASTER_ADDR`` and ``MASTER_PORT`` of its ranks."""
        ...

    @property
    def lost(self) -> str:
        """Why this process uses the pool no more although it did not let go of it; empty as long as it does."""
        ...

    def connect(self, deadline: Deadline) -> PoolProcesses:
        """Connect to the pool. Raises ``StartError``; the pool has no new process and no connection then."""
        ...

    def replaced(self, processes: PoolProcesses) -> bool:
        """Return whether the coordinator was replaced while no process used the pool."""
        ...

    def living(self, processes: PoolProcesses) -> Mapping[int, int]:
        """Return rank to process id of the ranks that lived when this process connected."""
        ...

    def ended(self) -> Mapping[int, Ended]:
        """Return how the other ranks ended, as far as that is known."""
        ...

    def starter(self) -> Starter | None:
        """Return the object that starts and ends ranks; ``None`` if that is the launcher's own."""
        ...

    def follow(self, ranks: RankObserver, lost: Callable[[str], None]) -> None:
        """Report starts and ends of ranks to ``ranks`` from now on; call ``lost`` with the reason if this process loses the pool."""
        ...

    def update(self, processes: PoolProcesses, size: int) -> None:
        """Record the pool's processes and the number of its ranks for the process that attaches later."""
        ...

    def disconnect(self, processes: PoolProcesses) -> None:
        """Close the connections, and end the processes of this host that do not belong to the pool."""
        ...

    def release(self) -> None:
        """Use the pool no more; it stays."""
        ...

    def forget(self) -> None:
        """End the keeping of the pool, which has ended: its entry, or the launcher's job, goes away."""
        ...


def adopt_ranks(keeping: KeptPool, processes: PoolProcesses, group: RankLifecycle) -> None:
    """Adopt the ranks that another process has started. Missing ones have ended while no process had the pool.

    Args:
        keeping: The kept pool.
        processes: Its processes, to which this process has connected.
        group: Takes the ranks.
    """
    pids, ended = dict(keeping.living(processes)), keeping.ended()
    world = processes.client.membership()
    # Ranks that leave at their next commit are still ranks of the world, but not of the pool.
    wanted = tuple(rank for rank in world.expected or pids if rank not in world.leaving)
    if keeping.replaced(processes):
        # The successor has never heard of ranks that ended before it started: go by the pool's size. The process before this
        # one may have ended in the middle of a resize, and ranks live that it has not counted yet.
        uncounted = pids.keys() & set(world.expected)
        known = {*range(keeping.size), *uncounted} - set(world.leaving)
        wanted = tuple(sorted(known))
    group.handle(RanksAdopted(wanted, pids, world.leaving))
    # The starter of this process has not seen these ends, so they are reported here only.
    for rank in set(wanted) - set(pids):
        absent = "it ended while no notebook was attached"
        known_end = ended.get(rank)
        group.handle(
            Ended(rank, 0, absent)
            if known_end is None
            else replace(known_end, pid=0, reason=f"{absent}: {known_end.reason}")
        )


class LocalKeptPool:
    """A :class:`KeptPool` of this host, by the registry's entry of it.

    Attributes:
        kept: The entry.
    """

    near = True
    lost = ""
    """A pool of this host stays with the process that uses it."""

    def __init__(self, registry: KeptPoolRegistry, kept: KeptPoolEntry) -> None:
        self._registry, self.kept = registry, kept
        #: The entry as it was written last.
        self._written = kept
        self._replaced = False

    @property
    def name(self) -> str:
        return self.kept.name

    @property
    def size(self) -> int:
        """Return the number of ranks in the entry."""
        return self.kept.size

    @property
    def plane(self) -> str:
        """Return the data plane that the user asked for."""
        return self.kept.plane

    @property
    def ports(self) -> tuple[str, int]:
        """Return ``MASTER_ADDR`` and ``MASTER_PORT`` of its ranks."""
        return self.kept.ports

    @classmethod
    def begin(
        cls,
        processes: PoolProcesses,
        name: str,
        *,
        size: int,
        plane: str,
        ports: tuple[str, int],
        deadline: Deadline,
    ) -> LocalKeptPool:
        """Have the fork server keep a pool when this process ends.

        Raises:
            InvalidRequestError: The name has been taken meanwhile.
            StartError: The pool can't be kept.
        """
        path = str(processes.coordinator.directory / "warm")
        # Before there is an entry: another process that reads it connects to this path.
        processes.fork_server.keep(path, deadline)
        kept = KeptPoolEntry(
            name=name,
            size=size,
            plane=plane,
            started=time.time(),
            address=processes.coordinator.address,
            token=processes.coordinator.token,
            client_token=processes.coordinator.client_token,
            directory=str(processes.coordinator.directory),
            coordinator=Process.of(processes.coordinator.pid),
            warm=Process.of(processes.fork_server.pid),
            path=path,
            ports=ports,
            owner=Process.of(os.getpid()),
            place=_here(),
            version=__version__,
        )
        registry = KeptPoolRegistry()
        return cls(registry, registry.add(kept))

    @classmethod
    def claim(cls, name: str) -> LocalKeptPool:
        """Become the owner of a pool. Raises ``InvalidRequestError`` if there is none, or another process uses it."""
        registry = KeptPoolRegistry()
        return cls(registry, registry.claim(name, _here()))

    def connect(self, deadline: Deadline) -> PoolProcesses:
        """Connect to the pool's processes. Raises ``StartError``."""
        # Messages are tagged with the names of their classes, which can differ from version to version.
        if self.kept.version != __version__:
            raise StartError(
                f"the pool `{self.name}` runs hvdlab {self.kept.version}, which hvdlab {__version__} can't talk to; attach "
                f"with that version, or end the pool by `hvdlab pools stop {self.name}`"
            )
        # The fork server first: until a process attaches, it is the one that replaces a coordinator that dies.
        warm = ForkServer.attach(self.kept.path, PROGRAM_NAME, deadline)
        coordinator: AttachedCoordinator | None = None
        try:
            coordinator = AttachedCoordinator(self.kept)
            self._replaced = coordinator.replaced
            client = _connect(self.kept, deadline)
        except BaseException:
            warm.detach()
            if coordinator is not None:
                coordinator.release()
            raise
        return PoolProcesses(warm, coordinator, client)

    def replaced(self, processes: PoolProcesses) -> bool:
        """Return whether the coordinator died while no process used the pool."""
        return self._replaced

    def living(self, processes: PoolProcesses) -> Mapping[int, int]:
        """Return rank to process id of the ranks that the fork server has."""
        return {
            number: child.pid for number, child in processes.fork_server.children().items() if number >= 0
        }

    def ended(self) -> Mapping[int, Ended]:
        """Return nothing: the fork server reports the ends that it has seen."""
        return {}

    def starter(self) -> None:
        """Return ``None``: the launcher's own starter starts ranks, by the fork server."""

    def follow(self, ranks: RankObserver, lost: Callable[[str], None]) -> None:
        """Do nothing: the fork server's connection reports starts and ends of ranks."""

    def update(self, processes: PoolProcesses, size: int) -> None:
        """Write changed processes, or a changed size, into the entry. Raises ``StartError`` if that is impossible."""
        coordinator, warm = Process.of(processes.coordinator.pid), Process.of(processes.fork_server.pid)
        kept = msgspec.structs.replace(self.kept, coordinator=coordinator, warm=warm, size=size)
        self.kept = kept
        # Not compared with `kept`: the next update repeats a write that failed.
        if kept != self._written:
            self._registry.write(kept)
            self._written = kept

    def disconnect(self, processes: PoolProcesses) -> None:
        """Let go of the pool's processes."""
        processes.detach()
        # Only now no other fork server can be started. An entry with one that has died counts as that of a pool which has ended.
        self.kept = msgspec.structs.replace(self.kept, warm=Process.of(processes.fork_server.pid))

    def release(self) -> None:
        """Note that the pool has no owner any more."""
        self._registry.release(self.kept)

    def forget(self) -> None:
        """Remove the entry: the pool ends."""
        self._registry.remove(self.name)


def _connect(kept: KeptPoolEntry, deadline: Deadline) -> Client:
    """Return a client of a pool's coordinator, once that knows its ranks: a successor has to wait for their connections."""
    client = Client.connect(kept.address, kept.client_token, timeout=deadline.remaining() or 10)
    try:
        client.wait_for(lambda world: not world.restoring, deadline.remaining())
    except BaseException:
        client.close()
        raise
    return client


def _here() -> str:
    """Return the working directory as text that can be shown: a path need not be UTF-8."""
    return os.fsencode(os.getcwd()).decode("utf-8", "backslashreplace")


def stop_local(name: str) -> None:
    """End a kept pool that no process uses.

    Raises:
        InvalidRequestError: There is none of that name, or a process uses it.
    """
    keeping = LocalKeptPool.claim(name)
    coordinator = AttachedCoordinator(keeping.kept)
    try:
        warm = ForkServer.attach(keeping.kept.path, PROGRAM_NAME, Deadline(END_WITHIN))
    except StartError:  # the fork server does not listen: kill it, and its ranks end with it
        keeping.kept.warm.send_signal(signal.SIGKILL)
    else:
        warm.close()
    # Last: ranks that lose their coordinator would wait for a successor.
    coordinator.close()
    keeping.forget()


class LauncherKeptCoordinator:
    """Coordinator of such a pool, which runs elsewhere. Attributes are those of ``CoordinatorProcess``.

    Args:
        job: The pool.
        near: A coordinator of this host, which has no ranks: its directory takes the output of cells, and is removed with it, also
            if this process is killed.
    """

    pid = 0
    """No process of this host."""

    def __init__(self, job: AttachedJob, near: PoolCoordinator) -> None:
        self._job, self._near = job, near
        world = job.access.world
        self.address = self.tls_address = world.coordinator
        self.certificate = world.certificate
        self.token, self.client_token = world.token, job.access.client_token
        self.directory: Path = near.directory

    def ending(self) -> str:
        """Return how the coordinator ended; empty as long as it runs."""
        if self._job.lost:
            return self._job.lost
        try:
            return self._job.coordinator_ended()
        except StartError as error:
            return str(error)

    def respawn(self, timeout: float = 10) -> None:
        """Have a successor, unless there is one. Raises ``StartError``."""
        if self._job.lost:
            raise StartError(self._job.lost)
        self._job.replace_coordinator(timeout)

    def release(self) -> None:
        """Leave the coordinator to itself. Idempotent."""
        self._near.close()

    def close(self) -> None:
        """End the pool, which the coordinator belongs to. Idempotent."""
        self._job.end()
        self._near.close()


class LauncherKeptPool:
    """A :class:`KeptPool` that its launcher keeps. Made by :meth:`begin` and :meth:`claim`.

    Attributes:
        launcher, name, plane: The names of the launcher, the pool and its data plane.
    """

    near = False

    def __init__(self, job: AttachedJob) -> None:
        self._job = job
        self.launcher, self.name, self.plane = job.job.launcher, job.job.name, job.job.plane

    @classmethod
    def begin(
        cls,
        launcher: str,
        name: str,
        size: int,
        plane: str,
        module: str,
        options: Mapping[str, object],
        deadline: Deadline,
    ) -> LauncherKeptPool:
        """Begin a pool without ranks. Raises ``InvalidRequestError`` for the name, ``StartError`` if it can't be begun."""
        keeper = launchers.keeper(launcher)
        assert keeper is not None
        # Encoded here: the keeper sends it when the owner has died, and knows no messages of kernels.
        unowned = (TO_RANK, encode(SetOwner(0, 0)))
        request = KeepRequest(name, size, plane, module, options, unowned, this_process())
        return cls(keeper.begin(request, deadline.remaining() or 60))

    @classmethod
    def claim(cls, name: str, launcher: str) -> LauncherKeptPool:
        """Use a pool. Raises ``InvalidRequestError`` if there is none, or another process uses it, ``StartError`` if it does not answer."""
        keeper = launchers.keeper(launcher)
        assert keeper is not None
        return cls(keeper.claim(name, this_process()))

    @property
    def world(self) -> WorldEnvironment:
        """Return the part of its environment that is the same for all ranks."""
        return self._job.access.world

    @property
    def ports(self) -> tuple[str, int]:
        """Return ``MASTER_ADDR`` and ``MASTER_PORT`` of its ranks."""
        return self.world.master_address, self.world.master_port

    @property
    def lost(self) -> str:
        """Why this process uses the pool no more although it did not let go of it; empty as long as it does."""
        return self._job.lost

    @property
    def size(self) -> int:
        """Return the number of ranks that it had when this process began to use it."""
        return self._job.access.size

    def living(self, processes: PoolProcesses) -> Mapping[int, int]:
        """Return rank to process of those that lived then."""
        return self._job.access.living

    def ended(self) -> Mapping[int, Ended]:
        """Return how the others have ended, as far as that is known."""
        return self._job.access.lost

    def replaced(self, processes: PoolProcesses) -> bool:
        """Return whether the coordinator was replaced while no process used the pool."""
        return self._job.access.replaced

    def connect(self, deadline: Deadline, warm: Prestart | None = None) -> PoolProcesses:
        """Connect to it. Raises ``StartError``; the processes of this host have ended then."""
        processes: PoolProcesses | None = None
        try:
            if warm is None:
                warm = Prestart.begin(preload=False)
            processes = warm.take(deadline)
            near, world = processes.coordinator, self.world
            processes.client.close()
            processes.coordinator = LauncherKeptCoordinator(self._job, near)
            processes.client = Client.connect(
                world.coordinator,
                self._job.access.client_token,
                certificate=world.certificate,
                timeout=deadline.remaining() or 10,
            )
            processes.client.wait_for(lambda membership: not membership.restoring, deadline.remaining())
        except BaseException:
            if processes is not None:
                processes.end_local()
            raise
        return processes

    def starter(self) -> Starter:
        """Return the starter that starts and ends its ranks."""
        return self._job.starter()

    def follow(self, ranks: RankObserver, lost: Callable[[str], None]) -> None:
        """Report starts and ends of ranks to ``ranks`` from now on; call ``lost`` with the reason if this process loses the pool."""
        self._job.follow(ranks, lost)

    def update(self, processes: PoolProcesses, size: int) -> None:
        """Note how many ranks it has."""
        self._job.resized(size)

    def disconnect(self, processes: PoolProcesses) -> None:
        """End the processes of this host, and close the connections."""
        processes.end_local()

    def release(self) -> None:
        """Use it no more; it stays."""
        self._job.detach()

    def forget(self) -> None:
        """End the launcher's job."""
        self._job.end()


def this_process() -> LeaseOwner:
    """Return this process, in the form in which a keeper stores the pool's owner."""
    pid = os.getpid()
    place = os.fsencode(os.getcwd()).decode("utf-8", "backslashreplace")
    return LeaseOwner(pid, start_time(pid), host_key(), place)


def kept_elsewhere(launcher: str | None = None) -> tuple[list[KeptJob], list[str]]:
    """Return the pools that launchers keep.

    Args:
        launcher: Only this one's, which is searched for the place where they are kept; by default those of all launchers of which that is known.

    Returns:
        The pools, and for each launcher whose pools can't be listed, why.
    """
    found: list[KeptJob] = []
    problems: list[str] = []
    for name in launchers.KEEPERS:
        keeper = launchers.keeper(name)
        if keeper is None or not (launcher == name or (launcher is None and keeper.reachable())):
            continue
        try:
            found += keeper.all()
        except StartError as error:
            problems.append(f"pools of the launcher `{name}` can't be listed: {error}")
    return found, problems


def launcher_of(name: str) -> str:
    """Return the launcher of the kept pool of this name. Raises ``InvalidRequestError`` if there is none."""
    here = [kept.name for kept in KeptPoolRegistry().all()]
    if name in here:
        return LOCAL
    elsewhere, problems = kept_elsewhere()
    for job in elsewhere:
        if job.name == name:
            return job.launcher
    known = no_such_pool(name, [*here, *(job.name for job in elsewhere)])
    raise InvalidRequestError("; ".join([known, *problems]))


def stop(name: str) -> None:
    """End a kept pool that no process uses, on this host or with its launcher.

    Raises:
        InvalidRequestError: There is none of that name, or a process uses it.
        StartError: It does not answer.
    """
    launcher = launcher_of(name)
    if launcher == LOCAL:
        stop_local(name)
    else:
        LauncherKeptPool.claim(name, launcher).forget()


def main(arguments: Sequence[str]) -> int:
    """Run ``hvdlab pools``: list the kept pools, or end some. Returns the exit code.

    Raises:
        InvalidRequestError: The command can't be read, or there is no such pool, or a process uses it.
    """
    match list(arguments):
        case []:
            elsewhere, problems = kept_elsewhere()
            print("\n".join([table(KeptPoolRegistry().all(), elsewhere), *problems]))
        case ["stop", *names] if names:
            for name in names:
                stop(name)
                print(f"the pool `{name}` has ended, with its ranks and their variables")
        case _:
            raise InvalidRequestError("write `hvdlab pools`, or `hvdlab pools stop NAME ...`")
    return 0


CELLS_WITHIN = 2.0
"""Seconds that ranks have to answer; one that is stopped does not."""
SLOW_WITHIN = 15.0
"""Seconds more for ranks that are not stopped: cells that a rank does not name are lost, and much mail may precede its answer."""
STOPPED = ("T", "t")
INTERRUPTED = "was interrupted when its notebook ended"
"""Text in the next notebook for a cell that ended by the interrupt which Jupyter sends before it shuts a kernel down."""


@dataclass(frozen=True, slots=True)
class OrphanedCell:
    """Cell whose end no process of the pool's has seen.

    Attributes:
        cell, label: Its id, and the name that users know it by, such as ``[7]``.
        parts: Rank to the part of it that the rank retains.
        without: Ranks that have no part of it. An elastic cell runs on all ranks: these came later, and were not sent it yet.
    """

    cell: str
    label: str
    parts: dict[int, RetainedCell]
    without: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that have a part of the cell."""
        return tuple(self.parts)

    @property
    def running(self) -> tuple[int, ...]:
        """Return the ranks that have not ended the cell."""
        return tuple(rank for rank, part in self.parts.items() if part.running)

    @property
    def interrupted(self) -> bool:
        """Return whether the end of its notebook has interrupted it on a rank: no notebook has seen that end."""
        return any(part.interrupted for part in self.parts.values())

    @property
    def order(self) -> RunCell | None:
        """Return the message that ranks were sent, if the cell is elastic."""
        return next((part.order for part in self.parts.values() if part.order is not None), None)

    @property
    def joined(self) -> tuple[int, ...]:
        """Return the ranks that were sent the cell, which is elastic, while others ran it."""
        return tuple(rank for rank, part in self.parts.items() if part.order is not None and part.order.joins)

    @property
    def missing(self) -> str:
        """Return a sentence about output that was too much to be kept; empty if there is none."""
        lost = {rank: part.dropped for rank, part in self.parts.items() if part.dropped}
        if not lost:
            return ""
        size = sum(lost.values()) / 2**20
        return f"{format_ranks(tuple(lost))}: {size:.1f} MiB of what they wrote before the following were too much to be kept"


Show = Callable[[OrphanedCell], Sinks]


def find_orphans(
    questions: RankRequests, pids: Mapping[int, int]
) -> tuple[list[OrphanedCell], tuple[str, ...]]:
    """Ask these ranks, whose processes are on this host, for their cells, in the order in which the first rank has them.

    Returns:
        The cells, and the labels of cells that were interrupted when their notebook ended although it has seen their end.
    """
    # A stopped rank does not answer, and its cells are lost to this notebook: only ranks that run get more time.
    answers = questions.ask(ListRetainedCells, tuple(pids), Deadline(CELLS_WITHIN))
    slow = [rank for rank, pid in pids.items() if rank not in answers and process_state(pid) not in STOPPED]
    if slow:
        answers |= questions.ask(ListRetainedCells, slow, Deadline(SLOW_WITHIN))
    found: dict[str, OrphanedCell] = {}
    heard = {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, RetainedCells)}
    held = {rank: answer.cells for rank, answer in heard.items()}
    for rank, parts in held.items():
        for part in parts:
            found.setdefault(part.cell, OrphanedCell(part.cell, part.label, {})).parts[rank] = part
    cells = [
        replace(cell, without=tuple(rank for rank in held if rank not in cell.parts))
        for cell in found.values()
    ]
    return cells, tuple(dict.fromkeys(answer.interrupted for answer in heard.values() if answer.interrupted))


def resume_cells(
    client: Client,
    group: RankLifecycle,
    runs: CellDispatcher,
    transcripts: TranscriptStore,
    newcomers: UnsyncedRanks,
    show: Show | None,
) -> tuple[list[OrphanedCell], list[CellHandle]]:
    """Go on with the cells that the process before this one has left.

    Args:
        client: The connection to the coordinator.
        group: The ranks, which the pool has adopted.
        runs: Takes the cells over.
        transcripts: Records them.
        newcomers: Takes the ranks that were started after others.
        show: Returns the sinks of a cell. Without it only elastic cells that run are resumed: ranks must be able to join and
            leave them.

    Returns:
        The cells, and a handle for each.
    """
    pids = group.pids()
    left, interrupted = find_orphans(runs.requests, pids)
    for cell in left:  # also those that are not resumed: their ranks are shown as running them
        if cell.label:
            # A cell of this notebook may have the same number.
            client.label_cell(cell.cell, f"{cell.label} of the notebook before")
    if show is None:
        interrupted += tuple(cell.label or cell.cell for cell in left if cell.interrupted)
        left = [cell for cell in left if cell.order is not None and cell.running]
    for label in interrupted:
        runs.notice(f"cell {label} {INTERRUPTED}")
    came = {rank for cell in left if cell.order is not None for rank in (*cell.joined, *cell.without)}
    newcomers.restore({rank: started_at(pids[rank]) for rank in came})
    leaving = group.members.let_go
    handles = [
        resume_cell(cell, runs, transcripts, None if show is None else show(cell), leaving) for cell in left
    ]
    return left, handles


def resume_cell(
    left: OrphanedCell,
    runs: CellDispatcher,
    transcripts: TranscriptStore,
    sinks: Sinks,
    leaving: tuple[int, ...] = (),
) -> CellHandle:
    """Take such a cell over. The ranks' output of it comes with the next :meth:`CellDispatcher.resync`.

    Args:
        leaving: Ranks that leave at the next commit of elastic training.
    """
    recorder = transcripts.record(left.cell, left.label, left.ranks, sinks)
    before = {rank: part.before for rank, part in left.parts.items()}
    handle = runs.take_over(
        left.cell, left.label, before, recorder, order=left.order, joined=left.joined, leaving=leaving
    )
    # Any event has the driver call `tick`; this one changes nothing as long as no time limit has passed.
    recorder.driven(lambda: handle.post(DeadlineReached()))
    if left.missing:
        handle.post(PoolNews(left.missing))
    return handle
