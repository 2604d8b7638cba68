"""State machine of a rank's side of negotiation, without I/O.

Users' requests and the coordinator's messages go in, effects come out; :meth:`RankState.take_messages` returns the messages
to send. No sockets, threads or clocks here: the engine holds its lock around every call.

:class:`RankState` has the users' side. The functions behind it, one for each type of message, apply decisions of the
coordinator: about submissions, then about ends and beginnings of generations. ``_HANDLERS`` at the end lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlab.collectives.engine.entries import (
    ANNOUNCED,
    ENDED,
    EXECUTING,
    LOCAL_LIMIT,
    POSTED,
    UNANNOUNCED,
    AbortPlane,
    ClosePlanes,
    Effect,
    Entry,
    Fail,
    Locals,
    NewGeneration,
    RunBatch,
    Succeed,
    plain_name,
)
from hvdlab.collectives.engine.operations import payload_of
from hvdlab.collectives.engine.process_set_view import (
    BoardMember,
    BoardReduction,
    Cancellations,
    PostedRequest,
    SetState,
    check_request,
    needs_plane,
    pending_of,
)
from hvdlab.collectives.errors import (
    AbortedError,
    Cause,
    CauseKind,
    Disagreement,
    DuplicateNameError,
    InvalidRequestError,
    JoinedRanksError,
    MismatchError,
    Pending,
)
from hvdlab.collectives.failover.rank_facts import FailoverFacts
from hvdlab.collectives.planes.base import HostArray
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.types import OpKind

OVERDUE_NS = 1_000_000_000
"""Nanoseconds after which an operation counts as long. Reports of shorter ones would be messages about nothing."""

# Messages whose news are part of ``Resume``: a successor of the coordinator gets them once.
_REMEMBERED = (m.Elastic, m.Regroup, m.CellBegin, m.CellEnd, m.Paused, m.Resumed)


class RankState:
    """State of the submissions, announcements and generations of one rank.

    Attributes:
        rank: This rank.
        sets: Process sets by id. Set 0 is the world.
        lost: Cause with which every submission fails from now on, since the coordinator is gone for good, or ``None``.
        failover: Facts that only matter to a successor of the coordinator.
        elastic: Whether elastic training is active; after an abort all its ranks restart together.
        failure: Cause with which every submission fails until all ranks have restarted, or ``None``.
        outdated: Whether the others continued without this rank; ``failure`` also lasts until the running cells end.
        removed: Cause with which submissions for a future generation fail, since the coordinator has dismissed this rank, or ``None``.
        locals: The local ids, under which entries are announced.
        cancellations: Messages to other ranks that this rank gives up.
    """

    def __init__(self, rank: int, local_limit: int = LOCAL_LIMIT) -> None:
        self.rank = rank
        self.sets: dict[int, SetState] = {}
        self.lost: Cause | None = None
        self.elastic = False
        self.failure: Cause | None = None
        self.outdated = False
        self.removed: Cause | None = None
        self.failover = FailoverFacts()
        self.locals = Locals(local_limit)
        #: Entries to announce, by process set, in order of submission.
        self._pending_announcements: dict[int, list[Entry]] = {}
        #: Other messages to send, after the announcements.
        self._messages: list[m.Message] = []
        self.cancellations = Cancellations(self.sets)

    # -- submissions ----------------------------------------------------------------------------------------------

    def submit(self, entry: Entry) -> None:
        """Add a request and queue its announcement.

        Raises:
            InvalidRequestError: It is wrong on this rank alone; nothing was sent.
            DuplicateNameError: Its name is in flight; this rank reports that to the coordinator, if the first one was announced.
            AbortedError: The coordinator is lost, elastic training has to restart, the others have continued without this rank, or the
                process set has lost a member since this rank's last submission.
        """
        request = entry.request
        if self.lost is not None:
            raise self.aborted(entry, self.lost)
        if self.failure is not None:
            raise self.aborted(entry, self.failure)
        group = self.sets.get(request.process_set)
        if group is None:
            raise InvalidRequestError(f"There is no process set {request.process_set} on this rank.")
        # Only while it is configured: this rank can be a member of the next generation, which checks the requests that are held.
        if group.index < 0 and group.configured:
            raise InvalidRequestError(
                f"Rank {self.rank} is not in process set {group.id} (ranks {list(group.ranks)}); "
                "only its members may call its collectives."
            )
        # It would be held for a generation in which this rank is no member, and wait for ever.
        if self.removed is not None and not group.configured:
            raise self.aborted(entry, self.removed)
        if group.loss is not None and not request.internal:
            # Once: a program that handles the error goes on with the members that live.
            cause, group.loss = group.loss, None
            entry.generation = group.generation
            raise self.aborted(entry, cause)
        # All refusals are above, or raise in _enter() before its last statement: a refused request leaves no entry behind.
        self._enter(group, entry)
        self._announce_or_hold(group, entry)

    def _enter(self, group: SetState, entry: Entry) -> None:
        # First: a request that it refuses must not have a name, with which later ones of that name would be duplicates.
        check_request(group, entry)
        self._name(group, entry)
        group.pending[entry] = None

    def _announce_or_hold(self, group: SetState, entry: Entry) -> None:
        if group.configured:
            entry.generation = group.generation
            self.announce(entry)
        else:
            # Held: an abort up to the present generation does not concern it, one of the next generation does.
            entry.generation = group.generation + 1

    def _name(self, group: SetState, entry: Entry) -> None:
        request = entry.request
        if request.name is None:
            entry.name = request.kind.label + ".noname"
            return
        name = request.name
        if type(name) is not str:
            name = plain_name(name)
        if request.group is not None and type(request.group[0]) is not str:
            request.group = (plain_name(request.group[0]), request.group[1])
        entry.name = name
        if request.anonymous:
            return
        first = group.names.get(name)
        if first is not None:
            # The other ranks wait for the first one, which a decision about its name ends. Before its announcement they know nothing of it.
            if first.phase == ANNOUNCED:
                self._messages.append(m.Duplicate(group.id, group.generation, name, first.site, entry.site))
            raise DuplicateNameError(name, first.site, entry.site)
        group.names[name] = entry

    def announce(self, entry: Entry) -> None:
        """Queue the announcement of an entry in the present generation."""
        self.locals.queue(entry)
        process_set = entry.request.process_set
        box = self._pending_announcements.get(process_set)
        if box is None:
            self._pending_announcements[process_set] = [entry]
        else:
            box.append(entry)
        # Announced again in a new generation, or only now after it was held: the coordinator does not know that a thread waits for it.
        if entry.waited:
            self.report_waiting(entry, entry.waited)

    # -- the board ------------------------------------------------------------------------------------------------

    def attach_board(self, member: BoardMember) -> None:
        """Keep this rank's use of the board of a generation, or close it at once if that generation is not the present one."""
        # The board is mapped without the lock, and a user's thread can withdraw the generation in the meantime.
        group = self.sets.get(member.process_set)
        if (
            group is not None
            and group.configured
            and group.generation == member.board.generation
            and self.lost is None
        ):
            group.board_member = member
        else:
            member.close()

    def try_post(
        self, entry: Entry, plane: tuple[int, int] | None = None, *, queued: bool = False
    ) -> PostedRequest | None:
        """Add a request and post it on the board. Raises as :meth:`submit` does.

        Args:
            entry: The request.
            plane: For one that needs the plane: the plane's generation, and the number of operations that have begun on it.
            queued: Whether it was submitted: then it is posted in place of its announcement, if that was not sent yet.

        Returns:
            The posted request; ``None`` if it can't be posted, and the caller has to submit it (unless it was ``queued``).
        """
        process_set = entry.request.process_set
        group = self.sets.get(process_set)
        if group is None or group.board_member is None or not group.configured:
            return None
        if queued:
            alone = len(group.pending) == 1 and self._pending_announcements.get(process_set) == [entry]
        else:
            alone = not group.pending
        # The caller has counted operations without the lock. A generation that has begun since has another plane, which has begun none.
        if plane is not None and (not alone or group.generation != plane[0]):
            return None  # perhaps the coordinator is about to order the pending entries
        if needs_plane(entry.request, group.board_member.board.capacity) != (plane is not None):
            return None  # the caller has seen the board of an earlier generation, with another capacity
        if (
            self.lost is not None
            or self.failure is not None
            or group.loss is not None
            or not group.board_member.can_post(entry, alone=alone)
        ):
            return None
        if queued:
            # The whole list is this one entry: ``alone`` is true, as can_post() requires.
            self.drop_announcements(process_set)
            self.locals.unqueue(entry)
        else:
            self._enter(group, entry)
        entry.generation, entry.phase = group.generation, POSTED
        return group.board_member.post(entry, 0 if plane is None else plane[1])

    def post_reduction(
        self, entry: Entry, member: BoardMember, reduction: BoardReduction, source: HostArray
    ) -> int:
        """Post an allreduce whose requests this member has posted before, so that it needs no checks.

        Returns:
            Its number on the board; 0 if it can't be posted now, and the caller has to make an ordinary request of it.
        """
        group = self.sets.get(member.process_set)
        # Without other pending entries no name is in flight, either.
        if group is None or group.board_member is not member or group.pending or not group.configured:
            return 0
        if self.lost is not None or self.failure is not None or group.loss is not None or not member.is_free:
            return 0
        group.pending[entry] = None
        if reduction.request.name is not None:
            group.names[entry.name] = entry
        entry.generation, entry.phase = group.generation, POSTED
        return member.post_reduction(entry, reduction, source)

    def replace_posted(self, entry: Entry, handle: Entry, member: BoardMember) -> None:
        """Let a handle take the place of a posted entry, which is ended; if an error has ended that before, it ends the handle."""
        # Not by end(), which would free the name that the handle goes on to use.
        handle.name, handle.generation, handle.received = entry.name, entry.generation, entry.received
        handle.phase, handle.given_up, entry.phase = entry.phase, entry.given_up, ENDED
        if handle.phase != POSTED:
            return
        self.sets[entry.request.process_set].replace(entry, handle)
        member.replace_posted(entry, handle)

    def announce_posted(self, entry: Entry, member: BoardMember) -> None:
        """Remove a posted request that was not agreed from the board; announce it if its generation has not failed."""
        member.unpost(agreed=False)
        if entry.phase != POSTED:
            return
        # Before the phase changes: _end_overdue() takes back a report only of an entry that is posted or executes.
        self._end_overdue(entry)
        entry.phase = UNANNOUNCED
        group = self.sets.get(entry.request.process_set)
        if group is not None:
            self._announce_or_hold(group, entry)

    def start_posted(self, entry: Entry, member: BoardMember, now: int) -> None:
        """Mark an agreed request as executing on the plane, as if the coordinator had ordered it."""
        member.unpost(agreed=True)
        if entry.phase == POSTED:
            self._end_overdue(entry)
            entry.phase, entry.received = EXECUTING, now

    def fail_posted(self, member: BoardMember, text: str) -> None:
        """Report that the result of an agreed request could not be computed here; the request ends with the generation."""
        member.unpost(agreed=True)
        # The board's generation: the process set can be in a newer one by now.
        self.plane_failed(member.process_set, member.board.generation, text)

    def finish_posted(self, entry: Entry, member: BoardMember) -> bool:
        """End an agreed request that has its result. Return whether it had not been failed in the meantime."""
        # Also if the entry was failed meanwhile: as long as one is posted, this member can post no other.
        member.unpost(agreed=True)
        if entry.phase != POSTED:
            return False
        self.end(entry)
        return True

    def ask_to_decline(self, entry: Entry, number: int) -> None:
        """Request declines from the members that have not posted, since this rank has waited long at the board."""
        if entry.phase == POSTED:
            self._messages.append(m.DeclinePost(entry.request.process_set, entry.generation, number))

    def report_posted_overdue(self, entry: Entry, seconds: float) -> None:
        """Report a wait at the board that lasts since a member does not answer; the coordinator finds out which one."""
        if entry.phase == POSTED:
            # The coordinator knows an entry by its local id only; a posted one was never announced.
            local = self.locals.local_of(entry)
            group = self.sets[entry.request.process_set]
            if not local.defined:
                self._messages.append(m.Announce(group.id, entry.generation, (), (local.definition(),)))
            entry.waited = seconds
            self._messages.append(m.Blocked(group.id, entry.generation, local.id, seconds, executing=True))

    def _end_overdue(self, entry: Entry) -> None:
        if entry.waited and entry.phase in (EXECUTING, POSTED):
            entry.waited = 0.0
            self._messages.append(
                m.Blocked(entry.request.process_set, entry.generation, -1, 0.0, executing=True)
            )

    def drop_announcements(self, set_id: int) -> None:
        """Drop the announcements that were not sent yet; the definitions that would have gone with them stay unsent, too."""
        self._pending_announcements.pop(set_id, None)

    # -- messages to send ---------------------------------------------------------------------------------------------

    @property
    def has_messages(self) -> bool:
        return bool(self._pending_announcements or self._messages or self.cancellations.due)

    @property
    def queued(self) -> int:
        """Return the number of announcements that wait to be sent."""
        return sum(map(len, self._pending_announcements.values()))

    def take_messages(self) -> list[m.Message]:
        """Remove and return the messages to send, in order. Announcements are gathered into one message per process set.

        A single small tensor goes along with its announcement.
        """
        out: list[m.Message] = []
        if self._pending_announcements:
            for set_id, entries in self._pending_announcements.items():
                out.append(self._announce(self.sets[set_id], entries))
            self._pending_announcements = {}
        if self._messages:
            out += self._messages
            self._messages = []
        # After all announcements: a request to cancel counts the announced entries behind its own.
        if self.cancellations.due:
            out += self.cancellations.messages()
            self.cancellations.due = []
        return out

    def _announce(self, group: SetState, entries: list[Entry]) -> m.Announce:
        definitions: tuple[m.Definition, ...] = ()
        extra = False
        for entry in entries:
            local = entry.local
            # Marked as sent before it is sent: if an interrupt comes in between, recovery clears all ids.
            if not local.defined:
                definitions += (local.definition(),)
            if entry.extra:
                extra = True
        return m.Announce(
            group.id,
            group.generation,
            tuple([entry.local.id for entry in entries]),
            definitions,
            tuple([entry.extra for entry in entries]) if extra else (),
            payload_of(entries[0].request, len(group.ranks)) if len(entries) == 1 else b"",
        )

    def queue_message(self, message: m.Message) -> None:
        """Queue a message that is no announcement; it is sent after the announcements that are queued."""
        self._messages.append(message)

    def report_waiting(self, entry: Entry, seconds: float) -> None:
        """Report to the coordinator that the user's thread has waited ``seconds`` for ``entry``.

        The report is repeated whenever the entry is announced (again) or executed.
        """
        entry.waited = seconds
        # Zeros of a joined rank, and requests that were agreed on a board, execute without a local id: the coordinator knows none for them.
        if entry.phase in (ANNOUNCED, EXECUTING) and entry.local.id >= 0:
            ids = entry.request.process_set, entry.generation, entry.local.id
            self._messages.append(m.Blocked(*ids, seconds, executing=entry.phase == EXECUTING))

    def report_oldest_executing(self, now: int) -> None:
        """Report the oldest executing operation, if it exceeds :data:`OVERDUE_NS`. ``now`` in nanoseconds."""
        executing = [e for group in self.sets.values() for e in group.pending if e.phase == EXECUTING]
        oldest = min(executing, key=lambda entry: entry.received, default=None)
        if oldest is not None and now - oldest.received > OVERDUE_NS:
            self.report_waiting(oldest, (now - oldest.received) / 1e9)

    def report_done_waiting(self, entry: Entry) -> None:
        """Report that the wait of :meth:`report_waiting` is over."""
        entry.waited = 0.0
        self._messages.append(m.Blocked(entry.request.process_set, entry.generation, -1, 0.0))

    def paused(self, reasons: tuple[str, ...]) -> None:
        """Report a pause of this rank for the last of these reasons, or its end if there is none."""
        self.failover.paused = reasons
        self._messages.append(m.Paused(reasons[-1]) if reasons else m.Resumed())

    def withdraw(self, set_id: int, kind: CauseKind, text: str, site: str = "") -> None:
        """Request the end of a process set's generation from the coordinator, and give up everything pending in it.

        Entries that are submitted from now on are held for a later one.
        """
        group = self.sets.get(set_id)
        if group is None or self.lost is not None:
            return
        group.names.clear()  # these names are free again: the entries that have them only wait for their end
        for entry in group.pending:
            entry.given_up = True
        if group.configured:
            self.end_generation(group, (kind, text, site))
        elif group.given_up is None:  # the first cause counts; it is sent once the next generation has begun
            group.given_up = (kind, text, site)

    def cancelled(self, ticket: int) -> list[Entry]:
        """End the message of a ticket that the coordinator has cancelled, and return it, unless it has ended otherwise."""
        entry = self.cancellations.pop(ticket)
        if entry is None:
            return []
        # Before end(), as in fail_all(): unqueue() finds only entries that are still ANNOUNCED.
        self.locals.unqueue(entry)
        self.end(entry)
        return [entry]

    def end_generation(self, group: SetState, why: tuple[CauseKind, str, str]) -> None:
        """Request the end of the present generation from the coordinator, so that the entries that were given up end on all ranks."""
        # The message first: a thread that is interrupted before the stores asks again when it recovers, and the coordinator ignores
        # the second request. A group that is marked as withdrawn without a message would wait for its abort for ever.
        self._ask_to_end(group, why)
        group.given_up = why
        group.withdrawn = group.generation
        group.configured = False

    def _ask_to_end(self, group: SetState, why: tuple[CauseKind, str, str]) -> None:
        kind, text, site = why
        self._messages.append(m.Withdraw(group.id, group.generation, kind.value, text, site))

    def set_in(self, set_id: int, generation: int) -> SetState | None:
        """Return a process set if ``generation`` is its present one, otherwise ``None``."""
        # For facts about a plane, which is built on the executor's thread: a new generation can have begun.
        group = self.sets.get(set_id)
        return group if group is not None and group.generation == generation else None

    def plane_failed(self, set_id: int, generation: int, text: str) -> None:
        """Report that the data plane of a generation failed here."""
        self._messages.append(m.PlaneFailed(set_id, generation, text))

    def acknowledge_losses(self) -> None:
        """Record that the program knows the present members, so that no submission fails with the loss of others."""
        for group in self.sets.values():
            group.loss = None

    # -- ends -----------------------------------------------------------------------------------------------------

    def finish(self, entry: Entry) -> bool:
        """End an entry that was executed. Return whether it had not been failed in the meantime."""
        if entry.phase != EXECUTING:
            return False
        self.end(entry)
        return True

    def executed(self, batch: RunBatch) -> None:
        """Report an executed batch to the coordinator, if that waits for the report."""
        if batch.reported:
            self._messages.append(
                m.Executed(batch.process_set, batch.generation, batch.sequence, batch.batch)
            )

    def end(self, entry: Entry) -> None:
        """Mark an entry as ended, well or badly, and free its name."""
        # Before the phase changes, by which _end_overdue() knows whether the coordinator has a report of this entry.
        if entry.waited:
            self._end_overdue(entry)
        entry.phase = ENDED
        group = self.sets.get(entry.request.process_set)
        if group is not None:
            group.pending.pop(entry, None)
            # A withdrawn entry has lost its name, which a later one can have.
            if group.names.get(entry.name) is entry:
                del group.names[entry.name]

    def close(self, cause: Cause) -> list[Effect]:
        """Fail everything pending, and each later submission, since the coordinator is gone for good."""
        self.lost = cause
        effects: list[Effect] = []
        for group in self.sets.values():
            # In front of the failures, as in _on_abort(): its operation still uses the users' buffers.
            effects.append(AbortPlane(group.id, group.generation))
            effects += self.fail_all(group, lambda entry: self.aborted(entry, cause))
        # No coordinator will read them any more.
        self._pending_announcements.clear()
        self._messages.clear()
        self.cancellations.due.clear()
        return effects

    def disconnect(self, cause: Cause) -> list[Effect]:
        """Fail everything pending, since the coordinator is gone. Later submissions are held for a successor."""
        if self.elastic:
            self.failure = cause
        self.removed = None  # the successor repeats it
        effects: list[Effect] = []
        for group in self.sets.values():
            # Before fail_all(), after which the additions and removals are not pending any more.
            self.failover.record_failed_additions(group)
            # In front of the failures, as in _on_abort().
            effects.append(AbortPlane(group.id, group.generation))
            effects += self.fail_all(group, lambda entry: self.aborted(entry, cause))
            group.configured, group.withdrawn, group.given_up = False, -1, None
            group.is_orphaned = True
        for id in self.sets.keys() - self.failover.sets.keys() - {0}:
            del self.sets[id]  # half added: its ranks did not get ``ProcessSetAdded`` with its number
        # Most name generations and local ids that a successor does not know.
        self._pending_announcements.clear()
        self._messages.clear()
        self.cancellations.due.clear()
        self.locals.clear()
        return effects

    def reconnect(self, alive: tuple[int, ...], *, released: bool = False) -> m.Resume:
        """Return the first message to a successor of the coordinator: the facts that it has to know.

        Args:
            alive: Ranks that lived, as far as this rank knows.
            released: Whether this rank leaves where elastic training lets the world change.
        """
        # The news of these messages from the time without a coordinator are part of ``Resume``.
        self._messages = [x for x in self._messages if not isinstance(x, _REMEMBERED)]
        # In front: messages that were queued since then are about later events.
        if self.failover.paused:
            self._messages.insert(0, m.Paused(self.failover.paused[-1]))
        if self.failover.regroup is not None:
            self._messages.insert(0, self.failover.regroup)
        return self.failover.resume_message(self.sets, alive, elastic=self.elastic, released=released)

    def abandon_interrupted(self, text: str) -> None:
        """Give up all generations after an exception has interrupted a change of this state.

        All local ids are forgotten, queued announcements are dropped, and the generation of each process set is given up. So neither this
        rank nor the coordinator is left with half of a change. Can be called again after it was interrupted itself.
        """
        self.locals.clear()
        self._pending_announcements.clear()
        why = CauseKind.INTERRUPTED, text, ""
        for group in self.sets.values():
            # Rebuilt, since the interrupt can have come between the stores of a name and of its entry.
            group.names = {e.name: e for e in group.pending if e.request.name and not e.request.anonymous}
            asked = group.withdrawn == group.generation
            self.withdraw(group.id, *why)
            if asked and self.lost is None:
                # The interrupted change was perhaps the sending of messages, and the request is lost with them.
                self._ask_to_end(group, group.given_up or why)

    def fail_all(
        self, group: SetState, error: Callable[[Entry], Exception], generation: int | None = None
    ) -> list[Effect]:
        """End everything pending (up to ``generation``) with an error, but for requests that have been agreed on a board."""
        effects: list[Effect] = []
        # All members have agreed on those, so the others compute their results, too: to fail them here would make ranks differ.
        agreed = group.abort_boards(group.generation if generation is None else generation)
        for entry in list(group.pending):
            if entry not in agreed and (generation is None or entry.generation <= generation):
                # Before end(): unqueue() finds only entries that are still ANNOUNCED.
                self.locals.unqueue(entry)
                self.end(entry)
                effects.append(Fail(entry, error(entry)))
        return effects

    def aborted(self, entry: Entry, cause: Cause, pending: Pending | None = None) -> AbortedError:
        """Return the error that ends ``entry`` for this cause."""
        if pending is None:
            name = entry.name or entry.request.name or entry.request.kind.label + ".noname"
            pending = Pending(entry.request.kind.label, name, (self.rank,), (), {self.rank: entry.site})
        return AbortedError(pending, cause, entry.request.process_set, entry.generation)

    # -- the coordinator's messages -------------------------------------------------------------------------------

    def handle(self, message: m.Message, now: int) -> list[Effect]:
        """Handle a message at ``now`` (nanoseconds) and return its effects; one of an ended generation has none."""
        handler = _HANDLERS.get(type(message))
        if handler is None:
            return []
        effects = handler(self, message)
        # Here and not in the handlers: those know no time.
        for effect in effects:
            if type(effect) is RunBatch:
                for entry in effect.entries:
                    entry.received = now
                    entry.submitted = entry.submitted or now  # zeros: this rank has not submitted them
        return effects

    # -- elastic training -----------------------------------------------------------------------------------------

    def set_elastic(self, on: bool) -> None:
        """Begin or end elastic training."""
        # An outdated rank's failure is another one: it lasts until the running cells have ended as well.
        self.elastic, self.failover.regroup = on, None
        if not self.outdated:
            self.failure = None
        self.acknowledge_losses()  # training begins with the members that live, and handles the loss of more by itself
        if self.lost is None:
            self._messages.append(m.Elastic(on))

    def reached_reset(self, message: m.Regroup) -> None:
        """Report that this rank has stopped at a reset point, where the world can change."""
        self.failover.regroup = message  # kept until the answer: a successor gets it again
        self._messages.append(message)

    def restarted(self) -> None:
        """Accept submissions again, since all ranks in training restart together."""
        self.failure = self.failover.regroup = None
        self.outdated = False

    def become_outdated(self, text: str) -> list[Effect]:
        """Fail everything pending and each later submission, since the others have continued without this rank.

        That lasts until the ranks of elastic training restart together, and until the cells that run now have ended.
        """
        cause = Cause(CauseKind.COORDINATOR_LOST, (), text)
        # Otherwise no program of before goes on here whose next submissions could meet those that the others have come to.
        if self.elastic or self.failover.cells:
            self.outdated, self.failure = True, cause
        effects: list[Effect] = []
        for group in self.sets.values():
            effects += self.fail_all(group, lambda entry: self.aborted(entry, cause))
        return effects

    # -- cells ----------------------------------------------------------------------------------------------------

    def begin_cell(self, cell: str) -> None:
        """Begin a cell on this rank."""
        if not self.failover.cells:
            self.acknowledge_losses()  # this program begins with the members that live
        self.failover.cell_began(cell)
        self._messages.append(m.CellBegin(cell))

    def end_cell(self, cell: str, error: str) -> None:
        """End a cell on this rank; ``error`` is empty, or one line about how it failed."""
        self.failover.cell_ended(cell, error)
        # The last of the cells that ran when the others went on. In training, restarted() ends this state instead.
        if self.outdated and not (self.elastic or self.failover.cells):
            self.failure, self.outdated = None, False
        # A begin that has not left yet says nothing beside the end right behind it.
        if self._messages and self._messages[-1] == m.CellBegin(cell):
            self._messages.pop()
        self._messages.append(m.CellEnd(cell, error))

    # -- checks ---------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Assert the invariants that hold between calls."""
        self.locals.validate()
        for group in self.sets.values():
            group.validate()


