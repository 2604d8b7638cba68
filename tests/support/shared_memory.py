"""Contents of ``/dev/shm``, on a machine on which others work as well."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

MOMENTS = 3.0
"""Seconds within which others map, or remove, what they have made."""


def entries() -> set[str]:
    try:
        return set(os.listdir("/dev/shm"))
    except OSError:  # there is no shared memory on this machine
        return set()


def left(before: Collection[str], own: Collection[int] = (), within: float = MOMENTS) -> set[str]:
    """Return entries that came since, unless a living process maps them that is none of ``own``: they are another
    job's.

    Others get ``within`` seconds to map, or remove, their files.
    """
    deadline = time.monotonic() + within
    while new := entries() - set(before):
        new -= _mapped(new, own)
        if not new or time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    return new


def _mapped(names: Collection[str], own: Collection[int] = ()) -> set[str]:
    """Return those of the entries that a process maps which is none of ``own``."""
    found: set[str] = set()
    # The newest processes first: mostly the memory is that of ranks which a test has just started.
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdecimal()), reverse=True):
        if len(found) == len(names):
            break
        if pid not in own:
            try:
                maps = Path(f"/proc/{pid}/maps").read_text()
            except OSError:  # it has ended since the listing, or belongs to another user
                continue
            found |= {name for name in names if f"/dev/shm/{name}" in maps}
    return found
