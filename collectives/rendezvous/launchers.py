"""The launchers that hvdlab understands: the variables by which they describe a rank, and the key of a job that follows from these."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.system import PARENT, START_TIME, boot_id, process_status

_LOOPBACK = ("localhost", "127.", "::1")


class Meeting(StrEnum):
    """Means by which ranks of several hosts find each other, unless the environment offers something better."""

    STORE = "store"
    MPI = "mpi"
    DIRECTORY = "directory"


@dataclass(frozen=True, slots=True)
class ForeignLauncher:
    """Variables of a launcher. Of several for one thing the first that is set counts.

    Attributes:
        name: Its name for users.
        marks: Variables that are all set if it started this process.
        rank, size: Variables with the rank, and the number of ranks.
        local_rank, local_size: Variables with the same for this host. A size may be Slurm's list of all hosts' sizes.
        host, hosts: Variables with the number of the host, and how many hosts there are.
        job: Variables that together are different for each job (and attempt).
        by_parent: Whether those are not enough: on one host the process that started the ranks makes the difference.
        meeting: How its ranks meet if they are on several hosts.
        libraries: Names, in their version texts, of the MPI libraries that its ranks can use.
        in_order: Whether local ranks are in the order of the ranks. Open MPI's follow the cores that it binds them to.
    """

    name: str
    marks: tuple[str, ...]
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    by_parent: bool = True
    meeting: Meeting = Meeting.DIRECTORY
    libraries: tuple[str, ...] = ()
    in_order: bool = True


_OPEN_MPI = ("Open MPI", "Spectrum")
_MPICH = ("MPICH", "Intel", "MVAPICH", "MVICH", "CRAY")
_TORCH = (
    ("RANK",),
    ("WORLD_SIZE",),
    ("LOCAL_RANK",),
    ("LOCAL_WORLD_SIZE",),
    ("GROUP_RANK",),
    ("GROUP_WORLD_SIZE",),
)

# The first match counts, so a launcher that another one starts comes before that: torchrun under srun, mpiexec (which uses srun) in
# Slurm's jobs.
LAUNCHERS: tuple[ForeignLauncher, ...] = (
    ForeignLauncher(
        "torchrun",
        ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
        *_TORCH,
        job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
        meeting=Meeting.STORE,
    ),
    ForeignLauncher(
        "jsrun",
        ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        ("JSM_NAMESPACE_RANK",),
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        job=("LSB_JOBID", "LS_JOBPID", "PMIX_NAMESPACE"),
        meeting=Meeting.MPI,
        libraries=_OPEN_MPI,
        in_order=False,
    ),
    ForeignLauncher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        meeting=Meeting.MPI,
        libraries=_OPEN_MPI,
        in_order=False,
    ),
    ForeignLauncher(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
        meeting=Meeting.MPI,
        libraries=_MPICH,
    ),
    ForeignLauncher(
        "MPICH",
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID",),
        ("MPI_LOCALNRANKS",),
        meeting=Meeting.MPI,
        libraries=_MPICH,
    ),
    # srun sets PMI variables for all programs, so they do not show whether this program's MPI understands them.
    # A batch script, and a shell that salloc gives, have most of these variables as well, but no step of several tasks.
    ForeignLauncher(
        "srun",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        ("SLURM_NODEID",),
        ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        job=("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        by_parent=False,
    ),
    ForeignLauncher(
        "MPI by PMI",
        ("PMI_RANK", "PMI_SIZE"),
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("PMI_LOCAL_SIZE",),
        job=("PMI_JOBID", "PALS_APID"),
        meeting=Meeting.MPI,
        libraries=_MPICH,
    ),
    ForeignLauncher(
        "MASTER_ADDR and RANK",
        ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *_TORCH,
        job=("MASTER_ADDR", "MASTER_PORT"),
        by_parent=False,
        meeting=Meeting.STORE,
    ),
)


@dataclass(frozen=True, slots=True)
class Launched:
    """Description of this rank by its launcher; fields are ``None`` if the launcher does not set them.

    Attributes:
        launcher: The launcher.
        rank, size: The rank, and the number of ranks.
        local_rank, local_size: The same on this host.
        host, hosts: Number of the host, and how many hosts there are.
        one_host: Whether all ranks are known to be on one host.
    """

    launcher: ForeignLauncher
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    host: int | None
    hosts: int | None
    one_host: bool

    @property
    def ordered_local_rank(self) -> int | None:
        """Return the local rank, if local ranks are in the order of the ranks, as Horovod's are; ``None`` to derive it from all ranks' hosts."""
        return self.local_rank if self.launcher.in_order else None


def detect(environ: Mapping[str, str]) -> Launched | None:
    """Return how a launcher started this process as a rank; ``None`` if no launcher did.

    Raises:
        InvalidRequestError: A launcher's variables are no numbers, or contradict each other.
    """
    for launcher in LAUNCHERS:
        if all(environ.get(mark) for mark in launcher.marks):
            return _read(launcher, environ)
    return None


def _read(launcher: ForeignLauncher, environ: Mapping[str, str]) -> Launched | None:
    rank, size = _number(environ, launcher.rank), _number(environ, launcher.size)
    if rank is None or size is None:
        return None
    if not 0 <= rank < size:
        raise InvalidRequestError(
            f"{launcher.rank[0]}={rank} does not go with {launcher.size[0]}={size}: ranks count from 0."
        )
    host, hosts = _number(environ, launcher.host), _number(environ, launcher.hosts)
    local_rank, local_size = (
        _number(environ, launcher.local_rank),
        _number(environ, launcher.local_size, host),
    )
    one_host = (
        hosts == 1 or local_size == size or (hosts is None and local_size is None and _loopback(environ))
    )
    return Launched(launcher, rank, size, local_rank, local_size, host, hosts, one_host)


def _loopback(environ: Mapping[str, str]) -> bool:
    # Ranks of another host could not reach a master at such an address.
    return environ.get("MASTER_ADDR", "").startswith(_LOOPBACK)


def _number(environ: Mapping[str, str], names: tuple[str, ...], host: int | None = None) -> int | None:
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        return None
    text = environ[name].strip()
    # isdigit() alone is true of superscripts and other scripts' digits as well, some of which int() refuses.
    if text.isascii() and text.isdigit():
        return int(text)
    counts = _per_host(text)
    if counts is None:
        raise InvalidRequestError(f"{name}={text!r} is no whole number.")
    return counts[host] if host is not None and host < len(counts) else None


def _per_host(text: str) -> list[int] | None:
    """Expand Slurm's ``2(x3),1`` to ``[2, 2, 2, 1]``. Return ``None`` for any other text."""
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


