"""The launcher ``dask``: an actor on each of Dask's workers runs the agent that forks the ranks there.

::

    launcher ── pipes ── client's event loop ── calls of an actor ──▶ worker: actor ── pipes ──▶ agent ── forks ──▶ ranks

Dask carries orders and reports alone. Cells, output and collectives go over hvdlab's own channel, as on other hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.system import HostPosition
from hvdlab.collectives.time_limits import Deadline
from hvdlab.launch.command import default_python
from hvdlab.launch.host_agent import wire
from hvdlab.launch.host_agent.connection import AgentProcess
from hvdlab.launch.host_agent.starter import ExecStarter
from hvdlab.launch.host_discovery import HostSource
from hvdlab.launch.hosts import is_local
from hvdlab.launch.options import Option, OptionKind
from hvdlab.launch.queueing_starter import QueueingStarter
from hvdlab.launch.starter import (
    ENDED_WITH_JOB,
    Capabilities,
    Capability,
    Ended,
    LaunchRequest,
    RankObserver,
    Started,
    Waiting,
)

SLOTS_WITHIN = 100.0
"""Seconds that Dask has by default to get workers that have slots for all ranks."""


class DaskLauncher:
    """Launcher that starts ranks on the workers of this process's Dask client, or of the scheduler at ``DASK_SCHEDULER_ADDRESS``."""

    name = "dask"
    capabilities = Capabilities.all_but(
        {Capability.KEEP: "their agents on Dask's workers belong to the notebook's client"}
    )
    forks = False

    def __init__(self) -> None:
        self._client: Any = None

    def options(self) -> Sequence[Option]:
        """Return the options for the ranks of a worker, the wait for slots, and the interpreter."""
        return (
            Option("per_worker", "ranks of a worker (default: as many as it has threads)", OptionKind.COUNT),
            Option(
                "timeout",
                f"seconds within which there must be room for a rank (default: {SLOTS_WITHIN:g})",
                OptionKind.COUNT,
            ),
            Option("python", "interpreter of the ranks on every worker (default: the path of this one)"),
        )

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Raise ``InvalidRequestError`` if hosts are named, ``StartError`` without a Dask cluster."""
        if hosts:
            raise InvalidRequestError(
                "the launcher `dask` has its workers from Dask: name no hosts, but start workers where ranks are to be."
            )
        self._connected()

    def is_far(self, hosts: str) -> bool:
        """Return True unless the cluster is this host."""
        cluster = DaskCluster(self._connected())
        return not all(is_local(worker.machine) for worker in cluster.workers())

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> DaskStarter:
        """Return the starter of a job's ranks. Raises ``StartError`` without a Dask cluster."""
        options = request.options
        return DaskStarter(
            request,
            ranks,
            DaskCluster(self._connected(), int(str(options.get("per_worker", 0)))),
            python=str(options.get("python") or default_python()),
            timeout=float(str(options.get("timeout", SLOTS_WITHIN))),
        )

    def source(self) -> HostSource:
        """Return the workers as hosts of an elastic job."""
        return _Workers(DaskCluster(self._connected()))

    def _connected(self) -> Any:
        if self._client is None or self._client.status != "running":
            self._client = connect()
        return self._client


class _Workers(HostSource):
    """Host source that asks the scheduler."""

    def __init__(self, cluster: DaskCluster) -> None:
        self._cluster = cluster

    def find(self) -> Mapping[str, int]:
        return {worker.name: worker.slots for worker in self._cluster.workers()}


def connect() -> Any:
    """Return this process's client, or a new one. Raises ``StartError`` if there is no cluster, or a client that can't be waited for."""
    try:
        import dask.config  # pyright: ignore[reportMissingImports]
        import distributed  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise StartError("the launcher `dask` needs Dask: pip install hvdlab[dask]") from error
    try:
        client = distributed.default_client()
    except ValueError:
        address = dask.config.get("scheduler-address", None)
        if not address:
            raise StartError(
                "there is no Dask cluster to start ranks on: make a distributed.Client first, or name a scheduler by "
                "DASK_SCHEDULER_ADDRESS."
            ) from None
        try:
            client = distributed.Client(address)
        except (OSError, TimeoutError, ValueError) as error:
            raise StartError(f"Dask's scheduler at {address} can't be reached: {error}") from error
    if client.asynchronous:
        raise StartError(
            "this process's Dask client is asynchronous, which can't be waited for; make one with asynchronous=False."
        )
    if client.scheduler.address.startswith("inproc://"):
        raise StartError(
            "Dask's workers are threads of this process, where ranks can't be; start them with processes=True."
        )
    return client


