"""The direct way: collectives that a rank waits for, agreed on by the members of a host in shared memory, without the coordinator.

Most programs ask for the same on all ranks in the same order, so a rank posts what it asks for on the :mod:`board
<hvdlab.collectives.planes.shm.agreement_board>` and waits a little. If all members have posted the same, the request is agreed; each member
computes the result itself, or, if the tensor is too large for the board or on a device, they go to the plane. All else goes through the
coordinator: as soon as one member asks for something else, or a member has waited for :data:`PATIENCE` and had the coordinator ask
the others to decline, all members announce what they want. So it is still the coordinator that finds mismatches, missing ranks,
deadlocks, ended cells and stalls; it hears of agreed requests by their spans.

A rank that is asked to decline does so on its control thread, unless its user's thread is between post and result just then. It does
not know which of its own requests the others are about to announce; its next one is a good guess, and goes to the coordinator at once.
After a wrong guess the others wait for :data:`PATIENCE` once more. Members that keep disagreeing leave the board alone for longer and
longer (:class:`~hvdlab.collectives.engine.posting.Seat`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from time import monotonic_ns

import numpy as np

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.engine.effects import RunBatch
from hvdlab.collectives.engine.entry import Entry
from hvdlab.collectives.engine.executor import Executor
from hvdlab.collectives.engine.guarded import GuardedState
from hvdlab.collectives.engine.handle import Handle
from hvdlab.collectives.engine.posting import Posting, fits, needs_plane
from hvdlab.collectives.engine.request import Limit, Request, Result
from hvdlab.collectives.engine.slots import PlaneSlot
from hvdlab.collectives.engine.small import run_parts
from hvdlab.collectives.engine.spans import SpanLog
from hvdlab.collectives.errors import CauseKind
from hvdlab.collectives.planes.base import PhaseTimes, PlaneAborted
from hvdlab.collectives.planes.buffers import host_view

PATIENCE = 0.02
"""Seconds that a rank waits at the board before it has the coordinator ask the others to decline, with :data:`FEW` members or fewer."""
FEW = 16
"""With more members the patience grows in proportion, since it takes them longer to have a turn on the cores of one host."""
OVERDUE = 0.5
"""Further seconds after which the rank tells the coordinator that it still waits: a member does not answer."""
FIRST_SEQUENCE = 1 << 31
"""The coordinator numbers what it orders from 1 on, in each epoch; what is agreed on the board is numbered from here on."""


class Direct:
    """The direct way of one rank. Any thread.

    Args:
        guarded: The rank's state.
        executor: The rank's planes.
        spans: Where operations are recorded.
        schedule_events: Has the recorded spans sent.
    """

    def __init__(
        self,
        guarded: GuardedState,
        executor: Executor,
        spans: SpanLog,
        schedule_events: Callable[[], None],
    ) -> None:
        self._guarded = guarded
        self._executor = executor
        self._spans = spans
        self._schedule_events = schedule_events

    def run(self, handle: Handle, *, queued: bool = False, limit: Limit | None = None) -> bool:
        """Try to complete, by way of the board, a handle that was not submitted yet, or not announced.

        Args:
            handle: The handle that this thread waits for.
            queued: Whether it was submitted already.
            limit: How long the wait may take; ``None`` for ever.

        Returns:
            Whether it is submitted now: it has ended, or its end can be waited for like any other's. Otherwise the caller has to
            submit it.

        Raises:
            InvalidRequestError, DuplicateNameError, AbortedError: As by :meth:`Engine.submit`.
        """
        request = handle.request
        if not fits(request):
            return queued
        if not needs_plane(request):
            posting = self._guarded.post_directly(handle, queued=queued)
            if posting is not None and self._agreed(handle, posting, limit):
                self._compute(handle, posting)
            return queued or posting is not None
        epoch = self._guarded.epoch(request.process_set)
        work = partial(self._meet, handle, epoch, queued, limit)
        return self._executor.while_idle((request.process_set, epoch, request.device), work) or queued

    def _meet(self, handle: Handle, epoch: int, queued: bool, limit: Limit | None, slot: PlaneSlot) -> bool:
        """What :meth:`run` does with a tensor that needs the plane, while this thread has the lane."""
        posting = self._guarded.post_directly(handle, (epoch, slot.operations), queued=queued)
        if posting is not None and self._agreed(handle, posting, limit):
            now = monotonic_ns()
            self._guarded.tell(lambda state: state.order_posted(handle, posting.seat, now))
            self._executor.run_alone(batch_of(handle, posting))
        return posting is not None

    def _agreed(self, handle: Handle, posting: Posting, limit: Limit | None) -> bool:
        """Wait for the other members. Returns whether all have posted the same; if not, the handle goes to the coordinator."""
        board, number = posting.seat.board, posting.number
        # An abort ends the epoch, and with it the handle, unless all had posted before.
        with contextlib.suppress(PlaneAborted):
            self._wait(handle, posting, limit)
        if board.complete(number) and board.agreed(number):
            return True
        self._guarded.tell(lambda state: state.leave_board(handle, posting.seat, agreed=False))
        return False

    def _compute(self, handle: Handle, posting: Posting) -> None:
        """End an agreed handle by what lies on the board."""
        seat, handle.received = posting.seat, monotonic_ns()
        try:
            result = _result(handle.request, posting)
        except Exception as error:  # noqa: BLE001  # the others have their result: the epoch ends, and says why
            self._executor.failed(seat.process_set, seat.board.epoch, error)
            text = f"{type(error).__name__}: {error}"
            self._guarded.tell(lambda state: state.posted_failed(seat, text))
            return
        self._guarded.finish_posted(handle, posting, result)
        if self._spans.enabled:
            batch = batch_of(handle, posting)
            if self._spans.batch(batch, handle.received, monotonic_ns(), PhaseTimes()):
                self._schedule_events()

    def _wait(self, handle: Handle, posting: Posting, limit: Limit | None) -> None:
        board, number = posting.seat.board, posting.number
        if board.wait(number, PATIENCE * max(1.0, board.members / FEW)):
            return
        self._guarded.tell(lambda state: state.ask_to_decline(handle, number))
        if board.wait(number, OVERDUE if limit is None else min(OVERDUE, limit.seconds)):
            return
        self._guarded.tell(lambda state: state.posted_overdue(handle, OVERDUE))
        if limit is not None:
            if board.wait(number, max(limit.seconds - OVERDUE, 0.0)):
                return
            self._guarded.withdraw(handle, CauseKind.TIMEOUT, limit.text)
        board.wait(number, None)


def batch_of(entry: Entry, posting: Posting) -> RunBatch:
    """The request that all members have posted, as a batch such as the coordinator would have ordered."""
    seat = posting.seat
    number = FIRST_SEQUENCE + posting.number
    return RunBatch(
        seat.process_set, seat.board.epoch, number, 0, (entry,), ((),), device=entry.request.device
    )


def _result(request: Request, posting: Posting) -> Result:
    if request.kind is OpKind.ALLREDUCE:
        return run_parts(request, posting.parts, posting.seat.folds)
    if request.kind is OpKind.BARRIER:
        return Result()
    output = request.output
    assert output is not None
    root = posting.seat.ranks.index(request.root)
    # What the root sends is only read, and may be memory that can't be written to.
    if root != posting.seat.index or output is not request.input:
        np.copyto(host_view(output).reshape(-1), posting.parts[root])
    return Result(output)
