"""What a line means that the user typed at a rank's prompt."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from hvdlab.collectives.errors import format_ranks

_TO_SOME = re.compile(r"\s*(all|\d+(?:-\d+)?(?:\s*,\s*\d+(?:-\d+)?)*)\s*:\s?(.*)\Z", re.DOTALL)
_TO_ONE = re.compile(r"\s*@\s*(\d+)\s*\Z")
_WHO = re.compile(r"\s*@\s*\?\s*\Z")


@dataclass(frozen=True, slots=True)
class Send:
    """Give ``text`` to these ranks."""

    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Switch:
    """Show the prompt of this rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the user something, and ask again. With an empty text: which ranks wait."""

    text: str = ""


Command = Send | Switch | Tell


def understand(line: str, rank: int, waiting: Collection[int], alike: Collection[int]) -> Command:
    """What a line means.

    Args:
        line: What the user typed.
        rank: The rank whose prompt was shown.
        waiting: All ranks that are at a prompt.
        alike: Those of them whose prompt is of the same kind; ``all:`` means these.
    """
    if _WHO.match(line):
        return Tell()
    if found := _TO_ONE.match(line):
        chosen = int(found[1])
        return Switch(chosen) if chosen in waiting else Tell(_not_there([chosen]))
    if found := _TO_SOME.match(line):
        ranks = sorted(alike) if found[1] == "all" else _numbers(found[1])
        missing = [one for one in ranks if one not in waiting]
        return Tell(_not_there(missing)) if missing else Send(tuple(ranks), found[2])
    return Send((rank,), line)


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
