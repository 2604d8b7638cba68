"""Processes of hvdlab below this one, recognised by their command lines."""

from __future__ import annotations

import contextlib

import psutil


def our_processes() -> list[psutil.Process]:
    """Return agents, fork servers, ranks and coordinators below this process, whichever process is their parent."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if any(word.startswith(("hvdlab.", "hvdlab:")) for word in process.cmdline()):
                found.append(process)
    return found
