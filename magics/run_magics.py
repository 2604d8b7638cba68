"""``%%hvd_run`` and ``%%hvd_rank``: parse the options of a cell and hand it to :mod:`hvdlab.magics.cell_view`, which runs it.

``%autohvd`` and ``%%local`` choose whether a plain cell runs on all ranks or in the notebook itself.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_cell_magic, line_magic, magics_class, output_can_be_silenced

from hvdlab.kernel_ext.kernel.cell_routing import INSTALLER
from hvdlab.magics.arguments import (
    MagicParser,
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
        # Before packages are installed and ranks are started: a typing error costs neither.
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
                self.session.shell.system(line[1:])


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


_OURS = re.compile(r"%(hvd_\w+|autohvd|load_ext|unload_ext|reload_ext)\b")
INSERTED = "%%hvd_run\n"


class AutoRun:
    """Input transformer that puts ``%%hvd_run`` over cells without a cell magic, and removes ``%%local``."""

    has_side_effects = True  # IPython then does not try the transformer on cells that are being typed

    def __init__(self) -> None:
        self.on = False

    def __call__(self, lines: list[str]) -> list[str]:
        first = next((line for line in lines if line.strip()), "")
        if re.fullmatch(r"%%local\s*", first):
            # An empty line in place of the magic keeps the line numbers.
            index = lines.index(first)
            return [*lines[:index], "\n", *lines[index + 1 :]]
        if not self.on or not first or first.startswith("%%") or self._is_about_hvdlab(lines):
            return lines
        return [INSERTED, *lines]

    @staticmethod
    def _is_about_hvdlab(lines: list[str]) -> bool:
        """Return whether the cell does nothing but control hvdlab itself."""
        code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        return all(_OURS.match(line) for line in code)


def autohvd_parser() -> MagicParser:
    parser = MagicParser(
        "%autohvd",
        "Run plain cells on all ranks from here on, or in the notebook again; without a word the other of both.",
        example="%autohvd off",
    )
    parser.add_argument(
        "switch",
        nargs="?",
        type=str.lower,
        choices=("on", "off"),
        help="on: plain cells run on the ranks; off: in the notebook",
    )
    return parser


def local_parser() -> MagicParser:
    return MagicParser(
        "%%local",
        "Run this cell in the notebook's own process, whatever %autohvd or the kernel would choose.",
        example="%%local",
    )


@magics_class
class AutoMagics(NotebookMagics):
    """Magics that choose where plain cells run."""

    def __init__(self, session: NotebookPool, auto: AutoRun) -> None:
        super().__init__(session)
        self._auto = auto

    @line_magic
    @takes_options(autohvd_parser())
    def autohvd(self, options: argparse.Namespace) -> None:
        """Choose whether plain cells run on all ranks or in the notebook."""
        if self.session.ranks_by_default:
            raise UsageError("%autohvd: in this kernel cells run on the ranks anyway; %%local runs one here")
        self._auto.on = options.switch == "on" if options.switch else not self._auto.on
        print(
            "cells run on all ranks; %%local runs one here" if self._auto.on else "cells run in the notebook"
        )

    @cell_magic
    @takes_options(local_parser())
    def local(self, options: argparse.Namespace, cell: str) -> Any:
        """Run this cell in the notebook's own process, also where ``%autohvd`` sends cells to the ranks."""
        shell = self.shell
        assert shell is not None
        # The cell passes the shell's transformers once more, and this one would send it to the ranks.
        was, self._auto.on = self._auto.on, False
        try:
            result = shell.run_cell(cell, store_history=False)
        finally:
            self._auto.on = was
        result.raise_error()
