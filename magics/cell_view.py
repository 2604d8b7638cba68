"""Run a cell for a magic and show it: its sinks, the handle of a cell in the background, and output after a cell's end.

The first cell imports this module, not the loading of the extension, which has to be quick.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell

from hvdlab.collectives.text import format_ranks, visible
from hvdlab.kernel_ext.notebook.cells.dispatch import CellRequest
from hvdlab.kernel_ext.notebook.cells.driver import BACKLOG
from hvdlab.kernel_ext.notebook.cells.results import CellResults, label_html
from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.notebook.elastic import Bounds
from hvdlab.kernel_ext.notebook.output.error_report import failure_of, report
from hvdlab.kernel_ext.notebook.output.limit import LimitedSink, shown_limit
from hvdlab.kernel_ext.notebook.output.merge import LineMerger, MergingSink, Screen, hold_time
from hvdlab.kernel_ext.notebook.output.transcript import GuardedSink
from hvdlab.kernel_ext.notebook.output_channels import (
    FixedCellChannel,
    LineTracking,
    OutputChannel,
    RunningCellChannel,
    in_notebook,
)
from hvdlab.kernel_ext.notebook.stdin import ProcessPrompter
from hvdlab.kernel_ext.wire.cells import Chunk
from hvdlab.magics.cell_strip import StripSink, strips_enabled
from hvdlab.magics.notebook_pool import (
    CellImportDisplay,
    NotebookPool,
    as_usage_error,
    cell_number,
    shell_colours,
)
from hvdlab.magics.screens import DisplayIds, NotebookScreen, TerminalScreen, write_to_terminal

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.pool import Pool


def run_cell(
    session: NotebookPool,
    pool: Pool,
    source: str,
    ranks: Sequence[int],
    options: argparse.Namespace,
    offset: int,
) -> Any:
    """Run a cell on ranks, show it, and return the magic's value: the results, or the handle of a cell in the background.

    Args:
        session: The notebook's pool, with the state of its cells.
        pool: The pool.
        source: The cell's code.
        ranks: The ranks that run it.
        options: ``output``, ``out``, ``background`` and ``timeout``; for cells that may be elastic also ``elastic``,
            ``min_np`` and ``max_np``.
        offset: Lines of the notebook's cell above the source.

    Raises:
        CellFailed: The cell failed on a rank.
        KeyboardInterrupt: The user interrupted it.
    """
    with as_usage_error():
        session.check_answering(pool, ranks)
    if session.debugger is not None:
        for line in session.debugger.prepare(ranks):
            print(visible(line), file=sys.stderr)
    shell = session.shell
    label = f"[{cell_number(shell)}]"
    elastic = getattr(options, "elastic", False)
    request = CellRequest(
        source,
        ranks=ranks,
        label=label,
        line_offset=offset,
        out=make_sinks(
            session,
            ranks,
            options.output,
            background=options.background,
            source=source,
            strip=(pool, label),
            elastic=elastic,
        ),
        late=_late_output(session, ranks, options.output),
        timeout=options.timeout,
        store_history=session.store_history,
        file=present_cell_file(),
        prompter=None if options.background else ProcessPrompter(shows_beside=in_notebook(shell)),
        elastic=Bounds(options.min_np or 1, options.max_np) if elastic else None,
    )
    session.running_label = label
    if options.background:
        with as_usage_error():
            run = pool.start_cell(request)
        session.labels[run.cell] = label
        handle = BackgroundCell(run, pool, shell, options.out, label)
        if options.out:
            shell.user_ns[options.out] = handle
        return handle
    with as_usage_error():
        results = pool.run_cell(request)
    pool.explain(results)
    return _conclude(session, results, options.out, quiet=_quiet(source))


def _conclude(
    session: NotebookPool, results: CellResults, name: str | None, *, quiet: bool
) -> CellResults | None:
    results.plain, results.import_display = session.ranks_by_default, CellImportDisplay()
    if name:
        session.shell.user_ns[name], results.name = results, name
    elif quiet and results.ok and results.has_values:
        # After a ``;`` IPython neither shows nor keeps the magic's result.
        session.shell.displayhook.update_user_ns(results)
    failure = failure_of(results, colours=shell_colours(session.shell))
    if failure is not None:
        raise failure
    if not results.has_values:
        return None
    if not quiet and in_notebook(session.shell) and results.has_live_values and not results.as_one:
        _show_each(session.shell, results)
        session.shell.displayhook.update_user_ns(results)
        return None
    return results


def _show_each(shell: InteractiveShell, results: CellResults) -> None:
    """Show values that a table can't hold, such as widgets, each in an output of its own, under its ranks."""
    for ranks, data in results.groups():
        if len(results.ranks) > 1:
            heading = {"text/html": label_html(ranks), "text/plain": f"{format_ranks(ranks)}:"}
            shell.display_pub.publish(heading)
        shell.display_pub.publish(dict(data))


