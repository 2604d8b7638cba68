"""``--mpi``: this process becomes mpiexec, which starts the command. Its ranks find each other through MPI."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hvdlab.collectives.errors import StartError
from hvdlab.launch.environment import excluded_by_user
from hvdlab.launch.mpi import arguments, is_open_mpi, program, version, why_unavailable

if TYPE_CHECKING:  # a pool needs the name of mpiexec only
    from hvdlab.runner.plan import Job
    from hvdlab.runner.wishes import Wishes


def command(job: Job, wishes: Wishes) -> tuple[list[str], dict[str, str]]:
    """The command line of mpiexec, and its environment.

    Raises:
        StartError: There is no mpiexec.
    """
    mpiexec = program()
    if mpiexec is None:
        raise StartError("--mpi: " + why_unavailable() + "; `pip install mpich mpi4py` brings it.")
    ours = {**job.environment, "HVDLAB_PLANE": job.plane}
    line = [mpiexec, "-np", str(job.size)]
    line += arguments(mpiexec, job.hosts if wants_hosts(job) else (), ours)
    line += _labels(job, wishes, open_mpi=is_open_mpi(version(mpiexec)))
    for dest in ("mpi_args", "binding_args"):
        line += shlex.split(wishes.get(dest) or "")
    kept_here = excluded_by_user(os.environ) if job.remote else ()
    passed_on = {name: value for name, value in os.environ.items() if name not in kept_here}
    return [*line, *job.command], {"PYTHONUNBUFFERED": "1", **passed_on, **ours}


def wants_hosts(job: Job) -> bool:
    """Whether mpiexec needs a list of hosts on its command line."""
    return len(job.hosts) > 1 or bool(job.remote)


def _labels(job: Job, wishes: Wishes, *, open_mpi: bool) -> list[str]:
    """Options that mark each rank's output with its number, or write it to files of its own."""
    directory = wishes.get("output_filename")
    if open_mpi:
        return ["--output-filename", directory] if directory else ["--tag-output"]
    if not directory:
        return ["-prepend-rank"]
    for rank in range(job.size):
        Path(directory, f"rank.{rank}").mkdir(parents=True, exist_ok=True)
    place = f"{directory}/rank.%r"
    return ["-outfile-pattern", f"{place}/stdout", "-errfile-pattern", f"{place}/stderr"]


def replace_process(job: Job, wishes: Wishes) -> NoReturn:
    """Become mpiexec. Raises ``StartError`` if there is none."""
    line, environment = command(job, wishes)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(line[0], line, environment)
