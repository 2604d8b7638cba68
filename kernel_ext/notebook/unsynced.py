"""Ranks that came later than the others: the variables that they lack, and those that a sync has brought them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlab.collectives.errors import HvdlabError, compact_ranks, format_ranks
from hvdlab.collectives.text import visible
from hvdlab.kernel_ext.wire.status import UserNames
from hvdlab.kernel_ext.wire.text import rough_size

BEFORE = "resize or repair"
"""How a rank came that is known to be a newcomer only by what it runs."""


@dataclass(frozen=True, slots=True)
class UnsyncedRank:
    """A rank that has nothing of what cells made before it came.

    Attributes:
        how: What started it: ``resize``, ``repair`` or ``restart``; :data:`BEFORE` if the notebook before has started it.
        when: When it came, in seconds since 1970.
    """

    how: str
    when: float = field(default_factory=time.time)


class UnsyncedRanks:
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
        self._came: dict[int, UnsyncedRank] = {}
        #: Rank to the cell that it was sent last to join.
        self._joining: dict[int, str] = {}
        #: The cells in ``_joining`` that have not ended.
        self._running: set[str] = set()

    def came(self, how: str, ranks: Collection[int], wanted: Collection[int]) -> None:
        """These ranks are new processes, of a pool of ``wanted``; if no other rank is left, none of them came later."""
        with self._lock:
            self._forget(ranks)
            came = self._came | {rank: UnsyncedRank(how) for rank in ranks}
            came = {rank: one for rank, one in came.items() if rank in wanted}
            self._came = came if len(came) < len(wanted) else {}
        self._changed()

    def restore(self, came: Mapping[int, float]) -> None:
        """Another process has started these ranks after others; each is given with the time of that, in seconds since 1970."""
        with self._lock:
            self._came |= {rank: UnsyncedRank(BEFORE, when) for rank, when in came.items()}
        self._changed()

    def join(self, cell: str, ranks: Collection[int]) -> None:
        """These ranks, which were brought what the others know, join this cell. Call it before the cell is sent to them."""
        with self._lock:
            self._running.add(cell)
            self._joining.update(dict.fromkeys(ranks, cell))
        self._changed()

    def mark_joined(self, cell: str, rank: int) -> None:
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

    def mark_synced(self, ranks: Collection[int]) -> None:
        """These ranks were brought what another rank knows."""
        with self._lock:
            self._forget(ranks)
        self._changed()

    def all(self) -> dict[int, UnsyncedRank]:
        """Rank to how it came, for ranks that have nothing of what the others know."""
        with self._lock:
            return {
                rank: one for rank, one in self._came.items() if self._joining.get(rank) not in self._running
            }

    def _forget(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._came.pop(rank, None)
            self._joining.pop(rank, None)


def sync_cell(source: int, targets: Sequence[int], without: Collection[str]) -> str:
    """Return the source of the cell that brings the variables of one rank to others; it runs on all ranks.

    Args:
        source: The rank that they come from.
        targets: The ranks that get them.
        without: Names of variables to leave out.
    """
    call = f"bring({source}, {tuple(targets)!r}, {tuple(without)!r})"
    return f"__import__('hvdlab.kernel_ext.rank.sync', fromlist=['bring']).{call}"


@dataclass(frozen=True, slots=True)
class SyncResult:
    """Outcome of :meth:`hvdlab.kernel_ext.notebook.pool.Pool.sync`. Its ``str`` is a line on that, and one for each failure.

    Attributes:
        source: The rank that the variables came from.
        ranks: The ranks that have them now.
        names: Variables that were brought, in the order in which they were made.
        modules: UserNames that modules were imported under.
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

    @classmethod
    def of(cls, source: int, targets: Sequence[int], values: Mapping[int, Any], seconds: float) -> SyncResult:
        """Return the result that the values of the ranks' cells have.

        Raises:
            HvdlabError: A rank could not load the variables.
        """
        given, failed = values[source], dict(values[source]["failed"])
        for rank in targets:
            got = values[rank]
            if got["error"]:
                raise HvdlabError(
                    f"rank {rank} could not take what rank {source} knows: {got['error']}; `--without NAME` leaves out "
                    "what it is about"
                )
            failed |= got["failed"]
        names, modules = tuple(given["names"]), tuple(given["modules"])
        return cls(source, tuple(targets), names, modules, failed, given["nbytes"], seconds)

    def __str__(self) -> str:
        has = "has" if len(self.ranks) == 1 else "have"
        variables = f"{len(self.names)} variable{'' if len(self.names) == 1 else 's'}"
        modules = f"{len(self.modules)} module{'' if len(self.modules) == 1 else 's'}"
        brought = f"{variables} and {modules}, {rough_size(self.nbytes)} in {self.seconds:.1f} s"
        lines = [f"{format_ranks(self.ranks)} {has} what rank {self.source} knows: {brought}"]
        lines += [f"not brought: {visible(name)} ({visible(reason)})" for name, reason in self.failed.items()]
        return "\n".join(lines)


