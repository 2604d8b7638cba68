"""Every flag of ``hvdlab run``, declared once.

The parser, the reader of configuration files, the ranks' environment and ``docs/reference/command-line.md`` are all
made from this table. It has each flag of ``horovodrun``, and some of our own.
``python -m hvdlab.runner.flags docs/reference/command-line.md`` writes the page.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hvdlab.collectives.settings import VARIABLES, Reader

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
MEBIBYTE = 1 << 20
"""Bytes; some flags give sizes in this unit, as horovodrun does."""


class FlagKind(StrEnum):
    """Kind of a flag's value."""

    TEXT = "text"
    NUMBER = "number"
    REAL = "real number"
    SWITCH = "nothing"
    LEVEL = "level"
    TWO = "two numbers"
    TEXTS = "text, or several"


@dataclass(frozen=True, slots=True)
class Flag:
    """Flag of ``hvdlab run``.

    Attributes:
        group: Heading that it stands under.
        names: Its spellings on the command line; texts use the last one.
        dest: Name of its value.
        kind: Kind of its value.
        meaning: Its effect.
        off: For a switch: the flags that turn it off.
        variable: The variable that it sets for the ranks and the coordinator, or that stands in for it.
        config: Its place in a configuration file, ``section.key``.
        scale: Factor of a number for the variable.
        inverted: Whether the variable is the opposite of the switch.
        idle: Why it has no effect, or empty.
    """

    group: str
    names: tuple[str, ...]
    dest: str
    kind: FlagKind
    meaning: str
    off: tuple[str, ...] = ()
    variable: str = ""
    config: str = ""
    scale: int = 1
    inverted: bool = False
    idle: str = ""

    @property
    def name(self) -> str:
        return self.names[-1]

    @property
    def ineffective(self) -> str:
        """Return why it has no effect here, or an empty text."""
        return self.idle or _IDLE_VARIABLES.get(self.variable, "")

    def value_of_variable(self, value: object) -> str:
        """Return the variable's text for a value of this flag."""
        if self.kind is FlagKind.SWITCH:
            return "1" if bool(value) != self.inverted else "0"
        if self.kind is FlagKind.NUMBER and self.scale != 1 and isinstance(value, int):
            return str(value * self.scale)
        return str(value)


_IDLE_VARIABLES = {each.name: each.meaning for each in VARIABLES if each.reader is Reader.NONE}

JOB, HOSTS, TUNING, AUTOTUNE, ELASTIC = "Job", "Hosts", "Tuning", "Autotuning", "Elastic jobs"
SEEING, LIBRARY, CONTROLLER = "Seeing what happens", "Libraries", "Who starts the ranks"

