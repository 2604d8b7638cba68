"""A variable compared over the ranks, and the result as data and as a table.

Ranks send fingerprints first, and then compare the elements of the parts that differ themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hvdlab.bindings.fingerprints import SIZE, differing
from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.text import compact_ranks, format_ranks, visible_lines
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.requests import RankRequests
from hvdlab.kernel_ext.notebook.variables.overview import Cell, TextTable
from hvdlab.kernel_ext.wire.channel import RankReply, RankRequest
from hvdlab.kernel_ext.wire.compare import (
    AskBlocks,
    AskLeaves,
    Blocks,
    Compare,
    Compared,
    ComparisonOpened,
    Difference,
    Gather,
    Leaf,
    LeafList,
    OpenComparison,
    Range,
    family,
    same_key,
    with_host_digest,
)
from hvdlab.kernel_ext.wire.values import NOT_SHARED, Acked, ReleaseTransfer, TransferChunk, rough_size

MOST_ROWS = 20
"""Rows that are shown."""


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """Ranks that have the same value."""

    ranks: tuple[int, ...]
    found: ComparisonOpened


@dataclass(frozen=True, slots=True)
class DiffRow:
    """Part of a value in which some ranks differ from most.

    Attributes:
        path: Place of the part in the value, such as ``.fc.weight``.
        ranks: The ranks that differ.
        reference: The ranks that they are compared with: the largest group that agrees.
        what: The kinds of difference: ``values`` (of an array), ``value``, ``type``, ``dtype``, ``shape``, ``device``,
            ``requires_grad``, ``missing`` (these ranks do not have it), ``only there`` (the others do not have it).
        leaf, expected: The part on these ranks, and on the others; None where there is none.
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
        """Return whether there are elements, or characters of long texts, to be compared one by one."""
        a, b = self.leaf, self.expected
        if a is None or b is None or (a.kind, a.dtype) != (b.kind, b.dtype):
            return False
        if a.kind == "value":
            return "value" in self.what and a.type == b.type and bool(a.nbytes and b.nbytes)
        return a.kind == "array" and "values" in self.what and a.shape == b.shape

    @property
    def is_text(self) -> bool:
        """Return whether ``first`` is the number of a character of a long text, from which on ``here`` and ``there`` have the text."""
        return self.leaf is not None and self.leaf.kind == "value"

    def with_elements(
        self, found: Difference, odd: tuple[int, int], expected_odd: tuple[int, int]
    ) -> DiffRow:
        """Return a copy of this row with the result of the comparison of the elements."""
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
    """Result of comparing a value over ranks.

    Attributes:
        name: The expression, or the special subject (``rng``, ``environment``).
        groups: Groups of ranks that agree, the largest first; ranks whose value can't be read come last.
        rows: The differing parts, in their order in the value.
    """

    name: str
    groups: tuple[ValueGroup, ...]
    rows: tuple[DiffRow, ...] = ()

    @property
    def agree(self) -> bool:
        """Return whether all ranks have the same value. False, too, where a part of it could not be compared: see ``whole``."""
        return len(self.groups) == 1 and not self.groups[0].found.error and self.whole

    @property
    def whole(self) -> bool:
        """Return whether all parts of the value could be compared; if not, there may be differences that were not found."""
        return not any(group.found.unknown or group.found.left_out for group in self.groups)

    @property
    def odd(self) -> tuple[int, ...]:
        """Return the ranks that differ from most."""
        return tuple(sorted(rank for group in self.groups[1:] for rank in group.ranks))

    def headline(self) -> str:
        """Return one sentence: which ranks agree, and which differ."""
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
        """Return lines about errors, about parts that were not compared, and about rows that are not shown."""
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

    def table(self) -> TextTable:
        """Return the differences as a table; the differing ranks and their values are marked."""
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
        table = TextTable((*head, "NaN", "Inf"), numbers=("largest", "relative", "NaN", "Inf"))
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


def _missed(found: Iterable[ComparisonOpened]) -> str:
    """``1 part not compared``: how much was not looked at; empty if all was."""
    count = max(one.unknown + one.left_out for one in found)
    return f"{count:,} {'part' if count == 1 else 'parts'} not compared" if count else ""


def _size(found: ComparisonOpened) -> str:
    if not found.arrays:
        return found.type_name
    tensors = "1 array" if found.arrays == 1 else f"{found.arrays} arrays"
    return f"{found.type_name}, {tensors}, {rough_size(found.nbytes)}"


