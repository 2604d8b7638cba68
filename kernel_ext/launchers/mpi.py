"""ipyparallel's MPI launcher, starting our ranks."""

from __future__ import annotations

from typing import Any

from ipyparallel.cluster.launcher import MPIEngineSetLauncher  # type: ignore[import-untyped]  # has no types


class MpiRanksLauncher(MPIEngineSetLauncher):  # type: ignore[misc]  # ipyparallel is untyped
    """Starts ranks by ``mpiexec``.

    ipyparallel's own ``--mpi`` is left out: a rank takes its number from MPI's environment, and MPI itself is
    initialized by the data plane when it is used first.
    """

    entrypoint_name = f"{__name__}.MpiRanksLauncher"

    @property
    def program(self) -> list[str]:
        """The command of one rank."""
        return list(self.engine_cmd)

    def start(self, n: int) -> Any:
        """Start ``n`` ranks. A job may be told to end more patiently than one process."""
        self.stop_seconds_until_kill = 3
        return super().start(n)
