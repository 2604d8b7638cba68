"""A variable compared over the ranks: fingerprints first, then the elements of what differs, which ranks compare themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.fingerprint import SIZE, differing
from hvdlab.kernel_ext.inspect.arrays import family
from hvdlab.kernel_ext.inspect.examination import same_key, with_host_digest
from hvdlab.kernel_ext.inspect.result import Diff, DiffRow, Group, larger
from hvdlab.kernel_ext.questions import Answer, Questions
from hvdlab.kernel_ext.rank.values import NOT_SHARED
from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.compare import (
    AskBlocks,
    AskLeaves,
    Blocks,
    Compare,
    Compared,
    Difference,
    Examine,
    Examined,
    Gather,
    Leaf,
    Leaves,
    Range,
)
from hvdlab.kernel_ext.wire.values import Done, Piece, Release

SHARED_BYTES = 32 << 20
"""Bytes that one rank shows others of its host at a time."""

SENT_BYTES = 8 << 20
LOST = "it is lost"


def diff(
    questions: Questions,
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
    lots: list[int] = []

    def make(ticket: int) -> Payload:
        lots.append(ticket)
        return Examine(ticket, expression, special)

    try:
        answers = questions.ask(make, ranks, Deadline(None))
        found = {
            rank: answer if isinstance(answer := answers.get(rank), Examined) else Examined(0, error=LOST)
            for rank in ranks
        }
        groups = _groups(found)
        comparison = _Comparison(questions, lots[0], groups, near)
        return Diff(special or expression, groups, tuple(comparison.rows()))
    finally:
        for lot in lots:
            questions.tell(Release(lot), ranks)


def _groups(found: Mapping[int, Examined]) -> tuple[Group, ...]:
    """Groups of ranks that agree, the largest first; ranks with an error come last."""
    ranks: dict[tuple[bytes, str], list[int]] = {}
    for rank, answer in sorted(found.items()):
        ranks.setdefault((answer.digest, answer.error), []).append(rank)
    largest_first = sorted(
        ranks.values(), key=lambda alike: (bool(found[alike[0]].error), -len(alike), alike[0])
    )
    return tuple(Group(tuple(alike), found[alike[0]]) for alike in largest_first)


@dataclass(slots=True)
class _Pair:
    """An array of one rank that is compared with another's: rank and number of the leaf, here and there."""

    row: int
    here: tuple[int, int]
    there: tuple[int, int]
    total: Difference = field(default_factory=lambda: Difference(0))


class _Comparison:
    """What differs between groups, one rank standing for each."""

    def __init__(
        self, questions: Questions, lot: int, groups: Sequence[Group], near: Collection[int]
    ) -> None:
        self._questions, self._lot = questions, lot
        self._groups = [group for group in groups if not group.found.error]
        self._leaves: dict[int, dict[str, tuple[int, Leaf]]] = {}
        self._share = {group.ranks[0] for group in self._groups} <= set(near)
        self._rows: list[DiffRow] = []
        self._pairs: list[_Pair] = []

    def rows(self) -> list[DiffRow]:
        """A row for each part that differs, in the order of the largest group's value."""
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

    def _ask_leaves(self, group: Group) -> dict[str, tuple[int, Leaf]]:
        rank, all_leaves = group.ranks[0], list[Leaf]()
        while len(all_leaves) < group.found.leaves:
            first = len(all_leaves)
            answer = self._ask(lambda ticket: AskLeaves(ticket, self._lot, first), [rank])[rank]  # noqa: B023
            if not isinstance(answer, Leaves) or not answer.leaves:
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
        answers = self._ask(lambda ticket: AskBlocks(ticket, self._lot, asked, on_host=True), list(asked))
        for rank, found in wanted.items():
            answer = answers[rank]
            if not isinstance(answer, Blocks):
                raise _broken(rank, answer)
            for path, blocks in zip(found, answer.digests, strict=True):
                number, leaf = self._leaves[rank][path]
                self._leaves[rank][path] = number, with_host_digest(leaf, blocks)

    def _look_at(self, path: str) -> None:
        """Add a row for each group of ranks that has something else here than most."""
        alike: dict[object, list[Group]] = {}
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
        answers = self._ask(lambda ticket: AskBlocks(ticket, self._lot, asked), list(asked))
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
        for batch in _batches(blocks, lambda: SHARED_BYTES if self._share else SENT_BYTES):
            if not self._compare(reference, batch, blocks):
                self._share = False
                self._compare(reference, batch, blocks)

    def _where_texts_part(self, pair: _Pair, digests: Mapping[tuple[int, int], bytes]) -> tuple[Range, int]:
        """The block of the reference's text that has the first difference, and the number of its first character.

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
        piece = self._ask(lambda ticket: Gather(ticket, self._lot, wanted, share), [reference])[reference]
        if not isinstance(piece, Piece):
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
            lambda ticket: Compare(ticket, self._lot, asked, piece.data or b"", piece.shared), list(asked)
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

    def _ask(self, make: Callable[[int], Payload], ranks: Sequence[int]) -> dict[int, Answer]:
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
    """In what two leaves differ."""
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


def _ranks(groups: Sequence[Group]) -> tuple[int, ...]:
    return tuple(sorted(rank for group in groups for rank in group.ranks))


def _broken(rank: int, answer: Answer | None) -> HvdlabError:
    why = getattr(answer, "error", "") if isinstance(answer, (Done, Compared)) else ""
    return HvdlabError(f"rank {rank} could not go on with the comparison: {why or 'it gave no answer'}")
