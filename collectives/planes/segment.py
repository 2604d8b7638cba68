"""A memory segment that the members of one host make for themselves.

The coordinator hands out descriptors over Unix sockets, which end at its host. On other hosts the first member makes an
anonymous file (memfd), and publishes its descriptor in the rendezvous store. The other members
open it by way of ``/proc/PID/fd``, which the kernel allows to processes of the same user. So the segment never has
a name, and nothing is left behind, whichever process dies and when.
"""

from __future__ import annotations

import os
import secrets

from hvdlab.collectives.planes.base import KeyValue, PlaneBroken
from hvdlab.collectives.system import create_memory

_KEY = "memory"


def publish_memfd(store: KeyValue, name: str, size: int) -> int:
    """Make a segment of ``size`` bytes and offer it to the members of this host. The caller closes it once they have opened it.

    Raises:
        PlaneBroken: The system gives no memory or no descriptor.
    """
    unique = f"{name}-{secrets.token_hex(8)}"
    try:
        descriptor = create_memory(unique, size)
    except OSError as error:
        raise PlaneBroken(f"shared memory: no segment of {size} bytes could be made: {error}") from error
    store.set(_KEY, f"{os.getpid()} {descriptor} {unique}".encode())
    return descriptor


def open_memfd(store: KeyValue, timeout: float) -> int:
    """Open the segment that the first member of this host offers. The caller closes the descriptor.

    Raises:
        PlaneBroken: It can't be opened from here; the text names likely causes.
        TimeoutError: Nothing was offered in time.
    """
    pid, number, unique = store.get(_KEY, timeout).decode().split()
    path = f"/proc/{pid}/fd/{number}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PlaneBroken(
            f"shared memory: process {pid} has the segment of this host, but {path} can't be opened ({error}); ranks that "
            "count as one host must run as one user and see each other's processes, else set HVDLAB_HOST differently, or HVDLAB_PLANE=gloo"
        ) from error
    # The kernel shows the name that a memfd was made with; only this one has the random name.
    if unique not in os.readlink(f"/proc/self/fd/{descriptor}"):
        os.close(descriptor)
        raise PlaneBroken(
            f"shared memory: {path} is not the segment that was offered; are ranks of different machines given the same "
            "HVDLAB_HOST?"
        )
    return descriptor