# -- decisions about submissions ----------------------------------------------------------------------------------


def _on_execute(state: RankState, message: m.Execute) -> list[Effect]:
    group = state.sets.get(message.process_set)
    if group is None or message.generation != group.generation or group.withdrawn == group.generation:
        return []  # an abort of this generation is on its way
    effects: list[Effect] = []
    by_id = state.locals.by_id
    for number, batch in enumerate(message.batches):
        entries = []
        for id in batch.locals:
            # The oldest of an id: the coordinator has the announcements of this rank in the order in which they were queued here.
            try:
                entry = by_id[id].queue.popleft() if id >= 0 else group.take_part(batch.zeros[-1 - id])
            except (MemoryError, ValueError) as error:  # numpy's, for a shape that is larger than any memory
                # The request's size is another rank's choice, and must not end this one. No later order of the generation is executed:
                # on the plane it would meet the operation that lacks this rank.
                text = f"rank {state.rank} has joined, and can't make the zeros for a collective of the others: {error}"
                state.withdraw(group.id, CauseKind.WITHDRAWN, text)
                return effects
            entry.phase = EXECUTING
            # The coordinator has a report of an announced entry by now, and needs one of an entry that executes.
            if entry.waited:
                state.report_waiting(entry, entry.waited)
            entries.append(entry)
        kind = entries[0].request.kind
        # These move no data; the coordinator has done their work, and its messages about the set come on their own.
        if kind is OpKind.ADD_PROCESS_SET or kind is OpKind.REMOVE_PROCESS_SET:
            for entry in entries:
                state.end(entry)
                effects.append(Succeed(entry))
        else:
            run = RunBatch(
                group.id, group.generation, message.sequence, number, tuple(entries), batch.tables, batch.payloads,
                entries[0].request.device, reported=batch.reported and group.index == 0,
            )  # fmt: skip
            effects.append(run)
    return effects


