"""Stall inspector: reports collectives that wait or execute for long, and ends those that wait too long if the options have a limit.

A member of an operation that was stopped, or is busy in native code, does not do its part, and does not answer a ping
either. A healthy member answers it on its control thread, while its user's code runs.

While a rank is paused for its user (at a prompt, in a debugger), no rank that waits for it is late, and no clock of a wait runs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hvdlab.collectives.coordinator.decision_log import DecisionEntry, DecisionKind
from hvdlab.collectives.coordinator.events import Log, Send
from hvdlab.collectives.coordinator.membership import MembershipTable
from hvdlab.collectives.coordinator.process_sets import (
    OPEN,
    Decisions,
    GenerationAbort,
    ProcessSets,
    ProcessSetState,
)
from hvdlab.collectives.coordinator.signatures import LocalDefinition, NegotiationRound, kind_label
from hvdlab.collectives.errors import CauseKind, call_name
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.messages import AbortedCollective, Stalled
from hvdlab.collectives.text import compact_ranks, format_ranks
from hvdlab.collectives.types import OpKind

ANSWER_WITHIN = 1.0
"""Seconds that members have to answer: a healthy one needs milliseconds, but its host can be loaded."""


class StallInspector:
    """Inspector of collectives that wait or execute for long.

    Args:
        every: Seconds after which, and then how often, one is reported; 0 never.
        shutdown: Seconds after which its generation ends; 0 never.
        sets: Process sets, with the collectives that wait.
        membership: Ranks and clients of the job.

    Attributes:
        due: Time of the next check; ``None`` if nothing waited at the last one.
        executions: Long operations.
    """

    def __init__(
        self,
        every: float,
        shutdown: float,
        sets: ProcessSets,
        membership: MembershipTable,
    ) -> None:
        self._sets = sets
        self._membership = membership
        # Infinity for "never": all comparisons below then work without a special case.
        self._every = every or math.inf
        self._shutdown = shutdown or math.inf
        #: Seconds until the first check of a new wait: there is nothing to report or end before.
        self._first = min(self._every, self._shutdown)
        self.due: float | None = None
        self.executions = Executions(sets, membership)

    def watch(self, now: float) -> None:
        """Schedule a check, after a first submission while nothing was pending."""
        # Infinity where stalls are neither reported nor ended: `None` would mean that nothing waits, and each submission would set it
        # again.
        self.due = now + self._first

    def watch_execution(self, since: float, now: float) -> None:
        """Schedule a check of an operation that a rank executes and has waited for since ``since``."""
        if math.isfinite(self._every):
            # A rank reports its wait only once that has lasted for some time: the check can be due by now.
            due = max(since + self._every - probe_lead_time(self._every), now)
            self.due = due if self.due is None else min(self.due, due)

    def exclude_pause(self, since: float, now: float) -> None:
        """Exclude the time from ``since`` to ``now`` from all waits, and check them at the next tick."""
        if self.due is not None:
            self.due = now
        self.executions.exclude_pause(since, now)

    def report_late(self, now: float) -> Decisions[None]:
        """Report or end the collectives that wait for long, and set :attr:`due`."""
        upcoming: list[float] = []
        # Copies: the state carries out each decision before this generator continues, and an abort replaces
        # the negotiation.
        for ps in list(self._sets):
            for current, missing in list(ps.negotiation.waiting()):
                if self._is_over(current, now):
                    yield from self._end(ps, current, missing)
                    break  # the abort has ended all rounds of the set
                if now >= self._next_report(current):
                    # One report after a long delay of this process, not one for each interval that it has missed.
                    current.reported = max(current.reported + 1, int((now - current.since) / self._every))
                    yield from self._report_round(ps, current, missing, now - current.since)
                upcoming.append(min(self._next_report(current), self._end_of(current)))
        stuck, times = yield from self.executions.probe(now, self._every)
        for ps, seconds, report, operation in stuck:
            lacking = f"{_ranks_or_rest(report.missing)} do not answer (stopped, or busy in C code)"
            text = f"has been executed for {seconds:.0f} s: {lacking}"
            operation.decision = yield from self._report_stall(ps, report, seconds, text, operation.decision)
        # `None` once nothing waits, so that an idle job has no timer.
        self.due = min(upcoming + times, default=None)

    def _report_round(
        self,
        ps: ProcessSetState,
        current: NegotiationRound,
        missing: tuple[int, ...],
        seconds: float,
    ) -> Decisions[None]:
        report = ps.negotiation.report_round(current, missing)
        joined = f", joined {_ranks_or_rest(report.joined)}" if report.joined else ""
        lacking = (
            f"submitted by {_ranks_or_rest(report.waited)}, missing {_ranks_or_rest(report.missing)}{joined}"
        )
        text = f"has been waiting for {seconds:.0f} s: {lacking}"
        current.stalled = yield from self._report_stall(ps, report, seconds, text, current.stalled)

    def _next_report(self, current: NegotiationRound) -> float:
        return current.since + self._every * (current.reported + 1)

    def _end_of(self, current: NegotiationRound) -> float:
        # A rank that has joined waits for the others to run out of data, for any time.
        return math.inf if current.info.kind == OpKind.JOIN else current.since + self._shutdown

    def _is_over(self, current: NegotiationRound, now: float) -> bool:
        return now >= self._end_of(current)

    def _end(
        self,
        ps: ProcessSetState,
        current: NegotiationRound,
        missing: tuple[int, ...],
    ) -> Decisions[None]:
        what = call_name(kind_label(current.info.kind), current.info.name)
        lacking = f"{format_ranks(missing)} did not submit it" if missing else "its group was not complete"
        text = f"{what}: {lacking} within {self._shutdown:g} s (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)"
        decision = current.stalled
        if not decision:
            decision = yield from _stall_entry(ps, current.info.name, missing)
        yield Log(text, decision=decision)
        if ps.phase == OPEN:
            yield GenerationAbort(ps, CauseKind.TIMEOUT, missing, text, cause=decision)

    def _report_stall(
        self, ps: ProcessSetState, report: AbortedCollective, seconds: float, text: str, decision: int
    ) -> Decisions[int]:
        """Report a stall. Return its entry in the decision log, which it gets with its first report (``decision`` 0)."""
        if not decision:
            decision = yield from _stall_entry(ps, report.name, report.missing, text)
        stalled = Stalled(ps.id, seconds, report, decision)
        yield Send(tuple(self._membership.clients), stalled)
        if not self._is_shown(report.waited):
            what = call_name(kind_label(report.kind), report.name)
            yield Log(f"{what} {text}", decision=decision)
        return decision

    def _is_shown(self, waited: tuple[int, ...]) -> bool:
        """Return whether a client runs cells on these ranks: it shows its user the stall, better than a line in the log would."""
        ranks = self._membership.ranks
        return bool(self._membership.clients) and all(ranks[rank].tracked for rank in waited if rank in ranks)


class Executions:
    """Register of operations that are being executed and waited for, as far as ranks have reported them.

    Args:
        sets: Process sets; their members are asked for a sign of life.
        membership: Ranks, with the operations whose end they wait for.
    """

    def __init__(self, sets: ProcessSets, membership: MembershipTable) -> None:
        self._sets = sets
        self._membership = membership
        #: Operations of the last check, with its findings.
        self._operations: dict[OperationKey, AwaitedOperation] = {}

    def answered(self, rank: int) -> None:
        """Record a sign of life of a rank."""
        # For all operations: an answer to any ping shows that the rank's control thread runs.
        for operation in self._operations.values():
            operation.silent.discard(rank)

    def exclude_pause(self, since: float, now: float) -> None:
        """Exclude the time from ``since`` to ``now`` from all waits. Members that have been asked are asked again."""
        for operation in self._operations.values():
            operation.since = shifted_start(operation.since, since, now)
            operation.asked = None

    def probe(self, now: float, every: float) -> Decisions[tuple[list[OverdueOperation], list[float]]]:
        """Ask the members of long operations for a sign of life.

        Returns:
            The operations to report now, and the times of the next checks.
        """
        # Rebuilt from the ranks' reports: an operation whose last waiting rank has reported its end drops out.
        waits = self._waits()
        self._operations = {
            key: self._operations.get(key) or AwaitedOperation(since) for key, (since, _) in waits.items()
        }
        stuck: list[OverdueOperation] = []
        upcoming: list[float] = []
        for key, operation in self._operations.items():
            ps = self._sets.by_id[key.process_set]
            if operation.asked is None and now >= _ask_at(operation, every):
                info = next(iter(waits[key][1].values())).info
                members = ps.members if info.from_any else info.between or ps.members
                operation.asked, operation.silent = now, set(members) - ps.gone
                # One message to all; answers of ranks that are not asked do no harm.
                yield Send(ps.peers, m.Ping(0))
            elif operation.asked is not None and now >= operation.asked + ANSWER_WITHIN:
                operation.asked = None
                operation.reported = max(operation.reported + 1, int((now - operation.since) / every))
                if operation.silent:
                    report = _silence_report(waits[key][1], operation.silent)
                    stuck.append(OverdueOperation(ps, now - operation.since, report, operation))
            asked = operation.asked
            upcoming.append(_ask_at(operation, every) if asked is None else asked + ANSWER_WITHIN)
        return stuck, upcoming

    def _waits(self) -> dict[OperationKey, tuple[float, dict[int, LocalDefinition]]]:
        """Return the operations with ranks that wait for their end: the begin of the wait, and the submission of each of these ranks."""
        found: dict[OperationKey, tuple[float, dict[int, LocalDefinition]]] = {}
        for rank, peer in self._membership.ranks.items():
            wait = peer.executing
            defined = peer.definitions.get(wait.local) if wait is not None else None
            if wait is None or defined is None:
                continue
            ps = self._sets.by_id.get(wait.process_set)
            if ps is None or ps.generation != wait.generation:
                continue
            since, waiting = found.setdefault(
                OperationKey(ps.id, ps.generation, defined.info.name), (wait.since, {})
            )
            waiting[rank] = defined
            if wait.since < since:
                found[OperationKey(ps.id, ps.generation, defined.info.name)] = (wait.since, waiting)
        return found


def _stall_entry(ps: ProcessSetState, name: str, missing: tuple[int, ...], text: str = "") -> Decisions[int]:
    """Add a stall to the decision log. Return its number there."""
    entry = DecisionEntry(
        DecisionKind.STALLED,
        process_set=ps.id,
        generation=ps.generation,
        names=(name,),
        ranks=missing,
        facts={"text": text},
    )
    yield entry
    return entry.number


def _ranks_or_rest(ranks: tuple[int, ...]) -> str:
    return f"ranks {compact_ranks(ranks)}" if ranks else "the rest of its group"


class OperationKey(NamedTuple):
    """Key of an operation, as the ranks that wait for its end name it."""

    process_set: int
    generation: int
    name: str


class AwaitedOperation:
    """Operation with at least one rank that waits for its end.

    Attributes:
        since: Time at which the first rank began to wait.
        reported: How many times the stall time had passed at the last check of the operation.
        asked: Time at which its members were asked for a sign of life, or ``None``.
        silent: The members that have not answered.
        decision: Entry of the decision log about it; 0 until it is reported.
    """

    __slots__ = ("asked", "decision", "reported", "silent", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.reported = self.decision = 0
        self.asked: float | None = None
        self.silent: set[int] = set()


class OverdueOperation(NamedTuple):
    """Operation with members that have not answered the question for a sign of life."""

    process_set: ProcessSetState
    seconds: float
    collective: m.AbortedCollective
    operation: AwaitedOperation


def probe_lead_time(every: float) -> float:
    """Return the seconds before a report at which the members are asked, so that it comes in time."""
    return min(ANSWER_WITHIN, every / 2)


def _ask_at(operation: AwaitedOperation, every: float) -> float:
    return operation.since + every * (operation.reported + 1) - probe_lead_time(every)


def _silence_report(waiting: dict[int, LocalDefinition], silent: set[int]) -> m.AbortedCollective:
    info = next(iter(waiting.values())).info
    waited = tuple(sorted(waiting.keys() - silent))
    sites = tuple(waiting[rank].site for rank in waited)
    return m.AbortedCollective(info.kind, info.name, waited, tuple(sorted(silent)), sites)


class Pauses:
    """Pauses of ranks for their users, while the clocks of all waits stand still.

    Args:
        sets: Process sets, with the rounds that wait.
        membership: Ranks, which wait; and clients, which show the pauses.

    Attributes:
        reasons: Reason of each pause, by rank; empty if no rank is paused.
    """

    def __init__(self, sets: ProcessSets, membership: MembershipTable) -> None:
        self.reasons: dict[int, str] = {}
        #: Begin of the present pause, when the first of these ranks was paused.
        self._since = 0.0
        self._sets = sets
        self._membership = membership

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __contains__(self, rank: int) -> bool:
        return rank in self.reasons

    def begin_pause(self, rank: int, reason: str, now: float) -> Decisions[None]:
        """Record that a rank is paused, for this reason, and report it to clients."""
        if not self.reasons:
            self._since = now
        self.reasons[rank] = reason
        yield self._report_pauses()

    def end_pause(self, rank: int, now: float) -> Decisions[float | None]:
        """Record that a rank continues, or is gone, and report it to clients; after the last one move the begin of all waits.

        Returns:
            The time at which the first rank was paused, if this was the last; otherwise ``None``.
        """
        if rank not in self.reasons:
            return None
        del self.reasons[rank]
        yield self._report_pauses()
        # Another rank is still paused: the clocks stand still since the first pause, and are moved once, after the last.
        if self.reasons:
            return None
        # The waits begin later, instead of a count of paused seconds in each: all limits are compared with the begin.
        since = self._since
        for peer in self._membership.ranks.values():
            if peer.wait is not None:
                peer.wait = peer.wait._replace(since=shifted_start(peer.wait.since, since, now))
            if peer.executing is not None:
                peer.executing = peer.executing._replace(
                    since=shifted_start(peer.executing.since, since, now)
                )
        for ps in self._sets:
            for current, _ in ps.negotiation.waiting():
                current.since = shifted_start(current.since, since, now)
        return since

    def message(self) -> m.PausedRanks:
        """Return the message that lists the paused ranks for clients."""
        ranks = tuple(sorted(self.reasons))
        return m.PausedRanks(ranks, tuple(self.reasons[rank] for rank in ranks))

    def _report_pauses(self) -> Send:
        return Send(tuple(self._membership.clients), self.message())


def shifted_start(begun: float, since: float, now: float) -> float:
    """Return the begin of a wait that began at ``begun``, moved later by the part of ``since`` to ``now`` that it lasted."""
    return begun + now - since if begun < since else now
