"""Lines under a cell that name the ranks and collectives it waits for, while that takes long. No I/O.

They report three things: some ranks have submitted a collective and others have not; all have submitted one
and it does not end; ranks are still in the cell long after others have ended it. The coordinator reports the
first. For the second, every so often this asks the ranks which collective they are in; for all three, each second while
it lasts, where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from hvdlab.collectives.coordinator.signatures import kind_label
from hvdlab.collectives.errors import call_name
from hvdlab.collectives.text import format_ranks, visible
from hvdlab.collectives.types import Stall
from hvdlab.kernel_ext.notebook.cells.cell_events import AskStacks, Effect, LookAt, ShowStatus
from hvdlab.kernel_ext.notebook.output.stack_text import collective_of, grouped, short_place, waits_in
from hvdlab.kernel_ext.wire.status import Stack

ANSWER_WITHIN = 0.6
"""Seconds that a rank has to answer; its control thread does, unless something holds the whole process."""

SEEN_WITHIN = 0.3
"""Seconds after which nothing more is expected from a look at a process."""


class ProbeRound:
    """One round of questions after the other. No I/O.

    Attributes:
        answers: Answers of ranks in this round.
        deadline: When the round goes on by itself; None if it is over.
    """

    def __init__(self) -> None:
        self.answers: dict[int, Stack] = {}
        self.deadline: float | None = None
        #: Ranks that this round waits for; one that ends meanwhile is removed.
        self._asked: frozenset[int] = frozenset()
        #: Rank to the finding about its process, of this round, or of an earlier one if it was silent since.
        self._seen: dict[int, str] = {}
        #: Ranks with a finding of this round: an older one does not end the wait for an answer.
        self._seen_now: set[int] = set()
        #: Rank to the last place that it answered with, kept for the line about a rank that has fallen silent.
        self._last: dict[int, str] = {}
        #: Whether the round waits for findings about processes: it has a time limit for answers, and
        #: then one for these.
        self._looking = False

    def ask(self, ranks: Iterable[int], now: float) -> list[Effect]:
        """Begin a round. The last round's findings are forgotten, except those about processes of silent ranks."""
        self._asked = frozenset(ranks)
        self.answers = {}
        self._seen_now = set()
        self._seen = {rank: text for rank, text in self._seen.items() if rank in self._asked}
        self._looking = False
        self.deadline = now + ANSWER_WITHIN
        return [AskStacks(tuple(sorted(self._asked)))]

    @property
    def running(self) -> bool:
        """Return whether a round is under way."""
        return self.deadline is not None

    def answered(self, rank: int, stack: Stack) -> bool:
        """Record a rank's answer. Returns True if that ends the round."""
        if rank not in self._asked:
            return False
        self.answers[rank] = stack
        self._seen.pop(rank, None)
        if stack.frames:
            self._last[rank] = short_place(stack)
        return self._all_known()

    def seen(self, rank: int, text: str) -> bool:
        """Record the finding of a look at a rank's process. Returns True if that ends the round."""
        if rank not in self._asked or rank in self.answers:
            return False
        self._seen[rank] = text
        self._seen_now.add(rank)
        return self._all_known()

    def time(self) -> tuple[bool, list[Effect]]:
        """Handle the deadline. Returns whether the round is over, and the effects to carry out."""
        assert self.deadline is not None
        silent = tuple(sorted(self._asked - set(self.answers) - self._seen_now))
        if self._looking or not silent:
            self.deadline = None
            return True, []
        self._looking = True
        self.deadline += SEEN_WITHIN
        return False, [LookAt(silent)]

    def gone(self, rank: int) -> None:
        """Expect nothing from this rank any more."""
        self._asked -= {rank}
        self._seen.pop(rank, None)

    def text(self, rank: int) -> str:
        """Return where a rank is, in words."""
        stack = self.answers.get(rank)
        if stack is not None:
            return short_place(stack)
        seen, last = self._seen.get(rank, "it does not answer"), self._last.get(rank)
        return seen if last is None or seen.startswith("cell ") else f"{seen}; it was last at {last}"

    def _all_known(self) -> bool:
        if self.deadline is None or self._asked - set(self.answers) - self._seen_now:
            return False
        self.deadline = None
        return True


