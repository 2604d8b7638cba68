"""Tasks on executors: each task is the parent of one rank, which is a separate process.

A rank needs the main thread, its standard streams and a fresh interpreter, and Spark uses one Python worker for many tasks.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from hvdlab.collectives.client import Client
from hvdlab.collectives.settings import WorldEnvironment, free_port, own_environment, thread_counts
from hvdlab.collectives.system import host_key, host_position
from hvdlab.launch.host_agent import wire
from hvdlab.launch.host_agent.rank_process import STDERR, Child, SpawnError, spawn
from hvdlab.launch.processes import ExitStatus
from hvdlab.runner.function_worker import FunctionRaised
from hvdlab.runner.output import AssembledLine, LineAssembler, prefix

KEPT = 4 << 20
"""Bytes of a rank's output that are kept for the driver's streams: the last ones."""


LOST = "its task was lost, with its executor or by Spark's word"
"""How a rank has ended if Spark starts its task again."""

_NO_WORLD = WorldEnvironment("", "")
"""Until there is a coordinator."""


@dataclass
class RankEnd:
    """Result of a task.

    Attributes:
        rank: Its rank.
        outcome: How the rank's process ended.
        result: The pickled outcome of the function, or empty.
        output: The rank's output, in order, each with the stream (1 or 2), if the driver asked for it.
    """

    rank: int
    outcome: ExitStatus
    result: bytes = b""
    output: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class RankTask:
    """A function for ``RDDBarrier.mapPartitions``.

    Attributes:
        call: The pickled call of the user's function.
        environment: Variables for the ranks, beside those of their tasks.
        executable: Python interpreter of the ranks; empty for the task's.
        captured: Whether output is returned; otherwise it goes to the task's standard error.
        gpus: Whether a rank sees only the GPUs that Spark gave to its task.
        world: The job as every rank learns it; the tasks choose the rendezvous address.
        client_token: With this the task reports to the coordinator how its rank ended. Ranks do not get it.
    """

    call: bytes
    environment: Mapping[str, str]
    executable: str = ""
    captured: bool = False
    gpus: bool = False
    world: WorldEnvironment = _NO_WORLD
    client_token: str = ""

    def __call__(self, _: Iterator[Any]) -> Iterator[RankEnd]:
        """Run this task's rank to its end. This happens once: Spark gives up a barrier stage with results when a task is lost."""
        from pyspark import BarrierTaskContext  # pyright: ignore[reportMissingImports]

        context = BarrierTaskContext.get()
        hosts = [str(key) for key in context.allGather(_host())]
        order = ranks_by_host(hosts)
        rank, size = order.index(context.partitionId()), len(order)
        address = (
            context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0] or socket.gethostname()
        )
        # Each task offers an address: allGather() needs a text of all, and only the task of rank 0 can find
        # a port that is free there.
        rendezvous = context.allGather(f"{address} {free_port()}")[order[0]].split()
        world = replace(self.world, master_address=rendezvous[0], master_port=int(rendezvous[1]))
        where = host_position(rank, range(size), [hosts[task] for task in order])
        environment = dict(self.environment)
        environment |= thread_counts({**os.environ, **environment}, where.local_size)
        environment |= own_environment(world, rank, size, where)
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(get_available_devices())
        yield self._run(rank, environment)

    def _run(self, rank: int, environment: dict[str, str]) -> RankEnd:
        command = (self.executable or sys.executable, "-m", "hvdlab.runner.function_worker")
        start = wire.Start(tuple(map(os.fsencode, command)), b"", {}, function=self.call)
        with Client.connect(
            self.world.coordinator, self.client_token, certificate=self.world.certificate
        ) as client:
            end, pid = _run_rank(start, wire.RankSpec(rank, environment), captured=self.captured)
            if not end.outcome.ok:
                # The others would wait for a rank that did not come to hvd.init().
                client.rank_lost(rank, pid, _reason(end))
            return end


