"""Collectives that wait for long: the coordinator reports them, and in the end gives them up if the options say so."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hvdlab.collectives.coordinator.executions import Executions, lead
from hvdlab.collectives.coordinator.process_sets import OPEN, ProcessSet
from hvdlab.collectives.coordinator.rounds import Round
from hvdlab.collectives.coordinator.signatures import kind_label
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.errors import CauseKind, call_name, compact_ranks, format_ranks
from hvdlab.collectives.protocol.messages import AbortedCollective, Stalled

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState


class Stalls:
    """When to look for collectives that wait for long, and what to do about them.

    Args:
        every: Seconds after which, and then how often, one is reported; 0 never.
        shutdown: Seconds after which its epoch ends; 0 never.

    Attributes:
        due: When to look next; ``None`` if nothing waited when that was last asked.
        executions: Operations that take long.
    """

    def __init__(self, every: float, shutdown: float) -> None:
        self._every = every or math.inf
        self._shutdown = shutdown or math.inf
        self._first = min(self._every, self._shutdown)
        self.due: float | None = None
        self.executions = Executions()

    def watch(self, now: float) -> None:
        """Something was submitted, and nothing is being watched."""
        self.due = now + self._first

    def watch_execution(self, since: float, now: float) -> None:
        """A rank waits for the end of what it executes."""
        if math.isfinite(self._every):
            due = max(since + self._every - lead(self._every), now)
            self.due = due if self.due is None else min(self.due, due)

    def put_off(self, since: float, now: float) -> None:
        """The time from ``since`` to ``now`` does not count for any wait; look at all of them anew."""
        if self.due is not None:
            self.due = now
        self.executions.put_off(since, now)

    def look(self, state: CoordinatorState, now: float) -> None:
        """Report or end the collectives that wait for long, and set :attr:`due`."""
        upcoming: list[float] = []
        for ps in list(state.sets):
            for current, missing in list(ps.matcher.waiting()):
                if self._is_over(current, now):
                    self._end(state, ps, current, missing)
                    break
                if now >= self._next_report(current):
                    current.reported = max(current.reported + 1, int((now - current.since) / self._every))
                    self._report_round(state, ps, current, missing, now - current.since)
                upcoming.append(min(self._next_report(current), self._end_of(current)))
        stuck, times = self.executions.look(state, now, self._every)
        for ps, seconds, report in stuck:
            lacking = f"{_ranks(report.missing)} do not answer (stopped, or busy in C code)"
            _report(state, ps, report, seconds, f"has been executed for {seconds:.0f} s: {lacking}")
        self.due = min(upcoming + times, default=None)

    def _report_round(
        self,
        state: CoordinatorState,
        ps: ProcessSet,
        current: Round,
        missing: tuple[int, ...],
        seconds: float,
    ) -> None:
        report = ps.matcher.report_round(current, missing)
        joined = f", joined {_ranks(report.joined)}" if report.joined else ""
        lacking = f"submitted by {_ranks(report.waited)}, missing {_ranks(report.missing)}{joined}"
        _report(state, ps, report, seconds, f"has been waiting for {seconds:.0f} s: {lacking}")

    def _next_report(self, current: Round) -> float:
        return current.since + self._every * (current.reported + 1)

    def _end_of(self, current: Round) -> float:
        # A rank that has joined waits for the others to run out of data, however long that takes.
        return math.inf if current.info.kind == OpKind.JOIN else current.since + self._shutdown

    def _is_over(self, current: Round, now: float) -> bool:
        return now >= self._end_of(current)

    def _end(self, state: CoordinatorState, ps: ProcessSet, current: Round, missing: tuple[int, ...]) -> None:
        what = call_name(kind_label(current.info.kind), current.info.name)
        lacking = f"{format_ranks(missing)} did not submit it" if missing else "its group was not complete"
        text = f"{what}: {lacking} within {self._shutdown:g} s (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)"
        state.outbox.log(text)
        if ps.phase == OPEN:
            state.sets.abort(ps, CauseKind.TIMEOUT, missing, text)


def _report(
    state: CoordinatorState, ps: ProcessSet, report: AbortedCollective, seconds: float, text: str
) -> None:
    state.outbox.send(tuple(state.membership.clients), Stalled(ps.id, seconds, report))
    if _is_shown(state, report.waited):
        return
    what = call_name(kind_label(report.kind), report.name)
    state.outbox.log(f"{what} {text}")


def _is_shown(state: CoordinatorState, waited: tuple[int, ...]) -> bool:
    """Whether a client runs cells on these ranks: it shows its user the stall, better than a line in the log would."""
    ranks = state.membership.ranks
    return bool(state.membership.clients) and all(ranks[rank].tracked for rank in waited if rank in ranks)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"ranks {compact_ranks(ranks)}" if ranks else "the rest of its group"
