"""A rank's side of comparing its variables with other ranks'."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from hvdlab.collectives.fingerprint import threads_for
from hvdlab.kernel_ext.inspect.examination import Examination
from hvdlab.kernel_ext.inspect.special import special_value
from hvdlab.kernel_ext.rank.bounded import TookTooLong, bounded
from hvdlab.kernel_ext.rank.errors import one_line
from hvdlab.kernel_ext.rank.values import PATIENCE
from hvdlab.kernel_ext.wire.codec import ToPool
from hvdlab.kernel_ext.wire.compare import (
    SPECIAL,
    AskBlocks,
    AskLeaves,
    Compare,
    Compared,
    ComparisonOpened,
    Gather,
    OpenComparison,
)
from hvdlab.kernel_ext.wire.shared_buffer import NOT_SHARED, ChunkBuffer, SharedBufferReader
from hvdlab.kernel_ext.wire.values import Acked, TransferChunk

ComparisonRequest = AskLeaves | AskBlocks | Gather | Compare
OVER = "the examination is over"
EVALUATED_WITHIN = 20.0
"""Seconds that an expression may take."""

REMEMBERED = 64
"""How many examinations that the pool gave up before they began are remembered."""


class CompareServer:
    """Opens examinations, one at a time, and answers what is asked about them. Made on the main thread.

    Args:
        shell: Has the variables.
        loop: The main thread's loop.
        rank: This rank's number.
        neighbours: How many ranks of this host make fingerprints at the same time.
        reply: Sends an answer; any thread.
    """

    def __init__(
        self,
        shell: Any,
        loop: asyncio.AbstractEventLoop,
        rank: Callable[[], int],
        neighbours: Callable[[], int],
        reply: Callable[[ToPool], None],
    ) -> None:
        self._shell, self._loop, self._reply = shell, loop, reply
        self._rank, self._neighbours = rank, neighbours
        self._open: ComparisonOpened | None = None
        self._questions: asyncio.Queue[ComparisonRequest | int] = (
            asyncio.Queue()
        )  # a number: that examination was released
        self._released: deque[int] = deque(maxlen=REMEMBERED)
        self._buffer = ChunkBuffer()

    # -- control thread -----------------------------------------------------------------------------------------------

    def cached_reply(self, ticket: int) -> ComparisonOpened | None:
        """The answer that was given already, if this examination is open."""
        answer = self._open
        return answer if answer is not None and answer.ticket == ticket else None

    def ask(self, question: ComparisonRequest) -> None:
        """Take a question about an examination."""
        if self.cached_reply(question.transfer_id) is None:
            self._reply(Acked(question.ticket, OVER))
        else:
            self._put(question)

    def release(self, transfer_id: int) -> None:
        """Close this comparison, or refuse to open it if it has not begun."""
        self._released.append(transfer_id)
        if self._open is not None and transfer_id == self._open.ticket:
            self._put(transfer_id)

    def release_all(self) -> None:
        """Close the comparison that is open: the rank is leaving."""
        if (opened := self._open) is not None:
            self._put(opened.ticket)

    def _put(self, question: ComparisonRequest | int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the rank is ending
            self._loop.call_soon_threadsafe(self._deliver, question)

    # -- main thread --------------------------------------------------------------------------------------------------

    def _deliver(self, question: ComparisonRequest | int) -> None:
        # The examination may have ended since the question came: then nothing would take it out of the queue.
        if isinstance(question, int) or self.cached_reply(question.transfer_id) is not None:
            self._questions.put_nowait(question)
        else:
            self._reply(Acked(question.ticket, OVER))

    async def run(self, request: OpenComparison) -> None:
        """Open a value for comparison, answer, and stay with it until it is released or the pool seems to be gone."""
        if request.ticket in self._released:
            return
        try:
            examination = Examination(self._value(request), threads_for(self._neighbours()))
            answer = examination.examined(request.ticket)
        except BaseException as error:  # noqa: BLE001  # evaluating runs the user's code, which may also exit
            self._reply(ComparisonOpened(request.ticket, error=one_line(error)))
            return
        self._open = answer
        self._reply(answer)
        try:
            with SharedBufferReader() as reader:
                await self._serve(examination, reader)
        finally:
            self._open = None
            self._buffer.free()
            while not self._questions.empty():
                late = self._questions.get_nowait()
                if not isinstance(late, int):
                    self._reply(Acked(late.ticket, OVER))

    def _value(self, request: OpenComparison) -> Any:
        if request.special in SPECIAL:
            return special_value(request.special)
        variables = self._shell.user_ns
        if request.expression in variables:
            return variables[request.expression]
        # No interrupt reaches this thread between cells, so an expression that never returns must be left behind.
        try:
            return bounded(
                lambda: eval(request.expression, self._shell.user_global_ns, variables), EVALUATED_WITHIN
            )
        except TookTooLong:
            raise TookTooLong(f"{request.expression} takes longer than {EVALUATED_WITHIN:.0f} s") from None

    async def _serve(self, examination: Examination, reader: SharedBufferReader) -> None:
        assert self._open is not None
        transfer_id = self._open.ticket
        while transfer_id not in self._released:
            # A question or a release that was meant for an earlier examination may come late.
            try:
                question = await asyncio.wait_for(self._questions.get(), PATIENCE)
            except TimeoutError:
                return
            if isinstance(question, int):
                if question == transfer_id:
                    return
                continue
            if question.transfer_id != transfer_id:
                self._reply(Acked(question.ticket, OVER))
                continue
            try:
                answer = self._answer(question, examination, reader)
            except Exception as error:  # noqa: BLE001  # a device may fail, or have no memory left
                answer = Acked(question.ticket, one_line(error))
            self._reply(answer)

    def _answer(
        self, question: ComparisonRequest, examination: Examination, reader: SharedBufferReader
    ) -> ToPool:
        rank = self._rank()
        if isinstance(question, AskLeaves):
            return examination.some_leaves(question.ticket, question.first)
        if isinstance(question, AskBlocks):
            return examination.blocks(question.ticket, question.leaves.get(rank, ()), question.on_host)
        if isinstance(question, Gather):
            return self._gathered(question, examination)
        ranges = question.ranges.get(rank, ())
        try:
            with reader.chunk(question.data, question.shared) as theirs:
                return Compared(question.ticket, examination.compare(ranges, theirs))
        except OSError:
            if question.shared is None:
                raise
            return Compared(question.ticket, (), NOT_SHARED)

    def _gathered(self, question: Gather, examination: Examination) -> TransferChunk:
        size = sum(length for _, _, length in question.ranges)
        chunk = self._buffer.put(
            size, lambda target: examination.gather(question.ranges, target), share=question.share
        )
        return TransferChunk(question.ticket, *chunk)
