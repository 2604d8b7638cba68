"""Shows what the pool is waiting for while ranks start, and erases it at the end."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from IPython.core.interactiveshell import InteractiveShell

from hvdlab.collectives.visible import visible
from hvdlab.magics.screens.publisher import in_notebook

_ERASE = "\r\x1b[K"


class StartProgress:
    """One line that is rewritten at each step and gone at the end.

    Args:
        shell: The shell.
        alone: Whether nothing else is shown in this cell, so that its output may be cleared.
    """

    def __init__(self, shell: InteractiveShell, *, alone: bool) -> None:
        self._shell = shell
        self._notebook = in_notebook(shell) and alone
        self._tty = not in_notebook(shell) and sys.stderr.isatty()
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clear()

    def __call__(self, text: str) -> None:
        """Show the next step."""
        if self._notebook or self._tty:
            self._clear()
            self._shown = True
            # Notebooks show stderr in red, as if something had gone wrong; in a terminal stdout is for results.
            stream = sys.stdout if self._notebook else sys.stderr
            stream.write(f"{visible(text)} ..." + ("\n" if self._notebook else ""))
            stream.flush()

    def _clear(self) -> None:
        if not self._shown:
            return
        self._shown = False
        if self._notebook:
            self._shell.display_pub.clear_output(wait=False)  # type: ignore[no-untyped-call]  # IPython has no annotation
        else:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()
