"""The end of a round of events for a process set: ready rounds are released, verdicts are sent, ranks that wait in vain are freed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from hvdlab.collectives.coordinator import set_changes
from hvdlab.collectives.coordinator.fusion import fuse
from hvdlab.collectives.coordinator.negotiation import Rejection, Verdict
from hvdlab.collectives.coordinator.orders import execute
from hvdlab.collectives.coordinator.process_sets import ProcessSet
from hvdlab.collectives.coordinator.rounds import Round
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.errors import CauseKind, format_ranks

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState


def decide(state: CoordinatorState, ps: ProcessSet, now: float) -> None:
    """Release the ready rounds of an open epoch, and send the verdicts, in order."""
    matcher = ps.matcher
    if matcher.conflict:
        state.sets.abort(ps, CauseKind.MISMATCH, (), matcher.conflict)
        return
    ready, matcher.ready = matcher.ready, []
    if matcher.schedule or any(current.priority is not None for current in ready):
        ready = _schedule(state, ps, ready, now)
    if matcher.rejections:
        rejections, matcher.rejections = matcher.rejections, []
        done = 0
        for after, rejected in itertools.groupby(rejections, lambda r: r.after):
            _release(state, ps, ready[done:after])
            _reject(state, ps, rejected)
            done = after
        ready = ready[done:]
    if ready:
        _release(state, ps, ready)
    if ps.gone and matcher.pending:
        left = tuple(sorted(ps.gone))
        state.sets.abort(ps, CauseKind.RANK_LEFT, left, f"{format_ranks(left)} left the job")


def _schedule(state: CoordinatorState, ps: ProcessSet, ready: list[Round], now: float) -> list[Round]:
    """Order the rounds with a priority whose turn it is, and keep the others with one back.

    Where a round that is kept would be in the way, none is: it would be aborted with what waits for a rank that has no cell, has left or
    begins again; no verdict may overtake it, since ranks take both out of the same queues; and once all ranks have joined, they go on as if
    all that was submitted before were over, also those that have not submitted it themselves.

    Returns:
        The rounds that are still to be released, in order.
    """
    matcher, credit = ps.matcher, state.options.scheduling_credit
    schedule = matcher.schedule
    if schedule:  # a rank was not taken to wait while a round of that name was kept; what it waits for may be the next one, and in vain
        state.check_later(now)
    leaving = ps.gone or state.elastic.ready or not matcher.members.isdisjoint(state.cells.idle)
    joined = any(current.info.kind == OpKind.JOIN for current in ready)
    if leaving or joined or matcher.rejections or not credit:
        run(state, ps, schedule.next())
        return ready
    others: list[Round] = []
    for current in ready:
        if schedule.concerns(current):
            schedule.add((current,))
        else:
            others.append(current)
    _release(state, ps, others)
    due = schedule.next(credit)
    if due:
        # Two batches at least, so that ranks execute one of them while the end of the other is reported.
        _run_together(state, ps, due, min(state.fusion_threshold, credit // 2), reported=True)
    return []


def run(state: CoordinatorState, ps: ProcessSet, rounds: Sequence[Round]) -> None:
    """Have these rounds executed, fused as far as they may be."""
    for between, some in itertools.groupby(rounds, lambda current: current.info.between):
        if between:
            _run_messages(state, ps, tuple(some), between)
        else:
            _run_together(state, ps, tuple(some), state.fusion_threshold)


def _run_messages(
    state: CoordinatorState, ps: ProcessSet, rounds: Sequence[Round], between: tuple[int, ...]
) -> None:
    """Order messages from the two ranks that they go between. All messages have the same order on every rank, so no two ranks
    wait for each other.
    """
    ps.sequence += 1
    two = [(rank, peer) for rank, peer in zip(ps.members, ps.peers, strict=True) if rank in between]
    ranks, peers = zip(*two, strict=True)
    execute(ps.id, ps.epoch, ps.sequence, [(current,) for current in rounds], ranks, peers, state.outbox)


def _run_together(
    state: CoordinatorState,
    ps: ProcessSet,
    rounds: Sequence[Round],
    threshold: int,
    *,
    reported: bool = False,
) -> None:
    if rounds:
        ps.sequence += 1
        batches: Sequence[Sequence[Round]] = (rounds,)
        if len(rounds) > 1:
            batches = fuse(rounds, threshold, separate_groups=state.options.separate_groups)
        tuned = state.options.tuning is not None
        if tuned:
            state.tuning.before(state, ps)
        if reported:
            ps.matcher.schedule.ordered(ps.sequence, batches)
        execute(ps.id, ps.epoch, ps.sequence, batches, ps.members, ps.peers, state.outbox, reported=reported)
        if tuned:
            state.tuning.executed(ps, rounds)


def free_from_idle(state: CoordinatorState, now: float) -> None:
    """End the collectives that other ranks wait in and that ranks without a cell will not submit."""
    idle = state.cells.idle - state.pauses.reasons.keys()
    for ps in list(state.sets):
        if ps.matcher.debts:
            for rank in idle & ps.matcher.debts.ranks:
                ps.matcher.debts.forgive(rank)
        if ps.matcher.pending and not ps.matcher.members.isdisjoint(idle):
            _free_messages(state, ps, idle, now)
            for current, missing in ps.matcher.waiting():
                absent = [r for r in (missing or ps.members) if r in idle]
                if absent and not current.info.from_any:  # else another rank may send
                    why = state.cells.absence(absent, current.heads)
                    state.sets.abort(ps, why.kind, why.ranks, why.text)
                    break


def _free_messages(state: CoordinatorState, ps: ProcessSet, idle: AbstractSet[int], now: float) -> None:
    """End the messages that ranks without a cell will not send or receive. They concern no third rank, so the epoch goes on."""
    vain: dict[str, list[int]] = {}
    for waiting, missing in ps.matcher.waiting():
        absent, info = [rank for rank in missing if rank in idle], waiting.info
        if info.between and absent and (not info.from_any or len(absent) == len(missing)):
            vain[info.name] = absent
    for name, absent in vain.items():
        while (current := ps.matcher.rounds.get(name)) is not None and not current.heads.keys() & {*absent}:
            why = state.cells.absence(absent, current.heads)
            ps.matcher.end_message(current, why.kind, why.ranks, why.text, now)
    if ps.matcher.rejections:
        decide(state, ps, now)


def end_disputes(state: CoordinatorState, now: float) -> bool:
    """Give verdicts where ranks disagree and the others have had their time to submit theirs.

    Returns whether any was given.
    """
    idle = state.cells.idle
    ended = False
    for ps in state.sets:
        matcher = ps.matcher
        if matcher.disputes:
            vain = ps.gone or not matcher.members.isdisjoint(idle)
            matcher.end_disputes(0.0 if vain else state.options.dispute_grace, now)
            if matcher.rejections or matcher.conflict:
                state.touched[ps] = None
                ended = True
    return ended


def _reject(state: CoordinatorState, ps: ProcessSet, rejected: Iterable[Rejection]) -> None:
    """Send verdicts; ranks that get the same share a message."""
    peers = dict(zip(ps.members, ps.peers, strict=True))
    locals: dict[tuple[Verdict, int], list[int]] = {}
    for _, rank, local, verdict in rejected:
        locals.setdefault((verdict, rank), []).append(local)
    audiences: dict[tuple[Verdict, tuple[int, ...]], list[int]] = {}
    for (verdict, rank), numbers in locals.items():
        audiences.setdefault((verdict, tuple(numbers)), []).append(peers[rank])
    for (verdict, same), receivers in audiences.items():
        state.outbox.send(tuple(receivers), verdict.message(ps.id, ps.epoch, same))


def _release(state: CoordinatorState, ps: ProcessSet, ready: Sequence[Round]) -> None:
    """Release rounds in order; a round that changes process sets is released alone, between those before and after it."""
    plain: list[Round] = []
    for current in ready:
        if current.info.kind == OpKind.ADD_PROCESS_SET or current.info.kind == OpKind.REMOVE_PROCESS_SET:
            run(state, ps, plain)
            plain = []
            set_changes.change_sets(state, ps, current)
        else:
            plain.append(current)
    run(state, ps, plain)
