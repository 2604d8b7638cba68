"""Sends cells to the ranks: an input transformer, so that the history keeps what the user wrote."""

from __future__ import annotations

from hvdlab.kernel_ext.spmd.routing import Route, route


class CellRouter:
    """Puts the call that runs a cell on the ranks in the place of the cell.

    It does so only for the cell that the client sent: code that runs other cells in the kernel's shell means the shell.

    Attributes:
        cell: The cell that the client sent.
        options: Options of ``%%hvd_run`` for that cell.
    """

    has_side_effects = True  # IPython then does not try the transformer on cells that are being typed

    def __init__(self) -> None:
        self.cell: str | None = None
        self.options = ""

    def __call__(self, lines: list[str]) -> list[str]:
        if self.cell is None or "".join(lines).rstrip() != self.cell.rstrip():
            return lines
        return python_of(route("".join(lines)), self.options)


def python_of(where: Route, options: str = "") -> list[str]:
    """The lines that the kernel runs for a cell."""
    if where.help is not None:
        return [f"get_ipython().kernel.show_help({where.help.name!r}, {where.help.detail})\n"]
    lines = where.here.splitlines(keepends=True)
    if where.ranks:
        if where.first_only:
            options = f"{options} --ranks 0".strip()
        lines.append(f"get_ipython().run_cell_magic('hvd_run', {options!r}, {where.ranks!r})\n")
    return lines
