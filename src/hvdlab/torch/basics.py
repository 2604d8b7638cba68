"""Joining and leaving the world, this rank's place in it, and the features that this installation has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlab.bindings.framework_hooks import devices_in_use
from hvdlab.collectives import basics
from hvdlab.collectives.basics import (
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvdlab.collectives.metrics.sampler import ask_frameworks
from hvdlab.torch.half_precision import register_conversions
from hvdlab.torch.process_sets import ProcessSet

__all__ = [
    "barrier",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(
    comm: Sequence[int] | Any | None = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
) -> None:
    ask_frameworks(devices_in_use)
    basics.init(comm, process_sets)
    register_conversions()


init.__doc__ = basics.init.__doc__
