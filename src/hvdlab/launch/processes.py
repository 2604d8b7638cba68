"""Processes: Linux' records of those that are not our children, how a process ended, in words, and the end of its output."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import struct
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from hvdlab.collectives.system import EXIT_CODE, GROUP, SESSION, START_TIME, STATE, process_status
from hvdlab.launch.forkserver.messages import Exited

_GET_INFO = 0xC040FF0B
"""``PIDFD_GET_INFO`` with the first 64 bytes of ``struct pidfd_info``, of linux/pidfd.h."""
_INFO = struct.Struct("=QQ11Ii")
_WANT_EXIT = 1 << 3
"""``PIDFD_INFO_EXIT``: the caller asks for the exit status."""


def start_time(pid: int) -> int:
    """Return when the process started, in clock ticks since the boot; 0 if there is no such process."""
    fields = process_status(pid)
    return int(fields[START_TIME]) if fields else 0


def started_at(pid: int) -> float:
    """Return when the process started, in seconds since 1970; now, if there is no such process."""
    ticks, now = start_time(pid), time.time()
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return now - since_boot + ticks / os.sysconf("SC_CLK_TCK") if ticks else now


def open_process(pid: int, started: int) -> int:
    """Return a descriptor that becomes readable when this very process ends; -1 if it has ended.

    Raises:
        OSError: No descriptor is left, or none to read the start time.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ESRCH, errno.EINVAL):
            raise
        return -1  # there is none, or no process can have this number
    # Compared after opening: the descriptor is of the process that has the number, and the start time shows whether it is
    # the one that is meant.
    found = start_time(pid)
    if found == started:
        return descriptor
    try:
        if not found and not readable(descriptor, 0):
            # It lives. If its descriptor was the last one, -1 would make callers remove its files.
            os.close(os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
    finally:
        os.close(descriptor)
    return -1


def readable(descriptor: int, timeout: float | None) -> bool:
    """Wait until a descriptor can be read; that of a process can once the process has ended. Returns whether it can."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def exit_status(pidfd: int, pid: int) -> int | None:
    """Return how a process ended that need not be our child, as a status of ``waitpid``; ``None`` if that is unknown."""
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
    """Return the most memory that a process has had resident so far, in bytes; 0 once it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def kill_session(leader: int) -> None:
    """Kill the processes that an ended one has left in the session that it led."""
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


_WORDS = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error",
    signal.SIGABRT: "abort() was called",
    signal.SIGFPE: "arithmetic error",
    signal.SIGILL: "illegal instruction",
}
"""What these signals mean, for all launchers."""

TAIL_BYTES = 16 * 1024
TAIL_LINES = 100
"""Bytes and lines that are kept of the end of a process's output, at most."""


def describe(event: Exited) -> str:
    """Return a text such as ``killed by SIGKILL``, ``segmentation fault``, ``exit code 3``, …"""
    if event.out_of_memory:
        return "out of memory, killed by the kernel"
    return describe_exit(event.code, event.signal)


def describe_exit(code: int, number: int) -> str:
    """Return such a text for an exit code (-1 if it is unknown) and the number of a signal (0 for none)."""
    if number:
        return describe_signal(number)
    return f"exit code {code}" if code >= 0 else "exit status unknown"


def detail(event: Exited) -> str:
    """Return more on a process's end: the most memory it had, and whether the kernel did not kill it for that."""
    least = "at least " if event.seen else ""
    known = [f"peak memory {least}{_memory(event.max_rss)}"] if event.max_rss else []
    if event.signal == signal.SIGKILL and not event.out_of_memory:
        known.append("not killed by the kernel for lack of memory")
    return ", ".join(known)


def describe_signal(number: int) -> str:
    """Return a signal that ended a process, in words."""
    try:
        known = signal.Signals(number)
    except ValueError:
        return f"killed by signal {number}"
    return _WORDS.get(known, f"killed by {known.name}")


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """The end of a program's process.

    Attributes:
        code: Exit code, if no signal ended it.
        signal: Number of the signal that ended it, or 0.
        text: If not empty, describes its end better than the two (``its host was lost``).
    """

    code: int = 0
    signal: int = 0
    text: str = ""

    @property
    def ok(self) -> bool:
        return not self.code and not self.signal

    @property
    def exit_code(self) -> int:
        """Return the exit code as a shell reports it: the code, or 128 and the signal's number."""
        return 128 + self.signal if self.signal else self.code

    def __str__(self) -> str:
        """Return a text for an operator: with the name of the signal, also where it has a meaning in words."""
        if self.text:
            return self.text
        if not self.signal:
            return f"exit code {self.code}"
        try:
            known = signal.Signals(self.signal)
        except ValueError:
            return f"killed by signal {self.signal}"
        words = f" ({_WORDS[known]})" if known in _WORDS else ""
        return f"killed by {known.name}{words}"


def _memory(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def last_lines(text: str) -> str:
    """Return the end of a text of any length, as it is reported."""
    return "\n".join(text[-TAIL_BYTES:].strip("\n").rstrip().splitlines()[-TAIL_LINES:])


class OutputTail:
    """The end of a stream: the last lines, in a bounded number of bytes."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def add(self, data: bytes) -> None:
        """Add the next bytes."""
        self._pieces.append(data)
        self._size += len(data)
        while self._size - len(self._pieces[0]) >= TAIL_BYTES:
            self._size -= len(self._pieces.popleft())

    @property
    def data(self) -> bytes:
        """Return the last bytes, at most ``TAIL_BYTES``."""
        return b"".join(self._pieces)[-TAIL_BYTES:]

    def text(self) -> str:
        """Return the last lines of :attr:`data` as text."""
        return last_lines(self.data.decode("utf-8", "replace"))


class OutOfMemoryCounter:
    """Counter of the kernel's out-of-memory kills, in this process's control group if it can be read, otherwise in all.

    Args:
        root: Where ``/proc`` and ``/sys`` are; tests pass a directory of their own.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._source = self._find(root)
        #: The count at the last read that succeeded; ``None`` before one has.
        self._last = self._read()

    def increased(self) -> bool:
        """Return whether there was a kill since the last call (or since construction)."""
        count = self._read()
        if count is None:
            return False
        increased = self._last is not None and count > self._last
        self._last = count
        return increased

    @staticmethod
    def _find(root: Path) -> Path:
        try:
            lines = (root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            lines = []
        groups = root / "sys/fs/cgroup"
        candidates: list[Path] = []
        for line in lines:
            _, controllers, group = [*line.split(":", 2), "", ""][:3]
            if not controllers:
                candidates.append(groups / group.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                candidates.append(groups / "memory" / group.lstrip("/") / "memory.oom_control")
        # Inside a container the group's own directory is often mounted at the top.
        candidates += [groups / "memory.events", groups / "memory/memory.oom_control"]
        return next((path for path in candidates if path.exists()), root / "proc/vmstat")

    def _read(self) -> int | None:
        """Return the kernel's count; ``None`` if it can't be read, such as when this process may open no more files."""
        try:
            text = self._source.read_text()
        except OSError:
            return None  # not 0: all earlier kills would be new ones at the next read
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
        return 0
