"""What happens besides collectives: cells, aborts, ranks that come and go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hvdlab.collectives.errors import format_ranks
from hvdlab.collectives.membership import Membership
from hvdlab.collectives.tracing.record_format import AbortEvent, CellBeginEvent, CellEndEvent

KEPT = 2000


@dataclass(slots=True)
class Mark:
    """Something at one moment or, a cell, from ``begin_ns`` to ``end_ns`` (``None`` while it runs).

    Times are on the common axis; those of all but cells and aborts are when the news came here. In a rank that is ``paused`` the user
    looks around; one that is ``waiting`` has joined and is let in at the others' next commit. ``formed`` is an epoch of the
    world that is made of other ranks than the one before; its rank is the first of these.
    """

    kind: Literal["cell", "abort", "joined", "left", "paused", "waiting", "formed"]
    rank: int
    begin_ns: int
    end_ns: int | None
    text: str
    ok: bool = True


class Marks:
    """The newest marks by number; :meth:`changed_since` tells which are new or have changed."""

    def __init__(self) -> None:
        self.stamp = 0
        self._marks: OrderedDict[int, tuple[int, Mark]] = OrderedDict()
        self._next = 0
        self._open: dict[tuple[int, str], int] = {}
        self._running: dict[int, str] = {}
        self._paused: dict[int, tuple[str, int]] = {}  # rank to why, and the number of the mark
        self._waiting: dict[int, int] = {}  # rank to the number of the mark
        self._formed: tuple[int, ...] = ()  # the ranks of the last generation
        self._membership: Membership | None = None

    def all(self) -> list[Mark]:
        return [mark for _, mark in self._marks.values()]

    def running(self, rank: int) -> str:
        """The cell that runs on a rank; empty if none does."""
        return self._running.get(rank, "")

    def changed_since(self, stamp: int) -> list[tuple[int, Mark]]:
        return [(number, mark) for number, (changed, mark) in self._marks.items() if changed > stamp]

    def _put(self, mark: Mark) -> int:
        number, self._next = self._next, self._next + 1
        self.stamp += 1
        self._marks[number] = (self.stamp, mark)
        while len(self._marks) > KEPT:
            self._marks.popitem(last=False)
        return number

    def event(
        self,
        rank: int,
        event: CellBeginEvent | CellEndEvent | AbortEvent,
        offset_ns: int,
        label: Callable[[str], str],
    ) -> None:
        """Take in what a rank recorded."""
        at = event.time_ns + offset_ns
        if isinstance(event, CellBeginEvent):
            self._running[rank] = label(event.cell)
            self._open[rank, event.cell] = self._put(Mark("cell", rank, at, None, label(event.cell)))
        elif isinstance(event, CellEndEvent):
            self._running.pop(rank, None)
            number = self._open.pop((rank, event.cell), None)
            if number is not None:
                self._end(number, at, ok=event.ok)
        elif not any(m.kind == "abort" and m.text == event.text for m in self.all()[-64:]):
            # All members record the same abort; the first one's time is shown.
            self._put(Mark("abort", rank, at, at, event.text, False))

    def membership(self, now: Membership, at_ns: int | None) -> None:
        """Take in which ranks are there, at ``at_ns`` on the common axis; ``None`` if this clock can't be compared with the ranks'.

        The first membership makes no marks: it says how things are, not that something happened.
        """
        before, self._membership = self._membership, now
        formed, self._formed = self._formed, now.formed or self._formed
        if before is None or not before.members or at_ns is None:
            return
        known = {(death.rank, death.pid) for death in before.deaths}
        here = {member.rank: member.pid for member in before.members}
        for death in now.deaths:
            if (death.rank, death.pid) not in known:
                self._end_cells(death.rank, at_ns)
                text = f"rank {death.rank} died: {death.reason}"
                self._put(Mark("left", death.rank, at_ns, at_ns, text, False))
        died = {death.rank for death in before.deaths}
        for member in now.members:
            if here.get(member.rank) != member.pid:
                text = f"rank {member.rank} joined on {member.host.split('#')[0]}"
                text += ", in place of the one that died" if member.rank in died else ""
                self._put(Mark("joined", member.rank, at_ns, at_ns, text))
        dead = {death.rank for death in now.deaths}
        for rank in set(here) - set(now.ranks) - dead:
            self._put(Mark("left", rank, at_ns, at_ns, f"rank {rank} left"))
        self._let_in(now, at_ns)
        if now.formed and formed and now.formed != formed:
            text = f"{format_ranks(now.formed)} from now on"
            self._put(Mark("formed", now.formed[0], at_ns, at_ns, text))

    def _let_in(self, now: Membership, at_ns: int) -> None:
        """Begin and end the marks of ranks that wait to be let in."""
        for rank in self._waiting.keys() - set(now.waiting):
            self._end(self._waiting.pop(rank), at_ns, ok=True)
        for rank in sorted(set(now.waiting) - self._waiting.keys()):
            text = f"rank {rank} waits to be let in"
            self._waiting[rank] = self._put(Mark("waiting", rank, at_ns, None, text))

    def paused(self, now: Mapping[int, str], at_ns: int) -> None:
        """Take in which ranks are paused, and why."""
        for rank, (why, number) in list(self._paused.items()):
            if now.get(rank) != why:
                del self._paused[rank]
                self._end(number, at_ns, ok=True)
        for rank in sorted(now.keys() - self._paused.keys()):
            number = self._put(Mark("paused", rank, at_ns, None, f"rank {rank} is {now[rank]}"))
            self._paused[rank] = now[rank], number

    def _end_cells(self, rank: int, at_ns: int) -> None:
        self._running.pop(rank, None)
        for key in [key for key in self._open if key[0] == rank]:
            self._end(self._open.pop(key), at_ns, ok=False)

    def _end(self, number: int, at_ns: int, *, ok: bool) -> None:
        if number in self._marks:
            mark = self._marks[number][1]
            mark.end_ns, mark.ok = max(at_ns, mark.begin_ns), ok
            self.stamp += 1
            self._marks[number] = (self.stamp, mark)
