"""The history of a pool's ranks: when each came, how, on which host, how it ended, and each generation of the world."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hvdlab.collectives.errors import format_ranks
from hvdlab.collectives.failures import Failures
from hvdlab.collectives.types import Membership
from hvdlab.kernel_ext.notebook.elastic import Bounds

KEPT = 1000
"""How many changes are remembered."""

ALL = -1
"""In place of a rank, in a change of the world as a whole."""


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """Change of a rank, or of the world.

    Attributes:
        rank: The rank's number; ``ALL`` for a new generation of the world.
        what: ``joined``, ``waits`` (until the others let it in), ``admitted``, ``died``, ``left``, or ``formed``.
        why: The call that started it (``start``, ``attach``, ``resize``, ``repair``, ``restart``), the reason of its end, how long
            it waited, or the ranks of the new generation.
        host: Its host; empty if that is not known.
        pid: Its process, or 0.
        when: Seconds since the epoch.
    """

    rank: int
    what: str
    why: str
    host: str = ""
    pid: int = 0
    when: float = field(default_factory=time.time)


class MembershipHistory:
    """History of the last changes, oldest first. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: deque[MembershipChange] = deque(maxlen=KEPT)
        #: The generation of the world that was seen last.
        self._generation = 0
        #: Ranks that wait to be let in, since when.
        self._waiting: dict[int, float] = {}
        #: Ranks that leave at the next commit.
        self._leaving: tuple[int, ...] = ()
        self._listeners: list[Callable[[], None]] = []
        self._failures = Failures()

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called after each change, on the thread that noticed it; it must not block.

        Returns a function that ends that.
        """
        with self._lock:
            self._listeners.append(callback)

        def unlisten() -> None:
            with self._lock:
                if callback in self._listeners:
                    self._listeners.remove(callback)

        return unlisten

    def add(self, *changes: MembershipChange) -> None:
        """Remember these changes, and call the listeners."""
        with self._lock:
            self._changes.extend(changes)
        self.announce()

    def announce(self) -> None:
        """Call the listeners. Also called for changes beside the history that views show with it, such as newcomers."""
        with self._lock:
            listeners = tuple(self._listeners)
        # Without the lock: a listener can read the history, or end its own subscription.
        for listener in listeners:
            with self._failures.guard("a listener to the history"):
                listener()

    def record_membership(self, now: Membership) -> None:
        """Compare the membership with the last one seen: a new generation, and ranks that wait or were let in, are changes."""
        changes, at = [], time.time()
        with self._lock:
            waiting, here = set(now.waiting), set(now.ranks)
            released, self._leaving = now.leaving != self._leaving, now.leaving
            for rank in sorted(waiting - self._waiting.keys()):
                self._waiting[rank] = at
                changes.append(MembershipChange(rank, "waits", "until the others commit", when=at))
            for rank in sorted(self._waiting.keys() - waiting):
                since = self._waiting.pop(rank)
                if rank in here:
                    changes.append(MembershipChange(rank, "admitted", f"after {at - since:.1f} s", when=at))
            # Each update of the membership has the last generation: only a higher one is new.
            if now.formed and now.generation > self._generation:
                self._generation = now.generation
                why = f"{format_ranks(now.formed)} from now on"
                changes.append(MembershipChange(ALL, "formed", why, when=at))
        if changes:
            self.add(*changes)
        elif released:
            self.announce()

    def all(self) -> list[MembershipChange]:
        """Return the changes that are remembered, oldest first."""
        with self._lock:
            return list(self._changes)

    def arrival(self, rank: int) -> MembershipChange | None:
        """Return how and when the newest process of this rank came; None if that is not remembered."""
        return next((c for c in reversed(self.all()) if c.rank == rank and c.what == "joined"), None)


@dataclass(frozen=True, slots=True)
class ElasticState:
    """State of elastic training in a pool, from :meth:`hvdlab.kernel_ext.notebook.pool.Pool.elastic`.

    Attributes:
        generation: Number of the world's generation; each rank that comes or goes, and each failure, begins a new one.
        cells: The elastic cells that run: their labels, how many ranks each may have, and the ranks that are in it.
        members: Rank to its state: ``ready``, ``waits to be let in``, ``starting``, ``leaves at the next commit``, or ``lost:`` and the reason.
        awaited: Ranks of the pool that are not ready.
        arrivals: Rank to how and when it came.
        history: All that is remembered, oldest first.
        newcomers: Ranks that came later than others and lack their variables.
    """

    generation: int
    cells: Sequence[tuple[str, Bounds, tuple[int, ...]]]
    members: Mapping[int, str]
    awaited: tuple[int, ...]
    arrivals: Mapping[int, MembershipChange]
    history: Sequence[MembershipChange]
    newcomers: tuple[int, ...] = ()
