"""Ranks join ipyparallel one after the other, so that a cell that comes in between finds the others free."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable


class Joining:
    """Which ranks have been asked to join.

    Args:
        ask: ``ask(rank, connection)`` sends the controller's connection information to a rank. Must not block.
        at_once: How many ranks join at the same time; by default one for each four cores.
    """

    def __init__(self, ask: Callable[[int, str], None], at_once: int | None = None) -> None:
        self._ask = ask
        self._at_once = at_once or max(1, (os.cpu_count() or 1) // 4)
        self._lock = threading.Lock()
        self._connection = ""
        self._ranks: set[int] = set()
        self._waiting: deque[int] = deque()
        self._under_way: set[int] = set()
        self._joined: set[int] = set()
        # Ranks that are busy with a controller that is gone: their next answer says nothing.
        self._outdated: Counter[int] = Counter()

    @property
    def joined(self) -> frozenset[int]:
        """Ranks that are engines of ipyparallel."""
        return frozenset(self._joined)

    def connected(self, connection: str) -> None:
        """The controller is up; if it is not the first one, all ranks join again. An empty text: there is none now."""
        with self._lock:
            self._connection = connection
            self._outdated.update(self._under_way)
            self._waiting = deque(sorted(self._ranks))
            self._joined.clear()
            self._under_way.clear()
        self._next()

    def add(self, ranks: Iterable[int]) -> None:
        """Ranks are ready."""
        with self._lock:
            new = [rank for rank in ranks if rank not in self._ranks]
            self._ranks.update(new)
            self._waiting.extend(new)
        self._next()

    def ask_again(self) -> None:
        """Ask those once more that have not answered: what was said may be lost. Ranks join a controller once."""
        with self._lock:
            chosen = sorted(self._under_way)
        for rank in chosen:
            self._ask(rank, self._connection)

    def answered(self, rank: int, failure: str) -> None:
        """A rank has joined, or could not."""
        with self._lock:
            if self._outdated[rank]:
                self._outdated[rank] -= 1
                return
            self._under_way.discard(rank)
            if not failure:
                self._joined.add(rank)
        self._next()

    def gone(self, rank: int) -> None:
        """A rank has ended."""
        with self._lock:
            self._under_way.discard(rank)
            self._joined.discard(rank)
            self._ranks.discard(rank)
            del self._outdated[rank]
            if rank in self._waiting:
                self._waiting.remove(rank)
        self._next()

    def _next(self) -> None:
        with self._lock:
            chosen: list[int] = []
            while self._connection and self._waiting and len(self._under_way) < self._at_once:
                chosen.append(self._waiting.popleft())
                self._under_way.add(chosen[-1])
        for rank in chosen:
            self._ask(rank, self._connection)
