"""``%autohvd``: plain cells run on all ranks, ``%%local`` ones in the notebook itself."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from hvdlab.magics.notebook_pool import NotebookPool

_OURS = re.compile(r"%(hvd_\w+|autohvd|load_ext|unload_ext|reload_ext)\b")
INSERTED = "%%hvd_run\n"


class AutoRun:
    """An input transformer: puts ``%%hvd_run`` over cells that have no cell magic, and takes ``%%local`` off."""

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
        """Whether the cell does nothing but control hvdlab itself."""
        code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        return all(_OURS.match(line) for line in code)


@magics_class
class AutoMagics(Magics):
    """Magics that choose where plain cells run."""

    def __init__(self, session: NotebookPool, auto: AutoRun) -> None:
        super().__init__(session.shell)
        self._session, self._auto = session, auto

    @line_magic
    def autohvd(self, line: str) -> None:
        """Run plain cells on all ranks from here on (``%autohvd off`` ends it)."""
        choice = line.strip().lower()
        if choice not in ("", "on", "off"):
            raise UsageError(f"%autohvd takes `on`, `off` or nothing, not `{choice}`")
        if self._session.ranks_by_default:
            raise UsageError("%autohvd: in this kernel cells run on the ranks anyway; %%local runs one here")
        self._auto.on = choice != "off" if choice else not self._auto.on
        print(
            "cells run on all ranks; %%local runs one here" if self._auto.on else "cells run in the notebook"
        )

    @cell_magic
    def local(self, line: str, cell: str) -> Any:
        """Run this cell in the notebook's own process, whatever ``%autohvd`` says."""
        if line.strip():
            raise UsageError(f"%%local takes no options, but got `{line.strip()}`")
        shell = self.shell
        assert shell is not None
        was, self._auto.on = self._auto.on, False
        try:
            result = shell.run_cell(cell, store_history=False)  # type: ignore[no-untyped-call]  # no annotation
        finally:
            self._auto.on = was
        result.raise_error()
