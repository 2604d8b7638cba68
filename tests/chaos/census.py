"""Census of processes, descriptors, threads, shared memory and files, so that leaks can be seen."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from support import shared_memory as shared

MARK = "HVDLAB_CHAOS"
"""Variable by which everything that a campaign started is found again, whoever its parent is by now."""

Count = dict[str, int]


def marked(value: str, variable: str = MARK) -> dict[int, str]:
    """Return processes with this mark in their environment, this one left out: id and name."""
    needle = f"{variable}={value}".encode()
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if needle not in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                continue
            status = Path(f"/proc/{entry}/stat").read_text()
            if status.rpartition(")")[2].split()[0] != "Z":
                found[int(entry)] = command(int(entry))
        except OSError:  # it has ended since the listing, or belongs to another user
            continue
    return found


def command(pid: int) -> str:
    """Return a process's name and, if it is a Python module, which."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone"
    return f"{name} {words[words.index('-m') + 1]}" if "-m" in words[:-1] else name


def holdings(pid: int) -> Count:
    """Return descriptors by kind, and threads, of a process."""
    count: Counter[str] = Counter()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                count[_kind(os.readlink(f"/proc/{pid}/fd/{fd}"))] += 1
            except OSError:  # closed since the listing
                continue
        count["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # the process has ended
        return {}
    return dict(count)


def _kind(target: str) -> str:
    if target.startswith(("socket:", "pipe:")):
        return target.partition(":")[0]
    if target.startswith("anon_inode:"):
        return target.partition(":")[2].strip("[]")
    return "memfd" if target.startswith("/memfd:") else "file"


def more(now: Count, before: Count) -> Count:
    """Return the resources that have grown."""
    return {kind: n - before.get(kind, 0) for kind, n in now.items() if n > before.get(kind, 0)}


def shared_memory() -> set[str]:
    return shared.entries()


def left_in_memory(before: set[str], mark: str) -> list[str]:
    """Return entries that came into shared memory since and are there still, unless processes outside this campaign use
    them."""
    found = shared.left(before, {os.getpid(), *marked(mark)})
    return [f"/dev/shm/{name}" for name in sorted(found)]


def files(directory: Path) -> set[str]:
    """Return entries of a directory, and of those in it."""
    return (
        {str(path.relative_to(directory)) for path in directory.rglob("*")} if directory.exists() else set()
    )


def settled(remaining: Callable[[], bool], seconds: float, pause: float = 0.01) -> bool:
    """Whether ``remaining``, which is asked every ``pause`` seconds, becomes false within this time."""
    deadline = time.monotonic() + seconds
    while remaining():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
