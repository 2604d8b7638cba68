"""A table for terminals and for notebooks."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvdlab.collectives.text import visible
from hvdlab.kernel_ext.output.values import in_output

WIDEST = 60
"""Characters of a cell that are shown."""

# A left border and bold letters, so that a mark is more than a colour; readable on light and dark backgrounds.
_MARK = "font-weight: bold; box-shadow: inset 3px 0 #d97706; padding-left: 8px"


@dataclass(frozen=True, slots=True)
class Cell:
    """Text; ``marked`` is what the reader should see first."""

    text: str
    marked: bool = False


class Table:
    """Rows of cells; columns without any text are not shown.

    Args:
        head: Names of the columns.
        numbers: Columns with numbers, which are aligned to the right.
    """

    def __init__(self, head: Sequence[str], *, numbers: Collection[str] = ()) -> None:
        self._head, self._numbers = tuple(head), frozenset(numbers)
        self.rows: list[tuple[Cell, ...]] = []

    def add(self, row: Sequence[Cell]) -> None:
        """Add a row, with a cell for each column."""
        self.rows.append(tuple(Cell(_shortened(cell.text), cell.marked) for cell in row))

    def _shown(self) -> list[int]:
        return [n for n in range(len(self._head)) if any(row[n].text for row in self.rows)]

    def lines(self) -> list[str]:
        """The table as lines of text."""
        shown = self._shown()
        rows = [[self._head[n] for n in shown], *([row[n].text for n in shown] for row in self.rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(shown))]
        right = [self._head[n] in self._numbers for n in shown]
        return [
            "  ".join(
                text.rjust(width) if to_right else text.ljust(width)
                for text, width, to_right in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in rows
        ]

    def html(self, headline: str, notes: Sequence[str] = ()) -> str:
        """The table as HTML, below a headline and above notes."""
        parts = [f"<div><b>{html.escape(headline)}</b></div>"]
        if self.rows:
            shown = self._shown()
            head = "".join(f'<th scope="col" style="{self._align(n)}">{self._head[n]}</th>' for n in shown)
            body = "".join(
                "<tr>" + "".join(self._cell(row[n], n) for n in shown) + "</tr>" for row in self.rows
            )
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        parts += [f'<div style="opacity: 0.75">{html.escape(note)}</div>' for note in notes]
        return in_output("\n".join(parts))

    def _cell(self, cell: Cell, column: int) -> str:
        marked = f"; {_MARK}" if cell.marked and cell.text else ""
        return f'<td style="{self._align(column)}{marked}">{html.escape(cell.text)}</td>'

    def _align(self, column: int) -> str:
        return f"text-align: {'right' if self._head[column] in self._numbers else 'left'}"


def _shortened(text: str) -> str:
    return visible(text[: WIDEST + 1].replace("\n", "⏎"), WIDEST)
