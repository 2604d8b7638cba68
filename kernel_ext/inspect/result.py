"""What a comparison of ranks found, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from hvdlab.collectives.errors import compact_ranks, format_ranks
from hvdlab.collectives.text import visible_lines
from hvdlab.kernel_ext.inspect.messages import Difference, Examined, Leaf
from hvdlab.kernel_ext.inspect.table import Cell, Table
from hvdlab.kernel_ext.rank.values import rough_size

MOST_ROWS = 20
"""Rows that are shown."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that have the same value."""

    ranks: tuple[int, ...]
    found: Examined


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One part of a value in which some ranks differ from most.

    Attributes:
        path: Where the part is in the value, such as ``.fc.weight``.
        ranks: The ranks that differ.
        reference: The ranks that they are compared with: the largest group that agrees.
        what: In what they differ: ``values`` (of an array), ``value``, ``type``, ``dtype``, ``shape``, ``device``,
            ``requires_grad``, ``missing`` (these ranks do not have it), ``only there`` (the others do not have it).
        leaf, expected: What these ranks and the others have; None if nothing.
        count: Elements that differ, bit by bit; 1 of a long text.
        first: Index of the first of them, or number of the first character that differs.
        here, there: Its value on these ranks, and on the others.
        largest: Largest absolute difference.
        relative: Largest difference relative to the larger of the two magnitudes.
        not_finite: Numbers of NaN and infinite elements on these ranks.
        expected_not_finite: The same numbers on the others.
    """

    path: str
    ranks: tuple[int, ...]
    reference: tuple[int, ...]
    what: tuple[str, ...]
    leaf: Leaf | None = None
    expected: Leaf | None = None
    count: int = 0
    first: tuple[int, ...] | None = None
    here: str = ""
    there: str = ""
    largest: float | None = None
    relative: float | None = None
    not_finite: tuple[int, int] = (0, 0)
    expected_not_finite: tuple[int, int] = (0, 0)

    @property
    def comparable(self) -> bool:
        """Whether there are elements, or characters of long texts, to be compared one by one."""
        a, b = self.leaf, self.expected
        if a is None or b is None or (a.kind, a.dtype) != (b.kind, b.dtype):
            return False
        if a.kind == "value":
            return "value" in self.what and a.type == b.type and bool(a.nbytes and b.nbytes)
        return a.kind == "array" and "values" in self.what and a.shape == b.shape

    @property
    def is_text(self) -> bool:
        """Whether ``first`` is the number of a character of a long text, and ``here`` and ``there`` what follows from it on."""
        return self.leaf is not None and self.leaf.kind == "value"

    def with_elements(
        self, found: Difference, odd: tuple[int, int], expected_odd: tuple[int, int]
    ) -> DiffRow:
        """A copy of this row with what the comparison of the elements found."""
        shape = self.leaf.shape if self.leaf is not None else ()
        index = tuple(int(n) for n in np.unravel_index(found.first, shape)) if found.count and shape else None
        if self.is_text and found.count:
            index = (found.first,)
        return replace(
            self,
            count=found.count,
            first=index,
            here=found.here,
            there=found.there,
            largest=found.largest,
            relative=found.relative,
            not_finite=odd,
            expected_not_finite=expected_odd,
        )


def larger(a: Difference, b: Difference, element: int) -> Difference:
    """Both together; ``b`` is of elements from number ``element`` on, behind those of ``a``."""
    if not b.count:
        return a
    begin = a if a.count else Difference(1, b.first + element, b.here, b.there)
    most = [value for value in (a.largest, b.largest) if value is not None]
    relative = [value for value in (a.relative, b.relative) if value is not None]
    return Difference(
        a.count + b.count,
        begin.first,
        begin.here,
        begin.there,
        max(most, default=None),
        max(relative, default=None),
    )


@dataclass(frozen=True)
class Diff:
    """A value compared over ranks.

    Attributes:
        name: The expression, or what else was compared.
        groups: Groups of ranks that agree, the largest first; ranks where the value can't be had come last.
        rows: What differs, in the order in which it is in the value.
    """

    name: str
    groups: tuple[Group, ...]
    rows: tuple[DiffRow, ...] = ()

    @property
    def agree(self) -> bool:
        """Whether all ranks have the same value. False, too, where a part of it could not be compared: see ``whole``."""
        return len(self.groups) == 1 and not self.groups[0].found.error and self.whole

    @property
    def whole(self) -> bool:
        """Whether all parts of the value could be compared; if not, there may be differences that were not found."""
        return not any(group.found.unknown or group.found.left_out for group in self.groups)

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that differ from most."""
        return tuple(sorted(rank for group in self.groups[1:] for rank in group.ranks))

    def headline(self) -> str:
        """One sentence: which ranks agree, and which differ."""
        first, *rest = self.groups
        if first.found.error:
            return f"{self.name}: no rank has it"
        head = f"{self.name}: {format_ranks(first.ranks)}"
        others = [group.ranks for group in rest if not group.found.error]
        missed = _missed(group.found for group in self.groups)
        if not others and len(first.ranks) == 1:
            return f"{head} has it ({_size(first.found)})"
        if not others:
            return (
                f"{self.name}: no difference found on {format_ranks(first.ranks)}, {missed} ({_size(first.found)})"
                if missed
                else f"{head} agree ({_size(first.found)})"
            )
        if len(first.ranks) == 1:
            return f"{self.name}: all ranks differ: {' · '.join(map(compact_ranks, (first.ranks, *others)))}"
        differ = "; ".join(
            f"{format_ranks(ranks)} {'differ' if len(ranks) > 1 else 'differs'}" for ranks in others
        )
        if missed:
            return f"{self.name}: no difference found among {format_ranks(first.ranks)}, {missed} ({_size(first.found)}); {differ}"
        return f"{head} agree ({_size(first.found)}); {differ}"

    def notes(self) -> list[str]:
        """Lines about errors, about parts that were not compared, and about rows that are not shown."""
        found = [f"{format_ranks(g.ranks)}: {g.found.error}" for g in self.groups if g.found.error]
        most = max((group.found for group in self.groups), key=lambda found: found.unknown)
        if most.unknown:
            named = ", ".join(most.unknown_parts)
            more = most.unknown - len(most.unknown_parts)
            found.append(f"not compared: {named}{f' and {more} more' if more else ''}")
        if left_out := max(group.found.left_out for group in self.groups):
            found.append(
                f"{left_out} parts were not looked at, since there are too many; compare a part of it"
            )
        if (rest := len(self.rows) - MOST_ROWS) > 0:
            found.append(f"{rest} more differ; `.rows` has all")
        return found

    def table(self) -> Table:
        """What differs, as a table; the differing ranks and their values are marked."""
        head = (
            "part",
            "ranks",
            "differs in",
            "first at",
            "there",
            "elsewhere",
            "differing",
            "largest",
            "relative",
        )
        table = Table((*head, "NaN", "Inf"), numbers=("largest", "relative", "NaN", "Inf"))
        for row in self.rows[:MOST_ROWS]:
            table.add(_cells(self.name, row, sum(len(group.ranks) for group in self.groups)))
        return table

    def __repr__(self) -> str:
        lines = [self.headline()]
        if self.rows:
            lines += [f"  {line}" for line in self.table().lines()]
        return visible_lines("\n".join([*lines, *(f"  {note}" for note in self.notes())]))

    def _repr_html_(self) -> str:
        return self.table().html(self.headline(), self.notes())


