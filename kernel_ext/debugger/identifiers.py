"""Numbers of threads, frames and variables: every rank counts its own, and a frontend must be able to tell them apart."""

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
        """The number that a frontend gets for a rank's own one; the same each time."""
        pair = (rank, number)
        given = self._given.get(pair)
        if given is None:
            given = self._given[pair] = next(self._next)
            self._meant[given] = pair
        return given

    def meant(self, given: object) -> tuple[int, int] | None:
        """The rank and its own number that a frontend means; None if the number is not from here, or was dropped."""
        return self._meant.get(given) if isinstance(given, int) else None

    def issued(self, given: object) -> bool:
        """Whether this number was ever given, even if it was dropped since."""
        return isinstance(given, int) and given >= FIRST

    def drop(self, rank: int) -> None:
        """Forget the numbers of a rank. They are not given again."""
        for pair in [pair for pair in self._given if pair[0] == rank]:
            del self._meant[self._given.pop(pair)]

    def drop_one(self, rank: int, number: int) -> None:
        """Forget one number of a rank."""
        given = self._given.pop((rank, number), None)
        if given is not None:
            del self._meant[given]
