"""Fusion: from ready rounds to the orders to execute them, several allreduces as one operation.

At the end of each batch of events the ready rounds of a process set are dispatched and its rejections sent (:func:`decide`), unless a
fusion window is open that more rounds may come into. The order of these effects is part of the protocol: a rank tells its
submissions of one local id apart by their order alone, so no rejection overtakes an earlier order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hvdlab.collectives.autotune import Parameters, Sample, Tuner
from hvdlab.collectives.coordinator.events import Effects, Tuned
from hvdlab.collectives.coordinator.negotiation import Negotiation, Rejection, RejectReason
from hvdlab.collectives.coordinator.options import CoordinatorOptions
from hvdlab.collectives.coordinator.process_sets import ProcessSetState
from hvdlab.collectives.coordinator.rounds import NegotiationRound
from hvdlab.collectives.coordinator.signatures import FuseKey
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.errors import CauseKind, format_ranks
from hvdlab.collectives.protocol.messages import Batch, Execute, Signature, Tune

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState


def flush_process_set(state: CoordinatorState, ps: ProcessSetState, now: float) -> None:
    """Release the ready rounds of an open epoch, and send the verdicts, in order."""
    negotiation = ps.negotiation
    if negotiation.conflict:
        state.sets.abort(ps, CauseKind.MISMATCH, (), negotiation.conflict)
        return
    ready, negotiation.ready = negotiation.ready, []
    if negotiation.priorities or any(current.priority is not None for current in ready):
        ready = _dispatch_by_priority(state, ps, ready, now)
    if negotiation.rejections:
        rejections, negotiation.rejections = negotiation.rejections, []
        done = 0
        for after, rejected in itertools.groupby(rejections, lambda r: r.after):
            _dispatch_ready(state, ps, ready[done:after])
            _reject(state, ps, rejected)
            done = after
        ready = ready[done:]
    if ready:
        _dispatch_ready(state, ps, ready)
    if ps.gone and negotiation.pending:
        left = tuple(sorted(ps.gone))
        state.sets.abort(ps, CauseKind.RANK_LEFT, left, f"{format_ranks(left)} left the job")


def _dispatch_by_priority(
    state: CoordinatorState, ps: ProcessSetState, ready: list[NegotiationRound], now: float
) -> list[NegotiationRound]:
    """Order the rounds with a priority whose turn it is, and keep the others with one back.

    Where a round that is kept would be in the way, none is: it would be aborted with what waits for a rank that has no cell, has left or
    begins again; no verdict may overtake it, since ranks take both out of the same queues; and once all ranks have joined, they go on as if
    all that was submitted before were over, also those that have not submitted it themselves.

    Returns:
        The rounds that are still to be released, in order.
    """
    negotiation, credit = ps.negotiation, state.options.scheduling_credit
    priorities = negotiation.priorities
    if priorities:  # a rank was not taken to wait while a round of that name was kept; what it waits for may be the next one, and in vain
        state.check_later(now)
    leaving = ps.gone or state.elastic.ready or not negotiation.members.isdisjoint(state.cells.idle)
    joined = any(current.info.kind == OpKind.JOIN for current in ready)
    if leaving or joined or negotiation.rejections or not credit:
        dispatch(state, ps, priorities.pop_due())
        return ready
    others: list[NegotiationRound] = []
    for current in ready:
        if priorities.concerns(current):
            priorities.add((current,))
        else:
            others.append(current)
    _dispatch_ready(state, ps, others)
    due = priorities.pop_due(credit)
    if due:
        # Two batches at least, so that ranks execute one of them while the end of the other is reported.
        _dispatch_fused(state, ps, due, min(state.fusion_threshold, credit // 2), reported=True)
    return []


def _dispatch_ready(state: CoordinatorState, ps: ProcessSetState, ready: Sequence[NegotiationRound]) -> None:
    """Release rounds in order; a round that changes process sets is released alone, between those before and after it."""
    plain: list[NegotiationRound] = []
    for current in ready:
        if current.info.kind == OpKind.ADD_PROCESS_SET or current.info.kind == OpKind.REMOVE_PROCESS_SET:
            dispatch(state, ps, plain)
            plain = []
            state.sets.change_sets(ps, current)
        else:
            plain.append(current)
    dispatch(state, ps, plain)


def dispatch(state: CoordinatorState, ps: ProcessSetState, rounds: Sequence[NegotiationRound]) -> None:
    """Have these rounds executed, fused as far as they may be."""
    for between, some in itertools.groupby(rounds, lambda current: current.info.between):
        if between:
            _dispatch_messages(state, ps, tuple(some), between)
        else:
            _dispatch_fused(state, ps, tuple(some), state.fusion_threshold)


def _dispatch_messages(
    state: CoordinatorState, ps: ProcessSetState, rounds: Sequence[NegotiationRound], between: tuple[int, ...]
) -> None:
    """Order messages from the two ranks that they go between. All messages have the same order on every rank, so no two ranks
    wait for each other.
    """
    ps.sequence += 1
    two = [(rank, peer) for rank, peer in zip(ps.members, ps.peers, strict=True) if rank in between]
    ranks, peers = zip(*two, strict=True)
    send_execute(
        ps.id, ps.epoch, ps.sequence, [(current,) for current in rounds], ranks, peers, state.effects
    )


def _dispatch_fused(
    state: CoordinatorState,
    ps: ProcessSetState,
    rounds: Sequence[NegotiationRound],
    threshold: int,
    *,
    reported: bool = False,
) -> None:
    if rounds:
        ps.sequence += 1
        batches: Sequence[Sequence[NegotiationRound]] = (rounds,)
        if len(rounds) > 1:
            batches = fuse(rounds, threshold, separate_groups=state.options.separate_groups)
        tuned = state.options.tuning is not None
        if tuned:
            state.tuning.before(state, ps)
        if reported:
            ps.negotiation.priorities.ordered(ps.sequence, batches)
        send_execute(
            ps.id, ps.epoch, ps.sequence, batches, ps.members, ps.peers, state.effects, reported=reported
        )
        if tuned:
            state.tuning.executed(ps, rounds)


def _reject(state: CoordinatorState, ps: ProcessSetState, rejected: Iterable[Rejection]) -> None:
    """Send verdicts; ranks that get the same share a message."""
    peers = dict(zip(ps.members, ps.peers, strict=True))
    locals: dict[tuple[RejectReason, int], list[int]] = {}
    for _, rank, local, verdict in rejected:
        locals.setdefault((verdict, rank), []).append(local)
    audiences: dict[tuple[RejectReason, tuple[int, ...]], list[int]] = {}
    for (verdict, rank), numbers in locals.items():
        audiences.setdefault((verdict, tuple(numbers)), []).append(peers[rank])
    for (verdict, same), receivers in audiences.items():
        state.effects.send(tuple(receivers), verdict.message(ps.id, ps.epoch, same))


def reject_mismatches(state: CoordinatorState, now: float) -> bool:
    """Give verdicts where ranks disagree and the others have had their time to submit theirs.

    Returns whether any was given.
    """
    idle = state.cells.idle
    ended = False
    for ps in state.sets:
        negotiation = ps.negotiation
        if negotiation.mismatches:
            vain = ps.gone or not negotiation.members.isdisjoint(idle)
            negotiation.reject_mismatches(0.0 if vain else state.options.dispute_grace, now)
            if negotiation.rejections or negotiation.conflict:
                state.touched[ps] = None
                ended = True
    return ended


def fuse(
    ready: Sequence[NegotiationRound], threshold: int, *, separate_groups: bool = False
) -> list[list[NegotiationRound]]:
    """Gather allreduces of one kind into batches of up to ``threshold`` bytes.

    Batches are in the order in which their first rounds became ready; within a batch that order holds too. A
    threshold of 0 fuses nothing. With ``separate_groups`` tensors of a group are fused with each other only.
    """
    batches: list[list[NegotiationRound]] = []
    open_batches: dict[tuple[FuseKey, str], tuple[list[NegotiationRound], int]] = {}
    for current in ready:
        if current.info.fuse_key is None:
            batches.append([current])
            continue
        key = (current.info.fuse_key, current.info.group if separate_groups else "")
        nbytes = current.info.nbytes
        batch, filled = open_batches.get(key, (None, 0))
        if batch is not None and filled + nbytes <= threshold:
            batch.append(current)
        else:
            batch, filled = [current], 0
            batches.append(batch)
        open_batches[key] = (batch, filled + nbytes)
    return batches


class _FusionWindow:
    """The held rounds of a process set's epoch: until when, and how many and how large they are so far."""

    __slots__ = ("count", "nbytes", "negotiation", "until")

    def __init__(self, negotiation: Negotiation, until: float) -> None:
        self.negotiation = negotiation
        self.until = until
        self.count = 0
        self.nbytes = 0


