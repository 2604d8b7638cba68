"""Coordinator bypass: collectives that the ranks of one host agree on in shared memory, without the coordinator.

Most programs ask for the same on all ranks in the same order. So a rank that waits for a collective posts it on the :mod:`board
<hvdlab.collectives.planes.shm.agreement_board>` and waits a little. If all members have posted the same, the request is agreed, and each
member computes the result itself. If the tensor is too large for the board or on a device, the members use the plane.

All other requests go through the coordinator. Members announce their requests as soon as one posts a different request. They also do
so when a member has waited for :data:`PATIENCE` and the coordinator has asked the others to decline. So the coordinator still
finds mismatches, missing ranks, deadlocks, ended cells and stalls; it learns of agreed requests by their spans.

A rank that is asked to decline does so on its control thread, unless its user's thread is between post and result just then. It has
not posted the disputed request yet, cannot know which one that will be, and assumes its next: that goes to the coordinator at
once. A wrong assumption costs the others one more :data:`PATIENCE`. After repeated disagreement a member skips the board for 2, 4, …
up to 1,024 requests (:class:`~hvdlab.collectives.engine.process_set_view.BoardMember`).
"""

from __future__ import annotations

import contextlib
from functools import partial
from time import monotonic_ns

import numpy as np

from hvdlab.collectives.engine.entries import BoardEntry, Entry, Handle, RunBatch
from hvdlab.collectives.engine.executor import Executor, PlaneSlot
from hvdlab.collectives.engine.locked_state import LockedState
from hvdlab.collectives.engine.operations import run_parts
from hvdlab.collectives.engine.process_set_view import (
    BoardMember,
    BoardReduction,
    PostedRequest,
    fits,
    needs_plane,
)
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Limit, Request, Result
from hvdlab.collectives.engine.span_log import SpanLog
from hvdlab.collectives.errors import CauseKind
from hvdlab.collectives.planes.base import HostArray, PlaneAborted, host_view
from hvdlab.collectives.planes.shm.agreement_board import AgreementBoard
from hvdlab.collectives.types import OpKind

PATIENCE = 0.02
"""Seconds that a rank waits at the board before it asks the coordinator for the others' declines, with :data:`FEW` members or fewer."""
FEW = 16
"""Members from which on the patience grows in proportion: more processes share the cores of one host, and each has to have its turn."""
OVERDUE = 0.5
"""Further seconds after which the rank reports to the coordinator that it still waits: a member does not answer."""
FIRST_SEQUENCE = 1 << 31
"""The coordinator numbers its orders from 1 on, in each generation; requests agreed on the board are numbered from here on."""


