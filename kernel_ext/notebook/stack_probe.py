"""Probes of where ranks are: their own answer, or a look at the processes of those that can't answer.

Frames below Python are read from outside by py-spy, if it is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.system import process_state
from hvdlab.collectives.text import format_ranks, visible
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.cells.cell_events import ProcessSeen, StackArrived
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.output.stack_text import called, short_path
from hvdlab.kernel_ext.notebook.requests import RankDirectory, RankMail, RankRequests
from hvdlab.kernel_ext.wire.channel import RankReply
from hvdlab.kernel_ext.wire.codec import TO_RANK, encode
from hvdlab.kernel_ext.wire.status import NAME, SIGNAL, AskStack, Stack

ELSEWHERE = "it does not answer"


class StackProbe:
    """Probe of the ranks of one pool: asks them for their stacks, and looks at their processes.

    Args:
        mail: Sends the requests for stacks.
        requests: Hands out tickets, and answers.
        ranks: Knows the processes of ranks on this host.
    """

    def __init__(self, mail: RankMail, requests: RankRequests, ranks: RankDirectory) -> None:
        self._mail, self.requests, self._ranks = mail, requests, ranks
        self._processes = Processes()

    def watch(self) -> CellProbe:
        """Return the probe of one cell."""
        return CellProbe(self)

    def ask(self, ticket: int, ranks: Sequence[int]) -> None:
        self._mail.post(TO_RANK, encode(AskStack(ticket)), ranks)

    def describe_processes(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return rank to the reason why it does not answer. Any thread; takes a moment."""
        pids = {rank: pid for rank in ranks if (pid := self._ranks.local_pid(rank)) is not None}
        return {**dict.fromkeys(ranks, ELSEWHERE), **self._processes.describe(pids)}

    def halted(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return those of these ranks that can't answer since their process is stopped, each with a text on that. Any thread."""
        pids = {rank: pid for rank in ranks if (pid := self._ranks.local_pid(rank)) is not None}
        return {rank: text for rank, pid in pids.items() if (text := halted(pid))}


class CellProbe:
    """Probe on behalf of one cell. Any thread.

    Attributes:
        handle: Handle of the cell, which takes the findings, as events. It is there before the first request.
    """

    handle: CellHandle

    def __init__(self, probe: StackProbe) -> None:
        self._probe = probe
        self._ticket = probe.requests.subscribe(self._answered)

    def request_stacks(self, ranks: Sequence[int]) -> None:
        """Ask ranks for their stacks: :class:`StackArrived` has each answer, :class:`ProcessSeen` the reason why there is none."""
        self._probe.ask(self._ticket, ranks)
        # A stopped process can't answer before it goes on: its state is the finding.
        for rank, text in self._probe.halted(ranks).items():
            self.handle.post(ProcessSeen(rank, text))

    def probe_processes(self, ranks: Sequence[int]) -> None:
        """Look at ranks' processes; the findings come as :class:`ProcessSeen`. Does not block."""
        # On another thread: a dump can need all of `DUMP_WITHIN`, and the caller drives the cell.
        thread = threading.Thread(target=self._look, args=(tuple(ranks),), name="hvdlab-look", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: the cell goes on, and says less about its ranks
            for rank in ranks:
                self.handle.post(ProcessSeen(rank, ELSEWHERE))

    def _look(self, ranks: Sequence[int]) -> None:
        for rank, text in self._probe.describe_processes(ranks).items():
            self.handle.post(ProcessSeen(rank, text))

    def close(self) -> None:
        """Take no more answers."""
        self._probe.requests.unsubscribe(self._ticket)

    def _answered(self, rank: int, answer: RankReply) -> None:
        if isinstance(answer, Stack):
            self.handle.post(StackArrived(rank, answer))


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

    def describe(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Return why ranks do not answer, as it reads after ``rank 2: ``. Takes :data:`DUMP_WITHIN` seconds at most.

        Args:
            pids: Rank to its process.
        """
        found = {rank: describe_state(pid) for rank, pid in pids.items()}
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
        # Replaced as a whole: probes of several cells run at once.
        self._dumped = known
        return {rank: known[pid][1] for rank, pid in pids.items()}


def halted(pid: int, proc: Path = _PROC) -> str:
    """Return why a process does not run and won't by itself; empty if it does."""
    state = process_state(pid, proc)
    if state == "T":
        return f"stopped (SIGSTOP); `kill -CONT {pid}` lets it go on"
    if state == "t":
        return "stopped by a debugger"
    return "its process has ended" if state in ("", "Z", "X") else ""


def describe_state(pid: int, proc: Path = _PROC) -> str:
    """Return the reason why a process does not run; empty if it does."""
    if process_state(pid, proc) == "D":
        return f"waits for a device or file system{_waits_in(pid, proc)}"
    return halted(pid, proc)


def _waits_in(pid: int, proc: Path) -> str:
    """Return the kernel function that the process waits in, in parentheses; empty if that can't be read."""
    try:
        name = (proc / f"{pid}/wchan").read_text()
    except OSError:
        return ""
    return f" ({name})" if name not in ("", "0") else ""


# -- stacks -----------------------------------------------------------------------------------------------------------


def dumped_places(pids: Mapping[int, int]) -> dict[int, str]:
    """Return rank to the place that its dumped stack shows; ranks that dump none are missing."""
    with contextlib.ExitStack() as opened:
        files = {}
        for rank, pid in pids.items():
            with contextlib.suppress(OSError):
                files[rank] = os.fdopen(_find_file(pid), "rb+", buffering=0)
                opened.callback(files[rank].close)
                # Before the signal, which the process answers at once: an old dump would pass for the new one.
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
    """Return the process's file for dumps, opened here. Raises ``OSError`` if it has none."""
    directory = Path(f"/proc/{pid}/fd")
    for entry in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(entry).startswith(f"/memfd:{NAME}"):
                return os.open(entry, os.O_RDWR | os.O_CLOEXEC)
    raise FileNotFoundError(f"process {pid} offers no dumps")


PY_SPY_WITHIN = 30.0
"""Seconds that py-spy has for a process; to read a large library's symbols takes some."""

# Parts of the file names of frames outside of the cell: of the interpreter's start, and of the code that runs a cell.
_HIDDEN = ("ipykernel", "IPython/", "asyncio/", "runpy.py", "hvdlab/kernel_ext/", "tornado/")


def program() -> str:
    """Return where py-spy is. Raises ``InvalidRequestError`` if it is not installed."""
    found = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if found is None:
        raise InvalidRequestError("native frames are read by py-spy; `pip install py-spy` adds it")
    return found


def native_stacks(pids: Mapping[int, int], *, within: float = PY_SPY_WITHIN) -> NativeStacks:
    """Return the stacks of the main threads of these processes of this host, by rank.

    Raises:
        InvalidRequestError: py-spy is not installed.
    """
    path = program()
    with ThreadPoolExecutor(max(1, min(8, len(pids)))) as pool:
        found = pool.map(lambda pid: _dump(path, pid, within), pids.values())
    return NativeStacks(dict(zip(pids, found, strict=True)))


def _dump(path: str, pid: int, within: float) -> tuple[str, ...]:
    command = [path, "dump", "--native", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within, check=False)
    except subprocess.TimeoutExpired:
        return (f"py-spy took longer than {within:.0f} s",)
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        hint = "; `sysctl kernel.yama.ptrace_scope=0` may allow it" if "ermission" in done.stderr else ""
        return (f"py-spy failed: {said[0] if said else done.returncode}{hint}",)
    threads = json.loads(done.stdout)
    # Linux gives the main thread the number of its process.
    main = next((t for t in threads if t.get("os_thread_id") == pid), threads[0] if threads else {})
    return _lines(main.get("frames", []))


def _lines(frames: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the frames from the cell's line to the innermost, a line each."""
    lines: list[str] = []
    for frame in reversed(frames):
        file = frame.get("filename") or frame.get("module") or ""
        if any(part in file for part in _HIDDEN):
            lines.clear()
            continue
        where = file if file.startswith("<") else short_path(file)
        line = f" line {frame['line']}" if frame.get("line") else ""
        lines.append(f"{frame.get('name', '?')} ({where}{line})")
    return tuple(lines) or ("idle",)


class NativeStacks:
    """Stacks with native frames, equal ones together.

    Attributes:
        stacks: Rank to its frames, the innermost last.
    """

    def __init__(self, stacks: Mapping[int, tuple[str, ...]]) -> None:
        self.stacks = dict(sorted(stacks.items()))

    def __repr__(self) -> str:
        groups: dict[tuple[str, ...], list[int]] = {}
        for rank, lines in self.stacks.items():
            groups.setdefault(lines, []).append(rank)
        return "\n".join(
            "\n".join(
                [f"{format_ranks(ranks)}, with native frames:", *(f"  {visible(line)}" for line in lines)]
            )
            for lines, ranks in groups.items()
        )
