"""Log of a rank's messages about its cells, kept for a retransmit until the pool has them.

A coordinator that dies takes mail with it. So the messages about a cell are numbered by the bytes of output before
them, kept, and sent again from where the pool says it is. They are kept only as far as the pool has not taken them,
hence no more than the output's window, and the end of a cell until the pool has settled it. While no process uses a kept
pool, the newest :data:`UNATTENDED` bytes of each cell are kept for the next one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, Late, Output, RetainedCell, RunCell, Stream
from hvdlab.kernel_ext.wire.codec import TO_POOL, encode

UNATTENDED = 4 << 20
"""Bytes of a cell's output that are kept while no process takes it."""

WITH_NOTEBOOK = 5.0
"""Seconds between a cell's interrupt and the end of its notebook for one to have come with the other: Jupyter kills a kernel
that has not ended so long after it was asked to."""


@dataclass(slots=True)
class _Cell:
    """A cell that the pool waits for.

    Attributes:
        label: The name that users know it by.
        order: The message that it came with, if the cell is elastic.
        outputs: Messages that were sent and not taken, with the total that they reach.
        total: Bytes sent.
        before: Bytes before the first of ``outputs``.
        dropped: Those of them that no process has taken.
        done: The cell's end, if it has ended.
    """

    label: str = ""
    order: RunCell | None = None
    outputs: deque[tuple[int, bytes]] = field(default_factory=deque)
    total: int = 0
    before: int = 0
    dropped: int = 0
    done: CellDone | None = None


class OutputEngine(Protocol):
    """Part of the engine that a rank's output needs."""

    @property
    def size(self) -> int:
        """Return the number of living members of the world."""

    def post(self, topic: str, body: bytes) -> None:
        """Send mail to the pool. It must not block: locks are held, so that messages leave in order."""