class CoordinatorBypass:
    """Coordinator bypass of one rank. Any thread.

    Args:
        locked: The rank's state.
        executor: The rank's planes.
        spans: Where operations are recorded.
    """

    def __init__(
        self,
        locked: LockedState,
        executor: Executor,
        spans: SpanLog,
    ) -> None:
        self._locked = locked
        self._executor = executor
        self._spans = spans

    def run(self, handle: Handle, *, queued: bool = False, limit: Limit | None = None) -> bool:
        """Try to complete, by way of the board, a handle that was not submitted yet, or not announced.

        Args:
            handle: The handle that this thread waits for.
            queued: Whether it was submitted already.
            limit: Limit of the wait; ``None`` for ever.

        Returns:
            Whether it is submitted now: it has ended, or its end can be waited for like any other's. Otherwise the caller has to
            submit it.

        Raises:
            InvalidRequestError, DuplicateNameError, AbortedError: As by :meth:`Engine.submit`.
        """
        # Read without the lock; try_post() refuses if the board has become another one in the meantime.
        request = handle.request
        capacity = self._locked.board_capacity(request.process_set)
        if not capacity or not fits(request):
            return queued
        if not needs_plane(request, capacity):
            posting = self._locked.try_post(handle, queued=queued)
            if posting is not None and self._agreed(handle, posting, limit):
                self._compute(handle, posting)
            return queued or posting is not None
        generation = self._locked.generation(request.process_set)
        # This rank keeps the plane until the request is agreed or declined. An operation that it began in between would come to the plane
        # in another order than on the other members.
        work = partial(self._meet, handle, generation, queued, limit)
        return (
            self._executor.with_idle_queue((request.process_set, generation, request.device), work) or queued
        )

    def reduce(
        self,
        entry: BoardEntry,
        member: BoardMember,
        reduction: BoardReduction,
        number: int,
        out: HostArray,
    ) -> bool:
        """Wait for the other members of a posted allreduce, and complete it if all have posted the same.

        Args:
            entry: The entry, which this thread has posted.
            member: This rank's use of the board.
            reduction: The facts about the allreduce.
            number: The entry's number on the board.
            out: Array for the result.

        Returns:
            Whether it is complete. Otherwise the caller goes on with a handle; see :meth:`hand_over`.
        """
        board = member.board
        if not board.complete_soon(number):
            # An abort ends the generation, and with it the entry, unless all had posted before.
            with contextlib.suppress(PlaneAborted):
                board.wait(number, _patience(board))
            if not board.complete(number):
                return False
        if not board.agreed(number):
            return False
        # From here on the entry counts as agreed: if this thread does not complete it, hand_over() leaves it to the end of its generation.
        entry.received = monotonic_ns()
        try:
            reduction.reduce(number, out)
        except Exception as error:  # noqa: BLE001  # the others have their result: the generation ends with this reason
            self._fail(member, error)
            return False
        finished = self._locked.finish_reduction(entry, member)
        if self._spans.posted(entry, FIRST_SEQUENCE + number, monotonic_ns()):
            self._spans.flusher.schedule_events()
        return finished

    def hand_over(self, entry: BoardEntry, handle: Handle, posting: PostedRequest) -> None:
        """Let a handle take the place of an entry that :meth:`reduce` could not complete; its end can be waited for like any other's."""
        self._locked.replace_posted(entry, handle, posting.member)
        if entry.received:
            return  # it was agreed, but has been failed, or its result could not be computed: it ends with its generation
        if not posting.member.board.complete(posting.number):
            with contextlib.suppress(PlaneAborted):
                self._wait_long(handle, posting, None)
        if self._decide(handle, posting):
            self._compute(handle, posting)

    def _meet(
        self, handle: Handle, generation: int, queued: bool, limit: Limit | None, slot: PlaneSlot
    ) -> bool:
        """Agree on a request that needs the plane, and execute it, while this thread has the executor's queue."""
        posting = self._locked.try_post(handle, (generation, slot.operations), queued=queued)
        if posting is not None and self._agreed(handle, posting, limit):
            now = monotonic_ns()
            # Before the operation begins: from now on the entry executes, and an abort of the generation finds it so.
            self._locked.update(RankState.start_posted, handle, posting.member, now)
            self._executor.run_now(batch_of(handle, posting))
        return posting is not None

    def _agreed(self, handle: Handle, posting: PostedRequest, limit: Limit | None) -> bool:
        """Wait for the other members. Return whether all have posted the same; if not, the handle goes to the coordinator."""
        board, number = posting.member.board, posting.number
        if not board.complete_soon(number):
            # An abort ends the generation, and with it the handle, unless all had posted before.
            with contextlib.suppress(PlaneAborted):
                if not board.wait(number, _patience(board)):
                    self._wait_long(handle, posting, limit)
        return self._decide(handle, posting)

    def _decide(self, handle: Handle, posting: PostedRequest) -> bool:
        """Return whether a request is agreed, after the wait for it; if not, have it announced."""
        board, number = posting.member.board, posting.number
        # The board decides, also after an abort: other members have perhaps completed the request already.
        if board.complete(number) and board.agreed(number):
            return True
        self._locked.update(RankState.announce_posted, handle, posting.member)
        return False

    def _compute(self, handle: Handle, posting: PostedRequest) -> None:
        """Complete an agreed handle from the data on the board."""
        member, handle.received = posting.member, monotonic_ns()
        try:
            result = _result(handle.request, posting)
        except Exception as error:  # noqa: BLE001  # the others have their result: the generation ends with this reason
            self._fail(member, error)
            return
        # The handle before its record, for which no thread waits.
        self._locked.finish_posted(handle, posting, result)
        sequence = FIRST_SEQUENCE + posting.number
        if self._spans.posted(handle, sequence, monotonic_ns()):
            self._spans.flusher.schedule_events()

    def _fail(self, member: BoardMember, error: Exception) -> None:
        """End the generation, since a result could not be computed here."""
        # Before the report: the abort that answers it fails the entry, with this error as its cause.
        self._executor.failed(member.process_set, member.board.generation, error)
        text = f"{type(error).__name__}: {error}"
        self._locked.update(RankState.fail_posted, member, text)

    def _wait_long(self, handle: Handle, posting: PostedRequest, limit: Limit | None) -> None:
        """Wait beyond the patience: request the others' declines, and report a member that does not answer."""
        board, number = posting.member.board, posting.number
        self._locked.update(RankState.ask_to_decline, handle, number)
        if board.wait(number, OVERDUE if limit is None else min(OVERDUE, limit.seconds)):
            return
        self._locked.update(RankState.report_posted_overdue, handle, OVERDUE)
        if limit is not None:
            if board.wait(number, max(limit.seconds - OVERDUE, 0.0)):
                return
            self._locked.withdraw(handle, CauseKind.TIMEOUT, limit.text)
        # Without a limit: the decline of a member, or the abort of the generation, ends it.
        board.wait(number, None)


def _patience(board: AgreementBoard) -> float:
    """Return the seconds that a member waits before it requests the others' declines."""
    return PATIENCE * max(1.0, board.members / FEW)


def batch_of(entry: Entry, posting: PostedRequest) -> RunBatch:
    """Return the request that all members have posted as a batch, as if the coordinator had ordered it."""
    member = posting.member
    number = FIRST_SEQUENCE + posting.number
    return RunBatch(
        member.process_set, member.board.generation, number, 0, (entry,), ((),), device=entry.request.device
    )


def _result(request: Request, posting: PostedRequest) -> Result:
    if request.kind is OpKind.ALLREDUCE:
        return run_parts(request, posting.parts, posting.member.folds)
    if request.kind is OpKind.BARRIER:
        return Result()
    output = request.output
    assert output is not None
    root = posting.member.ranks.index(request.root)
    # The root's input is only read: it can be memory that this process may not write to.
    if root != posting.member.index or output is not request.input:
        np.copyto(host_view(output), posting.parts[root].reshape(output.shape))
    return Result(output)
