"""Which kept pools there are, on this host and where launchers keep them; ending one that no process uses."""

from __future__ import annotations

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.kernel_ext import keeping
from hvdlab.kernel_ext.held import HeldPool
from hvdlab.kernel_ext.launchers.names import LOCAL
from hvdlab.kernel_ext.registry import Registry
from hvdlab.launch import registry
from hvdlab.launch.kept import KeptJob, none_there


def kept_elsewhere(launcher: str | None = None) -> tuple[list[KeptJob], list[str]]:
    """The pools that launchers keep.

    Args:
        launcher: Only this one's, which is searched for the place where they are kept; by default those of all launchers of which that is known.

    Returns:
        The pools, and for each launcher whose pools can't be listed, why.
    """
    found: list[KeptJob] = []
    problems: list[str] = []
    for name in registry.KEEPERS:
        keeper = registry.keeper(name)
        if keeper is None or not (launcher == name or (launcher is None and keeper.reachable())):
            continue
        try:
            found += keeper.all()
        except StartError as error:
            problems.append(f"pools of the launcher `{name}` can't be listed: {error}")
    return found, problems


def launcher_of(name: str) -> str:
    """The launcher of the kept pool of this name. Raises ``InvalidRequestError`` if there is none."""
    here = [kept.name for kept in Registry().all()]
    if name in here:
        return LOCAL
    elsewhere, problems = kept_elsewhere()
    for job in elsewhere:
        if job.name == name:
            return job.launcher
    known = none_there(name, [*here, *(job.name for job in elsewhere)])
    raise InvalidRequestError("; ".join([known, *problems]))


def stop(name: str) -> None:
    """End a kept pool that no process uses, whatever keeps it.

    Raises:
        InvalidRequestError: There is none of that name, or a process uses it.
        StartError: It does not answer.
    """
    launcher = launcher_of(name)
    if launcher == LOCAL:
        keeping.stop(name)
    else:
        HeldPool.claim(name, launcher).forget()