def _heads(state: RankState, set_id: int, generation: int, locals: tuple[int, ...]) -> list[Entry]:
    group = state.sets.get(set_id)
    if group is None or generation != group.generation or group.withdrawn == generation:
        return []  # perhaps the ids have other meanings by now; an abort is on its way
    entries = []
    for id in locals:
        entry = state.locals.take(id)
        if entry is not None:
            state.end(entry)
            entries.append(entry)
    return entries


def _on_reject(state: RankState, message: m.Reject) -> list[Effect]:
    parties = [Disagreement(p.ranks, p.request, p.site) for p in message.parties]
    return [
        Fail(
            entry,
            MismatchError(message.name, message.process_set, parties).because_of(message.decision),
        )
        for entry in _heads(state, message.process_set, message.generation, message.locals)
    ]


def _on_reject_duplicate(state: RankState, message: m.RejectDuplicate) -> list[Effect]:
    return [
        Fail(
            entry,
            DuplicateNameError(message.name, message.first_site, message.second_site).because_of(
                message.decision
            ),
        )
        for entry in _heads(state, message.process_set, message.generation, message.locals)
    ]


def _on_decline(state: RankState, message: m.Decline) -> list[Effect]:
    # Made for each entry: an exception keeps the traceback of the wait that has raised it.
    def error() -> Exception:
        if message.joined:
            joined = JoinedRanksError(message.name, message.process_set, message.joined, message.reason)
            return joined.because_of(message.decision)
        return InvalidRequestError(message.reason).because_of(message.decision)

    return [
        Fail(entry, error())
        for entry in _heads(state, message.process_set, message.generation, message.locals)
    ]


