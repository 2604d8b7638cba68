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
"""Ignored by default, so that it does no harm if the handler is not there (any more)."""

NAME = "hvdlab-stack"
"""The file's name, as ``/proc/<pid>/fd`` shows it."""


def offer_dumps() -> None:
    """Have :data:`SIGNAL` dump the main thread's stack from now on."""
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    # The pool's process truncates the file before each dump; appending then begins at its start.
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(SIGNAL, fd, all_threads=False)
