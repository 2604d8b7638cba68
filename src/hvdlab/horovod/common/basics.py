"""``horovod.common.basics``: Horovod's functions as methods of one object."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hvdlab.collectives import basics
from hvdlab.collectives.process_sets import ProcessSet
from hvdlab.collectives.types import ReduceOp


class MPI:
    """Substitute for mpi4py's module in annotations; importing that one would start MPI."""

    class Comm:
        """A communicator."""


class HorovodBasics:
    """The world of this process, for a framework. hvdlab has one for all, so every instance is the same world.

    Args:
        pkg_path: A file of the framework's package, where Horovod looks for its compiled module; not used.
        *args: The compiled module's name; not used.
    """

    Average = ReduceOp.AVERAGE
    Sum = ReduceOp.SUM
    Adasum = ReduceOp.ADASUM
    Min = ReduceOp.MIN
    Max = ReduceOp.MAX
    Product = ReduceOp.PRODUCT

    def __init__(self, pkg_path: str, *args: str) -> None:
        self.pkg_path = pkg_path

    def init(
        self,
        comm: Sequence[int] | Any | None = None,
        process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    ) -> None:
        """See :func:`hvdlab.collectives.basics.init`."""
        basics.init(comm, process_sets)

    def start_timeline(self, file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """See :func:`hvdlab.collectives.basics.start_timeline`."""
        basics.start_timeline(file_path, mark_cycles)

    # Functions of the core, as methods that leave out the instance.
    shutdown = staticmethod(basics.shutdown)
    is_initialized = staticmethod(basics.is_initialized)
    stop_timeline = staticmethod(basics.stop_timeline)
    rank = staticmethod(basics.rank)
    size = staticmethod(basics.size)
    local_rank = staticmethod(basics.local_rank)
    local_size = staticmethod(basics.local_size)
    cross_rank = staticmethod(basics.cross_rank)
    cross_size = staticmethod(basics.cross_size)
    is_homogeneous = staticmethod(basics.is_homogeneous)
    mpi_threads_supported = staticmethod(basics.mpi_threads_supported)
    mpi_enabled = staticmethod(basics.mpi_enabled)
    mpi_built = staticmethod(basics.mpi_built)
    gloo_enabled = staticmethod(basics.gloo_enabled)
    gloo_built = staticmethod(basics.gloo_built)
    nccl_built = staticmethod(basics.nccl_built)
    ddl_built = staticmethod(basics.ddl_built)
    ccl_built = staticmethod(basics.ccl_built)
    cuda_built = staticmethod(basics.cuda_built)
    rocm_built = staticmethod(basics.rocm_built)
