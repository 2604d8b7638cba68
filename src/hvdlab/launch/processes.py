"""What Linux shows of processes that are not our children."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import struct
import time

from hvdlab.collectives.system import EXIT_CODE, GROUP, SESSION, START_TIME, STATE, process_status

_GET_INFO = 0xC040FF0B
"""``PIDFD_GET_INFO`` with the first 64 bytes of ``struct pidfd_info``, of linux/pidfd.h."""
_INFO = struct.Struct("=QQ11Ii")
_WANT_EXIT = 1 << 3


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since the boot; 0 if there is no such process."""
    fields = process_status(pid)
    return int(fields[START_TIME]) if fields else 0


def started_at(pid: int) -> float:
    """When the process started, in seconds since 1970; now, if there is no such process."""
    ticks, now = start_time(pid), time.time()
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return now - since_boot + ticks / os.sysconf("SC_CLK_TCK") if ticks else now


def open_process(pid: int, started: int) -> int:
    """A descriptor that becomes readable when this very process ends; -1 if it has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ESRCH, errno.EINVAL):
            raise
        return -1  # there is none, or no process can have this number
    # Compared after opening: the descriptor is of the process that has the number, and the start time shows whether it is
    # the one that is meant.
    if start_time(pid) == started:
        return descriptor
    os.close(descriptor)
    return -1


def readable(descriptor: int, timeout: float | None) -> bool:
    """Wait until a descriptor can be read; that of a process can once the process has ended. Returns whether it can."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def exit_status(pidfd: int, pid: int) -> int | None:
    """How a process ended that need not be our child, as a status of ``waitpid``; ``None`` if that is unknown."""
    answer = bytearray(_INFO.size)
    struct.pack_into("=Q", answer, 0, _WANT_EXIT)
    with contextlib.suppress(OSError):  # Linux before 6.15
        fcntl.ioctl(pidfd, _GET_INFO, answer)
        found = _INFO.unpack(answer)
        if found[0] & _WANT_EXIT:
            return int(found[13])
    fields = process_status(pid)  # known here as long as its parent has not reaped it
    return int(fields[EXIT_CODE]) if fields and fields[STATE] == "Z" else None


def peak_memory(pid: int) -> int:
    """The most memory that a process has had resident so far, in bytes; 0 once it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def kill_session(leader: int) -> None:
    """Kill what an ended process has left in the session that it led."""
    for entry in _all():
        if not entry.isdigit() or int(entry) == leader:
            continue
        fields = process_status(int(entry))
        if fields and int(fields[SESSION]) == leader and int(fields[GROUP]) == leader:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(entry), signal.SIGKILL)


def _all() -> list[str]:
    try:
        return os.listdir("/proc")
    except OSError:  # no descriptor left
        return []