def _quiet(source: str) -> bool:
    """Return whether the source ends in ``;``: its value is kept but not shown."""
    return bool(DisplayHook.semicolon_at_end_of_expression(source))


def make_sinks(
    session: NotebookPool,
    ranks: Sequence[int],
    output: str,
    *,
    background: bool,
    source: str = "",
    strip: tuple[Pool, str] | None = None,
    elastic: bool = False,
) -> tuple[OutputSink, ...]:
    """Return the sinks for ``--output``, in a notebook or a terminal: that of the output comes first.

    Args:
        session: The notebook's pool, with the state of its cells.
        ranks: The ranks of the cell.
        output: ``grouped``, ``stream`` or ``none``.
        background: Whether the cell goes on after the magic has returned.
        source: The cell's code.
        strip: The pool and the label of a cell that gets a live strip; None for no strip.
        elastic: Whether the cell goes on without ranks that die or leave.
    """
    if output == "none":
        return ()
    publisher = _publisher(session, background=background)
    watched = (
        LineTracking(publisher)
        if publisher is not None and strip is not None and strips_enabled(os.environ)
        else None
    )
    cell = secrets.token_hex(6)
    sink = _foreground_sink(
        watched or publisher,
        ranks,
        output,
        cell,
        plain=session.ranks_by_default,
        # A cell that is only shown again has areas of its own: it shows later updates of its displays in its own place.
        known=session.areas if strip is not None else None,
    )
    if limit := shown_limit(os.environ):
        sink = LimitedSink(sink, ranks, limit)
    sinks = [sink]
    if watched is not None and strip is not None:
        shown = session.strips.strip(session.shell, *strip, ranks, watched, f"hvdlab-{cell}-strip")
        sinks.append(StripSink(ranks, shown, elastic=elastic))
    if background:
        sinks.append(BackgroundSink(publisher, colours=shell_colours(session.shell), quiet=_quiet(source)))
    return tuple(sinks)


def _late_output(session: NotebookPool, ranks: Sequence[int], output: str) -> LateOutputView | None:
    """Return the view of output that comes after the cell's end, under that cell; None if no output is shown."""
    if output == "none":
        return None
    return LateOutputView(session, ranks, output)


def _foreground_sink(
    publisher: OutputChannel | None,
    ranks: Sequence[int],
    output: str,
    cell: str,
    *,
    plain: bool,
    known: DisplayIds | None,
) -> OutputSink:
    screen: Screen = (
        TerminalScreen(ranks)
        if publisher is None
        else NotebookScreen(publisher, ranks, cell, plain=plain, known=known)
    )
    return MergingSink(LineMerger(ranks, hold=hold_time(os.environ), merge=output == "grouped"), screen)


def _publisher(session: NotebookPool, *, background: bool) -> OutputChannel | None:
    if not in_notebook(session.shell):
        return None
    return FixedCellChannel(session.shell) if background else RunningCellChannel(session.shell)


class RunningCell(Protocol):
    """Run of a cell, as :meth:`Pool.start_run` returns it."""

    cell: str
    ranks: tuple[int, ...]

    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> CellResults: ...
    def interrupt(self) -> None: ...


class BackgroundSink(OutputSink):
    """Sink of a cell in the background that shows its end: the values, or why the cell failed.

    A cell in the foreground does that by its result or its exception, which a cell that has returned can't.

    Args:
        publisher: Channel into the notebook's cell; None in a terminal.
        colours: Whether the report of a failure has colours.
        quiet: Whether the values are not shown.
    """

    def __init__(self, publisher: OutputChannel | None, *, colours: bool, quiet: bool = False) -> None:
        self._publisher, self._colours, self._quiet = publisher, colours, quiet

    def finished(self, results: CellResults) -> None:
        lines = report(results, colours=self._colours)
        if lines:
            self._write("stderr", "\n".join(lines) + "\n")
        elif results.has_values and not self._quiet:
            self._write("stdout", f"{results!r}\n")

    def _write(self, name: str, text: str) -> None:
        if self._publisher is None:
            write_to_terminal(name, text)
        else:
            self._publisher.stream(name, text)