_TURN = 0.5
"""Seconds between looks at the workers while no slot is free. Polling, as Dask's own ``wait_for_workers`` does."""


@dataclass(frozen=True, slots=True)
class DaskWorker:
    """Worker of Dask's, as a host of ranks.

    Attributes:
        name: Its name as a host of ranks.
        address: Where it is reached.
        machine: The address of its machine.
        slots: How many ranks it accepts.
    """

    name: str
    address: str
    machine: str
    slots: int


class DaskCluster:
    """A cluster of Dask's, with the workers that its scheduler lists now.

    Args:
        client: Dask's client.
        per_worker: How many ranks each accepts; 0 for as many as it has threads.
    """

    def __init__(self, client: Any, per_worker: int = 0) -> None:
        self.client, self._per_worker = client, per_worker

    def workers(self) -> list[DaskWorker]:
        """Return the running workers; workers of a machine follow each other.

        Raises:
            StartError: The scheduler does not answer.
        """
        try:
            found = self.client.sync(self.client.scheduler.identity, n_workers=-1)["workers"]
        except Exception as error:
            raise StartError(f"Dask's scheduler does not answer ({type(error).__name__}: {error})") from error
        workers = [
            DaskWorker(
                _host_name(f"{its['name']}", address),
                address,
                its["host"],
                self._per_worker or its["nthreads"],
            )
            for address, its in found.items()
            if its.get("status", "running") == "running"
        ]
        machines = list(dict.fromkeys(worker.machine for worker in workers))
        return sorted(workers, key=lambda worker: machines.index(worker.machine))


def _host_name(name: str, address: str) -> str:
    """Return a name that a host may have: ``worker-0`` for the worker 0, and the address without its protocol for one that is named by it."""
    if name.isdigit():
        return f"worker-{name}"
    return re.sub(r"[^\w.-]", "-", address.partition("://")[2] if "://" in name else name)


class WorkerTransport:
    """A :class:`~hvdlab.launch.host_agent.connection.HostTransport` by actors on workers.

    Args:
        cluster: The cluster of the workers.
    """

    def __init__(self, cluster: DaskCluster) -> None:
        self._cluster = cluster
        #: The workers by their names, as the scheduler listed them when ranks were placed last.
        self.known: Mapping[str, DaskWorker] = {}

    def is_here(self, host: str) -> bool:
        """Return False always: a process of another parent is not the worker's."""
        return False

    def connect(self, host: str, python: str, errors: IO[bytes] | None) -> ActorConnection:
        """Connect by an actor on the worker."""
        if errors is not None:
            # The file would stay open: the agent's standard error goes to the log of the worker.
            errors.close()
        return ActorConnection(self._cluster.client, self.known[host].address, python)

    def machine(self, host: str) -> str:
        """Return the worker's machine."""
        worker = self.known.get(host)
        return worker.machine if worker is not None else host

    def variables(self, host: str) -> Mapping[str, str]:
        """Return no variables: the cluster decides on a worker's environment."""
        return {}


