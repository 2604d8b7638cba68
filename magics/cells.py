"""``%%hvd_run`` and ``%%hvd_rank``: a cell on the ranks."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class, output_can_be_silenced

from hvdlab.kernel_ext.cells.failure import failure_of
from hvdlab.kernel_ext.cells.results import CellResults
from hvdlab.kernel_ext.cells.sink import NullSink, OutputSink
from hvdlab.kernel_ext.output.merge import LineMerger
from hvdlab.magics.arguments import documented, parse_ranks, rank_parser, run_parser
from hvdlab.magics.background import BackgroundCell
from hvdlab.magics.screens.base import MergingSink, Screen
from hvdlab.magics.screens.notebook import NotebookScreen
from hvdlab.magics.screens.publisher import CellPublisher, ParentPublisher, Publisher, in_notebook
from hvdlab.magics.screens.tabs import PagesSink, SectionsView, notebook_view
from hvdlab.magics.screens.terminal import TerminalScreen
from hvdlab.magics.session import Session, ranks_of
from hvdlab.magics.syntax import check_syntax, magic_line_offset

if TYPE_CHECKING:
    from hvdlab.kernel_ext.pool import Pool


@magics_class
class CellMagics(Magics):
    """Magics that run a cell."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.shell)
        self.session = session

    @output_can_be_silenced
    @line_cell_magic
    @documented(run_parser())
    def hvd_run(self, line: str, cell: str | None = None) -> Any:
        """Run a cell, or the rest of the line, on the ranks."""
        if cell is None:
            parser = run_parser("%hvd_run")
            options, source = parser.parse_with_code(line)
        else:
            parser = run_parser()
            options, source = parser.parse(line), cell
        if options.help:
            print(parser.format_help())
            return None
        _check_elastic(options)
        if not source.strip():
            raise UsageError(
                f"{parser.prog}: there is no code to run; write some after the options "
                "(`%hvd_pool start -np 8` starts ranks without running a cell)"
            )
        offset = 0 if cell is None else magic_line_offset(self.session.raw_cell, "hvd_run")
        self._check(source, offset)
        pool = self.session.pool_for(
            options.np, launcher=options.launcher, plane=options.plane, hosts=options.hosts
        )
        ranks = parse_ranks(options.ranks, ranks_of(pool)) if options.ranks else ranks_of(pool)
        return self._run(pool, source, ranks, options, offset)

    @output_can_be_silenced
    @cell_magic
    @documented(rank_parser())
    def hvd_rank(self, line: str, cell: str) -> Any:
        """Run a cell on some ranks only."""
        parser = rank_parser()
        if {"-h", "--help"} & set(line.split()):
            print(parser.format_help())
            return None
        options = parser.parse(line)
        pool = self.session.need_pool("%%hvd_rank")
        if not cell.strip():
            raise UsageError("%%hvd_rank: there is no code to run; write some under the magic's line")
        offset = magic_line_offset(self.session.raw_cell, "hvd_rank")
        self._check(cell, offset)
        return self._run(pool, cell, parse_ranks(options.ranks, ranks_of(pool)), options, offset)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _check(self, source: str, offset: int) -> None:
        check_syntax(self.session.shell, source, offset)

    def _run(
        self, pool: Pool, source: str, ranks: Sequence[int], options: argparse.Namespace, offset: int
    ) -> Any:
        shell = self.session.shell
        sink = make_sink(self.session, ranks, options.output, background=options.background)
        arguments: dict[str, Any] = {
            "ranks": ranks,
            "label": f"[{shell.execution_count}]",
            "line_offset": offset,
            "out": sink,
            "timeout": options.timeout,
        }
        if options.background:
            handle = BackgroundCell(
                pool.start_run(source, **arguments), shell, options.out, arguments["label"]
            )
            if options.out:
                shell.user_ns[options.out] = handle
            return handle
        results = pool.run(source, **arguments)
        return self._conclude(results, options.out)

    def _conclude(self, results: CellResults, name: str | None) -> CellResults | None:
        if name:
            self.session.shell.user_ns[name] = results
        failure = failure_of(results)
        if failure is not None:
            raise failure
        return results if results.has_values else None


def make_sink(session: Session, ranks: Sequence[int], output: str, *, background: bool) -> OutputSink:
    """The sink for ``--output``, in a notebook or a terminal."""
    if output == "none":
        return NullSink()
    cell = uuid.uuid4().hex[:12]
    publisher = _publisher(session, background=background)
    if output == "tabs":
        return PagesSink(
            ranks, SectionsView() if publisher is None else notebook_view(publisher, ranks, cell)
        )
    screen: Screen = TerminalScreen(ranks) if publisher is None else NotebookScreen(publisher, ranks, cell)
    return MergingSink(LineMerger(ranks, merge=output == "grouped"), screen)


def _publisher(session: Session, *, background: bool) -> Publisher | None:
    if not in_notebook(session.shell):
        return None
    return ParentPublisher(getattr(session.shell, "kernel")) if background else CellPublisher(session.shell)  # noqa: B009


def _check_elastic(options: argparse.Namespace) -> None:
    if options.elastic or options.min_np or options.max_np:
        raise UsageError(
            "--elastic is beyond this release; run without it, and use `%hvd_pool repair` after a rank has died "
            "or a new -np to grow and shrink"
        )
