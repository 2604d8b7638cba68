"""Ranks that join, leave or are lost while an elastic cell runs, and ranks that came later and lack the others' variables. No I/O.

The history of a pool's membership has when each rank came, how, on which host, how it ended, and each generation of the world.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError
from hvdlab.collectives.failures import Failures
from hvdlab.collectives.text import compact_ranks, format_ranks, visible
from hvdlab.collectives.types import Membership
from hvdlab.kernel_ext.wire.cells import CellDone
from hvdlab.kernel_ext.wire.status import UserNames
from hvdlab.kernel_ext.wire.values import rough_size


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the number of ranks of an elastic cell.

    Attributes:
        at_least: With fewer its training waits, until lost ranks are replaced or the user interrupts it.
        at_most: The pool does not grow beyond that while it runs; None for no limit.
    """

    at_least: int = 1
    at_most: int | None = None

    def check(self) -> None:
        """Raise ``InvalidRequestError`` if no number of ranks is within."""
        if self.at_most is not None and self.at_least > self.at_most:
            raise InvalidRequestError(
                f"--min-np {self.at_least} is more than --max-np {self.at_most}; no number of ranks is both."
            )

    def check_size(self, size: int, label: str = "") -> None:
        """Raise ``InvalidRequestError`` if a pool of this size is not within, for the cell that users call ``label``."""
        cell = f"cell {label}" if label else "the elastic cell"
        if self.at_most is not None and size > self.at_most:
            raise InvalidRequestError(
                f"{size} ranks are more than --max-np {self.at_most} of {cell}; run it with a larger one."
            )
        if size < self.at_least:
            raise InvalidRequestError(
                f"{size} {'rank is' if size == 1 else 'ranks are'} fewer than --min-np {self.at_least} of {cell}; its "
                "training would only wait. Interrupt it first, or run it with a smaller one."
            )


class Participants:
    """Ranks of an elastic cell over time.

    Args:
        bounds: Limits of their number.

    Attributes:
        released: Ranks that leave at their next commit, since the user has made the pool smaller.
        ended: Whether a rank has come to the end of the cell: ranks that were lost are then not missed.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.released: set[int] = set()
        self.ended = False
        self._too_few = False  # whether a line has reported that too few ranks are left

    def joined(self, ranks: Sequence[int], running: Collection[int]) -> str:
        """Return the line that reports ranks which begin the cell; ``running`` includes them."""
        self.released.difference_update(ranks)
        self._too_few = len(running) < self.bounds.at_least
        joins = "joins" if len(ranks) == 1 else "join"
        waits = f"; {self._waiting(running)}" if self._too_few else ""
        return f"{format_ranks(ranks)} {joins} at the others' next commit{waits}"

    def leaving(self, ranks: Sequence[int]) -> str:
        """Return the line that reports ranks which are let go."""
        self.released.update(ranks)
        leave = "leaves" if len(ranks) == 1 else "leave"
        return f"{format_ranks(ranks)} {leave} at the next commit"

    def left(self, rank: int, done: CellDone | None) -> bool:
        """Take the end of a rank's part; ``done`` is None if the rank has left without one. Returns whether it was let go."""
        if done is None:
            return rank in self.released
        self.ended = self.ended or done.error is None
        stopped = done.error is not None and (
            done.error.aborted or done.error.ename in ("SystemExit", "KeyboardInterrupt")
        )
        return rank in self.released and stopped

    def lost(self, running: Collection[int]) -> str:
        """Return, after ranks have died, the line that reports that too few are left; an empty text if it was returned before."""
        if self.ended or self._too_few or not running or len(running) >= self.bounds.at_least:
            return ""
        self._too_few = True
        return self._waiting(running)

    def _waiting(self, running: Collection[int]) -> str:
        left, are = len(running), "is" if len(running) == 1 else "are"
        return (
            f"{left} of at least {self.bounds.at_least} ranks {are} left: training waits until `%hvd_pool repair` has "
            "replaced the lost ones, or the cell is interrupted"
        )


KEPT_CHANGES = 1000
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
        self._changes: deque[MembershipChange] = deque(maxlen=KEPT_CHANGES)
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
            # No change of the history, but views show it beside the ranks.
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


BEFORE = "resize or repair"
"""Way of a rank that an earlier notebook has started: only its cells show that it is a newcomer."""


@dataclass(frozen=True, slots=True)
class UnsyncedRank:
    """Rank that lacks the variables of cells which ran before it came.

    Attributes:
        how: The call that started it: ``resize``, ``repair`` or ``restart``; :data:`BEFORE` if an earlier notebook has.
        when: Time at which it came, in seconds since 1970.
    """

    how: str
    when: float = field(default_factory=time.time)