_PROGRAMS = frozenset(
    (
        "hydra_pmi_proxy",
        "hydra_bstrap_pr",
        "prted",
        "prterun",
        "orted",
        "mpirun",
        "mpiexec",
        "jsrun",
        "torchrun",
    )
)


def job_key(launched: Launched, environ: Mapping[str, str]) -> str:
    """Return a name that all ranks of a job have in common and no other job has.

    On one host it depends on the process that started them, for launchers whose variables are not enough. (Between
    hosts there is no such process.)
    """
    launcher = launched.launcher
    parts = [launcher.name, str(os.geteuid()), str(launched.size)]
    parts += [f"{name}={environ.get(name, '')}" for name in launcher.job]
    if launched.one_host and launcher.by_parent:
        parts.append(_starter(launcher.rank[0]))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _starter(variable: str) -> str:
    """Return the process that started the ranks, with the time of its start: their nearest ancestor that is no rank itself.

    It need not be their parent, since each rank may be wrapped in a script of its own.
    """
    pid = os.getppid()
    while pid > 1:
        status = _status(pid)
        if status is None:
            break
        name, parent, started = status
        if name in _PROGRAMS or not _has(pid, variable):
            # With the time of its start: the number of a process that has ended is given to another one.
            return f"{pid} {started} {boot_id()}"
        pid = parent
    return f"{os.getppid()} {boot_id()}"


def _status(pid: int) -> tuple[str, int, str] | None:
    """Return name, parent and start (clock ticks since boot) of a process."""
    fields = process_status(pid)
    try:
        name = Path(f"/proc/{pid}/comm").read_text().removesuffix("\n")
    except OSError:
        return None
    return (name, int(fields[PARENT]), fields[START_TIME]) if fields else None


def _has(pid: int, variable: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # a process of another user: a daemon that starts ranks for many users
        return False
    return any(entry.startswith(variable.encode() + b"=") for entry in environment.split(b"\0"))
