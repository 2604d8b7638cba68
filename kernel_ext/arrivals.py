"""What has come of a cell from each rank: without gaps and without repetitions, whatever was sent again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from hvdlab.kernel_ext.payloads import CellDone, Left, Output


class Verdict(Enum):
    """What is to be done with a message."""

    TAKE = auto()
    DROP = auto()
    ASK = auto()
    """Drop it, and have the rank send again: what comes before it is missing."""


@dataclass(slots=True)
class _Part:
    """A rank's part of the cell: bytes received and taken, whether it was asked to send again, whether it has ended."""

    received: int = 0
    taken: int = 0
    asked: bool = False
    ended: bool = False


class Arrivals:
    """The messages of one cell. No I/O, and no lock."""

    def __init__(self, ranks: Iterable[int], before: Mapping[int, int] | None = None) -> None:
        """``before``: bytes of ranks' output that came, or were lost, before anything is looked at here."""
        known = before or {}
        self._parts = {rank: _Part(known.get(rank, 0), known.get(rank, 0)) for rank in ranks}

    def begin(self, ranks: Iterable[int]) -> None:
        """These ranks, as other processes than before if they were there, get the cell as well."""
        self._parts.update({rank: _Part() for rank in ranks})

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks whose part has not ended."""
        return tuple(rank for rank, part in self._parts.items() if not part.ended)

    def output(self, rank: int, message: Output) -> Verdict:
        """Output came."""
        part = self._parts.get(rank)
        if part is None or part.ended:
            return Verdict.DROP
        if message.before == part.received:
            part.received, part.asked = message.total, False
            return Verdict.TAKE
        return Verdict.DROP if message.before < part.received else self._ask(part)

    def done(self, rank: int, message: CellDone) -> Verdict:
        """The end came."""
        part = self._parts.get(rank)
        if part is None or part.ended:
            return Verdict.DROP
        if message.total > part.received:
            return self._ask(part)
        part.ended = True
        return Verdict.TAKE

    def left(self, rank: int, left: Left) -> tuple[int, Left] | None:
        """A rank has died and left this: bytes that are missing before the part that has not come, and that part.

        None if the end of its cell has come. What is still on its way will be a repetition.
        """
        part = self._parts.get(rank)
        if part is None or part.ended:
            return None
        rest = left.after(part.received)
        missing = max(0, rest.before - part.received)
        part.received = max(part.received, rest.total)
        return missing, rest

    def died(self, rank: int) -> None:
        """Nothing more comes from this rank."""
        part = self._parts.get(rank)
        if part is not None:
            part.ended = True

    def taken(self, rank: int, taken: int) -> None:
        """This much of a rank's output was taken."""
        self._parts[rank].taken = taken

    def asking(self, rank: int) -> tuple[int, int] | None:
        """Bytes received and taken, to ask this rank to send what follows; None if nothing is awaited from it."""
        part = self._parts.get(rank)
        if part is None or part.ended:
            return None
        part.asked = True
        return part.received, part.taken

    @staticmethod
    def _ask(part: _Part) -> Verdict:
        """Ask once: the answer comes after what is on its way."""
        first, part.asked = not part.asked, True
        return Verdict.ASK if first else Verdict.DROP
