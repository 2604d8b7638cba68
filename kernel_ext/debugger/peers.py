"""Who is at the other end of a connection within this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_TABLE = Path("/proc/net/tcp")


def is_mine(connection: socket.socket) -> bool:
    """Whether a process of this user has made this connection over the loopback interface.

    The protocol of debuggers knows no password, and other users of a shared machine can reach the loopback interface as
    well. Where the system does not tell (other than Linux), everybody on this host is let in, as debugpy does.
    """
    if not _TABLE.exists():
        return True
    wanted = f"{_hexadecimal(connection.getpeername())} {_hexadecimal(connection.getsockname())}"
    for line in _TABLE.read_text().splitlines()[1:]:
        fields = line.split()
        if f"{fields[1]} {fields[2]}" == wanted:
            return int(fields[7]) == os.getuid()
    return False


def _hexadecimal(address: tuple[str, int]) -> str:
    """As the kernel writes it: the address in the machine's order of bytes."""
    host = int.from_bytes(socket.inet_aton(address[0]), "little")
    return f"{host:08X}:{address[1]:04X}"
