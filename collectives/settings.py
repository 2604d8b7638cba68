"""A rank's settings, which it reads from its environment before it joins a world."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdlab.collectives.environment import data_plane_address, host_directory_from
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.rendezvous.launchers import detect
from hvdlab.collectives.variables import Reader, for_reader

__all__ = ["TOKEN", "TOKEN_FILE", "Settings"]

TOKEN = "HVDLAB_TOKEN"
"""The variable that holds a rank's secret until the rank has read it."""
TOKEN_FILE = "HVDLAB_TOKEN_FILE"
"""The variable that names a file with the secret, which only the user may read; for launchers that send variables in the clear."""
_LONGEST_TOKEN = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach the coordinator, and which rank to be.

    Attributes:
        coordinator: ``unix:/path`` or ``tls:host:port``; ``None`` for a world of this process alone.
        token: Secret that the coordinator asks ranks for.
        rank: Rank to be, or -1 to let the coordinator choose one.
        size: Number of ranks of the world at its start, or ``None`` if the coordinator knows it.
        local_rank, local_size, cross_rank, cross_size: Place on the host and among hosts, or ``None`` to derive
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
        reset_limit: How often elastic training may begin again; 0 for no limit.
        rank_numbers: How scripts know ranks when others come or go, ``stable`` or ``consecutive``.
        record: Whether spans and metrics are recorded.
        metrics_interval: Seconds between two samples of what this process uses; 0 for none.
        log_level: The least important lines of the logger ``hvdlab`` that are written, as ``logging`` counts.
        log_hide_time: Whether these lines leave the time out.
        cache_capacity: Tensors that the coordinator knows by number, at most.
        require_encryption: Empty if data may travel between hosts in the clear; ``1`` if it may not; or the networks, separated by
            commas, that count as encrypted.
        kv_optimizers: Modules that parameter servers import.
        kv_servers: Parameter servers on each host.
        kv_bigarray_bound: Elements from which on a key is spread over all servers.
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
            InvalidRequestError: Variables do not hold what they should; the text names them.
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
    """The secret; empty if neither variable has one, or its file is gone."""
    given, path = env.get(TOKEN, ""), env.get(TOKEN_FILE, "")
    if given or not path:
        return given
    try:
        with open(path, "rb") as file:
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
    """PEM text itself, or a path to a file that holds it."""
    if not value or "BEGIN CERTIFICATE" in value:
        return value or None
    return Path(value).read_text()
