"""Shows what the pool is waiting for while ranks start, and erases it at the end."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from hvdlab.collectives.text import visible
from hvdlab.magics.screens.publisher import CellPublisher, in_notebook

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


class CellImportDisplay:
    """One line of the running cell that names a package while a module of it is imported, and is gone afterwards.

    It has no state, and does not keep results from being pickled.
    """

    @contextmanager
    def importing(self, module: str) -> Iterator[None]:
        """Show that this module's package is imported until the context is left, unless it was imported before."""
        package = module.partition(".")[0]
        shell = None if package in sys.modules else get_ipython()
        text = f"importing {visible(package)} …"
        if shell is not None and in_notebook(shell):
            publisher, area = CellPublisher(shell), f"hvdlab-import-{uuid.uuid4().hex}"
            publisher.display({"text/plain": text}, {}, area)
            try:
                yield
            finally:
                publisher.display({"text/plain": "", "text/html": ""}, {}, area, update=True)
        elif shell is not None and sys.stderr.isatty():
            sys.stderr.write(text)
            sys.stderr.flush()
            try:
                yield
            finally:
                sys.stderr.write(_ERASE)
                sys.stderr.flush()
        else:
            yield
