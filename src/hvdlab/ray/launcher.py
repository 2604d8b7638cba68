"""The launcher ``ray``: an actor for each rank reserves its CPUs and GPUs, and one on each node runs the agent that forks the ranks.

::

    launcher ── requests ──▶ ReservationActor: a rank's CPUs and GPUs, on a node of Ray's choice
       └─ pipes ── threads ── calls of an actor ──▶ NodeActor ── pipes ──▶ agent ── forks ──▶ ranks of the node

A rank needs a main thread, signals and standard streams of its own, which a Ray worker uses itself: so ranks are processes of the agent
that other hosts have (:mod:`hvdlab.launch.host_agent.agent`). When its actor ends for any reason, the agent's input ends, and the
agent ends the ranks. Its reservation ends when the rank has ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.settings import thread_counts
from hvdlab.collectives.system import HOST_VARIABLE, HostPosition
from hvdlab.collectives.time_limits import Deadline
from hvdlab.launch.command import exported
from hvdlab.launch.host_agent import wire
from hvdlab.launch.host_agent.connection import AgentProcess
from hvdlab.launch.host_agent.starter import ExecStarter
from hvdlab.launch.hosts import is_local
from hvdlab.launch.options import Option, OptionKind
from hvdlab.launch.queueing_starter import QueueingStarter
from hvdlab.launch.starter import (
    Capabilities,
    Ended,
    LaunchRequest,
    RankObserver,
    Started,
    StartRequest,
    Waiting,
)
from hvdlab.ray.discovery import node_names
from hvdlab.ray.strategy import GROUP_TIMEOUT, death_reason, free_resources, imported

UNUSED_FOR = 86_400
"""Seconds that a kept pool lives without a notebook, unless the option ``unused_for`` says otherwise."""
_TURN = 0.5
"""Seconds between looks at whether a rank that has no reservation yet is still wanted."""
_ACTORS_END_WITHIN = 5.0
"""Seconds that each thread of a connection has to end once its actor was killed."""


class ReservationActor:
    """Actor that reserves the CPUs and GPUs of a rank on the cluster."""

    def allocation(self) -> RankAllocation:
        """Return the node and GPUs that Ray has allocated to it."""
        ray = imported()
        node = str(ray.get_runtime_context().get_node_id())
        return RankAllocation(node, tuple(map(str, ray.get_gpu_ids())), os.environ.get("OMP_NUM_THREADS", ""))


class NodeActor:
    """Actor that runs the agent of a node. It reserves nothing: the ranks that the agent starts have reservations of their own."""

    def __init__(self) -> None:
        self._agent = AgentProcess("")

    def order(self, data: bytes) -> None:
        """Pass this on to the agent."""
        self._agent.write_orders(data)

    def reports(self) -> bytes:
        """Wait for the agent's next reports and return them; none once it has ended."""
        return self._agent.read_reports()

    def hang_up(self) -> None:
        """Let the agent end its ranks and itself."""
        self._agent.close_orders()


class RayLauncher:
    """Launcher that starts ranks on the Ray cluster that this process is connected to, or can find (``RAY_ADDRESS``)."""

    name = "ray"
    capabilities = Capabilities.all_but({})
    forks = False

    def options(self) -> Sequence[Option]:
        """Return a rank's resources of the cluster, and its place."""
        return (
            Option("cpus", "Ray's CPUs of a rank (default: 1)", OptionKind.COUNT),
            Option("gpus", "GPUs of a rank (default: 0)", OptionKind.COUNT),
            Option(
                "placement",
                "pack (default): as Ray puts them by itself; spread: on as many nodes as there are",
            ),
            Option(
                "timeout",
                f"seconds within which there must be room for a rank (default: {GROUP_TIMEOUT:g})",
                OptionKind.COUNT,
            ),
            Option(
                "unused_for",
                f"seconds without a notebook after which ranks that are kept end (default: {UNUSED_FOR}, a day)",
                OptionKind.COUNT,
            ),
        )

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Raise ``InvalidRequestError`` if hosts are named, ``StartError`` without Ray."""
        if hosts:
            raise InvalidRequestError(
                "the launcher `ray` finds its nodes itself: name no hosts; options say what each rank takes."
            )
        connect()

    def is_far(self, hosts: str) -> bool:
        """Return True unless the cluster is this host."""
        ray = connect()
        return not all(is_local(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> RayStarter:
        """Return the starter of a job's ranks. Raises ``StartError`` without Ray, ``InvalidRequestError`` for a wrong option."""
        connect()
        return RayStarter(request, ranks, LaunchEnvironment.here())