class DaskStarter(QueueingStarter):
    """A :class:`~hvdlab.launch.starter.PlacingStarter` of ranks on workers.

    Args:
        request: The job's launch request.
        ranks: Observer that gets the ranks' events.
        cluster: The cluster of the workers.
        python: The interpreter of agents and ranks.
        timeout: Seconds within which slots must be free.
    """

    def __init__(
        self,
        request: LaunchRequest,
        ranks: RankObserver,
        cluster: DaskCluster,
        *,
        python: str,
        timeout: float,
    ) -> None:
        super().__init__(ranks, "Dask")
        self._cluster, self._timeout = cluster, timeout
        self._transport = WorkerTransport(cluster)
        #: Rank to its worker's name, from its order to its end. Guarded by the lock.
        self._host_of: dict[int, str] = {}
        self._exec = ExecStarter(request, self, (), transport=self._transport, python=python)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start_on(self, host: str, ranks: Sequence[int], size: int) -> None:
        """Start a rank as :meth:`start` does, on a worker that :meth:`DaskLauncher.source` has named, regardless of its free slots.

        Raises:
            InvalidRequestError: This was closed.
            StartError: There is no such worker.
        """
        self._order(ranks, size, host)

    def give_up(self, host: str) -> None:
        """Drop the agent of a worker; its ranks are reported."""
        self._exec.give_up(host)

    def place(self, rank: int, size: int) -> HostPosition | None:
        """Return ``None``: a rank's place depends on the workers that exist when it starts."""
        return None

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Handle the agents' reports."""
        if isinstance(event, Ended):
            with self._changed:
                self._host_of.pop(event.rank, None)
        self._ranks.handle(event)

    def _request_slots(self, ranks: Sequence[int], size: int, host: str) -> None:
        if host:
            known = {worker.name: worker for worker in self._cluster.workers()}
            if host not in known:
                raise StartError(f"{host} is no worker of the Dask cluster")
            with self._changed:
                self._start_on_workers({host: list(ranks)}, known, size)
            return
        shortage = self._place_all(ranks, size)
        if shortage:
            self._ranks.handle(Waiting(f"waiting for Dask: {shortage}"))
            self._run_thread(partial(self._wait, tuple(ranks), size), f"dask-{min(ranks)}")

    def _signal_placed(self, rank: int, number: int) -> None:
        self._exec.signal(rank, number)

    def _close_placed(self, timeout: float) -> None:
        self._exec.close(timeout)

    # -- the thread of ranks that wait for slots ----------------------------------------------------------------------

    def _wait(self, ranks: Sequence[int], size: int) -> None:
        """Start the ranks when slots are free, or report why they were not started."""
        reason = self._await_slots(ranks, size)
        self._ranks.handle(Waiting(""))
        if reason:
            self._withdraw(ranks, reason)

    def _await_slots(self, ranks: Sequence[int], size: int) -> str:
        """Wait for slots, and start the ranks. Returns why they were not started; empty if they were."""
        deadline, reported = Deadline(self._timeout), ""
        # The first pause comes before the first question: start() has just asked, and found none free.
        while not self._closing.wait(_TURN):
            try:
                shortage = self._place_all(ranks, size)
            except (StartError, InvalidRequestError) as error:
                return str(error)
            if not shortage:
                return ""
            if deadline.expired:
                return f"Dask had no room for it within {self._timeout:g} s: {shortage}"
            if shortage != reported:
                self._ranks.handle(Waiting(f"waiting for Dask: {shortage}"))
                reported = shortage
        return ENDED_WITH_JOB

    def _place_all(self, ranks: Sequence[int], size: int) -> str:
        """Start the ranks if slots are free for all that still wait; otherwise return a text on the shortage."""
        workers = self._cluster.workers()
        with self._changed:
            wanted = [rank for rank in ranks if rank in self._waiting]
            taken = list(self._host_of.values())
            free = [worker.name for worker in workers for _ in range(worker.slots - taken.count(worker.name))]
            if len(free) < len(wanted):
                slots = sum(worker.slots for worker in workers)
                return f"{len(wanted)} ranks need as many slots; {len(workers)} workers have {slots}, of which {len(free)} are free"
            by_host: dict[str, list[int]] = {}
            for rank, host in zip(sorted(wanted), free, strict=False):
                by_host.setdefault(host, []).append(rank)
            self._start_on_workers(by_host, {worker.name: worker for worker in workers}, size)
            return ""

    def _start_on_workers(
        self, by_host: Mapping[str, list[int]], workers: Mapping[str, DaskWorker], size: int
    ) -> None:
        """Start waiting ranks by the agents of their workers. The lock is held."""
        self._transport.known = workers
        for host, those in by_host.items():
            self._exec.start_on(host, those, size)
            # Only now: ranks that could not be started still wait, and are withdrawn with the reason.
            self._claim(those)
            self._host_of |= dict.fromkeys(those, host)


class AgentActor:
    """Actor that runs an agent on a worker, until it is hung up or dropped, or the worker ends: then the agent's input ends.

    Its methods run on the worker's event loop, so that they occupy none of the threads of the worker's tasks.

    Args:
        python: The agent's interpreter.

    Raises:
        OSError: There is no such interpreter.
    """

    def __init__(self, python: str) -> None:
        self._agent = AgentProcess(python)
        self._reports: asyncio.StreamReader | None = None

    async def order(self, data: bytes) -> None:
        """Pass this on to the agent."""
        await asyncio.to_thread(self._agent.write_orders, bytes(data))

    async def reports(self) -> bytes:
        """Wait for the agent's next reports and return them; none once it has ended."""
        if self._reports is None:
            self._reports, _ = await _read_pipe(self._agent.reports_pipe)
        return await self._reports.read(wire.PIECE)

    async def hang_up(self) -> None:
        """Let the agent end its ranks and itself."""
        self._agent.close_orders()


