"""The lines of one rank that wait to be shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

Key = Hashable


class RankQueue:
    """A queue that knows what it contains and since when.

    Args:
        rank: The rank that wrote the lines.
        totals: How often each line is in all ranks' queues together; the queues keep it up to date.

    Attributes:
        rank: The rank that wrote the lines.
        keys: The lines (or displays), oldest first.
        counts: How often each is in the queue.
    """

    __slots__ = ("_arrivals", "_totals", "counts", "keys", "rank")

    def __init__(self, rank: int, totals: dict[Key, int]) -> None:
        self.rank = rank
        self._totals = totals
        self.keys: deque[Key] = deque()
        self.counts: dict[Key, int] = {}
        self._arrivals: deque[list[float]] = deque()  # [time, how many of that time are left]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def head(self) -> Key:
        return self.keys[0]

    @property
    def oldest(self) -> float:
        """When the head came."""
        return self._arrivals[0][0]

    def older_than(self, limit: float) -> int:
        """How many lines came at ``limit`` or before."""
        found = 0
        for time, count in self._arrivals:
            if time > limit:
                break
            found += int(count)
        return found

    def extend(self, keys: Sequence[Key], now: float) -> None:
        if not keys:
            return
        self.keys.extend(keys)
        self._arrivals.append([now, len(keys)])
        for counts in (self.counts, self._totals):
            known = counts.get
            for key in keys:
                counts[key] = known(key, 0) + 1

    def pop(self, count: int) -> list[Key]:
        """Take ``count`` lines from the head."""
        take = self.keys.popleft
        taken = [take() for _ in range(count)]
        for counts in (self.counts, self._totals):
            for key in taken:
                left = counts[key] - 1
                if left:
                    counts[key] = left
                else:
                    del counts[key]
        while count:
            first = self._arrivals[0]
            if first[1] > count:
                first[1] -= count
                break
            count -= int(first[1])
            self._arrivals.popleft()
        return taken