def why_unknown(newcomers: Mapping[int, UnsyncedRank], ranks: Sequence[int]) -> str:
    """Return why a name is unknown on those of ``ranks`` that came later, and what to do; empty if none of them did."""
    came = [rank for rank in ranks if rank in newcomers]
    if not came:
        return ""
    ways: dict[str, list[int]] = {}
    for rank in came:
        at = time.strftime("%H:%M:%S", time.localtime(newcomers[rank].when))
        ways.setdefault(f"by {newcomers[rank].how} at {at}", []).append(rank)
    (first, whose), *others = ways.items()
    causes = [f"{format_ranks(whose)} came later, {first}"]
    causes += [f"{format_ranks(each)} {way}" for way, each in others]
    has = "has" if len(came) == 1 else "have"
    lacking = f"; they {has}" if others else f", and {has}"
    them = "it" if len(came) == 1 else "them"
    return (
        f"{'; '.join(causes)}{lacking} nothing that earlier cells made; "
        f"`%hvd_pool sync {compact_ranks(came)}` brings {them} what the others know, and so does `%%hvd_run --sync` before its cell"
    )


MOST_VARIABLES = 12
MOST_MODULES = 6


def missing_names_notice(names: Mapping[int, UserNames], replaced: Sequence[int]) -> str:
    """``it lacks model, opt and the modules np, torch: `%hvd_pool sync 3` …``; empty if no other rank has variables.

    Args:
        names: Rank to its variables and modules, for ranks that answered.
        replaced: The ranks that are new.
    """
    stayed = [found for rank, found in sorted(names.items()) if rank not in replaced]
    new = [names[rank] for rank in replaced if rank in names]
    variables = _missing((one.variables for one in stayed), [one.variables for one in new])
    modules = _missing((one.modules for one in stayed), [one.modules for one in new])
    parts = [_listed(variables, MOST_VARIABLES)] if variables else []
    if modules:
        parts.append(f"the module{'s' if len(modules) > 1 else ''} {_listed(modules, MOST_MODULES)}")
    if not parts:
        return ""
    it, lack, them = ("it", "lacks", "it") if len(replaced) == 1 else ("they", "lack", "them")
    return (
        f"{it} {lack} {' and '.join(parts)}: `%hvd_pool sync {compact_ranks(replaced)}` brings {them} all that, as "
        f"`%%hvd_run --sync` does before its cell, or run your set-up cells on {them} with `%%hvd_rank {compact_ranks(replaced)}`"
    )


def restarted_notice(names: Mapping[int, UserNames], replaced: Sequence[int], seconds: float) -> str:
    """``rank 3 is back (1.2 s); it lacks …``."""
    are = "is" if len(replaced) == 1 else "are"
    said = f"{format_ranks(replaced)} {are} back ({seconds:.1f} s)"
    lacks = missing_names_notice(names, replaced)
    return f"{said}; {lacks}" if lacks else said


def _missing(have: Iterable[Sequence[str]], new: Sequence[Sequence[str]]) -> list[str]:
    """Return the names that a rank which stayed has and a new one has not, in the order in which they were made."""
    everywhere = set.intersection(*(set(one) for one in new)) if new else set[str]()
    return list(dict.fromkeys(name for names in have for name in names if name not in everywhere))


def _listed(names: Sequence[str], most: int) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"
