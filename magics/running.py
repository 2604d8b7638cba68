"""Runs a cell for a magic and shows what comes of it. Imported when the first cell runs: loading stays quick."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell

from hvdlab.collectives.errors import format_ranks
from hvdlab.collectives.text import visible
from hvdlab.kernel_ext.notebook.cells.dispatch import CellRequest
from hvdlab.kernel_ext.notebook.cells.failure import failure_of
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.cells.sink import NullSink, OutputSink
from hvdlab.kernel_ext.notebook.debugger.cells import present_cell_file
from hvdlab.kernel_ext.notebook.elastic import Bounds
from hvdlab.kernel_ext.notebook.output.limit import LimitedSink, shown_limit
from hvdlab.kernel_ext.notebook.output.merge import LineMerger, hold_time
from hvdlab.kernel_ext.notebook.output.values import label_html
from hvdlab.kernel_ext.notebook.stdin.prompt_desk import ProcessPrompter
from hvdlab.magics.background import BackgroundCell, BackgroundSink
from hvdlab.magics.late import LateOutput
from hvdlab.magics.progress import CellImportDisplay
from hvdlab.magics.screens.areas import KnownAreas
from hvdlab.magics.screens.base import MergingSink, Screen
from hvdlab.magics.screens.notebook import NotebookScreen
from hvdlab.magics.screens.publisher import CellPublisher, ParentPublisher, Publisher, Watched, in_notebook
from hvdlab.magics.screens.strip import StripSink
from hvdlab.magics.screens.terminal import TerminalScreen, write_to_terminal
from hvdlab.magics.session import Session, as_usage_error, cell_number, shell_colours
from hvdlab.magics.strips import wanted

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.pool import Pool


def run_cell(
    session: Session, pool: Pool, source: str, ranks: Sequence[int], options: argparse.Namespace, offset: int
) -> Any:
    """Run a cell; returns what the magic returns.

    Args:
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
        out=make_sink(
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


def _conclude(session: Session, results: CellResults, name: str | None, *, quiet: bool) -> CellResults | None:
    results.plain, results.import_display = session.ranks_by_default, CellImportDisplay()
    if name:
        session.shell.user_ns[name], results.name = results, name
    elif quiet and results.ok and results.has_values:
        # After a ``;`` IPython neither shows nor keeps what the magic returns.
        session.shell.displayhook.update_user_ns(results)  # type: ignore[no-untyped-call]  # IPython has no annotation
    failure = failure_of(results, colours=shell_colours(session.shell))
    if failure is not None:
        raise failure
    if not results.has_values:
        return None
    if not quiet and in_notebook(session.shell) and results.has_live_values and not results.as_one:
        _show_each(session.shell, results)
        session.shell.displayhook.update_user_ns(results)  # type: ignore[no-untyped-call]  # as above
        return None
    return results


def _show_each(shell: InteractiveShell, results: CellResults) -> None:
    """Values that a table can't hold, such as widgets: each in an output of its own, under its ranks."""
    for ranks, data in results.groups():
        if len(results.ranks) > 1:
            heading = {"text/html": label_html(ranks), "text/plain": f"{format_ranks(ranks)}:"}
            shell.display_pub.publish(heading)
        shell.display_pub.publish(dict(data))


def _quiet(source: str) -> bool:
    """Whether the source ends in ``;``: its value is kept but not shown."""
    return bool(DisplayHook.semicolon_at_end_of_expression(source))  # type: ignore[no-untyped-call]  # IPython has no annotation


def make_sink(
    session: Session,
    ranks: Sequence[int],
    output: str,
    *,
    background: bool,
    source: str = "",
    strip: tuple[Pool, str] | None = None,
    elastic: bool = False,
) -> OutputSink:
    """The sink for ``--output``, in a notebook or a terminal.

    Args:
        strip: The pool and the label of a cell that gets a live strip; None for no strip.
        elastic: Whether the cell goes on without ranks that die or leave.
    """
    if output == "none":
        return NullSink()
    publisher = _publisher(session, background=background)
    watched = (
        Watched(publisher) if publisher is not None and strip is not None and wanted(os.environ) else None
    )
    cell = uuid.uuid4().hex[:12]
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
    if watched is not None and strip is not None:
        shown = session.strips.strip(session.shell, *strip, ranks, watched, f"hvdlab-{cell}-strip")
        sink = StripSink(sink, ranks, shown, elastic=elastic)
    if not background:
        return sink
    write = write_to_terminal if publisher is None else publisher.stream
    quiet = _quiet(source)
    return BackgroundSink(sink, write, colours=shell_colours(session.shell), quiet=quiet)


def _late_output(session: Session, ranks: Sequence[int], output: str) -> LateOutput | None:
    """Takes output that comes after the cell's end, and shows it under that cell; None if no output is shown."""
    if output == "none":
        return None
    publisher = _publisher(session, background=True)

    def make() -> OutputSink:
        cell, plain = uuid.uuid4().hex[:12], session.ranks_by_default
        sink = _foreground_sink(publisher, ranks, output, cell, plain=plain, known=session.areas)
        limit = shown_limit(os.environ)
        return LimitedSink(sink, ranks, limit) if limit else sink

    return LateOutput(make, ranks)


def _foreground_sink(
    publisher: Publisher | None,
    ranks: Sequence[int],
    output: str,
    cell: str,
    *,
    plain: bool,
    known: KnownAreas | None,
) -> OutputSink:
    screen: Screen = (
        TerminalScreen(ranks)
        if publisher is None
        else NotebookScreen(publisher, ranks, cell, plain=plain, known=known)
    )
    return MergingSink(LineMerger(ranks, hold=hold_time(os.environ), merge=output == "grouped"), screen)


def _publisher(session: Session, *, background: bool) -> Publisher | None:
    if not in_notebook(session.shell):
        return None
    return ParentPublisher(session.shell) if background else CellPublisher(session.shell)
