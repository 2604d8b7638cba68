"""The environment of a rank: what hvdlab reads, and what other libraries look for."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hvdlab.collectives.engine.hosts import Place
from hvdlab.collectives.system import LOOPBACK, address_towards, chosen_address


@dataclass(frozen=True, slots=True)
class World:
    """Part of the environment that is the same for all ranks of a job.

    Attributes:
        coordinator: Address of the coordinator, ``unix:/path`` or ``tls:host:port``.
        token: The coordinator's secret for ranks.
        certificate: PEM text (``tls`` only).
        plane: Data plane to use, or ``auto``.
        master_address, master_port: Where ``torch.distributed`` of a rank's code may rendezvous.
    """

    coordinator: str
    token: str
    certificate: str | None = None
    plane: str = "auto"
    master_address: str = "127.0.0.1"
    master_port: int = 0


_HOST_DIRECTORY = "HVDLAB_HOST_DIRECTORY"


def host_directory_variable(directory: str, coordinator: str) -> dict[str, str]:
    """Return the variable by which ranks know their host's directory, bound to the job's coordinator.

    A process that a rank starts inherits the variable, and may belong to another job.

    Args:
        directory: A private directory, which the agent of the host removes after the ranks.
        coordinator: Address of the job's coordinator.
    """
    return {_HOST_DIRECTORY: f"{coordinator} {directory}"}


def host_directory_from(environ: Mapping[str, str]) -> str | None:
    """Return the directory of this host that these variables name for their coordinator, or ``None``."""
    coordinator, _, directory = environ.get(_HOST_DIRECTORY, "").partition(" ")
    return directory if directory and coordinator == environ.get("HVDLAB_COORDINATOR") else None


def data_plane_address(environ: Mapping[str, str], coordinator: str) -> str:
    """Return the address that this rank's data plane binds to.

    The environment's choice; else the one from which a coordinator of another host (``tls:host:port``) is reached;
    else the loopback interface's.

    Raises:
        InvalidRequestError: The environment chooses an address that this host does not have, or the coordinator's can't be read.
    """
    chosen = chosen_address(environ)
    if chosen or not coordinator.startswith("tls:"):
        return chosen or LOOPBACK
    # Agents of hosts and fork servers import this module; few of them come here, and the handshake brings TLS along.
    from hvdlab.collectives.protocol.handshake import TlsAddress, parse_address

    where = parse_address(coordinator)
    assert isinstance(where, TlsAddress)
    return address_towards(where.host) or LOOPBACK


def sizes(rank: int, size: int, where: Place | None = None) -> dict[str, str]:
    """The variables that depend on the number of ranks; all are on one host unless ``where`` says otherwise."""
    here = where or Place(rank, size, 0, 1)
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": here.local_rank,
        "LOCAL_WORLD_SIZE": here.local_size,
        "HVDLAB_SIZE": size,
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": here.local_rank,
        "HOROVOD_LOCAL_SIZE": here.local_size,
        "HOROVOD_CROSS_RANK": here.cross_rank,
        "HOROVOD_CROSS_SIZE": here.cross_size,
    }
    return {name: str(value) for name, value in values.items()}


def restore_world_size() -> None:
    """Set ``WORLD_SIZE`` again if of the variables for other libraries only that is missing.

    Lightning's Trainer removes it when a training ends, as if it were its own. Without it, what looks for these variables next takes
    this rank for one of a single process.
    """
    if "WORLD_SIZE" not in os.environ and os.environ.keys() >= {"RANK", "LOCAL_RANK", "HVDLAB_SIZE"}:
        os.environ["WORLD_SIZE"] = os.environ["HVDLAB_SIZE"]


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


def own_environment(world: World, rank: int, size: int, where: Place | None = None) -> dict[str, str]:
    """The variables that make a process this rank."""
    return {"HVDLAB_RANK": str(rank), **common(world), **sizes(rank, size, where)}


def rank_environment(base: Mapping[str, str], world: World, rank: int, size: int) -> dict[str, str]:
    """The whole environment of a rank on this host. Variables of ``base`` about threads stay as they are."""
    return {**base, **thread_counts(base, size), **own_environment(world, rank, size)}


def thread_counts(base: Mapping[str, str], size: int) -> dict[str, str]:
    """The variables that set how many threads a rank's libraries use: its share of a host with ``size`` ranks; those in ``base`` stay.

    TensorFlow does not follow OpenMP's number. Between operations it gets two threads at least, so that an operation that computes
    for long does not hold up the input of the next step.
    """
    threads = base.get("OMP_NUM_THREADS") or str(threads_per_rank(size))
    between = str(max(2, int(threads))) if threads.isdecimal() else "2"
    wanted = {
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": between,
    }
    return {name: base.get(name, value) for name, value in wanted.items()}


def threads_per_rank(size: int) -> int:
    """Usable cores divided by ranks, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, size))


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of an address of this host (the loopback interface) that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
