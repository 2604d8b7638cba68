"""Ranks on this host, forked by the job's fork server."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.settings import WorldEnvironment, rank_environment
from hvdlab.collectives.system import HostPosition
from hvdlab.launch.command import default_python
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.forkserver.messages import (
    CONTROLLER,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    FromServer,
    Loaded,
    Signal,
)
from hvdlab.launch.host_agent.connection import AgentLink, ShellTransport, agent_error
from hvdlab.launch.host_agent.starter import ExecStarter
from hvdlab.launch.hosts import LOCALHOST, Host
from hvdlab.launch.options import Option
from hvdlab.launch.processes import describe, detail
from hvdlab.launch.starter import Capabilities, Ended, LaunchRequest, RankObserver, Started

BYTES_PER_RANK = 24 << 20
"""Bytes that a forked rank takes at least, beside what it shares."""

DESCRIPTORS_PER_RANK = 4
"""File descriptors that the fork server keeps for each rank."""


class LocalLauncher:
    """The launcher ``local``."""

    name = "local"
    capabilities = Capabilities.all_but({})
    forks = True

    def options(self) -> Sequence[Option]:
        """Return no options: ranks have the notebook's own interpreter and environment."""
        return ()

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Raise ``InvalidRequestError`` if this host lacks memory or descriptors for so many, or others are named."""
        if hosts:
            raise InvalidRequestError(
                f"hosts={hosts!r} needs a launcher that reaches other hosts, such as launcher='ssh' or 'mpi'."
            )
        check_resources(size, already)

    def is_far(self, hosts: str) -> bool:
        """Return False."""
        return False

    def start_agent(self, *, stdin: bool) -> AgentLink:
        """Start the agent of a job of programs, which comes up beside the job's coordinator. :meth:`starter` gives it its orders.

        Args:
            stdin: Whether rank 0 gets this process's standard input.

        Raises:
            StartError: The interpreter can't be run.
        """
        try:
            return AgentLink.local(LOCALHOST, default_python(), stdin=stdin)
        except OSError as error:
            raise agent_error(LOCALHOST, error) from error

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> LocalStarter | ExecStarter:
        """Return the starter that forks a job's ranks; an agent starts programs, and ends them if this process dies.

        Raises:
            InvalidRequestError: The job has neither a program nor a fork server.
        """
        if request.program is not None:
            here = [Host(LOCALHOST, request.size)]
            return ExecStarter(
                request, ranks, here, transport=ShellTransport(), python=default_python(), agent=request.agent
            )
        if request.fork_server is None:
            raise InvalidRequestError("the launcher `local` forks ranks, and this job has no fork server.")
        return LocalStarter(request.fork_server, request.world, ranks)


class LocalStarter:
    """Starter of ranks by a fork server.

    The caller hands the fork server's messages to :meth:`hear`, since a fork server has only one listener.

    Args:
        fork_server: Forks the ranks.
        world: The job as every rank must know it.
        ranks: Observer that gets the ranks' events.
    """

    def __init__(self, fork_server: ForkServer, world: WorldEnvironment, ranks: RankObserver) -> None:
        self._fork_server, self._world, self._ranks = fork_server, world, ranks

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have ranks forked, with this process's environment, working directory and ``sys.path`` as they are now."""
        directory = os.getcwd()
        for rank in ranks:
            environment = rank_environment(os.environ, self._world, rank, size)
            self._fork_server.send(Fork.of(rank, environment, directory, sys.path))

    def signal(self, rank: int, number: int) -> None:
        """Send a signal, by the fork server, which knows whether the process still is that rank."""
        self._fork_server.send(Signal(rank, number))

    def place(self, rank: int, size: int) -> HostPosition | None:
        """Return None: all are on this host."""
        return None

    def close(self, timeout: float) -> None:
        """Do nothing: the owner of the fork server ends it, and the ranks with it."""

    def hear(self, event: FromServer) -> None:
        """Handle a message of the fork server; ignores those that are not about ranks."""
        match event:
            case Forked(number, pid) if number > CONTROLLER:
                self._ranks.handle(Started(number, pid))
            case ForkFailed(number, text) if number > CONTROLLER:
                self._ranks.handle(Ended(number, 0, f"it could not be forked: {text}"))
            case Exited(number, pid) if number > CONTROLLER:
                left = event.left
                self._ranks.handle(Ended(number, pid, describe(event), event.tail, detail(event), left=left))


def check_resources(np: int, already: int = 0, available: int | None = None) -> None:
    """Check that this host has memory and file descriptors for ``np`` ranks, ``already`` of which run.

    Raises:
        InvalidRequestError: It has too little; the message names how many ranks would fit.
    """
    new = np - already
    memory = available_memory() if available is None else available
    if new > 0 and new * BYTES_PER_RANK > memory:
        raise InvalidRequestError(
            f"np={np}: {new} more ranks on this host take at least {new * BYTES_PER_RANK / 2**30:.1f} GiB, but "
            f"{memory / 2**30:.1f} GiB are available; choose at most {already + memory // BYTES_PER_RANK}."
        )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(0, (hard - 64) // DESCRIPTORS_PER_RANK)
    if hard != resource.RLIM_INFINITY and np > most:
        needed = 64 + np * DESCRIPTORS_PER_RANK
        raise InvalidRequestError(
            f"np={np}: a process may have {hard} open files here, enough for {most or 'no'} ranks; start the notebook "
            f"where `ulimit -Hn` is at least {needed}" + (f", or choose at most {most}." if most else ".")
        )


def available_memory() -> int:
    """Return the bytes that can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 1 << 62


def check_loaded(loaded: Loaded) -> None:
    """Raise ``StartError`` with a remedy if an import of the fork server failed."""
    if not loaded.failed:
        return
    name, text = next(iter(loaded.failed.items()))
    if name.startswith("hvdlab."):
        raise StartError(f"hvdlab can't be imported in a new process ({name}): {text}")
    usable = ",".join(m for m in loaded.modules if "." not in m)
    raise StartError(
        f"`import {name}` failed in the process that ranks are made from: {text}. Repair its installation, or set "
        f"HVDLAB_PRELOAD={usable!r} before the pool starts to do without it."
    )
