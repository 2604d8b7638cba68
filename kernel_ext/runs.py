"""The cells that are running, and the mail between them and the ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hvdlab.collectives.client import Client
from hvdlab.kernel_ext.cells.drive import CellHandle
from hvdlab.kernel_ext.cells.events import DoneArrived, OutputArrived, RankDied
from hvdlab.kernel_ext.cells.results import CellResults
from hvdlab.kernel_ext.cells.run import CellRun
from hvdlab.kernel_ext.cells.sink import OutputSink
from hvdlab.kernel_ext.payloads import (
    TO_POOL,
    TO_RANK,
    CellDone,
    Credit,
    Output,
    RunCell,
    decode_to_pool,
    encode,
)
from hvdlab.kernel_ext.questions import Questions


class Runs:
    """Dispatches cells and gives each what comes from the ranks.

    Args:
        client: The connection to the coordinator.
        began, ended: Called when a cell begins, and when the last one has ended. Must not block.
        reason: Why a rank is lost, or an empty text.
    """

    def __init__(
        self,
        client: Client,
        *,
        began: Callable[[], None],
        ended: Callable[[], None],
        reason: Callable[[int], str],
    ) -> None:
        self._client = client
        self._began, self._ended, self._reason = began, ended, reason
        self._lock = threading.Lock()
        self._handles: dict[str, CellHandle] = {}
        self.questions = Questions(client.post)
        client.on_mail(TO_POOL, self._take)

    @property
    def active(self) -> bool:
        """Whether a cell is running."""
        return bool(self._handles)

    def dispatch(
        self,
        cell: str,
        ranks: Sequence[int],
        source: str,
        *,
        label: str,
        line_offset: int,
        sink: OutputSink,
        timeout: float | None,
        want_value: bool,
    ) -> CellHandle:
        """Send a cell to ranks. The caller drives the run by waiting for it, or in the background."""
        run = CellRun(cell, ranks, label=label, now=time.monotonic(), timeout=timeout)
        handle = CellHandle(
            run,
            sink,
            credit=lambda rank, taken: self._client.post(TO_RANK, encode(Credit(cell, taken)), [rank]),
            interrupt=self._client.interrupt,
            finished=lambda results: self._finished(cell, results),
        )
        with self._lock:
            self._handles[cell] = handle
        self._began()
        try:
            # The coordinator must know before any rank can be ahead of the others in a collective.
            self._client.cell_started(cell, ranks)
            order = RunCell(cell, label, source, line_offset, want_value)
            self._client.post(TO_RANK, encode(order), ranks)
        except BaseException:
            self._finished(cell, None)
            raise
        for rank in ranks:
            if reason := self._reason(rank):  # it died between the caller's look and now
                handle.feed(RankDied(rank, reason, time.monotonic_ns()))
        return handle

    def rank_died(self, rank: int, reason: str, tail: str = "") -> None:
        """A rank is lost; ``tail`` is the end of its standard error. Any thread."""
        when = time.monotonic_ns()
        with self._lock:
            handles = list(self._handles.values())
        for handle in handles:
            if rank in handle.ranks:
                handle.feed(RankDied(rank, reason, when, tail))
        self.questions.rank_died(rank)

    def _finished(self, cell: str, results: CellResults | None) -> None:
        with self._lock:
            self._handles.pop(cell, None)
            idle = not self._handles
        if idle:
            self._ended()

    def _take(self, rank: int, body: bytes) -> None:
        payload = decode_to_pool(body)
        if isinstance(payload, Output):
            handle = self._handles.get(payload.cell)
            if handle is not None:
                handle.feed(OutputArrived(rank, payload.chunks, payload.total))
        elif isinstance(payload, CellDone):
            handle = self._handles.get(payload.cell)
            if handle is not None:
                handle.feed(DoneArrived(rank, payload))
        else:
            self.questions.answered(rank, payload)
