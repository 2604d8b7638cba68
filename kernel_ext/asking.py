"""What a pool asks its ranks, also while they run a cell: where they are, and what their variables are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvdlab.collectives.deadline import Deadline
from hvdlab.kernel_ext.output.places import Whereabouts
from hvdlab.kernel_ext.wire.status import (
    AskNames,
    AskStack,
    Complete,
    Completions,
    Express,
    Expressed,
    Inspect,
    Inspection,
    Names,
    Stack,
)

if TYPE_CHECKING:
    from hvdlab.kernel_ext.base import PoolBase
    from hvdlab.kernel_ext.inspect.views import Ranks

ANSWER_WITHIN = 1.0
"""Seconds that a rank has to answer; its control thread does, whatever the rank is doing."""


class Asking:
    """The part of a pool that asks; :class:`~hvdlab.kernel_ext.pool.Pool` has the rest."""

    _base: PoolBase

    def where(self, ranks: Sequence[int] | None = None) -> Whereabouts:
        """Where these ranks (by default all) are: the Python stack of each, also while it runs a cell or hangs."""
        chosen = self._chosen(ranks)
        answers = self._base.runs.questions.ask(AskStack, chosen, Deadline(ANSWER_WITHIN))
        stacks = {rank: answer for rank, answer in answers.items() if isinstance(answer, Stack)}
        silent = [rank for rank in chosen if rank not in stacks]
        return Whereabouts(stacks, self._base.runs.lookout.look(silent) if silent else None)

    def names(self, ranks: Sequence[int] | None = None) -> dict[int, Names]:
        """Rank to the names that the user has made there, in that order, modules apart; by default of all ranks."""
        answers = self._base.runs.questions.ask(AskNames, self._chosen(ranks), Deadline(ANSWER_WITHIN))
        return {rank: answer for rank, answer in answers.items() if isinstance(answer, Names)}

    def complete(
        self, code: str, cursor: int, *, rank: int | None = None, timeout: float = 2
    ) -> Completions | None:
        """Completions from a rank's variables (by default the first one's); ``None`` without an answer in ``timeout`` seconds."""
        answers = self._base.runs.questions.ask(
            lambda ticket: Complete(ticket, code, cursor), self._one(rank), Deadline(timeout)
        )
        return next((a for a in answers.values() if isinstance(a, Completions)), None)

    def inspect(
        self, code: str, cursor: int, detail: int = 0, *, rank: int | None = None, timeout: float = 2
    ) -> Inspection | None:
        """Documentation from a rank's variables (by default the first one's); ``None`` without an answer in ``timeout`` s."""
        answers = self._base.runs.questions.ask(
            lambda ticket: Inspect(ticket, code, cursor, detail), self._one(rank), Deadline(timeout)
        )
        return next((a for a in answers.values() if isinstance(a, Inspection)), None)

    def express(
        self, expressions: Mapping[str, str], *, rank: int | None = None, timeout: float = 10
    ) -> dict[str, Any] | None:
        """Values of expressions on a rank (by default the first one) as Jupyter's protocol has them, by their names.

        ``None`` if the rank does not answer within ``timeout`` seconds.
        """
        asked = dict(expressions)
        answers = self._base.runs.questions.ask(
            lambda ticket: Express(ticket, asked), self._one(rank), Deadline(timeout)
        )
        return next((a.results for a in answers.values() if isinstance(a, Expressed)), None)

    def _one(self, rank: int | None) -> tuple[int, ...]:
        return self._chosen(self.ranks[:1] if rank is None else [rank])

    # -- what the rest of a pool has ------------------------------------------------------------------------------

    @property
    def ranks(self) -> Ranks:
        raise NotImplementedError

    def _chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        raise NotImplementedError