class OutputLog:
    """The cells that came and were not settled. Any thread.

    Args:
        engine: Sends the messages.
    """

    def __init__(self, engine: OutputEngine) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self._cells: dict[str, _Cell] = {}
        #: Whether a process has asked for the retained cells and has not ended: it accepts nothing behind a
        #: gap, so none may be trimmed.
        self._retains_all = False
        #: Bytes of late output of all cells; the pool acknowledges it by this total.
        self._late_total = 0
        #: The label of the last cell and when it ended, if it ended by a KeyboardInterrupt.
        self._interrupted: tuple[str, float] | None = None
        self._ended_with_notebook = ""

    def retained_cells(self) -> tuple[RetainedCell, ...]:
        """Return the messages for the process that uses this rank next. None of them is dropped before :meth:`allow_trimming`."""
        with self._lock:
            self._retains_all = True
            return tuple(
                RetainedCell(
                    cell,
                    known.label,
                    known.before,
                    known.dropped,
                    known.done is None,
                    known.order,
                    _was_interrupted(known.done),
                )
                for cell, known in self._cells.items()
            )

    @property
    def ended_with_notebook(self) -> str:
        """Return the label of a settled cell that was interrupted when the notebook ended that had seen it; empty if there is none."""
        return self._ended_with_notebook

    def allow_trimming(self) -> None:
        """Trim each cell to its newest bytes again, now that the process that called for :meth:`retained_cells` has ended."""
        with self._lock:
            self._retains_all = False
            self._ended_with_notebook = ""
            # Jupyter interrupts a kernel some milliseconds before it asks it to end, so this interrupt may
            # not have been the user's wish. Only without retained cells: those report by themselves that they
            # were interrupted.
            if self._interrupted is not None and not self._cells:
                label, when = self._interrupted
                if time.monotonic() - when < WITH_NOTEBOOK:
                    self._ended_with_notebook = label

    def register(self, cell: str, label: str = "", order: RunCell | None = None) -> bool:
        """Enter a cell that came. Return False if it came before, and must not run again.

        Args:
            order: The message that it came with, if the next process that uses this rank may have to send it to other ranks.
        """
        with self._lock:
            if cell in self._cells:
                return False
            self._cells[cell] = _Cell(label, order)
            self._interrupted = None
            return True

    def total(self, cell: str) -> int | None:
        """Return the bytes of a cell's output until now; ``None`` if the pool does not wait for the cell."""
        with self._lock:
            known = self._cells.get(cell)
            return known.total if known is not None else None

    def output(
        self, cell: str, chunks: Sequence[Chunk], size: int, *, unattended: bool = False
    ) -> int | None:
        """Send output of this many bytes; ``unattended`` if no process takes it. Returns the cell's bytes until now.

        Returns ``None`` if the pool does not wait for the cell.

        Only the log numbers output. An interrupt can leave a writer's own count wrong, and a number that does not follow on the
        last one would look like a loss that no retransmit can mend.
        """
        with self._lock:
            known = self._cells.get(cell)
            before = known.total if known is not None else 0
            body = encode(Output(cell, tuple(chunks), before + size, before))
            if known is not None:
                # An interrupt before the count left it here: it would be taken for the next ones in a retransmit.
                while known.outputs and known.outputs[-1][0] > before:
                    known.outputs.pop()
                # Kept and counted before it is posted. After an interrupt between the two the pool sees a gap and asks for these
                # bytes; the other way round it would have bytes that the log numbers a second time.
                known.outputs.append((before + size, body))
                known.total = before + size
                if unattended and not self._retains_all:
                    _shorten(known)
            self._engine.post(TO_POOL, body)
            return before + size if known is not None else None

    @property
    def late_total(self) -> int:
        """Return the number of bytes that :meth:`late` has sent."""
        return self._late_total

    def late(self, cell: str, chunks: Sequence[Chunk], size: int) -> None:
        """Send output after the cell's end, of this many bytes.

        It is not kept: the pool does not wait for it to be complete.
        """
        with self._lock:
            # Counted first: if an interrupt keeps this message back, the total of the next one covers its
            # bytes. The pool acknowledges totals, so the window does not stay narrower.
            self._late_total += size
            self._engine.post(TO_POOL, encode(Late(cell, tuple(chunks), self._late_total)))

    def done(self, done: CellDone) -> None:
        """Send a cell's end, after all of its output."""
        with self._lock:
            known = self._cells.get(done.cell)
            if known is not None:
                done = known.done = msgspec.structs.replace(done, total=known.total)
                if _was_interrupted(done):
                    self._interrupted = (known.label, time.monotonic())
            self._engine.post(TO_POOL, encode(done))

    def acknowledge(self, cell: str, taken: int) -> None:
        """Drop the messages of a cell whose bytes the pool has taken."""
        with self._lock:
            known = self._cells.get(cell)
            if known is not None:
                _forget(known, taken)

    def discard_cell(self, cell: str) -> None:
        """Forget a cell, of which the pool has everything."""
        with self._lock:
            self._cells.pop(cell, None)

    def resend(self, cells: Sequence[tuple[str, int, int]]) -> None:
        """Retransmit the messages of these cells that the pool lacks, and forget all other cells.

        Args:
            cells: ``(cell, received, taken)``, in bytes. One that has not come here is ignored: the pool sends it again.
        """
        with self._lock:
            wanted = {cell for cell, _, _ in cells}
            for cell in [cell for cell in self._cells if cell not in wanted]:
                del self._cells[cell]
            for cell, received, taken in cells:
                known = self._cells.get(cell)
                if known is None:
                    continue
                _forget(known, taken)
                # In order, under the lock: a message that the sending thread posted in between would come before its predecessors.
                if known.before > received:
                    self._engine.post(TO_POOL, _bridge(cell, received, known.before))
                for total, body in known.outputs:
                    if total > received:
                        self._engine.post(TO_POOL, body)
                if known.done is not None:
                    self._engine.post(TO_POOL, encode(known.done))


def _was_interrupted(done: CellDone | None) -> bool:
    return done is not None and done.error is not None and done.error.interrupted


def _forget(known: _Cell, taken: int) -> None:
    while known.outputs and known.outputs[0][0] <= taken:
        known.before, _ = known.outputs.popleft()


def _bridge(cell: str, received: int, before: int) -> bytes:
    """Return a message in the place of bytes that were trimmed: the pool takes nothing behind a gap, and would ask for ever."""
    text = (
        f"[{before - received} bytes of what this rank wrote here are lost: they were too much to be kept]\n"
    )
    return encode(Output(cell, (Stream("stderr", text),), before, received))


def _shorten(known: _Cell) -> None:
    """Keep the newest messages only."""
    while len(known.outputs) > 1 and known.total - known.before > UNATTENDED:
        total, _ = known.outputs.popleft()
        known.dropped += total - known.before
        known.before = total
