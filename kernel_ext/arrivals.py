"""Which messages of a cell have come from each rank, so that its output has no gaps and no repetitions after a retransmit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from hvdlab.kernel_ext.wire.cells import CellDone, Left, Output


class Verdict(Enum):
    """What the pool does with a message."""

    TAKE = auto()
    DROP = auto()
    ASK = auto()
    """Drop it, and have the rank retransmit: what comes before it is missing."""


@dataclass(slots=True)
class _Part:
    """A rank's part of the cell: bytes received and taken, whether the rank was asked to retransmit, whether it has ended."""

    received: int = 0
    taken: int = 0
    asked: bool = False
    ended: bool = False


class Arrivals:
    """The messages of one cell. No I/O, and no lock."""

    def __init__(self, ranks: Iterable[int], before: Mapping[int, int] | None = None) -> None:
        """``before``: rank to the bytes of its output that came, or were lost, before this object was made."""
        known = before or {}
        self._parts = {rank: _Part(known.get(rank, 0), known.get(rank, 0)) for rank in ranks}

    def begin(self, ranks: Iterable[int]) -> None:
        """These ranks get the cell as well. One that had it before is a new process, so its count begins anew."""
        self._parts.update({rank: _Part() for rank in ranks})

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks whose part has not ended."""
        return tuple(rank for rank, part in self._parts.items() if not part.ended)

    def output(self, rank: int, message: Output) -> Verdict:
        """What to do with output that came from a rank."""
        part = self._parts.get(rank)
        if part is None or part.ended:
            return Verdict.DROP
        if message.before == part.received:
            part.received, part.asked = message.total, False
            return Verdict.TAKE
        return Verdict.DROP if message.before < part.received else self._ask(part)

    def done(self, rank: int, message: CellDone) -> Verdict:
        """What to do with the end of the cell that came from a rank."""
        part = self._parts.get(rank)
        if part is None or part.ended:
            return Verdict.DROP
        if message.total > part.received:
            return self._ask(part)
        part.ended = True
        return Verdict.TAKE

    def left(self, rank: int, left: Left) -> tuple[int, Left] | None:
        """A rank has died and left this output. Returns how many bytes before it are missing, and the part that has not come.

        None if the end of its cell has come. From then on what is still on its way from the rank counts as a repetition.
        """
        part = self._parts.get(rank)
        if part is None or part.ended:
            return None
        rest = left.after(part.received)
        missing = max(0, rest.before - part.received)
        part.received = max(part.received, rest.total)
        return missing, rest

    def died(self, rank: int) -> None:
        """Expect nothing more from this rank."""
        part = self._parts.get(rank)
        if part is not None:
            part.ended = True

    def taken(self, rank: int, taken: int) -> None:
        """The sink has taken this many bytes of a rank's output."""
        self._parts[rank].taken = taken

    def asking(self, rank: int) -> tuple[int, int] | None:
        """Bytes received and taken, to ask this rank to send what follows; None if its part has ended."""
        part = self._parts.get(rank)
        if part is None or part.ended:
            return None
        part.asked = True
        return part.received, part.taken

    @staticmethod
    def _ask(part: _Part) -> Verdict:
        """Ask once: messages that were on their way arrive first, and the answer after them."""
        first, part.asked = not part.asked, True
        return Verdict.ASK if first else Verdict.DROP
