"""How a process ended, in words; and whether the kernel killed it for lack of memory."""

from __future__ import annotations

import signal
from pathlib import Path

from hvdlab.launch.forkserver.messages import Exited

_WORDS = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error",
    signal.SIGABRT: "aborted by abort()",
    signal.SIGFPE: "arithmetic error (SIGFPE)",
    signal.SIGILL: "illegal instruction",
}


def describe(event: Exited) -> str:
    """``killed by SIGKILL``, ``segmentation fault``, ``exit code 3``, …"""
    if event.out_of_memory:
        return "out of memory, killed by the kernel"
    if event.signal:
        return describe_signal(event.signal)
    return f"exit code {event.code}" if event.code >= 0 else "exit status unknown"


def detail(event: Exited) -> str:
    """What else is known of a process's end: the most memory it had, and who did not kill it."""
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


def _memory(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


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
