"""A stack that can be had although nothing in this process runs Python.

C code that keeps the interpreter's lock keeps every thread from answering. Python's fault handler needs no lock: at
:data:`SIGNAL` it writes the main thread's calls to a file in memory, which the pool's process finds by its name.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal

SIGNAL = signal.SIGWINCH
"""Ignored by default, so that it harms nobody if the handler is not there (any more)."""

NAME = "hvdlab-stack"
"""Of the file, as ``/proc/<pid>/fd`` tells it."""


def offer_dumps() -> None:
    """From now on."""
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    # Whoever reads it empties it.
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(SIGNAL, fd, all_threads=False)