FLAGS: tuple[Flag, ...] = (
    # -- job ----------------------------------------------------------------------------------------------------------
    Flag(JOB, ("-v", "--version"), "version", FlagKind.SWITCH, "print the version and leave"),
    Flag(JOB, ("-cb", "--check-build"), "check_build", FlagKind.SWITCH, "print what this installation can do, and what it can't and why"),
    Flag(JOB, ("-np", "--num-proc"), "num_proc", FlagKind.NUMBER, "number of ranks; without it one on each slot of the hosts, if these are given", config="num-proc"),
    Flag(JOB, ("--as-horovod",), "as_horovod", FlagKind.SWITCH, "let `import horovod` mean hvdlab in the ranks, also if Horovod is installed", config="as-horovod"),
    Flag(JOB, ("--plane",), "plane", FlagKind.TEXT, "data plane: `auto`, `shm`, `gloo`, `mpi`, `hierarchical`", variable="HVDLAB_PLANE", config="plane"),
    Flag(JOB, ("--config-file",), "config_file", FlagKind.TEXT, "YAML file with values for these flags; the command line wins over it, and it over the environment"),
    Flag(JOB, ("--output-filename",), "output_filename", FlagKind.TEXT, "directory: what rank N writes goes to `DIR/rank.N/stdout` and `stderr` instead of the terminal", config="output-filename"),
    Flag(JOB, ("-prefix-timestamp", "--prefix-output-with-timestamp"), "prefix_output_with_timestamp", FlagKind.SWITCH, "put the time in front of each line of the ranks", config="prefix-output-with-timestamp"),
    Flag(JOB, ("--verbose",), "verbose", FlagKind.SWITCH, "say how the ranks are started", config="verbose"),
    Flag(JOB, ("--preload",), "preload", FlagKind.TEXT, "modules, with commas between them, that each host imports once before it forks ranks: a Python program's ranks then start without these imports, also those that join or are started anew", config="preload"),
    Flag(JOB, ("--start-timeout",), "start_timeout", FlagKind.NUMBER, "seconds within which all ranks must be started (30, and 300 with `--preload`, whose imports are part of it), and all must come to `hvd.init()` once one has (60)", variable="HOROVOD_START_TIMEOUT", config="start-timeout"),
    Flag(JOB, ("--disable-cache",), "disable_cache", FlagKind.SWITCH, "do not keep what was found out about hosts", idle="nothing is kept: hosts are asked each time"),
    # -- hosts --------------------------------------------------------------------------------------------------------
    Flag(HOSTS, ("-H", "--hosts"), "hosts", FlagKind.TEXT, "hosts and their slots: `a:2,b:2`", config="hosts"),
    Flag(HOSTS, ("-hostfile", "--hostfile"), "hostfile", FlagKind.TEXT, "file with a host per line: `a slots=2`, Open MPI's and MPICH's files too", config="hostfile"),
    Flag(HOSTS, ("-p", "--ssh-port"), "ssh_port", FlagKind.NUMBER, "port of ssh on the hosts", config="ssh-port"),
    Flag(HOSTS, ("-i", "--ssh-identity-file"), "ssh_identity_file", FlagKind.TEXT, "key that ssh uses", config="ssh-identity-file"),
    Flag(HOSTS, ("--ssh",), "ssh", FlagKind.TEXT, "command that runs a command on another host; the host and the command line are appended", variable="HVDLAB_SSH", config="ssh"),
    Flag(HOSTS, ("--network-interface", "--network-interfaces"), "network_interfaces", FlagKind.TEXT, "interfaces whose addresses are used between hosts, with commas between them", config="network-interfaces"),
    # -- tuning -------------------------------------------------------------------------------------------------------
    Flag(TUNING, ("--fusion-threshold-mb",), "fusion_threshold_mb", FlagKind.NUMBER, "MiB of tensors that are fused into one operation at most; 0 fuses nothing", variable="HOROVOD_FUSION_THRESHOLD", config="params.fusion-threshold-mb", scale=MEBIBYTE),
    Flag(TUNING, ("--cycle-time-ms",), "cycle_time_ms", FlagKind.REAL, "how long what is ready is held for more to fuse with it", variable="HOROVOD_CYCLE_TIME", config="params.cycle-time-ms"),
    Flag(TUNING, ("--cache-capacity",), "cache_capacity", FlagKind.NUMBER, "tensors that are remembered, so that they are announced by number", variable="HOROVOD_CACHE_CAPACITY", config="params.cache-capacity"),
    Flag(TUNING, ("--hierarchical-allreduce",), "hierarchical_allreduce", FlagKind.SWITCH, "reduce within each host first", off=("--no-hierarchical-allreduce",), variable="HOROVOD_HIERARCHICAL_ALLREDUCE", config="params.hierarchical-allreduce"),
    Flag(TUNING, ("--hierarchical-allgather",), "hierarchical_allgather", FlagKind.SWITCH, "gather within each host first", off=("--no-hierarchical-allgather",), variable="HOROVOD_HIERARCHICAL_ALLGATHER", config="params.hierarchical-allgather"),
    Flag(TUNING, ("--torus-allreduce",), "torus_allreduce", FlagKind.SWITCH, "reduce in rows, then in columns", off=("--no-torus-allreduce",), variable="HOROVOD_TORUS_ALLREDUCE", config="params.torus-allreduce"),
    # -- autotuning ---------------------------------------------------------------------------------------------------
    Flag(AUTOTUNE, ("--autotune",), "autotune", FlagKind.SWITCH, "look for the settings with which most bytes per second are moved", off=("--no-autotune",), variable="HOROVOD_AUTOTUNE", config="autotune.enabled"),
    Flag(AUTOTUNE, ("--autotune-log-file",), "autotune_log_file", FlagKind.TEXT, "file to which each sample is written", variable="HOROVOD_AUTOTUNE_LOG", config="autotune.log-file"),
    Flag(AUTOTUNE, ("--autotune-warmup-samples",), "autotune_warmup_samples", FlagKind.NUMBER, "samples at the beginning that do not count", variable="HOROVOD_AUTOTUNE_WARMUP_SAMPLES", config="autotune.warmup-samples"),
    Flag(AUTOTUNE, ("--autotune-steps-per-sample",), "autotune_steps_per_sample", FlagKind.NUMBER, "steps that a sample lasts", variable="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", config="autotune.steps-per-sample"),
    Flag(AUTOTUNE, ("--autotune-bayes-opt-max-samples",), "autotune_bayes_opt_max_samples", FlagKind.NUMBER, "samples after which the best setting is kept", variable="HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", config="autotune.bayes-opt-max-samples"),
    Flag(AUTOTUNE, ("--autotune-gaussian-process-noise",), "autotune_gaussian_process_noise", FlagKind.REAL, "noise of the model that Horovod fits", variable="HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", config="autotune.gaussian-process-noise"),
    # -- elastic ------------------------------------------------------------------------------------------------------
    Flag(ELASTIC, ("--min-np", "--min-num-proc"), "min_num_proc", FlagKind.NUMBER, "makes the job elastic: a lost rank is started anew under its number while the others live on, and the job fails when fewer than this live; where hosts are found while it runs, it waits for some (--elastic-timeout)", config="elastic.min-num-proc"),
    Flag(ELASTIC, ("--max-np", "--max-num-proc"), "max_num_proc", FlagKind.NUMBER, "most ranks of an elastic job: with --host-discovery-script, or hosts with more slots than -np, ranks beyond -np join at the next commit (without it, as many as there are slots that a script finds)", config="elastic.max-num-proc"),
    Flag(ELASTIC, ("--reset-limit",), "reset_limit", FlagKind.NUMBER, "how many lost ranks are started anew in all (10)", config="elastic.reset-limit"),
    Flag(ELASTIC, ("--elastic-timeout",), "elastic_timeout", FlagKind.NUMBER, "seconds that the ranks of an elastic job wait for each other after one was lost, that the job waits for hosts, and that a newcomer has to come to `hvd.init()` (600)", variable="HOROVOD_ELASTIC_TIMEOUT", config="elastic.elastic-timeout"),
    Flag(ELASTIC, ("--host-discovery-script",), "host_discovery_script", FlagKind.TEXT, "command that is run once a second, and prints the hosts there are, one per line: `a` or `a:2`; ranks join and leave with them (elastic)", config="elastic.host-discovery-script"),
    Flag(ELASTIC, ("--slots-per-host",), "slots", FlagKind.NUMBER, "slots of each host that the discovery script prints without a number (1)", config="elastic.slots-per-host"),
    Flag(ELASTIC, ("--blacklist-cooldown-range",), "cooldown_range", FlagKind.TWO, "seconds that a host that failed is put aside the first time, twice as long each further time, and at most (10 600); with hosts by --host-discovery-script, -H or --hostfile", config="elastic.blacklist-cooldown-range"),
    # -- seeing -------------------------------------------------------------------------------------------------------
    Flag(SEEING, ("--timeline-filename",), "timeline_filename", FlagKind.TEXT, "file to which a timeline is written from `hvd.init()` on", variable="HOROVOD_TIMELINE", config="timeline.filename"),
    Flag(SEEING, ("--timeline-mark-cycles",), "timeline_mark_cycles", FlagKind.SWITCH, "mark the coordinator's decisions in it", off=("--no-timeline-mark-cycles",), variable="HOROVOD_TIMELINE_MARK_CYCLES", config="timeline.mark-cycles"),
    Flag(SEEING, ("--stall-check",), "stall_check", FlagKind.SWITCH, "report collectives that wait for ranks", off=("--no-stall-check",), variable="HOROVOD_STALL_CHECK_DISABLE", config="stall-check.enabled", inverted=True),
    Flag(SEEING, ("--stall-check-warning-time-seconds",), "stall_check_warning_time_seconds", FlagKind.NUMBER, "after how long, and how often, they are reported", variable="HOROVOD_STALL_CHECK_TIME_SECONDS", config="stall-check.warning-time-seconds"),
    Flag(SEEING, ("--stall-check-shutdown-time-seconds",), "stall_check_shutdown_time_seconds", FlagKind.NUMBER, "after how long they fail; 0 never", variable="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", config="stall-check.shutdown-time-seconds"),
    Flag(SEEING, ("--log-level",), "log_level", FlagKind.LEVEL, "the least important lines that hvdlab writes to stderr", variable="HOROVOD_LOG_LEVEL", config="logging.level"),
    Flag(SEEING, ("--log-without-timestamp", "--log-hide-timestamp"), "log_hide_timestamp", FlagKind.SWITCH, "leave the time out of these lines", off=("--log-with-timestamp", "--no-log-hide-timestamp"), variable="HOROVOD_LOG_HIDE_TIME", config="logging.hide-timestamp"),
    # -- libraries ----------------------------------------------------------------------------------------------------
    Flag(LIBRARY, ("--mpi-threads-disable",), "mpi_threads_disable", FlagKind.SWITCH, "let MPI be called from one thread", off=("--no-mpi-threads-disable",), variable="HOROVOD_MPI_THREADS_DISABLE", config="library-options.mpi-threads-disable"),
    Flag(LIBRARY, ("--mpi-args",), "mpi_args", FlagKind.TEXT, "further arguments for mpiexec, with `--mpi`", config="library-options.mpi-args"),
    Flag(LIBRARY, ("--tcp",), "tcp", FlagKind.SWITCH, "let MPI use TCP only", idle="give mpiexec's own option by --mpi-args"),
    Flag(LIBRARY, ("--binding-args",), "binding_args", FlagKind.TEXT, "arguments for mpiexec that bind ranks to cores, with `--mpi`", config="library-options.binding-args"),
    Flag(LIBRARY, ("--num-nccl-streams",), "num_nccl_streams", FlagKind.NUMBER, "streams of NCCL", variable="HOROVOD_NUM_NCCL_STREAMS", config="library-options.num-nccl-streams"),
    Flag(LIBRARY, ("--thread-affinity",), "thread_affinity", FlagKind.TEXT, "cores that hvdlab's threads are bound to, with commas between them: the n-th is for the rank with local rank n", variable="HOROVOD_THREAD_AFFINITY", config="library-options.thread-affinity"),
    Flag(LIBRARY, ("--gloo-timeout-seconds",), "gloo_timeout_seconds", FlagKind.NUMBER, "seconds that `hvd.init()` waits for all ranks", variable="HOROVOD_GLOO_TIMEOUT_SECONDS", config="library-options.gloo-timeout-seconds"),
    # -- controllers --------------------------------------------------------------------------------------------------
    Flag(CONTROLLER, ("--gloo",), "use_gloo", FlagKind.SWITCH, "hvdlab starts the ranks, over ssh on other hosts; this is so without it, too", config="controller.gloo"),
    Flag(CONTROLLER, ("--mpi",), "use_mpi", FlagKind.SWITCH, "mpiexec starts the ranks", config="controller.mpi"),
    Flag(CONTROLLER, ("--launcher",), "launcher", FlagKind.TEXT, "what starts the ranks: `local`, `ssh`, `mpi`, or the name of a launcher that an installed package offers (entry point `hvdlab.launchers`); by default `local`, and `ssh` if there are hosts", config="controller.launcher"),
    Flag(CONTROLLER, ("--launcher-option",), "launcher_options", FlagKind.TEXTS, "`KEY=VALUE`: an option that only this launcher has; may be given several times", config="controller.launcher-option"),
    Flag(CONTROLLER, ("--jsrun",), "use_jsrun", FlagKind.SWITCH, "refused: call `jsrun … python train.py`, which needs no `hvdlab run`", config="controller.jsrun"),
)  # fmt: skip

