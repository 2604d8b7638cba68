"""Verdicts that end submissions without executing them, and the ranks whose later submissions will get one."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from hvdlab.collectives.coordinator.signatures import Interned
from hvdlab.collectives.errors import CauseKind
from hvdlab.collectives.protocol.messages import (
    AbortedCollective,
    Cancelled,
    Decline,
    Message,
    Party,
    Reject,
    RejectDuplicate,
)


class Verdict(Protocol):
    """How a round ends that is not executed."""

    def message(self, process_set: int, epoch: int, locals: tuple[int, ...]) -> Message:
        """The message to a rank about its submissions with these local ids."""
        ...


class Mismatch:
    """Verdict on a round in which ranks disagree."""

    __slots__ = ("name", "parties")

    def __init__(self, name: str, parties: tuple[Party, ...]) -> None:
        self.name, self.parties = name, parties

    def message(self, process_set: int, epoch: int, locals: tuple[int, ...]) -> Message:
        return Reject(process_set, epoch, locals, self.name, self.parties)


class DuplicateName:
    """Verdict on a round whose name one rank has submitted twice."""

    __slots__ = ("first_site", "name", "rank", "second_site")

    def __init__(self, name: str, rank: int, first_site: str, second_site: str) -> None:
        self.name, self.rank, self.first_site, self.second_site = name, rank, first_site, second_site

    def message(self, process_set: int, epoch: int, locals: tuple[int, ...]) -> Message:
        return RejectDuplicate(
            process_set, epoch, locals, self.name, self.rank, self.first_site, self.second_site
        )


class Impossible:
    """Verdict on a round that all agree about, but that can't be done.

    Attributes:
        name: Its name.
        reason: Why it can't be done, in one sentence.
        joined: The ranks that have joined, if it can't be done because of them.
    """

    __slots__ = ("joined", "name", "reason")

    def __init__(self, name: str, reason: str, joined: tuple[int, ...] = ()) -> None:
        self.name, self.reason, self.joined = name, reason, joined

    def message(self, process_set: int, epoch: int, locals: tuple[int, ...]) -> Message:
        return Decline(process_set, epoch, locals, self.name, self.reason, self.joined)


class InVain:
    """Verdict on a message whose other rank won't come: it ends alone, since it concerns no third rank.

    Attributes:
        report: What had been submitted.
        kind, ranks, text: The cause.
    """

    __slots__ = ("kind", "ranks", "report", "text")

    def __init__(self, report: AbortedCollective, kind: CauseKind, ranks: tuple[int, ...], text: str) -> None:
        self.report, self.kind, self.ranks, self.text = report, kind, ranks, text

    def message(self, process_set: int, epoch: int, locals: tuple[int, ...]) -> Message:
        return Cancelled(process_set, epoch, locals, self.kind.value, self.ranks, self.text, "", self.report)


class Rejection(NamedTuple):
    """A submission that got a verdict.

    Attributes:
        after: How many rounds were ready before. A rank tells its submissions of one local id apart by their order
            alone, so they have to end in that order.
        rank, local: The rank that submitted it, and its local id.
        verdict: The verdict.
    """

    after: int
    rank: int
    local: int
    verdict: Verdict


class Debts(dict[tuple[int, str, str], deque[tuple[int, Verdict]]]):
    """Verdicts for which ranks *owe* submissions: a rank gets one when it submits what the verdict is about.

    For each rank, and name or group: how many of its next submissions get which verdict.
    """

    @property
    def ranks(self) -> set[int]:
        return {rank for rank, _, _ in self}

    def owe(self, rank: int, info: Interned, count: int, verdict: Verdict) -> None:
        """The next ``count`` submissions of this name, or of its group if it has one, get the verdict."""
        self.setdefault(_key(rank, info), deque()).append((count, verdict))

    def settle(self, rank: int, info: Interned) -> Verdict | None:
        """The verdict that a submission gets, if the rank owes it; ``None`` otherwise."""
        key = _key(rank, info)
        owed = self.get(key)
        if owed is None:
            return None
        count, verdict = owed.popleft()
        if count > 1:
            owed.appendleft((count - 1, verdict))
        elif not owed:
            del self[key]
        return verdict

    def forgive(self, rank: int) -> None:
        """``rank`` will not submit what the verdicts are about."""
        for key in [key for key in self if key[0] == rank]:
            del self[key]


def _key(rank: int, info: Interned) -> tuple[int, str, str]:
    return (rank, "", info.group) if info.group else (rank, info.name, "")
