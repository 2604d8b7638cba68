"""Which ranks share memory, and where a rank stands on its host and among hosts."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlab.collectives.system import boot_id

HOST_VARIABLE = "HVDLAB_HOST"


def host_key() -> str:
    """A name that processes have in common if and only if they can share memory.

    ``HVDLAB_HOST`` in the environment, if set, is that name: for cases that a process can't see, such as containers that do
    share memory, or processes that should behave as if they were on different hosts.
    """
    return os.environ.get(HOST_VARIABLE, "").strip() or _found_host_key()


@functools.cache
def _found_host_key() -> str:
    """A name made of the host's name, the boot (two machines may have one name) and the namespaces that decide which memory
    and sockets a container sees.
    """
    parts = [boot_id()]
    for namespace in ("ipc", "mnt", "pid"):
        try:
            parts.append(str(os.stat(f"/proc/self/ns/{namespace}").st_ino))
        except OSError:
            parts.append("")
    digest = hashlib.blake2b(" ".join(parts).encode(), digest_size=6).hexdigest()
    return f"{socket.gethostname()}#{digest}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: among the ranks of its host, and among the hosts."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def place(rank: int, ranks: Sequence[int], hosts: Sequence[str]) -> Place:
    """Derive the place from the host of each rank; both are given by position. Hosts are ordered by their first rank.

    ``cross`` counts the hosts that have a rank with this local rank, as Horovod does.
    """
    by_host: dict[str, list[int]] = {}
    for other, host in zip(ranks, hosts, strict=True):
        by_host.setdefault(host, []).append(other)
    own = next((here for here in by_host.values() if rank in here), [rank])
    local_rank = own.index(rank)
    column = [here for here in by_host.values() if len(here) > local_rank] or [own]
    return Place(local_rank, len(own), column.index(own), len(column))
