"""The ranks that are at a prompt, their order, and the meaning of a line that the user typed. No I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hvdlab.collectives.errors import format_ranks
from hvdlab.kernel_ext.wire.cells import DEBUGGER, PromptReply, PromptRequest

_TO_SOME = re.compile(r"\s*(all|\d+(?:-\d+)?(?:\s*,\s*\d+(?:-\d+)?)*)\s*:\s?(.*)\Z", re.DOTALL)
_TO_ONE = re.compile(r"\s*@\s*(\d+)\s*\Z")
_WHO = re.compile(r"\s*@\s*\?\s*\Z")


@dataclass(frozen=True, slots=True)
class SendLine:
    """Give ``text`` to these ranks."""

    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Switch:
    """Show the prompt of this rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class ShowNotice:
    """Show the user a notice, and ask again. With an empty text: which ranks wait."""

    text: str = ""


Command = SendLine | Switch | ShowNotice


def understand(line: str, rank: int, waiting: Collection[int], alike: Collection[int]) -> Command:
    """Return the meaning of a typed line.

    Args:
        line: The line.
        rank: The rank whose prompt was shown.
        waiting: All ranks that are at a prompt.
        alike: Those of them whose prompt is of the same kind; ``all:`` means these.
    """
    if _WHO.match(line):
        return ShowNotice()
    if found := _TO_ONE.match(line):
        chosen = int(found[1])
        return Switch(chosen) if chosen in waiting else ShowNotice(_not_there([chosen]))
    if found := _TO_SOME.match(line):
        ranks = sorted(alike) if found[1] == "all" else _numbers(found[1])
        missing = [one for one in ranks if one not in waiting]
        return ShowNotice(_not_there(missing)) if missing else SendLine(tuple(ranks), found[2])
    return SendLine((rank,), line)


