"""The environment of ranks that are started as programs, on this host or another."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from hvdlab.collectives.rendezvous.launchers import LAUNCHERS

FOREIGN = tuple(
    sorted(
        {name for launcher in LAUNCHERS for name in (*launcher.rank, *launcher.local_rank)}
        | {"PMI_FD", "PMI_ID", "PMI_PORT", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_SIZE"}
    )
)
"""Variables by which another launcher described this process; our ranks must not take them for theirs."""

_AT_HOME = frozenset(
    (
        "_",
        "DISPLAY",
        "HOME",
        "HOSTNAME",
        "LOGNAME",
        "LS_COLORS",
        "OLDPWD",
        "PWD",
        "SHELL",
        "SHLVL",
        "TERM",
        "TMPDIR",
        "USER",
    )
)
_AT_HOME_PREFIXES = ("BASH_FUNC", "SSH_", "XDG_")


EXCLUDED = "HVDLAB_ENV_EXCLUDE"
"""Names the variables that ranks on other hosts do not get, by patterns between commas."""


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on other hosts and in engines get.

    Args:
        environ: The variables of this process. Those that belong to this host or its terminal stay here, and so do those that
            :data:`EXCLUDED` names.
    """
    at_home = excluded_by_user(environ)
    return {
        name: value
        for name, value in environ.items()
        if name not in _AT_HOME and not name.startswith(_AT_HOME_PREFIXES) and name not in at_home
    }


def excluded_by_user(environ: Mapping[str, str]) -> set[str]:
    """Return the names of the variables in ``environ`` that the patterns in :data:`EXCLUDED` keep on this host."""
    patterns = [pattern for part in environ.get(EXCLUDED, "").split(",") if (pattern := part.strip())]
    return {name for name in environ if any(fnmatchcase(name, pattern) for pattern in patterns)}


def default_python() -> str:
    """Return the interpreter of ranks and agents."""
    return sys.executable or str(Path("python3"))
