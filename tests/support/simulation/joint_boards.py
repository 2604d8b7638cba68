"""Boards of a simulated job: words that all members of a generation see at once, dead or alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdlab.collectives.engine.coordinator_bypass import batch_of
from hvdlab.collectives.engine.entries import NewGeneration
from hvdlab.collectives.engine.process_set_view import BoardMember, PostedRequest, needs_plane
from hvdlab.collectives.planes.base import HostArray
from hvdlab.collectives.planes.shm.agreement_board import DECLINED
from support.simulation.joint_ranks import Scope, SimEntry, SimHandle, SimRank

_NEVER = 1 << 62  # above every number of a post: the member has not retired


class Words:
    """Contents of shared memory, by member."""

    def __init__(self, members: int) -> None:
        self.posted = [0] * members
        self.retired = [_NEVER] * members
        self.digests = [[DECLINED] * members for _ in range(2)]
        self.tensors: tuple[HostArray, ...] = tuple(np.zeros((members, 64), np.uint8) for _ in range(2))


class SimBoard:
    """One member's view; acts like :class:`AgreementBoard`, without memory or sleep."""

    def __init__(self, words: Words, index: int, generation: int) -> None:
        self.generation, self.members, self.number = generation, len(words.posted), 0
        self.capacity = 4096
        self.aborted = False
        self._words, self._index = words, index

    def post(self, digest: int, tensor: HostArray | None) -> int:
        words, number = self._words, self.number + 1
        assert self.vacant, "posted before the last one was over"
        if tensor is not None:
            words.tensors[number & 1][self._index, : len(tensor)] = tensor
        words.digests[number & 1][self._index] = digest
        words.posted[self._index] = self.number = number
        return number

    def tensors(self, parity: int, size: int) -> HostArray:
        return self._words.tensors[parity][:, :size]

    @property
    def vacant(self) -> bool:
        return self.complete(self.number)

    def decline(self) -> None:
        if self._words.retired[self._index] == _NEVER:
            self.post(DECLINED, None)

    def retire(self) -> None:
        self._words.retired[self._index] = min(self._words.retired[self._index], self.number + 1)

    def _there(self, member: int) -> int:
        return _NEVER if self._words.retired[member] < _NEVER else self._words.posted[member]

    def complete(self, number: int) -> bool:
        """Whether :meth:`AgreementBoard.wait` would return."""
        return all(self._there(member) >= number for member in range(self.members))

    def agreed(self, number: int) -> bool:
        digests = self._words.digests[number & 1]
        mine = digests[self._index]
        return mine != DECLINED and set(digests) == {mine} and min(self._words.retired) > number

    def mark_departed(self, members: Sequence[int]) -> None:
        words = self._words
        for member in members:
            words.retired[member] = min(words.retired[member], words.posted[member] + 1)

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        pass


@dataclass
class AtBoard:
    """A rank's user thread that has posted and waits."""

    entry: SimEntry
    posting: PostedRequest
    asked: bool = False
    has_handle: bool = True

    @property
    def keeps_lane(self) -> bool:
        """Whether nothing is executed on this rank's planes meanwhile."""
        return needs_plane(self.entry.request, self.posting.member.board.capacity)


@dataclass
class Boards:
    """Boards of all sets and generations."""

    words: dict[Scope, Words] = field(default_factory=dict)
    results: dict[tuple[int, int, int], object] = field(default_factory=dict)

    def open(self, me: SimRank, effect: NewGeneration) -> None:
        members = len(effect.members)
        if effect.has_memory and effect.index >= 0 and members > 1:
            words = self.words.setdefault((effect.process_set, effect.generation), Words(members))
            board = SimBoard(words, effect.index, effect.generation)
            me.state.attach_board(BoardMember(board, effect.process_set, effect.index, effect.members))  # type: ignore[arg-type]  # stands in for an AgreementBoard

    def go_on(self, me: SimRank) -> None:
        """Let the waiting thread take its next step."""
        at = me.at_board
        assert at is not None
        board, number = _board(at), at.posting.number
        if not at.has_handle and not (board.complete(number) and board.agreed(number)):
            replace(me, at)
        if not board.aborted and not board.complete(number):
            at.asked = True
            me.state.ask_to_decline(at.entry, number)
            return
        me.at_board = None
        if not (board.complete(number) and board.agreed(number)):
            me.state.announce_posted(at.entry, at.posting.member)
            return
        if at.keeps_lane:
            me.state.start_posted(at.entry, at.posting.member, 0)
            me.jobs.appendleft(batch_of(at.entry, at.posting))
            return
        scope = at.posting.member.process_set, board.generation, number
        result = at.entry.name, tuple(float(part.view(np.float32)[0]) for part in at.posting.parts)
        assert self.results.setdefault(scope, result) == result, f"{scope} has two results"
        if me.state.finish_posted(at.entry, at.posting.member):
            at.entry.complete(("agreed", *scope, result))

    def can_go_on(self, me: SimRank) -> bool:
        at = me.at_board
        return at is not None and (
            not at.asked or _board(at).aborted or _board(at).complete(at.posting.number)
        )


def replace(me: SimRank, at: AtBoard) -> None:
    """Let a handle take the place of an entry that its thread has posted without one."""
    old, handle = at.entry, SimHandle(at.entry)
    me.state.replace_posted(old, handle, at.posting.member)
    me.entries[me.entries.index(old)] = handle
    if me.blocked is old:
        me.blocked = handle
    at.entry, at.has_handle = handle, True


def _board(at: AtBoard) -> SimBoard:
    board = at.posting.member.board
    assert isinstance(board, SimBoard)
    return board
