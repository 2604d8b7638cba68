"""Interrupting the ranks of a cell, and what becomes of those that do not answer. No I/O.

The first interrupt goes to all ranks. A line names each that has not answered after :data:`PATIENCE` seconds, and where it is.
The next interrupt is the last: it goes to the ranks that are left, and soon the run ends without them.
"""

from __future__ import annotations

from collections.abc import Collection

from hvdlab.collectives.errors import format_ranks
from hvdlab.kernel_ext.cells.events import Effect, InterruptRanks, Note
from hvdlab.kernel_ext.cells.places import ANSWER_WITHIN, SEEN_WITHIN, Places
from hvdlab.kernel_ext.output.places import grouped

PATIENCE = 1.7
"""Seconds after an interrupt until a line names the ranks that have not answered: we promise users that within two."""

ASK_BEFORE = ANSWER_WITHIN + SEEN_WITHIN
"""Seconds before that moment at which they are asked where they are."""

LAST_CHANCE = 1.0
"""Seconds between the last interrupt and giving up; enough to find out where the ranks are."""

AFTER_TIMEOUT = 10.0
"""Seconds after a time limit until ranks that do not answer its interrupt are given up: no user may be there to do it."""


class Interrupts:
    """The interrupts of one cell.

    Attributes:
        requests: How often the user interrupted.
        stopped: Ranks that were interrupted.
        gave_up: Whether the run no longer waits for the ranks that are left.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self.requests = 0
        self.stopped: set[int] = set()
        self.gave_up = False
        self._ask_at: float | None = None
        self._name_at: float | None = None
        self._give_up_at: float | None = None
        self._because = ""
        self._named = False

    @property
    def deadline(self) -> float | None:
        """When to call :meth:`time`."""
        limits = [t for t in (self._ask_at, self._name_at, self._give_up_at) if t is not None]
        return min(limits, default=None)

    def stop(self, running: Collection[int], now: float, because: str = "") -> list[Effect]:
        """Interrupt the ranks that have not ended the cell; ``because`` says why, unless the user asked for it."""
        self._because = because
        self.stopped |= set(running)
        if self._name_at is None and self._give_up_at is None:
            self._ask_at, self._name_at = now + PATIENCE - ASK_BEFORE, now + PATIENCE
        return [InterruptRanks(tuple(sorted(running)))]

    def time_is_up(self, running: Collection[int], now: float) -> list[Effect]:
        """The cell's time limit was reached: interrupt, and in the end give up without another interrupt by the user."""
        self._give_up_at = now + AFTER_TIMEOUT
        effects = self.stop(running, now)
        self._ask_at, self._name_at = now + PATIENCE - ASK_BEFORE, now + PATIENCE
        return effects

    def requested(self, running: Collection[int], now: float) -> list[Effect]:
        """The user wants the cell to end."""
        self.requests += 1
        if self.requests == 1 and not self._named:
            return self.stop(running, now)
        if self.requests > 2:
            self.gave_up = True
            return []
        # A user that clicks twice in a hurry has not seen yet that the first interrupt works: that gets its full time.
        earliest = self._name_at if self._name_at is not None else now
        self._give_up_at = max(now + LAST_CHANCE, earliest)
        self._ask_at = self._name_at = None
        return [*self.stop(running, now), *self._places.ask(running, now)]

    def time(self, running: Collection[int], now: float) -> list[Effect]:
        """The deadline was reached."""
        effects: list[Effect] = []
        if self._ask_at is not None and now >= self._ask_at:
            self._ask_at = None
            effects += self._places.ask(running, now)
        if self._name_at is not None and now >= self._name_at:
            self._name_at = None
            effects.append(Note(self._unanswered(running), warning=True))
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            self.gave_up = True
        return effects

    def _unanswered(self, running: Collection[int]) -> str:
        """Names the ranks that have not answered; from then on the next interrupt gives them up."""
        self._named = True
        late = tuple(sorted(running))
        said = f"{format_ranks(late)} {'has' if len(late) == 1 else 'have'} not answered the interrupt"
        if self._because:
            said = f"{self._because}, and {said}"
        remedy = f"interrupt{' again' if self.requests else ''} to stop waiting"
        places = grouped({rank: self._places.text(rank) for rank in late})
        return "\n".join([f"{said}; {remedy}", *(f"  {place}" for place in places)])
