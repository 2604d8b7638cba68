"""Process sets: begins and ends of their generations, additions and removals of sets, and the values that members exchange to connect.

:data:`Decisions` is the form in which all parts of the coordinator's state decide: a generator of entries for the decision log, of effects,
and of ends of generations. The state carries each out before the part continues, so that an entry has its number for the messages behind
it, and an exception halfway loses no message about a change that was made. A call without a consumer decides nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from hvdlab.collectives.coordinator.decision_log import Amendment, DecisionEntry, DecisionKind, InvariantOf
from hvdlab.collectives.coordinator.events import Effect, Log, Send, SendConfigure
from hvdlab.collectives.coordinator.membership import MembershipTable, RankPeer
from hvdlab.collectives.coordinator.negotiation import Impossible, Negotiation, log_verdict
from hvdlab.collectives.coordinator.plane_selection import (
    AUTOMATIC,
    Hierarchy,
    PlaneChoice,
    choose_plane,
    without_memory,
)
from hvdlab.collectives.coordinator.signatures import NegotiationRound, describe
from hvdlab.collectives.errors import CauseKind
from hvdlab.collectives.protocol.messages import (
    Abort,
    AbortedCollective,
    Batch,
    BoardMissing,
    Cancel,
    Cancelled,
    Configure,
    DeclinePost,
    Dissolve,
    Execute,
    PlaneFailed,
    ProcessSetAdded,
    Signature,
    StoreGet,
    StoreSet,
    StoreValue,
    Withdraw,
)
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.types import OpKind

WORLD = 0
"""Id of the process set of all ranks."""


OPEN, SWITCHING, ENDED = range(3)


PAST_STORES = 4
"""Former generations of a process set that keep their rendezvous stores: ranks finish operations of the last few, not of older ones."""


class GenerationAbort(NamedTuple):
    """Decision to abort the present generation of a process set.

    Attributes:
        process_set: The process set.
        kind, ranks, text, site: The cause, as users see it.
        cause: Entry of the decision log that led to it; 0 for the event that is being handled.
    """

    process_set: ProcessSetState
    kind: CauseKind
    ranks: tuple[int, ...]
    text: str
    site: str = ""
    cause: int = 0


class MemberChange(NamedTuple):
    """Decision to change over to new members of a process set in order.

    Attributes:
        process_set: The process set.
        members: The members of its next generation, as far as they live then.
        cause: Entry of the decision log that led to it; 0 for the event that is being handled.
    """

    process_set: ProcessSetState
    members: tuple[int, ...]
    cause: int = 0


Result = TypeVar("Result")
CoordinatorDecision = DecisionEntry | Amendment | GenerationAbort | MemberChange | Effect
Decisions = Generator[CoordinatorDecision, None, Result]
"""Decisions of a part of the coordinator's state, in order, and then its result."""


class AboutSet(Protocol):
    """Message about one generation of a process set."""

    @property
    def process_set(self) -> int: ...

    @property
    def generation(self) -> int: ...


