"""What the variables of all ranks are, and where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdlab.collectives.errors import compact_ranks, format_ranks
from hvdlab.collectives.text import visible_lines
from hvdlab.kernel_ext.inspect.messages import Tensor, Tensors, Variable, Variables
from hvdlab.kernel_ext.inspect.table import Cell, Table
from hvdlab.kernel_ext.rank.values import rough_size

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
        """The variables that are not the same on all ranks."""
        return [
            name for name, kinds in self._by_name().items() if len(kinds) > 1 or not self._everywhere(kinds)
        ]

    def _by_name(self) -> dict[str, dict[Variable, list[int]]]:
        """Name to what it is and on which ranks, the most frequent first."""
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

    def table(self) -> Table:
        """A row for each variable, and one for each other value that some ranks have."""
        table = Table(("variable", "type", "value", "size", "ranks"), numbers=("size",))
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
        """Lines about ranks that run a cell, failed or did not answer, and about variables that are not shown."""
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

    def table(self) -> Table:
        """A row for each; ranks that have one alike together."""
        table = Table(
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