class FusionWindows:
    """Process sets whose ready rounds are held.

    Attributes:
        due: When the first of them has to be let go, or ``None``.
    """

    def __init__(self) -> None:
        self._held: dict[ProcessSetState, _FusionWindow] = {}
        self.due: float | None = None

    def __contains__(self, ps: ProcessSetState) -> bool:
        return ps in self._held

    def expired(self, now: float, *, all: bool) -> list[ProcessSetState]:
        """The process sets to decide now: those whose time has come, or all."""
        return [ps for ps, held in self._held.items() if all or now >= held.until]

    def defer(self, ps: ProcessSetState, now: float, delay: float, enough: int) -> bool:
        """Whether to hold the ready rounds of ``ps``.

        Not for longer than ``delay`` seconds, not if they are ``enough`` bytes, not if one of them is never fused, such as a
        barrier, and not if it is the turn of rounds that were kept back for their priority.
        """
        negotiation = ps.negotiation
        ready = negotiation.ready
        if negotiation.priorities and not negotiation.priorities.under_way:
            return self._close(ps)
        if delay <= 0 or not ready or negotiation.rejections or negotiation.conflict or ps.gone:
            return self._close(ps)
        held = self._held.get(ps)
        if held is None or held.negotiation is not negotiation or held.count > len(ready):
            held = self._held[ps] = _FusionWindow(negotiation, now + delay)
        for current in ready[held.count :]:
            if current.info.fuse_key is None:
                return self._close(ps)
            held.nbytes += current.info.nbytes
        held.count = len(ready)
        if held.nbytes >= enough or now >= held.until:
            return self._close(ps)
        self._find_due()
        return True

    def _close(self, ps: ProcessSetState) -> bool:
        if self._held.pop(ps, None) is not None:
            self._find_due()
        return False

    def _find_due(self) -> None:
        self.due = min([held.until for held in self._held.values()], default=None)