class ProcessSetState:
    """State of a process set in its current generation.

    Attributes:
        id: 0 is the world.
        generation: Grows by one with each change; 0 means never configured.
        phase: ``OPEN``; ``SWITCHING`` (an orderly change is due: operations that execute are finished); or ``ENDED`` (aborted).
            In the latter two ``generation`` is the one that ``Configure`` will name.
        members, peers: Ranks, and their connections, by position.
        next_members: Ranks of the generation that is due (those of them that live then); ``None`` if none is due.
        gone: Members that have sent Bye. The first collective after that ends the generation.
        former: Ranks that an orderly change left out and that are still connected, with their connections and their
            last generations: members can need them to finish operations of those generations.
        aborted: The newest generation in which all execution has ended.
        declined: Generation and number of the latest request on the board that members were asked to decline.
        negotiation, store, sequence: Submissions of this generation, values that its members exchange to connect, number of its last order.
        past_stores: Stores of former generations, in which perhaps ranks still find each other to finish operations.
        failure: (due time, rank, text) of a plane's failure that is about to end the generation.
        past_failure: (due time, generation, rank, text) of a plane's failure that is about to abort operations of a former generation.
        decision: Entry of the decision log that began this generation, which counts its orders; they carry its number.
        ended_by: Entry of the decision that ended the generation before, while the next has not begun; 0 if it is not known.
    """

    __slots__ = (
        "aborted",
        "decision",
        "declined",
        "ended_by",
        "failure",
        "former",
        "generation",
        "gone",
        "id",
        "members",
        "negotiation",
        "next_members",
        "past_failure",
        "past_stores",
        "peers",
        "phase",
        "sequence",
        "store",
    )  # fmt: skip

    def __init__(self, id: int) -> None:
        self.id = id
        self.generation = 0
        self.phase = ENDED
        self.members: tuple[int, ...] = ()
        self.next_members: tuple[int, ...] | None = None
        self.peers: tuple[int, ...] = ()
        self.gone: set[int] = set()
        self.former: dict[int, tuple[int, int]] = {}
        self.aborted = 0
        self.declined = (0, 0)
        self.past_failure: tuple[float, int, int, str] | None = None
        self.failure: tuple[float, int, str] | None = None
        self.sequence = 0
        self.decision = self.ended_by = 0
        self.negotiation = Negotiation(())
        self.store = RendezvousValues()
        self.past_stores: dict[int, RendezvousValues] = {}

    @property
    def current(self) -> tuple[int, ...]:
        """Return the members, or those of the generation that is due."""
        return self.members if self.next_members is None else self.next_members

    @property
    def quiet(self) -> bool:
        """Return whether all members are present and agree, so that a ready round can be dispatched as it is."""
        negotiation = self.negotiation
        return not (self.gone or negotiation.mismatches or negotiation.rejections or negotiation.conflict)

    def plane_failed_before(self, due: float, generation: int, rank: int, text: str) -> None:
        """Record that the plane of a former generation failed on a rank; at ``due`` its operations end.

        Those of all earlier generations end as well, so of several failures that of the latest generation is kept.
        """
        known = self.past_failure
        if known is None or generation > known[1]:
            self.past_failure = (due if known is None else min(due, known[0]), generation, rank, text)

    def clear(self) -> None:
        """Forget everything about the generation but its members."""
        self.negotiation = Negotiation(self.members)
        self.store = RendezvousValues()
        self.failure = None
        self.sequence = 0


