"""Stacks of ranks with the frames below Python, read from outside by py-spy if it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError, format_ranks
from hvdlab.collectives.text import visible
from hvdlab.kernel_ext.output.places import short_path

WITHIN = 30.0
"""Seconds that py-spy has for a process; to read a large library's symbols takes some."""

# Parts of the file names of frames outside of the cell: of the interpreter's start, and of what runs a cell.
_HIDDEN = ("ipykernel", "IPython/", "asyncio/", "runpy.py", "hvdlab/kernel_ext/", "tornado/")


def program() -> str:
    """Where py-spy is. Raises ``InvalidRequestError`` if it is not installed."""
    found = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if found is None:
        raise InvalidRequestError("native frames are read by py-spy; `pip install py-spy` adds it")
    return found


def native_stacks(pids: Mapping[int, int], *, within: float = WITHIN) -> NativeStacks:
    """The stacks of the main threads of these processes of this host, by rank.

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
    main = next((t for t in threads if t.get("os_thread_id") == pid), threads[0] if threads else {})
    return _lines(main.get("frames", []))


def _lines(frames: list[dict[str, Any]]) -> tuple[str, ...]:
    """The frames from the cell's line to the innermost, a line each."""
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
