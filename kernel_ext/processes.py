"""What can be seen of a process of this host from outside, in words."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.system import process_state
from hvdlab.kernel_ext.output.crash import called
from hvdlab.kernel_ext.rank.dump import NAME, SIGNAL

DUMP_WITHIN = 0.2
"""Seconds that a process has to dump its stack."""

DUMP_EVERY = 10.0
"""Seconds between two dumps of a process: the signal breaks some system calls, and not all code expects that."""

BUSY = "no answer, probably C code keeps the interpreter to itself"

_LOOK = 0.005
_PROC = Path("/proc")


class Processes:
    """Looks at ranks' processes. Any thread."""

    def __init__(self) -> None:
        self._dumped: dict[int, tuple[float, str]] = {}  # process to the time and result of its last dump

    def look_at(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Why ranks do not answer, as it reads after ``rank 2: ``. Takes :data:`DUMP_WITHIN` seconds at most.

        Args:
            pids: Rank to its process.
        """
        found = {rank: look_at_state(pid) for rank, pid in pids.items()}
        busy = {rank: pids[rank] for rank, state in found.items() if not state}
        for rank, place in self._places(busy).items():
            found[rank] = f"{place}; {BUSY}" if place else BUSY
        return found

    def _places(self, pids: Mapping[int, int]) -> dict[int, str]:
        now = time.monotonic()
        known = {pid: found for pid, found in self._dumped.items() if found[0] > now - DUMP_EVERY}
        asked = {rank: pid for rank, pid in pids.items() if pid not in known}
        dumped = dumped_places(asked) if asked else {}
        known.update({pid: (now, dumped.get(rank, "")) for rank, pid in asked.items()})
        self._dumped = known
        return {rank: known[pid][1] for rank, pid in pids.items()}


def halted(pid: int, proc: Path = _PROC) -> str:
    """Why a process does not run and won't by itself; empty if it does."""
    state = process_state(pid, proc)
    if state == "T":
        return f"stopped (SIGSTOP); `kill -CONT {pid}` lets it go on"
    if state == "t":
        return "stopped by a debugger"
    return "its process has ended" if state in ("", "Z", "X") else ""


def look_at_state(pid: int, proc: Path = _PROC) -> str:
    """What keeps a process from running; empty if nothing does."""
    if process_state(pid, proc) == "D":
        return f"waits for a device or file system{_waits_in(pid, proc)}"
    return halted(pid, proc)


def _waits_in(pid: int, proc: Path) -> str:
    """The kernel function that the process waits in, in parentheses; empty if the kernel does not say."""
    try:
        name = (proc / f"{pid}/wchan").read_text()
    except OSError:
        return ""
    return f" ({name})" if name not in ("", "0") else ""


# -- stacks -----------------------------------------------------------------------------------------------------------


def dumped_places(pids: Mapping[int, int]) -> dict[int, str]:
    """Rank to the place that its dumped stack shows; ranks that dump none are missing."""
    with contextlib.ExitStack() as opened:
        files = {}
        for rank, pid in pids.items():
            with contextlib.suppress(OSError):
                files[rank] = os.fdopen(_find_file(pid), "rb+", buffering=0)
                opened.callback(files[rank].close)
                files[rank].truncate(0)
                os.kill(pid, SIGNAL)
        deadline, places = Deadline(DUMP_WITHIN), dict[int, str]()
        while len(places) < len(files) and deadline.remaining():
            # There is no event for a write to a file in memory.
            threading.Event().wait(_LOOK)
            for rank, file in files.items():
                file.seek(0)
                if place := called(file.read().decode("utf-8", "replace")):
                    places[rank] = place
        return places


def _find_file(pid: int) -> int:
    """The process's file for dumps, opened here. Raises ``OSError`` if it has none."""
    directory = Path(f"/proc/{pid}/fd")
    for entry in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(entry).startswith(f"/memfd:{NAME}"):
                return os.open(entry, os.O_RDWR | os.O_CLOEXEC)
    raise FileNotFoundError(f"process {pid} offers no dumps")
