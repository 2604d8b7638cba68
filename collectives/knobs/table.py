"""The table. ``docs/reference/settings.md`` shows it; a test compares the two."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hvdlab.collectives.knobs.kinds import (
    BYTES,
    CORES,
    COUNT,
    ENCRYPTION,
    FILE,
    FLAG,
    FRACTION,
    LEVEL,
    MILLISECONDS,
    MODULES,
    POSITIVE,
    SECONDS,
    TEXT,
    Kind,
    choice,
)

PLANES = ("auto", "shm", "gloo", "mpi", "hierarchical", "local")
ABSENT_PLANES = {
    "nccl": "NCCL moves CUDA tensors only, beside a plane for the others, and needs no setting where each rank has a GPU of its own"
}
"""Planes that one may expect, and why they are not there."""
CUDA_PLANES = ("auto", "ipc", "nccl")


class Reader(StrEnum):
    """Which process reads a variable."""

    COORDINATOR = "coordinator"
    """The process that starts the coordinator (a pool, ``hvdlab run``, rank 0 under another launcher), which passes it on."""
    RANK = "rank"
    """Each rank, in ``hvd.init()``."""
    BOTH = "coordinator and ranks"
    POOL = "pool"
    """A pool, when it starts its ranks."""
    KERNEL = "kernel"
    """The kernel whose cells run on ranks, for the pool that it starts."""
    NOBODY = "nobody"
    """No process reads it: it is accepted, so that scripts and configurations go on to work, and changes nothing."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A variable.

    Attributes:
        variable: Its name.
        kind: What it may hold.
        reader: Which process reads it.
        default: What holds when it is unset, in the words of the documentation.
        meaning: What it does; for a variable that no process reads, why.
        field: The field of ``CoordinatorLaunch`` or ``Settings`` that it sets, or empty.
    """

    variable: str
    kind: Kind
    reader: Reader
    default: str
    meaning: str
    field: str = ""


_C, _R, _P, _K, _N = Reader.COORDINATOR, Reader.RANK, Reader.POOL, Reader.KERNEL, Reader.NOBODY

KNOBS: tuple[Knob, ...] = (
    # -- fusing and holding ---------------------------------------------------------------------------------------
    Knob("HOROVOD_FUSION_THRESHOLD", BYTES, _C, "67108864", "bytes of tensors that are fused into one operation at most; 0 fuses nothing", "fusion_threshold"),
    Knob("HOROVOD_CYCLE_TIME", MILLISECONDS, _C, "0", "flush delay: how long what is ready is held for more to fuse with it (small collectives that a rank waits for may go [another way](../design/overview.md#the-direct-way)); 0 executes at once, which is quickest unless an application submits very many tensors slowly", "flush_delay"),
    Knob("HOROVOD_DISABLE_GROUP_FUSION", FLAG, _C, "0", "1 fuses the tensors of a `grouped_*` call with each other only", "separate_groups"),
    Knob("HOROVOD_CACHE_CAPACITY", COUNT, _R, "4096", "tensors (name, shape, type, operation, call site) that ranks and coordinator remember, so that they are announced by number; the longest unused makes room", "cache_capacity"),
    Knob("HVDLAB_SCHEDULING_CREDIT", BYTES, _C, "4194304", "bytes of tensors [with a priority](../how-to/kvstore.md#priorities) that ranks execute at a time, before the coordinator chooses the most urgent of the others; 0 chooses none, but executes in the order of becoming ready", "scheduling_credit"),
    # -- stalls ---------------------------------------------------------------------------------------------------
    Knob("HOROVOD_STALL_CHECK_DISABLE", FLAG, _C, "0", "1 neither reports nor ends collectives that wait for ranks", "stall_disable"),
    Knob("HOROVOD_STALL_CHECK_TIME_SECONDS", SECONDS, _C, "10", "after how long, and how often, a collective that waits for ranks is reported; 0 never", "stall_seconds"),
    Knob("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", SECONDS, _C, "0", "after how long it fails on the ranks that wait, with an error that names the missing ones; 0 never", "stall_shutdown"),
    # -- planes ---------------------------------------------------------------------------------------------------
    Knob("HVDLAB_PLANE", choice(*PLANES, absent=ABSENT_PLANES), _R, "auto", "data plane ([how they differ](../how-to/planes-and-launchers.md)); `--plane` of `%%hvd_run` sets it for a pool", "plane"),
    Knob("HVDLAB_CUDA", FLAG, _R, "-", "0 copies CUDA tensors through the host; otherwise collectives [work on them where they are](../how-to/gpus.md) if all ranks of a process set can"),
    Knob("HVDLAB_CUDA_PLANE", choice(*CUDA_PLANES), _R, "auto", "the plane that this rank offers for CUDA tensors: [`ipc`](../design/planes.md#cudaipc), for ranks of one host, or [`nccl`](../design/planes.md#cudanccl), for ranks with a GPU each; `auto` offers both, and `nccl` is chosen where no two ranks share a GPU, else `ipc`"),
    Knob("HVDLAB_DIRECT", FLAG, _R, "1", "0 has the coordinator order also the small collectives that a rank waits for, on which ranks of one host agree [in shared memory](../design/overview.md#the-direct-way) otherwise; set it on all ranks alike", "direct"),
    Knob("HVDLAB_HOST", TEXT, _R, "-", "name that ranks have in common which share memory, if it can't be found out, as between containers ([what it is for](../how-to/planes-and-launchers.md#several-hosts))"),
    Knob("HOROVOD_HIERARCHICAL_ALLREDUCE", FLAG, _C, "-", "ranks on several hosts: 1 reduces within each host first, 0 does not; unset chooses", "hierarchical_allreduce"),
    Knob("HOROVOD_HIERARCHICAL_ALLGATHER", FLAG, _C, "-", "the same for allgather", "hierarchical_allgather"),
    Knob("HOROVOD_THREAD_AFFINITY", CORES, _R, "-", "cores that the threads of hvdlab are bound to: the n-th number is for the rank with local rank n", "thread_affinity"),
    # -- starting -------------------------------------------------------------------------------------------------
    Knob("HVDLAB_START_TIMEOUT", SECONDS, _R, "60", "how long `hvd.init()` waits for all ranks", "start_timeout"),
    Knob("HOROVOD_GLOO_TIMEOUT_SECONDS", SECONDS, _R, "60", "the same, if `HVDLAB_START_TIMEOUT` is unset", "start_timeout"),
    # -- key-value stores -----------------------------------------------------------------------------------------
    Knob("HVDLAB_KV_OPTIMIZERS", MODULES, _R, "-", "modules, with commas between them, that parameter servers import, so that they have the [optimizers of your own](../how-to/kvstore.md#optimizers-of-your-own-on-servers) which these register", "kv_optimizers"),
    Knob("HVDLAB_KV_SERVERS", POSITIVE, _R, "1", "processes on each host that keep the values of [key-value stores](../how-to/kvstore.md#servers) which need servers", "kv_servers"),
    Knob("MXNET_KVSTORE_BIGARRAY_BOUND", COUNT, _R, "1000000", "elements from which on a key is spread over all servers", "kv_bigarray_bound"),
    Knob("BYTEPS_PARTITION_BYTES", POSITIVE, _R, "4096000", "bytes of the parts in which [`pushpull_async`](../how-to/kvstore.md#priorities) sums a large array, so that a more urgent one can go between them; equal on all ranks", "kv_partition_bytes"),
    # -- elastic training -----------------------------------------------------------------------------------------
    Knob("HOROVOD_ELASTIC_TIMEOUT", SECONDS, _R, "600", "[elastic training](../how-to/elastic.md): how long ranks wait for each other, and for enough of them, after one was lost; and how long a rank that comes back waits to be let in", "elastic_timeout"),
    Knob("HVDLAB_MIN_NP", POSITIVE, _R, "1", "ranks that elastic training needs to go on; `hvdlab run --min-np` sets it", "min_np"),
    Knob("HVDLAB_RESET_LIMIT", COUNT, _R, "0", "how often elastic training may begin again before it gives up; 0 as often as it takes", "reset_limit"),
    Knob("HVDLAB_RANK_NUMBERS", choice("stable", "consecutive"), Reader.BOTH, "stable", "numbers of ranks [when others come or go](../how-to/elastic.md#rank-numbers): `stable` ones stay, and may have gaps; `consecutive` ones are 0 to `size() - 1`, those first that were there first. `hvdlab run --min-np` sets `consecutive`", "rank_numbers"),
    Knob("HVDLAB_RENDEZVOUS_DIR", FILE, _R, "-", "directory that all ranks see, for those that find each other under another's launcher ([where they look otherwise](../how-to/several-hosts.md))"),
    Knob("HOROVOD_GLOO_IFACE", TEXT, _R, "-", "interfaces of which the first that a host has carries its data, if `HVDLAB_ADDRESS` is unset ([how an address is chosen](../how-to/several-hosts.md))"),
    Knob("HVDLAB_REQUIRE_ENCRYPTION", ENCRYPTION, Reader.BOTH, "0", "1 refuses ranks whose data, or whose rendezvous, would travel between hosts in the clear; networks (`10.8.0.0/24`) are those of tunnels, through which data may go ([what travels how](../how-to/several-hosts.md#what-travels-how))", "require_encryption"),
    Knob("HVDLAB_PING_AFTER", SECONDS, _C, "5", "silence after which the coordinator asks a rank for a sign of life", "ping_after"),
    Knob("HVDLAB_DEAD_AFTER", SECONDS, Reader.BOTH, "30", "silence after which a rank of another host counts as dead, and for such a rank the coordinator", "dead_after"),
    Knob("HVDLAB_REATTACH", SECONDS, Reader.BOTH, "10", "how long a coordinator's successor waits for the ranks that had lost that; they wait for it three times as long; 0 not at all", "reattach"),
    Knob("HVDLAB_CUT_OFF", SECONDS, _R, "300", "how long a rank of a pool, or one that trains elastically, tries to [come back](../how-to/several-hosts.md#when-a-host-is-lost) with its memory while the coordinator's host does not answer at all", "cut_off"),
    Knob("HVDLAB_NP", POSITIVE, _K, "-", "ranks that the [kernel](../how-to/spmd-kernel.md) *Python 3 (hvdlab)* starts; unset one for each usable core. The notebook's metadata goes first"),
    Knob("HVDLAB_LAUNCHER", TEXT, _K, "local", "what that kernel starts them with"),
    Knob("HVDLAB_HOSTS", TEXT, _K, "-", "hosts that it starts them on, as `a:4,b:4`"),
    Knob("HVDLAB_PRELOAD", TEXT, _P, "`torch,numpy`", "modules that the fork server imports before it forks ranks; empty for none. [TensorFlow](../how-to/tensorflow.md#in-a-notebook) is not among them by itself"),
    Knob("HVDLAB_ENV_EXCLUDE", TEXT, _P, "-", "variables that [do not travel](../how-to/several-hosts.md#the-environment-of-ranks) to ranks on other hosts and in engines, as patterns: `AWS_*,*_SECRET`"),
    Knob("HVDLAB_C10D", FLAG, _P, "0", "1 makes `dist.init_process_group()`, also with `\"gloo\"`, make [groups of hvdlab's](../how-to/torch-distributed.md) in a pool and under `hvdlab run`; may be set in a cell"),
    Knob("HVDLAB_C10D_WATCH", TEXT, _R, "-", "how groups of [`torch.distributed`](../how-to/torch-distributed.md#watched-and-agreed-groups) are supervised that have no options of their own: `agreed`, or `watched` with torch's own NCCL or Gloo inside (`watched:nccl`, `watched:gloo`); unset `watched:nccl` where torch sees a GPU, else `agreed`"),
    Knob("HVDLAB_AS_HOROVOD", TEXT, _P, "-", "whether `import horovod` [means hvdlab](../how-to/moving-from-horovod.md) in a pool's ranks: unset if no Horovod is installed, 0 never, 1 always"),
    # -- output ---------------------------------------------------------------------------------------------------
    Knob("HVDLAB_OUTPUT_SHOWN", BYTES, _P, "4194304", "characters of a cell's [output](../how-to/large-output.md) that are shown, an equal share for each rank; 0 shows all"),
    Knob("HVDLAB_OUTPUT_KEPT", BYTES, _P, "2147483648", "bytes of its cells' output that a pool keeps in files, for [`%hvd_output`](magics.md); 0 makes no files"),
    Knob("HVDLAB_OUTPUT_HOLD", SECONDS, _P, "0.25", "how long a line of a cell's [output](../how-to/large-output.md) waits for the same line of the other ranks, before it is shown without them; may be set at any time"),
    Knob("HVDLAB_STRIP", FLAG, _P, "1", "0 shows no [live strip](../how-to/watch.md#the-strip-under-a-running-cell) under cells that run in a notebook; may be set at any time"),
    # -- seeing ---------------------------------------------------------------------------------------------------
    Knob("HOROVOD_TIMELINE", FILE, _R, "-", "file to which rank 0 writes a [timeline](trace.md) from `hvd.init()` on", "timeline"),
    Knob("HOROVOD_TIMELINE_MARK_CYCLES", FLAG, _R, "0", "1 also marks each of the coordinator's decisions", "mark_cycles"),
    Knob("HVDLAB_RECORD", FLAG, _R, "1", "0 records no spans (and then there is nothing for a timeline) and no metrics", "record"),
    Knob("HVDLAB_METRICS_INTERVAL", SECONDS, _R, "1", "how often the processor time, memory and threads of a rank, and the GPUs that it uses, are [sampled](metrics.md); 0 never, less than 0.01 counts as that", "metrics_interval"),
    Knob("HVDLAB_HISTORY_BYTES", BYTES, _C, "67108864", "recorded spans that the coordinator keeps for views that are opened later", "history_bytes"),
    Knob("HOROVOD_LOG_LEVEL", LEVEL, Reader.BOTH, "warning", "the least important lines that are written to stderr, by ranks (logger `hvdlab`) and by the coordinator", "log_level"),
    Knob("HOROVOD_LOG_HIDE_TIME", FLAG, _R, "0", "1 leaves the time out of these lines", "log_hide_time"),
    Knob("HVDLAB_COORDINATOR_LOG", FILE, _C, "-", "file to which the coordinator writes what it notices"),
    # -- tuning ---------------------------------------------------------------------------------------------------
    Knob("HOROVOD_AUTOTUNE", FLAG, _C, "0", "1 looks for the fusion threshold, flush delay and slice size with which this application moves most bytes per second, then keeps them", "autotune"),
    Knob("HOROVOD_AUTOTUNE_LOG", FILE, _C, "-", "file to which each sample is written: its parameters and its score", "autotune_log"),
    Knob("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", COUNT, _C, "3", "samples at the beginning that do not count", "autotune_warmup_samples"),
    Knob("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", POSITIVE, _C, "10", "times that a sample sees the same tensor", "autotune_steps_per_sample"),
    Knob("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", POSITIVE, _C, "20", "samples after which the best setting is kept", "autotune_max_samples"),
    # -- accepted without effect ----------------------------------------------------------------------------------
    Knob("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", FRACTION, _N, "-", "settings are swept one after the other, and the best is compared with the first in turns"),
    Knob("HOROVOD_DYNAMIC_PROCESS_SETS", FLAG, _N, "-", "process sets may always be added and removed"),
    Knob("HOROVOD_NUM_NCCL_STREAMS", TEXT, _N, "-", "NCCL has one stream for each process set"),
    Knob("HOROVOD_BATCH_D2D_MEMCOPIES", TEXT, _N, "-", "fused tensors are not copied into a buffer on a device"),
    Knob("HOROVOD_ENABLE_ASYNC_COMPLETION", TEXT, _N, "-", "it concerns GPU streams"),
    Knob("HOROVOD_DISABLE_NVTX_RANGES", TEXT, _N, "-", "there are no NVTX ranges; see the [timeline](trace.md)"),
    Knob("HOROVOD_ENABLE_XLA_OPS", TEXT, _N, "-", "it concerns TensorFlow"),
    Knob("HOROVOD_CCL_CACHE", TEXT, _N, "-", "there is no oneCCL plane"),
    Knob("HOROVOD_MPI_THREADS_DISABLE", TEXT, _N, "-", "only one thread of a rank calls MPI at a time"),
    Knob("HOROVOD_CONTROLLER", TEXT, _N, "-", "ranks always negotiate through hvdlab's coordinator"),
    Knob("HOROVOD_CPU_OPERATIONS", TEXT, _N, "-", "`HVDLAB_PLANE` chooses how data moves"),
    Knob("HOROVOD_TORUS_ALLREDUCE", TEXT, _N, "-", "it concerns GPUs of several hosts"),
    Knob("HOROVOD_ADASUM_MPI_CHUNK_SIZE", TEXT, _N, "-", "Adasum moves whole tensors over the data plane"),
)  # fmt: skip