BY_DEST = {flag.dest: flag for flag in FLAGS}
assert len(BY_DEST) == len(FLAGS)

BEGIN, END = "<!-- flags -->\n", "<!-- end -->"
_TAKES = {
    FlagKind.TEXT: " TEXT",
    FlagKind.TEXTS: " TEXT",
    FlagKind.NUMBER: " N",
    FlagKind.REAL: " X",
    FlagKind.SWITCH: "",
    FlagKind.LEVEL: " LEVEL",
    FlagKind.TWO: " N N",
}


def tables() -> str:
    """Return a table for each group of flags."""
    parts = []
    for group in dict.fromkeys(flag.group for flag in FLAGS):
        rows = [_row(flag) for flag in FLAGS if flag.group == group]
        head = f"## {group}\n\n| flag | variable | in the file | meaning |\n|---|---|---|---|\n"
        parts.append(head + "\n".join(rows))
    return "\n\n".join(parts)


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}{_TAKES[flag.kind]}`" for name in flag.names)
    if flag.off:
        names += "; " + ", ".join(f"`{name}`" for name in flag.off)
    meaning = f"**no effect here**: {flag.ineffective}" if flag.ineffective else flag.meaning
    variable = f"`{flag.variable}`" if flag.variable else ""
    place = f"`{flag.config}`" if flag.config else ""
    return f"| {names} | {variable} | {place} | {meaning} |"


def filled(page: str) -> str:
    """Return the page with its tables as they ought to be. Raises ``ValueError`` if it has no place for them."""
    before, found, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError("the page has no place for the flags")
    return f"{before}{BEGIN}\n{tables()}\n\n{END}{after}"


def main(path: str) -> None:
    """Write the tables into a page."""
    page = Path(path)
    page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1])
