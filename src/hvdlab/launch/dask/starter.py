"""Starts ranks on Dask's workers: waits until there is room for them, and has an agent on each worker."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.engine.hosts import Place
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.launch.dask.agent_actor import ActorConnection
from hvdlab.launch.exec_agent.starter import ExecStarter
from hvdlab.launch.starter import Ended, LaunchRequest, RankObserver, Started, Waiting

_TURN = 0.5
"""Seconds between looks at the workers while there is no room. Polling, as Dask's own ``wait_for_workers`` does."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of Dask's.

    Attributes:
        name: Its name as a host of ranks.
        address: Where it is reached.
        machine: The address of its machine.
        slots: How many ranks it takes.
    """

    name: str
    address: str
    machine: str
    slots: int


class Room:
    """The workers of a cluster as the scheduler lists them now.

    Args:
        client: Dask's client.
        per_worker: How many ranks each takes; 0 for as many as it has threads.
    """

    def __init__(self, client: Any, per_worker: int = 0) -> None:
        self.client, self._per_worker = client, per_worker

    def workers(self) -> list[Worker]:
        """Those that run; workers of a machine follow each other.

        Raises:
            StartError: The scheduler does not answer.
        """
        try:
            found = self.client.sync(self.client.scheduler.identity, n_workers=-1)["workers"]
        except Exception as error:
            raise StartError(f"Dask's scheduler does not answer ({type(error).__name__}: {error})") from error
        workers = [
            Worker(
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
    """A name that a host may have: ``worker-0`` for the worker 0, and the address without its protocol for one that is named by it."""
    if name.isdigit():
        return f"worker-{name}"
    return re.sub(r"[^\w.-]", "-", address.partition("://")[2] if "://" in name else name)


class WorkerReach:
    """A :class:`~hvdlab.launch.exec_agent.link.Reach` by actors on workers.

    Args:
        room: The workers.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        #: The workers by their names, as the scheduler listed them when ranks were placed last.
        self.known: Mapping[str, Worker] = {}

    def is_here(self, host: str) -> bool:
        """Always False: a process of another parent is not the worker's."""
        return False

    def connect(self, host: str, python: str, errors: IO[bytes] | None) -> ActorConnection:
        """By an actor on the worker."""
        if errors is not None:
            errors.close()
        return ActorConnection(self._room.client, self.known[host].address, python)

    def machine(self, host: str) -> str:
        """The worker's machine."""
        worker = self.known.get(host)
        return worker.machine if worker is not None else host

    def variables(self, host: str) -> Mapping[str, str]:
        """None: a worker's environment is the cluster's business."""
        return {}