def _on_cancelled(state: RankState, message: m.Cancelled) -> list[Effect]:
    if message.ticket >= 0:
        entries = state.cancelled(message.ticket)
    else:
        entries = _heads(state, message.process_set, message.generation, message.locals)
    cause = Cause(CauseKind(message.kind), message.ranks, message.text, message.site, message.decision)
    pending = pending_of(message.pending)
    return [Fail(entry, state.aborted(entry, cause, pending)) for entry in entries]


def _on_process_set_added(state: RankState, message: m.ProcessSetAdded) -> list[Effect]:
    # First, also for an addition that was given up here: the set exists, and a successor of the coordinator has to know it.
    state.failover.added(message.process_set, message.ranks)
    local = state.locals.by_id.get(message.local)
    if local is None or local.signature.kind != OpKind.ADD_PROCESS_SET or not local.queue:
        return []  # the addition was given up, and perhaps the id has another meaning by now
    entry = local.queue.popleft()
    state.end(entry)
    return [Succeed(entry, message.process_set)]


# -- ends and beginnings of generations --------------------------------------------------------------------------------


def _on_abort(state: RankState, message: m.Abort) -> list[Effect]:
    group = state.sets.get(message.process_set)
    if group is None:
        return []
    cause = Cause(CauseKind(message.kind), message.ranks, message.text, message.site, message.decision)
    if message.generation < group.generation:
        # An orderly change of the generation can come between an event (a plane's failure, a death) and its abort. Entries that execute in
        # the former generation would otherwise never end.
        return _end_past(state, group, message.generation, cause)
    if state.elastic and group.id == 0:
        # The other ranks know that this attempt has failed, and must not meet later submissions of this rank in it.
        state.failure = cause
    known = {(c.kind, c.name): pending_of(c) for c in message.pending}
    state.drop_announcements(group.id)
    lost = cause.kind.is_loss and not state.elastic
    failed = state.fail_all(
        group,
        lambda entry: state.aborted(entry, cause, known.get((int(entry.request.kind), entry.name))),
        # An entry that is held for the next generation would otherwise succeed there, in a smaller world than its program knows of.
        None if lost else message.generation,
    )
    if lost:
        _record_loss(group, cause, failed)
    group.generation = message.generation
    group.configured, group.withdrawn = False, -1
    # The plane's end first: its operation still uses the buffers that users get back with the failures.
    return [AbortPlane(group.id, message.generation), *failed]


