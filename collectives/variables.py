"""Table of the environment variables that users set: kind of value, process that reads it, meaning; and their reading.

``docs/reference/settings_table.py`` writes the table into ``docs/reference/settings.md``.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hvdlab.collectives.errors import InvalidRequestError

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
    EnvironmentVariable("HVDLAB_SCHEDULING_CREDIT", BYTES, _C, "4194304", "bytes of tensors [with a priority](../how-to/kvstore.md#priorities) that ranks execute at a time, before the coordinator chooses the most urgent of the others; 0 chooses none, but executes in the order of becoming ready", "scheduling_credit"),
    # -- stalls ---------------------------------------------------------------------------------------------------
    EnvironmentVariable("HOROVOD_STALL_CHECK_DISABLE", FLAG, _C, "0", "1 neither reports nor ends collectives that wait for ranks", "stall_disable"),
    EnvironmentVariable("HOROVOD_STALL_CHECK_TIME_SECONDS", SECONDS, _C, "10", "after how long, and how often, a collective that waits for ranks is reported; 0 never", "stall_seconds"),
    EnvironmentVariable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", SECONDS, _C, "0", "after how long it fails on the ranks that wait, with an error that names the missing ones; 0 never", "stall_shutdown"),
    # -- planes ---------------------------------------------------------------------------------------------------
    EnvironmentVariable("HVDLAB_PLANE", choice(*PLANES, absent=ABSENT_PLANES), _R, "auto", "data plane ([how they differ](../how-to/planes-and-launchers.md)); `--plane` of `%%hvd_run` sets it for a pool", "plane"),
    EnvironmentVariable("HVDLAB_CUDA", FLAG, _R, "-", "0 copies CUDA tensors through the host; otherwise collectives [work on them where they are](../how-to/gpus.md) if all ranks of a process set can"),
    EnvironmentVariable("HVDLAB_CUDA_PLANE", choice(*CUDA_PLANES), _R, "auto", "the plane that this rank offers for CUDA tensors: [`ipc`](../design/planes.md#cudaipc), for ranks of one host, or [`nccl`](../design/planes.md#cudanccl), for ranks with a GPU each; `auto` offers both, and `nccl` is chosen where no two ranks share a GPU, else `ipc`"),
    EnvironmentVariable("HVDLAB_DIRECT", FLAG, _R, "1", "0 has the coordinator order also the small collectives that a rank waits for, on which ranks of one host agree [in shared memory](../design/overview.md#the-direct-way) otherwise; set it on all ranks alike", "direct"),
    EnvironmentVariable("HVDLAB_HOST", TEXT, _R, "-", "name that ranks have in common which share memory, if it can't be found out, as between containers ([what it is for](../how-to/planes-and-launchers.md#several-hosts))"),
    EnvironmentVariable("HOROVOD_HIERARCHICAL_ALLREDUCE", FLAG, _C, "-", "ranks on several hosts: 1 reduces within each host first, 0 does not; unset chooses", "hierarchical_allreduce"),
    EnvironmentVariable("HOROVOD_HIERARCHICAL_ALLGATHER", FLAG, _C, "-", "the same for allgather", "hierarchical_allgather"),
    EnvironmentVariable("HOROVOD_THREAD_AFFINITY", CORES, _R, "-", "cores that the threads of hvdlab are bound to: the n-th number is for the rank with local rank n", "thread_affinity"),
    # -- starting -------------------------------------------------------------------------------------------------
    EnvironmentVariable("HVDLAB_START_TIMEOUT", SECONDS, _R, "60", "how long `hvd.init()` waits for all ranks", "start_timeout"),
    EnvironmentVariable("HOROVOD_GLOO_TIMEOUT_SECONDS", SECONDS, _R, "60", "the same, if `HVDLAB_START_TIMEOUT` is unset", "start_timeout"),
    # -- key-value stores -----------------------------------------------------------------------------------------
    EnvironmentVariable("HVDLAB_KV_OPTIMIZERS", MODULES, _R, "-", "modules, with commas between them, that parameter servers import, so that they have the [optimizers of your own](../how-to/kvstore.md#optimizers-of-your-own-on-servers) which these register", "kv_optimizers"),
    EnvironmentVariable("HVDLAB_KV_SERVERS", POSITIVE, _R, "1", "processes on each host that keep the values of [key-value stores](../how-to/kvstore.md#servers) which need servers", "kv_servers"),
    EnvironmentVariable("MXNET_KVSTORE_BIGARRAY_BOUND", COUNT, _R, "1000000", "elements from which on a key is spread over all servers", "kv_bigarray_bound"),
    EnvironmentVariable("BYTEPS_PARTITION_BYTES", POSITIVE, _R, "4096000", "bytes of the parts in which [`pushpull_async`](../how-to/kvstore.md#priorities) sums a large array, so that a more urgent one can go between them; equal on all ranks", "kv_partition_bytes"),
    # -- elastic training -----------------------------------------------------------------------------------------
    EnvironmentVariable("HOROVOD_ELASTIC_TIMEOUT", SECONDS, _R, "600", "[elastic training](../how-to/elastic.md): how long ranks wait for each other, and for enough of them, after one was lost; and how long a rank that comes back waits to be let in", "elastic_timeout"),
    EnvironmentVariable("HVDLAB_MIN_NP", POSITIVE, _R, "1", "ranks that elastic training needs to go on; `hvdlab run --min-np` sets it", "min_np"),
    EnvironmentVariable("HVDLAB_RESET_LIMIT", COUNT, _R, "0", "how often elastic training may begin again before it gives up; 0 as often as it takes", "reset_limit"),
    EnvironmentVariable("HVDLAB_RANK_NUMBERS", choice("stable", CONSECUTIVE), Reader.BOTH, "stable", "numbers of ranks [when others come or go](../how-to/elastic.md#rank-numbers): `stable` ones stay, and may have gaps; `consecutive` ones are 0 to `size() - 1`, those first that were there first. `hvdlab run --min-np` sets `consecutive`", "rank_numbers"),
    EnvironmentVariable("HVDLAB_RENDEZVOUS_DIR", FILE, _R, "-", "directory that all ranks see, for those that find each other under another's launcher ([where they look otherwise](../how-to/several-hosts.md))"),
    EnvironmentVariable("HOROVOD_GLOO_IFACE", TEXT, _R, "-", "interfaces of which the first that a host has carries its data, if `HVDLAB_ADDRESS` is unset ([how an address is chosen](../how-to/several-hosts.md))"),
    EnvironmentVariable("HVDLAB_REQUIRE_ENCRYPTION", ENCRYPTION, Reader.BOTH, "0", "1 refuses ranks whose data, or whose rendezvous, would travel between hosts in the clear; networks (`10.8.0.0/24`) are those of tunnels, through which data may go ([what travels how](../how-to/several-hosts.md#what-travels-how))", "require_encryption"),
    EnvironmentVariable("HVDLAB_PING_AFTER", SECONDS, _C, "5", "silence after which the coordinator asks a rank for a sign of life", "ping_after"),
    EnvironmentVariable("HVDLAB_DEAD_AFTER", SECONDS, Reader.BOTH, "30", "silence after which a rank of another host counts as dead, and for such a rank the coordinator", "dead_after"),
    EnvironmentVariable("HVDLAB_REATTACH", SECONDS, Reader.BOTH, "10", "how long a coordinator's successor waits for the ranks that had lost that; they wait for it three times as long; 0 not at all", "reattach"),
    EnvironmentVariable("HVDLAB_CUT_OFF", SECONDS, _R, "300", "how long a rank of a pool, or one that trains elastically, tries to [come back](../how-to/several-hosts.md#when-a-host-is-lost) with its memory while the coordinator's host does not answer at all", "cut_off"),
    EnvironmentVariable("HVDLAB_NP", POSITIVE, _K, "-", "ranks that the [kernel](../how-to/spmd-kernel.md) *Python 3 (hvdlab)* starts; unset one for each usable core. The notebook's metadata goes first"),
    EnvironmentVariable("HVDLAB_LAUNCHER", TEXT, _K, "local", "what that kernel starts them with"),
    EnvironmentVariable("HVDLAB_HOSTS", TEXT, _K, "-", "hosts that it starts them on, as `a:4,b:4`"),
    EnvironmentVariable("HVDLAB_PRELOAD", TEXT, _P, "`torch,numpy`", "modules that the fork server imports before it forks ranks; empty for none. [TensorFlow](../how-to/tensorflow.md#in-a-notebook) is not among them by itself"),
    EnvironmentVariable("HVDLAB_ENV_EXCLUDE", TEXT, _P, "-", "variables that [do not travel](../how-to/several-hosts.md#the-environment-of-ranks) to ranks on other hosts and in engines, as patterns: `AWS_*,*_SECRET`"),
    EnvironmentVariable("HVDLAB_C10D", FLAG, _P, "0", "1 makes `dist.init_process_group()`, also with `\"gloo\"`, make [groups of hvdlab's](../how-to/torch-distributed.md) in a pool and under `hvdlab run`; may be set in a cell"),
    EnvironmentVariable("HVDLAB_C10D_WATCH", TEXT, _R, "-", "how groups of [`torch.distributed`](../how-to/torch-distributed.md#watched-and-agreed-groups) are supervised that have no options of their own: `agreed`, or `watched` with torch's own NCCL or Gloo inside (`watched:nccl`, `watched:gloo`); unset `watched:nccl` where each rank uses a GPU of its own, else `agreed`"),
    EnvironmentVariable("HVDLAB_AS_HOROVOD", TEXT, _P, "-", "whether `import horovod` [means hvdlab](../how-to/moving-from-horovod.md) in a pool's ranks: unset if no Horovod is installed, 0 never, 1 always"),
    # -- output ---------------------------------------------------------------------------------------------------
    EnvironmentVariable("HVDLAB_OUTPUT_SHOWN", BYTES, _P, "4194304", "characters of a cell's [output](../how-to/large-output.md) that are shown, an equal share for each rank; 0 shows all"),
    EnvironmentVariable("HVDLAB_OUTPUT_KEPT", BYTES, _P, "2147483648", "bytes of its cells' output that a pool keeps in files, for [`%hvd_output`](magics.md); 0 makes no files"),
    EnvironmentVariable("HVDLAB_OUTPUT_HOLD", SECONDS, _P, "0.25", "how long a line of a cell's [output](../how-to/large-output.md) waits for the same line of the other ranks, before it is shown without them; may be set at any time"),
    EnvironmentVariable("HVDLAB_STRIP", FLAG, _P, "1", "0 shows no [live strip](../how-to/watch.md#the-strip-under-a-running-cell) under cells that run in a notebook; may be set at any time"),
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


def read_variables(environ: Mapping[str, str]) -> dict[str, Value]:
    """Return the value of each variable of the table that is set, by name. An empty text counts as unset.

    Raises:
        InvalidRequestError: Some hold no value of their kind; one error names them all.
    """
    values: dict[str, Value] = {}
    wrong = []
    for variable in VARIABLES:
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
