"""The launcher ``ray``: each rank is a process of an actor, which holds its room on the cluster.

::

    launcher ── orders, reports: calls of the actor ──▶ RankActor ── pipes ──▶ agent ── forks ──▶ rank

A rank needs a main thread, signals and standard streams of its own, which a Ray worker uses itself: so the actor is the rank's
parent, and runs the agent that other hosts have (:mod:`hvdlab.launch.host_agent.agent`). When the actor ends, in whatever
way, the agent's input ends, and the agent ends the rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from hvdlab.collectives.errors import InvalidRequestError, ProtocolError, StartError
from hvdlab.collectives.protocol.codec import FrameDecoder
from hvdlab.collectives.settings import WorldEnvironment, own_environment
from hvdlab.collectives.system import HOST_VARIABLE, HostPosition, host_key, host_position
from hvdlab.launch.environment import FOREIGN, default_python, exported
from hvdlab.launch.host_agent import wire
from hvdlab.launch.host_agent.connection import agent_command
from hvdlab.launch.hosts import is_local
from hvdlab.launch.options import Option, OptionKind
from hvdlab.launch.processes import OutputTail, describe_exit
from hvdlab.launch.starter import (
    ENDED_WITH_JOB,
    ENDING_SIGNALS,
    Capabilities,
    Capability,
    Ended,
    LaunchRequest,
    Program,
    RankObserver,
    Started,
    require_running,
)
from hvdlab.ray.discovery import node_names
from hvdlab.ray.strategy import GROUP_TIMEOUT, death_reason, free_resources, imported

UNUSED_FOR = 86_400
"""Seconds that a kept pool lives without a notebook, unless the option ``unused_for`` says otherwise."""
_TURN = 0.5
"""Seconds between looks at whether a rank that has no room yet is still wanted."""
_ACTORS_END_WITHIN = 5.0
"""Seconds that an agent has to end its rank and itself; the agent gives the rank two between SIGTERM and SIGKILL."""


class RankActor:
    """Holds a rank's room on the cluster, and passes what the launcher and the rank's agent say to each other."""

    def __init__(self) -> None:
        # Ray starts its processes with SIGINT blocked, which children inherit: the rank would never be interrupted.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._agent = subprocess.Popen(
                agent_command(sys.executable),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def whereabouts(self) -> tuple[str, str, str, tuple[str, ...]]:
        """Its node, what it shares memory with, its interpreter, and the GPUs that Ray gave to it."""
        ray = imported()
        node = str(ray.get_runtime_context().get_node_id())
        return node, host_key(), sys.executable, tuple(map(str, ray.get_gpu_ids()))

    def order(self, data: bytes) -> None:
        """Pass this on to the agent."""
        assert self._agent.stdin is not None
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):  # its end is reported
            while view:
                view = view[self._agent.stdin.write(view) or 0 :]

    def reports(self) -> bytes:
        """Wait for the agent's next reports and return them; none once it has ended."""
        assert self._agent.stdout is not None
        return os.read(self._agent.stdout.fileno(), wire.PIECE)

    def hang_up(self) -> None:
        """Let the agent end its rank and itself."""
        assert self._agent.stdin is not None
        self._agent.stdin.close()