class ActorConnection:
    """The connection to the agent on a worker; see :class:`~hvdlab.launch.host_agent.connection.AgentConnection`.

    A coroutine on the client's event loop passes on all bytes written to and read from the pipes.

    Args:
        client: Dask's client.
        worker: Address of the worker.
        python: The agent's interpreter.
    """

    def __init__(self, client: Any, worker: str, python: str) -> None:
        self._client, self._worker, self._python = client, worker, python
        self.inbox, self._reports = os.pipe2(os.O_CLOEXEC)
        self._orders, self.outbox = os.pipe2(os.O_CLOEXEC)
        self._lock = threading.Lock()
        #: The descriptors that this side has to close; guarded by the lock.
        self._open = {self.inbox, self.outbox}
        #: Why the agent is lost, once it is.
        self._end_reason = ""
        #: Set when the relay has ended, after ``_end_reason`` was stored.
        self._over = threading.Event()
        self._relaying: Future[None] = asyncio.run_coroutine_threadsafe(
            self._relay(), client.loop.asyncio_loop
        )

    def end_text(self, host: str, greeted: bool) -> str:
        """Return Dask's text on the end."""
        # The end of the pipe can be seen before the relay has stored its reason.
        self._over.wait(1.0)
        return f"its agent on the Dask worker {host} is gone" + (
            f": {self._end_reason}" if self._end_reason else ""
        )

    def hang_up(self) -> None:
        """See :class:`~hvdlab.launch.host_agent.connection.AgentConnection`."""
        self._close(self.outbox)

    def kill(self) -> None:
        """Drop the actor: nothing refers to it any more, and Dask deletes it."""
        self._relaying.cancel()

    def close(self, timeout: float) -> None:
        """See :class:`~hvdlab.launch.host_agent.connection.AgentConnection`."""
        self.hang_up()
        # A relay whose agent does not end, or whose worker hangs, ends only by its cancellation.
        if not self._over.wait(timeout):
            self.kill()
            self._over.wait(timeout)
        self._close(self.inbox)

    def _close(self, descriptor: int) -> None:
        with self._lock:
            # Both hang_up() and close() come here: closed a second time, the number could be that of
            # another file.
            if descriptor in self._open:
                self._open.remove(descriptor)
                os.close(descriptor)

    # -- the client's event loop --------------------------------------------------------------------------------------

    async def _relay(self) -> None:
        """Start the agent, and pass on orders and reports until it ends."""
        try:
            async with _closing_pipes(self._orders, self._reports) as (orders, reports):
                with self._client.as_current():
                    actor = await self._client.submit(
                        AgentActor,
                        self._python,
                        actor=True,
                        workers=[self._worker],
                        allow_other_workers=False,
                        key=f"hvdlab-agent-{uuid.uuid4().hex}",
                    )
                # Side by side: a call of reports() lasts until the agent has something to report.
                sending = asyncio.ensure_future(self._send(actor, orders))
                try:
                    while data := await actor.reports():
                        reports.write(bytes(data))
                        await reports.drain()
                finally:
                    sending.cancel()
        except Exception as error:  # noqa: BLE001  # whatever Dask, the worker or the actor raises
            self._end_reason = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            self._over.set()

    async def _send(self, actor: Any, orders: asyncio.StreamReader) -> None:
        while data := await orders.read(wire.PIECE):
            await actor.order(data)
        await actor.hang_up()


async def _read_pipe(pipe: Any) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """Return a reader of a pipe's file, and the transport whose end closes the file."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader, loop=loop), pipe)
    return reader, transport


@contextlib.asynccontextmanager
async def _closing_pipes(
    readable: int, writable: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Provide the ends of two pipes as streams, which are closed in the end."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        # Both before the first wait, at which a cancellation would leave the other one open.
        source = stack.enter_context(os.fdopen(readable, "rb", 0))
        sink = stack.enter_context(os.fdopen(writable, "wb", 0))
        reader, reading = await _read_pipe(source)
        stack.callback(reading.close)
        writing, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sink)
        stack.callback(writing.close)
        yield reader, asyncio.StreamWriter(writing, protocol, None, loop)