def _record_loss(group: SetState, cause: Cause, failed: list[Effect]) -> None:
    """Have the next submission fail with the loss of a member, unless entries of this rank's program have failed with it.

    Otherwise it would depend on the moment of the loss which ranks learn of it, and the others would go on in a smaller world.
    """
    group.lost_members.update(cause.ranks)
    raised = any(isinstance(effect, Fail) and not effect.entry.given_up for effect in failed)
    group.loss = None if raised else cause


def _end_past(state: RankState, group: SetState, generation: int, cause: Cause) -> list[Effect]:
    """Fail entries that still execute in an earlier generation, which had ended in order: they can't finish any more."""
    failed = state.fail_all(group, lambda entry: state.aborted(entry, cause), generation)
    if failed and state.elastic and group.id == 0:
        state.failure = cause
    return [AbortPlane(group.id, generation), *failed]


def _on_configure(state: RankState, message: m.Configure) -> list[Effect]:
    group = state.sets.get(message.process_set)
    if group is None:
        group = state.sets[message.process_set] = SetState(message.process_set)
    elif message.generation < group.generation:
        return []
    # The last generation has ended in order, so a request that is posted on its board can still be agreed there.
    group.close_board()
    # A generation that was aborted for another reason, or has ended with its coordinator, can have lost members by now.
    gone = () if state.elastic else group.unreported_losses(message.members)
    ranks = tuple(member.rank for member in message.members)
    group.generation, group.members, group.ranks = message.generation, message.members, ranks
    group.index = ranks.index(state.rank) if state.rank in ranks else -1
    group.plane, group.options = message.plane, message.options
    group.device_planes, group.shown_planes = message.device_planes, {}
    group.links, group.chunk_bytes = {}, 0
    group.configured, group.withdrawn, group.is_orphaned = True, -1, False
    if group.id == 0:
        state.failover.restored()
    new = NewGeneration(
        group.id, group.generation, group.index, group.members, group.plane, group.options, message.has_memory,
        group.device_planes,
    )  # fmt: skip
    effects: list[Effect] = [ClosePlanes(group.id, group.generation), new]
    for entry in [entry for entry in group.pending if entry.phase == POSTED and entry.given_up]:
        # The request was agreed on a board when the last generation ended, and its thread was interrupted before it could finish it.
        state.end(entry)
        kind, text, site = group.given_up or (CauseKind.INTERRUPTED, "it was interrupted", "")
        effects.append(Fail(entry, state.aborted(entry, Cause(kind, (state.rank,), text, site))))
    if gone and group.index >= 0:
        text = f"{format_ranks(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        cause = Cause(CauseKind.MEMBERSHIP, gone, text, decision=message.decision)
        effects += _fail_held(state, group, cause)
    group.lost_members.clear()
    # Entries that execute belong to the last generation, which has ended in order: its plane still finishes them.
    waiting = [entry for entry in group.pending if entry.phase not in (EXECUTING, POSTED)]
    if group.given_up is not None and any(entry.given_up for entry in waiting):
        # Other ranks wait for these entries: the generation ends at once, and later submissions are for the one after it.
        for entry in waiting:
            entry.generation = group.generation + (not entry.given_up)
        state.end_generation(group, group.given_up)
    else:
        group.given_up = None
        effects += _announce_again(state, group)
    return effects


