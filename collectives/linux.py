"""The few calls to Linux that Python has no function for."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
from functools import cache
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")
_SET_DEATH_SIGNAL = 1
_SET_NAME = 15
_SET_CHILD_SUBREAPER = 36


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc().prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends; end at once if that has happened already.

    The signal comes when the *thread* that forked ends, so the parent must have forked on its main thread.
    """
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the new parent of descendants whose parent ends."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def name_process(name: str, title: str) -> None:
    """Show ``name`` (15 bytes at most) in ``ps -e`` and ``top``, ``title`` in ``ps aux``. For readers only."""
    with contextlib.suppress(OSError):
        _prctl(_SET_NAME, name.encode()[:15])
    with contextlib.suppress(OSError, ValueError, IndexError):
        _write_title(title.encode())


def _write_title(title: bytes) -> None:
    # Field 48 and 49 of stat(5) are where the kernel looks for the command line, in this process's own memory.
    fields = process_status("self")
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    if start and room > 1:
        ctypes.memmove(start, title[: room - 1].ljust(room, b"\0"), room)


def raise_on_hangup(descriptor: int, wanted: bool) -> None:
    """Have SIGIO, which ends the process, sent when the other end of this pipe is closed; or no longer."""
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC if wanted else flags & ~os.O_ASYNC)


STATE, PARENT, GROUP, SESSION, THREADS, START_TIME, RESIDENT, EXIT_CODE = 0, 1, 2, 3, 17, 19, 21, 49
"""Places in what :func:`process_status` returns; see proc(5). The start is in clock ticks since the boot."""


def process_status(pid: int | str, proc: Path = Path("/proc")) -> list[str]:
    """The fields of ``/proc/<pid>/stat``, from the state on; empty if there is no such process.

    Args:
        pid: The process, or ``"self"``.
        proc: Tests give a directory of their own.
    """
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:  # also if no descriptor is left
        return []
    # The name before may hold any character.
    return text.rpartition(")")[2].split()


def process_state(pid: int, proc: Path = Path("/proc")) -> str:
    """The letter of a process's state: ``R``, ``S``, ``T`` (stopped), ``Z`` (ended) …; empty if there is none."""
    fields = process_status(pid, proc)
    return fields[STATE] if fields else ""


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Process id and user at the other end of a connected Unix socket. Raises ``OSError`` where the system does not tell."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        raise OSError("this system does not say whose the other end of a socket is")
    pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    return int(pid), int(user)


def require_own_peer(sock: socket.socket) -> int:
    """Return the process id at the other end of a connected Unix socket, if that process may be trusted with secrets.

    The directory of a socket keeps other users out. This check holds also where that directory is another user's, or open to others.
    For the connecting side the other end is the process that began to listen, for the accepting side the one that connected.

    Raises:
        PermissionError: The process belongs neither to this user nor to root.
        OSError: The system does not tell.
    """
    pid, user = peer_credentials(sock)
    if user not in (os.geteuid(), 0):
        raise PermissionError(
            errno.EPERM,
            f"the process at the other end of the socket belongs to user {user}, neither to user {os.geteuid()} nor to root",
        )
    return pid


def boot_id() -> str:
    """A text that differs between hosts, and changes with each boot; empty where the kernel does not show it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def living_children() -> list[int]:
    """Process ids of this process's children, adopted ones included."""
    pid = os.getpid()
    children: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += [int(number) for number in tasks.read_text().split()]
    return children
