"""Addresses on which processes listen, as Linux reports them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

_ACCEPTS = 0x10000  # of a Unix socket's flags


class Listener(NamedTuple):
    """Socket that others can connect to.

    Attributes:
        pid: A process that has it.
        place: ``unix:PATH`` or ``ADDRESS:PORT``.
    """

    pid: int
    place: str


def listeners(pids: Iterable[int]) -> set[Listener]:
    """Return all of these processes; one that several share belongs to the oldest."""
    unix = _unix_listeners()
    found: dict[str, int] = {}
    for pid in sorted(pids, reverse=True):
        # A process can end between the listing and the reading.
        with contextlib.suppress(psutil.Error, OSError):
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found[f"{connection.laddr.ip}:{connection.laddr.port}"] = pid
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                # A descriptor can be closed between the listing and the reading.
                with contextlib.suppress(OSError):
                    path = unix.get(os.readlink(descriptor.path))
                    if path is not None:
                        found[f"unix:{path}"] = pid
    return {Listener(pid, place) for place, pid in found.items()}


def _unix_listeners() -> dict[str, str]:
    """``socket:[inode]`` to path; an abstract name begins with ``@``."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, kind, _, inode, *path = line.split(maxsplit=7)
        if int(flags, 16) & _ACCEPTS and int(kind, 16) == 1:
            found[f"socket:[{inode}]"] = path[0] if path else ""
    return found