def _fail_held(state: RankState, group: SetState, cause: Cause) -> list[Effect]:
    """Fail the entries that were held for a generation which has lost members, or the next submission if there are none."""
    held = [e for e in group.pending if e.phase not in (EXECUTING, POSTED) and not e.given_up]
    failed: list[Effect] = []
    for entry in held:
        # Before end(): unqueue() finds only entries that are still ANNOUNCED.
        state.locals.unqueue(entry)
        state.end(entry)
        failed.append(Fail(entry, state.aborted(entry, cause)))
    _record_loss(group, cause, failed)
    return failed


def _announce_again(state: RankState, group: SetState) -> list[Effect]:
    """Announce in the new generation each pending entry that does not execute; fail entries that do not fit its members."""
    effects: list[Effect] = []
    state.drop_announcements(group.id)
    for entry in list(group.pending):
        if entry.phase in (EXECUTING, POSTED):
            continue  # if it is posted and the old board does not agree on it, the thread that waits there announces it
        state.locals.unqueue(entry)
        entry.phase = UNANNOUNCED
        try:
            if group.index < 0:
                raise InvalidRequestError(f"Rank {state.rank} is no longer in process set {group.id}.")
            check_request(group, entry)
        except InvalidRequestError as error:
            state.end(entry)
            effects.append(Fail(entry, error))
        else:
            entry.generation = group.generation
            state.announce(entry)
    # After the loop: only entries that are announced again can be cancelled in this generation.
    state.cancellations.request_again(group)
    return effects


