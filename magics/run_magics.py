"""``%%hvd_run`` and ``%%hvd_rank``: parse the options of a cell and hand it to :mod:`hvdlab.magics.cell_view`, which runs it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_cell_magic, magics_class, output_can_be_silenced

from hvdlab.kernel_ext.kernel.cell_routing import INSTALLER
from hvdlab.magics.arguments import (
    NotebookMagics,
    check_syntax,
    documented,
    magic_line_offset,
    parse_ranks,
    rank_parser,
    run_parser,
    takes_options,
)
from hvdlab.magics.notebook_pool import NotebookPool, as_usage_error, ranks_of


@magics_class
class CellMagics(NotebookMagics):
    """Magics that run a cell."""

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
        installs, source = split_installs(parser.prog, source)
        check_syntax(self.session.shell, source, offset)
        self._install(installs)
        if not source.strip():
            return None
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
    @takes_options(rank_parser())
    def hvd_rank(self, options: argparse.Namespace, cell: str) -> Any:
        """Run a cell on some ranks only."""
        pool = self.session.need_pool("%%hvd_rank")
        if not cell.strip():
            raise UsageError("%%hvd_rank: there is no code to run; write some under the magic's line")
        offset = magic_line_offset(self.session.raw_cell, "hvd_rank")
        installs, cell = split_installs("%%hvd_rank", cell)
        check_syntax(self.session.shell, cell, offset)
        self._install(installs)
        if not cell.strip():
            return None
        return _run(self.session, pool, cell, parse_ranks(options.ranks, ranks_of(pool)), options, offset)

    def _install(self, lines: Sequence[str]) -> None:
        """Run lines that install packages, once, in the notebook's own process."""
        if lines:
            print(
                "installing once, in the notebook's process, whose packages the ranks of this machine share; "
                "ranks that have imported a package keep what they imported"
            )
        for line in lines:
            if line.startswith("%"):
                name, _, rest = line[1:].partition(" ")
                self.session.shell.run_line_magic(name, rest)
            else:
                self.session.shell.system(line[1:])  # type: ignore[no-untyped-call]  # IPython has no types for it


def split_installs(prog: str, source: str) -> tuple[list[str], str]:
    """Split the lines that install packages, such as ``%pip install six``, off the top of a cell.

    Args:
        prog: The magic, for the message.
        source: The cell.

    Returns:
        These lines, and the cell with empty lines in their place.

    Raises:
        UsageError: Such a line stands below other code: it would run on all ranks at once, and break the packages that they share.
    """
    lines = source.split("\n")
    installs: list[str] = []
    for number, line in enumerate(lines):
        if INSTALLER.match(line):
            installs.append(line.strip())
            lines[number] = ""
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    for line in lines:
        if INSTALLER.match(line):
            raise UsageError(
                f"{prog}: `{line.strip()}` on all ranks at once would break the packages that they share; "
                "put it at the top of the cell, where it runs once"
            )
    return installs, "\n".join(lines) if installs else source


def _run(session: NotebookPool, *arguments: Any) -> Any:
    from hvdlab.magics.cell_view import run_cell

    return run_cell(session, *arguments)


def _check_elastic(prog: str, options: argparse.Namespace) -> None:
    if options.elastic:
        from hvdlab.kernel_ext.notebook.elastic import Bounds  # not at %load_ext

        if options.ranks:
            raise UsageError(f"{prog}: --elastic is about all ranks; run it without --ranks")
        with as_usage_error():
            Bounds(options.min_np or 1, options.max_np).check()
    elif options.min_np or options.max_np:
        given = "--min-np" if options.min_np else "--max-np"
        raise UsageError(f"{prog}: {given} belongs to --elastic, which is missing")
