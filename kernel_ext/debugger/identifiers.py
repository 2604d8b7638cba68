"""Numbers of threads, frames and variables: every rank counts its own, a frontend must see them apart."""

from __future__ import annotations

import itertools

FIRST = 1 << 30
"""The kernel's own numbers, which are passed on as they are, are far below this."""


class Numbers:
    """Gives (rank, number) pairs numbers that are unique among the ranks and the kernel."""

    def __init__(self) -> None:
        self._next = itertools.count(FIRST)
        self._given: dict[tuple[int, int], int] = {}
        self._meant: dict[int, tuple[int, int]] = {}

    def give(self, rank: int, number: int) -> int:
        """The number that a frontend is told; the same one each time."""
        pair = (rank, number)
        given = self._given.get(pair)
        if given is None:
            given = self._given[pair] = next(self._next)
            self._meant[given] = pair
        return given

    def meant(self, given: object) -> tuple[int, int] | None:
        """What a frontend means; None if it is none of ours, or long gone."""
        return self._meant.get(given) if isinstance(given, int) else None

    def issued(self, given: object) -> bool:
        """Whether this was ever given, even if it is gone."""
        return isinstance(given, int) and given >= FIRST

    def drop(self, rank: int) -> None:
        """Forget those of a rank. They are not given again."""
        for pair in [pair for pair in self._given if pair[0] == rank]:
            del self._meant[self._given.pop(pair)]

    def drop_one(self, rank: int, number: int) -> None:
        """Forget one."""
        given = self._given.pop((rank, number), None)
        if given is not None:
            del self._meant[given]
