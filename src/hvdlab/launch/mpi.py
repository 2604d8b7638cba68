"""mpiexec: where it is, whose it is, and what it needs here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hvdlab.collectives.errors import StartError


def program() -> str | None:
    """Path of mpiexec: that of this Python environment, else the system's."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def why_unavailable() -> str:
    """Why ranks can't be started by MPI, or an empty text."""
    if program() is None:
        return "`mpiexec` is neither in this Python environment nor on the PATH"
    if importlib.util.find_spec("mpi4py") is None:
        return "its data plane needs pip install 'hvdlab[mpi]'"
    return ""


def version(mpiexec: str) -> str:
    """What an mpiexec says about itself. Raises ``StartError`` if it can't be run."""
    try:
        done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"`{mpiexec} --version` failed: {error}") from error
    return done.stdout + done.stderr


def is_open_mpi(version: str) -> bool:
    """Whether this is Open MPI's."""
    return any(word in version for word in ("Open MPI", "OpenRTE", "PRRTE"))


def open_mpi_options() -> list[str]:
    """Open MPI refuses root and more ranks than cores unless told that both are meant."""
    return [*(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe"]
