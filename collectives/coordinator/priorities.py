"""Priorities: which of the rounds with one is ordered next, and how many bytes of them are executed at a time.

Ranks execute collectives in the order of the coordinator, and a more urgent one can become ready meanwhile. So the coordinator holds
rounds with a priority back while others with one are being executed, up to a *credit* of bytes. The member at position 0 reports the
end of each of their batches. Rounds that become ready then go before all held ones that are less urgent.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from hvdlab.collectives.coordinator.signatures import NegotiationRound


class PriorityQueue:
    """Priority queue of a generation: the rounds that are held back, and the batches that are under way.

    Iterating over it gives the rounds that are kept back.

    Attributes:
        under_way: Bytes of each ordered batch without a reported end, by its order and its number in that.
    """

    def __init__(self) -> None:
        #: A heap of (-priority, order of becoming ready, round).
        self._kept: list[tuple[int, int, NegotiationRound]] = []
        #: Number of rounds so far, for their order in the heap.
        self._added = 0
        #: How many rounds of each name are kept, and the lowest priority that any of them has.
        self._names: dict[str, tuple[int, int]] = {}
        self.under_way: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[NegotiationRound]:
        return (current for _, _, current in self._kept)

    def concerns(self, current: NegotiationRound) -> bool:
        """Return whether a ready round has its place here: it has a priority, or an earlier round of its name is kept."""
        if current.priority is not None:
            return True
        return current.info.name in self._names and current.info.fuse_key is not None

    def hold(self, ready: Iterable[NegotiationRound]) -> list[NegotiationRound]:
        """Keep the rounds that have their place here; return the others, in order."""
        others: list[NegotiationRound] = []
        for current in ready:
            if self.concerns(current):
                self.add((current,))
            else:
                others.append(current)
        return others

    def add(self, rounds: Iterable[NegotiationRound]) -> None:
        """Keep these rounds until it is their turn.

        Rounds of one name stay in order for all priorities, since a rank can have submitted all of them under one local id.
        """
        for current in rounds:
            name = current.info.name
            count, lowest = self._names.get(name, (0, 0))
            priority = lowest if current.priority is None else current.priority
            if count:
                # An earlier round of the name can't be raised to this priority any more, so this one is lowered to its: behind it in
                # the heap.
                priority = min(priority, lowest)
            self._names[name] = (count + 1, priority)
            self._added += 1
            heapq.heappush(self._kept, (-priority, self._added, current))

    def pop_due(self, credit: int | None = None) -> list[NegotiationRound]:
        """Remove and return the due rounds, most urgent first, until ``credit`` bytes are under way; ``None`` for all."""
        # While there is any room, not only if the round fits: one that is larger than the credit would never be ordered.
        room = None if credit is None else credit - sum(self.under_way.values())
        due: list[NegotiationRound] = []
        while self._kept and (room is None or room > 0):
            _, _, current = heapq.heappop(self._kept)
            name = current.info.name
            count, lowest = self._names.pop(name)
            if count > 1:
                # The lowest priority of the name stays: later rounds of it are still behind the ones that are kept.
                self._names[name] = (count - 1, lowest)
            if room is not None:
                room -= current.info.nbytes
            due.append(current)
        return due

    def ordered(self, sequence: int, batches: Iterable[Sequence[NegotiationRound]]) -> None:
        """Record that these batches are the ``sequence``-th order; the end of each will be reported."""
        for number, batch in enumerate(batches):
            self.under_way[sequence, number] = sum(current.info.nbytes for current in batch)

    def executed(self, sequence: int, batch: int) -> None:
        """Record that a batch has ended."""
        # The numbers come from a rank: a report about no batch under way must not raise here.
        self.under_way.pop((sequence, batch), None)

    def validate(self) -> None:
        """Assert the invariants that hold between calls."""
        counts: dict[str, int] = {}
        for _, _, current in self._kept:
            counts[current.info.name] = counts.get(current.info.name, 0) + 1
        assert counts == {name: count for name, (count, _) in self._names.items()}
        assert not self._kept or self.under_way, "kept back, and no end of a batch is awaited"


def have_priority(rounds: Iterable[NegotiationRound]) -> bool:
    """Return whether any of these rounds was submitted with a priority."""
    return any(current.priority is not None for current in rounds)
