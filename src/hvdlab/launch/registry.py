"""Which launchers there are: ours, and those that installed packages offer as entry points of ``hvdlab.launchers``."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import cast

from hvdlab.collectives.errors import StartError
from hvdlab.launch.kept import JobKeeper
from hvdlab.launch.starter import Launcher

GROUP = "hvdlab.launchers"
"""An entry point of this group names a :class:`~hvdlab.launch.starter.Launcher`, or a class that makes one."""

OURS = {
    "local": "hvdlab.launch.local:LocalLauncher",
    "ssh": "hvdlab.launch.ssh:SshLauncher",
    "mpi": "hvdlab.launch.mpi:MpiLauncher",
    "slurm": "hvdlab.launch.slurm:SlurmLauncher",
    "ray": "hvdlab.ray.launcher:RayLauncher",
    "spark": "hvdlab.spark.launcher:SparkLauncher",
    "dask": "hvdlab.launch.dask:DaskLauncher",
}


KEEPERS = {"ray": "hvdlab.ray.keeper:RayKeeper"}
"""What keeps jobs when their notebook ends, by launcher; the fork server keeps those of ``local``."""


def names() -> tuple[str, ...]:
    """Return the names of all launchers: ours, then others in alphabetical order. Nothing is imported."""
    others = {entry.name.lower() for entry in entry_points(group=GROUP)} - set(OURS)
    return (*OURS, *sorted(others))


def find(name: str) -> Launcher | None:
    """Return the launcher of this name; ``None`` if there is none.

    Raises:
        StartError: It is offered by a package, but can't be imported.
    """
    name = name.lower()
    if name in OURS:
        module, _, attribute = OURS[name].partition(":")
        return _made(getattr(importlib.import_module(module), attribute))
    for entry in entry_points(group=GROUP):
        if entry.name.lower() == name:
            try:
                return _made(entry.load())
            # A foreign package can fail in any way while it is imported.
            except Exception as error:
                raise StartError(
                    f"the launcher `{name}` ({entry.value}) can't be used: {type(error).__name__}: {error}"
                ) from error
    return None


def keeper(name: str) -> JobKeeper | None:
    """Return the keeper of this launcher's jobs; ``None`` if they end with their notebook, or a process of this host keeps them."""
    if name.lower() not in KEEPERS:
        return None
    module, _, attribute = KEEPERS[name.lower()].partition(":")
    return cast("JobKeeper", getattr(importlib.import_module(module), attribute)())


def _made(found: object) -> Launcher:
    return cast("Launcher", found() if isinstance(found, type) else found)