class UnsyncedRanks:
    """Ranks of a pool that came later than the others and lack their variables. Any thread.

    A rank that was sent an elastic cell to join binds the others' variables when it enters that cell. Until then it does not
    count as a newcomer as long as the cell runs, since the user has nothing to do; if the cell ends first, it counts again.

    Args:
        history: Its listeners are called after each change, on the thread that made it, with no lock held; by default there
            are none.
    """

    def __init__(self, history: MembershipHistory | None = None) -> None:
        self._history = history or MembershipHistory()
        self._lock = threading.Lock()
        #: All ranks that lack variables, also those that get them as soon as they enter a cell.
        self._came: dict[int, UnsyncedRank] = {}
        #: Rank to the cell that it was sent last to join.
        self._joining: dict[int, str] = {}
        #: The cells in ``_joining`` that have not ended.
        self._running: set[str] = set()

    def add(self, how: str, ranks: Collection[int], wanted: Collection[int]) -> None:
        """Add ranks that are new processes.

        If the pool has no other rank, none of them came later, and none counts.

        Args:
            how: ``resize``, ``repair`` or ``restart``.
            ranks: The new ranks.
            wanted: All ranks of the pool.
        """
        with self._lock:
            self._forget(ranks)
            came = self._came | {rank: UnsyncedRank(how) for rank in ranks}
            came = {rank: one for rank, one in came.items() if rank in wanted}
            self._came = came if len(came) < len(wanted) else {}
        self._history.announce()

    def restore(self, came: Mapping[int, float]) -> None:
        """Add ranks that another process has started after others: rank to the time of that, in seconds since 1970."""
        with self._lock:
            self._came |= {rank: UnsyncedRank(BEFORE, when) for rank, when in came.items()}
        self._history.announce()

    def join(self, cell: str, ranks: Collection[int]) -> None:
        """Mark ranks that have a snapshot of the others' variables and join this cell. Call it before the cell is sent to them."""
        with self._lock:
            self._running.add(cell)
            self._joining.update(dict.fromkeys(ranks, cell))
        self._history.announce()

    def mark_joined(self, cell: str, rank: int) -> None:
        """Remove a rank that has entered the cell that it was sent, with the others' variables. Its message can come twice."""
        with self._lock:
            # A repeated message of a cell that has ended must not count for the one that the rank was sent since.
            if self._joining.get(rank) != cell:
                return
            self._forget([rank])
        self._history.announce()

    def cell_ended(self, cell: str) -> None:
        """End a cell: ranks that had not entered it drop their snapshot, and are newcomers again."""
        with self._lock:
            if cell not in self._running:
                return
            self._running.discard(cell)
        self._history.announce()

    def mark_synced(self, ranks: Collection[int]) -> None:
        """Remove ranks that have the variables of another rank now."""
        with self._lock:
            self._forget(ranks)
        self._history.announce()

    def all(self) -> dict[int, UnsyncedRank]:
        """Return the ranks that lack the others' variables, each with the way in which it came."""
        with self._lock:
            return {
                rank: one for rank, one in self._came.items() if self._joining.get(rank) not in self._running
            }

    def _forget(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._came.pop(rank, None)
            self._joining.pop(rank, None)


def sync_cell(source: int, targets: Sequence[int], without: Collection[str]) -> str:
    """Return the source of the cell that sends the variables of one rank to others; all ranks run it.

    Args:
        source: The rank that has the variables.
        targets: The ranks that get them.
        without: Names of variables to leave out.
    """
    call = f"bring({source}, {tuple(targets)!r}, {tuple(without)!r})"
    return f"__import__('hvdlab.kernel_ext.rank.sync', fromlist=['bring']).{call}"


@dataclass(frozen=True, slots=True)
class SyncResult:
    """Outcome of :meth:`hvdlab.kernel_ext.notebook.pool.Pool.sync`. Its ``str`` has a line on it, and one for each failure.

    Attributes:
        source: The rank whose variables were sent.
        ranks: The ranks that have them now.
        names: Variables that were sent, in the order in which they were made.
        modules: Names under which modules were imported.
        failed: Name of each variable or module that was not sent, with the reason.
        nbytes: Bytes that each rank got.
        seconds: Duration.
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
        """Return the result, from the values of the ranks' cells.

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
    """Return the reason why a name is unknown on those of ``ranks`` that came later, with a remedy; empty if none did."""
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
"""Variables that a notice names, at most."""
MOST_MODULES = 6
"""Modules that a notice names, at most."""


def missing_names_notice(names: Mapping[int, UserNames], replaced: Sequence[int]) -> str:
    """Return ``it lacks model, opt and the modules np, torch: `%hvd_pool sync 3` …``; empty if no other rank has variables.

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
    """Return the line ``rank 3 is back (1.2 s); it lacks …``."""
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
