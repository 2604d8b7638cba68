"""State machine of the coordinator, without I/O: events in, effects out.

No sockets, threads or clocks: the server owns them, calls :meth:`CoordinatorState.handle_all` with the events of one wait
and ``now`` (monotonic seconds), and carries out the effects in order. Events that are handled in one call make one *batch of events*:
collectives that become ready in it are fused, and changes of membership take effect together at its end.

The class decides the order of events and effects; the functions below it handle one kind of message each (:data:`RANK_HANDLERS`,
:data:`CLIENT_HANDLERS`). Each part of the state owns its data and returns its decisions; only :meth:`CoordinatorState.apply` makes
effects and entries of the decision log of them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any, cast

from hvdlab.collectives.coordinator.admission import Admission, ElasticRanks
from hvdlab.collectives.coordinator.deadlock import (
    RunningCells,
    abort_deadlock,
    end_lost_messages,
    find_absence,
)
from hvdlab.collectives.coordinator.decision_log import (
    Amendment,
    DecisionEntry,
    DecisionLog,
    InvariantOf,
)
from hvdlab.collectives.coordinator.event_history import UNREAD_BYTES, EventHistory
from hvdlab.collectives.coordinator.events import (
    CloseConnection,
    Effect,
    Effects,
    Event,
    PeerConnected,
    PeerLost,
    Received,
    Send,
    Tick,
)
from hvdlab.collectives.coordinator.fusion import Fusion
from hvdlab.collectives.coordinator.membership import MembershipTable, RankPeer
from hvdlab.collectives.coordinator.plane_selection import Hierarchy
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.process_sets import (
    OPEN,
    Decisions,
    GenerationAbort,
    MemberChange,
    ProcessSets,
    ProcessSetState,
    Result,
)
from hvdlab.collectives.coordinator.signatures import SignatureTable
from hvdlab.collectives.coordinator.stall_inspector import Pauses, StallInspector
from hvdlab.collectives.failover.successor import GENERATIONS, Restoring, Successor
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind

_PLAIN = frozenset(
    kind
    for kind in OpKind
    if kind not in (OpKind.ADD_PROCESS_SET, OpKind.REMOVE_PROCESS_SET, OpKind.JOIN) and not kind.asks_server
)
_CHECK_AGAIN = 0.5
"""Seconds in which announcements can still come before the coordinator searches for ranks that wait for each other."""


class CoordinatorState:
    """State machine of one job: its members, process sets, negotiations and orders.

    Args:
        options: Settings.
        wall_offset: Seconds to add to ``now`` for those since 1970, for texts that users see.
        clock: Nanoseconds of the clock that ranks compare theirs with.

    Attributes:
        options, clock: The arguments.
        effects: Effects of the present batch of events, in order.
        log: Newest decisions, each with its cause.
        membership: Ranks and clients that are connected, are expected, or have died.
        sets: Process sets, with their generations and negotiations.
        restoring: Facts from which a successor restores the world; inactive in a first coordinator.
        signatures: Interned signatures of all definitions.
        cells: Cells that run on tracked ranks.
        elastic: Ranks in elastic training.
        admission: Rules by which ranks get into the world.
        successor: Restoration of the world of a coordinator that died.
        fusion: Dispatch of ready collectives.
        stalls, pauses: Watch over collectives that wait for long, and ranks that stop all clocks for their users.
        history: Newest event batches, and their subscribers.
        by_peer: Living ranks, by connection.
        touched: Process sets with submissions in this batch, in order; they are flushed at its end.
        answers: Messages that are sent last in a batch: they prove to a peer that all before has been handled.
        blocked: Ranks whose users wait for an undecided collective.
        check_blocked: Whether to check for deadlocks at the end of this batch.
        unsound: Why this state must not be used any more, after a handler failed halfway; empty as long as it is sound.
    """

    def __init__(
        self,
        options: CoordinatorOptions | None = None,
        *,
        wall_offset: float = 0.0,
        clock: Callable[[], int] = int,
    ) -> None:
        self.options = options = options or CoordinatorOptions()
        self.clock = clock
        self.effects = Effects()
        self.log = DecisionLog(wall_offset, options.incarnation * GENERATIONS + 1)
        self.membership = MembershipTable(None if options.size is None else range(options.size), wall_offset)
        self.sets = ProcessSets(
            self.membership,
            Hierarchy(options.hierarchical_allreduce, options.hierarchical_allgather),
            options.incarnation * GENERATIONS + 1,
            by_seniority=options.by_seniority,
        )
        self.restoring = Restoring(options.incarnation, options.reattach)
        self.signatures = SignatureTable()
        self.cells = RunningCells()
        self.elastic = ElasticRanks()
        # One object of each part, which all others share: a fact stands in one place.
        known = self.membership, self.sets, self.cells, self.elastic, self.restoring
        self.admission = Admission(options, *known)
        restored = self.membership, self.sets, self.cells, self.elastic, self.admission
        self.successor = Successor(self.restoring, *restored, sized=options.size is not None)
        self.fusion = Fusion(options, self.sets)
        places = self.sets, self.membership
        self.stalls = StallInspector(options.stall_seconds, options.stall_shutdown, *places)
        self.pauses = Pauses(*places)
        self.history = EventHistory(min(UNREAD_BYTES, options.history_bytes))
        self.by_peer: dict[int, RankPeer] = {}
        self.touched: dict[ProcessSetState, None] = {}
        self.answers: list[tuple[int, m.Pong | m.Regrouped]] = []
        self.blocked: set[int] = set()
        self.check_blocked = False
        self._check_due: float | None = None  # when to check for deadlocks again
        self._due: float | None = None  # result of the last _find_due; None to find it again
        self.unsound = ""

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event as a batch of its own."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Effect]:
        """Handle a batch of events, in order, and return the effects to carry out, in order."""
        by_peer = self.by_peer
        plain = True
        event: Event | None = None
        rank: RankPeer | None = None
        self.log.now = now
        if self.restoring.active:
            # The state has no clock, so the wait for the predecessor's ranks can begin only with the first event.
            self.restoring.begin(now)
        failed: Exception | None = None
        for event in events:
            try:
                if type(event) is Received:
                    rank = by_peer.get(event.peer)
                    # Nearly every message of a healthy job is one: it must not pay for the decision log and the table of handlers.
                    if rank is not None and type(event.message) is m.Announce:
                        self._announce(rank, event.message, now)
                        continue
                    plain = False
                    self.log.handling(event, rank)
                    if rank is None:
                        self._from_client(event, now)
                    else:
                        self._from_rank(rank, event.message, now)
                    continue
                plain = False
                rank = None if isinstance(event, Tick) else by_peer.get(event.peer)
                self.log.handling(event, rank)
                if type(event) is PeerConnected:
                    self._connect(event.peer, event.hello, now)
                elif type(event) is PeerLost:
                    since = now - event.silence
                    self.peer_lost(event.peer, event.reason, now, explained=event.faulty, since=since)
            except Exception as error:  # noqa: BLE001  (a handler can raise anything)
                # One peer's message must not end the job of all. Perhaps the handler has stopped halfway, though:
                # the checks at the end of the batch decide whether the state can be used.
                plain, failed = False, error
                self._fail(event, error, now)
        try:
            if not (plain and self._dispatch_plain(now)):
                if event is not None:
                    self.log.handling(
                        event, rank
                    )  # of several events, the last one leads to the decisions at the end
                self._end_batch(now)
                # Not after a plain batch, which moves no deadline: `_announce()` clears `_due` where it sets
                # one, and such a batch is not plain.
                self._due = self._find_due()
            if self.fusion.tuning.configured:
                self.apply(self.fusion.tune(now))
        except Exception as error:
            if failed is None:
                raise  # no single peer's message is to blame, so that no connection can be ended instead of this process
            self._mark_unsound(error)
        # Before the checks, which assert that none are left.
        effects = self.effects.pop_all()
        if failed is not None and not self.unsound:
            self._check_after(failed)
            effects += self.effects.pop_all()  # the traceback of a state that is not sound
        return effects

    def apply(self, decisions: Decisions[Result]) -> Result:
        """Carry out the decisions of a part of this state, each before the part continues. Return the part's result."""
        # Not all at once at the end: a part that fails halfway has changed what its decisions so far are about.
        while True:
            try:
                decision = next(decisions)
            except StopIteration as end:
                return cast(Result, end.value)
            if isinstance(decision, Send):
                self.effects.send(*decision)
            elif isinstance(decision, DecisionEntry):
                self.log.add(decision)
            elif isinstance(decision, Amendment):
                self.log.amend(*decision)
            elif isinstance(decision, GenerationAbort):
                self.apply(self.sets.abort(decision))
            elif isinstance(decision, MemberChange):
                self.apply(self.sets.change_members(decision))
            else:
                self.effects.add(decision)

    # -- failures of handlers -------------------------------------------------------------------------------------

    def _fail(self, event: Event, error: Exception, now: float) -> None:
        """Log an exception of a handler with its traceback, and end the connection that the event came from.

        A rank is lost as after a violation of the protocol, and refused if it comes back: it would send the same again.

        Raises:
            Exception: ``error``, where the event is no peer's, such as a tick.
        """
        if isinstance(event, Received):
            text = f"a {type(event.message).__name__}"
        elif isinstance(event, PeerConnected):
            text = "a Hello"
        else:
            raise error
        self.log.handling(event, self.by_peer.get(event.peer))
        for line in traceback.format_exception(error):
            self.effects.log(line.rstrip())
        try:
            text = f"{text} that the coordinator failed to handle: {error!r}"
            self._end_failed(event.peer, text, event, now)
        except Exception as later:  # noqa: BLE001  (the state is too broken to end a connection in order)
            self._mark_unsound(later)

    def _end_failed(self, peer: int, text: str, event: Event, now: float) -> None:
        rank = self.by_peer.get(peer)
        if rank is not None:
            self.violation(rank, text, now)
            return
        self.effects.log(f"peer {peer} sent {text}")
        if isinstance(event, PeerConnected):  # it waits for an answer, and would come again without one
            self.effects.send((peer,), m.Refused(f"it sent {text}"))
        self.effects.add(CloseConnection(peer))
        self.peer_lost(peer, "", now)

    def _check_after(self, error: Exception) -> None:
        """Mark the state as unsound, if it is, after a handler has failed in this batch."""
        try:
            self.validate_state()
        except Exception as found:  # noqa: BLE001  (a broken state can raise anything)
            found.__cause__ = error
            self._mark_unsound(found)

    def _mark_unsound(self, error: Exception) -> None:
        for line in traceback.format_exception(error):
            self.effects.log(line.rstrip())
        self.unsound = repr(error)

    def next_deadline(self) -> float | None:
        """Return when a :class:`Tick` is due at the latest, or ``None`` for never."""
        return self._due

    def _find_due(self) -> float | None:
        times = list(self.sets.deadlines(self.options.dispute_grace))
        if self.restoring.active and self.restoring.due is not None:
            times.append(self.restoring.due)
        # No stall is due while a rank is paused: its tick would find nothing to do, again and again.
        stall = None if self.pauses else self.stalls.due
        for time in (stall, self.fusion.windows.due, self.membership.next_report(), self._check_due):
            if time is not None:
                times.append(time)
        return min(times, default=None)

    # -- peers that come and go ----------------------------------------------------------------------------------------

    def _connect(self, peer: int, hello: m.Hello, now: float) -> None:
        """Welcome or refuse a peer that has introduced itself."""
        membership, effects = self.membership, self.effects
        # Welcome is the first message to each peer, which reads exactly one before it serves the connection.
        if hello.role == "client":
            membership.clients[peer] = None
            # Clients alone ask for the past, so it is worth its memory from now on.
            self.history.limit = self.options.history_bytes
            effects.send((peer,), m.Welcome(-1, int(now * 1e9), self.options.incarnation, self.options.pid))
            effects.send((peer,), self.world())
            if self.pauses:
                effects.send((peer,), self.pauses.message())
            if hello.events:
                self.apply(self.history.subscribe(peer))
            return
        if hello.role == "observer":
            membership.observers[peer] = None
            effects.send((peer,), m.Welcome(-1, int(now * 1e9), self.options.incarnation, self.options.pid))
            effects.send((peer,), self.world())
            return
        rank = membership.free_rank() if hello.rank < 0 else hello.rank
        reason = self.admission.refusal(rank, hello)
        if reason:
            self.apply(self.admission.refuse(peer, rank, hello, reason))
            return
        # Read first: adding the rank removes its death.
        since = membership.cut_off_since(rank, hello.pid) if hello.incarnation >= 0 else None
        newcomer = self.by_peer[peer] = membership.add(peer, rank, hello, now)
        # A new process in the place of one that lived: the successor must not wait for the old one, nor begin its cells on the new
        # one.
        if hello.incarnation < 0 and self.restoring.active:
            self.restoring.renewed.add(rank)
        if newcomer.tracked:
            self.cells.add_rank(rank)
        effects.send((peer,), m.Welcome(rank, int(now * 1e9), self.options.incarnation, self.options.pid))
        # Behind the Welcome, which has to be the first message. The senders repeat their mail once only, so
        # it has waited here.
        kept = self.restoring.mail.pop(rank, [])
        # Another process in its place has asked for nothing that this mail answers.
        for mail in kept if hello.incarnation >= 0 else ():
            effects.send((peer,), mail)
        if since is not None:
            self.apply(membership.report_return(newcomer, now - since))
        # During a restoration the successor decides that later: only the facts of all ranks show which
        # generation is the newest.
        if hello.incarnation >= 0 and hello.returns and not self.restoring.active:
            self.apply(self.admission.become_outdated(newcomer))

    def peer_lost(
        self,
        peer: int,
        reason: str,
        now: float,
        *,
        explained: bool = False,
        since: float | None = None,
    ) -> None:
        """Remove a peer after the end of its connection without Bye.

        Args:
            peer: The connection.
            reason: How it has ended.
            now: Time of the batch of events, in monotonic seconds.
            explained: Whether more is known than that: the process has ended, or must not come back.
            since: Time of the last sign of life; ``None`` for ``now``.
        """
        rank = self.by_peer.get(peer)
        if rank is None:
            self.membership.clients.pop(peer, None)
            self.membership.observers.pop(peer, None)
            self.history.unsubscribe(peer)
            return
        # In this order: the aborts go to all members that live, so the dead rank has to leave the table before they are decided. Its
        # former sets are read before that, as forgetting the peer removes it from them.
        past = self.forget_peer(rank, now)
        decision = self.apply(self.membership.lose(rank, reason, now, explained=explained, since=since))
        self.apply(self.sets.end_with_dead(rank.rank, past, f"rank {rank.rank} died: {reason}", decision))

    def forget_peer(self, rank: RankPeer, now: float) -> list[tuple[ProcessSetState, int]]:
        """Remove a rank's connection from all parts of the state. Return the sets that it was left out of, each with its last generation there."""
        del self.by_peer[rank.peer]
        # A rank that dies at a prompt sends no Resumed: without this the clocks of the others would stand still for ever.
        self.continue_rank(rank.rank, now)
        # Signatures count the definitions that refer to them: those of a rank that is gone would be kept for ever.
        self.signatures.forget(rank.definitions)
        # A cell that was on its way to the rank is not run by the process that takes its place.
        self.cells.discard_rank(rank.rank)
        self.elastic.drop(rank.rank)
        self.restoring.drop(rank.rank)
        self.blocked.discard(rank.rank)
        past = self.sets.forget_former(rank.rank)
        self.history.unsubscribe(rank.peer)
        return past

    # -- ranks ----------------------------------------------------------------------------------------------------

    def _announce(self, rank: RankPeer, message: m.Announce, now: float) -> None:
        definitions = rank.definitions
        # Also those of an ended generation: the rank sends each definition once.
        for definition in message.definitions:
            self.signatures.define(definitions, definition)
        ps = self.sets.by_id.get(message.process_set)
        if (
            ps is None
            or ps.phase != OPEN
            or ps.generation != message.generation
            or rank.rank not in ps.negotiation.members
        ):
            # The announcement is of an ended generation: the abort or the new configuration is on its way, unless the rank was left out.
            if rank.leaving and (ps is None or ps.former.get(rank.rank) == (rank.peer, message.generation)):
                self.apply(self.admission.reject_left_out(rank, message))
            return
        self.touched[ps] = None
        submit = ps.negotiation.submit
        extra = message.extra
        try:
            if message.payload and len(message.locals) == 1:
                (local,) = message.locals
                defined = definitions[local]
                # All members compute with it, and zeros of that size stand in for members that have joined.
                if len(message.payload) != defined.info.nbytes:
                    raise ValueError("a tensor of another size than its shape's")
                submit(rank.rank, defined, extra[0] if extra else (), now, message.payload)
            elif extra:
                for local, numbers in zip(message.locals, extra, strict=True):
                    submit(rank.rank, definitions[local], numbers, now)
            else:
                for local in message.locals:
                    submit(rank.rank, definitions[local], (), now)
        # KeyError: a local id that the rank never defined. ValueError: more or fewer numbers than ids, a tensor of
        # another size, or a receive in place of another rank.
        except (KeyError, ValueError) as error:
            # `handle_all()` skips the log for announcements, but the loss of the rank needs this event as its cause.
            self.log.handling(Received(rank.peer, message), rank)
            self.violation(rank, f"an announcement that makes no sense: {error!r}", now)
        # The clock of stalls runs only while something waits, so the first submission after a silence starts it. `_due` is stale
        # then.
        if self.stalls.due is None:
            self.stalls.watch(now)
            self._due = None  # to be found again
        self.check_later(now)  # perhaps the others wait in vain because of this submission

    def _from_rank(self, rank: RankPeer, message: m.Message, now: float) -> None:
        react = RANK_HANDLERS.get(type(message))
        if react is None:
            self.violation(rank, f"a {type(message).__name__} out of place", now)
        else:
            react(self, rank, message, now)

    def _from_client(self, event: Received, now: float) -> None:
        observes = event.peer in self.membership.observers
        if event.peer not in self.membership.clients and not observes:
            return  # it was closed earlier in this batch
        react = CLIENT_HANDLERS.get(type(event.message))
        # An observer has shown the token of ranks, which must not be enough to post mail or to resize the world.
        if react is None or (observes and not isinstance(event.message, m.Pong | m.Bye)):
            self.effects.log(
                f"{'observer' if observes else 'client'} {event.peer} sent a {type(event.message).__name__} out of place"
            )
            self.effects.add(CloseConnection(event.peer))
            self.peer_lost(event.peer, "", now)
        else:
            react(self, event.peer, event.message, now)

    def violation(self, rank: RankPeer, text: str, now: float) -> None:
        """End the connection of a rank that broke the protocol: the rank is lost."""
        self.effects.log(f"rank {rank.rank} sent {text}")
        self.effects.add(CloseConnection(rank.peer))
        # Explained, so that the rank is refused if it comes back: it would send the same again.
        self.peer_lost(rank.peer, f"it sent {text}", now, explained=True)

    def is_paused(self, peer: int) -> bool:
        """Return whether the rank of this connection is paused for its user."""
        rank = self.by_peer.get(peer)
        return rank is not None and rank.rank in self.pauses

    def continue_rank(self, rank: int, now: float) -> None:
        """Restart the clocks of all waits, if the last paused rank continues or is gone."""
        since = self.apply(self.pauses.end_pause(rank, now))
        if since is not None:
            self.stalls.exclude_pause(since, now)
            # No deadlock of the paused rank was looked for meanwhile.
            self.check_blocked = bool(self.blocked)

    # -- end of a batch -------------------------------------------------------------------------------------------

    def _dispatch_plain(self, now: float) -> bool:
        """End a common batch of events quickly: announcements that completed one collective at most. Return whether it was of that kind."""
        # Each condition names a decision that only _end_batch() makes; without it that decision would wait for the next batch.
        due = self._due
        if due is None or now >= due or len(self.touched) != 1:
            return False
        # Effects here are of an announcement that broke the protocol, which has ended a generation, or of a rank that was left out.
        if self.cells.idle or self.elastic.ready or self.effects:
            return False
        (ps,) = self.touched
        negotiation = ps.negotiation
        ready = negotiation.ready
        if not ps.quiet or len(ready) > 1:
            return False
        if ready:
            (complete,) = ready
            if self.fusion.flush_delay or complete.info.kind not in _PLAIN:
                return False
            if negotiation.priorities.concerns(complete):
                return False
            negotiation.ready = []
            self.effects.extend(self.fusion.dispatch(ps, ready))
        self.touched.clear()
        return True

    def _end_batch(self, now: float) -> None:
        """End a batch of events: dispatch, reject and abort, then change the world, then report it.

        The order of the effects is part of the protocol. Orders and rejections come first: an abort after them ends only the rest.
        Aborts come before new generations begin. Answers come last: they prove that all before has been handled.
        """
        # The check for deadlocks is only marked here: it comes after the dispatch, which frees ranks.
        if self._check_due is not None and now >= self._check_due:
            self._check_due, self.check_blocked = None, bool(self.blocked)
        # Rounds in a fusion window count as undecided: with an idle rank, or before a check for deadlocks, they go out now, as they
        # would otherwise be aborted.
        urgent = bool(self.cells.idle) or self.check_blocked
        if self.fusion.windows.due is not None:
            self.touched |= dict.fromkeys(self.fusion.windows.expired(now, all=urgent))
        if self.cells.idle or self.elastic.ready:
            # Rounds that are held back for their priority are complete: they are ordered now, since the aborts below would end them
            # as well.
            for ps in self.sets.by_id.values():
                if ps.negotiation.priorities:
                    self.touched[ps] = None
        # Before the flush, which sends the rejections at their place among the orders.
        rejected = self.sets.reject_mismatches(self.cells.idle, self.options.dispute_grace, now)
        if rejected:
            self.touched |= dict.fromkeys(rejected)
            # Submissions queued behind a mismatch perhaps wait in vain now that it is over.
            self.check_later(now)
        if self.touched:
            touched, self.touched = self.touched, {}
            for ps in touched:
                # A handler of this batch, or the flush of an earlier set, can have ended the generation since the set was touched.
                # `defer()` is called nevertheless: it closes the window of the ended generation.
                if not self.fusion.defer(ps, now, urgent=urgent) and ps.phase == OPEN:
                    self.flush_set(ps, now)
        if self.cells.idle:
            self._abort_waits_on_idle_ranks(now)
        if self.elastic.ready:
            self.apply(self.admission.abort_waits_on_regrouped())
        if self.check_blocked:
            self.check_blocked = False
            self._abort_deadlock()
        if self.stalls.due is not None and now >= self.stalls.due and not self.pauses:
            self.apply(self.stalls.report_late(now))
        # After all other aborts: a death of this batch explains a plane's failure better.
        if self.sets.has_failures:
            self.apply(self.sets.abort_failed(now))
        if self.restoring.active:
            self.apply(self.successor.end_wait(now))
        if self.membership.changed or self.admission.due:
            # An admission that has to wait is not repeated in each batch: the event that it waits for makes it due again.
            self.admission.due = False
            if self.admission.is_needed():
                self.answers += self.apply(self.admission.admit_newcomers())
        # Once, after all ends and changes of this batch: ten ranks that die together cost the others one new generation, not ten.
        if self.sets.has_due_generation:
            self.apply(self.sets.configure_due())
        # After the new generation, whose number and members are in the message.
        if self.membership.has_news:
            audience = self.membership.recipients(now)
            if audience:
                self.effects.send(audience, self.world())
        if self.answers:
            answers, self.answers = self.answers, []
            for peer, answer in answers:
                self.effects.send((peer,), answer)

    def flush_set(self, ps: ProcessSetState, now: float) -> None:
        """Dispatch the ready rounds of an open generation, and send the rejections, in order."""
        negotiation = ps.negotiation
        if negotiation.priorities and not negotiation.conflict:
            # No rank counted as waiting while a round of that name was held back; perhaps one waits for the next of the name, and in vain.
            self.check_later(now)
        release_all = bool(self.elastic.ready) or not negotiation.members.isdisjoint(self.cells.idle)
        self.apply(self.fusion.flush(ps, release_all=release_all))

    def _abort_waits_on_idle_ranks(self, now: float) -> None:
        """Abort the collectives that other ranks wait in and that ranks without a cell will not submit."""
        # A paused rank is not idle: its user can type the awaited call at the prompt.
        idle = self.cells.idle - self.pauses.reasons.keys()
        for ps in list(self.sets.by_id.values()):
            # A rank without a cell does not submit the name that it owes. Its next cell can use the same name rightly, and must not
            # get the old verdict.
            if ps.negotiation.owed:
                for rank in idle & ps.negotiation.owed.ranks:
                    ps.negotiation.owed.discard_rank(rank)
            if ps.negotiation.pending and not ps.negotiation.members.isdisjoint(idle):
                # Messages first: they end alone, and the generation goes on if no collective waits in vain besides them.
                end_lost_messages(ps, self.cells, idle, now)
                # Sent before the abort below, which replaces the negotiation and would lose them.
                if ps.negotiation.rejections:
                    self.flush_set(ps, now)
                abort = find_absence(ps, self.cells, idle)
                if abort is not None:
                    self.apply(self.sets.abort(abort))

    def _abort_deadlock(self) -> None:
        """Abort the generations in which ranks wait for each other."""
        # A rank that is paused for its user is not stuck: the user can type there the very call that others wait for.
        ranks = {rank: peer for rank, peer in self.membership.ranks.items() if rank not in self.pauses}
        idle = self.cells.idle - self.pauses.reasons.keys()
        self.apply(abort_deadlock(self.sets.by_id, ranks, idle))

    def check_later(self, now: float) -> None:
        """Check for deadlocks after ranks that do not wait any more have had the time to report it."""
        if self.blocked and self._check_due is None:
            self._check_due = now + _CHECK_AGAIN
            self._due = None

    def world(self) -> m.World:
        """Return the message that describes the membership."""
        world = self.sets.world
        formed = tuple(sorted(world.members)) if world.phase == OPEN else ()
        training = bool(self.elastic.training or self.elastic.ready)
        return self.membership.world(
            world.generation, formed, restoring=self.restoring.active, training=training
        )

    # -- checks ---------------------------------------------------------------------------------------------------

    def validate_state(self) -> None:
        """Assert the invariants that hold between batches of events.

        Raises:
            AssertionError: One is broken; its notes have the story of the rank, tensor or process set that it is about.
        """
        try:
            self._validate()
        except AssertionError as error:
            self.log.add_story_to(error)
            raise

    def _validate(self) -> None:
        self.membership.validate()
        self.sets.validate()
        ranks = self.membership.ranks
        self.cells.validate(rank for rank, peer in ranks.items() if peer.tracked)
        assert self.by_peer == {peer.peer: peer for peer in ranks.values()}
        assert not self.by_peer.keys() & self.membership.clients.keys()
        assert self.blocked == {rank for rank, peer in ranks.items() if peer.wait is not None}
        assert self.pauses.reasons.keys() <= ranks.keys()
        assert not self.effects
        references = sum(len(peer.definitions) for peer in ranks.values())
        assert sum(info.references for info in self.signatures) == references
        for ps in self.sets:
            with InvariantOf(process_set=ps.id):
                assert not ps.negotiation.ready or ps in self.fusion.windows
                if next(iter(ps.negotiation.waiting()), None) is not None:
                    assert self.stalls.due is not None
                if ps.negotiation.pending:
                    assert not ps.gone


