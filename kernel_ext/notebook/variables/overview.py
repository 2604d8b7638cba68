"""Variables of ranks as tables and as objects.

The table of all ranks' variables marks the places where they differ. ``pool.ranks[3].model.fc.weight`` describes a value, and does not
move it.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, SupportsIndex, overload

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError
from hvdlab.collectives.text import compact_ranks, format_ranks, visible, visible_lines
from hvdlab.kernel_ext.notebook.cells.results import in_output
from hvdlab.kernel_ext.wire.compare import Tensor, Tensors, Variable, Variables, VariableView
from hvdlab.kernel_ext.wire.status import UserNames
from hvdlab.kernel_ext.wire.values import rough_size

WIDEST = 60
"""Characters of a cell that are shown."""

# A left border and bold letters, so that a mark is more than a colour; readable on light and dark backgrounds.
_MARK = "font-weight: bold; box-shadow: inset 3px 0 #d97706; padding-left: 8px"


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell of a table; the reader should see a ``marked`` one first."""

    text: str
    marked: bool = False


class TextTable:
    """Rows of cells; columns without any text are not shown.

    Args:
        head: UserNames of the columns.
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
        """Return the table as lines of text."""
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
        """Return the table as HTML, below a headline and above notes."""
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
    # Cut first: the text of a cell can be far longer than its column.
    return visible(text[: WIDEST + 1].replace("\n", "⏎"), WIDEST)


BUDGET = 256 << 20
"""Bytes of arrays on a rank that an overview makes fingerprints of."""

MOST_ROWS = 60
MOST_KINDS = 4
"""Different values of a variable that are shown."""


@dataclass(frozen=True)
class Overview:
    """The variables of ranks.

    Attributes:
        ranks: Rank to its variables; those that did not answer are missing.
        silent: The ranks that did not answer.
    """

    ranks: Mapping[int, Variables]
    silent: tuple[int, ...] = ()

    @property
    def differing(self) -> list[str]:
        """Return the variables that are not the same on all ranks."""
        return [
            name for name, kinds in self._by_name().items() if len(kinds) > 1 or not self._everywhere(kinds)
        ]

    def _by_name(self) -> dict[str, dict[Variable, list[int]]]:
        """Return each name with its kinds of value, the most frequent first, and the ranks of each."""
        found: dict[str, dict[Variable, list[int]]] = {}
        for rank, answer in sorted(self.ranks.items()):
            for variable in answer.variables:
                found.setdefault(variable.name, {}).setdefault(variable, []).append(rank)
        return {
            name: dict(sorted(kinds.items(), key=lambda one: (-len(one[1]), one[1])))
            for name, kinds in found.items()
        }

    def _everywhere(self, kinds: Mapping[Variable, list[int]]) -> bool:
        return sum(map(len, kinds.values())) == len(self.ranks)

    def table(self) -> TextTable:
        """Return a row for each variable, and one for each other value that some ranks have."""
        table = TextTable(("variable", "type", "value", "size", "ranks"), numbers=("size",))
        for name, kinds in self._by_name().items():
            same = len(kinds) == 1 and self._everywhere(kinds)
            for number, (variable, ranks) in enumerate(list(kinds.items())[:MOST_KINDS]):
                who = "alike" if variable.digest else "not compared"
                odd = number > 0 or (len(kinds) == 1 and not same)
                table.add(
                    [
                        Cell(name if number == 0 else ""),
                        Cell(variable.type),
                        Cell(_distinct_text(variable, kinds)),
                        Cell(rough_size(variable.nbytes)),
                        Cell(who if same else compact_ranks(ranks), marked=odd),
                    ]
                )
            if len(kinds) > MOST_KINDS:
                table.add(
                    [Cell(""), Cell(""), Cell(f"… {len(kinds) - MOST_KINDS} more values"), Cell(""), Cell("")]
                )
            if len(table.rows) >= MOST_ROWS:
                break
        return table

    def notes(self) -> list[str]:
        """Return lines about ranks that run a cell, failed or did not answer, and about variables that are not shown."""
        busy = [rank for rank, answer in self.ranks.items() if answer.cell]
        failed = {rank: answer.error for rank, answer in self.ranks.items() if answer.error}
        notes = (
            [
                f"{format_ranks(busy)} {'is' if len(busy) == 1 else 'are'} running a cell, so it may be changing"
            ]
            if busy
            else []
        )
        notes += [f"rank {rank}: {error}" for rank, error in failed.items()]
        notes += [f"{format_ranks(list(self.silent))}: no answer"] if self.silent else []
        names = list(self._by_name())
        shown = len({row[0].text for row in self.table().rows} - {""})
        return [*notes, *([f"{len(names) - shown} more variables"] if shown < len(names) else [])]

    def headline(self) -> str:
        names = self._by_name()
        differing = len(self.differing)
        how = f", {differing} of them not alike" if differing else ""
        return (
            f"{len(names)} variable{'' if len(names) == 1 else 's'} on {format_ranks(list(self.ranks))}{how}"
        )

    def __repr__(self) -> str:
        if not self.ranks:
            return "no rank answered"
        notes = [visible_lines(note) for note in self.notes()]
        return "\n".join([self.headline(), *(f"  {line}" for line in self.table().lines()), *notes])

    def _repr_html_(self) -> str:
        return self.table().html(self.headline(), self.notes()) if self.ranks else "no rank answered"


def _distinct_text(variable: Variable, kinds: Mapping[Variable, Sequence[int]]) -> str:
    """Return the variable's text, or how it relates to a value in a row above that looks the same."""
    for other, ranks in kinds.items():
        if other is variable:
            break
        if (other.type, other.text) == (variable.type, variable.text):
            diff = f"`%hvd_diff {variable.name}`"
            if other.digest and variable.digest:
                return f"differs from rank {ranks[0]}'s: {diff} shows where"
            return f"not compared with rank {ranks[0]}'s: {diff} does so"
    return variable.text