class DaskStarter:
    """A :class:`~hvdlab.launch.starter.PlacingStarter` of ranks on workers.

    Ranks that have no room yet are waited for by a thread.

    Args:
        request: What the ranks are started for.
        ranks: Takes what happens to ranks.
        room: The workers.
        python: The interpreter of agents and ranks.
        timeout: Seconds within which there must be room.
    """

    def __init__(
        self, request: LaunchRequest, ranks: RankObserver, room: Room, *, python: str, timeout: float
    ) -> None:
        self._ranks, self._room, self._timeout = ranks, room, timeout
        self._reach = WorkerReach(room)
        self._lock = threading.Lock()
        #: Rank to its worker's name, from its order to its end; empty as long as it waits for room. Guarded by the lock, as is the
        #: following.
        self._host_of: dict[int, str] = {}
        self._waiting: list[threading.Thread] = []
        self._closing = threading.Event()
        self._exec = ExecStarter(request, self, (), reach=self._reach, python=python)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have ranks started as soon as the workers have room.

        Raises:
            InvalidRequestError: This was closed.
            StartError: Dask's scheduler does not answer.
        """
        with self._lock:
            if self._closing.is_set():
                raise InvalidRequestError("no rank can be started any more: the job has ended.")
            self._host_of |= dict.fromkeys(ranks, "")
        try:
            lacking = self._place_all(ranks, size)
        except BaseException:
            self._withdrawn(ranks)
            raise
        if lacking:
            self._ranks.handle(Waiting(f"waiting for Dask: {lacking}"))
            thread = threading.Thread(
                target=self._wait, args=(tuple(ranks), size), name=f"hvdlab-dask-{min(ranks)}", daemon=True
            )
            with self._lock:
                self._waiting = [each for each in self._waiting if each.is_alive()] + [thread]
                thread.start()

    def start_on(self, host: str, ranks: Sequence[int], size: int) -> None:
        """As :meth:`start`, on a worker that :meth:`DaskLauncher.source` has named, whatever room it has.

        Raises:
            InvalidRequestError: This was closed.
            StartError: There is no such worker.
        """
        known = {worker.name: worker for worker in self._room.workers()}
        if host not in known:
            raise StartError(f"{host} is no worker of the Dask cluster")
        with self._lock:
            self._reach.known = known
            self._host_of |= dict.fromkeys(ranks, host)
            self._exec.start_on(host, ranks, size)

    def give_up(self, host: str) -> None:
        """Drop the agent of a worker; its ranks are reported."""
        self._exec.give_up(host)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank. If it would end the rank, one that has no room yet is not started."""
        with self._lock:
            waits = self._host_of.get(rank) == "" and number in _ENDING
            if waits:
                del self._host_of[rank]
        if waits:
            said = f"it was ended by {signal.Signals(number).name} before there was room for it"
            self._ranks.handle(Ended(rank, 0, said))
        else:
            self._exec.signal(rank, number)

    def place(self, rank: int, size: int) -> Place | None:
        """``None``: only the workers that there are when a rank is started say where it is."""
        return None

    def close(self, timeout: float) -> None:
        """Wait ``timeout`` seconds for ranks that are leaving, then have the agents end what is left. Idempotent."""
        self._exec.close(timeout)
        self._closing.set()
        with self._lock:
            threads = list(self._waiting)
        for thread in threads:
            thread.join()

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Take what the agents report."""
        if isinstance(event, Ended):
            with self._lock:
                self._host_of.pop(event.rank, None)
        self._ranks.handle(event)

    def _withdrawn(self, ranks: Sequence[int]) -> list[int]:
        """Forget ranks that have no room yet. Returns those that were still wanted."""
        with self._lock:
            left = [rank for rank in ranks if self._host_of.get(rank) == ""]
            for rank in left:
                del self._host_of[rank]
        return left

    # -- the thread of ranks that wait for room -----------------------------------------------------------------------

    def _wait(self, ranks: Sequence[int], size: int) -> None:
        """Start the ranks when there is room, or report why they were not started."""
        reason = self._room_for(ranks, size)
        self._ranks.handle(Waiting(""))
        for rank in self._withdrawn(ranks) if reason else ():
            self._ranks.handle(Ended(rank, 0, reason))

    def _room_for(self, ranks: Sequence[int], size: int) -> str:
        """Wait for room, and start the ranks. Returns why they were not started; empty if they were."""
        deadline, said = Deadline(self._timeout), ""
        while not self._closing.wait(_TURN):
            try:
                lacking = self._place_all(ranks, size)
            except (StartError, InvalidRequestError) as error:
                return str(error)
            if not lacking:
                return ""
            if deadline.expired:
                return f"Dask had no room for it within {self._timeout:g} s: {lacking}"
            if lacking != said:
                self._ranks.handle(Waiting(f"waiting for Dask: {lacking}"))
                said = lacking
        return "it was ended with its job"

    def _place_all(self, ranks: Sequence[int], size: int) -> str:
        """Start the ranks if there is room for all that are still wanted; else a text that says what is lacking."""
        workers = self._room.workers()
        with self._lock:
            wanted = [rank for rank in ranks if self._host_of.get(rank) == ""]
            taken = list(self._host_of.values())
            free = [worker.name for worker in workers for _ in range(worker.slots - taken.count(worker.name))]
            if len(free) < len(wanted):
                slots = sum(worker.slots for worker in workers)
                return f"{len(wanted)} ranks need as many slots; {len(workers)} workers have {slots}, of which {len(free)} are free"
            self._reach.known = {worker.name: worker for worker in workers}
            by_host: dict[str, list[int]] = {}
            for rank, host in zip(sorted(wanted), free, strict=False):
                by_host.setdefault(host, []).append(rank)
                self._host_of[rank] = host
            for host, those in by_host.items():
                self._exec.start_on(host, those, size)
            return ""
