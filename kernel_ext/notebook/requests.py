"""Requests to ranks and their answers, by ticket."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.wire.channel import Payload, RankReply, RankRequest
from hvdlab.kernel_ext.wire.codec import TO_RANK, encode

A = TypeVar("A", bound=RankReply)


@dataclass(slots=True)
class _Question:
    body: bytes
    waiting: set[int]
    answers: dict[int, RankReply] = field(default_factory=dict)


class RankMail(Protocol):
    """Mail to ranks. Does not block, and does nothing while there is no coordinator."""

    def post(self, topic: str, body: bytes, ranks: Sequence[int]) -> None:
        """Send mail to these ranks."""
        ...


class RankDirectory(Protocol):
    """Directory of a pool's ranks."""

    def loss_reason(self, rank: int) -> str:
        """Return the reason why a rank takes no cells any more; empty if it lives."""
        ...

    def losses(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return those of these ranks that take no cells any more, with the reasons."""
        ...

    def local_pid(self, rank: int) -> int | None:
        """Return the process of a rank on this host; None if it runs elsewhere."""
        ...


class RankRequests:
    """Requests to ranks: each carries a ticket, by which the ranks' answers are matched.

    Args:
        mail: Sends the requests.
        ranks: Knows which ranks are lost; if one is lost later, the caller calls :meth:`rank_died`. None if all live.
    """

    def __init__(self, mail: RankMail, ranks: RankDirectory | None = None) -> None:
        self._mail, self._ranks = mail, ranks
        # From a random number on: a rank may still have questions of the process that had the pool before.
        self._numbers = itertools.count(1 + (secrets.randbits(30) << 16))
        self._changed = threading.Condition()
        # Ticket to a request that `ask` waits for.
        self._open: dict[int, _Question] = {}
        # Ticket to the subscriber of its answers.
        self._followed: dict[int, Callable[[int, RankReply], None]] = {}

    def subscribe(self, take: Callable[[int, RankReply], None]) -> int:
        """Return a ticket for questions that are asked again and again: ``take(rank, answer)`` gets every answer.

        It is called on the client's thread and must not block. Such questions are not repeated when mail was lost.
        """
        ticket = next(self._numbers)
        self._followed[ticket] = take
        return ticket

    def unsubscribe(self, ticket: int) -> None:
        """End :meth:`subscribe`: drop further answers. Any thread."""
        self._followed.pop(ticket, None)

    def ask(
        self, make: Callable[[int], RankRequest], ranks: Sequence[int], deadline: Deadline
    ) -> dict[int, RankReply]:
        """Ask these ranks and wait. Ranks that die or do not answer in time are missing from the result.

        Args:
            make: Makes the question, given its ticket.
        """
        ticket = next(self._numbers)
        question = _Question(encode(make(ticket)), set(ranks))
        # Before the question is sent: an answer can come at once, on the client's thread.
        with self._changed:
            self._open[ticket] = question
        try:
            self._mail.post(TO_RANK, question.body, tuple(ranks))
            with self._changed:
                # Deaths from before the question was registered; rank_died() handles those from now on.
                question.waiting.difference_update([rank for rank in question.waiting if self._is_lost(rank)])
                deadline.wait_for(self._changed, lambda: not question.waiting)
                return dict(question.answers)
        finally:
            with self._changed:
                del self._open[ticket]

    def ask_for(
        self, kind: type[A], make: Callable[[int], RankRequest], ranks: Sequence[int], deadline: Deadline
    ) -> dict[int, A]:
        """Ask these ranks and wait, as :meth:`ask` does, and return the answers of one kind, in the order of ranks.

        Args:
            kind: The class of the answers; a rank that answers otherwise, as with an error, is missing from the result.
        """
        answers = self.ask(make, ranks, deadline)
        return {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, kind)}

    def send(self, payload: Payload, ranks: Sequence[int]) -> None:
        """Send a payload that needs no answer, and may get lost."""
        self._mail.post(TO_RANK, encode(payload), tuple(ranks))

    def resolve(self, rank: int, answer: RankReply) -> None:
        """Take an answer. Any thread; late ones are dropped."""
        if (take := self._followed.get(answer.ticket)) is not None:
            take(rank, answer)
            return
        with self._changed:
            question = self._open.get(answer.ticket)
            if question is not None and rank in question.waiting:
                question.waiting.discard(rank)
                question.answers[rank] = answer
                self._changed.notify_all()

    def resend_pending(self) -> None:
        """Send all questions again that have no answer: they, or the answers, may be lost. Any thread."""
        with self._changed:
            unanswered = [(question.body, tuple(question.waiting)) for question in self._open.values()]
        # Without the lock, which the client's thread needs for each answer that comes meanwhile.
        for body, ranks in unanswered:
            if ranks:
                self._mail.post(TO_RANK, body, ranks)

    def rank_died(self, rank: int) -> None:
        """Wait no longer for answers of this rank. Any thread."""
        with self._changed:
            for question in self._open.values():
                question.waiting.discard(rank)
            self._changed.notify_all()

    def _is_lost(self, rank: int) -> bool:
        return self._ranks is not None and bool(self._ranks.loss_reason(rank))