def connected_here() -> Any:
    """Return Ray's module. Raises ``StartError`` if this process is not connected to it as one of the cluster's own."""
    ray = imported()
    if ray.util.client.ray.is_connected():
        raise StartError(
            "This process is connected by Ray Client (ray://), so that ranks could not reach it. Run it on a node of the "
            "cluster, such as by `ray job submit`."
        )
    if not ray.is_initialized():
        raise StartError("This process is not connected to Ray: call ray.init() first.")
    return ray


def connect() -> Any:
    """Return Ray's module, connected. Raises ``StartError`` if that can't be."""
    ray = imported()
    if not ray.is_initialized():
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise StartError(
                f"there is no Ray cluster to connect to ({str(error).splitlines()[0]}); start one by `ray start --head` or "
                "ray.init(), or name it by RAY_ADDRESS."
            ) from error
    return connected_here()


@dataclass(frozen=True, slots=True)
class RankAllocation:
    """Node, GPUs and threads that Ray has allocated to a rank.

    Attributes:
        node: Id of its node.
        gpus: Ids of its GPUs.
        threads: ``OMP_NUM_THREADS`` as Ray sets it for the rank's CPUs; may be empty.
    """

    node: str
    gpus: tuple[str, ...]
    threads: str


@dataclass(frozen=True, slots=True)
class _Reservation:
    """A rank's reservation: the actor that holds it, and its allocation."""

    actor: Any
    allocation: RankAllocation


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """Directory and variables of the process that asked for ranks, which they get.

    Attributes:
        directory: Its working directory.
        variables: Its environment variables, but those of its host and of Ray.
    """

    directory: str
    variables: Mapping[str, str]

    @classmethod
    def here(cls) -> LaunchEnvironment:
        """Return those of this process."""
        exports = exported(os.environ).items()
        return cls(
            os.getcwd(),
            # CUDA_VISIBLE_DEVICES names GPUs of this host; on its node, a rank gets those of its allocation.
            {name: value for name, value in exports if not name.startswith(("RAY_", "CUDA_VISIBLE"))},
        )


class NodeTransport:
    """A :class:`~hvdlab.launch.host_agent.connection.HostTransport` by actors on nodes.

    Args:
        launch_environment: Directory and variables that the ranks get from the process that asks for them.
    """

    def __init__(self, launch_environment: LaunchEnvironment) -> None:
        self._launch_environment = launch_environment
        #: The id of the node of each host that has, or had, ranks.
        self.nodes: dict[str, str] = {}

    def is_here(self, host: str) -> bool:
        """Return False always: ranks end with an actor."""
        return False

    def connect(self, host: str, python: str, errors: IO[bytes] | None) -> NodeConnection:
        """Connect by an actor on the node, in the interpreter of Ray's workers there."""
        if errors is not None:
            errors.close()
        return NodeConnection(self.nodes[host])

    def machine(self, host: str) -> str:
        """Return the node."""
        return self.nodes.get(host, host)

    def variables(self, host: str) -> Mapping[str, str]:
        """Return the variables of the launch, and one by which a node counts as a host."""
        return {**self._launch_environment.variables, HOST_VARIABLE: f"{host} {self.nodes[host]}"}