def _who(row: DiffRow, ranks: int) -> str:
    """Return the differing ranks, and the ranks that they are compared with unless these are all the others."""
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
    """Return a leaf in words, as far as it matters for the difference."""
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


SHARED_BYTES = 32 << 20
"""Bytes that one rank shows others of its host at a time."""

SENT_BYTES = 8 << 20
LOST = "it is lost"


def diff(
    questions: RankRequests,
    expression: str,
    ranks: Sequence[int],
    *,
    special: str = "",
    near: Collection[int] = (),
) -> Diff:
    """Compare the value of an expression over ranks; ``near`` are those that can look into each other's memory.

    Raises:
        HvdlabError: A rank was lost meanwhile, or could not go on with the comparison.
    """
    transfers: list[int] = []

    def make(ticket: int) -> RankRequest:
        transfers.append(ticket)
        return OpenComparison(ticket, expression, special)

    try:
        answers = questions.ask(make, ranks, Deadline(None))
        found = {
            rank: answer
            if isinstance(answer := answers.get(rank), ComparisonOpened)
            else ComparisonOpened(0, error=LOST)
            for rank in ranks
        }
        groups = _groups(found)
        comparison = _Comparison(questions, transfers[0], groups, near)
        return Diff(special or expression, groups, tuple(comparison.rows()))
    finally:
        # Also after an interrupt: ranks keep the values that they compare until these are released.
        for transfer_id in transfers:
            questions.send(ReleaseTransfer(transfer_id), ranks)


def _groups(found: Mapping[int, ComparisonOpened]) -> tuple[ValueGroup, ...]:
    """Groups of ranks that agree, the largest first; ranks with an error come last."""
    ranks: dict[tuple[bytes, str], list[int]] = {}
    for rank, answer in sorted(found.items()):
        ranks.setdefault((answer.digest, answer.error), []).append(rank)
    largest_first = sorted(
        ranks.values(), key=lambda alike: (bool(found[alike[0]].error), -len(alike), alike[0])
    )
    return tuple(ValueGroup(tuple(alike), found[alike[0]]) for alike in largest_first)


@dataclass(slots=True)
class _Pair:
    """An array of one rank that is compared with another's: rank and number of the leaf, here and there."""

    row: int
    here: tuple[int, int]
    there: tuple[int, int]
    total: Difference = field(default_factory=lambda: Difference(0))


