"""Shared memory without a name, so that nothing is left behind however the processes that use it end."""

from __future__ import annotations

import fcntl
import os


def create_memory(name: str, size: int) -> int:
    """A descriptor of ``size`` zero bytes that can neither shrink nor grow. The caller closes it.

    Raises:
        OSError: No descriptors, no memory, or no such thing on this system.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # Without the seals a member that truncates it would make the others die of SIGBUS.
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
