"""How a process ended, in words; the end of what it wrote; and whether the kernel killed it for lack of memory."""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from hvdlab.launch.forkserver.messages import Exited

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


def describe(event: Exited) -> str:
    """``killed by SIGKILL``, ``segmentation fault``, ``exit code 3``, …"""
    if event.out_of_memory:
        return "out of memory, killed by the kernel"
    return describe_exit(event.code, event.signal)


def describe_exit(code: int, number: int) -> str:
    """The same for an exit code (-1 if it is unknown) and the number of a signal (0 for none)."""
    if number:
        return describe_signal(number)
    return f"exit code {code}" if code >= 0 else "exit status unknown"


def detail(event: Exited) -> str:
    """What else is known of a process's end: the most memory it had, and whether the kernel did not kill it for that."""
    least = "at least " if event.seen else ""
    known = [f"peak memory {least}{_memory(event.max_rss)}"] if event.max_rss else []
    if event.signal == signal.SIGKILL and not event.out_of_memory:
        known.append("not killed by the kernel for lack of memory")
    return ", ".join(known)


def describe_signal(number: int) -> str:
    """A signal that ended a process, in words."""
    try:
        known = signal.Signals(number)
    except ValueError:
        return f"killed by signal {number}"
    return _WORDS.get(known, f"killed by {known.name}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a program's process.

    Attributes:
        code: Exit code, if no signal ended it.
        signal: Number of the signal that ended it, or 0.
        text: If not empty, says better than the two how it ended (``its host was lost``).
    """

    code: int = 0
    signal: int = 0
    text: str = ""

    @property
    def ok(self) -> bool:
        return not self.code and not self.signal

    @property
    def exit_code(self) -> int:
        """What a shell would report: the code, or 128 and the signal's number."""
        return 128 + self.signal if self.signal else self.code

    def __str__(self) -> str:
        """For an operator: with the name of the signal, also where it has a meaning in words."""
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
    """The end of a text of any length, as it is reported."""
    return "\n".join(text[-TAIL_BYTES:].strip("\n").rstrip().splitlines()[-TAIL_LINES:])


class Tail:
    """The end of a stream: the last lines, in a bounded number of bytes."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self._pieces.append(data)
        self._size += len(data)
        while self._size - len(self._pieces[0]) >= TAIL_BYTES:
            self._size -= len(self._pieces.popleft())

    def text(self) -> str:
        """The last lines of the bytes that were kept, as text."""
        return last_lines(b"".join(self._pieces)[-TAIL_BYTES:].decode("utf-8", "replace"))


class OutOfMemoryCounter:
    """Counts the kernel's out-of-memory kills, in this process's control group if it can be read, else in all.

    Args:
        root: Where ``/proc`` and ``/sys`` are; tests pass a directory of their own.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._source = self._find(root)
        self._last = self._read()

    def increased(self) -> bool:
        """Whether there was a kill since the last call (or since construction)."""
        count = self._read()
        increased = count > self._last
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

    def _read(self) -> int:
        try:
            text = self._source.read_text()
        except OSError:
            return 0
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
        return 0