class _Comparison:
    """Comparison of groups, one rank standing for each."""

    def __init__(
        self, questions: RankRequests, transfer_id: int, groups: Sequence[ValueGroup], near: Collection[int]
    ) -> None:
        self._questions, self._transfer_id = questions, transfer_id
        self._groups = [group for group in groups if not group.found.error]
        self._leaves: dict[int, dict[str, tuple[int, Leaf]]] = {}
        self._share = {group.ranks[0] for group in self._groups} <= set(near)
        self._rows: list[DiffRow] = []
        self._pairs: list[_Pair] = []

    def rows(self) -> list[DiffRow]:
        """Return a row for each part that differs, in the order of the largest group's value."""
        if len(self._groups) < 2:
            return []
        for group in self._groups:
            self._leaves[group.ranks[0]] = self._ask_leaves(group)
        paths = dict.fromkeys(path for leaves in self._leaves.values() for path in leaves)
        self._to_one_method(paths)
        for path in paths:
            self._look_at(path)
        if self._pairs:
            self._compare_elements()
        return self._rows

    def _ask_leaves(self, group: ValueGroup) -> dict[str, tuple[int, Leaf]]:
        rank, all_leaves = group.ranks[0], list[Leaf]()
        while len(all_leaves) < group.found.leaves:
            first = len(all_leaves)
            answer = self._ask(lambda ticket: AskLeaves(ticket, self._transfer_id, first), [rank])[rank]  # noqa: B023
            # An empty list counts as a failure: the loop would ask for ever.
            if not isinstance(answer, LeafList) or not answer.leaves:
                raise _broken(rank, answer)
            all_leaves += answer.leaves
        by_path: dict[str, tuple[int, Leaf]] = {}
        for number, leaf in enumerate(all_leaves):
            path, again = leaf.path, 1
            while path in by_path:  # keys that look the same in a path
                again += 1
                path = f"{leaf.path}#{again}"
            by_path[path] = number, leaf
        return by_path

    def _to_one_method(self, paths: Iterable[str]) -> None:
        """Have arrays that only some ranks have on a device read on the host there, too: the device's fingerprints are made by another method."""
        wanted: dict[int, list[str]] = {}
        for path in paths:
            arrays = {
                rank: leaves[path][1]
                for rank, leaves in self._leaves.items()
                if path in leaves and leaves[path][1].kind == "array"
            }
            if len({leaf.on_device for leaf in arrays.values()}) > 1:
                for rank, leaf in arrays.items():
                    if leaf.on_device:
                        wanted.setdefault(rank, []).append(path)
        if not wanted:
            return
        asked = {rank: tuple(self._leaves[rank][path][0] for path in found) for rank, found in wanted.items()}
        answers = self._ask(
            lambda ticket: AskBlocks(ticket, self._transfer_id, asked, on_host=True), list(asked)
        )
        for rank, found in wanted.items():
            answer = answers[rank]
            if not isinstance(answer, Blocks):
                raise _broken(rank, answer)
            for path, blocks in zip(found, answer.digests, strict=True):
                number, leaf = self._leaves[rank][path]
                self._leaves[rank][path] = number, with_host_digest(leaf, blocks)

    def _look_at(self, path: str) -> None:
        """Add a row for each group of ranks whose part at ``path`` is another than that of most ranks."""
        alike: dict[object, list[ValueGroup]] = {}
        for group in self._groups:
            place = self._leaves[group.ranks[0]].get(path)
            alike.setdefault(None if place is None else same_key(place[1]), []).append(group)
        if len(alike) < 2:
            return
        most, *odd = sorted(
            alike.values(), key=lambda one: (-sum(len(g.ranks) for g in one), min(g.ranks[0] for g in one))
        )
        reference = most[0].ranks[0]
        for groups in odd:
            rank = groups[0].ranks[0]
            here, there = self._leaves[rank].get(path), self._leaves[reference].get(path)
            what = _what(here and here[1], there and there[1])
            row = DiffRow(path, _ranks(groups), _ranks(most), what, here and here[1], there and there[1])
            if here is not None and there is not None and row.comparable:
                self._pairs.append(_Pair(len(self._rows), (rank, here[0]), (reference, there[0])))
            self._rows.append(row)

    # -- elements -----------------------------------------------------------------------------------------------------

    def _compare_elements(self) -> None:
        wanted: dict[int, dict[int, None]] = {}
        for pair in self._pairs:
            for rank, leaf in (pair.here, pair.there):
                wanted.setdefault(rank, {})[leaf] = None
        asked = {rank: tuple(leaves) for rank, leaves in wanted.items()}
        answers = self._ask(lambda ticket: AskBlocks(ticket, self._transfer_id, asked), list(asked))
        digests: dict[tuple[int, int], bytes] = {}
        odd: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, leaves in asked.items():
            answer = answers[rank]
            if not isinstance(answer, Blocks):
                raise _broken(rank, answer)
            for leaf, digest, nans, infs in zip(
                leaves, answer.digests, answer.nans, answer.infs, strict=True
            ):
                digests[rank, leaf], odd[rank, leaf] = digest, (nans, infs)
        for rank in sorted({pair.there[0] for pair in self._pairs}):
            self._against(rank, [pair for pair in self._pairs if pair.there[0] == rank], digests)
        for pair in self._pairs:
            self._rows[pair.row] = self._rows[pair.row].with_elements(
                pair.total, odd[pair.here], odd[pair.there]
            )

    def _against(
        self, reference: int, pairs: Sequence[_Pair], digests: Mapping[tuple[int, int], bytes]
    ) -> None:
        """Compare all arrays for which this rank is the reference, as many blocks at a time as fit."""
        blocks: dict[Range, list[tuple[_Pair, int]]] = {}
        for pair in pairs:
            leaf = self._rows[pair.row].leaf
            assert leaf is not None
            if leaf.kind == "value":
                place, element = self._where_texts_part(pair, digests)
                blocks.setdefault(place, []).append((pair, element))
                continue
            for number in differing(digests[pair.there], digests[pair.here]):
                offset = number * leaf.block
                place = (pair.there[1], offset, min(leaf.block, leaf.nbytes - offset))
                blocks.setdefault(place, []).append((pair, offset // leaf.itemsize))
        # The limit is read for each batch: once memory can't be shared, the next ones are messages,
        # which must be smaller.
        for batch in _batches(blocks, lambda: SHARED_BYTES if self._share else SENT_BYTES):
            if not self._compare(reference, batch, blocks):
                self._share = False
                self._compare(reference, batch, blocks)

    def _where_texts_part(self, pair: _Pair, digests: Mapping[tuple[int, int], bytes]) -> tuple[Range, int]:
        """Return the block of the reference's text that has the first difference, and the number of its first character.

        One text may be the beginning of the other. If the reference's ends with a block, the result is that last block: the
        other rank compares some characters more than it gets.
        """
        leaf = self._rows[pair.row].expected
        assert leaf is not None
        ours, theirs = digests[pair.here], digests[pair.there]
        number, last = 0, (len(theirs) - 1) // SIZE
        while number < last and ours[number * SIZE :][:SIZE] == theirs[number * SIZE :][:SIZE]:
            number += 1
        offset = number * leaf.block
        return (pair.there[1], offset, min(leaf.block, leaf.nbytes - offset)), offset // leaf.itemsize

    def _compare(
        self, reference: int, batch: Sequence[Range], blocks: Mapping[Range, list[tuple[_Pair, int]]]
    ) -> bool:
        """Have ranks compare a batch of the reference's blocks; False if they can't look into the reference's memory."""
        share, wanted = self._share, tuple(batch)
        piece = self._ask(lambda ticket: Gather(ticket, self._transfer_id, wanted, share), [reference])[
            reference
        ]
        if not isinstance(piece, TransferChunk):
            raise _broken(reference, piece)
        ranges: dict[int, list[tuple[Range, int]]] = {}
        who: dict[int, list[tuple[_Pair, int]]] = {}
        start = 0
        for place in batch:
            for pair, element in blocks[place]:
                rank, leaf = pair.here
                ranges.setdefault(rank, []).append(((leaf, place[1], place[2]), start))
                who.setdefault(rank, []).append((pair, element))
            start += place[2]
        asked = {rank: tuple(found) for rank, found in ranges.items()}
        answers = self._ask(
            lambda ticket: Compare(ticket, self._transfer_id, asked, piece.data or b"", piece.shared),
            list(asked),
        )
        for answer in answers.values():
            if isinstance(answer, Compared) and answer.error == NOT_SHARED:
                return False
        for rank, places in who.items():
            answer = answers[rank]
            if not isinstance(answer, Compared) or answer.error:
                raise _broken(rank, answer)
            for (pair, element), found in zip(places, answer.differences, strict=True):
                pair.total = larger(pair.total, found, element)
        return True

    def _ask(self, make: Callable[[int], RankRequest], ranks: Sequence[int]) -> dict[int, RankReply]:
        answers = self._questions.ask(make, ranks, Deadline(None))
        for rank in ranks:
            if rank not in answers:
                raise HvdlabError(f"rank {rank}: {LOST}")
        return answers


def _batches(blocks: Mapping[Range, object], limit: Callable[[], int]) -> Iterator[list[Range]]:
    batch: list[Range] = []
    size = 0
    for place in blocks:
        if batch and size + place[2] > limit():
            yield batch
            batch, size = [], 0
        batch.append(place)
        size += place[2]
    if batch:
        yield batch


def _what(here: Leaf | None, there: Leaf | None) -> tuple[str, ...]:
    """Return the kinds of difference between two leaves."""
    if here is None or there is None:
        return ("missing" if here is None else "only there",)
    found = []
    if (here.kind, here.type) != (there.kind, there.type):
        found.append("type")
    found += [
        name for name in ("dtype", "shape", "requires_grad") if getattr(here, name) != getattr(there, name)
    ]
    if family(here.device) != family(there.device):
        found.append("device")
    if here.digest != there.digest and {here.kind, there.kind} == {"array"}:
        return (*found, "values") if (here.dtype, here.shape) == (there.dtype, there.shape) else tuple(found)
    if here.kind == there.kind == "value" and here.digest != there.digest:
        found.append("value")
    if here.kind == there.kind == "error" and here.text != there.text:
        found.append("error")
    return tuple(found)


def _ranks(groups: Sequence[ValueGroup]) -> tuple[int, ...]:
    return tuple(sorted(rank for group in groups for rank in group.ranks))


def _broken(rank: int, answer: RankReply | None) -> HvdlabError:
    why = getattr(answer, "error", "") if isinstance(answer, (Acked, Compared)) else ""
    return HvdlabError(f"rank {rank} could not go on with the comparison: {why or 'it gave no answer'}")
