"""The last lines of a rank that crashed, without the threads and frames that are ours."""

from __future__ import annotations

import re
from pathlib import PurePath

MOST_LINES = 8
LONGEST_LINE = 300

_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_CELL = re.compile(r"<cell (\[\d+\]|.*?)(?: #[0-9a-f]{6})?>\Z", re.DOTALL)
_CRASHED = "Current thread"
_DUMP = re.compile(
    r"Thread 0x|Current thread|  File \"|  <|  \.\.\.|Extension modules: |Python runtime state: |Garbage-collecting"
    r"|  Binary file |Fatal Python error: (Segmentation fault|Aborted|Bus error|Floating[ -]point|Illegal instruction)"
)
"""Matches a line of the fault handler's dump, and those of its headings that only repeat how the process ended."""


def crash_lines(tail: str) -> list[str]:
    """Return the useful part of a dead rank's last lines on standard error, indented.

    Python's fault handler dumps every thread; of that, the calls from the cell down to the crash remain. Of all other
    text, such as an abort message of the C++ runtime, the last lines remain, whether they came before or after the dump.
    """
    lines = tail.splitlines()
    said = [line[:LONGEST_LINE] for line in lines if line.strip() and not _DUMP.match(line)][-MOST_LINES:]
    return [f"  {line}" for line in said] + [f"  {call}" for call in _calls(tail)]


def last_lines(tail: str, most: int) -> list[str]:
    """Return the last ``most`` lines; if they are of a dump of the fault handler, the calls of the thread that crashed instead, ours too."""
    lines = tail.splitlines()
    crashed = next((i for i, line in enumerate(lines) if line.startswith(_CRASHED)), None)
    if crashed is None:
        return lines[-most:]
    block = lines[crashed : crashed + most]
    return block[: block.index("")] if "" in block else block


def _calls(dump: str) -> list[str]:
    """Return the calls of the thread that crashed, innermost first, down to the cell's own line."""
    _, _, block = dump.partition(_CRASHED)
    calls: list[str] = []
    for line in block.splitlines()[1:]:
        match = _FRAME.match(line)
        if match is None or "/hvdlab/kernel_ext/" in match[1]:
            break
        calls.append(_call(*match.groups()))
    if len(calls) > MOST_LINES:
        left_out = len(calls) - MOST_LINES
        calls[MOST_LINES // 2 : -MOST_LINES // 2] = [f"… {left_out} calls between"]
    return calls


def called(dump: str) -> str:
    """``cell [4] line 5 in f``: the cell's innermost line in a complete dump of one thread; empty if there is none."""
    frames = [match for line in dump.splitlines() if (match := _FRAME.match(line)) is not None]
    # Outside of the cell come frames of hvdlab, which the dump has last: without them it is not complete yet.
    if not any("/hvdlab/kernel_ext/" in frame[1] for frame in frames):
        return ""
    for frame in frames:
        if (cell := _CELL.match(frame[1])) is not None:
            of = "" if frame[3] == "<module>" else f" in {frame[3]}"
            return f"cell {cell[1]} line {frame[2]}{of}"
    return ""


def _call(file: str, line: str, function: str) -> str:
    cell = _CELL.match(file)
    where = f"Cell In{cell[1]}" if cell is not None else PurePath(file).name
    of = "" if function == "<module>" else f", in {function}"
    return f"{where}, line {line}{of}"
