"""Ranks that a launcher starts, with a coordinator and no pool around them: the test bed of every launcher."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.settings import WorldEnvironment
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.forkserver.program import PROGRAM_NAME
from hvdlab.kernel_ext.notebook.ipyparallel import launchers
from hvdlab.kernel_ext.notebook.ipyparallel.cluster import IpyparallelCluster
from hvdlab.kernel_ext.notebook.ipyparallel.launchers import PoolRequest
from hvdlab.kernel_ext.wire.cells import RunCell
from hvdlab.kernel_ext.wire.channel import READY
from hvdlab.kernel_ext.wire.codec import TO_RANK, encode
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.local import LocalStarter
from hvdlab.launch.options import parse
from hvdlab.launch.starter import Ended, Launcher, Started, Waiting
from support.patience import PATIENCE
from support.ranks.fork_server import living


class StartedRanks:
    """Made by tests, ended by :meth:`close`, which asserts that no process is left.

    Args:
        name: The launcher.
        hosts: As the launcher takes them.
        options: Those of the launcher, as text.
        far: Whether ranks reach the coordinator over TLS, as those of other hosts.

    Attributes:
        launcher: Their launcher. events: The starter's reports.
        ready: Ranks in the order in which they came to listen.
    """

    def __init__(
        self, name: str, hosts: str = "", options: Mapping[str, str] | None = None, *, far: bool = False
    ) -> None:
        self.launcher: Launcher = launchers.find(name)
        values = parse(name, self.launcher.options(), options or {})
        self.events: list[Started | Ended | Waiting] = []
        self.ready: list[int] = []
        self._changed = threading.Condition()
        self._pids: set[int] = set()
        self._cells = 0
        self.coordinator = CoordinatorProcess.start(tcp_host="127.0.0.1" if far else None, timeout=PATIENCE)
        self.client = Client.connect(self.coordinator.address, self.coordinator.client_token)
        self.client.on_mail(READY, lambda rank, body: self._note(self.ready, rank))
        self.fork_server = ForkServer.start(PROGRAM_NAME, {**os.environ, "HVDLAB_PRELOAD": ""})
        self.companion = IpyparallelCluster(self.fork_server, self)
        world = WorldEnvironment(
            self.coordinator.tls_address or self.coordinator.address,
            self.coordinator.token,
            certificate=self.coordinator.certificate if far else None,
            plane="auto" if far else "shm",
        )
        self.starter = self.launcher.starter(
            PoolRequest(
                world,
                self.client,
                fork_server=self.fork_server,
                module="hvdlab.kernel_ext.rank",
                forked=PROGRAM_NAME,
                hosts=hosts,
                options=values,
                companion=self.companion,
            ),
            self,
        )
        self.companion.set_starter(self.starter)
        starter = self.starter
        hear: Callable[[Any], None] = (
            starter.hear if isinstance(starter, LocalStarter) else lambda event: None
        )
        lost: Future[str] = Future()
        self.fork_server.listen(hear, lost.set_result)

    def rank_pids(self) -> dict[int, int]:
        """Return no ranks: as a :class:`~hvdlab.kernel_ext.notebook.ipyparallel.cluster.ClusterOwner`, which has none here."""
        return {}

    def set_controller(self, connection: str) -> None: ...

    def controller_lost(self, line: str) -> None: ...

    def handle(self, event: Started | Ended | Waiting) -> None:
        """As a :class:`~hvdlab.launch.starter.RankObserver`."""
        self._note(self.events, event)

    def _note(self, where: list[Any], what: object) -> None:
        with self._changed:
            where.append(what)
            self._changed.notify_all()

    # -- acts of tests --------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait for a condition on the reports."""
        with self._changed:
            assert self._changed.wait_for(condition, 2 * PATIENCE), self.events

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Start these ranks, and wait until they listen and have a process."""
        ready, started = len(self.ready), len(self.started())
        self.client.expect(tuple(range(size)))
        self.starter.start(ranks, size)
        self.wait(
            lambda: len(self.ready) >= ready + len(ranks) and len(self.started()) >= started + len(ranks)
        )
        self._pids |= {event.pid for event in self.started()}

    def started(self) -> list[Started]:
        """Return ranks that got a process."""
        return [event for event in self.events if isinstance(event, Started)]

    def pid(self, rank: int) -> int:
        """Return the last process of a rank."""
        return [event.pid for event in self.started() if event.rank == rank][-1]

    def end_of(self, rank: int) -> Ended:
        """Return how a rank ended, once it has."""

        def ends() -> list[Ended]:
            return [event for event in self.events if isinstance(event, Ended) and event.rank == rank]

        self.wait(ends)
        return ends()[-1]

    def tell(self, rank: int, source: str) -> None:
        """Have a rank run a cell; does not wait for it."""
        self._cells += 1
        cell = f"cell{self._cells}"
        self.client.cell_started(cell, [rank])
        self.client.post(TO_RANK, encode(RunCell(cell, "[1]", source)), [rank])

    def lose(self, rank: int, reason: str) -> None:
        """Let the coordinator know of a rank's end, as a pool does."""
        self.client.rank_lost(rank, self.pid(rank), reason)

    def close(self) -> None:
        """Close it as a pool does."""
        self.client.expect(())
        self.starter.close(3.0)
        self.companion.close()
        self.fork_server.close()
        self.client.close()
        self.coordinator.close()
        assert living(self._pids) == []
        self.starter.close(0.0)  # a second time does nothing

    def wait_loaded(self) -> None:
        """Wait until the fork server can fork."""
        self.fork_server.wait_loaded(Deadline(PATIENCE))
