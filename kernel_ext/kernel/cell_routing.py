"""Routing of a cell of the kernel: to the ranks, to the kernel itself, or first a little here and then there.

:func:`route` is a pure function of the cell's text. Ranks are whole IPython shells, so magics and ``!`` work there; only lines
about the pool, the frontend or the environment that all ranks share run once, in the kernel. An input transformer applies
the route, so that the history keeps the user's text.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass

_OURS = re.compile(r"%(?:hvd_\w+|autohvd|(?:re|un)?load_ext\s+hvdlab)\b")
"""Lines that control hvdlab."""

INSTALLER = re.compile(r"[!%](?:pip3?|conda|mamba|micromamba|uv)\b|!python3?\ -m\ pip\b")
"""Lines that install packages: ranks of a host share the environment, and eight installers would break it."""

_ONCE = re.compile(
    r"""
      %(?:load|loadpy|recall|rep|rerun|edit|history|hist|notebook|save|connect_info|qtconsole|quickref|lsmagic)\b
    | (?:exit|quit)(?:\(\))?\s*$                      # ends the frontend's session
    """,
    re.VERBOSE,
)
"""Lines that are about the frontend, its history or the environment."""

_CELLS_HERE = re.compile(r"%%(?:hvd_\w+|writefile|file|html|HTML|javascript|js|latex|markdown|svg|SVG)\b")
"""Cell magics that run in the kernel: ours, those that write a file, and those that only show the cell in the frontend."""
_KERNELS = "import debugpy;debugpy.listen("
"""The beginning of the code that ipykernel itself runs when its debugger is switched on."""

_LOCAL = re.compile(r"%%local\s*$")
_HELP = re.compile(r"\s*(?:(\?\??)\s*([\w.]+)|([\w.]+)\s*(\?\??))\s*$")
_LOOK = re.compile(r"\s*(?:\?\??\s*[%\w.*]+|[%\w.*]+\s*\?\??)\s*$")


@dataclass(frozen=True, slots=True)
class Help:
    """Request for the documentation of a name: a cell ``name?``, or ``name??`` with ``detail`` 1."""

    name: str
    detail: int


@dataclass(frozen=True, slots=True)
class Route:
    """Parts of a cell by the process that runs them.

    Attributes:
        here: The part that the kernel runs, first.
        ranks: The part that ranks run, with a blank line for each line above it in the cell; empty if there is none.
        first_only: Whether the first rank is enough, since the cell only asks for documentation or for names.
        help: The request to a rank instead, if the cell is only that.
    """

    here: str = ""
    ranks: str = ""
    first_only: bool = False
    help: Help | None = None


def route(cell: str) -> Route:
    """Return which parts of this cell run where."""
    lines = cell.splitlines(keepends=True)
    first = next((index for index, line in enumerate(lines) if line.strip()), None)
    if first is None or cell.startswith(_KERNELS):
        return Route(here=cell)
    head = lines[first].rstrip()
    if _LOCAL.match(head):
        # An empty line in place of the magic keeps the line numbers.
        return Route(here="".join([*lines[:first], "\n", *lines[first + 1 :]]))
    if _CELLS_HERE.match(head) or head.startswith("%%local"):
        return Route(here=cell)
    if len([line for line in lines if line.strip()]) == 1 and _LOOK.match(head):
        return _look(cell, head)
    return _split(cell, lines)


def asks_ranks(cell: str) -> bool:
    """Return whether names in this cell, complete or not, are those of the ranks."""
    where = route(cell)
    return bool(where.ranks) or where.help is not None


def _look(cell: str, line: str) -> Route:
    # On ranks these names only refuse to run: their documentation is in the kernel.
    if re.search(r"%{1,2}(?:hvd_|local\b|autohvd\b)", line):
        return Route(here=cell)
    if match := _HELP.match(line):
        mark = match[1] or match[4]
        return Route(help=Help(match[2] or match[3], len(mark) - 1))
    return Route(ranks=cell, first_only=True)


def _split(cell: str, lines: list[str]) -> Route:
    """Split a cell into the lines at its top that run in the kernel, and the rest."""
    code = (
        index
        for index, line in enumerate(lines)
        if line.strip() and not line.lstrip().startswith("#") and not _done_here(line)
    )
    begin = next(code, None)
    if begin is None:  # nothing for ranks to do: all lines run here, or are comments
        return Route(here=cell)
    if not any(_done_here(line) for line in lines[:begin]):
        return Route(ranks=cell)
    return Route(here="".join(lines[:begin]), ranks="\n" * begin + "".join(lines[begin:]))


def _done_here(line: str) -> bool:
    return bool(_OURS.match(line) or INSTALLER.match(line) or _ONCE.match(line))


class CellRouter(threading.local):
    """Input transformer that replaces a cell by the call that runs it on the ranks.

    Only the cell that the client sent is replaced: code that runs other cells in the kernel's shell means the shell.
    Each thread has its own cell, since subshells run theirs beside that of the main shell.

    Attributes:
        cell: The cell that the client sent.
        options: Options of ``%%hvd_run`` for that cell.
    """

    has_side_effects = True  # IPython then does not try the transformer on cells that are being typed

    def __init__(self) -> None:
        self.cell: str | None = None
        self.options = ""

    def __call__(self, lines: list[str]) -> list[str]:
        # Without the end: IPython adds a line feed to a cell that has none.
        if self.cell is None or "".join(lines).rstrip() != self.cell.rstrip():
            return lines
        return python_of(route("".join(lines)), self.options)


def python_of(where: Route, options: str = "") -> list[str]:
    """Return the lines that the kernel runs for a cell."""
    if where.help is not None:
        return [f"get_ipython().kernel.show_help({where.help.name!r}, {where.help.detail})\n"]
    lines = where.here.splitlines(keepends=True)
    if where.ranks:
        if where.first_only:
            options = f"{options} --ranks 0".strip()
        lines.append(f"get_ipython().run_cell_magic('hvd_run', {options!r}, {where.ranks!r})\n")
    return lines