REFRESH = 1.0
"""Seconds between two updates of the text."""
MOST_WAITS = 3
"""Groups of collectives that get a line each; a line counts the others."""

_Key = tuple[int, str, str]
_EXECUTING = -1
"""In place of a process set."""


@dataclass(slots=True)
class _OverdueCollective:
    """A collective that waits.

    Attributes:
        kind, name: Which, in words.
        site: Where one of the ranks called it.
        since: When it was submitted first.
        seen: Rank to seconds that it had been waiting when it was last asked, of ranks that have submitted it.
        missing: Ranks that have not submitted it.
        waiting, awaited, shown_at: Which ranks waited and which were missing when it was shown last, and when that was.
        executing: Whether all have submitted it; then those that do not answer are missing.
    """

    kind: str
    name: str
    site: str
    since: float
    missing: set[int]
    waiting: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()
    shown_at: float = 0.0
    executing: bool = False
    seen: dict[int, float] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return call_name(self.kind, self.name) + (f" ({visible(self.site)})" if self.site else "")


class StallReport:
    """Report of the collectives and ranks that one cell waits for.

    Args:
        cell: Id of the cell.
        ranks: Its ranks.
        places: Asks the ranks; its owner calls :meth:`placed` at the end of a round.
        every: Seconds after which a wait counts as long; with None only the coordinator's reports are shown.
        now: When the cell began.
    """

    def __init__(
        self, cell: str, ranks: Collection[int], places: ProbeRound, every: float | None, now: float
    ) -> None:
        self._cell, self._ranks, self._places, self._every = cell, tuple(ranks), places, every
        #: Collectives that are overdue, perhaps another cell's: only the ranks' answers show which.
        self._waits: dict[_Key, _OverdueCollective] = {}
        #: Ranks whose part has ended, and below when the first one's did.
        self._ended: list[int] = []
        self._ended_at: float | None = None
        #: When the next round of questions begins; None during one, or if only the coordinator's reports count.
        self._refresh_at = None if every is None else now + every
        self._shown: _OverdueCollective | None = None  # what is shown now; of several the oldest
        #: Places as shown last: after a failure the ranks are not asked again.
        self._shown_places: list[str] = []
        self._vanished = False  # whether no rank was in it any more when the ranks were asked last
        self._behind = False  # whether a line says now that ranks are behind
        #: Whether the text stays as it is, since the cell was interrupted or has ended.
        self._quiet = False
        self._oldest = 0.0  # seconds of the collective that executes longest

    @property
    def deadline(self) -> float | None:
        """When to call :meth:`time`."""
        return None if self._places.running else self._refresh_at

    # -- events -------------------------------------------------------------------------------------------------------

    def reported(self, stall: Stall, now: float) -> list[Effect]:
        """Handle the coordinator's report of a collective."""
        if self._quiet or not stall.missing or not set(self._ranks) & {*stall.waited, *stall.missing}:
            return []
        key = (stall.process_set, kind_label(stall.kind), stall.name)
        wait = self._waits.get(key)
        if (_EXECUTING, *key[1:]) in self._waits:
            return []  # found already by asking the ranks
        if wait is None:
            site = stall.sites[0] if stall.sites else ""
            wait = self._waits[key] = _OverdueCollective(key[1], key[2], site, now - stall.seconds, set())
        wait.missing = set(stall.missing)
        for rank in stall.waited:
            wait.seen.setdefault(rank, 0.0)
        for rank in stall.missing:
            wait.seen.pop(rank, None)
        # After a round that is under way, `placed` finds this wait, and the next round asks its ranks.
        return [] if self._places.running else self._ask(now)

    def rank_ended(self, rank: int, now: float) -> None:
        """Take the end of a rank's part of the cell."""
        self._ended.append(rank)
        if self._ended_at is None:
            self._ended_at = now

    def joined(self, ranks: Collection[int]) -> None:
        """Add ranks that run the cell from now on, too."""
        self._ranks = tuple(sorted({*self._ranks, *ranks}))
        self._ended = [rank for rank in self._ended if rank not in ranks]

    def time(self, running: Collection[int], now: float) -> list[Effect]:
        """Handle the deadline; ``running`` are the ranks that have not ended the cell."""
        self._refresh_at = None
        if self._quiet or not (self._waits or running):
            return []
        return self._ask(now, running)

    def placed(self, running: Collection[int], now: float) -> list[Effect]:
        """Take the end of a round of questions."""
        if self._quiet:
            return []
        for key, wait in list(self._waits.items()):
            if self._is_over(wait):
                del self._waits[key]
        self._find_executing(running, now)
        own = [wait for wait in self._waits.values() if self._is_own(wait)]
        behind = self._is_behind(running, now)
        self._refresh_at = self._next_look(now, at_once=bool(self._waits) or behind)
        if own:
            self._shown, self._behind = min(own, key=lambda wait: wait.since), False
            self._vanished = False
            return [ShowStatus("\n".join(self._lines(own, now)))]
        if self._shown is not None and not self._vanished:
            # It went on, or failed: then the cell's end comes soon.
            self._vanished, self._refresh_at = True, now + REFRESH
            return []
        if self._shown is not None:
            return self._conclude(True, now)
        if behind:
            self._behind = True
            return [ShowStatus("\n".join(self._lines_behind(running, now)))]
        return []

    def put_off(self, seconds: float, now: float) -> None:
        """Shift the deadlines by these seconds, in which the user was answering a rank."""
        if self._ended_at is not None:
            self._ended_at += seconds
        for wait in self._waits.values():
            wait.since += seconds
        if self._refresh_at is not None and self._every is not None:
            self._refresh_at = now + (REFRESH if self._waits else self._every)

    def hush(self) -> None:
        """Leave the text as it is until :meth:`close`, as the user has interrupted the cell."""
        self._quiet, self._refresh_at = True, None

    def close(self, ok: bool, now: float) -> list[Effect]:
        """Handle the end of the cell, which had no error if ``ok``."""
        self._quiet = True
        return self._conclude(ok, now) if self._shown is not None or self._behind else []

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _ask(self, now: float, more: Iterable[int] = ()) -> list[Effect]:
        ranks = set(more)
        for wait in self._waits.values():
            ranks |= wait.missing | set(wait.seen)
        return self._places.ask(ranks, now)

    def _next_look(self, now: float, *, at_once: bool) -> float | None:
        if at_once:
            return now + REFRESH
        if self._every is None:
            return None
        if self._oldest:  # it will have taken long at that moment
            return now + max(REFRESH, self._every - self._oldest)
        behind_at = now if self._ended_at is None else self._ended_at
        return behind_at + self._every if now < behind_at + self._every else now + self._every

    def _find_executing(self, running: Collection[int], now: float) -> None:
        """Collectives that were submitted by all long ago and have not ended."""
        if self._every is None:
            return
        answers = self._places.answers
        self._oldest = 0.0
        silent = {rank for rank in running if rank not in answers}
        for rank, stack in answers.items():
            for pending in stack.pending if stack.cell == self._cell else ():
                if not pending.executing:
                    continue
                if pending.seconds < self._every:
                    self._oldest = max(self._oldest, pending.seconds)
                    continue
                if any(wait.name == pending.name and not wait.executing for wait in self._waits.values()):
                    continue  # the coordinator has reported it
                key = (_EXECUTING, pending.collective, pending.name)
                wait = self._waits.setdefault(
                    key,
                    _OverdueCollective(
                        key[1], key[2], pending.site, now - pending.seconds, set(), executing=True
                    ),
                )
                wait.seen[rank] = pending.seconds
                wait.missing = silent

    def _is_over(self, wait: _OverdueCollective) -> bool:
        """Take the ranks' answers. Returns whether one of those that waited has gone on."""
        for rank, stack in self._places.answers.items():
            seconds = waits_in(stack.pending, wait.kind, wait.name)
            if rank in wait.missing and seconds is not None and not wait.executing:
                wait.missing.discard(rank)
                wait.seen[rank] = seconds
            elif rank in wait.seen:
                # Fewer seconds than before: that one has ended, and the rank is in the next one of this name.
                if seconds is None or seconds < wait.seen[rank]:
                    return True
                wait.seen[rank] = seconds
        return not (wait.missing or wait.executing)

    def _is_own(self, wait: _OverdueCollective) -> bool:
        """Return whether a rank waits in this very cell, and not in another that these ranks run before or after it.

        If no rank that waits answers in time, show it under one cell too many rather than nowhere.
        """
        cells = [stack.cell for rank, stack in self._places.answers.items() if rank in wait.seen]
        return not cells or self._cell in cells

    def _is_behind(self, running: Collection[int], now: float) -> bool:
        if not running or self._ended_at is None or self._every is None:
            return False
        if 2 * len(running) > len(self._ranks):
            return False  # then some were early rather than others late
        return now - self._ended_at >= self._every

    def _lines(self, waits: list[_OverdueCollective], now: float) -> list[str]:
        groups: dict[tuple[int, ...], list[_OverdueCollective]] = {}
        for wait in sorted(waits, key=lambda wait: wait.since):
            groups.setdefault(tuple(sorted(wait.missing)), []).append(wait)
        lines = []
        for missing, members in groups.items():
            for wait in members:
                wait.waiting, wait.awaited, wait.shown_at = tuple(wait.seen), missing, now
        for missing, members in list(groups.items())[:MOST_WAITS]:
            first, waiting = members[0], format_ranks(tuple(members[0].seen))
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            have = "has" if len(first.seen) == 1 else "have"
            seconds = now - first.since
            if not missing:
                lines.append(
                    f"{first.head}{more}: {waiting} {have} been in it for {seconds:.0f} s, its data is under way"
                )
                continue
            lines.append(
                f"{first.head}{more}: {waiting} {have} waited {seconds:.0f} s for {format_ranks(missing)}"
            )
        if len(groups) > MOST_WAITS:
            lines.append(f"… and others, in {len(groups) - MOST_WAITS} more groups of ranks")
        awaited = {rank for missing in groups for rank in missing}
        self._shown_places = [f"  {line}" for line in grouped({rank: self._where(rank) for rank in awaited})]
        return lines + self._shown_places

    def _lines_behind(self, running: Collection[int], now: float) -> list[str]:
        assert self._ended_at is not None
        late = tuple(sorted(running))
        are = "is" if len(late) == 1 else "are"
        head = (
            f"{format_ranks(self._ended)} ended this cell {now - self._ended_at:.0f} s ago; "
            f"{format_ranks(late)} {are} still in it"
        )
        return [head, *(f"  {line}" for line in grouped({rank: self._where(rank) for rank in late}))]

    def _where(self, rank: int) -> str:
        stack = self._places.answers.get(rank)
        waits = collective_of(stack) if stack is not None else ""
        return f"{waits}, {self._places.text(rank)}" if waits else self._places.text(rank)

    def _conclude(self, ok: bool, now: float) -> list[Effect]:
        wait, self._shown, self._behind = self._shown, None, False
        if wait is None:
            return [ShowStatus("", final=True)]
        # It went on at some moment since it was shown last.
        took = (
            (min(wait.shown_at + REFRESH, now) + wait.shown_at) / 2 - wait.since if ok else now - wait.since
        )
        seconds, waiting = f"{took:.0f} s", format_ranks(wait.waiting)
        awaited = format_ranks(wait.awaited) if wait.awaited else "its data"
        if ok:
            return [
                ShowStatus(
                    f"{wait.head} went on after about {seconds}: {waiting} waited for {awaited}", final=True
                )
            ]
        lines = [f"{wait.head}: {waiting} waited {seconds} for {awaited}", *self._shown_places]
        return [ShowStatus("\n".join(lines), final=True)]