@dataclass(frozen=True)
class TensorTable:
    """The largest arrays and tensors of ranks, by memory.

    Attributes:
        ranks: Rank to its arrays.
    """

    ranks: Mapping[int, Tensors]

    def table(self) -> TextTable:
        """Return a row for each; ranks that have one alike together."""
        table = TextTable(
            ("tensor", "dtype", "shape", "device", "number", "memory", "ranks"), numbers=("memory", "number")
        )
        alike: dict[Tensor, list[int]] = {}
        for rank, answer in sorted(self.ranks.items()):
            for tensor in answer.tensors:
                alike.setdefault(tensor, []).append(rank)
        everyone = len(self.ranks)
        for tensor, ranks in sorted(alike.items(), key=lambda one: -one[0].nbytes):
            table.add(
                [
                    Cell(tensor.name or "(no name)"),
                    Cell(tensor.dtype),
                    Cell(str(list(tensor.shape))),
                    Cell(tensor.device),
                    Cell(str(tensor.count) if tensor.count > 1 else ""),
                    Cell(rough_size(tensor.nbytes)),
                    Cell(
                        "all" if len(ranks) == everyone else compact_ranks(ranks),
                        marked=len(ranks) < everyone,
                    ),
                ]
            )
        return table

    def headline(self) -> str:
        totals = {
            rank: f"{answer.count} in {rough_size(answer.nbytes)}" for rank, answer in self.ranks.items()
        }
        if len(set(totals.values())) == 1:
            return (
                f"arrays and tensors: {next(iter(totals.values()))} on each of {format_ranks(list(totals))}"
            )
        return "arrays and tensors: " + ", ".join(
            f"rank {rank}: {text}" for rank, text in sorted(totals.items())
        )

    def __repr__(self) -> str:
        return "\n".join([self.headline(), *(f"  {line}" for line in self.table().lines())])

    def _repr_html_(self) -> str:
        return self.table().html(self.headline())


class VariableSource(Protocol):
    """A pool, as far as views of its ranks need it."""

    def names(self, ranks: Sequence[int] | None = None) -> dict[int, UserNames]: ...
    def view(self, expression: str, ranks: Sequence[int] | None = None) -> dict[int, VariableView]: ...
    def pull(self, name: str, ranks: Sequence[int] | None = None) -> dict[int, Any]: ...


