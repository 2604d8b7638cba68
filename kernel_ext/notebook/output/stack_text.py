"""The places in which ranks are, or were when they crashed, in words.

The place of a rank that lives comes from its stack; that of a dead one from the dump of Python's fault handler on its standard error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from hvdlab.collectives.errors import call_name
from hvdlab.collectives.text import format_ranks, visible
from hvdlab.kernel_ext.wire.status import PendingNow, Stack, StackFrame

LONGEST_TEXT = 80
"""Characters shown of a line of code."""
MOST_LINES = 8
"""Lines with places below a line about missing ranks, at most."""

CRASH_LINES = 8
"""Lines of text, and calls, of a rank that crashed, at most."""
LONGEST_LINE = 300
"""Characters of a line of its text."""

_CELL = "cell "


def short_place(stack: Stack) -> str:
    """Return one line: the cell's innermost line, and where the calls from there have led.

    ``cell [7] line 12 in train_step: loader.next() (at data/loader.py line 630 in __next__)``
    """
    if not stack.cell:
        return "it runs no cell"
    if stack.paused:
        return f"it is {stack.paused}" + (f", {_line(stack.frames[-1])}" if stack.frames else "")
    if not stack.frames:
        return "in no line of its cell: it is about to begin it, or to tell how it ended"
    own = next((f for f in reversed(stack.frames) if f.place.startswith(_CELL)), stack.frames[-1])
    text = f": {_code(own)}" if own.text else ""
    deepest = stack.frames[-1]
    beyond = f" (at {_line(deepest)})" if deepest is not own else ""
    return f"{_line(own)}{text}{beyond}"


def collective_of(stack: Stack) -> str:
    """``in allreduce `loss` for 14 s`` if the rank's oldest collective in flight is one of the cell's."""
    if not stack.pending:
        return ""
    oldest = max(stack.pending, key=lambda pending: pending.seconds)
    more = len(stack.pending) - 1
    others = f" and {more} more" if more else ""
    return f"in {call_name(oldest.collective, oldest.name)}{others} for {oldest.seconds:.0f} s"


def full_place(stack: Stack) -> list[str]:
    """Return all calls from the cell's line to the innermost, each with its line of code below it."""
    lines = []
    for frame in stack.frames:
        lines.append(_line(frame))
        if frame.text:
            lines.append(f"  {_code(frame)}")
    return lines


def grouped(places: Mapping[int, str], most: int = MOST_LINES) -> list[str]:
    """``rank 2: <place>`` for each place, ranks at the same one together; the rest counted if there are many."""
    by_place: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        by_place.setdefault(place, []).append(rank)
    lines = [f"{format_ranks(ranks)}: {visible(place)}" for place, ranks in by_place.items()]
    if len(lines) <= most:
        return lines
    rest = sorted(rank for ranks in list(by_place.values())[most - 1 :] for rank in ranks)
    return [*lines[: most - 1], f"{format_ranks(rest)}: at {len(lines) - most + 1} other places"]


def _line(frame: StackFrame) -> str:
    where = frame.place if frame.place.startswith(_CELL) else short_path(frame.place)
    of = "" if frame.function == "<module>" else f" in {frame.function}"
    return f"{where} line {frame.line}{of}"


def short_path(path: str) -> str:
    """Return the file and its directory: enough to tell files of one name apart."""
    return "/".join(PurePath(path).parts[-2:])


def _code(frame: StackFrame) -> str:
    return frame.text if len(frame.text) <= LONGEST_TEXT else f"{frame.text[:LONGEST_TEXT]}…"


def waits_in(pending: Sequence[PendingNow], collective: str, name: str) -> float | None:
    """For how many seconds this collective has been in flight on the rank; None if it is not."""
    return max((p.seconds for p in pending if (p.collective, p.name) == (collective, name)), default=None)


class RankLocations:
    """Where ranks are: their Python stacks, equal ones together, and the collectives they are in.

    Attributes:
        stacks: Rank to its answer.
        silent: Rank to the description of its process, for ranks that did not answer.
    """

    def __init__(self, stacks: Mapping[int, Stack], silent: Mapping[int, str] | None = None) -> None:
        self.stacks, self.silent = dict(sorted(stacks.items())), dict(sorted((silent or {}).items()))

    def __repr__(self) -> str:
        groups: dict[tuple[str, ...], list[int]] = {}
        for rank in sorted({*self.stacks, *self.silent}):
            groups.setdefault(tuple(self._place(rank)), []).append(rank)
        blocks = []
        for (head, *lines), ranks in groups.items():
            shown = [f"{format_ranks(ranks)}: {visible(head)}", *(f"  {visible(line)}" for line in lines)]
            blocks.append("\n".join(shown))
        return "\n".join(blocks)

    def lines(self, ranks: Sequence[int]) -> list[str]:
        """Return one line for each place where these ranks are."""
        return grouped(
            {r: short_place(self.stacks[r]) if r in self.stacks else self.silent[r] for r in ranks}
        )

    def _place(self, rank: int) -> list[str]:
        stack = self.stacks.get(rank)
        if stack is None:
            return [self.silent[rank]]
        if not stack.cell:
            return ["idle"]
        if stack.paused:
            return [stack.paused, *full_place(stack)]
        waits = [_call(pending) for pending in oldest_first(stack.pending)]
        if len(waits) > MOST_LINES:
            waits[MOST_LINES - 1 :] = [f"{len(waits) - MOST_LINES + 1} more"]
        return [f"in {', '.join(waits)}" if waits else "running", *full_place(stack)]


def _call(pending: PendingNow) -> str:
    return f"{call_name(pending.collective, pending.name)} for {pending.seconds:.0f} s"


def oldest_first(pending: Sequence[PendingNow]) -> list[PendingNow]:
    """Return the collectives in the order in which they were submitted."""
    return sorted(pending, key=lambda one: -one.seconds)


_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_CELL_FILE = re.compile(r"<cell (\[\d+\]|.*?)(?: #[0-9a-f]{6})?>\Z", re.DOTALL)
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
    said = [line[:LONGEST_LINE] for line in lines if line.strip() and not _DUMP.match(line)][-CRASH_LINES:]
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
        calls.append(_crash_call(*match.groups()))
    if len(calls) > CRASH_LINES:
        left_out = len(calls) - CRASH_LINES
        calls[CRASH_LINES // 2 : -CRASH_LINES // 2] = [f"… {left_out} calls between"]
    return calls


def called(dump: str) -> str:
    """``cell [4] line 5 in f``: the cell's innermost line in a complete dump of one thread; empty if there is none."""
    frames = [match for line in dump.splitlines() if (match := _FRAME.match(line)) is not None]
    # Outside of the cell come frames of hvdlab, which the dump has last: without them it is not complete yet.
    if not any("/hvdlab/kernel_ext/" in frame[1] for frame in frames):
        return ""
    for frame in frames:
        if (cell := _CELL_FILE.match(frame[1])) is not None:
            of = "" if frame[3] == "<module>" else f" in {frame[3]}"
            return f"cell {cell[1]} line {frame[2]}{of}"
    return ""


def _crash_call(file: str, line: str, function: str) -> str:
    cell = _CELL_FILE.match(file)
    where = f"Cell In{cell[1]}" if cell is not None else PurePath(file).name
    of = "" if function == "<module>" else f", in {function}"
    return f"{where}, line {line}{of}"