def answer_ping(state: CoordinatorState, peer: int, message: m.Ping, now: float) -> None:
    """Answer a ping, after all other messages of the batch."""
    # Not ``now``, which can be earlier than the question: the batch began before it was read.
    state.answers.append((peer, m.Pong(message.number, state.clock(), message.after_events)))


def _on_client_subscribe(state: CoordinatorState, peer: int, message: m.Subscribe, now: float) -> None:
    if message.events:
        state.apply(state.history.subscribe(peer, past=message.history, after=message.after))
    else:
        state.history.unsubscribe(peer)


def peers_of(state: CoordinatorState, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the connections of those of these ranks that live."""
    living = state.membership.ranks
    return tuple(living[rank].peer for rank in ranks if rank in living)


def keep_for_absent(state: CoordinatorState, ranks: tuple[int, ...], mail: m.Mail) -> None:
    """Keep mail for those of these ranks that are perhaps on their way to a successor."""
    # A rank repeats its mail as soon as it has found the successor, perhaps before the ranks that the mail is for. A client that lets
    # go of its pool meanwhile does not repeat it at all.
    if state.restoring.active:
        for target in ranks:
            if target not in state.membership.ranks:
                state.restoring.keep_mail(target, mail)


RankHandler = Callable[[CoordinatorState, RankPeer, Any, float], None]


def _on_resume(state: CoordinatorState, rank: RankPeer, message: m.Resume, now: float) -> None:
    # This coordinator counts on from the highest number. One near the end of 64 bits could not be sent any more, and all would wait.
    if max((message.last_set, *(known.generation for known in message.sets))) >= GENERATIONS**3:
        state.violation(rank, "generations of process sets that no coordinator has given", now)
        return
    state.log.add_event()
    state.apply(state.successor.add_resumed(rank, message))


def _on_bye(state: CoordinatorState, rank: RankPeer, message: m.Bye, now: float) -> None:
    """Remove a rank that leaves in order."""
    # In the order of `peer_lost()`: the rank has left the table before its sets decide, and they send to
    # living members only.
    past = state.forget_peer(rank, now)
    decision = state.apply(state.membership.leave(rank, message.reason))
    state.effects.add(CloseConnection(rank.peer))
    text = f"rank {rank.rank} left the job" + (f" ({message.reason})" if message.reason else "")
    state.apply(state.sets.leave(rank.rank, past, text, decision))


def _on_paused(state: CoordinatorState, rank: RankPeer, message: m.Paused, now: float) -> None:
    """Stop the clocks of all waits while a rank is paused for its user (again, if it is for another reason)."""
    state.apply(state.pauses.begin_pause(rank.rank, message.reason, now))


def _on_resumed(state: CoordinatorState, rank: RankPeer, message: m.Resumed, now: float) -> None:
    """End the pause of a rank."""
    state.continue_rank(rank.rank, now)


def _on_elastic(state: CoordinatorState, rank: RankPeer, message: m.Elastic, now: float) -> None:
    state.admission.set_training(rank, on=message.on)


def _on_regroup(state: CoordinatorState, rank: RankPeer, message: m.Regroup, now: float) -> None:
    state.admission.add_regrouped(rank, message)


def _on_withdraw(state: CoordinatorState, rank: RankPeer, message: m.Withdraw, now: float) -> None:
    state.apply(state.sets.withdraw(rank, message))


def _on_cancel(state: CoordinatorState, rank: RankPeer, message: m.Cancel, now: float) -> None:
    ps = state.apply(state.sets.cancel_message(rank, message, now))
    if ps is not None:
        state.touched[ps] = None


def _on_decline_post(state: CoordinatorState, rank: RankPeer, message: m.DeclinePost, now: float) -> None:
    state.apply(state.sets.decline_post(rank, message))


def _on_board_missing(state: CoordinatorState, rank: RankPeer, message: m.BoardMissing, now: float) -> None:
    state.apply(state.sets.board_missing(rank, message))


def _on_plane_failed(state: CoordinatorState, rank: RankPeer, message: m.PlaneFailed, now: float) -> None:
    """Record that a plane failed. A member that died explains it better, if the end of its connection comes in time."""
    state.sets.plane_failed(rank, message, now + state.options.failure_grace)


def _on_executed(state: CoordinatorState, rank: RankPeer, message: m.Executed, now: float) -> None:
    """Dispatch the next rounds with a priority, after a batch of them has ended."""
    ps = state.sets.open_set(rank, message)
    if ps is not None:
        ps.negotiation.priorities.executed(message.sequence, message.batch)
        state.touched[ps] = None


def _on_renew(state: CoordinatorState, rank: RankPeer, message: m.Renew, now: float) -> None:
    state.apply(state.sets.renew(rank, message))


def _on_cell_begin(state: CoordinatorState, rank: RankPeer, message: m.CellBegin, now: float) -> None:
    if rank.tracked:
        # A newcomer without a cell waits as long as members run one; with this cell it can enter.
        state.admission.due = True
        state.cells.begin(message.cell, rank.rank)


def _on_cell_end(state: CoordinatorState, rank: RankPeer, message: m.CellEnd, now: float) -> None:
    # Newcomers without a cell wait for the last cell of the members to end.
    state.admission.due = True
    if not rank.tracked:
        return
    # Also after the restoration: the client's facts can come later than this message, and would begin the cell again.
    state.restoring.cell_ended(message.cell, rank.rank)
    if state.cells.end(message.cell, rank.rank, message.error):
        for ps in state.sets.containing(rank.rank):
            ps.negotiation.owed.discard_rank(rank.rank)


def _on_store_set(state: CoordinatorState, rank: RankPeer, message: m.StoreSet, now: float) -> None:
    state.apply(state.sets.set_value(rank, message))


def _on_store_get(state: CoordinatorState, rank: RankPeer, message: m.StoreGet, now: float) -> None:
    state.apply(state.sets.get_value(rank, message))


def _on_events(state: CoordinatorState, rank: RankPeer, message: m.Events, now: float) -> None:
    state.apply(state.history.pass_on(rank.rank, message.batch))


def _on_post(state: CoordinatorState, rank: RankPeer, message: m.Post, now: float) -> None:
    mail = m.Mail(message.topic, rank.rank, message.body)
    peers = peers_of(state, message.to) if message.to else tuple(state.membership.clients)
    state.effects.send(peers, mail)
    keep_for_absent(state, message.to, mail)


def _on_ping(state: CoordinatorState, rank: RankPeer, message: m.Ping, now: float) -> None:
    answer_ping(state, rank.peer, message, now)


def _on_subscribe(state: CoordinatorState, rank: RankPeer, message: m.Subscribe, now: float) -> None:
    _on_client_subscribe(state, rank.peer, message, now)


def _on_pong(state: CoordinatorState, rank: RankPeer, message: m.Pong, now: float) -> None:
    state.stalls.executions.answered(rank.rank)


def _on_duplicate(state: CoordinatorState, rank: RankPeer, message: m.Duplicate, now: float) -> None:
    ps = state.sets.open_set(rank, message)
    if ps is not None:
        state.touched[ps] = None
        ps.negotiation.duplicate(message.name, rank.rank, message.first_site, message.second_site, now)


def _on_blocked(state: CoordinatorState, rank: RankPeer, message: m.Blocked, now: float) -> None:
    rank.update_waits(message, now)
    if rank.wait is None:
        state.blocked.discard(rank.rank)
    else:
        state.blocked.add(rank.rank)
    # The end of a wait frees a rank, and can't leave others without an end to theirs.
    if message.local < 0:
        return
    if rank.executing is not None:
        state.stalls.watch_execution(rank.executing.since, now)
    else:
        state.check_blocked = True


# Without Announce, which `handle_all()` handles before it asks this table.
RANK_HANDLERS: dict[type, RankHandler] = {
    m.Resume: _on_resume,
    m.Duplicate: _on_duplicate,
    m.Blocked: _on_blocked,
    m.Paused: _on_paused,
    m.Resumed: _on_resumed,
    m.Pong: _on_pong,
    m.Bye: _on_bye,
    m.Ping: _on_ping,
    m.Post: _on_post,
    m.Withdraw: _on_withdraw,
    m.Cancel: _on_cancel,
    m.DeclinePost: _on_decline_post,
    m.BoardMissing: _on_board_missing,
    m.PlaneFailed: _on_plane_failed,
    m.Executed: _on_executed,
    m.Renew: _on_renew,
    m.CellBegin: _on_cell_begin,
    m.CellEnd: _on_cell_end,
    m.Elastic: _on_elastic,
    m.Regroup: _on_regroup,
    m.StoreSet: _on_store_set,
    m.StoreGet: _on_store_get,
    m.Events: _on_events,
    m.Subscribe: _on_subscribe,
}

ClientHandler = Callable[[CoordinatorState, int, Any, float], None]


def _on_recall(state: CoordinatorState, peer: int, message: m.Recall, now: float) -> None:
    """Add the facts of a client that has lost its coordinator. A rank that it knows to be dead loses its connection first."""
    state.log.add_event()
    for death in message.deaths:
        back = state.membership.ranks.get(death.rank)
        if back is not None and back.pid == death.pid:  # the others have continued without it
            state.effects.add(CloseConnection(back.peer))
            state.peer_lost(back.peer, death.reason, now)
    # After the ends above: a death is restored only for a rank that is not connected.
    state.apply(state.successor.add_recalled(message))


def _on_client_bye(state: CoordinatorState, peer: int, message: m.Bye, now: float) -> None:
    state.membership.clients.pop(peer, None)
    state.membership.observers.pop(peer, None)
    state.history.unsubscribe(peer)
    state.effects.add(CloseConnection(peer))


def _on_expect(state: CoordinatorState, peer: int, message: m.Expect, now: float) -> None:
    state.restoring.recalled = True
    state.apply(state.admission.resize(message.ranks))


def _on_release(state: CoordinatorState, peer: int, message: m.Release, now: float) -> None:
    state.apply(state.admission.scale_down(message.ranks))


def _on_cell_started(state: CoordinatorState, peer: int, message: m.CellStarted, now: float) -> None:
    ranks = state.membership.ranks
    state.admission.due = True
    for rank in message.ranks:
        if rank in ranks and ranks[rank].tracked:  # a rank that comes later does not get this cell
            state.cells.begin(message.cell, rank)


def _on_interrupt(state: CoordinatorState, peer: int, message: m.InterruptRanks, now: float) -> None:
    state.effects.send(peers_of(state, message.ranks), m.Interrupt())


def _on_rank_lost(state: CoordinatorState, peer: int, message: m.RankLost, now: float) -> None:
    """Record the end of a process that the launcher saw, perhaps before its connection ended; its reason is the better one."""
    rank = state.membership.ranks.get(message.rank)
    if rank is None:
        state.apply(state.membership.explain_death(message.rank, message.pid, message.reason, now))
    # By process: the launcher can report the end of the one before late, when its replacement is connected already.
    elif rank.pid == message.pid:
        state.effects.add(CloseConnection(rank.peer))
        state.peer_lost(rank.peer, message.reason, now, explained=True)


def _on_client_post(state: CoordinatorState, peer: int, message: m.Post, now: float) -> None:
    mail = m.Mail(message.topic, -1, message.body)
    state.effects.send(peers_of(state, message.to), mail)
    keep_for_absent(state, message.to, mail)


def _on_story_request(state: CoordinatorState, peer: int, message: m.StoryRequest, now: float) -> None:
    # Orders are counted without the log, so that a healthy job writes nothing there; they are added when a client asks for a story.
    state.apply(state.sets.count_orders())
    state.effects.send((peer,), m.Story(message.ticket, state.log.story(message), state.log.dropped))


def _ignore(state: CoordinatorState, peer: int, message: m.Message, now: float) -> None:
    """Do nothing for a Pong: it is only a sign of life, which the server has recorded with its bytes."""


CLIENT_HANDLERS: dict[type, ClientHandler] = {
    m.Pong: _ignore,
    m.Bye: _on_client_bye,
    m.Ping: answer_ping,
    m.Post: _on_client_post,
    m.Recall: _on_recall,
    m.Expect: _on_expect,
    m.Release: _on_release,
    m.CellStarted: _on_cell_started,
    m.InterruptRanks: _on_interrupt,
    m.RankLost: _on_rank_lost,
    m.StoryRequest: _on_story_request,
    m.Subscribe: _on_client_subscribe,
}
