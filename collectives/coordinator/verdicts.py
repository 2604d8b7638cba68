"""Verdicts that end submissions without executing them, and who is still to get one."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from hvdlab.collectives.coordinator.signatures import Interned
from hvdlab.collectives.protocol.messages import Decline, Message, Party, Reject, RejectDuplicate


class Verdict(Protocol):
    """How a round ends that is not executed."""

    def message(self, process_set: int, epoch: int, locals: tuple[int, ...]) -> Message:
        """What a rank is told about its submissions ``locals``."""


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
        reason: Why, in one sentence.
        joined: The ranks that have joined, if it can't be done for their sake.
    """

    __slots__ = ("joined", "name", "reason")

    def __init__(self, name: str, reason: str, joined: tuple[int, ...] = ()) -> None:
        self.name, self.reason, self.joined = name, reason, joined

    def message(self, process_set: int, epoch: int, locals: tuple[int, ...]) -> Message:
        return Decline(process_set, epoch, locals, self.name, self.reason, self.joined)


class Rejection(NamedTuple):
    """A submission that got a verdict.

    Attributes:
        after: How many rounds were ready before. A rank tells its submissions of one local id apart by their order
            alone, so they have to end in that order.
        rank, local: Whose, and which.
        verdict: What it got.
    """

    after: int
    rank: int
    local: int
    verdict: Verdict


class Debts:
    """Verdicts that ranks *owe* a submission for: they get them when they submit what the verdicts are about."""

    __slots__ = ("_groups", "_names")

    def __init__(self) -> None:
        self._names: dict[tuple[int, str], deque[Verdict]] = {}
        self._groups: dict[tuple[int, str], deque[tuple[int, Verdict]]] = {}

    def __len__(self) -> int:
        """How many (rank, name) and (rank, group) there are."""
        return len(self._names) + len(self._groups)

    @property
    def ranks(self) -> set[int]:
        return {rank for rank, _ in (*self._names, *self._groups)}

    def owe(self, rank: int, name: str, verdict: Verdict) -> None:
        self._names.setdefault((rank, name), deque()).append(verdict)

    def owe_group(self, rank: int, group: str, count: int, verdict: Verdict) -> None:
        """The next ``count`` submissions of this group get the verdict."""
        self._groups.setdefault((rank, group), deque()).append((count, verdict))

    def pay(self, rank: int, info: Interned) -> Verdict | None:
        """The verdict that a submission gets, if it owes one."""
        if info.group:
            return self._pay_group((rank, info.group))
        owed = self._names.get((rank, info.name))
        if owed is None:
            return None
        verdict = owed.popleft()
        if not owed:
            del self._names[rank, info.name]
        return verdict

    def _pay_group(self, key: tuple[int, str]) -> Verdict | None:
        owed = self._groups.get(key)
        if owed is None:
            return None
        count, verdict = owed.popleft()
        if count > 1:
            owed.appendleft((count - 1, verdict))
        elif not owed:
            del self._groups[key]
        return verdict

    def forgive(self, rank: int) -> None:
        """``rank`` will not submit what the verdicts are about."""
        for key in [key for key in self._names if key[0] == rank]:
            del self._names[key]
        for key in [key for key in self._groups if key[0] == rank]:
            del self._groups[key]
