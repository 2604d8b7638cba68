"""Access to the parts of a pool that its public interface does not show."""

from __future__ import annotations

from hvdlab.kernel_ext.notebook.cells.dispatch import CellDispatcher
from hvdlab.kernel_ext.notebook.coordinator_recovery import CoordinatorRecovery
from hvdlab.kernel_ext.notebook.ipyparallel.cluster import EngineRegistration, IpyparallelCluster
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.notebook.prestart import PoolCoordinator
from hvdlab.kernel_ext.notebook.rank_lifecycle import RankLifecycle
from hvdlab.launch.forkserver.client import ForkServer


class PoolProbe:
    """Probe of a pool: its processes, and the parts that mend it.

    Attributes:
        recovery: Replaces the coordinator.
        group: The ranks.
        runs: The cells.
        companion, joining: The side of ipyparallel.
    """

    def __init__(self, pool: Pool) -> None:
        self._parts = parts = pool._parts
        self.recovery: CoordinatorRecovery = parts.rebuilder
        self.group: RankLifecycle = parts.group
        self.runs: CellDispatcher = parts.runs
        self.companion: IpyparallelCluster = parts.companion
        self.joining: EngineRegistration = parts.joining

    @property
    def has_open_questions(self) -> bool:
        """Return whether ranks have been sent a question that not all of them have answered."""
        return bool(self.runs.requests._open)

    @property
    def coordinator(self) -> PoolCoordinator:
        """The coordinator of now, which is another one after a recovery."""
        return self._parts.processes.coordinator

    def update_kept_entry(self) -> None:
        """Record changes of the pool for the process that attaches to it later."""
        self._parts.update_kept_entry()

    @property
    def fork_server(self) -> ForkServer:
        """The fork server of now."""
        return self._parts.processes.fork_server
