"""Is the wished-for pool possible? Asked before anything is started."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError
from hvdlab.collectives.settings import PLANES
from hvdlab.kernel_ext.registry import Registry
from hvdlab.launch.forkserver.forking import REMEDIES, why_not

BYTES_PER_RANK = 24 << 20
"""What a forked rank takes at least, beside what it shares."""

DESCRIPTORS_PER_RANK = 4
"""File descriptors that the fork server keeps for each rank."""


def default_size() -> int:
    """Usable cores, at least 2, so that there is something to communicate."""
    return max(2, len(os.sched_getaffinity(0)))


def check_size(np: Any) -> int:
    """``np`` as a number of ranks. Raises ``InvalidRequestError``."""
    if isinstance(np, bool) or not isinstance(np, int):
        raise InvalidRequestError(f"np={np!r} is no number of ranks; give a whole number, such as np=4.")
    if np < 1:
        raise InvalidRequestError(f"np={np}: a pool has at least one rank; pool.stop() ends all of them.")
    return np


def check_room(np: int, already: int = 0, available: int | None = None) -> None:
    """Whether this host has memory and file descriptors for ``np`` ranks, ``already`` of which run.

    Raises:
        InvalidRequestError: It has not; the text says how many would fit.
    """
    new = np - already
    memory = available_memory() if available is None else available
    if new > 0 and new * BYTES_PER_RANK > memory:
        raise InvalidRequestError(
            f"np={np}: {new} more ranks on this host take at least {new * BYTES_PER_RANK / 2**30:.1f} GiB, but "
            f"{memory / 2**30:.1f} GiB are available; choose at most {already + memory // BYTES_PER_RANK}."
        )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(0, (hard - 64) // DESCRIPTORS_PER_RANK)
    if hard != resource.RLIM_INFINITY and np > most:
        needed = 64 + np * DESCRIPTORS_PER_RANK
        raise InvalidRequestError(
            f"np={np}: a process may have {hard} open files here, enough for {most or 'no'} ranks; start the notebook "
            f"where `ulimit -Hn` is at least {needed}" + (f", or choose at most {most}." if most else ".")
        )


@contextmanager
def limits_told(what: str) -> Iterator[None]:
    """Tell of a limit of this process or host in one sentence.

    Raises:
        StartError: A file, thread or process could not be had.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REMEDIES or isinstance(error, HvdlabError):
            raise
        raise StartError(f"{what}: {why_not(error)}") from error
    except RuntimeError as error:
        if isinstance(error, HvdlabError) or "start new thread" not in str(error):
            raise
        raise StartError(f"{what}: {error}: {REMEDIES[errno.EAGAIN]}") from error


def check_plane(plane: str) -> None:
    """Raises ``InvalidRequestError`` for a data plane that does not exist."""
    usable = [name for name in PLANES if name != "local"]
    if plane not in usable:
        raise InvalidRequestError(f"there is no data plane {plane!r}; choose one of {', '.join(usable)}.")


def available_memory() -> int:
    """Bytes that can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 1 << 62


def check_keepable(launcher: str, name: str) -> str:
    """The name under which a pool is to be kept. Raises ``InvalidRequestError`` if it can't be."""
    if launcher != "local":
        raise InvalidRequestError(
            f"ranks of the launcher `{launcher}` can't be kept when their notebook ends; only those of `local` can"
        )
    return Registry().free_name(name)
