"""The places in which ranks are, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from hvdlab.collectives.errors import call_name, format_ranks
from hvdlab.collectives.text import visible
from hvdlab.kernel_ext.wire.status import PendingNow, Stack, StackFrame

LONGEST_TEXT = 80
"""Characters shown of a line of code."""
MOST_LINES = 8
"""Lines with places below a line about missing ranks, at most."""

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
