"""Finds syntax errors in the kernel, once, instead of on every rank."""

from __future__ import annotations

import ast
import re

from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell

from hvdlab.collectives.errors import HvdlabError
from hvdlab.magics.session import cell_number

_OUR_CELL = re.compile(r"%%(?:hvd_run|hvd_rank|local)\b")


class SourceError(HvdlabError):
    """The cell can not be compiled. Raised as a subclass named like Python's own error."""

    def __init__(self, error: SyntaxError, lines: list[str]) -> None:
        self._lines = lines
        super().__init__(f"{error.msg} (line {error.lineno})")

    def _render_traceback_(self) -> list[str]:
        return self._lines


def check_syntax(shell: InteractiveShell, source: str, line_offset: int) -> None:
    """Compile a cell as a rank would, with IPython's syntax and ``await`` at top level.

    Raises:
        SourceError: The cell does not compile; the line numbers are those of the notebook's cell.
    """
    try:
        # A new manager: the shell's, if the user or %autohvd changed it, would transform the cell a second time.
        manager = TransformerManager()  # type: ignore[no-untyped-call]  # IPython has no annotation
        python = manager.transform_cell(source)
        code = "\n" * line_offset + python
        name = shell.compile.cache(code, cell_number(shell))  # tracebacks call it `Cell In[7]`
        compile(code, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        if error.text is None and error.lineno is not None:
            lines = ("\n" * line_offset + source).splitlines()
            error.text = lines[error.lineno - 1] if error.lineno <= len(lines) else None
        raise _named(shell, error) from None


def _named(shell: InteractiveShell, error: SyntaxError) -> SourceError:
    tb = shell.SyntaxTB
    lines = tb.structured_traceback(type(error), error, None)
    kind: type[SourceError] = type(
        type(error).__name__, (SourceError,), {"__module__": SourceError.__module__}
    )
    return kind(error, lines)


def magic_line_offset(raw: str, magic: str) -> int:
    """How many lines of a notebook's cell stand above the source: the magic line and what is before it.

    ``raw`` is the cell as the user wrote it; without the magic in it (``%autohvd``) there is nothing above.
    """
    match = re.search(rf"^[ \t]*%%{re.escape(magic)}\b", raw, re.MULTILINE)
    return raw[: match.start()].count("\n") + 1 if match else int(not raw)


def give_body(lines: list[str]) -> list[str]:
    """Append an empty line to a cell that is nothing but the first line of a cell magic of hvdlab.

    IPython refuses a cell magic without a body before it calls it, so ``%%hvd_run --help`` alone in a cell would show no help.
    """
    written = [line for line in lines if line.strip()]
    if len(written) != 1 or not _OUR_CELL.match(written[0]):
        return lines
    return [*lines, "\n"]