def _numbers(text: str) -> list[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        low, high = int(first), int(last or first)
        ranks.update(range(low, min(high, low + 100_000) + 1))
    return sorted(ranks)


def _not_there(ranks: list[int]) -> str:
    return (
        f"{format_ranks(ranks[:100])} {'is' if len(ranks) == 1 else 'are'} not at a prompt; `@?` tells who is"
    )


GATHER = 0.3
"""Seconds after a question in which those of other ranks may come before the user is asked."""
RETURN = 0.6
"""Seconds that ranks which got an answer have to ask again, before the user is asked for other ranks that wait."""
REMEMBERED = 1024
"""How many answers are kept, to be sent again to a rank that may not have got them."""

_KINDS = {DEBUGGER: "in the debugger"}


@dataclass(frozen=True, slots=True)
class Question:
    """A rank's question."""

    rank: int
    request: PromptRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that a rank gets."""

    rank: int
    reply: PromptReply


class PromptQueue:
    """The questions of one cell.

    Attributes:
        deadline: When to look at :meth:`next_prompt` again, though nothing has happened.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], PromptRequest] = {}
        self._answered: dict[tuple[int, int], PromptReply] = {}  # the newest
        self._expected: set[int] = set()
        self._expected_until = 0.0
        self._gather_until = 0.0
        self._current: int | None = None

    # -- events ---------------------------------------------------------------------------------------------------

    def prompt_asked(self, rank: int, request: PromptRequest, now: float) -> list[Answer]:
        """Queue a rank's question, perhaps a repetition. Returns the answer if there is one already."""
        # A rank repeats its question if the answer was lost with a coordinator: the user is not asked twice.
        known = self._answered.get((rank, request.number))
        if known is not None:
            return [Answer(rank, known)]
        if (rank, request.number) not in self._waiting:
            self._waiting[rank, request.number] = request
            awaited = rank in self._expected
            self._expected.discard(rank)
            # When all ranks that got an answer have asked again, there is no other rank to wait for.
            self._gather_until = now if awaited and not self._expected else now + GATHER
        return []

    def prompt_withdrawn(self, rank: int, number: int) -> None:
        """Drop a question: the rank has gone on without an answer."""
        self._waiting.pop((rank, number), None)

    def rank_gone(self, rank: int) -> None:
        """Drop the questions of a rank that has ended the cell, or died."""
        self._expected.discard(rank)
        for key in [key for key in self._waiting if key[0] == rank]:
            del self._waiting[key]

    def clear(self) -> None:
        """Drop all questions, as the cell was interrupted."""
        self._waiting.clear()
        self._expected.clear()

    # -- the next question ----------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that wait for an answer."""
        return tuple(sorted({rank for rank, _ in self._waiting}))

    @property
    def deadline(self) -> float | None:
        if not self._waiting:
            return None
        return max(self._gather_until, self._expected_until if self._expected else 0.0)

    def next_prompt(self, now: float) -> Question | None:
        """Return the question to ask the user now, if any: of the rank that got the last answer, or of the lowest rank."""
        if not self._waiting or now < self._gather_until or (self._expected and now < self._expected_until):
            return None
        rank = self._current if self._current in self.ranks else self.ranks[0]
        assert rank is not None
        return Question(rank, self._request_of(rank))

    def label(self, question: Question) -> str:
        """Return the prompt with the rank's name, and whether other ranks wait.

        It does not name them: a prompt stays as it is while more ranks come to theirs.
        """
        also = " (others wait, @? tells)" if any(rank != question.rank for rank in self.ranks) else ""
        return f"[rank {question.rank}]{also} {question.request.prompt}"

    def status(self) -> str:
        """Return the ranks at a prompt, in words; empty if there are none."""
        if not self._waiting:
            return ""
        return f"{format_ranks(self.ranks)} {'is' if len(self.ranks) == 1 else 'are'} at a prompt"

    def overview(self) -> str:
        """Return the ranks that wait, a line each, and how to answer them."""
        lines = []
        for (rank, _), request in sorted(self._waiting.items()):
            kind = f" {_KINDS[request.kind]}" if request.kind in _KINDS else ""
            lines.append(f"  rank {rank}{kind}: {request.prompt.strip()}")
        return "\n".join(
            [
                *lines,
                "`@2` goes to rank 2, `all: next` answers all that wait, `0,2: continue` some of them",
            ]
        )

    def answered(self, question: Question, line: str, now: float) -> tuple[list[Answer], str]:
        """Take the user's line at this question. Returns the answers for ranks, and a text for the user."""
        rank, request = question.rank, question.request
        if request.number not in {number for one, number in self._waiting if one == rank}:
            return [], ""
        alike = self._alike(request.kind)
        if request.kind == DEBUGGER or len(self.ranks) > 1:
            command = understand(line, rank, self.ranks, alike)
        else:
            command = SendLine((rank,), line)  # no other rank could be meant
        match command:
            case ShowNotice(text):
                return [], text or self.overview()
            case Switch(other):
                self._current = other
                return [], ""
            case SendLine(ranks, text):
                if rank in ranks or self._current not in self.ranks:
                    self._current = rank
                return self._answer(ranks, text, "", now), ""

    def end(self, ranks: Iterable[int], error: str, now: float) -> list[Answer]:
        """Answer these ranks with an error in place of a line."""
        return self._answer(tuple(ranks), "", error, now)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _request_of(self, rank: int) -> PromptRequest:
        return next(request for (one, _), request in self._waiting.items() if one == rank)

    def _alike(self, kind: str) -> list[int]:
        return [rank for rank in self.ranks if self._request_of(rank).kind == kind]

    def _answer(self, ranks: tuple[int, ...], text: str, error: str, now: float) -> list[Answer]:
        answers = []
        for rank in ranks:
            number = self._request_of(rank).number
            del self._waiting[rank, number]
            reply = self._answered[rank, number] = PromptReply(number, text, error)
            answers.append(Answer(rank, reply))
        while len(self._answered) > REMEMBERED:
            del self._answered[next(iter(self._answered))]
        self._expected, self._expected_until = set(ranks), now + RETURN
        return answers
