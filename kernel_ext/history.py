"""What became of a pool's ranks: when each came, how, from where, and how those ended that are gone. No I/O."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdlab.kernel_ext.cells.elastic import Bounds

KEPT = 1000
"""Changes that are remembered."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened to a rank.

    Attributes:
        rank: Its number.
        what: ``joined``, ``died`` or ``left``.
        why: What started it (``start``, ``attach``, ``resize``, ``repair``, ``restart``), or the reason of its end.
        host: Where it ran; empty if that is not known.
        pid: Its process, or 0.
        when: Seconds since the epoch.
    """

    rank: int
    what: str
    why: str
    host: str = ""
    pid: int = 0
    when: float = field(default_factory=time.time)


class History:
    """The last changes, oldest first. Any thread."""

    def __init__(self) -> None:
        self._changes: deque[Change] = deque(maxlen=KEPT)

    def add(self, change: Change) -> None:
        """Something happened."""
        self._changes.append(change)

    def all(self) -> list[Change]:
        """What is remembered."""
        return list(self._changes)

    def arrival(self, rank: int) -> Change | None:
        """How and when the process came that has this number now or had it last."""
        return next((c for c in reversed(self.all()) if c.rank == rank and c.what == "joined"), None)


@dataclass(frozen=True, slots=True)
class ElasticState:
    """What :meth:`hvdlab.kernel_ext.pool.Pool.elastic` tells.

    Attributes:
        generation: How often the world was made anew, by a rank that came or went, or after a failure.
        cells: The elastic cells that run: their labels, how many ranks each may have, and the ranks that are in it.
        members: Rank to its state: ``in the world``, ``waits to be let in``, ``starting``, or ``lost:`` and the reason.
        awaited: Ranks that are to be there and are not.
        arrivals: Rank to how and when it came.
        history: All that is remembered, oldest first.
    """

    generation: int
    cells: Sequence[tuple[str, Bounds, tuple[int, ...]]]
    members: Mapping[int, str]
    awaited: tuple[int, ...]
    arrivals: Mapping[int, Change]
    history: Sequence[Change]