class ProcessSets:
    """Table of the job's process sets; it ends and begins their generations.

    Args:
        membership: Ranks that live, and can enter a generation.
        hierarchy: Wishes of the user for ranks on several hosts.
        first_generation: First generation of sets of this coordinator, above those of the ones before.
        by_seniority: Whether members are in the order in which they came into the world, not in that of their numbers.

    Attributes:
        world: The process set of all ranks.
        by_id: All process sets, by id; the world has 0.
    """

    def __init__(
        self,
        membership: MembershipTable,
        hierarchy: Hierarchy = AUTOMATIC,
        first_generation: int = 1,
        *,
        by_seniority: bool = False,
    ) -> None:
        self.world = ProcessSetState(WORLD)
        self.by_id: dict[int, ProcessSetState] = {WORLD: self.world}
        self._membership = membership
        self._hierarchy = hierarchy
        self._by_seniority = by_seniority
        #: Id of the next set that is added.
        self._next_id = 1
        #: Whether all members of the world were replaced since the last set was added.
        self._world_replaced = False
        #: The first generation that a set of this world gets.
        self._first_generation = first_generation
        #: The last generation that any removed set had.
        self._last_generation = first_generation - 1

    def __iter__(self) -> Iterator[ProcessSetState]:
        return iter(self.by_id.values())

    def containing(self, rank: int) -> list[ProcessSetState]:
        """Return the sets that have ``rank`` as a member that has not left."""
        return [ps for ps in self if rank in ps.members and rank not in ps.gone]

    # -- sets that messages are about ---------------------------------------------------------------------------------

    def open_set(self, rank: RankPeer, message: AboutSet) -> ProcessSetState | None:
        """Return the process set that a member's message is about, or ``None`` if the message is of an ended generation."""
        ps = self.by_id.get(message.process_set)
        if (
            ps is None
            or ps.phase != OPEN
            or ps.generation != message.generation
            or rank.rank not in ps.negotiation.members
        ):
            return None
        return ps

    def past_set(self, rank: RankPeer, message: AboutSet) -> ProcessSetState | None:
        """Return the process set of a message of an earlier generation, in which perhaps ranks still execute; otherwise ``None``."""
        ps = self.by_id.get(message.process_set)
        if (
            ps is None
            or message.generation >= ps.generation
            or not (rank.rank in ps.members or rank.rank in ps.former)
        ):
            return None
        return ps

    def set_value(self, rank: RankPeer, message: StoreSet) -> Decisions[None]:
        """Keep a value for the members that connect with each other, and answer those that wait for it."""
        store = self._values_of(rank, message)
        if store is not None:
            yield from store.store_value(message.key, message.value)

    def get_value(self, rank: RankPeer, message: StoreGet) -> Decisions[None]:
        """Answer a member that needs a value, now or once it is set."""
        store = self._values_of(rank, message)
        if store is not None:
            yield from store.answer(message.key, rank.peer, message.ticket)

    def _values_of(self, rank: RankPeer, message: AboutSet) -> RendezvousValues | None:
        """Return the values that a message is about: of this generation, or of an earlier one that ended in order."""
        ps = self.open_set(rank, message)
        if ps is not None:
            return ps.store
        ps = self.past_set(rank, message)
        return ps.past_stores.get(message.generation) if ps is not None else None

    def decline_post(self, rank: RankPeer, message: DeclinePost) -> Decisions[None]:
        """Pass a request to decline on to the members that it can concern."""
        ps = self.open_set(rank, message)
        if ps is not None and ps.gone:
            # A rank that has left has declined everything for good, but perhaps it left before it had mapped the board.
            left = tuple(sorted(ps.gone))
            yield GenerationAbort(ps, CauseKind.RANK_LEFT, left, f"{format_ranks(left)} left the job")
            return
        if ps is not None:
            # Each rank that has posted asks; of several with the same number the first goes out, as the others would only repeat it.
            if (message.generation, message.number) > ps.declined:
                ps.declined = message.generation, message.number
                yield Send(tuple(peer for peer in ps.peers if peer != rank.peer), message)
        elif (past := self.past_set(rank, message)) is not None:
            yield self._to_board(past, message)

    def board_missing(self, rank: RankPeer, message: BoardMissing) -> Decisions[None]:
        """Inform the ranks that are perhaps at a board that ``rank`` has none of this generation, or none any more."""
        ps = self.open_set(rank, message) or self.past_set(rank, message)
        if ps is not None:
            yield self._to_board(ps, DeclinePost(ps.id, message.generation, 0), without=rank.pid)

    def plane_failed(self, rank: RankPeer, message: PlaneFailed, due: float) -> None:
        """Record that a plane failed on ``rank``; :meth:`abort_failed` ends its generation at ``due``, unless it has ended before."""
        ps = self.open_set(rank, message)
        if ps is not None and ps.failure is None:
            ps.failure = (due, rank.rank, message.text)
        elif ps is None and (past := self.past_set(rank, message)) is not None:
            past.plane_failed_before(due, message.generation, rank.rank, message.text)

    def renew(self, rank: RankPeer, message: AboutSet) -> Decisions[None]:
        """Change over to the next generation with the members that have not left."""
        ps = self.open_set(rank, message)
        if ps is not None:
            yield MemberChange(ps, tuple(member for member in ps.members if member not in ps.gone))

    def _to_board(self, ps: ProcessSetState, message: DeclinePost, *, without: int | None = None) -> Send:
        """Return the message for all ranks that are perhaps at that board, with their process ids, except ``without``."""
        there = {*ps.peers, *(peer for peer, _ in ps.former.values())}
        ranks = [other for other in self._membership.ranks.values() if other.peer in there]
        peers = tuple(sorted(other.peer for other in ranks))
        pids = tuple(sorted(other.pid for other in ranks if other.pid != without))
        return Send(peers, msgspec.structs.replace(message, pids=pids))

    # -- ends of generations -------------------------------------------------------------------------------------------

    def withdraw(self, rank: RankPeer, message: Withdraw) -> Decisions[None]:
        """Abort the generation that a rank withdraws from, or the operations of an earlier one."""
        try:
            kind = CauseKind(message.kind)
        # A rank can send any text as the kind: it gives up all the same, and the others must not wait for it.
        except ValueError:
            kind = CauseKind.WITHDRAWN
        cause = kind, (rank.rank,), message.text, message.site
        ps = self.open_set(rank, message)
        # A second request for an ended generation changes nothing, so that a rank that was interrupted can repeat its own.
        if ps is not None:
            yield GenerationAbort(ps, *cause)
        elif (ps := self.past_set(rank, message)) is not None:
            yield from self._abort_past(message.generation, GenerationAbort(ps, *cause))

    def cancel_message(
        self, rank: RankPeer, message: Cancel, now: float
    ) -> Decisions[ProcessSetState | None]:
        """Cancel a message that waits for the other rank. Return its process set, which perhaps has ready rounds or rejections now."""
        ps, defined = self.open_set(rank, message), rank.definitions.get(message.local)
        report = None
        if ps is not None and defined is not None:
            report = ps.negotiation.cancel(rank.rank, defined, message.later, now)
        if ps is None or report is None:
            # The coordinator has ordered the message meanwhile: perhaps the other rank is in the middle of it.
            why = message.kind, message.text, message.site
            yield from self.withdraw(rank, Withdraw(message.process_set, message.generation, *why))
            return None
        entry = DecisionEntry(
            DecisionKind.CANCELLED,
            process_set=ps.id,
            generation=ps.generation,
            names=(report.name,),
            ranks=(rank.rank,),
        )
        yield entry
        cause = message.kind, (rank.rank,), message.text, message.site
        yield Send(
            (rank.peer,), Cancelled(ps.id, ps.generation, (), *cause, report, message.ticket, entry.number)
        )
        return ps

    def forget_former(self, rank: int) -> list[tuple[ProcessSetState, int]]:
        """Forget that changes in order left ``rank`` out of sets, since it is gone. Return these sets, each with its last generation there."""
        past = [(ps, ps.former[rank][1]) for ps in self if rank in ps.former]
        for ps, _ in past:
            del ps.former[rank]
        return past

    def end_with_dead(
        self, rank: int, past: Iterable[tuple[ProcessSetState, int]], text: str, decision: int
    ) -> Decisions[None]:
        """Abort the generations of a rank that is dead.

        Args:
            rank: The rank.
            past: Sets that it was left out of, each with its last generation there.
            text: How it has died, as users see it.
            decision: Entry of the decision log about that.
        """
        for ps in self.containing(rank):
            yield GenerationAbort(ps, CauseKind.RANK_DIED, (rank,), text, cause=decision)
        # Other ranks are perhaps still executing with this one in former generations, which ended before it was left out.
        for ps, generation in past:
            yield from self._abort_past(
                generation, GenerationAbort(ps, CauseKind.RANK_DIED, (rank,), text, cause=decision)
            )

    def leave(
        self, rank: int, past: Iterable[tuple[ProcessSetState, int]], text: str, decision: int
    ) -> Decisions[None]:
        """Remove a rank that has left in order from its sets.

        If others wait in a process set, its generation ends; otherwise the set stays until it is used again. The arguments are those
        of :meth:`end_with_dead`.
        """
        for ps in self.containing(rank):
            if ps.phase == OPEN and ps.negotiation.pending:
                yield GenerationAbort(ps, CauseKind.RANK_LEFT, (rank,), text, cause=decision)
                continue
            # The generation goes on until another member uses it: ranks that shut down one after the other end nothing for each
            # other.
            ps.gone.add(rank)
            if ps.declined[0] == ps.generation:
                # A member has waited at the board, and perhaps still does; this rank has perhaps left before it had mapped the board.
                yield self._to_board(ps, DeclinePost(ps.id, *ps.declined))
            if len(ps.gone) == len(ps.members):
                yield from self.change_members(MemberChange(ps, (), decision))
                yield from self._configure(ps)
        for ps, generation in past:
            yield self._to_board(ps, DeclinePost(ps.id, generation, 0))

    def abort(self, abort: GenerationAbort) -> Decisions[None]:
        """Abort the generation: everything pending fails on every member. Without effect if it was aborted and the next has not begun."""
        ps = abort.process_set
        if ps.phase == ENDED:
            return
        # In the middle of an orderly change ``generation`` is the next one already, of which no member knows.
        old = ps.generation if ps.phase == OPEN else ps.generation - 1
        # The report is made now: `_end()` replaces the negotiation, and the ranks' errors name the collectives that were under way.
        number = yield from self._end_operations(old, abort, ps.negotiation.report())
        yield from self._end(ps, ENDED)
        ps.ended_by = number

    def _abort_past(self, generation: int, abort: GenerationAbort) -> Decisions[None]:
        """Abort the operations that are still being executed in generations up to ``generation``, which ended in order."""
        if abort.process_set.aborted < generation < abort.process_set.generation:
            yield from self._end_operations(generation, abort)

    def _end_operations(
        self, generation: int, why: GenerationAbort, pending: tuple[AbortedCollective, ...] = ()
    ) -> Decisions[int]:
        """End the operations of generations up to ``generation``. Return the entry of the decision log about it."""
        ps, kind, ranks, text, site, cause = why
        entry = DecisionEntry(
            DecisionKind.ABORTED,
            cause=cause,
            process_set=ps.id,
            generation=generation,
            names=[collective.name for collective in pending],
            ranks=ranks,
            facts={"cause": kind.value, "text": text, "site": site},
        )
        yield entry
        yield from self._send_abort(
            ps, Abort(ps.id, generation, kind.value, ranks, text, site, pending, entry.number)
        )
        return entry.number

    def _send_abort(self, ps: ProcessSetState, abort: Abort) -> Decisions[None]:
        """Send an abort to members that live, and to former members that perhaps still execute operations with them."""
        ps.aborted = abort.generation
        ps.past_stores = {
            generation: store for generation, store in ps.past_stores.items() if generation > abort.generation
        }
        yield Send(self._living_peers(ps), abort)
        for rank, (peer, last) in list(ps.former.items()):
            # A former member knows no generation after its last one, and none of the collectives that are pending in them.
            mine = (
                abort
                if last >= abort.generation
                else msgspec.structs.replace(abort, generation=last, pending=())
            )
            yield Send((peer,), mine)
            # Its last operations have ended now, so it is asked no more. One with a later last generation still executes those.
            if last <= abort.generation:
                del ps.former[rank]

    def change_members(self, change: MemberChange) -> Decisions[None]:
        """Change over to new members in order.

        Ranks finish the operations that were ordered in the old generation, and announce their pending submissions again in the new one.
        """
        ps = change.process_set
        ps.next_members = change.members
        ps.ended_by = change.cause
        if ps.phase == OPEN:
            yield from self._end(ps, SWITCHING)

    def _end(self, ps: ProcessSetState, phase: int) -> Decisions[None]:
        if ps.phase == OPEN:
            yield from _count_orders(ps)
            if phase == SWITCHING:
                if ps.failure is not None:
                    # The members' operations can't come to their end, although the generation ends in order.
                    due, rank, text = ps.failure
                    ps.plane_failed_before(due, ps.generation, rank, text)
                ps.past_stores[ps.generation] = ps.store
                ps.past_stores.pop(ps.generation - PAST_STORES, None)
            # From now on messages of the old generation are recognized by its number.
            ps.generation += 1
        ps.phase = phase
        # An abort without a decision about members goes on with the same ones; `_configure()` leaves out those that are dead. One in
        # the middle of an orderly change keeps the members of that.
        if phase == ENDED:
            ps.next_members = ps.members if ps.next_members is None else ps.next_members
        ps.clear()

    # -- beginnings -----------------------------------------------------------------------------------------------

    def add_set(self, ranks: tuple[int, ...]) -> Decisions[ProcessSetState]:
        """Add a process set, and configure it at once. Ids begin at 1 again with a new world; together with the generation each is unique."""
        if self._world_replaced and len(self.by_id) == 1:
            self._next_id, self._first_generation = 1, self._last_generation + 1
        self._world_replaced = False
        ps = ProcessSetState(self._next_id)
        self._next_id += 1
        self.by_id[ps.id] = ps
        ps.generation = self._first_generation
        ps.aborted = ps.generation - 1
        ps.next_members = ranks
        # Not at the end of the batch: the answer to the ranks that have asked for the set has to follow its Configure.
        yield from self._configure(ps)
        return ps

    def restore(
        self, sets: Mapping[int, tuple[int, ...]], last_id: int, generation: int, decision: int = 0
    ) -> None:
        """Restore the process sets of a coordinator that died, with those of their members that have come; they are configured next.

        Args:
            sets: Members of each set, by id.
            last_id: The highest id that was given.
            generation: The first generation that was not used.
            decision: Entry of the decision log that leads to them.
        """
        ranks = self._membership.ranks
        self._next_id = max(self._next_id, last_id + 1)
        # Never lowered: messages of the dead coordinator's generations are recognized only by a number below all new ones.
        self._first_generation = max(self._first_generation, generation)
        for id, members in sets.items():
            ps = self.by_id.setdefault(id, ProcessSetState(id))
            ps.generation = self._first_generation
            ps.aborted = ps.generation - 1
            ps.next_members = members
            ps.ended_by = decision
            ps.peers = tuple(ranks[rank].peer for rank in members)  # these are no newcomers

    def _forget(self, ps: ProcessSetState) -> None:
        del self.by_id[ps.id]
        self._last_generation = max(self._last_generation, ps.generation)

    def _configure(self, ps: ProcessSetState) -> Decisions[None]:
        """Open the generation that is due, with those of its members that live."""
        ranks = self._membership.ranks
        # Those that live now: a rank can have died since the change became due.
        members = self._in_order(ps, [r for r in ps.next_members or () if self._may_enter(ps, r)])
        if ps.phase == SWITCHING:
            # Before `members` and `peers` are replaced. `_end()` has counted the generation up already, so the last one of these
            # ranks is one less.
            left = {
                rank: peer for rank, peer in zip(ps.members, ps.peers, strict=True) if rank not in members
            }
            # By connection, not only by number: a process that has replaced a dead member took no part in the old generation.
            living = {rank: peer for rank, peer in left.items() if rank in ranks and ranks[rank].peer == peer}
            ps.former |= {rank: (peer, ps.generation - 1) for rank, peer in living.items()}
        ps.members = members
        ps.next_members = None
        ps.gone.clear()
        old = {*ps.peers}  # before they are replaced
        ps.peers = tuple(ranks[r].peer for r in members)
        ps.clear()
        # A world without members stays closed, until an admission makes its next generation due.
        if not members:
            if ps is not self.world:
                self._forget(ps)
            return
        if ps is self.world:
            self._world_replaced = self._world_replaced or old.isdisjoint(ps.peers)
            for rank in members:
                ranks[rank].admitted = True
            self._membership.formed = True
        ps.generation = ps.generation or self._first_generation
        ps.phase = OPEN
        described = tuple(ranks[r].member for r in members)
        choice = choose_plane(described, self._hierarchy)
        entry = _beginning(ps, choice)
        yield entry
        ps.decision = entry.number
        for note in choice.notes:
            yield Log(f"process set {ps.id}: {note}", decision=ps.decision)
        message = Configure(
            ps.id,
            ps.generation,
            described,
            choice.plane,
            choice.options,
            choice.memory > 0,
            choice.device_planes,
            decision=ps.decision,
        )
        if not choice.memory:
            yield Send(ps.peers, message)
            return
        other = without_memory(choice)
        fallback = msgspec.structs.replace(
            message, plane=other.plane, options=other.options, has_memory=False
        )
        # The server makes the memory, and can fail to: the fallback goes along, since this state learns of no failure.
        yield SendConfigure(ps.peers, message, choice.memory, fallback)

    def count_orders(self) -> Decisions[None]:
        """Write the numbers of orders so far of all open generations into the decision log."""
        for ps in self:
            if ps.phase == OPEN:
                yield from _count_orders(ps)

    def _in_order(self, ps: ProcessSetState, entering: Iterable[int]) -> tuple[int, ...]:
        """Return the members of the generation that is due, by position.

        With ``by_seniority``, ranks that were members before keep their order and newcomers come behind them, also one that has
        the number of a rank that was lost.
        """
        members = sorted(entering)
        if not self._by_seniority:
            return tuple(members)
        if ps is not self.world:
            places = {rank: place for place, rank in enumerate(self.world.members)}
            return tuple(sorted(members, key=lambda rank: places.get(rank, len(places))))
        # A restored world has no members before; the order is that of the members that are due.
        before = ps.members or ps.next_members or ()
        old = [rank for rank in before if rank in members and self._membership.ranks[rank].peer in ps.peers]
        return (*old, *(rank for rank in members if rank not in old))

    def _may_enter(self, ps: ProcessSetState, rank: int) -> bool:
        """Return whether a rank lives and knows of the set: one that has come back on a new connection is a member of nothing."""
        peer = self._membership.ranks.get(rank)
        # An outdated rank has the number of a member, and can even be back in the batch of its own loss: it enters by an admission
        # only.
        if peer is None or peer.leaving or peer.outdated:
            return False
        if ps is self.world:
            # One that has shut down and is back waits until all others have done the same.
            return rank not in self._membership.returning
        # A set that was never configured has no connections yet: all its members know of it, since they asked for it together.
        return not ps.peers or peer.peer in ps.peers

    @property
    def has_due_generation(self) -> bool:
        """Return whether :meth:`configure_due` has something to do."""
        return any([ps.phase != OPEN and ps.next_members is not None for ps in self.by_id.values()])  # noqa: C419  # faster

    def configure_due(self) -> Decisions[None]:
        """Open all generations that are due."""
        for ps in list(self):
            if ps.phase != OPEN and ps.next_members is not None:
                yield from self._configure(ps)

    def _living_peers(self, ps: ProcessSetState) -> tuple[int, ...]:
        ranks = self._membership.ranks
        return tuple(
            peer
            for rank, peer in zip(ps.members, ps.peers, strict=True)
            # By connection as well: another process can have the number by now.
            if rank in ranks and ranks[rank].peer == peer
        )

    # -- sets that ranks add and remove, and planes that fail ------------------------------------------------------

    def change_sets(self, ps: ProcessSetState, current: NegotiationRound) -> Decisions[None]:
        """Add or remove a process set, as all members have asked for; reject the request on all of them if that is impossible."""
        signature = current.info.signature
        if signature.kind == OpKind.ADD_PROCESS_SET:
            yield from self._add_set(ps, current, tuple(sorted(set(signature.ranks))))
            return
        target = self._find_set(signature)
        if target is None:
            yield from _reject_change(ps, current, "there is no such process set")
            return
        entry = DecisionEntry(DecisionKind.REMOVED, process_set=target.id, generation=target.generation)
        yield entry
        text = f"process set {target.id} was removed"
        yield GenerationAbort(target, CauseKind.MEMBERSHIP, (), text, cause=entry.number)
        # After the abort, which has raised the set's generation: sets of the next world begin above it. And before the end of the
        # batch, which would open the generation that the abort has made due.
        self._forget(target)
        yield Send(ps.peers, Dissolve(target.id))
        # After the removal: when a rank's call returns, the set is gone there.
        for rank, peer in zip(ps.members, ps.peers, strict=True):
            batch = Batch((current.submissions[rank].local,))
            yield Send((peer,), Execute(ps.id, ps.generation, ps.sequence, (batch,), ps.decision))

    def _add_set(
        self, ps: ProcessSetState, current: NegotiationRound, ranks: tuple[int, ...]
    ) -> Decisions[None]:
        absent = [rank for rank in ranks if rank not in ps.members]
        if absent or not ranks:
            why = f"{format_ranks(absent)} not in the world" if absent else "it needs a rank"
            yield from _reject_change(ps, current, why)
            return
        added = yield from self.add_set(ranks)
        # After its Configure: when a rank's call returns, the set can be used there.
        for rank, peer in zip(ps.members, ps.peers, strict=True):
            yield Send((peer,), ProcessSetAdded(current.submissions[rank].local, added.id, ranks))

    def _find_set(self, signature: Signature) -> ProcessSetState | None:
        """Return the process set to remove: the one with the id in ``root``, or without an id by its ranks."""
        if signature.root > 0:
            return self.by_id.get(signature.root)
        for ps in self:
            if ps.id > 0 and ps.members == tuple(sorted(set(signature.ranks))):
                return ps
        return None

    def reject_mismatches(self, idle: AbstractSet[int], grace: float, now: float) -> list[ProcessSetState]:
        """Reject rounds in which ranks disagree, after the others have had their time to submit them.

        Args:
            idle: Ranks without a cell, which submit nothing.
            grace: Seconds that ranks have.
            now: Time of the batch of events, in monotonic seconds.

        Returns:
            The process sets with rejections to send.
        """
        ended = []
        for ps in self.by_id.values():
            negotiation = ps.negotiation
            if negotiation.mismatches:
                # A rank that has left or runs no cell will not submit, so no round can become complete: the ranks that wait get the
                # error now.
                vain = ps.gone or not negotiation.members.isdisjoint(idle)
                negotiation.reject_mismatches(0.0 if vain else grace, now)
                if negotiation.rejections or negotiation.conflict:
                    ended.append(ps)
        return ended

    def deadlines(self, grace: float) -> Iterator[float]:
        """Yield the times at which :meth:`abort_failed`, or :meth:`reject_mismatches` with the same ``grace``, has something to do."""
        for ps in self.by_id.values():
            if ps.failure is not None:
                yield ps.failure[0]
            if ps.past_failure is not None:
                yield ps.past_failure[0]
            if ps.negotiation.mismatches and (since := ps.negotiation.oldest_mismatch) is not None:
                yield since + grace

    @property
    def has_failures(self) -> bool:
        """Return whether a plane has failed whose generation :meth:`abort_failed` has to abort, now or later."""
        return any([ps.failure is not None or ps.past_failure is not None for ps in self.by_id.values()])  # noqa: C419  # faster

    def abort_failed(self, now: float) -> Decisions[None]:
        """Abort the generations in which a plane failed a moment ago, and for which no better explanation has come since."""
        for ps in list(self):
            if ps.failure is not None and now >= ps.failure[0]:
                _, rank, text = ps.failure
                # The end of the generation clears `failure`, so its deadline does not come up again.
                yield GenerationAbort(ps, CauseKind.PLANE_FAILED, (rank,), _plane_failure(rank, text))
            if ps.past_failure is not None and now >= ps.past_failure[0]:
                _, generation, rank, text = ps.past_failure
                # Cleared first: the abort is without effect if those operations were aborted before, and the deadline would stay in
                # the past.
                ps.past_failure = None
                failure = GenerationAbort(ps, CauseKind.PLANE_FAILED, (rank,), _plane_failure(rank, text))
                yield from self._abort_past(generation, failure)

    def validate(self) -> None:
        """Assert the invariants that hold between batches of events."""
        ranks = self._membership.ranks
        for id, ps in self.by_id.items():
            with InvariantOf(process_set=id):
                assert ps.id == id
                assert ps.phase == OPEN or not ps.members, (id, ps.phase)
                assert ps.next_members is None
                assert ps.gone <= set(ps.members)
                assert ps.negotiation.ranks == ps.members
                for rank, peer in zip(ps.members, ps.peers, strict=True):
                    with InvariantOf(rank=rank):
                        assert rank in ps.gone or (ranks[rank].peer == peer), (id, rank)
                ps.negotiation.validate()


