"""Rank's state under its lock: sending in order, ends of handles, and recovery after an interrupt.

Users' threads, the control thread and the executor change the state only by :class:`LockedState`. Python can raise
KeyboardInterrupt between any two instructions of the main thread, hence also in the middle of a change. Each change runs so:

* U1  Acquire the lock.
* U2  If the mark ``_update_in_progress`` is set, recover: give up the generations, as after an interrupted wait.
* U3  Set the mark.
* U4  Change the state; end handles that are listed in ``_finishing``.
* U5  Reset the mark.
* U6  Release the lock.

A thread that is interrupted between U3 and U5 releases the lock with the mark set. The next thread recovers at U2. It cannot
know which part of the change was done, so it gives up the generation on all ranks. Handles in ``_finishing`` whose entries have
ended would have no other thread to complete them, so recovery completes those, too. An interrupt before U3 finds nothing
changed, and one after U5 a whole change. A refused submission leaves the state whole, so U5 follows its error.

Recovery can be interrupted as well. It runs so that all of it can be done again, and the mark is reset last:

* R1  Give up the generations. For each, the request to the coordinator is queued before the process set is marked as withdrawn.
* R2  Complete the handles in ``_finishing`` that have ended.
* R3  Wake the control thread for the hooks that are due.
* R4  Empty ``_finishing``.
* R5  Reset the mark.

An interrupt before R5 leaves the mark set, and wakes the control thread. The next thread at U2 begins with R1: the coordinator
ignores a second request for a generation, the first completion of a handle counts, and a hook is claimed once. No call lies
between R4 and R5, so ``_finishing`` is not emptied before its handles are complete.

Methods that run on the control thread, or after its end, skip U3 and U5: KeyboardInterrupt is raised on the main thread only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from hvdlab.collectives.engine.entries import (
    ENDED,
    EXECUTING,
    LOCAL_LIMIT,
    BoardEntry,
    CompletionHooks,
    Effect,
    Entry,
    Handle,
    RunBatch,
    Succeed,
    Wakeable,
)
from hvdlab.collectives.engine.process_set_view import BoardMember, BoardReduction, PostedRequest
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import PendingCollective, Result
from hvdlab.collectives.engine.span_log import SpanLog
from hvdlab.collectives.errors import Cause, CauseKind, HvdlabError, ProtocolError
from hvdlab.collectives.planes.base import HostArray, PhaseTimes
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.collectives.text import LOG

_monotonic_ns = time.monotonic_ns

P = ParamSpec("P")

DIRECT_LIMIT = 64
"""Announcements that a user's thread sends itself at most; if more are queued, the control thread sends them, while it continues."""


