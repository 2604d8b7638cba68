"""The coordinator as a pure state machine: events in, effects out.

No sockets, threads or clocks: the server owns them, calls :meth:`CoordinatorState.handle_all` with what has happened
and ``now`` (monotonic seconds), and carries out the effects in order. Events that are handled in one call make one
*round*: what becomes ready in it is fused, and changes of membership take effect together at its end.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hvdlab.collectives.coordinator import arrivals, deadlock, elastic, fusion, process_sets, restoring
from hvdlab.collectives.coordinator.client_messages import TO_CLIENTS
from hvdlab.collectives.coordinator.deadlock import Cells
from hvdlab.collectives.coordinator.elastic import Elastic
from hvdlab.collectives.coordinator.event_history import UNREAD_BYTES, EventHistory
from hvdlab.collectives.coordinator.events import (
    CloseConnection,
    Effect,
    Event,
    Outbox,
    PeerConnected,
    PeerLost,
    Received,
)
from hvdlab.collectives.coordinator.fusion import Holding, Tuning
from hvdlab.collectives.coordinator.membership import Membership, RankPeer
from hvdlab.collectives.coordinator.options import CoordinatorOptions
from hvdlab.collectives.coordinator.plane_selection import Hierarchy
from hvdlab.collectives.coordinator.process_sets import OPEN, ProcessSet, ProcessSets
from hvdlab.collectives.coordinator.rank_messages import TO_RANKS
from hvdlab.collectives.coordinator.restoring import EPOCHS, Restoring
from hvdlab.collectives.coordinator.signatures import SignatureTable
from hvdlab.collectives.coordinator.stall_inspector import Pauses, Stalls
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.protocol import messages as m

_PLAIN = frozenset(
    kind
    for kind in OpKind
    if kind not in (OpKind.ADD_PROCESS_SET, OpKind.REMOVE_PROCESS_SET, OpKind.JOIN) and not kind.asks_server
)
_CHECK_AGAIN = 0.5
"""Seconds in which announcements may still come before the coordinator looks for ranks that wait for each other."""


class CoordinatorState:
    """Membership, readiness and order of one job.

    Args:
        options: Settings.
        wall: Turns ``now`` into seconds since 1970, for what users see.
        clock: Nanoseconds of the clock that ranks compare theirs with.
    """

    def __init__(
        self,
        options: CoordinatorOptions | None = None,
        *,
        wall: Callable[[float], float] = float,
        clock: Callable[[], int] = int,
    ) -> None:
        self.options = options or CoordinatorOptions()
        self.clock = clock
        self.outbox = Outbox()
        size = self.options.size
        self.membership = Membership(None if size is None else range(size), wall)
        hierarchy = Hierarchy(self.options.hierarchical_allreduce, self.options.hierarchical_allgather)
        generation = self.options.generation
        self.sets = ProcessSets(
            self.membership,
            self.outbox,
            hierarchy,
            generation * EPOCHS + 1,
            by_seniority=self.options.by_seniority,
        )
        self.restoring = Restoring(generation, self.options.reattach)
        self.signatures = SignatureTable()
        self.cells = Cells()
        self.elastic = Elastic()
        self.history = EventHistory(min(UNREAD_BYTES, self.options.history_bytes))
        self.by_peer: dict[int, RankPeer] = {}
        #: Why peers were refused, the last few reasons.
        self.refused: deque[str] = deque(maxlen=32)
        self.touched: dict[ProcessSet, None] = {}
        # Sent last in a round: they tell a peer that all before has been handled.
        self.answers: list[tuple[int, m.Pong | m.Regrouped]] = []
        self.check_admission = False
        self.check_blocked = False
        self.blocked: set[int] = set()  # ranks whose user waits for a collective that is not decided
        self._check_due: float | None = None
        self.stalls = Stalls(self.options.stall_seconds, self.options.stall_shutdown)
        self.pauses = Pauses()
        self.holding = Holding()
        self.fusion_threshold = self.options.fusion_threshold
        self.flush_delay = self.options.flush_delay
        self.tuning = Tuning(self.options)
        self._due: float | None = None  # what _find_due found last
        #: Why this state must not be used any more, after a handler failed halfway; empty as long as it may be.
        self.unsound = ""

    # -- the door -------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """One event as a round of its own."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Effect]:
        """Take in the events of one round, in order, and return the effects to carry out, in order."""
        by_peer = self.by_peer
        plain = True
        if self.restoring.active:
            self.restoring.begin(now)
        failed: Exception | None = None
        for event in events:
            try:
                if type(event) is Received:
                    rank = by_peer.get(event.peer)
                    if rank is not None and type(event.message) is m.Announce:
                        self._announce(rank, event.message, now)
                        continue
                    plain = False
                    if rank is None:
                        self._from_client(event, now)
                    else:
                        self._from_rank(rank, event.message, now)
                    continue
                plain = False
                if type(event) is PeerConnected:
                    arrivals.connect(self, event.peer, event.hello, now)
                elif type(event) is PeerLost:
                    since = now - event.silence
                    arrivals.lose(self, event.peer, event.reason, now, explained=event.faulty, since=since)
            except Exception as error:  # noqa: BLE001  (a handler may raise anything)
                # One peer's message must not end the job of all. The handler may have stopped halfway, though:
                # the checks at the end of the round decide whether what it left can be used.
                plain, failed = False, error
                self._fail(event, error, now)
        try:
            if not (plain and self._release_plain(now)):
                self._settle(now)
                self._due = self._find_due()
            if self.options.tuning is not None:
                self.tuning.advance(self, now)
        except Exception as error:
            if failed is None:
                raise  # no single peer's message is to blame, so that no connection can be ended instead of this process
            self._mark_unsound(error)
        effects = self.outbox.take()
        if failed is not None and not self.unsound:
            self._check_after(failed)
        return effects

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
        for line in traceback.format_exception(error):
            self.outbox.log(line.rstrip())
        try:
            text = f"{text} that the coordinator failed to handle: {error!r}"
            self._end_failed(event.peer, text, event, now)
        except Exception as later:  # noqa: BLE001  (the state is too broken to take leave of a peer)
            self._mark_unsound(later)

    def _end_failed(self, peer: int, text: str, event: Event, now: float) -> None:
        rank = self.by_peer.get(peer)
        if rank is not None:
            self.violation(rank, text, now)
            return
        self.outbox.log(f"peer {peer} sent {text}")
        if isinstance(event, PeerConnected):  # it waits for an answer, and would come again without one
            self.outbox.send((peer,), m.Refused(f"it sent {text}"))
        self.outbox.effects.append(CloseConnection(peer))
        arrivals.lose(self, peer, "", now)

    def _check_after(self, error: Exception) -> None:
        """Find out whether the state can be used after a handler has failed in this round."""
        try:
            self.validate_state()
        except Exception as found:  # noqa: BLE001  (a broken state may raise anything)
            found.__cause__ = error
            self._mark_unsound(found)

    def _mark_unsound(self, error: Exception) -> None:
        for line in traceback.format_exception(error):
            self.outbox.log(line.rstrip())
        self.unsound = repr(error)

    def next_deadline(self) -> float | None:
        """When a :class:`Tick` is due at the latest, or ``None`` for never."""
        return self._due

    def _find_due(self) -> float | None:
        times = [ps.failure[0] for ps in self.sets if ps.failure is not None]
        times += [ps.past_failure[0] for ps in self.sets if ps.past_failure is not None]
        for ps in self.sets:
            if ps.matcher.disputes and (since := ps.matcher.disputed_since) is not None:
                times.append(since + self.options.dispute_grace)
        if self.restoring.active and self.restoring.due is not None:
            times.append(self.restoring.due)
        stall = None if self.pauses else self.stalls.due
        for time in (stall, self.holding.due, self.membership.next_report(), self._check_due):
            if time is not None:
                times.append(time)
        return min(times, default=None)

    # -- ranks ----------------------------------------------------------------------------------------------------

    def _announce(self, rank: RankPeer, message: m.Announce, now: float) -> None:
        definitions = rank.definitions
        for definition in message.definitions:
            self.signatures.define(definitions, definition)
        ps = self.sets.by_id.get(message.process_set)
        if ps is None or ps.phase != OPEN or ps.epoch != message.epoch or rank.rank not in ps.matcher.members:
            # The announcement is of an ended epoch: the abort or the new configuration is on its way, unless the rank was left out.
            if rank.leaving and (ps is None or ps.former.get(rank.rank) == (rank.peer, message.epoch)):
                arrivals.refuse_left_out(self, rank, message)
            return
        self.touched[ps] = None
        submit = ps.matcher.submit
        extra = message.extra
        try:
            if message.payload and len(message.locals) == 1:
                (local,) = message.locals
                submit(rank.rank, definitions[local], extra[0] if extra else (), now, message.payload)
            elif extra:
                for local, numbers in zip(message.locals, extra, strict=True):
                    submit(rank.rank, definitions[local], numbers, now)
            else:
                for local in message.locals:
                    submit(rank.rank, definitions[local], (), now)
        except (KeyError, ValueError) as error:
            self.violation(rank, f"an announcement that makes no sense: {error!r}", now)
        if self.stalls.due is None:
            self.stalls.watch(now)
            self._due = None  # to be found anew
        self.check_later(now)  # this may be what makes the others wait in vain

    def _from_rank(self, rank: RankPeer, message: m.Message, now: float) -> None:
        react = TO_RANKS.get(type(message))
        if react is None:
            self.violation(rank, f"a {type(message).__name__} out of place", now)
        else:
            react(self, rank, message, now)

    def _from_client(self, event: Received, now: float) -> None:
        observes = event.peer in self.membership.observers
        if event.peer not in self.membership.clients and not observes:
            return  # it was closed earlier in this round
        react = TO_CLIENTS.get(type(event.message))
        if react is None or (observes and not isinstance(event.message, m.Pong | m.Bye)):
            self.outbox.log(
                f"{'observer' if observes else 'client'} {event.peer} sent a {type(event.message).__name__} out of place"
            )
            self.outbox.effects.append(CloseConnection(event.peer))
            arrivals.lose(self, event.peer, "", now)
        else:
            react(self, event.peer, event.message, now)

    def violation(self, rank: RankPeer, text: str, now: float) -> None:
        """A rank broke the protocol: its connection ends, which means the rank is lost."""
        self.outbox.log(f"rank {rank.rank} sent {text}")
        self.outbox.effects.append(CloseConnection(rank.peer))
        arrivals.lose(self, rank.peer, f"it sent {text}", now, explained=True)

    def open_set(self, rank: RankPeer, message: Any) -> ProcessSet | None:
        """The process set that a message is about, unless the message is of an ended epoch."""
        ps = self.sets.by_id.get(message.process_set)
        if ps is None or ps.phase != OPEN or ps.epoch != message.epoch or rank.rank not in ps.matcher.members:
            return None
        return ps

    def is_paused(self, peer: int) -> bool:
        """Whether the user looks around in the rank of this connection."""
        rank = self.by_peer.get(peer)
        return rank is not None and rank.rank in self.pauses

    # -- the end of a round ---------------------------------------------------------------------------------------

    def _release_plain(self, now: float) -> bool:
        """End the common round quickly: announcements that completed one collective at most. False if the round is not of that kind."""
        due = self._due
        if due is None or now >= due or len(self.touched) != 1:
            return False
        if self.cells.idle or self.elastic.ready or self.outbox.effects:
            return False
        (ps,) = self.touched
        matcher = ps.matcher
        if ps.gone or matcher.disputes or matcher.rejections or matcher.conflict or len(matcher.ready) > 1:
            return False
        if self.flush_delay and matcher.ready:
            return False
        if matcher.ready:
            if matcher.ready[0].info.kind not in _PLAIN or matcher.schedule.concerns(matcher.ready[0]):
                return False
            ready, matcher.ready = matcher.ready, []
            fusion.run(self, ps, ready)
        self.touched.clear()
        return True

    def _settle(self, now: float) -> None:
        if self._check_due is not None and now >= self._check_due:
            self._check_due, self.check_blocked = None, bool(self.blocked)
        urgent = bool(self.cells.idle) or self.check_blocked
        if self.holding.due is not None:
            self.touched |= dict.fromkeys(self.holding.over(now, all=urgent))
        if self.cells.idle or self.elastic.ready:
            self.touched |= {ps: None for ps in self.sets if ps.matcher.schedule}
        if fusion.end_disputes(self, now):
            self.check_later(now)  # what waited behind a dispute may wait in vain now that it is over
        if self.touched:
            touched, self.touched = self.touched, {}
            for ps in touched:
                delay = 0.0 if urgent else self.flush_delay
                if not self.holding.keep(ps, now, delay, self.fusion_threshold) and ps.phase == OPEN:
                    fusion.decide(self, ps, now)
        if self.cells.idle:
            deadlock.free_from_idle(self, now)
        if self.elastic.ready:
            elastic.end_waits(self)
        if self.check_blocked:
            self.check_blocked = False
            deadlock.end_deadlock(self)
        if self.stalls.due is not None and now >= self.stalls.due and not self.pauses:
            self.stalls.look(self, now)
        process_sets.end_failures(self, now)
        if self.restoring.active:
            restoring.end_wait(self, now)
        if self.membership.changed or self.check_admission:
            self.check_admission = False
            arrivals.admit(self)
        self.sets.configure_due()
        if self.membership.has_news:
            audience = self.membership.audience(now)
            if audience:
                self.outbox.send(audience, self.world())
        if self.answers:
            answers, self.answers = self.answers, []
            for peer, answer in answers:
                self.outbox.send((peer,), answer)

    def check_later(self, now: float) -> None:
        """Look for ranks that wait for each other, once ranks that do not wait any more have had the time to say so."""
        if self.blocked and self._check_due is None:
            self._check_due = now + _CHECK_AGAIN
            self._due = None

    def world(self) -> m.World:
        """The message that tells peers the membership."""
        world = self.sets.world
        formed = tuple(sorted(world.members)) if world.phase == OPEN else ()
        training = bool(self.elastic.training or self.elastic.ready)
        return self.membership.world(world.epoch, formed, restoring=self.restoring.active, training=training)

    # -- checks ---------------------------------------------------------------------------------------------------

    def validate_state(self) -> None:
        """Assert what must hold between rounds."""
        self.membership.validate()
        self.sets.validate()
        ranks = self.membership.ranks
        self.cells.validate(rank for rank, peer in ranks.items() if peer.tracked)
        assert self.by_peer == {peer.peer: peer for peer in ranks.values()}
        assert not self.by_peer.keys() & self.membership.clients.keys()
        assert self.blocked == {rank for rank, peer in ranks.items() if peer.wait is not None}
        assert self.pauses.reasons.keys() <= ranks.keys()
        assert not self.outbox.effects
        references = sum(len(peer.definitions) for peer in ranks.values())
        assert sum(info.references for info in self.signatures) == references
        for ps in self.sets:
            assert not ps.matcher.ready or ps in self.holding
            if next(iter(ps.matcher.waiting()), None) is not None:
                assert self.stalls.due is not None
            if ps.matcher.pending:
                assert not ps.gone
