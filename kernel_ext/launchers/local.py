"""Ranks on this host, forked by the fork server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from hvdlab.collectives.environment import World, rank_environment
from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.members import Ended, Event, Started
from hvdlab.launch.exits import describe, detail
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


class LocalRanks:
    """Starts ranks by the fork server.

    Args:
        fork_server: The fork server.
        world: What every rank is told.
        report: Takes what happens to ranks.
    """

    def __init__(self, fork_server: ForkServer, world: World, report: Callable[[Event], None]) -> None:
        self._fork_server, self._world, self._report = fork_server, world, report

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have them forked, with this process's environment, working directory and ``sys.path`` as they are now."""
        directory = os.getcwd()
        for rank in ranks:
            environment = rank_environment(os.environ, self._world, rank, size)
            self._fork_server.send(Fork.of(rank, environment, directory, sys.path))

    def signal(self, rank: int, number: int) -> None:
        """Send a signal, by the fork server, which knows whether the process still is that rank."""
        self._fork_server.send(Signal(rank, number))

    def hear(self, event: FromServer) -> None:
        """A message of the fork server; those that are not about ranks are ignored."""
        match event:
            case Forked(number, pid) if number != CONTROLLER:
                self._report(Started(number, pid))
            case ForkFailed(number, text) if number != CONTROLLER:
                self._report(Ended(number, 0, f"it could not be forked: {text}"))
            case Exited(number, pid) if number != CONTROLLER:
                self._report(Ended(number, pid, describe(event), event.tail, detail(event)))


def check_loaded(loaded: Loaded) -> None:
    """Raises ``StartError`` if an import of the fork server failed, with what to do."""
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
