"""What can be seen of a process of this host from outside, in words."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")


def look_at(pid: int, proc: Path = _PROC) -> str:
    """Why a rank's process does not answer, as it reads after ``rank 2: ``."""
    try:
        stat = (proc / f"{pid}/stat").read_text()
    except OSError:
        return "its process has ended"
    state = stat.rpartition(")")[2].split()[0]
    if state == "T":
        return f"stopped (SIGSTOP); `kill -CONT {pid}` lets it go on"
    if state == "t":
        return "stopped by a debugger"
    if state in "ZX":
        return "its process has ended"
    if state == "D":
        return f"waits for a device or file system{_waits_in(pid, proc)}"
    return "in C code that keeps the interpreter to itself"


def _waits_in(pid: int, proc: Path) -> str:
    """What the kernel calls what it waits for; empty if that is not told."""
    try:
        name = (proc / f"{pid}/wchan").read_text()
    except OSError:
        return ""
    return f" ({name})" if name not in ("", "0") else ""
