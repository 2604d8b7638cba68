"""One round of questions to ranks about where they are: those asked, those that answered, those to be looked at."""

from __future__ import annotations

from collections.abc import Iterable

from hvdlab.kernel_ext.notebook.cells.cell_events import AskStacks, Effect, LookAt
from hvdlab.kernel_ext.notebook.output.stack_text import short_place
from hvdlab.kernel_ext.wire.status import Stack

ANSWER_WITHIN = 0.6
"""Seconds that a rank has to answer; its control thread does, unless something holds the whole process."""

SEEN_WITHIN = 0.3
"""Seconds after which nothing more is expected from a look at a process."""


class ProbeRound:
    """One round of questions after the other. No I/O.

    Attributes:
        answers: Answers of ranks in this round.
        deadline: When the round goes on by itself; None if it is over.
    """

    def __init__(self) -> None:
        self.answers: dict[int, Stack] = {}
        self.deadline: float | None = None
        self._asked: frozenset[int] = frozenset()
        self._seen: dict[int, str] = {}
        self._seen_now: set[int] = set()
        self._last: dict[int, str] = {}
        self._looking = False

    def ask(self, ranks: Iterable[int], now: float) -> list[Effect]:
        """Begin a round. The last round's findings are forgotten, except those about processes of silent ranks."""
        self._asked = frozenset(ranks)
        self.answers = {}
        self._seen_now = set()
        self._seen = {rank: text for rank, text in self._seen.items() if rank in self._asked}
        self._looking = False
        self.deadline = now + ANSWER_WITHIN
        return [AskStacks(tuple(sorted(self._asked)))]

    @property
    def running(self) -> bool:
        """Return whether a round is under way."""
        return self.deadline is not None

    def answered(self, rank: int, stack: Stack) -> bool:
        """Record a rank's answer. Returns True if that ends the round."""
        if rank not in self._asked:
            return False
        self.answers[rank] = stack
        self._seen.pop(rank, None)
        if stack.frames:
            self._last[rank] = short_place(stack)
        return self._all_known()

    def seen(self, rank: int, text: str) -> bool:
        """Record the finding of a look at a rank's process. Returns True if that ends the round."""
        if rank not in self._asked or rank in self.answers:
            return False
        self._seen[rank] = text
        self._seen_now.add(rank)
        return self._all_known()

    def time(self) -> tuple[bool, list[Effect]]:
        """Handle the deadline. Returns whether the round is over, and the effects to carry out."""
        assert self.deadline is not None
        silent = tuple(sorted(self._asked - set(self.answers) - self._seen_now))
        if self._looking or not silent:
            self.deadline = None
            return True, []
        self._looking = True
        self.deadline += SEEN_WITHIN
        return False, [LookAt(silent)]

    def gone(self, rank: int) -> None:
        """Expect nothing from this rank any more."""
        self._asked -= {rank}
        self._seen.pop(rank, None)

    def text(self, rank: int) -> str:
        """Return where a rank is, in words."""
        stack = self.answers.get(rank)
        if stack is not None:
            return short_place(stack)
        seen, last = self._seen.get(rank, "it does not answer"), self._last.get(rank)
        return seen if last is None or seen.startswith("cell ") else f"{seen}; it was last at {last}"

    def _all_known(self) -> bool:
        if self.deadline is None or self._asked - set(self.answers) - self._seen_now:
            return False
        self.deadline = None
        return True