class NodeConnection:
    """The connection to the agent on a node; see :class:`~hvdlab.launch.host_agent.connection.AgentConnection`.

    Two threads pass on all bytes written to and read from the pipes: calls of Ray block.

    Args:
        node: Id of the node.
    """

    def __init__(self, node: str) -> None:
        ray = imported()
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        # Two groups: in one, an order would wait until the agent has something to report.
        actor_class = ray.remote(concurrency_groups={"orders": 1, "reports": 1})(NodeActor)
        self._actor = actor_class.options(num_cpus=0, scheduling_strategy=affinity).remote()
        self.inbox, self._reports = os.pipe2(os.O_CLOEXEC)
        self._orders, self.outbox = os.pipe2(os.O_CLOEXEC)
        self._lock = threading.Lock()
        #: The descriptors that this side has to close; guarded by the lock.
        self._open = {self.inbox, self.outbox}
        #: Why the agent is lost, once it is.
        self._reason = "its agent ended"
        #: Set when the thread of reports has ended, after ``_reason`` was stored.
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"hvdlab-ray-{name}-{node[:8]}", daemon=True)
            for name, target in (("reports", self._receive), ("orders", self._send))
        ]
        for thread in self._threads:
            thread.start()

    def end_text(self, host: str, greeted: bool) -> str:
        """Return Ray's text on the end."""
        self._over.wait(1.0)
        return f"its agent on the Ray node {host} is gone: {self._reason}"

    def hang_up(self) -> None:
        """See :class:`~hvdlab.launch.host_agent.connection.AgentConnection`."""
        self._close(self.outbox)

    def kill(self) -> None:
        """Kill the actor: the agent's input ends, and the agent ends its ranks."""
        with contextlib.suppress(Exception):  # Ray itself may be gone
            imported().kill(self._actor)

    def close(self, timeout: float) -> None:
        """See :class:`~hvdlab.launch.host_agent.connection.AgentConnection`."""
        self.hang_up()
        self._over.wait(timeout)
        self.kill()
        for thread in self._threads:
            thread.join(_ACTORS_END_WITHIN)
        self._close(self.inbox)

    def _close(self, descriptor: int) -> None:
        with self._lock:
            # Both hang_up() and close() come here: closed a second time, the number could be that of
            # another file.
            if descriptor in self._open:
                self._open.remove(descriptor)
                os.close(descriptor)

    # -- the two threads ----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Pass on the agent's reports until it ends."""
        ray = imported()
        try:
            while data := ray.get(self._actor.reports.options(concurrency_group="reports").remote()):
                view = memoryview(data)
                while view:
                    view = view[os.write(self._reports, view) :]
        except ray.exceptions.RayError as error:
            self._reason = death_reason(error)
        except Exception as error:  # noqa: BLE001  # Ray was shut down
            self._reason = f"the connection to Ray is lost ({type(error).__name__})"
        finally:
            # After the reason is stored and before the pipe ends: the launcher asks for the reason as soon
            # as it sees that end.
            self._over.set()
            os.close(self._reports)

    def _send(self) -> None:
        """Pass on orders until the launcher hangs up."""
        try:
            while data := os.read(self._orders, wire.PIECE):
                self._actor.order.options(concurrency_group="orders").remote(data)
            # In the group of the orders, which has one thread: the agent's input is closed after the last
            # of them.
            self._actor.hang_up.options(concurrency_group="orders").remote()
        except Exception as error:  # noqa: BLE001  # Ray was shut down: the thread of reports finds that, too
            self._reason = f"the connection to Ray is lost ({type(error).__name__})"
        finally:
            os.close(self._orders)


