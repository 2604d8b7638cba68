"""``%%hvd_run`` and ``%%hvd_rank``: a cell on the ranks."""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class, output_can_be_silenced

from hvdlab.kernel_ext.cells.elastic import Bounds
from hvdlab.magics.arguments import documented, parse_ranks, rank_parser, run_parser
from hvdlab.magics.session import Session, as_usage_error, ranks_of
from hvdlab.magics.syntax import check_syntax, magic_line_offset


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
        _check_elastic(parser.prog, options)
        if not source.strip():
            raise UsageError(
                f"{parser.prog}: there is no code to run; write some after the options "
                "(`%hvd_pool start -np 8` starts ranks without running a cell)"
            )
        offset = 0 if cell is None else magic_line_offset(self.session.raw_cell, "hvd_run")
        check_syntax(self.session.shell, source, offset)
        pool = self.session.pool_for(
            options.np,
            launcher=options.launcher,
            plane=options.plane,
            hosts=options.hosts,
            launcher_options=options.launcher_option,
            sync=options.sync,
        )
        ranks = parse_ranks(options.ranks, ranks_of(pool)) if options.ranks else ranks_of(pool)
        return _run(self.session, pool, source, ranks, options, offset)

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
        check_syntax(self.session.shell, cell, offset)
        return _run(self.session, pool, cell, parse_ranks(options.ranks, ranks_of(pool)), options, offset)


def _run(session: Session, *arguments: Any) -> Any:
    from hvdlab.magics.running import run_cell

    return run_cell(session, *arguments)


def _check_elastic(prog: str, options: argparse.Namespace) -> None:
    if options.elastic:
        if options.ranks:
            raise UsageError(f"{prog}: --elastic is about all ranks; run it without --ranks")
        with as_usage_error():
            Bounds(options.min_np or 1, options.max_np).check()
    elif options.min_np or options.max_np:
        given = "--min-np" if options.min_np else "--max-np"
        raise UsageError(f"{prog}: {given} belongs to --elastic, which is missing")
