"""Which ranks take part in an elastic cell: they join it while it runs, are lost, and are let go. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvdlab.collectives.errors import InvalidRequestError, format_ranks
from hvdlab.kernel_ext.wire.cells import CellDone


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many ranks an elastic cell may have.

    Attributes:
        at_least: With fewer its training waits, until lost ranks are replaced or the user interrupts it.
        at_most: The pool does not grow beyond that while it runs; None for no limit.
    """

    at_least: int = 1
    at_most: int | None = None

    def check(self) -> None:
        """Raise ``InvalidRequestError`` if no number of ranks is within."""
        if self.at_most is not None and self.at_least > self.at_most:
            raise InvalidRequestError(
                f"--min-np {self.at_least} is more than --max-np {self.at_most}; no number of ranks is both."
            )

    def check_size(self, size: int, label: str = "") -> None:
        """Raise ``InvalidRequestError`` if a pool of this size is not within, for the cell that users call ``label``."""
        cell = f"cell {label}" if label else "the elastic cell"
        if self.at_most is not None and size > self.at_most:
            raise InvalidRequestError(
                f"{size} ranks are more than --max-np {self.at_most} of {cell}; run it with a larger one."
            )
        if size < self.at_least:
            raise InvalidRequestError(
                f"{size} {'rank is' if size == 1 else 'ranks are'} fewer than --min-np {self.at_least} of {cell}; its "
                "training would only wait. Interrupt it first, or run it with a smaller one."
            )


class Participants:
    """The ranks of an elastic cell over time.

    Args:
        bounds: How many ranks there may be.

    Attributes:
        released: Ranks that leave at their next commit, since the user has made the pool smaller.
        ended: Whether a rank has come to the end of the cell: ranks that were lost are then not missed.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.released: set[int] = set()
        self.ended = False
        self._too_few = False  # whether a line has said that too few ranks are left

    def joined(self, ranks: Sequence[int], running: Collection[int]) -> str:
        """Return the line that says that ranks begin the cell; ``running`` includes them."""
        self.released.difference_update(ranks)
        self._too_few = len(running) < self.bounds.at_least
        joins = "joins" if len(ranks) == 1 else "join"
        waits = f"; {self._waiting(running)}" if self._too_few else ""
        return f"{format_ranks(ranks)} {joins} at the others' next commit{waits}"

    def leaving(self, ranks: Sequence[int]) -> str:
        """Return the line that says that ranks are let go."""
        self.released.update(ranks)
        leave = "leaves" if len(ranks) == 1 else "leave"
        return f"{format_ranks(ranks)} {leave} at the next commit"

    def left(self, rank: int, done: CellDone | None) -> bool:
        """A rank's part is over; ``done`` is None if all that is known is that it has left. Returns whether it was let go."""
        if done is None:
            return rank in self.released
        self.ended = self.ended or done.error is None
        stopped = done.error is not None and (
            done.error.aborted or done.error.ename in ("SystemExit", "KeyboardInterrupt")
        )
        return rank in self.released and stopped

    def lost(self, running: Collection[int]) -> str:
        """Ranks have died. Returns the line that says that too few are left, the first time; else an empty text."""
        if self.ended or self._too_few or not running or len(running) >= self.bounds.at_least:
            return ""
        self._too_few = True
        return self._waiting(running)

    def _waiting(self, running: Collection[int]) -> str:
        left, are = len(running), "is" if len(running) == 1 else "are"
        return (
            f"{left} of at least {self.bounds.at_least} ranks {are} left: training waits until `%hvd_pool repair` has "
            "replaced the lost ones, or the cell is interrupted"
        )