Table = tuple[tuple[int, ...], ...]


def send_execute(
    process_set: int,
    epoch: int,
    sequence: int,
    batches: Sequence[Sequence[NegotiationRound]],
    ranks: tuple[int, ...],
    peers: tuple[int, ...],
    effects: Effects,
    *,
    reported: bool = False,
) -> None:
    """Order all members to execute ``batches``; members whose local ids agree share a message.

    The end of each batch is ``reported`` by the member at position 0, if wanted.
    """
    if len(batches) == 1 and len(batches[0]) == 1:
        (only,) = batches[0]
        if only.same_local_id and not only.extras:  # a short way for the common case
            one = Batch((only.local,), (), _payloads(batches[0], ranks), (), reported)
            effects.send(peers, Execute(process_set, epoch, sequence, (one,)))
            return
    tables = [_tables(batch, ranks) for batch in batches]
    payloads = [_payloads(batch, ranks) for batch in batches]
    if all(current.same_local_id for batch in batches for current in batch):
        same = tuple(
            [
                Batch(tuple([current.local for current in batch]), table, payload, (), reported)
                for batch, table, payload in zip(batches, tables, payloads, strict=True)
            ]
        )
        effects.send(peers, Execute(process_set, epoch, sequence, same))
        return
    by_locals: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank, peer in zip(ranks, peers, strict=True):
        by_locals.setdefault(tuple([_locals(batch, rank) for batch in batches]), []).append(peer)
    for locals, alike in by_locals.items():
        own = tuple(
            [
                Batch(numbers, table, payload, _zeros(batch, numbers), reported)
                for batch, numbers, table, payload in zip(batches, locals, tables, payloads, strict=True)
            ]
        )
        effects.send(tuple(alike), Execute(process_set, epoch, sequence, own))


