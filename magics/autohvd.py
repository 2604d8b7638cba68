"""``%autohvd`` and ``%%local``: choose whether a plain cell runs on all ranks or in the notebook itself."""

from __future__ import annotations

import argparse
import re
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_magic, magics_class

from hvdlab.magics.arguments import MagicParser, NotebookMagics, takes_options
from hvdlab.magics.notebook_pool import NotebookPool

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
        was, self._auto.on = self._auto.on, False
        try:
            result = shell.run_cell(cell, store_history=False)  # type: ignore[no-untyped-call]  # no annotation
        finally:
            self._auto.on = was
        result.raise_error()
