"""Ranks that came later than the others, and what was brought to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hvdlab.collectives.errors import compact_ranks, format_ranks
from hvdlab.collectives.text import visible

BEFORE = "resize or repair"
"""How a rank came that is known to be a newcomer only by what it runs."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A rank that has nothing of what cells made before it came.

    Attributes:
        how: What started it: ``resize``, ``repair`` or ``restart``; :data:`BEFORE` if the notebook before has started it.
        when: When it came, in seconds since 1970.
    """

    how: str
    when: float = field(default_factory=time.time)


class Newcomers:
    """The ranks of a pool that came later than the others and have nothing of what those know. Any thread.

    A rank that was sent an elastic cell to join binds what the others know when it enters that cell. Before that it does not
    count as a newcomer as long as the cell runs, since the user has nothing to do; if the cell ends first, it counts again.

    Args:
        changed: Called after each change, on the thread that made it, with no lock held; must not block.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        #: All ranks that have nothing, also those that will have it as soon as they enter a cell.
        self._came: dict[int, Newcomer] = {}
        #: Rank to the cell that it was sent last to join.
        self._joining: dict[int, str] = {}
        #: The cells in ``_joining`` that have not ended.
        self._running: set[str] = set()

    def came(self, how: str, ranks: Collection[int], wanted: Collection[int]) -> None:
        """These ranks are new processes, of a pool of ``wanted``; if no other rank is left, none of them came later."""
        with self._lock:
            self._forget(ranks)
            came = self._came | {rank: Newcomer(how) for rank in ranks}
            came = {rank: one for rank, one in came.items() if rank in wanted}
            self._came = came if len(came) < len(wanted) else {}
        self._changed()

    def found(self, came: Mapping[int, float]) -> None:
        """Another process has started these ranks after others; each is given with the time of that, in seconds since 1970."""
        with self._lock:
            self._came |= {rank: Newcomer(BEFORE, when) for rank, when in came.items()}
        self._changed()

    def join(self, cell: str, ranks: Collection[int]) -> None:
        """These ranks, which were brought what the others know, join this cell. Call it before the cell is sent to them."""
        with self._lock:
            self._running.add(cell)
            self._joining.update(dict.fromkeys(ranks, cell))
        self._changed()

    def entered(self, cell: str, rank: int) -> None:
        """A rank has entered the cell that it was sent, and knows what the others know. Its message may come twice."""
        with self._lock:
            if self._joining.get(rank) != cell:
                return
            self._forget([rank])
        self._changed()

    def cell_ended(self, cell: str) -> None:
        """A cell has ended: ranks that had not entered it drop what they were brought, and are newcomers again."""
        with self._lock:
            if cell not in self._running:
                return
            self._running.discard(cell)
        self._changed()

    def know(self, ranks: Collection[int]) -> None:
        """These ranks were brought what another rank knows."""
        with self._lock:
            self._forget(ranks)
        self._changed()

    def all(self) -> dict[int, Newcomer]:
        """Rank to how it came, for ranks that have nothing of what the others know."""
        with self._lock:
            return {
                rank: one for rank, one in self._came.items() if self._joining.get(rank) not in self._running
            }

    def _forget(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._came.pop(rank, None)
            self._joining.pop(rank, None)


@dataclass(frozen=True, slots=True)
class Synced:
    """What :meth:`hvdlab.kernel_ext.pool.Pool.sync` has done. Its ``str`` is a line on that, and one for each failure.

    Attributes:
        source: The rank that the variables came from.
        ranks: The ranks that have them now.
        names: Variables that were brought, in the order in which they were made.
        modules: Names that modules were imported under.
        failed: Name of each variable or module that was not brought, and why.
        nbytes: Bytes that each rank got.
        seconds: How long it took.
    """

    source: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    modules: tuple[str, ...]
    failed: Mapping[str, str]
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        from hvdlab.kernel_ext.rank.values import (
            rough_size,
        )  # imported here, since it imports cloudpickle, which a notebook does later

        has = "has" if len(self.ranks) == 1 else "have"
        variables = f"{len(self.names)} variable{'' if len(self.names) == 1 else 's'}"
        modules = f"{len(self.modules)} module{'' if len(self.modules) == 1 else 's'}"
        brought = f"{variables} and {modules}, {rough_size(self.nbytes)} in {self.seconds:.1f} s"
        lines = [f"{format_ranks(self.ranks)} {has} what rank {self.source} knows: {brought}"]
        lines += [f"not brought: {visible(name)} ({visible(reason)})" for name, reason in self.failed.items()]
        return "\n".join(lines)


def why_unknown(newcomers: Mapping[int, Newcomer], ranks: Sequence[int]) -> str:
    """Why a name is unknown on some of ``ranks``, if they came later, and what to do; empty if none of them did."""
    came = [rank for rank in ranks if rank in newcomers]
    if not came:
        return ""
    one = newcomers[came[0]]
    at = time.strftime("%H:%M:%S", time.localtime(one.when))
    has = "has" if len(came) == 1 else "have"
    them = "it" if len(came) == 1 else "them"
    return (
        f"{format_ranks(came)} came later, by {one.how} at {at}, and {has} nothing that earlier cells made; "
        f"`%hvd_pool sync {compact_ranks(came)}` brings {them} what the others know, and so does `%%hvd_run --sync` before its cell"
    )