class RayLauncher:
    """Starts ranks on the Ray cluster that this process is connected to, or can find (``RAY_ADDRESS``)."""

    name = "ray"
    capabilities = Capabilities.all_but(
        {Capability.PRELOADS: "each of Ray's workers executes its rank's program"}
    )
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
        """Raises ``InvalidRequestError`` if hosts are named, ``StartError`` without Ray."""
        if hosts:
            raise InvalidRequestError(
                "the launcher `ray` finds its nodes itself: name no hosts; options say what each rank takes."
            )
        connect()

    def is_far(self, hosts: str) -> bool:
        """Unless the cluster is this host."""
        ray = connect()
        return not all(is_local(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> RayStarter:
        """Return the starter of a job's ranks. Raises ``StartError`` without Ray, ``InvalidRequestError`` for a wrong option."""
        connect()
        return RayStarter(request, ranks, Surroundings.here())


def connected_here() -> Any:
    """Ray's module. Raises ``StartError`` if this process is not connected to it as one of the cluster's own."""
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
    """Ray's module, connected. Raises ``StartError`` if that can't be."""
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


class _Seat:
    """A rank's actor, as the launcher knows it. The starter's lock guards everything that is not marked as the thread's own."""

    def __init__(self, rank: int, host: str, actor: Any) -> None:
        self.rank, self.host, self.actor = rank, host, actor
        self.pid = 0
        #: Its host's name as ranks know it, once its node is known.
        self.key = ""
        self.gpus: tuple[str, ...] = ()
        #: Why it was given up before it ran; or empty.
        self.given_up = ""
        #: What it wrote to standard error, if that is shown nowhere else. The thread's own.
        self.tail = OutputTail()

    def order(self, message: wire.AgentMessage) -> None:
        self.actor.order.options(concurrency_group="orders").remote(wire.encode(message))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Surroundings of the process that asked for ranks, which they get.

    Attributes:
        directory: Its working directory.
        environment: Its variables, but those of its host and of Ray.
    """

    directory: str
    environment: Mapping[str, str]

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process."""
        variables = exported(os.environ).items()
        return cls(
            os.getcwd(),
            {name: value for name, value in variables if not name.startswith(("RAY_", "CUDA_VISIBLE"))},
        )


class StartRequest(Protocol):
    """Part of a :class:`~hvdlab.launch.starter.LaunchRequest` that :class:`RayStarter` reads."""

    @property
    def world(self) -> WorldEnvironment:
        """As there."""
        ...

    @property
    def module(self) -> str:
        """As there."""
        ...

    @property
    def program(self) -> Program | None:
        """As there."""
        ...

    @property
    def options(self) -> Mapping[str, object]:
        """As there."""
        ...


class RayStarter:
    """A :class:`~hvdlab.launch.starter.PlacingStarter` of processes in actors, which end with this process.

    A thread for all ranks that are started together waits for their room and places them; then one for each reads
    what its agent reports.

    Args:
        request: What for.
        ranks: Takes what happens to ranks.
        surroundings: What ranks get of the process that asks for them.
    """

    def __init__(self, request: StartRequest, ranks: RankObserver, surroundings: Surroundings) -> None:
        self._request, self._ranks, self._surroundings = request, ranks, surroundings
        options = request.options
        self._cpus, self._gpus = int(str(options.get("cpus", 1))), int(str(options.get("gpus", 0)))
        self._timeout = float(str(options.get("timeout", GROUP_TIMEOUT)))
        self._placement = str(options.get("placement", "pack")).upper()
        if self._placement not in ("PACK", "SPREAD"):
            raise InvalidRequestError(
                f"the option `placement` of the launcher `ray` is `pack` or `spread`, not {self._placement.lower()!r}."
            )
        self._changed = threading.Condition()
        #: Rank to its actor, from the order to start it to its end. With the following, guarded by the condition.
        self._seats: dict[int, _Seat] = {}
        self._closing = False
        self._threads: list[threading.Thread] = []
        ray = imported()
        self._actor_class = ray.remote(concurrency_groups={"orders": 1, "reports": 1})(RankActor)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have them started where Ray has room; those of a node get consecutive numbers if they are started together.

        Raises:
            InvalidRequestError: This was closed.
        """
        self._begin({rank: "" for rank in ranks}, size, {})

    def start_on(self, host: str, ranks: Sequence[int], size: int) -> None:
        """Have them started on a node that :class:`~hvdlab.ray.elastic.RayNodes` named, or on one of Ray's ``node:<host>``.

        Raises:
            InvalidRequestError: This was closed.
            StartError: There is no such node.
        """
        ray = imported()
        node = node_names().get(host)
        where: dict[str, Any]
        if node is not None:
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            where = {"scheduling_strategy": affinity(node, soft=False)}
        elif f"node:{host}" in ray.cluster_resources():
            where = {"resources": {f"node:{host}": 0.01}}
        else:
            raise StartError(f"{host} is no node of the Ray cluster")
        self._begin(dict.fromkeys(ranks, host), size, where)

    def _begin(self, ranks: dict[int, str], size: int, where: dict[str, Any]) -> None:
        with self._changed:
            require_running(self._closing)
            where = where or {"scheduling_strategy": "SPREAD" if self._placement == "SPREAD" else "DEFAULT"}
            actors = [
                self._actor_class.options(num_cpus=self._cpus, num_gpus=self._gpus, **where).remote()
                for _ in ranks
            ]
            seats = [
                _Seat(rank, host, actor) for (rank, host), actor in zip(ranks.items(), actors, strict=True)
            ]
            self._seats.update({seat.rank: seat for seat in seats})
            self._run_thread(lambda: self._settle(seats, size), f"hvdlab-ray-{min(ranks)}")

    def _run_thread(self, target: Any, name: str) -> None:
        """The lock is held."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def give_up(self, host: str) -> None:
        """End the actors of a host; their ranks are reported."""
        with self._changed:
            for seat in self._seats.values():
                if seat.host == host:
                    seat.given_up = seat.given_up or f"{host} was given up"
                    if seat.pid:
                        imported().kill(seat.actor)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the rank's process group, by its agent. If the signal ends it, a rank without room yet is given up."""
        with self._changed:
            seat = self._seats.get(rank)
            if seat is None:
                return
            if seat.pid:
                seat.order(wire.SignalRanks((rank,), number))
            elif number in ENDING_SIGNALS:
                seat.given_up = f"it was ended by {signal.Signals(number).name} before it ran"

    def place(self, rank: int, size: int) -> HostPosition | None:
        """``None``: Ray places ranks."""
        return None

    def close(self, timeout: float) -> None:
        """Wait so long for ranks that got the order to leave, then end what is left, and give back its room. Idempotent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._seats, timeout)
            self._closing = True
            for seat in self._seats.values():
                seat.given_up = seat.given_up or ENDED_WITH_JOB
                with contextlib.suppress(Exception):  # Ray itself may be gone
                    seat.actor.hang_up.options(concurrency_group="orders").remote()
            self._changed.wait_for(lambda: not self._seats, _ACTORS_END_WITHIN)
            for seat in self._seats.values():
                with contextlib.suppress(Exception):  # Ray itself may be gone
                    imported().kill(seat.actor)
            threads = list(self._threads)
        for thread in threads:
            thread.join(_ACTORS_END_WITHIN)

    # -- the thread of ranks that are started together ---------------------------------------------------------------

    def _settle(self, seats: list[_Seat], size: int) -> None:
        """Wait until all have room, and start them; report those that have none in time."""
        ray = imported()
        waiting = {seat.actor.whereabouts.remote(): seat for seat in seats}
        until = time.monotonic() + self._timeout
        found: dict[_Seat, tuple[str, str, str, tuple[str, ...]]] = {}
        while waiting:
            try:
                ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=_TURN)
                late = time.monotonic() >= until
                for reference in [
                    each for each in waiting if each in ready or late or waiting[each].given_up
                ]:
                    seat = waiting.pop(reference)
                    if reference in ready:
                        try:
                            found[seat] = ray.get(reference)
                        except ray.exceptions.RayError as error:
                            self._end(seat, f"its actor could not be started: {death_reason(error)}")
                    else:
                        lacking = f"Ray had no room for it within {self._timeout:g} s; {free_resources()}"
                        self._end(seat, seat.given_up or lacking)
            except Exception as error:  # noqa: BLE001  # Ray was shut down: nothing can be asked of it
                for seat in waiting.values():
                    self._end(seat, f"the connection to Ray is lost ({type(error).__name__})")
                return
        with self._changed:
            unwanted = [seat for seat in found if seat.given_up]
            wanted = {seat: its for seat, its in found.items() if not seat.given_up}
            self._assign(wanted)
            for seat, (_, _, python, _) in wanted.items():
                self._order_start(seat, size, python)
                self._run_thread(partial(self._follow, seat), f"hvdlab-ray-rank-{seat.rank}")
        for seat in unwanted:
            self._end(seat, seat.given_up)

    def _assign(self, found: dict[_Seat, tuple[str, str, str, tuple[str, ...]]]) -> None:
        """Say which actor is which rank, so that ranks of a node follow each other. The lock is held."""
        nodes = [node for node, *_ in found.values()]
        order = sorted(found, key=lambda seat: (nodes.index(found[seat][0]), seat.rank))
        for seat, (node, host, _, gpus) in found.items():
            seat.key, seat.gpus = f"{host} {node}", gpus
        if any(seat.host for seat in found):
            return
        for seat, rank in zip(order, sorted(seat.rank for seat in found), strict=True):
            seat.rank = rank
            self._seats[rank] = seat

    def _order_start(self, seat: _Seat, size: int, python: str) -> None:
        """The lock is held."""
        program, rank = self._request.program, seat.rank
        placed = {other.rank: other.key for other in self._seats.values() if other.key}
        where = host_position(rank, list(placed), list(placed.values()))
        variables = {**self._surroundings.environment, **(program.environment if program else {})}
        variables[HOST_VARIABLE] = seat.key
        if self._gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._visible(seat, where.local_rank))
        command = program.command if program else (python, "-m", self._request.module)
        if command[0] == default_python():
            command = (python, *command[1:])
        seat.order(
            wire.Start(
                tuple(map(os.fsencode, command)),
                os.fsencode(self._surroundings.directory),
                {os.fsencode(name): os.fsencode(value) for name, value in variables.items()},
                removed=FOREIGN,
                function=program.function if program else b"",
                threads=where.local_size,
                coordinator=self._request.world.coordinator,
                interfaces=program.interfaces if program else (),
            )
        )
        environment = own_environment(self._request.world, rank, size, where)
        if program is not None:
            environment["HOROVOD_HOSTNAME"] = seat.host or seat.key.split()[-1]
        seat.order(wire.Spawn((wire.RankSpec(rank, environment),)))

    def _visible(self, seat: _Seat, local_rank: int) -> list[str]:
        """The GPUs of all ranks of the host, such that the local rank is the index of this rank's own."""
        others = [
            gpu
            for rank in sorted(self._seats)
            for gpu in self._seats[rank].gpus
            if self._seats[rank].key == seat.key and gpu not in seat.gpus
        ]
        index = min(local_rank * len(seat.gpus), len(others))
        return [*others[:index], *seat.gpus, *others[index:]]

    # -- a rank's thread ----------------------------------------------------------------------------------------------

    def _follow(self, seat: _Seat) -> None:
        """Report what a rank's agent says, until it ends."""
        ray = imported()
        decoder, greeted, reason = FrameDecoder(), b"", "its agent ended"
        ended: wire.RankExited | None = None
        while ended is None:
            try:
                data = ray.get(seat.actor.reports.options(concurrency_group="reports").remote())
            except ray.exceptions.RayError as error:
                reason = death_reason(error)
                break
            except Exception as error:  # noqa: BLE001  # Ray was shut down
                reason = f"the connection to Ray is lost ({type(error).__name__})"
                break
            if not data:
                break
            if greeted != wire.GREETING:
                wanted = len(wire.GREETING) - len(greeted)
                greeted, data = greeted + data[:wanted], data[wanted:]
            try:
                messages = [wire.decode_from_agent(payload) for payload in decoder.feed(data)]
            except ProtocolError as error:
                reason = f"its agent sent something else than messages: {error}"
                break
            for message in messages:
                if isinstance(message, wire.RankExited):
                    ended = message
                elif isinstance(message, wire.RankNotStarted):
                    self._end(seat, message.text, message.code)
                    return
                elif isinstance(message, wire.OrderFailed) and message.unread and not seat.pid:
                    self._end(seat, f"its agent could not read an order: {message.text}", 1)
                    return
                else:
                    self._report(seat, message)
        if ended is None:
            self._end(seat, seat.given_up or reason)
            return
        known = None if ended.signal or ended.code < 0 else ended.code
        self._end(seat, describe_exit(ended.code, ended.signal), known, ended.signal)

    def _report(self, seat: _Seat, message: wire.FromAgent) -> None:
        program = self._request.program
        match message:
            case wire.Output(rank, stream, data) if program is not None:
                program.output.write(rank, stream, data)
            case wire.Output(_, _, data):
                seat.tail.add(data)
            case wire.ResultPiece(rank, data) if program is not None:
                program.output.returned(rank, data)
            case wire.RankStarted(rank, pid):
                with self._changed:
                    seat.pid = pid
                    unwanted = seat.given_up
                self._ranks.handle(Started(rank, pid, seat.host))
                if unwanted:
                    imported().kill(seat.actor)

    def _end(self, seat: _Seat, reason: str, code: int | None = None, number: int = 0) -> None:
        """A rank has ended, or does not begin: give back its room, and report it."""
        with contextlib.suppress(Exception):  # Ray itself may be gone
            imported().kill(seat.actor)
        self._ranks.handle(Ended(seat.rank, seat.pid, reason, seat.tail.text(), "", code, number))
        with self._changed:
            if self._seats.get(seat.rank) is seat:
                del self._seats[seat.rank]
            self._changed.notify_all()