class Ranks(tuple[int, ...]):
    """The ranks of a pool, as numbers; an index is not a position but a rank, and gives a view of its variables."""

    _pool: VariableSource

    def __new__(cls, ranks: Iterable[int], pool: VariableSource) -> Self:
        made = super().__new__(cls, ranks)
        made._pool = pool
        return made

    def __reduce__(self) -> tuple[type, tuple[tuple[int, ...]]]:
        return tuple, (tuple(self),)  # a copy is just numbers

    @overload  # type: ignore[override]  # said above
    def __getitem__(self, index: SupportsIndex, /) -> RankView: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[int, ...]: ...
    def __getitem__(  # pyright: ignore[reportIncompatibleMethodOverride]  # as above
        self, index: SupportsIndex | slice, /
    ) -> RankView | tuple[int, ...]:
        if isinstance(index, slice):
            return super().__getitem__(index)
        rank = index.__index__()
        if rank not in self:
            raise IndexError(f"there is no rank {rank}; the pool has {format_ranks(self)}")
        return RankView(self._pool, rank)


class RankView:
    """A rank: its variables are attributes, or items; called with an expression it returns the view of that value.

    As an index or in a comparison it counts as the rank's number.
    """

    def __init__(self, pool: VariableSource, rank: int) -> None:
        self._pool, self._rank = pool, rank

    def __getattr__(self, name: str) -> ValueView:
        if name.startswith("_"):
            raise AttributeError(name)  # notebooks ask any object for such names
        return ValueView(self._pool, self._rank, name)

    def __getitem__(self, name: str) -> ValueView:
        return self(name)

    def __call__(self, expression: str) -> ValueView:
        return ValueView(self._pool, self._rank, expression)

    def __index__(self) -> int:
        return self._rank

    def __eq__(self, other: object) -> bool:
        return int(other) == self._rank if isinstance(other, (int, RankView)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._rank)

    def __dir__(self) -> Iterable[str]:
        try:
            return self._names()
        except HvdlabError:  # the rank is gone; completion has nothing to offer
            return []

    def _names(self) -> list[str]:
        found = self._pool.names([self._rank]).get(self._rank)
        return list(found.variables) if found is not None else []

    def __repr__(self) -> str:
        try:
            names = [visible(name) for name in self._names()]
        except HvdlabError as error:
            return f"<rank {self._rank}: {error}>"
        more = f", … {len(names) - 10} more" if len(names) > 10 else ""
        return f"<rank {self._rank}: {', '.join(names[:10]) + more if names else 'no variables'}>"


class ValueView:
    """A value of a rank. Attributes and items are views in turn; :meth:`pull` brings the value itself here."""

    def __init__(self, pool: VariableSource, rank: int, expression: str) -> None:
        self._pool, self._rank, self._expression = pool, rank, expression

    def pull(self) -> Any:
        """Return the value itself, brought to this process. Raises ``LookupError`` as :meth:`Pool.pull` does."""
        return self._pool.pull(self._expression, [self._rank])[self._rank]

    def __getattr__(self, name: str) -> ValueView:
        if name.startswith("_"):
            raise AttributeError(name)
        return ValueView(self._pool, self._rank, f"{self._expression}.{name}")

    def __getitem__(self, key: object) -> ValueView:
        if not _plain(key):
            raise InvalidRequestError(
                f"an item of a value on a rank is chosen by a number, a text or a slice, not {type(key).__name__}"
            )
        return ValueView(self._pool, self._rank, f"({self._expression})[{key!r}]")

    def __dir__(self) -> Iterable[str]:
        found = self._pool.view(self._expression, [self._rank]).get(self._rank)
        return ["pull", *(found.names if found is not None else ())]

    def __repr__(self) -> str:
        found = self._pool.view(self._expression, [self._rank]).get(self._rank)
        return "\n".join(
            [f"rank {self._rank}: {visible(self._expression)}", *(f"  {line}" for line in lines_of(found))]
        )


def lines_of(view: VariableView | None) -> Sequence[str]:
    """Return a rank's answer about a value, as lines."""
    if view is None:
        return ["the rank does not answer"]
    if view.error:
        return [visible_lines(view.error)]
    return [
        *(visible_lines(line) for line in view.lines),
        *(["(a cell is running, so it may be changing)"] if view.cell else []),
    ]


def _plain(key: object) -> bool:
    if isinstance(key, tuple):
        return all(map(_plain, key))
    if isinstance(key, slice):
        return all(map(_plain, (key.start, key.stop, key.step)))
    return key is None or key is Ellipsis or type(key) in (int, str, float, bool, bytes)