@dataclass(frozen=True)
class SingleRankTask:
    """A function for ``RDD.mapPartitions`` of one partition: one rank of a job whose ranks come and go.

    Attributes:
        command: The rank's command; an empty program stands for the task's interpreter.
        call: A pickled call of the user's function, or empty.
        rank: Its number.
        environment: Its variables.
        captured: As of :class:`RankTask`.
    """

    command: tuple[str, ...]
    call: bytes
    rank: int
    environment: Mapping[str, str]
    captured: bool

    def __call__(self, _: Iterator[Any]) -> Iterator[RankEnd]:
        """Run the rank to its end. This happens once: a task that Spark starts again, since its executor was lost, only reports that."""
        from pyspark import TaskContext  # pyright: ignore[reportMissingImports]

        context = TaskContext.get()
        if context.attemptNumber():
            yield RankEnd(self.rank, ExitStatus(0, 0, LOST))
            return
        environment = {**thread_counts({**os.environ, **self.environment}, 1), **self.environment}
        if gpus := get_available_devices():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        program, *arguments = self.command
        command = (program or sys.executable, *arguments)
        start = wire.Start(tuple(map(os.fsencode, command)), b"", {}, function=self.call)
        yield _run_rank(start, wire.RankSpec(self.rank, environment), captured=self.captured)[0]


def _run_rank(start: wire.Start, spec: wire.RankSpec, *, captured: bool) -> tuple[RankEnd, int]:
    """Start a rank and wait for its end. Also returns its process, or 0 if it could not be started."""
    try:
        child = spawn(start, spec, -1)
    except SpawnError as error:
        return RankEnd(spec.rank, ExitStatus(error.code, 0, str(error))), 0
    output = drain(child, captured=captured)
    code, number = child.reap()
    return RankEnd(spec.rank, ExitStatus(code, number), b"".join(child.result()), output), child.pid


def get_available_devices() -> list[str]:
    """Return the addresses of the GPUs that Spark gave to this task; none outside of a task."""
    from pyspark import TaskContext  # pyright: ignore[reportMissingImports]

    context = TaskContext.get()
    found = context.resources().get("gpu") if context is not None else None
    return list(found.addresses) if found is not None else []


def _host() -> str:
    """Return the host's key: a YARN container counts as a host of its own, as for Horovod."""
    container = os.environ.get("CONTAINER_ID", "")
    return f"{host_key()} {container}".strip()


def _reason(end: RankEnd) -> str:
    found = pickle.loads(end.result) if end.result else None  # noqa: S301  # what our own child wrote for us
    return f"its function raised {found.line}" if isinstance(found, FunctionRaised) else str(end.outcome)


def ranks_by_host(hosts: Sequence[str]) -> list[int]:
    """Return the task of each rank: tasks of one host get consecutive ranks, and the host of task 0 comes first.

    >>> ranks_by_host(["b", "a", "b"])
    [0, 2, 1]
    """
    first = {host: hosts.index(host) for host in hosts}
    return sorted(range(len(hosts)), key=lambda task: (first[hosts[task]], task))


def drain(child: Child, *, captured: bool) -> list[tuple[int, bytes]]:
    """Read the output of a rank until its streams are closed. Output that is not captured goes to this process's standard error.

    When the rank ends, the rest of its process group is killed: a process that it started may hold its streams open.

    Returns:
        Pieces with their stream, the last :data:`KEPT` bytes; nothing if not captured.
    """
    pieces: list[tuple[int, bytes]] = []
    size = 0

    def show(stream: int, lines: Sequence[AssembledLine]) -> None:
        for line in lines:
            _write_all(STDERR, prefix(child.rank, stream) + line.text + b"\n")

    assemblers = {stream: LineAssembler() for stream in child.pipes.values()}
    with DefaultSelector() as selector, os.fdopen(os.pidfd_open(child.pid), "rb", 0) as process:
        for pipe, stream in child.pipes.items():
            selector.register(pipe, EVENT_READ, stream)
        selector.register(process, EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if key.fileobj is process:
                    # It is not reaped yet, so that no other process group can have its number.
                    child.signal(signal.SIGKILL)
                    selector.unregister(process)
                    continue
                data = os.read(key.fd, wire.PIECE)
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    show(key.data, assemblers[key.data].finish())
                elif captured:
                    pieces.append((key.data, data))
                    size += len(data)
                    while size - len(pieces[0][1]) >= KEPT:
                        size -= len(pieces.pop(0)[1])
                else:
                    show(key.data, assemblers[key.data].feed(data))
    return pieces


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
