"""The handle of a cell that runs in the background."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from IPython.core.interactiveshell import InteractiveShell

from hvdlab.collectives.errors import format_ranks
from hvdlab.kernel_ext.notebook.cells.failure import failure_of
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.cells.sink import ForwardingSink, OutputSink
from hvdlab.kernel_ext.notebook.output.error_report import report
from hvdlab.magics.progress import CellImportDisplay
from hvdlab.magics.session import shell_colours

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.pool import Pool


class RunningCell(Protocol):
    """A run of a pool, as :meth:`Pool.start_run` returns it."""

    cell: str
    ranks: tuple[int, ...]

    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> CellResults: ...
    def interrupt(self) -> None: ...


class BackgroundSink(ForwardingSink):
    """Sink of a cell in the background: at the end it also shows the values, or why the cell failed.

    A cell in the foreground does that by its result or its exception; a cell that has returned can't any more.
    """

    def __init__(
        self, inner: OutputSink, write: Callable[[str, str], None], *, colours: bool, quiet: bool = False
    ) -> None:
        super().__init__(inner)
        self._write, self._colours, self._quiet = write, colours, quiet

    def finished(self, results: CellResults) -> None:
        lines = report(results, colours=self._colours)
        if lines:
            self._write("stderr", "\n".join(lines) + "\n")
        elif results.has_values and not self._quiet:
            self._write("stdout", f"{results!r}\n")


class BackgroundCell:
    """Cell of ``%%hvd_run --background``; its output goes on to the notebook's cell that started it."""

    def __init__(
        self, run: RunningCell, pool: Pool, shell: InteractiveShell, name: str | None, label: str
    ) -> None:
        self._pool = pool
        self._run, self._shell, self._name, self._label = run, shell, name, label

    @property
    def done(self) -> bool:
        """Whether the cell has ended."""
        return self._run.done

    def wait(self, timeout: float | None = None) -> CellResults:
        """The results, once the cell has ended.

        Raises:
            CellFailed: The cell failed; the notebook shows the same report as for a cell in the foreground.
            KeyboardInterrupt: The cell was interrupted, for example by Ctrl-C during this wait.
            TimeoutError: The cell still runs after ``timeout`` seconds, and goes on.
        """
        results = self._run.wait(timeout)
        results.import_display = CellImportDisplay()
        if self._name and self._shell.user_ns.get(self._name) is self:
            self._shell.user_ns[self._name], results.name = results, self._name
        self._pool.explain(results)
        failure = failure_of(results, colours=shell_colours(self._shell))
        if failure is not None:
            raise failure
        return results

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt on the ranks that run the cell."""
        self._run.interrupt()

    def __repr__(self) -> str:
        state = "ended" if self.done else "runs"
        return f"<cell {self._label} {state} in the background on {format_ranks(self._run.ranks)}; .wait(), .interrupt()>"
