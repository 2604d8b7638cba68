"""A name that distinguishes this job from others of the same user on this host, and from those that ran before."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from hvdlab.collectives.bootstrap.launchers import Launched
from hvdlab.collectives.linux import PARENT, START_TIME, boot_id, process_status

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
    """A name that all ranks of a job have in common and no other job has.

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
    """The process that started the ranks, with the time of its start: their nearest ancestor that is no rank itself.

    It need not be their parent, since each rank may be wrapped in a script of its own.
    """
    pid = os.getppid()
    while pid > 1:
        status = _status(pid)
        if status is None:
            break
        name, parent, started = status
        if name in _PROGRAMS or not _has(pid, variable):
            return f"{pid} {started} {boot_id()}"
        pid = parent
    return f"{os.getppid()} {boot_id()}"


def _status(pid: int) -> tuple[str, int, str] | None:
    """Name, parent and start (clock ticks since boot) of a process."""
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
