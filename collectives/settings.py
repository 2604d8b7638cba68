"""Settings of a rank, which it reads from its environment before it joins a world; and that environment, as launchers set it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.rendezvous.launchers import detect
from hvdlab.collectives.system import LOOPBACK, HostPosition, address_towards, chosen_address
from hvdlab.collectives.variables import Reader, for_reader

TOKEN = "HVDLAB_TOKEN"
"""The variable that holds a rank's secret until the rank has read it."""
TOKEN_FILE = "HVDLAB_TOKEN_FILE"
"""The variable that names a file with the secret, which only the user may read; for launchers that send variables in the clear."""
_LONGEST_TOKEN = 4096
"""Bytes that are read of such a file: the path can name another file by mistake, of any size."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a rank: how it reaches the coordinator, which rank it is, and the options that users set.

    Attributes:
        coordinator: ``unix:/path`` or ``tls:host:port``; ``None`` for a world of this process alone.
        token: Secret that the coordinator asks ranks for.
        rank: Rank to be, or -1 to let the coordinator choose one.
        size: Number of ranks of the world at its start, or ``None`` if the coordinator knows it.
        local_rank, local_size, cross_rank, cross_size: Position on the host and among hosts, or ``None`` to derive
            them from the hosts of all ranks.
        plane: Data plane to use, or ``auto``.
        direct: Whether ranks of one host agree on small blocking collectives in shared memory.
        certificate: PEM text of the coordinator's certificate (``tls`` only).
        address: Address that this rank's data-plane sockets bind to.
        cells_tracked: Whether this is a rank of a pool, whose collectives are made within cells.
        timeline: File that rank 0 writes the timeline to, or ``None``.
        mark_cycles: Whether that file marks the coordinator's decisions.
        start_timeout: Seconds that ``init()`` waits for the world.
        dead_after: Seconds of silence after which a coordinator of another host counts as lost.
        reattach: A third of the seconds that a rank which has lost the coordinator waits for a successor; 0 not at all.
        cut_off: Seconds that a rank which can come back waits for the network, if the coordinator's host does not answer at all.
        elastic_timeout: Seconds that ranks of elastic training wait for each other.
        min_np: How many ranks elastic training needs.
        reset_limit: How often elastic training begins again at most; 0 for no limit.
        rank_numbers: How scripts know ranks when others come or go, ``stable`` or ``consecutive``.
        record: Whether spans and metrics are recorded.
        metrics_interval: Seconds between two samples of this process's resources; 0 for none.
        log_level: The least important lines of the logger ``hvdlab`` that are written, as ``logging`` counts.
        log_hide_time: Whether these lines leave the time out.
        cache_capacity: Tensors that the coordinator knows by number, at most.
        require_encryption: Empty if data may travel between hosts in the clear; ``1`` if it may not; or the networks, separated by
            commas, that count as encrypted.
        kv_optimizers: Modules that parameter servers import.
        kv_servers: Parameter servers on each host.
        kv_bigarray_bound: Elements of the smallest key that is spread over all servers.
        kv_partition_bytes: Bytes of the parts in which a ``byteps`` store sums a large array that the caller does not wait for.
        thread_affinity: Cores for the engine's threads, by local rank; empty leaves them alone.
        host_directory: Private directory that this host's agent removes after the ranks; ``None`` without an agent.
    """

    coordinator: str | None = None
    token: str = ""
    rank: int = -1
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    plane: str = "auto"
    direct: bool = True
    certificate: str | None = None
    address: str = "127.0.0.1"
    cells_tracked: bool = False
    timeline: str | None = None
    mark_cycles: bool = False
    start_timeout: float = 60.0
    dead_after: float = 30.0
    reattach: float = 10.0
    cut_off: float = 300.0
    elastic_timeout: float = 600.0
    min_np: int = 1
    reset_limit: int = 0
    rank_numbers: str = "stable"
    record: bool = True
    metrics_interval: float = 1.0
    log_level: int = 30
    log_hide_time: bool = False
    cache_capacity: int = 4096
    require_encryption: str = ""
    kv_optimizers: tuple[str, ...] = ()
    kv_servers: int = 1
    kv_bigarray_bound: int = 1_000_000
    kv_partition_bytes: int = 4_096_000
    thread_affinity: tuple[int, ...] = ()
    host_directory: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables that a launcher sets for a rank, and those that users set (:mod:`hvdlab.collectives.variables`).

        Args:
            environ: The variables; by default those of this process.

        Raises:
            InvalidRequestError: Variables hold no value of their kind; the text names them.
        """
        env = os.environ if environ is None else environ
        values: dict[str, Any] = for_reader(Reader.RANK, env)
        if values.get("timeline") == "DYNAMIC":  # Horovod's word for: when the script calls start_timeline()
            del values["timeline"]
        rank, local_rank = _integer(env, "HVDLAB_RANK"), _integer(env, "HVDLAB_LOCAL_RANK")
        if rank is None and env.get(
            "HVDLAB_COORDINATOR"
        ):  # the coordinator is hvdlab's, but another launcher has started the ranks
            launched = detect(env)
            if launched is not None and launched.size > 1:
                rank, local_rank = launched.rank, launched.ordered_local_rank
        return cls(
            coordinator=env.get("HVDLAB_COORDINATOR") or None,
            token=_token(env),
            host_directory=host_directory_from(env),
            rank=-1 if rank is None else rank,
            size=_integer(env, "HVDLAB_SIZE"),
            local_rank=local_rank,
            local_size=_integer(env, "HVDLAB_LOCAL_SIZE"),
            cross_rank=_integer(env, "HVDLAB_CROSS_RANK"),
            cross_size=_integer(env, "HVDLAB_CROSS_SIZE"),
            certificate=_certificate(env.get("HVDLAB_CERT")),
            address=data_plane_address(env, env.get("HVDLAB_COORDINATOR") or ""),
            **values,
        )


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidRequestError(f"{name}={text!r} is no whole number.") from None


def _token(env: Mapping[str, str]) -> str:
    """Return the secret; empty if neither variable has one, or its file is gone."""
    given, path = env.get(TOKEN, ""), env.get(TOKEN_FILE, "")
    if given or not path:
        return given
    try:
        with open(path, "rb") as file:
            # Of the opened file: another user could replace the path between a check of the name and the reading.
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise InvalidRequestError(
                    f"{TOKEN_FILE}={path!r}: the file must belong to user {os.geteuid()} alone (mode 0600)."
                )
            return file.read(_LONGEST_TOKEN).decode().strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise InvalidRequestError(f"{TOKEN_FILE}={path!r}: {error.strerror or error}.") from error


def _certificate(value: str | None) -> str | None:
    """Return the PEM text of a variable that holds it, or a path to a file with it."""
    if not value or "BEGIN CERTIFICATE" in value:
        return value or None
    return Path(value).read_text()


@dataclass(frozen=True, slots=True)
class WorldEnvironment:
    """Environment of a job, as far as it is the same for all its ranks.

    Attributes:
        coordinator: Address of the coordinator, ``unix:/path`` or ``tls:host:port``.
        token: The coordinator's secret for ranks.
        certificate: PEM text (``tls`` only).
        plane: Data plane to use, or ``auto``.
        master_address, master_port: Where ``torch.distributed`` of a rank's code can rendezvous.
    """

    coordinator: str
    token: str
    certificate: str | None = None
    plane: str = "auto"
    master_address: str = "127.0.0.1"
    master_port: int = 0


# Its value begins with the coordinator's address; see host_directory_variable().
_HOST_DIRECTORY = "HVDLAB_HOST_DIRECTORY"


def host_directory_variable(directory: str, coordinator: str) -> dict[str, str]:
    """Return the variable by which ranks know their host's directory, bound to the job's coordinator.

    A process that a rank starts inherits the variable, and can belong to another job.

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

    That is the one that the environment chooses; without a choice, the one from which a coordinator of another host
    (``tls:host:port``) is reached, or the loopback interface's.

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