def _on_dissolve(state: RankState, message: m.Dissolve) -> list[Effect]:
    # First, also where this rank knows no such set: it must not tell a successor of the coordinator that the set exists.
    state.failover.dissolved(message.process_set)
    group = state.sets.pop(message.process_set, None)
    if group is None:
        return []
    cause = Cause(CauseKind.MEMBERSHIP, (), f"process set {group.id} was removed")
    state.drop_announcements(group.id)
    effects = state.fail_all(group, lambda entry: state.aborted(entry, cause))
    if effects:  # an operation of one of these entries can be running
        effects.insert(0, AbortPlane(group.id, group.generation))
    effects.append(ClosePlanes(group.id, group.generation + 1))
    return effects


def _on_leave(state: RankState, message: m.Leave) -> list[Effect]:
    """Fail the entries that are held for a later generation, since the others continue without this rank.

    The coordinator refuses entries that were announced in the last generation, and those that execute in it finish.
    """
    text = f"rank {state.rank} was let go, and the others go on without it"
    state.removed = cause = Cause(CauseKind.MEMBERSHIP, (state.rank,), text, decision=message.decision)
    effects: list[Effect] = []
    for group in state.sets.values():
        held = [e for e in group.pending if e.phase == UNANNOUNCED and not group.configured]
        for entry in held:
            state.end(entry)
            effects.append(Fail(entry, state.aborted(entry, cause)))
    return effects