def _locals(batch: Sequence[NegotiationRound], rank: int) -> tuple[int, ...]:
    """The rank's local ids, by round of the batch; rounds for which it has none, since it has joined, count as -1, -2, …"""
    numbers = []
    lacking = 0
    for current in batch:
        head = current.submissions.get(rank)
        if head is None:
            lacking -= 1
            numbers.append(lacking)
        else:
            numbers.append(head.local)
    return tuple(numbers)


def _zeros(batch: Sequence[NegotiationRound], numbers: tuple[int, ...]) -> tuple[Signature, ...]:
    """The signatures for which the numbers below zero stand."""
    return tuple(
        [current.info.signature for current, number in zip(batch, numbers, strict=True) if number < 0]
    )


def _tables(batch: Sequence[NegotiationRound], ranks: tuple[int, ...]) -> tuple[Table, ...]:
    for current in batch:
        if current.extras:
            break
    else:
        return ()
    return tuple(
        tuple((current.extras or {}).get(rank, ()) for rank in ranks) if current.extras else ()
        for current in batch
    )


def _payloads(batch: Sequence[NegotiationRound], ranks: tuple[int, ...]) -> tuple[bytes, ...]:
    """Every member's tensor, if all came along and nothing is fused with them; zeros for members that have joined."""
    only = batch[0]
    payloads = only.payloads
    if only.info.between:  # a message: only the sender has a tensor
        sent = (payloads or {}).get(only.info.signature.root)
        return () if sent is None else (sent,)
    if payloads is None or len(batch) != 1 or len(payloads) + len(only.absent) != len(ranks):
        return ()
    if not only.absent:
        return tuple([payloads[rank] for rank in ranks])
    zeros = bytes(only.info.nbytes)
    return tuple([payloads.get(rank, zeros) for rank in ranks])


class Tuning:
    """Applies a tuner's settings: two to the coordinator itself, one to the ranks' planes.

    The coordinator sends members a new slice size right before the first order that they execute with it, so that all
    members change at the same place.
    """

    def __init__(self, options: CoordinatorOptions) -> None:
        self._tuner: Tuner | None = None
        self._slice = 0
        self._announced: dict[int, tuple[int, int]] = {}
        if options.tuning is not None:
            start = Parameters(options.fusion_threshold, options.flush_delay)
            self._tuner = Tuner(options.tuning, start)

    @property
    def active(self) -> bool:
        """Whether settings may still change."""
        return self._tuner is not None and not self._tuner.done

    def before(self, state: CoordinatorState, ps: ProcessSetState) -> None:
        """An order for ``ps`` is about to be sent."""
        if self._tuner is None:
            return
        announced = (ps.epoch, self._slice)
        before = self._announced.get(ps.id)
        if before == announced:
            return
        if before is None:
            for id in [id for id in self._announced if id not in state.sets.by_id]:
                del self._announced[id]
        self._announced[ps.id] = announced
        state.effects.send(ps.peers, Tune(ps.id, ps.epoch, self._slice))

    def executed(self, ps: ProcessSetState, rounds: Sequence[NegotiationRound]) -> None:
        """These rounds have been ordered."""
        if self.active:
            assert self._tuner is not None
            self._tuner.executed(
                [((ps.id, r.info.name), r.info.nbytes) for r in rounds if r.info.fuse_key is not None]
            )

    def advance(self, state: CoordinatorState, now: float) -> None:
        """A round of events is over."""
        tuner = self._tuner
        if tuner is None or tuner.done:
            return
        sample = tuner.advance(now)
        if sample is None:
            return
        if sample.number == 1:
            state.effects.add(Tuned(sample.header()))
        state.effects.add(Tuned(sample.line()))
        best = tuner.finish()
        if best is not None:
            state.effects.add(Tuned(best.line()))
            state.effects.note(_summary(best))
        chosen = tuner.parameters
        state.fusion_threshold, state.flush_delay = chosen.fusion_threshold, chosen.flush_delay
        self._slice = chosen.slice_bytes


def _summary(best: Sample) -> str:
    p = best.parameters
    return (
        f"autotune: keeping fusion threshold {p.fusion_threshold} bytes, flush delay {p.flush_delay * 1000:g} ms, "
        f"slices of {p.slice_bytes or 'the usual'} bytes"
    )
