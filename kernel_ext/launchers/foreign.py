"""Ranks that one of ipyparallel's own launchers starts: MPI, SSH, Slurm and others.

They are started all at once as ``python -m hvdlab.kernel_ext.rank``, find the coordinator by their environment, and
are known by their connection to it alone.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hvdlab.collectives.client import Client, Membership
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.environment import World, common, threads_per_rank
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.kernel_ext.launchers import names
from hvdlab.kernel_ext.launchers.cluster import Companion
from hvdlab.kernel_ext.launchers.loading import load_ipyparallel
from hvdlab.kernel_ext.members import Ended, Event, Started

START_WITHIN = 60.0
"""Seconds that a launcher has to hand the ranks to its system."""
ENGINE_COMMAND = ["-m", "hvdlab.kernel_ext.rank"]


class ForeignRanks:
    """Starts ranks by an engine set launcher of ipyparallel's.

    Args:
        launcher: Its name.
        hosts: ``a:4,b:4``, or empty for the launcher's own choice.
        companion: Has the cluster.
        world: What every rank is told.
        report: Takes what happens to ranks.
    """

    def __init__(
        self,
        launcher: str,
        hosts: str,
        companion: Companion,
        client: Client,
        world: World,
        report: Callable[[Event], None],
    ) -> None:
        self._launcher, self._hosts = launcher.lower(), hosts
        self._companion, self._client, self._world, self._report = companion, client, world, report
        self._pids: dict[int, int] = {}
        self._size = 0
        self._stopped = threading.Event()
        client.on_membership(self._on_membership)

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have them started; possible once.

        Raises:
            InvalidRequestError: They were started before.
            StartError: The launcher could not do it.
        """
        if self._size:
            raise InvalidRequestError(
                f"ranks of the launcher `{self._launcher}` are started together: their number can't be changed, and "
                "single ranks can't be replaced; stop the pool and start it anew."
            )
        self._size = size
        try:
            self._companion.call(self._start(size), Deadline(START_WITHIN))
        # What ipyparallel's launchers raise when their program is missing or refuses has no common base.
        except Exception as error:
            raise StartError(
                f"the launcher `{self._launcher}` could not start the ranks: {type(error).__name__}: {error}"
            ) from error

    def signal(self, rank: int, number: int) -> None:
        """Ranks of this host get the signal; others are ended by the coordinator's word and the launcher's stop."""
        from hvdlab.collectives.engine.hosts import host_key

        here = host_key()
        for member in self._client.membership().members:
            if member.rank == rank and member.host == here:
                os.kill(member.pid, number)

    def wait_stopped(self, timeout: float) -> None:
        """Give the launcher's program time to end after its ranks, as MPI's does, which then clears up."""
        if self._size:
            self._stopped.wait(timeout)

    async def _start(self, size: int) -> None:
        load_ipyparallel()
        cluster = self._companion.new_cluster(engine_launcher_class=self._class())
        name = await cluster.start_engines(size, **self.options(size))
        launched = cluster.engines[name]
        launched.on_stop(self._launcher_stopped)
        process = getattr(launched, "process", None)
        if process is not None:
            self._companion.watch_launcher(process.pid)
        if log := getattr(launched, "output_file", ""):
            self._companion.guard(log)

    def _class(self) -> Any:
        if self._launcher == names.MPI:
            from hvdlab.kernel_ext.launchers.mpi import MpiRanksLauncher

            return MpiRanksLauncher
        return self._launcher

    def options(self, size: int) -> dict[str, Any]:
        """Traits of the engine set's launcher."""
        environment = {**common(self._world), "HVDLAB_SIZE": str(size)}
        environment.setdefault(
            "OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(size)))
        )
        options: dict[str, Any] = {
            "engine_cmd": [sys.executable if self._launcher == names.MPI else "python3", *ENGINE_COMMAND],
            "environment": environment,
        }
        if self._launcher == names.MPI:
            options["mpi_cmd"] = names.mpiexec()
            if self._hosts:
                options["mpi_args"] = ["-hosts", self._hosts]
        elif self._hosts:
            options["engines"] = parse_hosts(self._hosts)
        return options

    # -- what happens to them -------------------------------------------------------------------------------------

    def _on_membership(self, membership: Membership) -> None:
        for member in membership.members:
            if self._pids.get(member.rank) != member.pid:
                self._pids[member.rank] = member.pid
                self._report(Started(member.rank, member.pid))
        for death in membership.deaths:
            if self._pids.pop(death.rank, None) is not None:
                self._ended(death.rank, death.pid, death.reason)
        for rank in set(self._pids) - set(membership.ranks):
            self._ended(rank, self._pids.pop(rank), "it left")

    def _ended(self, rank: int, pid: int, reason: str) -> None:
        self._companion.rank_gone(rank)
        self._report(Ended(rank, pid, reason))

    def _launcher_stopped(self, data: Any) -> None:
        """The launcher's program has ended. Ranks that never connected will not come any more."""
        self._stopped.set()
        code = (data or {}).get("exit_code")
        for rank in range(self._size):
            self._report(Ended(rank, 0, f"the launcher `{self._launcher}` ended with exit code {code}"))


def parse_hosts(hosts: str) -> dict[str, int]:
    """``a:4,b`` to ``{"a": 4, "b": 1}``. Raises ``InvalidRequestError``."""
    found: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in hosts.split(","))):
        host, _, slots = part.partition(":")
        if not host or (slots and not slots.isdigit()):
            raise InvalidRequestError(f"hosts={hosts!r} can't be read; write them as `a:4,b:4`.")
        found[host] = found.get(host, 0) + int(slots or 1)
    if not found:
        raise InvalidRequestError("hosts= names no host; write them as `a:4,b:4`.")
    return found
