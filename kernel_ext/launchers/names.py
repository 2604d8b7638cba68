"""Which launchers a pool has, and whether they can be used here."""

from __future__ import annotations

import shutil
from importlib.metadata import entry_points
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.kernel_ext.launchers.loading import load_ipyparallel
from hvdlab.launch import registry
from hvdlab.launch.starter import Launcher

LOCAL = "local"
MPI = "mpi"
_GROUP = "ipyparallel.engine_launchers"


PROGRAMS = {
    "htcondor": "condor_submit",
    "lsf": "bsub",
    "pbs": "qsub",
    "sge": "qsub",
    "sshproxy": "ssh",
}
"""The program that each of ipyparallel's launchers calls."""


def known() -> tuple[str, ...]:
    """Names that ``launcher=`` takes: hvdlab's and those of packages for it first, then ipyparallel's."""
    first = tuple(dict.fromkeys((LOCAL, MPI, *registry.names())))
    others = {entry.name.lower() for entry in entry_points(group=_GROUP)} - set(first)
    return (*first, *sorted(others))


def find(name: str) -> Launcher:
    """The launcher of this name.

    Raises:
        InvalidRequestError: There is none.
        StartError: It can't be imported.
    """
    name = name.lower()
    if name not in known():
        raise InvalidRequestError(f"there is no launcher {name!r}; choose one of {', '.join(known())}.")
    found = registry.find(name)
    if found is not None:
        return found
    from hvdlab.kernel_ext.launchers.foreign import EngineSetLauncher

    return EngineSetLauncher(name)


def check_program(launcher: str) -> None:
    """Raises ``StartError`` if the program that one of ipyparallel's launchers calls is not installed."""
    program = PROGRAMS.get(launcher)
    if program is not None and shutil.which(program) is None:
        raise StartError(
            f"the launcher `{launcher}` needs `{program}`, which is not on the PATH; run the notebook on a host that "
            "has it, or choose another launcher, such as local."
        )


def engine_set_class(launcher: str) -> Any:
    """ipyparallel's class of this name. Raises ``StartError`` if it can't be imported."""
    load_ipyparallel()
    for entry in entry_points(group=_GROUP):
        if entry.name.lower() == launcher:
            try:
                return entry.load()
            # A package of someone else may fail in any way while it is imported.
            except Exception as error:
                raise StartError(
                    f"the launcher `{launcher}` ({entry.value}) can't be used: {type(error).__name__}: {error}"
                ) from error
    raise StartError(f"ipyparallel has no launcher `{launcher}` any more.")
