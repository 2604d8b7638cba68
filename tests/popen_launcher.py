"""A launcher such as a package may offer: programs on this host, without single ranks or a reason of their end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from hvdlab.collectives.client import Membership
from hvdlab.collectives.engine.hosts import Place
from hvdlab.collectives.environment import own_environment
from hvdlab.launch.options import Kind, Option
from hvdlab.launch.starter import (
    Capabilities,
    Capability,
    Ended,
    LaunchRequest,
    RankObserver,
    Started,
)


class PopenLauncher:
    """Found by an entry point of ``hvdlab.launchers``."""

    name = "popen"
    capabilities = Capabilities(
        frozenset({Capability.SIGNALS}),
        {
            Capability.SINGLE_RANKS: "its queue gives out whole jobs",
            Capability.RESIZE: "its queue gives out whole jobs",
            Capability.KEEP: "its queue ends a job with its owner",
            Capability.REASONS: "its queue does not tell",
        },
    )
    forks = False

    def options(self) -> Sequence[Option]:
        return (Option("nice", "how nice ranks are", Kind.COUNT),)

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        pass

    def is_far(self, hosts: str) -> bool:
        return False

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> PopenStarter:
        return PopenStarter(request, ranks)


class PopenStarter:
    def __init__(self, request: LaunchRequest, ranks: RankObserver) -> None:
        self._request, self._ranks = request, ranks
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[int] = set()
        request.client.on_membership(self._on_membership)

    def start(self, ranks: Sequence[int], size: int) -> None:
        if self._processes:
            PopenLauncher.capabilities.require(Capability.SINGLE_RANKS, "popen", "start another job.")
        nice = ["nice", "-n", str(self._request.options.get("nice", 0))]
        for rank in ranks:
            environment = {**os.environ, **own_environment(self._request.world, rank, size)}
            command = [*nice, sys.executable, "-m", self._request.module]
            self._processes[rank] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
            self._ranks.handle(Started(rank, self._processes[rank].pid))

    def signal(self, rank: int, number: int) -> None:
        self._processes[rank].send_signal(number)

    def place(self, rank: int, size: int) -> Place | None:
        return None

    def close(self, timeout: float) -> None:
        for process in self._processes.values():
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _on_membership(self, membership: Membership) -> None:
        for death in membership.deaths:
            if death.rank not in self._ended:
                self._ended.add(death.rank)
                self._ranks.handle(Ended(death.rank, death.pid, death.reason))
