"""Fusion: from ready rounds to the orders to execute them, several allreduces as one operation.

At the end of each batch of events the ready rounds of a process set are dispatched, and its rejections sent (:meth:`Fusion.flush`).
They wait while a fusion window is open, for more rounds to fuse with them. The order of these effects is part of the protocol: a rank
distinguishes its submissions of one local id by their order alone, so no rejection overtakes an earlier order.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence

from hvdlab.collectives.autotune import Parameters, Tuner, TuningSample
from hvdlab.collectives.coordinator.events import Effect, Log, Send, Tuned
from hvdlab.collectives.coordinator.negotiation import Negotiation, Rejection, RejectReason, log_verdict
from hvdlab.collectives.coordinator.priorities import have_priority
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.process_sets import (
    Decisions,
    GenerationAbort,
    ProcessSets,
    ProcessSetState,
)
from hvdlab.collectives.coordinator.signatures import FuseKey, NegotiationRound
from hvdlab.collectives.errors import CauseKind
from hvdlab.collectives.protocol.messages import Batch, Execute, Signature, Tune
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.types import OpKind


class Fusion:
    """Dispatch of ready rounds, fused as far as possible, with the rejections at their place among them.

    Args:
        options: Settings of the state.
        sets: Process sets, which decide about rounds that change them.

    Attributes:
        threshold: Bytes that are fused into one operation at most.
        flush_delay: Seconds that a fusion window is open.
        windows: Process sets with ready rounds that wait for more to fuse with them.
        tuning: Changes these settings, if the options ask for it.
    """

    def __init__(self, options: CoordinatorOptions, sets: ProcessSets) -> None:
        self.threshold = options.fusion_threshold
        self.flush_delay = options.flush_delay
        self.windows = FusionWindows()
        self.tuning = Tuning(options, sets)
        #: Bytes with a priority that are under way at most; 0 to hold nothing back.
        self._credit = options.scheduling_credit
        #: Whether tensors of a group are fused with each other only.
        self._separate_groups = options.separate_groups
        self._sets = sets

    def defer(self, ps: ProcessSetState, now: float, *, urgent: bool) -> bool:
        """Return whether the ready rounds of ``ps`` wait for more to fuse with them; not if it is ``urgent``."""
        return self.windows.defer(ps, now, 0.0 if urgent else self.flush_delay, self.threshold)

    def tune(self, now: float) -> Decisions[None]:
        """Apply the tuner's settings, if it has new ones; called at the end of each batch of events."""
        chosen = yield from self.tuning.choose(now)
        if chosen is not None:
            self.threshold, self.flush_delay = chosen.fusion_threshold, chosen.flush_delay

    def flush(self, ps: ProcessSetState, *, release_all: bool) -> Decisions[None]:
        """Dispatch the ready rounds of an open generation, and send the rejections, in order. Abort the generation if it can't continue after that.

        Args:
            ps: The process set.
            release_all: Whether to hold nothing back for its priority, as the generation is perhaps about to be aborted.
        """
        negotiation = ps.negotiation
        if negotiation.conflict:
            yield GenerationAbort(ps, CauseKind.MISMATCH, (), negotiation.conflict)
            return
        ready, negotiation.ready = negotiation.ready, []
        if negotiation.priorities or have_priority(ready):
            ready = yield from self._dispatch_by_priority(ps, ready, release_all=release_all)
        # If there are rejections, `ready` is still whole here: `after` counts its elements.
        if negotiation.rejections:
            rejections, negotiation.rejections = negotiation.rejections, []
            # Each rejection goes behind the orders of the rounds that were ready before it.
            done = 0
            for after, rejected in itertools.groupby(rejections, lambda r: r.after):
                yield from self._dispatch_ready(ps, ready[done:after])
                yield from self._send_rejections(ps, rejected)
                done = after
            ready = ready[done:]
        if ready:
            yield from self._dispatch_ready(ps, ready)
        # Last: rounds that were complete before the rank left are still executed, only the rest waits in vain.
        if ps.gone and negotiation.pending:
            left = tuple(sorted(ps.gone))
            yield GenerationAbort(ps, CauseKind.RANK_LEFT, left, f"{format_ranks(left)} left the job")

    def _dispatch_by_priority(
        self, ps: ProcessSetState, ready: list[NegotiationRound], *, release_all: bool
    ) -> Decisions[list[NegotiationRound]]:
        """Dispatch the rounds with a priority that are due, and hold the others with one back.

        All of them are dispatched at once, for all priorities, in three cases:

        * A member has left, runs no cell or goes back to its last commit (``release_all``): an abort of the generation would also end the
          rounds that are held back.
        * There are rejections: a rank distinguishes its submissions of one local id by their order, so that no rejection may overtake
          an earlier round.
        * All ranks have joined: they continue as if all earlier submissions were over.

        Returns:
            The rounds that are still to be dispatched, in order.
        """
        negotiation, credit = ps.negotiation, self._credit
        priorities = negotiation.priorities
        joined = any(current.info.kind == OpKind.JOIN for current in ready)
        if release_all or ps.gone or joined or negotiation.rejections or not credit:
            yield from self.dispatch(ps, priorities.pop_due())
            return ready
        # Rounds without a priority are not held up by those that have one: they go out first.
        yield from self._dispatch_ready(ps, priorities.hold(ready))
        due = priorities.pop_due(credit)
        if due:
            # Two batches at least, so that ranks execute one of them while the end of the other is reported.
            yield from self._dispatch_fused(ps, due, min(self.threshold, credit // 2), reported=True)
        return []

    def _dispatch_ready(self, ps: ProcessSetState, ready: Sequence[NegotiationRound]) -> Decisions[None]:
        """Dispatch rounds in order; one that changes process sets is dispatched alone, between those before and after it."""
        plain: list[NegotiationRound] = []
        for current in ready:
            if current.info.kind == OpKind.ADD_PROCESS_SET or current.info.kind == OpKind.REMOVE_PROCESS_SET:
                yield from self.dispatch(ps, plain)
                plain = []
                yield from self._sets.change_sets(ps, current)
            else:
                plain.append(current)
        yield from self.dispatch(ps, plain)

    def dispatch(self, ps: ProcessSetState, rounds: Sequence[NegotiationRound]) -> list[Send]:
        """Return the orders for all members to execute these rounds, fused as far as possible."""
        # A list, as the quickest form: nearly every collective of a healthy job comes here.
        orders: list[Send] = []
        # Only neighbours are gathered: messages and collectives keep the order in which they became ready.
        for between, some in itertools.groupby(rounds, lambda current: current.info.between):
            if between:
                orders += self._dispatch_messages(ps, tuple(some), between)
            else:
                orders += self._dispatch_fused(ps, tuple(some), self.threshold)
        return orders

    def _dispatch_messages(
        self, ps: ProcessSetState, rounds: Sequence[NegotiationRound], between: tuple[int, ...]
    ) -> list[Send]:
        """Order the two ranks of these messages to execute them.

        All messages have the same order on every rank, so that no two ranks wait for each other.
        """
        ps.sequence += 1
        two = [(rank, peer) for rank, peer in zip(ps.members, ps.peers, strict=True) if rank in between]
        ranks, peers = zip(*two, strict=True)
        return execute_orders(ps, [(current,) for current in rounds], ranks, peers)

    def _dispatch_fused(
        self,
        ps: ProcessSetState,
        rounds: Sequence[NegotiationRound],
        threshold: int,
        *,
        reported: bool = False,
    ) -> list[Send]:
        if not rounds:
            return []
        ps.sequence += 1
        batches: Sequence[Sequence[NegotiationRound]] = (rounds,)
        if len(rounds) > 1:
            batches = fuse(rounds, threshold, separate_groups=self._separate_groups)
        if reported:
            ps.negotiation.priorities.ordered(ps.sequence, batches)
        orders = execute_orders(ps, batches, ps.members, ps.peers, reported=reported)
        if self.tuning.configured:
            # In front of the order, so that all members change the size at the same place.
            orders = [*self.tuning.before(ps), *orders]
            self.tuning.executed(ps, rounds)
        return orders

    def _send_rejections(self, ps: ProcessSetState, rejected: Iterable[Rejection]) -> Decisions[None]:
        """Send rejections; ranks that get the same share a message."""
        peers = dict(zip(ps.members, ps.peers, strict=True))
        locals: dict[tuple[RejectReason, int], list[int]] = {}
        for _, rank, local, verdict in rejected:
            yield from log_verdict(ps.id, ps.generation, verdict)
            locals.setdefault((verdict, rank), []).append(local)
        audiences: dict[tuple[RejectReason, tuple[int, ...]], list[int]] = {}
        for (verdict, rank), numbers in locals.items():
            audiences.setdefault((verdict, tuple(numbers)), []).append(peers[rank])
        for (verdict, same), receivers in audiences.items():
            yield Send(tuple(receivers), verdict.message(ps.id, ps.generation, same))


def fuse(
    ready: Sequence[NegotiationRound], threshold: int, *, separate_groups: bool = False
) -> list[list[NegotiationRound]]:
    """Gather allreduces of one kind into batches of up to ``threshold`` bytes.

    Batches are in the order in which their first rounds became ready; within a batch that order holds too. A
    threshold of 0 fuses nothing. With ``separate_groups`` tensors of a group are fused with each other only.
    """
    # One pass, with the latest open batch of each kind: a full one stays where it is, so that the order holds.
    batches: list[list[NegotiationRound]] = []
    open_batches: dict[tuple[FuseKey, str], tuple[list[NegotiationRound], int]] = {}
    for current in ready:
        if current.info.fuse_key is None:
            batches.append([current])
            continue
        key = (current.info.fuse_key, current.info.group if separate_groups else "")
        nbytes = current.info.nbytes
        batch, filled = open_batches.get(key, (None, 0))
        # A tensor larger than the threshold gets a batch of its own: tensors are never split.
        if batch is not None and filled + nbytes <= threshold:
            batch.append(current)
        else:
            batch, filled = [current], 0
            batches.append(batch)
        open_batches[key] = (batch, filled + nbytes)
    return batches


class _FusionWindow:
    """Window of a process set's generation.

    Attributes:
        negotiation: The generation's negotiation, by which the generation is recognized.
        until: Its end, in monotonic seconds.
        count, nbytes: Number and bytes of the rounds in it so far.
    """

    __slots__ = ("count", "nbytes", "negotiation", "until")

    def __init__(self, negotiation: Negotiation, until: float) -> None:
        self.negotiation = negotiation
        self.until = until
        self.count = 0
        self.nbytes = 0


class FusionWindows:
    """Fusion windows of the process sets with ready rounds that wait for more to fuse with them.

    Attributes:
        due: Time at which the first window ends, or ``None``.
    """

    def __init__(self) -> None:
        #: Open windows.
        self._held: dict[ProcessSetState, _FusionWindow] = {}
        self.due: float | None = None

    def __contains__(self, ps: ProcessSetState) -> bool:
        return ps in self._held

    def expired(self, now: float, *, all: bool) -> list[ProcessSetState]:
        """Return the process sets to flush now: those with a window that has ended, or all."""
        return [ps for ps, held in self._held.items() if all or now >= held.until]

    def defer(self, ps: ProcessSetState, now: float, delay: float, enough: int) -> bool:
        """Return whether the ready rounds of ``ps`` wait in its window.

        They do not wait in these cases:

        * ``delay`` seconds have passed.
        * They have ``enough`` bytes.
        * One of them is never fused, such as a barrier.
        * It is the turn of rounds that were kept back for their priority.
        """
        negotiation = ps.negotiation
        ready = negotiation.ready
        # Nothing is under way, so no report of an end will come that releases the rounds held back: they would wait for ever.
        if negotiation.priorities and not negotiation.priorities.under_way:
            return self._close(ps)
        if delay <= 0 or not ready or negotiation.rejections or negotiation.conflict or ps.gone:
            return self._close(ps)
        # By the object: a generation that began since then has another negotiation, and the window of the last one must not count for it.
        held = self._held.get(ps)
        if held is None or held.negotiation is not negotiation or held.count > len(ready):
            held = self._held[ps] = _FusionWindow(negotiation, now + delay)
        # Only those that are new since the last batch; `nbytes` has the others.
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


def execute_orders(
    ps: ProcessSetState,
    batches: Sequence[Sequence[NegotiationRound]],
    ranks: tuple[int, ...],
    peers: tuple[int, ...],
    *,
    reported: bool = False,
) -> list[Send]:
    """Return the orders for these ranks of ``ps`` to execute ``batches``; ranks with the same local ids share a message.

    With ``reported``, the member at position 0 reports the end of each batch.
    """
    # Each message is encoded once for all its peers, so the ways below look for the fewest different messages.
    process_set, generation, sequence, decision = ps.id, ps.generation, ps.sequence, ps.decision
    if len(batches) == 1 and len(batches[0]) == 1:
        (only,) = batches[0]
        if only.same_local_id and not only.extras:  # a short way for the common case
            one = Batch((only.local,), (), _payloads(batches[0], ranks), (), reported)
            return [Send(peers, Execute(process_set, generation, sequence, (one,), decision))]
    tables = [_tables(batch, ranks) for batch in batches]
    payloads = [_payloads(batch, ranks) for batch in batches]
    if all(current.same_local_id for batch in batches for current in batch):
        same = tuple(
            [
                Batch(tuple([current.local for current in batch]), table, payload, (), reported)
                for batch, table, payload in zip(batches, tables, payloads, strict=True)
            ]
        )
        return [Send(peers, Execute(process_set, generation, sequence, same, decision))]
    by_locals: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank, peer in zip(ranks, peers, strict=True):
        by_locals.setdefault(tuple([_locals(batch, rank) for batch in batches]), []).append(peer)
    orders: list[Send] = []
    for locals, alike in by_locals.items():
        own = tuple(
            [
                Batch(numbers, table, payload, _zeros(batch, numbers), reported)
                for batch, numbers, table, payload in zip(batches, locals, tables, payloads, strict=True)
            ]
        )
        orders.append(Send(tuple(alike), Execute(process_set, generation, sequence, own, decision)))
    return orders


def _locals(batch: Sequence[NegotiationRound], rank: int) -> tuple[int, ...]:
    """Return the rank's local ids, by round of the batch; those that it lacks, since it has joined, are -1, -2, …"""
    numbers = []
    lacking = 0
    for current in batch:
        head = current.submissions.get(rank)
        if head is None:
            lacking -= 1
            # Each gets a number of its own: several of one batch can be lacking, and the rank has no local id for any of them.
            numbers.append(lacking)
        else:
            numbers.append(head.local)
    return tuple(numbers)


def _zeros(batch: Sequence[NegotiationRound], numbers: tuple[int, ...]) -> tuple[Signature, ...]:
    """Return the signatures for which the numbers below zero stand."""
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
    """Return every member's tensor, if all came along and nothing is fused with them; zeros for members that have joined."""
    only = batch[0]
    payloads = only.payloads
    if only.info.between:  # a message: only the sender has a tensor
        sent = (payloads or {}).get(only.info.signature.root)
        return () if sent is None else (sent,)
    # All or none: where one tensor did not come along all members use the plane, since an operation on it needs each of them.
    if payloads is None or len(batch) != 1 or len(payloads) + len(only.absent) != len(ranks):
        return ()
    if not only.absent:
        return tuple([payloads[rank] for rank in ranks])
    # A rank that has joined contributes zeros, without having sent them.
    zeros = bytes(only.info.nbytes)
    return tuple([payloads.get(rank, zeros) for rank in ranks])


class Tuning:
    """Tuner of three settings: two of the coordinator itself, one of the ranks' planes.

    The coordinator sends members a new slice size right before the first order that they execute with it, so that all
    members change at the same place.
    """

    def __init__(self, options: CoordinatorOptions, sets: ProcessSets) -> None:
        #: Process sets: those that were removed are forgotten.
        self._sets = sets
        #: The tuner, if the options ask for one.
        self._tuner: Tuner | None = None
        #: The present slice size, in bytes; 0 for that of the plane.
        self._slice = 0
        #: Generation and slice size that each process set has got last, by id.
        self._announced: dict[int, tuple[int, int]] = {}
        if options.tuning is not None:
            start = Parameters(options.fusion_threshold, options.flush_delay)
            self._tuner = Tuner(options.tuning, start)

    @property
    def configured(self) -> bool:
        """Return whether there is a tuner, finished or not."""
        return self._tuner is not None

    @property
    def active(self) -> bool:
        """Return whether settings can still change."""
        return self._tuner is not None and not self._tuner.done

    def before(self, ps: ProcessSetState) -> list[Send]:
        """Return the message with the slice size for the members of ``ps``, which are about to get an order, unless they know it."""
        if self._tuner is None:
            return []
        # With the generation: the size holds for one only, and the plane of the next begins with its own.
        announced = (ps.generation, self._slice)
        before = self._announced.get(ps.id)
        if before == announced:
            return []
        if before is None:  # a new set: a good moment to forget those that were removed
            for id in [id for id in self._announced if id not in self._sets.by_id]:
                del self._announced[id]
        self._announced[ps.id] = announced
        return [Send(ps.peers, Tune(ps.id, ps.generation, self._slice))]

    def executed(self, ps: ProcessSetState, rounds: Sequence[NegotiationRound]) -> None:
        """Count rounds that have been ordered."""
        if self.active:
            assert self._tuner is not None
            self._tuner.executed(
                [((ps.id, r.info.name), r.info.nbytes) for r in rounds if r.info.fuse_key is not None]
            )

    def choose(self, now: float) -> Generator[Effect, None, Parameters | None]:
        """End a batch of events. Return the settings to use from now on, or ``None`` if they stay."""
        tuner = self._tuner
        if tuner is None or tuner.done:
            return None
        sample = tuner.advance(now)
        if sample is None:
            return None
        if sample.number == 1:
            yield Tuned(sample.header())
        yield Tuned(sample.line())
        best = tuner.finish()
        if best is not None:
            yield Tuned(best.line())
            yield Log(_summary(best), warning=False)
        chosen = tuner.parameters
        self._slice = chosen.slice_bytes
        return chosen


def _summary(best: TuningSample) -> str:
    p = best.parameters
    return (
        f"autotune: keeping fusion threshold {p.fusion_threshold} bytes, flush delay {p.flush_delay * 1000:g} ms, "
        f"slices of {p.slice_bytes or 'the usual'} bytes"
    )
