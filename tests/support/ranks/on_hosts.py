"""Resident rank processes on several hosts, started as torchrun's successor by hand would: MASTER_ADDR and RANK.

The coordinator is rank 0's own; see ``support/ranks/resident.py`` for how functions are run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from support.network.namespaces import Network
from support.ranks import forked as forked_workers
from support.ranks.resident import Ranks

PORT = 29500  # free on each host, which is a network namespace of its own


class RanksOnHosts(Ranks):
    """``per_host`` ranks on each host of a network, numbered host by host.

    Args:
        network: The hosts.
        per_host: Ranks of each.
        env: Variables for all ranks, or a function of the host's number.
        init: Whether they call ``init()``.
        timeout: Seconds for that.
    """

    END_TIMEOUT = 8.0

    def __init__(
        self,
        network: Network,
        per_host: int = 2,
        *,
        env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
        init: bool = True,
        timeout: float = 90,
    ) -> None:
        self.network, self.per_host = network, per_host
        self.size = per_host * len(network.hosts)
        self._extra = env
        self._begin(initialize if init else None, timeout)

    def _begin_coordinator(self) -> None:
        """Rank 0 does."""

    def _end_coordinator(self) -> None:
        """It ends with rank 0."""

    def renew(self) -> None:
        """Kill all of them, mend the network, and start others."""
        self.network.renew()
        super().renew()

    def _environment(self, rank: int) -> dict[str, str]:
        number, local = divmod(rank, self.per_host)
        extra = self._extra(number) if callable(self._extra) else self._extra
        return {
            "MASTER_ADDR": self.network.hosts[0].address,
            "MASTER_PORT": str(PORT),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.per_host),
            "OMP_NUM_THREADS": "1",
            "HVDLAB_START_TIMEOUT": "85",
            **(extra or {}),
        }

    def _spawn(self, rank: int) -> None:
        host = self.network.hosts[rank // self.per_host]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = forked_workers.fork(
                "support.ranks.worker",
                [],
                {**host.environment(), **self._environment(rank)},
                fds=[theirs.fileno()],
                modules=forked_workers.WITH_TORCH,
                host=host.pid,
            )
            connection = Connection(os.dup(ours.fileno()))
        if rank < len(self.processes):
            self.processes[rank], self.connections[rank] = process, connection
        else:
            self.processes.append(process)
            self.connections.append(connection)


def initialize() -> Any:
    """Run on a rank: join the world."""
    from hvdlab.collectives import context

    context.init()
