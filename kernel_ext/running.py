"""What a pool does with cells."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext import checks
from hvdlab.kernel_ext.cells.drive import CellHandle
from hvdlab.kernel_ext.cells.elastic import Bounds
from hvdlab.kernel_ext.cells.events import TimePassed
from hvdlab.kernel_ext.cells.results import CellResults
from hvdlab.kernel_ext.cells.sink import NullSink, OutputSink
from hvdlab.kernel_ext.output.record import ShowLate
from hvdlab.kernel_ext.prompts.prompter import ProcessPrompter, Prompter

if TYPE_CHECKING:
    from hvdlab.kernel_ext.base import PoolBase


class Running:
    """The part of a pool that runs cells; :class:`~hvdlab.kernel_ext.pool.Pool` has the rest."""

    _base: PoolBase

    def run(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        label: str = "",
        line_offset: int = 1,
        out: OutputSink | None = None,
        timeout: float | None = None,
        want_value: bool = True,
        store_history: bool = True,
        file: str = "",
        prompter: Prompter | None = None,
        late: ShowLate | None = None,
        elastic: Bounds | None = None,
    ) -> CellResults:
        """Run a cell on ranks and wait for its end; an interrupt (Ctrl-C) interrupts the ranks.

        Nothing that the cell raises is raised here: ``results.errors`` and ``results.root_cause`` have it.

        Args:
            source: Python source, with IPython's magics and ``!``.
            ranks: The ranks that run it; by default all.
            label: The name that users know the cell by, such as ``[7]``.
            line_offset: Lines of the notebook's cell above ``source``.
            out: Takes the output; without it nothing is shown, and the output is only kept.
            timeout: Seconds after which the ranks are interrupted; None for no limit.
            want_value: Whether ranks send the value of the last expression.
            store_history: Whether the cell is one of the notebook's: its value becomes ``_`` and ``Out[n]`` on the ranks.
            file: What a frontend's debugger calls the cell that ``source`` is the end of.
            prompter: Asks the user when a rank wants input (``input()``, a debugger), if this is the main thread; by
                default where this process has its input.
            late: Shows what the cell's threads and tasks write after its end, ``late(rank, chunks)``; called on a thread
                of the pool's, and must not block. The output is kept in any case.
            elastic: The cell trains by an elastic function, and goes on while ranks are lost, replaced, added and let go,
                as long as there are this many; it runs on all ranks.

        Raises:
            InvalidRequestError: A rank does not exist or is lost, or the pool has stopped.
        """
        prompter = prompter or ProcessPrompter()
        return self._dispatch(
            source,
            ranks,
            label,
            line_offset,
            out,
            timeout,
            want_value,
            store_history,
            file,
            prompter,
            late,
            elastic,
        ).wait()

    def start_run(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        label: str = "",
        line_offset: int = 1,
        out: OutputSink | None = None,
        timeout: float | None = None,
        want_value: bool = True,
        store_history: bool = True,
        file: str = "",
        late: ShowLate | None = None,
        elastic: Bounds | None = None,
    ) -> CellHandle:
        """Like :meth:`run`, in the background: returns at once.

        Raises:
            InvalidRequestError: As for :meth:`run`.
            StartError: No thread could be started for it. The cell was interrupted at once, and has ended.
        """
        handle = self._dispatch(
            source,
            ranks,
            label,
            line_offset,
            out,
            timeout,
            want_value,
            store_history,
            file,
            late=late,
            elastic=elastic,
        )
        try:
            with checks.limits_explained("the cell could not be run in the background"):
                handle.drive_in_background()
        except StartError:
            handle.interrupt()
            handle.wait()
            raise
        return handle

    def interrupt(self, ranks: Sequence[int] | None = None) -> None:
        """Raise KeyboardInterrupt in what these ranks (by default all) are running, also inside a collective."""
        self._base.runs.interrupt(self._chosen(ranks))

    def _dispatch(
        self,
        source: str,
        ranks: Sequence[int] | None,
        label: str,
        line_offset: int,
        out: OutputSink | None,
        timeout: float | None,
        want_value: bool,
        store_history: bool,
        file: str,
        prompter: Prompter | None = None,
        late: ShowLate | None = None,
        elastic: Bounds | None = None,
    ) -> CellHandle:
        cell, chosen = uuid.uuid4().hex[:12], self._chosen(ranks)
        if elastic is not None:
            elastic.check()
            elastic.check_size(len(chosen), label)
        recorder = self._base.transcripts.record(cell, label, chosen, NullSink() if out is None else out)
        recorder.show_late(late)
        try:
            handle = self._base.runs.dispatch(
                cell,
                chosen,
                source,
                label=label,
                line_offset=line_offset,
                sink=recorder,
                timeout=timeout,
                want_value=want_value,
                store_history=store_history,
                file=file,
                prompter=prompter,
                elastic=elastic,
            )
        except BaseException:
            self._base.transcripts.forget(cell)
            raise
        recorder.driven(lambda: handle.feed(TimePassed()))
        return handle

    # -- what the rest of a pool has ------------------------------------------------------------------------------

    def _chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        raise NotImplementedError
