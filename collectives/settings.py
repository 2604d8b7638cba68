"""Settings of a rank, which it reads from its environment before it joins a world; that environment, as launchers set it; and the table
of all variables that users set, with their kinds, the processes that read them, and their meaning.

``docs/reference/settings_table.py`` writes the table into ``docs/reference/settings.md``.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.rendezvous.launchers import detect
from hvdlab.collectives.system import LOOPBACK, HostPosition, address_towards, chosen_address

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
        """Read the variables that a launcher sets for a rank, and those that users set (:data:`VARIABLES`).

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


# -- the table of variables --------------------------------------------------------------------------------------------


Value = bool | int | float | str | tuple[int, ...] | tuple[str, ...]

_YES = frozenset(("1", "true", "yes", "on"))
_NO = frozenset(("0", "false", "no", "off"))
LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40, "fatal": 50}
"""Horovod's levels as those of ``logging``."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of value: its words in documentation and errors, and its parser.

    Attributes:
        unit: For the table in the documentation.
        expected: The expected form, for the error text.
        parse: Parses a text; raises ``ValueError`` for a text that is no such value.
        absent: Words, in lower case, that are no values, though users expect them; why they are not, and the remedy.
    """

    unit: str
    expected: str
    parse: Callable[[str], Value]
    absent: Mapping[str, str] = field(default_factory=dict)


def _flag(text: str) -> bool:
    text = text.lower()
    if text in _YES:
        return True
    if text in _NO:
        return False
    return int(text) > 0  # as Horovod reads its flags


def _number(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and value >= least):
            raise ValueError(text)
        return value

    return parse


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError(text)
        return value

    return parse


def _milliseconds(text: str) -> float:
    return _number(0.0)(text) / 1000


def _cores(text: str) -> tuple[int, ...]:
    return tuple(_whole(0)(piece) for piece in text.split(","))


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(piece.strip() for piece in text.split(","))
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(text)
    return names


def _encryption(text: str) -> str:
    if text.lower() in _NO:
        return ""
    if text.lower() in _YES:
        return "1"
    return ",".join(str(ipaddress.ip_network(piece.strip(), strict=False)) for piece in text.split(","))


def _level(text: str) -> int:
    try:
        return LEVELS[text.lower()]
    except KeyError:
        raise ValueError(text) from None


FLAG = Kind("0 or 1", "0 or 1", _flag)
BYTES = Kind("bytes", "a whole number of bytes from 0", _whole(0))
COUNT = Kind("number", "a whole number from 0", _whole(0))
POSITIVE = Kind("number", "a whole number from 1", _whole(1))
SECONDS = Kind("s", "a number of seconds from 0", _number(0.0))
MILLISECONDS = Kind("ms", "a number of milliseconds from 0", _milliseconds)
FRACTION = Kind("number", "a number from 0", _number(0.0))
CORES = Kind("core numbers", "core numbers with commas between them", _cores)
LEVEL = Kind("level", f"one of {', '.join(LEVELS)}", _level)
ENCRYPTION = Kind(
    "0, 1 or networks", "0, 1, or networks such as 10.8.0.0/24 with commas between them", _encryption
)
MODULES = Kind("modules", "names of modules with commas between them", _modules)
TEXT = Kind("text", "a text", str)
FILE = Kind("file", "a file name", str)