# -- other messages -----------------------------------------------------------------------------------------------


def _on_regrouped(state: RankState, message: m.Regrouped) -> list[Effect]:
    state.restarted()
    return []


def _on_outdated(state: RankState, message: m.Outdated) -> list[Effect]:
    return state.become_outdated(message.text)


def _on_decline_post(state: RankState, message: m.DeclinePost) -> list[Effect]:
    group = state.sets.get(message.process_set)
    if group is not None:
        current = group.board_member is not None and group.board_member.board.generation == message.generation
        member = group.board_member if current else group.past_board_members.get(message.generation)
        if member is not None:
            member.asked_to_decline(message.number)
            if message.pids:
                member.mark_departed(message.pids)
        elif message.number:
            # The board's memory has not come to this rank, perhaps for lack of a descriptor. The coordinator's answers to
            # BoardMissing have no number, and are not answered.
            state.queue_message(m.BoardMissing(message.process_set, message.generation))
    return []


_HANDLERS: dict[type, Callable[[RankState, Any], list[Effect]]] = {
    m.Execute: _on_execute,
    m.Reject: _on_reject,
    m.RejectDuplicate: _on_reject_duplicate,
    m.Decline: _on_decline,
    m.Cancelled: _on_cancelled,
    m.ProcessSetAdded: _on_process_set_added,
    m.Abort: _on_abort,
    m.Configure: _on_configure,
    m.Dissolve: _on_dissolve,
    m.Leave: _on_leave,
    m.Regrouped: _on_regrouped,
    m.Outdated: _on_outdated,
    m.DeclinePost: _on_decline_post,
}