class Diffs(tuple[Diff, ...]):
    """Comparisons of several values, in the order in which they were asked for."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self))

    def _repr_html_(self) -> str:
        return "\n".join(one._repr_html_() for one in self)


def _missed(found: Iterable[Examined]) -> str:
    """``1 part not compared``: how much was not looked at; empty if all was."""
    count = max(one.unknown + one.left_out for one in found)
    return f"{count:,} {'part' if count == 1 else 'parts'} not compared" if count else ""


def _size(found: Examined) -> str:
    if not found.arrays:
        return found.type_name
    tensors = "1 array" if found.arrays == 1 else f"{found.arrays} arrays"
    return f"{found.type_name}, {tensors}, {rough_size(found.nbytes)}"


def _who(row: DiffRow, ranks: int) -> str:
    """The differing ranks, and the ranks that they are compared with unless these are all the others."""
    odd = compact_ranks(row.ranks)
    return (
        odd
        if len(row.ranks) + len(row.reference) == ranks
        else f"{odd} against {compact_ranks(row.reference)}"
    )


def _cells(name: str, row: DiffRow, ranks: int) -> list[Cell]:
    elements = (
        f"{row.count:,} of {row.leaf.nbytes // row.leaf.itemsize:,}"
        if row.leaf and row.count and not row.is_text
        else ""
    )
    here, there = _values(row)
    return [
        Cell(
            f"{name}{row.path}"
            if not name.startswith(("rng", "environment"))
            else row.path.lstrip(".") or name
        ),
        Cell(_who(row, ranks), marked=True),
        Cell(", ".join(row.what)),
        Cell(str(list(row.first)) if row.first is not None else ""),
        Cell(here, marked=True),
        Cell(there),
        Cell(elements),
        Cell(_number(row.largest)),
        Cell(_number(row.relative)),
        *(_odd(a, b) for a, b in zip(row.not_finite, row.expected_not_finite, strict=True)),
    ]


def _values(row: DiffRow) -> tuple[str, str]:
    if row.count:
        return row.here, row.there
    return _described(row.leaf, row.what), _described(row.expected, row.what)


def _described(leaf: Leaf | None, what: tuple[str, ...]) -> str:
    """A leaf in words, as far as it matters for the difference."""
    if leaf is None:
        return "nothing"
    if leaf.kind != "array":
        text = leaf.text or leaf.type
        return f"{leaf.type}: {text}" if "type" in what and text != leaf.type else text
    parts = [f"{leaf.dtype}{list(leaf.shape)}"]
    if "device" in what:
        parts.append(leaf.device)
    if "requires_grad" in what:
        parts.append(f"requires_grad={leaf.requires_grad}")
    if "type" in what:
        parts.insert(0, leaf.type)
    return " ".join(parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _odd(here: int, there: int) -> Cell:
    if not here and not there:
        return Cell("")
    return Cell(f"{here:,}" if here == there else f"{here:,} (elsewhere {there:,})", marked=here != there)
