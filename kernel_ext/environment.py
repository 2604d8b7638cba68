"""The environment of a rank: what hvdlab reads, and what other libraries look for."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """What all ranks of a pool are told alike.

    Attributes:
        coordinator: Address of the coordinator, ``unix:/path`` or ``tls:host:port``.
        token: Its secret.
        certificate: PEM text (``tls`` only).
        plane: Data plane to use, or ``auto``.
        master_address, master_port: Where ``torch.distributed`` of a cell may rendezvous.
    """

    coordinator: str
    token: str
    certificate: str | None = None
    plane: str = "auto"
    master_address: str = "127.0.0.1"
    master_port: int = 0


def sizes(rank: int, size: int) -> dict[str, str]:
    """The variables that depend on the number of ranks, for a pool on one host."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "HVDLAB_SIZE": size,
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": rank,
        "HOROVOD_LOCAL_SIZE": size,
        "HOROVOD_CROSS_RANK": 0,
        "HOROVOD_CROSS_SIZE": 1,
    }
    return {name: str(value) for name, value in values.items()}


def common(world: World) -> dict[str, str]:
    """The variables that are the same on all ranks."""
    values = {
        "HVDLAB_COORDINATOR": world.coordinator,
        "HVDLAB_TOKEN": world.token,
        "HVDLAB_PLANE": world.plane,
        "MASTER_ADDR": world.master_address,
        "MASTER_PORT": str(world.master_port),
    }
    if world.certificate:
        values["HVDLAB_CERT"] = world.certificate
    return values


def rank_environment(base: Mapping[str, str], world: World, rank: int, size: int) -> dict[str, str]:
    """The whole environment of a rank of a pool on this host. What ``base`` says about threads stays."""
    own = {"HVDLAB_RANK": str(rank), **common(world), **sizes(rank, size)}
    return {"OMP_NUM_THREADS": str(threads_per_rank(size)), **base, **own}


def threads_per_rank(size: int) -> int:
    """Usable cores divided by ranks, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, size))


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def foreign_sizes(environ: Mapping[str, str]) -> dict[str, str]:
    """What a foreign launcher's variables mean for this rank; empty without such a launcher.

    What the launcher does not tell, such as the number of hosts, is left out.
    """
    found = {
        ("RANK", "HVDLAB_RANK", "HOROVOD_RANK"): _first(environ, _RANK),
        ("WORLD_SIZE", "HVDLAB_SIZE", "HOROVOD_SIZE"): _first(environ, _SIZE),
        ("LOCAL_RANK", "HOROVOD_LOCAL_RANK"): _first(environ, _LOCAL_RANK),
        ("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE"): _first(environ, _LOCAL_SIZE),
    }
    return {name: value for names, value in found.items() if value for name in names}


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")
