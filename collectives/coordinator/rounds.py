"""Rounds of submissions, and the verdicts that may end them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hvdlab.collectives.coordinator.signatures import Defined, Interned, describe
from hvdlab.collectives.protocol.messages import (
    AbortedCollective,
    Message,
    Party,
    Reject,
    RejectDuplicate,
)

Extra = tuple[int, ...]
Item = tuple[Defined, Extra]


class Round:
    """The submissions of one name that belong together.

    Attributes:
        info, local: Signature and local id of the first submission.
        agree: Whether all ranks' local ids are the same.
        heads: What each rank has submitted.
        extras: Numbers that differ between ranks, where there are any.
        payloads: Small tensors that came along.
        behind: Later submissions of the same name, oldest first; ``None`` if there never were any.
        since: When the first submission came.
        reported: How often it was reported as stalled.
    """

    __slots__ = ("agree", "behind", "extras", "heads", "info", "local", "payloads", "reported", "since")

    def __init__(self, info: Interned, local: int, since: float) -> None:
        self.info = info
        self.local = local
        self.agree = True
        self.heads: dict[int, Defined] = {}
        self.extras: dict[int, Extra] | None = None
        self.payloads: dict[int, bytes] | None = None
        self.behind: dict[int, deque[Item]] | None = None
        self.since = since
        self.reported = 0


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


Verdict = Mismatch | DuplicateName


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


def report_round(current: Round, missing: tuple[int, ...], *, all_sites: bool = True) -> AbortedCollective:
    """A round in the words of the protocol."""
    waited = tuple(sorted(current.heads))
    shown = waited if all_sites else waited[:1]
    sites = tuple(current.heads[rank].site for rank in shown)
    return AbortedCollective(current.info.kind, current.info.name, waited, missing, sites)


def parties_of(heads: dict[int, Defined]) -> tuple[Party, ...]:
    """Ranks by what they asked for; the site is that of the lowest rank."""
    groups: dict[Interned, list[int]] = {}
    for rank in sorted(heads):
        groups.setdefault(heads[rank].info, []).append(rank)
    return tuple(
        Party(tuple(ranks), describe(info.signature), heads[ranks[0]].site) for info, ranks in groups.items()
    )