class LockedState:
    """State, outgoing messages and ends of handles, under one lock that is held for microseconds.

    Args:
        rank: This rank.
        endpoint: Connection to the coordinator.
        control: The control thread, which flushes when it is woken.
        hooks: Where completed handles put their hooks.
        capacity: How many tensors the coordinator knows by a local id, at most.

    Attributes:
        state: The state. Read by any thread; changed under the lock only.
        unusable: Error that each submission raises from now on, or ``None``.
    """

    def __init__(
        self,
        rank: int,
        endpoint: Endpoint,
        control: Wakeable,
        hooks: CompletionHooks,
        capacity: int = LOCAL_LIMIT,
    ) -> None:
        self.state = RankState(rank, capacity)
        self.unusable: HvdlabError | None = None
        self._rank = rank
        self._endpoint = endpoint
        self._wake = control.wake
        self._hooks = hooks
        #: Guards the state, and the order of messages: they are sent under it.
        self._lock = threading.Lock()
        #: Whether the control thread is woken to flush, and has not done so yet.
        self._flush_wanted = False
        #: Whether the coordinator is gone, and nothing is sent before there is a successor.
        self._suspended = False
        #: The mark of an interrupted change; see the module's docstring.
        self._update_in_progress = False
        #: Entries whose handles the running change completes.
        self._finishing: tuple[Entry, ...] = ()

    # -- submissions ----------------------------------------------------------------------------------------------

    def submit(self, handle: Handle) -> None:
        """Queue a submission without sending it. Raises as :meth:`RankState.submit` does."""
        if self.unusable is not None:
            raise self.unusable
        try:
            with self._lock:
                if self._update_in_progress:
                    self._recover()
                self._update_in_progress = True
                try:
                    self.state.submit(handle)
                except HvdlabError:
                    self._update_in_progress = False
                    raise
                self._update_in_progress = False
        except BaseException:
            self._wake()  # the control thread reports a duplicate, or recovers from an interrupted submission
            raise

    def try_post(
        self, handle: Handle, plane: tuple[int, int] | None = None, *, queued: bool = False
    ) -> PostedRequest | None:
        """Post a request on the board, if that is possible, as :meth:`RankState.try_post` does. Raises as :meth:`RankState.submit` does."""
        if self.unusable is not None:
            raise self.unusable
        try:
            with self._lock:
                if self._update_in_progress:
                    self._recover()
                self._update_in_progress = True
                try:
                    posting = self.state.try_post(handle, plane, queued=queued)
                except HvdlabError:
                    self._update_in_progress = False
                    raise
                self._update_in_progress = False
                return posting
        except BaseException:
            self._wake()
            raise

    def post_reduction(
        self, entry: BoardEntry, member: BoardMember, reduction: BoardReduction, source: HostArray
    ) -> int:
        """Post an allreduce on the board, if that is possible, as :meth:`RankState.post_reduction` does."""
        if self.unusable is not None:
            raise self.unusable
        try:
            with self._lock:
                if self._update_in_progress:
                    self._recover()
                self._update_in_progress = True
                number = self.state.post_reduction(entry, member, reduction, source)
                self._update_in_progress = False
                return number
        except BaseException:
            self._wake()
            raise

    def replace_posted(self, entry: BoardEntry, handle: Handle, member: BoardMember) -> None:
        """Let a handle take the place of a posted entry, as :meth:`RankState.replace_posted` does."""
        with self._lock:
            if self._update_in_progress:
                self._recover()
            self._update_in_progress = True
            # First: if an interrupt comes, the handle is the one that is withdrawn.
            entry.hand_over(handle)
            self.state.replace_posted(entry, handle, member)
            self._update_in_progress = False

    def generation(self, process_set: int) -> int:
        """Return the present generation of a process set, 0 if this rank does not know the set; it can change at any moment."""
        group = self.state.sets.get(process_set)
        return 0 if group is None else group.generation

    def board_capacity(self, process_set: int) -> int:
        """Return the capacity in bytes of a process set's board, 0 without a board; it can be another one at any moment."""
        # Without the lock: try_post() compares again under it.
        group = self.state.sets.get(process_set)
        return 0 if group is None or group.board_member is None else group.board_member.board.capacity

    def want_flush(self) -> None:
        """Have the control thread send the queued messages, unless a wait is quicker."""
        # Read without the lock: flush() resets the mark before it sends, so a message that this thread has queued before is sent.
        if not self._flush_wanted:
            self._flush_wanted = True
            try:
                self._wake()
            except BaseException:  # an interrupt: perhaps the control thread was not woken
                self._flush_wanted = False
                raise

    def flush(self) -> bool:
        """Send the queued messages. Return whether the socket accepted them all.

        Raises:
            ConnectionLost: The coordinator is gone; the control thread finds that out by itself as well.
        """
        with self._lock:
            if self._update_in_progress:
                self._recover()
            self._flush_wanted = False
            state = self.state
            if state.has_messages and not self._suspended:
                self._update_in_progress = True
                messages = state.take_messages()
                try:
                    complete = self._endpoint.send_all(messages)
                except ProtocolError as error:
                    self._give_up_unsent(messages, error)
                    complete = True
                self._update_in_progress = False
                return complete
        return True

    def _give_up_unsent(self, messages: list[m.Message], error: ProtocolError) -> None:
        """Give up the generations if an announcement is perhaps the message that can't be sent; the others of these have left."""
        # Not raised: the connection is sound, and the thread that flushes is seldom the one whose message it is. Raised on the control
        # thread it would end the connection, and on the executor its thread.
        LOG.error("rank %d: %s", self._rank, error)
        if any(isinstance(message, m.Announce) for message in messages):
            self.state.abandon_interrupted(f"a collective of rank {self._rank} can't be announced: {error}")
            self._wake()  # the control thread sends the requests that come of it

    def flush_direct(self) -> None:
        """Send the queued messages on a user's thread. The control thread sends large amounts."""
        # Also with an interrupted change and no message: flush() recovers, and the messages come of that.
        if self._suspended or not (self.state.has_messages or self._update_in_progress):
            return
        if self.state.queued > DIRECT_LIMIT or self._endpoint.backlog:
            self._wake()
            return
        try:
            complete = self.flush()
        except ConnectionLost:
            complete = False
        if not complete:
            self._wake()  # the control thread waits for room in the socket, or finds that the connection has ended

    def update(
        self, change: Callable[Concatenate[RankState, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Change the state under the lock, then send the messages that come of it.

        Args:
            change: A method of :class:`RankState`, or a function of the state.
            args: Further arguments of ``change``.
            kwargs: Further arguments by name.
        """
        self.change(change, *args, **kwargs)
        self.flush_direct()

    def change(
        self, change: Callable[Concatenate[RankState, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Change the state under the lock, as :meth:`update` does; the messages that come of it leave with the next that are sent."""
        with self._lock:
            if self._update_in_progress:
                self._recover()
            self._update_in_progress = True
            change(self.state, *args, **kwargs)
            self._update_in_progress = False

    def withdraw(self, entry: Entry, kind: CauseKind, text: str) -> None:
        """Give up the entry's generation on all ranks, unless the entry has ended by now.

        A message that is overdue, and for which the other rank has not called its side yet, is given up alone.
        """

        def withdraw(state: RankState) -> None:
            group = state.sets.get(entry.request.process_set)
            if group is not None and entry in group.pending:
                if kind is CauseKind.TIMEOUT and state.cancellations.cancel(entry, kind, text):
                    return
                state.withdraw(group.id, kind, text, entry.site)

        self.update(withdraw)

    def queue_message(self, message: m.Message) -> None:
        """Queue a message; nothing is sent."""
        with self._lock:
            self.state.queue_message(message)

    def _recover(self) -> None:
        """Give up the generations after an interrupted change, under the lock; see R1 to R5 in the module's docstring."""
        try:
            text = f"rank {self._rank} was interrupted"
            self.state.abandon_interrupted(text)
            for entry in self._finishing:
                if entry.phase == ENDED:
                    cause = Cause(CauseKind.INTERRUPTED, (self._rank,), text)
                    complete(entry, None, self.state.aborted(entry, cause))
            self._hooks.defer_to_control()
            self._finishing = ()
            self._update_in_progress = False
        except BaseException:
            self._wake()  # the control thread recovers when it flushes; perhaps this thread does not come again
            raise

    # -- the coordinator's messages -------------------------------------------------------------------------------

    def handle(self, message: m.Message, now: int) -> list[Effect]:
        with self._lock:
            if self._update_in_progress:
                self._recover()
            return self.state.handle(message, now)

    def execute(
        self, message: m.Execute, now: int, early: deque[Any], put: Callable[[RunBatch], None]
    ) -> None:
        """Handle an order on a user's thread: enqueue its batches by ``put``, and remove the order from ``early``."""
        with self._lock:
            if self._update_in_progress:
                self._recover()
            self._update_in_progress = True
            for effect in self.state.handle(message, now):
                if type(effect) is RunBatch:
                    put(effect)
                elif isinstance(effect, Succeed):
                    self._finishing += (effect.entry,)
                    complete(effect.entry, Result(process_set=effect.process_set), None)
            early.popleft()
            self._finishing = ()
            self._update_in_progress = False
        self._hooks.defer_to_control()  # the caller owns the socket

    def close(self, cause: Cause) -> list[Effect]:
        with self._lock:
            if self._update_in_progress:
                self._recover()
            return self.state.close(cause)

    def disconnect(self, cause: Cause) -> list[Effect]:
        """Fail everything pending, since the coordinator is gone; send nothing until :meth:`reconnect`."""
        with self._lock:
            # First: recovery queues requests, which must not go to the lost connection.
            self._suspended = True
            if self._update_in_progress:
                self._recover()
            return self.state.disconnect(cause)

    def reconnect(self, endpoint: Endpoint, alive: tuple[int, ...], leaving: tuple[int, ...]) -> None:
        """Continue with the connection of this endpoint to a successor, and send the facts that it has to know.

        Raises:
            ConnectionLost: The successor is gone as well.
        """
        with self._lock:
            if self._update_in_progress:
                self._recover()
            self._endpoint.renew(endpoint)
            # Still under the lock: Resume has to be the first message, and other threads send only under it.
            self._endpoint.send(self.state.reconnect(alive, released=self.state.rank in leaving))
            # Last: where the successor is gone as well, messages must wait for the next one, instead of being lost with it.
            self._suspended = False

    # -- ends -----------------------------------------------------------------------------------------------------

    def finish(self, batch: RunBatch, results: list[Result]) -> None:
        """End the handles of an executed batch, those that have not been failed in the meantime."""
        entries = batch.entries
        with self._lock:
            if self._update_in_progress:
                self._recover()
            self._update_in_progress = True
            # Before the entries end: recovery completes those of them that have ended without a result.
            self._finishing = entries
            # Before the entries end, which takes these reports back.
            overdue = any([entry.waited for entry in entries])  # noqa: C419  # mostly one entry, for which this is quicker
            finish = self.state.finish
            for entry, result in zip(entries, results, strict=True):
                if finish(entry):
                    complete(entry, result, None)
            if batch.reported:  # under the mark: without this report the coordinator would hold back collectives with a priority for ever
                self.state.executed(batch)
            self._finishing = ()
            self._update_in_progress = False
        if batch.reported:
            self.flush_direct()
        if overdue:
            self._wake()  # this rank has reported a long operation to the coordinator; the control thread sends that it has ended

    def finish_posted(self, handle: Handle, posting: PostedRequest, result: Result) -> None:
        """End a handle whose request was agreed on the board, if it has not been failed in the meantime."""
        with self._lock:
            if self._update_in_progress:
                self._recover()
            self._update_in_progress = True
            self._finishing = (handle,)
            if self.state.finish_posted(handle, posting.member):
                complete(handle, result, None)
            self._finishing = ()
            self._update_in_progress = False
        if self.state.has_messages:  # the end of a report that the wait was long
            self.flush_direct()

    def finish_reduction(self, entry: BoardEntry, member: BoardMember) -> bool:
        """End an allreduce that was agreed on the board, on its own thread. Return whether it had not been failed in the meantime."""
        with self._lock:
            if self._update_in_progress:
                self._recover()
            self._update_in_progress = True
            # Not in ``_finishing``: after an interrupt no thread waits for an entry without a handle.
            finished = self.state.finish_posted(entry, member)
            self._update_in_progress = False
        return finished

    def pending(self, now: int) -> list[PendingCollective]:
        with self._lock:
            return [
                PendingCollective(
                    entry.name,
                    entry.request.kind.label,
                    entry.site + entry.request.about,
                    (now - entry.submitted) / 1e9,
                    entry.phase == EXECUTING,
                    group.id,
                )
                for group in self.state.sets.values()
                for entry in group.pending
            ]

    def after_fork(self, error: HvdlabError) -> None:
        """Refuse all use in a forked child; perhaps a thread that does not exist there held the lock."""
        self.unusable = error
        self._lock = threading.Lock()


class BatchOutcomes:
    """Receiver of ends of batches. The executor calls it on the thread that ran the batch.

    Args:
        locked: The rank's state.
        spans: Where batches are recorded.
    """

    def __init__(self, locked: LockedState, spans: SpanLog) -> None:
        self._locked, self._spans = locked, spans

    def batch_done(self, batch: RunBatch, results: list[Result], started: int, phases: PhaseTimes) -> None:
        """End the handles of an executed batch, and record it. Called by the thread that ran it."""
        finished = _monotonic_ns()
        # The handles first: threads wait for them, but not for the record.
        self._locked.finish(batch, results)
        if self._spans.batch(batch, started, finished, phases):
            self._spans.flusher.schedule_events()

    def batch_unfinished(self, batch: RunBatch, started: int, phases: PhaseTimes) -> None:
        """Record a batch that was not executed to its end; ``started`` is 0 if it was not begun. Its handles end elsewhere."""
        if self._spans.batch(batch, started, _monotonic_ns(), phases, ok=False):
            self._spans.flusher.schedule_events()

    def batch_failed(self, batch: RunBatch, error: Exception) -> None:
        """Report that the plane failed. The handles end on all members with the abort that follows."""
        text = f"{type(error).__name__}: {error}"
        self._locked.update(RankState.plane_failed, batch.process_set, batch.generation, text)


def complete(entry: Entry, result: Result | None, error: Exception | None) -> None:
    """End a handle."""
    entry.complete(result, error)  # type: ignore[attr-defined]  # in an engine every entry is a handle