class BackgroundCell:
    """Cell of ``%%hvd_run --background``; its output goes on to the notebook's cell that started it."""

    def __init__(
        self, run: RunningCell, pool: Pool, shell: InteractiveShell, name: str | None, label: str
    ) -> None:
        self._pool = pool
        self._run, self._shell, self._name, self._label = run, shell, name, label

    @property
    def done(self) -> bool:
        """Return whether the cell has ended."""
        return self._run.done

    def wait(self, timeout: float | None = None) -> CellResults:
        """Wait for the cell's end, and return its results.

        Args:
            timeout: Seconds to wait at most; None for no limit.

        Raises:
            CellFailed: The cell failed; the notebook shows the same report as for a cell in the foreground.
            KeyboardInterrupt: The cell was interrupted, for example by Ctrl-C during this wait.
            TimeoutError: The cell still runs after ``timeout`` seconds, and goes on.
        """
        results = self._run.wait(timeout)
        results.import_display = CellImportDisplay()
        # The user may have bound the name to another value since.
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


class LateOutputView:
    """View of output that threads, tasks and subprocesses of ranks write after their cell's end, under that cell.

    A thread gives it to a sink, and exists only while there is something to show.

    Args:
        session: The notebook's pool, with the state of its cells.
        ranks: The ranks of the cell.
        output: ``grouped`` or ``stream``.
    """

    def __init__(self, session: NotebookPool, ranks: Sequence[int], output: str) -> None:
        self._session, self._output = session, output
        # Now: the output belongs to the cell that begins.
        self._publisher = _publisher(session, background=True)
        self._first_ranks, self._ranks = ranks, set(ranks)
        self._sink: GuardedSink | None = None
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, tuple[Chunk, ...], Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None

    def __call__(self, rank: int, chunks: tuple[Chunk, ...], shown: Callable[[], None]) -> None:
        """Queue output of a rank; ``shown`` is called once the sink has room for more. Any thread; does not block."""
        with self._changed:
            self._waiting.append((rank, chunks, shown))
            if self._thread is not None or self._started():
                self._changed.notify()
                return
            self._waiting.pop()
        # No thread can be started. `%hvd_output` has the output; the rank must not wait for a screen.
        shown()

    def _started(self) -> bool:
        """Start the thread, and return whether that worked. The caller holds the lock."""
        thread = threading.Thread(target=self._show, name="hvdlab-late-output", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _make_sink(self) -> OutputSink:
        """Return the sink, when the first output comes."""
        session, ranks, cell = self._session, self._first_ranks, secrets.token_hex(6)
        plain = session.ranks_by_default
        sink = _foreground_sink(self._publisher, ranks, self._output, cell, plain=plain, known=session.areas)
        limit = shown_limit(os.environ)
        return LimitedSink(sink, ranks, limit) if limit else sink

    def _show(self) -> None:
        if self._sink is None:
            self._sink = GuardedSink(self._make_sink())
        held: list[Callable[[], None]] = []
        while True:
            with self._changed:
                waiting, self._waiting = self._waiting, deque()
            for rank, chunks, shown in waiting:
                if rank not in self._ranks:  # the rank joined while the cell ran
                    self._ranks.add(rank)
                    self._sink.began(rank)
                self._sink.output(rank, chunks)
                held.append(shown)
            at = self._sink.tick(time.monotonic())
            if at is None or self._sink.backlog() <= BACKLOG:
                ready, held = held, []
                for each in ready:
                    each()
            with self._changed:
                if self._waiting:
                    continue
                if at is None:
                    # Under the lock, in which callers check for a thread: output that comes now starts another one.
                    self._thread = None
                    return
                self._changed.wait(max(0.0, at - time.monotonic()))


def present_cell_file() -> str:
    """Return the file name by which a frontend's debugger knows the cell that called this; an empty text outside of ipykernel.

    ipykernel has computed it: it compiles the cell under this name, and frontends compute the same one.
    """
    compiler = sys.modules.get("ipykernel.compiler")
    if compiler is None:
        return ""
    begin = str(compiler.get_tmp_directory())
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(begin):
            return frame.f_code.co_filename
        frame = frame.f_back
    return ""