def choice(*words: str, absent: Mapping[str, str] | None = None) -> Kind:
    """Return the kind with these words as its only values; see :class:`Kind` for ``absent``."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    return Kind("name", f"one of {', '.join(words)}", parse, absent or {})


PLANES = ("auto", "shm", "gloo", "mpi", "hierarchical", "local")
ABSENT_PLANES = {
    "nccl": "NCCL moves CUDA tensors only, beside a plane for the others, and needs no setting where each rank has a GPU of its own"
}
"""Planes that users expect, and why there are none of these names."""
CUDA_PLANES = ("auto", "ipc", "nccl")
CONSECUTIVE = "consecutive"
"""Value of ``HVDLAB_RANK_NUMBERS`` with which numbers have no gaps."""


class Reader(StrEnum):
    """Process that reads a variable."""

    COORDINATOR = "coordinator"
    """The process that starts the coordinator (a pool, ``hvdlab run``, rank 0 under another launcher), which passes it on."""
    RANK = "rank"
    """Each rank, in ``hvd.init()``."""
    BOTH = "coordinator and ranks"
    POOL = "pool"
    """A pool, when it starts its ranks."""
    KERNEL = "kernel"
    """The kernel whose cells run on ranks, for the pool that it starts."""
    NONE = "none"
    """No process reads it: it is accepted, so that scripts and configurations go on to work, and changes nothing."""


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """Variable that a user can set.

    Attributes:
        name: Its name.
        kind: Kind of its value.
        reader: Which process reads it.
        default: Value when it is unset, in the words of the documentation.
        meaning: Its effect; for a variable that no process reads, why.
        field: The field of ``CoordinatorLaunch`` or ``Settings`` that it sets, or empty.
    """

    name: str
    kind: Kind
    reader: Reader
    default: str
    meaning: str
    field: str = ""


_C, _R, _P, _K, _N = Reader.COORDINATOR, Reader.RANK, Reader.POOL, Reader.KERNEL, Reader.NONE

VARIABLES: tuple[EnvironmentVariable, ...] = (
    # -- fusing and holding ---------------------------------------------------------------------------------------
    EnvironmentVariable("HOROVOD_FUSION_THRESHOLD", BYTES, _C, "67108864", "bytes of tensors that are fused into one operation at most; 0 fuses nothing", "fusion_threshold"),
    EnvironmentVariable("HOROVOD_CYCLE_TIME", MILLISECONDS, _C, "0", "flush delay: how long what is ready is held for more to fuse with it (small collectives that a rank waits for may go [another way](../design/overview.md#the-direct-way)); 0 executes at once, which is quickest unless an application submits very many tensors slowly", "flush_delay"),
    EnvironmentVariable("HOROVOD_DISABLE_GROUP_FUSION", FLAG, _C, "0", "1 fuses the tensors of a `grouped_*` call with each other only", "separate_groups"),
    EnvironmentVariable("HOROVOD_CACHE_CAPACITY", COUNT, _R, "4096", "tensors (name, shape, type, operation, call site) that ranks and coordinator remember, so that they are announced by number; the longest unused makes room", "cache_capacity"),
    EnvironmentVariable("HVDLAB_SCHEDULING_CREDIT", BYTES, _C, "4194304", "bytes of tensors [with a priority](../how-to/priorities.md) that ranks execute at a time, before the coordinator chooses the most urgent of the others; 0 chooses none, but executes in the order of becoming ready", "scheduling_credit"),
    # -- stalls ---------------------------------------------------------------------------------------------------
    EnvironmentVariable("HOROVOD_STALL_CHECK_DISABLE", FLAG, _C, "0", "1 neither reports nor ends collectives that wait for ranks", "stall_disable"),
    EnvironmentVariable("HOROVOD_STALL_CHECK_TIME_SECONDS", SECONDS, _C, "10", "after how long, and how often, a collective that waits for ranks is reported; 0 never", "stall_seconds"),
    EnvironmentVariable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", SECONDS, _C, "0", "after how long it fails on the ranks that wait, with an error that names the missing ones; 0 never", "stall_shutdown"),
    # -- planes ---------------------------------------------------------------------------------------------------
    EnvironmentVariable("HVDLAB_PLANE", choice(*PLANES, absent=ABSENT_PLANES), _R, "auto", "data plane ([how they differ](../how-to/choose-a-plane.md)); `--plane` of `%%hvd_run` sets it for a pool", "plane"),
    EnvironmentVariable("HVDLAB_CUDA", FLAG, _R, "-", "0 copies CUDA tensors through the host; otherwise collectives [work on them where they are](gpus.md) if all ranks of a process set can"),
    EnvironmentVariable("HVDLAB_CUDA_PLANE", choice(*CUDA_PLANES), _R, "auto", "the plane that this rank offers for CUDA tensors: [`ipc`](../design/planes.md#cudaipc), for ranks of one host, or [`nccl`](../design/planes.md#cudanccl), for ranks with a GPU each; `auto` offers both, and `nccl` is chosen where no two ranks share a GPU, else `ipc`"),
    EnvironmentVariable("HVDLAB_DIRECT", FLAG, _R, "1", "0 has the coordinator order also the small collectives that a rank waits for, on which ranks of one host agree [in shared memory](../design/overview.md#the-direct-way) otherwise; set it on all ranks alike", "direct"),
    EnvironmentVariable("HVDLAB_HOST", TEXT, _R, "-", "name that ranks have in common which share memory, if it can't be found out, as between containers ([what it is for](../how-to/choose-a-plane.md#name-the-host-of-a-rank))"),
    EnvironmentVariable("HOROVOD_HIERARCHICAL_ALLREDUCE", FLAG, _C, "-", "ranks on several hosts: 1 reduces within each host first, 0 does not; unset chooses", "hierarchical_allreduce"),
    EnvironmentVariable("HOROVOD_HIERARCHICAL_ALLGATHER", FLAG, _C, "-", "the same for allgather", "hierarchical_allgather"),
    EnvironmentVariable("HOROVOD_THREAD_AFFINITY", CORES, _R, "-", "cores that the threads of hvdlab are bound to: the n-th number is for the rank with local rank n; a rank without one warns, and is not bound", "thread_affinity"),
    # -- starting -------------------------------------------------------------------------------------------------
    EnvironmentVariable("HVDLAB_START_TIMEOUT", SECONDS, _R, "60", "how long `hvd.init()` waits for all ranks", "start_timeout"),
    EnvironmentVariable("HOROVOD_GLOO_TIMEOUT_SECONDS", SECONDS, _R, "60", "the same, if `HVDLAB_START_TIMEOUT` is unset", "start_timeout"),
    # -- key-value stores -----------------------------------------------------------------------------------------
    EnvironmentVariable("HVDLAB_KV_OPTIMIZERS", MODULES, _R, "-", "modules, with commas between them, that parameter servers import, so that they have the [optimizers of your own](../how-to/parameter-servers.md#bring-your-own-optimizer) which these register", "kv_optimizers"),
    EnvironmentVariable("HVDLAB_KV_SERVERS", POSITIVE, _R, "1", "processes on each host that keep the values of [key-value stores](../how-to/parameter-servers.md) which need servers", "kv_servers"),
    EnvironmentVariable("MXNET_KVSTORE_BIGARRAY_BOUND", COUNT, _R, "1000000", "elements from which on a key is spread over all servers", "kv_bigarray_bound"),
    EnvironmentVariable("BYTEPS_PARTITION_BYTES", POSITIVE, _R, "4096000", "bytes of the parts in which [`pushpull_async`](../how-to/priorities.md) sums a large array, so that a more urgent one can go between them; equal on all ranks", "kv_partition_bytes"),
    # -- elastic training -----------------------------------------------------------------------------------------
    EnvironmentVariable("HOROVOD_ELASTIC_TIMEOUT", SECONDS, _R, "600", "[elastic training](../how-to/elastic.md): how long ranks wait for each other, and for enough of them, after one was lost; and how long a rank that comes back waits to be let in", "elastic_timeout"),
    EnvironmentVariable("HVDLAB_MIN_NP", POSITIVE, _R, "1", "ranks that elastic training needs to go on; `hvdlab run --min-np` sets it", "min_np"),
    EnvironmentVariable("HVDLAB_RESET_LIMIT", COUNT, _R, "0", "how often elastic training may begin again before it gives up; 0 as often as it takes", "reset_limit"),
    EnvironmentVariable("HVDLAB_RANK_NUMBERS", choice("stable", CONSECUTIVE), Reader.BOTH, "stable", "numbers of ranks [when others come or go](elastic.md#rank-numbers): `stable` ones stay, and may have gaps; `consecutive` ones are 0 to `size() - 1`, those first that were there first. `hvdlab run --min-np` sets `consecutive`", "rank_numbers"),
    EnvironmentVariable("HVDLAB_RENDEZVOUS_DIR", FILE, _R, "-", "directory that all ranks see, for those that find each other under another's launcher ([where they look otherwise](hosts.md#how-ranks-meet))"),
    EnvironmentVariable("HOROVOD_GLOO_IFACE", TEXT, _R, "-", "interfaces of which the first that a host has carries its data, if `HVDLAB_ADDRESS` is unset ([how an address is chosen](hosts.md#addresses))"),
    EnvironmentVariable("HVDLAB_REQUIRE_ENCRYPTION", ENCRYPTION, Reader.BOTH, "0", "1 refuses ranks whose data, or whose rendezvous, would travel between hosts in the clear; networks (`10.8.0.0/24`) are those of tunnels, through which data may go ([how each item travels](security.md#how-each-item-travels))", "require_encryption"),
    EnvironmentVariable("HVDLAB_PING_AFTER", SECONDS, _C, "5", "silence after which the coordinator asks a rank for a sign of life", "ping_after"),
    EnvironmentVariable("HVDLAB_DEAD_AFTER", SECONDS, Reader.BOTH, "30", "silence after which a rank of another host counts as dead, and for such a rank the coordinator", "dead_after"),
    EnvironmentVariable("HVDLAB_REATTACH", SECONDS, Reader.BOTH, "10", "how long a coordinator's successor waits for the ranks that had lost that; they wait for it three times as long; 0 not at all", "reattach"),
    EnvironmentVariable("HVDLAB_CUT_OFF", SECONDS, _R, "300", "how long a rank of a pool, or one that trains elastically, tries to [come back](../how-to/several-hosts.md#get-over-the-loss-of-a-host) with its memory while the coordinator's host does not answer at all", "cut_off"),
    EnvironmentVariable("HVDLAB_NP", POSITIVE, _K, "-", "ranks that the [kernel](../how-to/spmd-kernel.md) *Python 3 (hvdlab)* starts; unset one for each usable core. The notebook's metadata goes first"),
    EnvironmentVariable("HVDLAB_LAUNCHER", TEXT, _K, "local", "what that kernel starts them with"),
    EnvironmentVariable("HVDLAB_HOSTS", TEXT, _K, "-", "hosts that it starts them on, as `a:4,b:4`"),
    EnvironmentVariable("HVDLAB_PRELOAD", TEXT, _P, "`torch,numpy`", "modules that the fork server imports before it forks ranks; empty for none. [TensorFlow](../how-to/tensorflow.md#in-a-notebook) is not among them by itself"),
    EnvironmentVariable("HVDLAB_ENV_EXCLUDE", TEXT, _P, "-", "variables that [do not travel](security.md#the-environment-of-ranks) to ranks on other hosts and in engines, as patterns: `AWS_*,*_SECRET`"),
    EnvironmentVariable("HVDLAB_C10D", FLAG, _P, "0", "1 makes `dist.init_process_group()`, also with `\"gloo\"`, make [groups of hvdlab's](../how-to/torch-distributed.md) in a pool and under `hvdlab run`; may be set in a cell"),
    EnvironmentVariable("HVDLAB_C10D_WATCH", TEXT, _R, "-", "how groups of [`torch.distributed`](../how-to/watched-groups.md) are supervised that have no options of their own: `agreed`, or `watched` with torch's own NCCL or Gloo inside (`watched:nccl`, `watched:gloo`); unset `watched:nccl` where each rank uses a GPU of its own, else `agreed`"),
    EnvironmentVariable("HVDLAB_AS_HOROVOD", TEXT, _P, "-", "whether `import horovod` [means hvdlab](../how-to/moving-from-horovod.md) in a pool's ranks: unset if no Horovod is installed, 0 never, 1 always"),
    # -- output ---------------------------------------------------------------------------------------------------
    EnvironmentVariable("HVDLAB_OUTPUT_SHOWN", BYTES, _P, "4194304", "characters of a cell's [output](../how-to/large-output.md) that are shown, an equal share for each rank; 0 shows all"),
    EnvironmentVariable("HVDLAB_OUTPUT_KEPT", BYTES, _P, "2147483648", "bytes of its cells' output that a pool keeps in files, for [`%hvd_output`](magics.md); 0 makes no files"),
    EnvironmentVariable("HVDLAB_OUTPUT_HOLD", SECONDS, _P, "0.25", "how long a line of a cell's [output](../how-to/large-output.md) waits for the same line of the other ranks, before it is shown without them; may be set at any time"),
    EnvironmentVariable("HVDLAB_STRIP", FLAG, _P, "1", "0 shows no [live strip](views.md#the-strip-under-a-running-cell) under cells that run in a notebook; may be set at any time"),
    # -- seeing ---------------------------------------------------------------------------------------------------
    EnvironmentVariable("HOROVOD_TIMELINE", FILE, _R, "-", "file to which rank 0 writes a [timeline](trace.md) from `hvd.init()` on", "timeline"),
    EnvironmentVariable("HOROVOD_TIMELINE_MARK_CYCLES", FLAG, _R, "0", "1 also marks each of the coordinator's decisions", "mark_cycles"),
    EnvironmentVariable("HVDLAB_RECORD", FLAG, _R, "1", "0 records no spans (and then there is nothing for a timeline) and no metrics", "record"),
    EnvironmentVariable("HVDLAB_METRICS_INTERVAL", SECONDS, _R, "1", "how often the processor time, memory and threads of a rank, and the GPUs that it uses, are [sampled](metrics.md); 0 never, less than 0.01 counts as that", "metrics_interval"),
    EnvironmentVariable("HVDLAB_HISTORY_BYTES", BYTES, _C, "67108864", "recorded spans that the coordinator keeps for views that are opened later", "history_bytes"),
    EnvironmentVariable("HOROVOD_LOG_LEVEL", LEVEL, Reader.BOTH, "warning", "the least important lines that are written to stderr, by ranks (logger `hvdlab`) and by the coordinator", "log_level"),
    EnvironmentVariable("HOROVOD_LOG_HIDE_TIME", FLAG, _R, "0", "1 leaves the time out of these lines", "log_hide_time"),
    EnvironmentVariable("HVDLAB_COORDINATOR_LOG", FILE, _C, "-", "file to which the coordinator writes what it notices"),
    # -- tuning ---------------------------------------------------------------------------------------------------
    EnvironmentVariable("HOROVOD_AUTOTUNE", FLAG, _C, "0", "1 looks for the fusion threshold, flush delay and slice size with which this application moves most bytes per second, then keeps them", "autotune"),
    EnvironmentVariable("HOROVOD_AUTOTUNE_LOG", FILE, _C, "-", "file to which each sample is written: its parameters and its score", "autotune_log"),
    EnvironmentVariable("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", COUNT, _C, "3", "samples at the beginning that do not count", "autotune_warmup_samples"),
    EnvironmentVariable("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", POSITIVE, _C, "10", "times that a sample sees the same tensor", "autotune_steps_per_sample"),
    EnvironmentVariable("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", POSITIVE, _C, "20", "samples after which the best setting is kept", "autotune_max_samples"),
    # -- accepted without effect ----------------------------------------------------------------------------------
    EnvironmentVariable("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", FRACTION, _N, "-", "settings are swept one after the other, and the best is compared with the first in turns"),
    EnvironmentVariable("HOROVOD_DYNAMIC_PROCESS_SETS", FLAG, _N, "-", "process sets may always be added and removed"),
    EnvironmentVariable("HOROVOD_NUM_NCCL_STREAMS", TEXT, _N, "-", "NCCL has one stream for each process set"),
    EnvironmentVariable("HOROVOD_BATCH_D2D_MEMCOPIES", TEXT, _N, "-", "fused tensors are not copied into a buffer on a device"),
    EnvironmentVariable("HOROVOD_ENABLE_ASYNC_COMPLETION", TEXT, _N, "-", "it concerns GPU streams"),
    EnvironmentVariable("HOROVOD_DISABLE_NVTX_RANGES", TEXT, _N, "-", "there are no NVTX ranges; see the [timeline](trace.md)"),
    EnvironmentVariable("HOROVOD_ENABLE_XLA_OPS", TEXT, _N, "-", "it concerns TensorFlow"),
    EnvironmentVariable("HOROVOD_CCL_CACHE", TEXT, _N, "-", "there is no oneCCL plane"),
    EnvironmentVariable("HOROVOD_MPI_THREADS_DISABLE", TEXT, _N, "-", "only one thread of a rank calls MPI at a time"),
    EnvironmentVariable("HOROVOD_CONTROLLER", TEXT, _N, "-", "ranks always negotiate through hvdlab's coordinator"),
    EnvironmentVariable("HOROVOD_CPU_OPERATIONS", TEXT, _N, "-", "`HVDLAB_PLANE` chooses how data moves"),
    EnvironmentVariable("HOROVOD_TORUS_ALLREDUCE", TEXT, _N, "-", "it concerns GPUs of several hosts"),
    EnvironmentVariable("HOROVOD_ADASUM_MPI_CHUNK_SIZE", TEXT, _N, "-", "Adasum moves whole tensors over the data plane"),
)  # fmt: skip


_BY_NAME = {variable.name: variable for variable in VARIABLES}


def read_variables(environ: Mapping[str, str]) -> dict[str, Value]:
    """Return the value of each variable of the table that is set, by name. An empty text counts as unset.

    Raises:
        InvalidRequestError: Some hold no value of their kind; one error names them all.
    """
    return _read(VARIABLES, environ)


def read_variable(name: str, environ: Mapping[str, str]) -> Value | None:
    """Return the value of one variable of the table; ``None`` if it is not set. An empty text counts as unset.

    Raises:
        InvalidRequestError: It holds no value of its kind.
    """
    return _read((_BY_NAME[name],), environ).get(name)


def _read(variables: Iterable[EnvironmentVariable], environ: Mapping[str, str]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    wrong = []
    for variable in variables:
        text = environ.get(variable.name, "").strip()
        if not text:
            continue
        try:
            values[variable.name] = variable.kind.parse(text)
        except ValueError:
            why = variable.kind.absent.get(text.lower())
            reason = f"{why}; " if why else ""
            wrong.append(f"{variable.name}={text!r}: {reason}{variable.kind.expected} was expected")
    if wrong:
        raise InvalidRequestError("; ".join(wrong) + ".")
    return values


def for_reader(reader: Reader, environ: Mapping[str, str]) -> dict[str, Value]:
    """Return the values that ``reader`` reads, by field; of two variables for one field the first in the table wins.

    Raises:
        InvalidRequestError: A variable of the table, this reader's or not, holds no value of its kind.
    """
    values = read_variables(environ)
    fields: dict[str, Value] = {}
    for variable in VARIABLES:
        if variable.reader in (reader, Reader.BOTH) and variable.field and variable.name in values:
            fields.setdefault(variable.field, values[variable.name])
    return fields