def _beginning(ps: ProcessSetState, choice: PlaneChoice) -> DecisionEntry:
    facts = {"plane": choice.plane, "devices": ", ".join(choice.device_planes.values())}
    facts["note"] = "; ".join(choice.notes)
    cause, ps.ended_by = ps.ended_by, 0
    return DecisionEntry(
        DecisionKind.BEGAN,
        cause=cause,
        process_set=ps.id,
        generation=ps.generation,
        ranks=ps.members,
        facts=facts,
    )


def _count_orders(ps: ProcessSetState) -> Iterator[Amendment]:
    """Write the number of the orders of this generation into the entry of its beginning."""
    if ps.sequence:
        yield Amendment(ps.decision, {"orders": str(ps.sequence)})


def _reject_change(ps: ProcessSetState, current: NegotiationRound, why: str) -> Decisions[None]:
    info = current.info
    verdict = Impossible(info.name, f"{describe(info.signature)}: {why}.")
    yield from log_verdict(ps.id, ps.generation, verdict)
    for rank, peer in zip(ps.members, ps.peers, strict=True):
        yield Send((peer,), verdict.message(ps.id, ps.generation, (current.submissions[rank].local,)))


def _plane_failure(rank: int, text: str) -> str:
    return f"the data plane failed on rank {rank}: {text}"


class RendezvousValues:
    """Values by key that the members of one generation exchange to connect, and the peers that wait for keys that are not set yet."""

    __slots__ = ("_values", "_waiting")

    def __init__(self) -> None:
        #: Values by key.
        self._values: dict[str, bytes] = {}
        #: Waits for a value that is not set yet, by key, as (connection, ticket).
        self._waiting: dict[str, list[tuple[int, int]]] = {}

    def store_value(self, key: str, value: bytes) -> Iterator[Send]:
        """Keep a value (the last one counts) and answer the peers that wait for it."""
        self._values[key] = value
        # Some of these peers may have gone. Numbers of connections are never used again, so the server drops
        # their answers.
        for peer, ticket in self._waiting.pop(key, ()):
            yield Send((peer,), StoreValue(ticket, value))

    def answer(self, key: str, peer: int, ticket: int) -> Iterator[Send]:
        """Answer ``peer`` now, or once the key is set."""
        value = self._values.get(key)
        if value is None:
            self._waiting.setdefault(key, []).append((peer, ticket))
        else:
            yield Send((peer,), StoreValue(ticket, value))
