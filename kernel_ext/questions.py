"""Questions to ranks and their answers, by ticket."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from hvdlab.collectives.deadline import Deadline
from hvdlab.kernel_ext.payloads import (
    TO_RANK,
    Completions,
    Done,
    Inspection,
    Payload,
    Status,
    Value,
    encode,
)

Answer = Done | Value | Status | Completions | Inspection


class Questions:
    """Sends payloads that carry a ticket, and waits for the ranks' answers.

    Args:
        post: ``post(topic, body, ranks)``.
    """

    def __init__(self, post: Callable[[str, bytes, Sequence[int]], None]) -> None:
        self._post = post
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._open: dict[int, tuple[set[int], dict[int, Answer]]] = {}

    def ask(
        self, make: Callable[[int], Payload], ranks: Sequence[int], deadline: Deadline
    ) -> dict[int, Answer]:
        """Ask these ranks and wait. Ranks that die or do not answer in time are missing from the result.

        Args:
            make: Makes the question of a ticket.
        """
        ticket = next(self._numbers)
        waiting, answers = set(ranks), dict[int, Answer]()
        with self._changed:
            self._open[ticket] = waiting, answers
        try:
            self._post(TO_RANK, encode(make(ticket)), tuple(ranks))
            with self._changed:
                self._changed.wait_for(lambda: not waiting, deadline.remaining())
                return dict(answers)
        finally:
            with self._changed:
                del self._open[ticket]

    def answered(self, rank: int, answer: Answer) -> None:
        """An answer came. Any thread; late ones are dropped."""
        with self._changed:
            waiting, answers = self._open.get(answer.ticket, (set(), {}))
            if rank in waiting:
                waiting.discard(rank)
                answers[rank] = answer
                self._changed.notify_all()

    def rank_died(self, rank: int) -> None:
        """Nobody waits for this rank any more. Any thread."""
        with self._changed:
            for waiting, _ in self._open.values():
                waiting.discard(rank)
            self._changed.notify_all()