class RayStarter(QueueingStarter):
    """A :class:`~hvdlab.launch.starter.PlacingStarter` of processes on nodes, which end with this process.

    A thread for all ranks that are ordered together waits for their reservations. Then the agents of their nodes start them.

    Args:
        request: The job's launch request.
        ranks: Observer that gets the ranks' events.
        launch_environment: Directory and variables that the ranks get from the process that asks for them.
    """

    def __init__(
        self, request: StartRequest, ranks: RankObserver, launch_environment: LaunchEnvironment
    ) -> None:
        super().__init__(ranks, "Ray")
        self._request, self._launch_environment = request, launch_environment
        options = request.options
        self._cpus, self._gpus = int(str(options.get("cpus", 1))), int(str(options.get("gpus", 0)))
        self._timeout = float(str(options.get("timeout", GROUP_TIMEOUT)))
        self._placement = str(options.get("placement", "pack")).upper()
        if self._placement not in ("PACK", "SPREAD"):
            raise InvalidRequestError(
                f"the option `placement` of the launcher `ray` is `pack` or `spread`, not {self._placement.lower()!r}."
            )
        #: Rank to its reservation, from its start to its end. Guarded by the lock.
        self._reservations: dict[int, _Reservation] = {}
        #: Rank to the host that it was last ordered for, or empty. Guarded by the lock.
        self._wanted_on: dict[int, str] = {}
        self._transport = NodeTransport(launch_environment)
        self._exec = ExecStarter(
            request, self, (), transport=self._transport, python="", directory=launch_environment.directory
        )

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start_on(self, host: str, ranks: Sequence[int], size: int) -> None:
        """Have them started on a node that :class:`~hvdlab.ray.discovery.RayNodes` named, or on the one with an address.

        Raises:
            InvalidRequestError: This was closed.
            StartError: There is no such node.
        """
        self._order(ranks, size, host)

    def give_up(self, host: str) -> None:
        """End the ranks of a host, and withdraw those that wait for a reservation there; all are reported."""
        with self._changed:
            waiting = [rank for rank, its in self._wanted_on.items() if its == host]
        self._withdraw(waiting, f"{host} was given up")
        self._exec.give_up(host)

    def place(self, rank: int, size: int) -> HostPosition | None:
        """Return ``None``: Ray places ranks."""
        return None

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Handle the agents' reports. The reservation of a rank that has ended is given up first."""
        if isinstance(event, Ended):
            with self._changed:
                reservation = self._reservations.pop(event.rank, None)
            if reservation is not None:
                _kill(reservation.actor)
        self._ranks.handle(event)

    def _request_slots(self, ranks: Sequence[int], size: int, host: str) -> None:
        ray = imported()
        strategy: Any = "SPREAD" if self._placement == "SPREAD" else "DEFAULT"
        if host:
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            strategy = affinity(_node_of(host), soft=False)
        with self._changed:
            self._wanted_on |= dict.fromkeys(ranks, host)
        actor_class = ray.remote(ReservationActor).options(
            num_cpus=self._cpus, num_gpus=self._gpus, scheduling_strategy=strategy
        )
        actors = {rank: actor_class.remote() for rank in ranks}
        self._run_thread(partial(self._await_reservations, actors, size, host), f"ray-{min(ranks)}")

    def _signal_placed(self, rank: int, number: int) -> None:
        self._exec.signal(rank, number)

    def _close_placed(self, timeout: float) -> None:
        self._exec.close(timeout)

    # -- the thread of ranks that are ordered together ----------------------------------------------------------------

    def _await_reservations(self, actors: Mapping[int, Any], size: int, host: str) -> None:
        """Wait until all have reservations, and start them; withdraw those that have none in time."""
        found: dict[int, RankAllocation] = {}
        try:
            found = self._allocations(actors)
            self._start_on_nodes(
                {rank: _Reservation(actors[rank], its) for rank, its in found.items()}, size, host
            )
        except (StartError, InvalidRequestError) as error:
            self._withdraw(found, str(error))
        except Exception as error:  # noqa: BLE001  # Ray was shut down: nothing can be asked of it
            self._withdraw(actors, f"the connection to Ray is lost ({type(error).__name__})")
        with self._changed:
            kept = [reservation.actor for reservation in self._reservations.values()]
        for actor in actors.values():
            if actor not in kept:
                _kill(actor)

    def _allocations(self, actors: Mapping[int, Any]) -> dict[int, RankAllocation]:
        """Return the allocation of each rank, once all that still wait have theirs, or the time is over."""
        ray = imported()
        asked = {actor.allocation.remote(): rank for rank, actor in actors.items()}
        deadline = Deadline(self._timeout)
        found: dict[int, RankAllocation] = {}
        while asked:
            # In turns: signal() and close() withdraw ranks, and neither ends a wait of Ray's.
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_TURN)
            for reference in ready:
                rank = asked.pop(reference)
                try:
                    found[rank] = ray.get(reference)
                except ray.exceptions.RayError as error:
                    self._withdraw([rank], f"its actor could not be started: {death_reason(error)}")
            if deadline.expired:
                reason = f"Ray had no room for it within {self._timeout:g} s; {free_resources()}"
                self._withdraw(list(asked.values()), reason)
            with self._changed:
                asked = {reference: rank for reference, rank in asked.items() if rank in self._waiting}
        return found

    def _start_on_nodes(self, reservations: Mapping[int, _Reservation], size: int, host: str) -> None:
        """Start the ranks that still wait; those of a node follow each other, unless their host was named.

        Raises:
            StartError: An agent can't be started.
            InvalidRequestError: This was closed.
        """
        names = {node: name for name, node in node_names().items()}
        with self._changed:
            wanted = sorted(rank for rank in reservations if rank in self._waiting)
            nodes = [reservations[rank].allocation.node for rank in wanted]
            order = sorted(wanted, key=lambda rank: (nodes.index(reservations[rank].allocation.node), rank))
            by_node: dict[str, dict[int, _Reservation]] = {}
            for rank, reserved_as in zip(wanted, wanted if host else order, strict=True):
                reservation = reservations[reserved_as]
                by_node.setdefault(reservation.allocation.node, {})[rank] = reservation
            for node, those in by_node.items():
                name = host or names.get(node, node)
                self._transport.nodes[name] = node
                # Before the variables: _visible() reads the reservations of all ranks of the node.
                self._reservations |= those
                variables = {rank: self._variables(rank, its.allocation) for rank, its in those.items()}
                try:
                    self._exec.start_on(name, list(those), size, variables)
                except BaseException:
                    for rank in those:
                        # _await_reservations() kills the actors of all ranks that are not in `_reservations`.
                        del self._reservations[rank]
                    raise
                self._claim(those)

    def _variables(self, rank: int, allocation: RankAllocation) -> dict[str, str]:
        """Return variables of a rank that its allocation decides. The lock is held."""
        program = self._request.program
        given = {**self._launch_environment.variables, **(program.environment if program else {})}
        found = {}
        if allocation.threads:
            # The agent, which holds no CPUs, has the number of threads for none.
            found = thread_counts({"OMP_NUM_THREADS": allocation.threads, **given}, 1)
        if self._gpus:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self._visible(rank, allocation))
        return found

    def _visible(self, rank: int, allocation: RankAllocation) -> list[str]:
        """Return the GPUs of all ranks of the node, such that the local rank is the index of this rank's own."""
        here = {
            other: its.allocation.gpus
            for other, its in sorted(self._reservations.items())
            if its.allocation.node == allocation.node
        }
        others = [
            gpu for other, gpus in here.items() if other != rank for gpu in gpus if gpu not in allocation.gpus
        ]
        local_rank = sum(other < rank for other in here)
        index = min(local_rank * len(allocation.gpus), len(others))
        return [*others[:index], *allocation.gpus, *others[index:]]


def _node_of(host: str) -> str:
    """Return the id of the node that a host is: by a name of :func:`node_names`, or by its address. Raises ``StartError``."""
    by_name = node_names()
    if host in by_name:
        return by_name[host]
    for node in imported().nodes():
        if node["Alive"] and host in (node["NodeManagerAddress"], node["NodeManagerHostname"]):
            return str(node["NodeID"])
    raise StartError(f"{host} is no node of the Ray cluster")


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):  # Ray itself may be gone
        imported().kill(actor)