def sizes(rank: int, size: int, where: HostPosition | None = None) -> dict[str, str]:
    """Return the variables that depend on the number of ranks; all are on one host unless ``where`` is given."""
    here = where or HostPosition(rank, size, 0, 1)
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

    Lightning's Trainer removes it when a training ends, as if it were its own. Without it, the next library that reads these variables
    treats this rank as the only process.
    """
    if "WORLD_SIZE" not in os.environ and os.environ.keys() >= {"RANK", "LOCAL_RANK", "HVDLAB_SIZE"}:
        os.environ["WORLD_SIZE"] = os.environ["HVDLAB_SIZE"]


def common(world: WorldEnvironment) -> dict[str, str]:
    """Return the variables that are the same on all ranks."""
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


def own_environment(
    world: WorldEnvironment, rank: int, size: int, where: HostPosition | None = None
) -> dict[str, str]:
    """Return the variables that make a process this rank."""
    return {"HVDLAB_RANK": str(rank), **common(world), **sizes(rank, size, where)}


def rank_environment(
    base: Mapping[str, str], world: WorldEnvironment, rank: int, size: int
) -> dict[str, str]:
    """Return the whole environment of a rank on this host. Variables of ``base`` about threads stay as they are."""
    # The rank's own ones last: ``base`` can have those of another rank.
    return {**base, **thread_counts(base, size), **own_environment(world, rank, size)}


def thread_counts(base: Mapping[str, str], size: int) -> dict[str, str]:
    """Return the variables with the number of threads of a rank's libraries: its share of a host with ``size`` ranks; those in ``base`` stay.

    TensorFlow does not follow OpenMP's number. Between operations it gets two threads at least, so that a long operation does not
    hold up the input of the next step.
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
    """Return the number of usable cores divided by ranks, at least 1."""
    # Of the process, not the machine: a container or a scheduler can have given it a part of the cores.
    return max(1, len(os.sched_getaffinity(0)) // max(1, size))


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of an address of this host (the loopback interface) that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
