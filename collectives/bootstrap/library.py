"""Which MPI mpi4py would load here, and whether it is the one whose launcher started this process.

``MPI_Init`` of another MPI than the launcher's ends the process, or makes a world of one; so this is checked before.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Mapping

from hvdlab.collectives.bootstrap.launchers import Meeting, detect

_ROOM = 64 * 1024  # for the text; the longest MPI_MAX_LIBRARY_VERSION_STRING known is 8192


def works(environ: Mapping[str, str]) -> bool:
    """Whether ranks reach each other by MPI: its launcher has started several, and mpi4py has the library for it."""
    return by_mpi(environ) and mismatch(environ) is None


def by_mpi(environ: Mapping[str, str]) -> bool:
    """Whether an MPI launcher has started this process as one of several."""
    launched = detect(environ)
    return launched is not None and launched.size > 1 and launched.launcher.meeting is Meeting.MPI


def mismatch(environ: Mapping[str, str]) -> str | None:
    """Why mpi4py's library can't be used under the launcher that started this process; ``None`` if it may be usable."""
    launched = detect(environ)
    if launched is None or not launched.launcher.libraries:
        return None
    library = version()
    if library is None:
        return "mpi4py is not installed, or finds no MPI library"
    if any(name in library for name in launched.launcher.libraries):
        return None
    return (
        f"{launched.launcher.name} started the ranks, but mpi4py uses {library.splitlines()[0].split(',')[0]}"
    )


@functools.cache
def version() -> str | None:
    """The version text of the MPI library; ``None`` without one. Neither initializes MPI nor imports mpi4py's module."""
    try:
        spec = importlib.util.find_spec("mpi4py.MPI")
        if spec is None or spec.origin is None:
            return None
        library = ctypes.CDLL(spec.origin)
        text, length = ctypes.create_string_buffer(_ROOM), ctypes.c_int()
        library.MPI_Get_library_version(text, ctypes.byref(length))
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None
    return text.value.decode(errors="replace")
