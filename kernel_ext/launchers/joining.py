"""Ranks join ipyparallel one after the other, so that a cell that comes in between finds the others free."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable

TRIES = 3
"""How often a rank is asked to join a controller at most."""


class Joining:
    """Which ranks have been asked to join.

    A request or an answer may be lost with a coordinator, come twice, or come when it does not count any more. So each request
    has a number, which the answer to it repeats; only the answer to a rank's last request counts.

    Args:
        ask: ``ask(rank, request)`` sends a request to a rank. Must not block.
        failed: ``failed(rank, why)`` is called for a rank that could not join and is not asked again. Must not block.
        at_once: How many ranks join at the same time; by default one for each four cores.
    """

    def __init__(
        self,
        ask: Callable[[int, str], None],
        failed: Callable[[int, str], None] = lambda rank, why: None,
        at_once: int | None = None,
    ) -> None:
        self._ask, self._failed = ask, failed
        self._at_once = at_once or max(1, (os.cpu_count() or 1) // 4)
        self._lock = threading.Lock()
        self._connection = ""
        self._ranks: set[int] = set()
        self._waiting: deque[int] = deque()
        self._under_way: dict[int, str] = {}
        self._joined: set[int] = set()
        self._tries: Counter[int] = Counter()
        # Not from zero: an earlier process may have asked the ranks of a kept pool.
        self._series, self._requests = os.urandom(8).hex(), 0

    @property
    def joined(self) -> frozenset[int]:
        """Ranks that are engines of ipyparallel."""
        with self._lock:
            return frozenset(self._joined)

    def connected(self, connection: str) -> None:
        """The controller is up; if it is not the first one, all ranks join again. An empty text: there is none now."""
        with self._lock:
            self._connection = connection
            self._waiting = deque(sorted(self._ranks))
            self._joined.clear()
            self._under_way.clear()
            self._tries.clear()
        self._next()

    def add(self, ranks: Iterable[int]) -> None:
        """These ranks are ready: have them join."""
        with self._lock:
            new = [rank for rank in ranks if rank not in self._ranks]
            self._ranks.update(new)
            self._waiting.extend(new)
        self._next()

    def ask_again(self) -> None:
        """Repeat the requests that have not been answered: they, or the answers, may be lost."""
        with self._lock:
            chosen = sorted(self._under_way.items())
        for rank, request in chosen:
            self._ask(rank, request)

    def answered(self, rank: int, answer: str) -> bool:
        """A rank has joined, or could not. Returns whether it has; False also for an answer that does not count."""
        number, _, failure = answer.partition("\n")
        with self._lock:
            if self._under_way.get(rank, "").partition("\n")[0] != number:
                return False
            del self._under_way[rank]
            last = self._tries[rank] >= TRIES
            if not failure:
                self._joined.add(rank)
            elif not last:
                self._waiting.append(rank)
        self._next()
        if failure and last:
            self._failed(rank, failure)
        return not failure

    def gone(self, rank: int) -> None:
        """A rank has ended."""
        with self._lock:
            self._under_way.pop(rank, None)
            self._joined.discard(rank)
            self._ranks.discard(rank)
            del self._tries[rank]
            if rank in self._waiting:
                self._waiting.remove(rank)
        self._next()

    def _next(self) -> None:
        with self._lock:
            chosen: list[tuple[int, str]] = []
            while self._connection and self._waiting and len(self._under_way) < self._at_once:
                rank = self._waiting.popleft()
                self._requests += 1
                self._tries[rank] += 1
                self._under_way[rank] = f"{self._series}-{self._requests}\n{self._connection}"
                chosen.append((rank, self._under_way[rank]))
        for rank, request in chosen:
            self._ask(rank, request)
