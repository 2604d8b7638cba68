"""Cells that the previous process of a kept pool has left: the output that ranks still have of them, and how they go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hvdlab.collectives.client import Client
from hvdlab.collectives.errors import format_ranks
from hvdlab.collectives.system import process_state
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.cells.cell_events import DeadlineReached, PoolNews
from hvdlab.kernel_ext.notebook.cells.dispatch import CellDispatcher
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.cells.sink import Sinks
from hvdlab.kernel_ext.notebook.elastic import UnsyncedRanks
from hvdlab.kernel_ext.notebook.output.transcript import TranscriptStore
from hvdlab.kernel_ext.notebook.rank_lifecycle import RankLifecycle
from hvdlab.kernel_ext.notebook.requests import RankRequests
from hvdlab.kernel_ext.wire.cells import ListRetainedCells, RetainedCell, RetainedCells, RunCell
from hvdlab.launch.processes import started_at

ANSWER_WITHIN = 2.0
"""Seconds that ranks have to answer; one that is stopped does not."""
SLOW_WITHIN = 15.0
"""Seconds more for ranks that are not stopped: cells that a rank does not name are lost, and much mail may precede its answer."""
STOPPED = ("T", "t")
INTERRUPTED = "was interrupted when its notebook ended"
"""Text in the next notebook for a cell that ended by the interrupt which Jupyter sends before it shuts a kernel down."""


@dataclass(frozen=True, slots=True)
class OrphanedCell:
    """Cell whose end no process of the pool's has seen.

    Attributes:
        cell, label: Its id, and the name that users know it by, such as ``[7]``.
        parts: Rank to the part of it that the rank retains.
        without: Ranks that have no part of it. An elastic cell runs on all ranks: these came later, and were not sent it yet.
    """

    cell: str
    label: str
    parts: dict[int, RetainedCell]
    without: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that have a part of the cell."""
        return tuple(self.parts)

    @property
    def running(self) -> tuple[int, ...]:
        """Return the ranks that have not ended the cell."""
        return tuple(rank for rank, part in self.parts.items() if part.running)

    @property
    def interrupted(self) -> bool:
        """Return whether the end of its notebook has interrupted it on a rank: no notebook has seen that end."""
        return any(part.interrupted for part in self.parts.values())

    @property
    def order(self) -> RunCell | None:
        """Return the message that ranks were sent, if the cell is elastic."""
        return next((part.order for part in self.parts.values() if part.order is not None), None)

    @property
    def joined(self) -> tuple[int, ...]:
        """Return the ranks that were sent the cell, which is elastic, while others ran it."""
        return tuple(rank for rank, part in self.parts.items() if part.order is not None and part.order.joins)

    @property
    def missing(self) -> str:
        """Return a sentence about output that was too much to be kept; empty if there is none."""
        lost = {rank: part.dropped for rank, part in self.parts.items() if part.dropped}
        if not lost:
            return ""
        size = sum(lost.values()) / 2**20
        return f"{format_ranks(tuple(lost))}: {size:.1f} MiB of what they wrote before the following were too much to be kept"


Show = Callable[[OrphanedCell], Sinks]


def find_orphans(
    questions: RankRequests, pids: Mapping[int, int]
) -> tuple[list[OrphanedCell], tuple[str, ...]]:
    """Ask these ranks, whose processes are on this host, for their cells, in the order in which the first rank has them.

    Returns:
        The cells, and the labels of cells that were interrupted when their notebook ended although it has seen their end.
    """
    # A stopped rank does not answer, and its cells are lost to this notebook: only ranks that run get more time.
    answers = questions.ask(ListRetainedCells, tuple(pids), Deadline(ANSWER_WITHIN))
    slow = [rank for rank, pid in pids.items() if rank not in answers and process_state(pid) not in STOPPED]
    if slow:
        answers |= questions.ask(ListRetainedCells, slow, Deadline(SLOW_WITHIN))
    found: dict[str, OrphanedCell] = {}
    heard = {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, RetainedCells)}
    held = {rank: answer.cells for rank, answer in heard.items()}
    for rank, parts in held.items():
        for part in parts:
            found.setdefault(part.cell, OrphanedCell(part.cell, part.label, {})).parts[rank] = part
    cells = [
        replace(cell, without=tuple(rank for rank in held if rank not in cell.parts))
        for cell in found.values()
    ]
    return cells, tuple(dict.fromkeys(answer.interrupted for answer in heard.values() if answer.interrupted))


def resume_cells(
    client: Client,
    group: RankLifecycle,
    runs: CellDispatcher,
    transcripts: TranscriptStore,
    newcomers: UnsyncedRanks,
    show: Show | None,
) -> tuple[list[OrphanedCell], list[CellHandle]]:
    """Go on with the cells that the process before this one has left.

    Args:
        client: The connection to the coordinator.
        group: The ranks, which the pool has adopted.
        runs: Takes the cells over.
        transcripts: Records them.
        newcomers: Takes the ranks that were started after others.
        show: Returns the sinks of a cell. Without it only elastic cells that run are resumed: ranks must be able to join and
            leave them.

    Returns:
        The cells, and a handle for each.
    """
    pids = group.pids()
    left, interrupted = find_orphans(runs.requests, pids)
    for cell in left:  # also those that are not resumed: their ranks are shown as running them
        if cell.label:
            # A cell of this notebook may have the same number.
            client.label_cell(cell.cell, f"{cell.label} of the notebook before")
    if show is None:
        interrupted += tuple(cell.label or cell.cell for cell in left if cell.interrupted)
        left = [cell for cell in left if cell.order is not None and cell.running]
    for label in interrupted:
        runs.notice(f"cell {label} {INTERRUPTED}")
    came = {rank for cell in left if cell.order is not None for rank in (*cell.joined, *cell.without)}
    newcomers.restore({rank: started_at(pids[rank]) for rank in came})
    leaving = group.members.let_go
    handles = [
        resume_cell(cell, runs, transcripts, None if show is None else show(cell), leaving) for cell in left
    ]
    return left, handles


def resume_cell(
    left: OrphanedCell,
    runs: CellDispatcher,
    transcripts: TranscriptStore,
    sinks: Sinks,
    leaving: tuple[int, ...] = (),
) -> CellHandle:
    """Take such a cell over. The ranks' output of it comes with the next :meth:`CellDispatcher.resync`.

    Args:
        leaving: Ranks that leave at the next commit of elastic training.
    """
    recorder = transcripts.record(left.cell, left.label, left.ranks, sinks)
    before = {rank: part.before for rank, part in left.parts.items()}
    handle = runs.take_over(
        left.cell, left.label, before, recorder, order=left.order, joined=left.joined, leaving=leaving
    )
    recorder.driven(lambda: handle.post(DeadlineReached()))
    if left.missing:
        handle.post(PoolNews(left.missing))
    return handle
