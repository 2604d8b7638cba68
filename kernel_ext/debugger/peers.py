"""Which user's process is at the other end of a connection within this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_TABLE = Path("/proc/net/tcp")
_ESTABLISHED = "01"


def is_mine(connection: socket.socket) -> bool:
    """Whether a process of this user has made this connection over the loopback interface, and still has it.

    The protocol of debuggers knows no password, and other users of a shared machine can reach the loopback interface as
    well. Where the system does not say (other than Linux), every process of this host is let in, as by debugpy.
    """
    if not _TABLE.exists():
        return True
    try:
        wanted = f"{_hexadecimal(connection.getpeername())} {_hexadecimal(connection.getsockname())}"
    except OSError:  # it was reset
        return False
    for line in _TABLE.read_text().splitlines()[1:]:
        fields = line.split()
        if f"{fields[1]} {fields[2]}" == wanted:
            # The kernel keeps the line of a connection that its maker has closed, as one of user 0 without an inode:
            # in a notebook of root's any user's closed connection would pass.
            state, uid, inode = fields[3], fields[7], fields[9]
            return state == _ESTABLISHED and inode != "0" and int(uid) == os.getuid()
    return False


def _hexadecimal(address: tuple[str, int]) -> str:
    """An address as the kernel writes it: the host in the machine's order of bytes."""
    host = int.from_bytes(socket.inet_aton(address[0]), "little")
    return f"{host:08X}:{address[1]:04X}"
