"""Matching of submissions: per name, the heads of the ranks' queues against each other.

A *round* of a name ends when each member has a submission at the head (ready), or as soon as two heads differ. In
the latter case the verdict holds for the whole round: the ranks that have a head get it now, the others *owe* one
submission of that name, which gets the same verdict when it arrives. So every rank raises, and none waits for
another one to make the same mistake.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hvdlab.collectives.coordinator.rounds import (
    DuplicateName,
    Extra,
    Item,
    Mismatch,
    Rejection,
    Round,
    Verdict,
    parties_of,
    report_round,
)
from hvdlab.collectives.coordinator.signatures import Defined, Interned
from hvdlab.collectives.protocol.messages import AbortedCollective

SITES_LIMIT = 4096
"""Call sites that one report of pending collectives carries at most."""


class Matcher:
    """The rounds of one epoch of a process set.

    Attributes:
        ranks: Members, by position.
        rounds: Rounds that are not complete, by name, oldest first.
        held: Complete rounds whose group is not.
        ready: Complete rounds to be released, in order.
        rejections: Submissions that got a verdict, in order.
        conflict: Text of a disagreement that can't be limited to one name, or empty.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.members = frozenset(ranks)
        self.size = len(ranks)
        self.rounds: dict[str, Round] = {}
        self.held: dict[str, list[Round]] = {}
        self.ready: list[Round] = []
        self.rejections: list[Rejection] = []
        self.conflict = ""
        self._owed: dict[tuple[int, str], deque[Verdict]] = {}
        self._owed_groups: dict[tuple[int, str], deque[list[int | Verdict]]] = {}

    @property
    def pending(self) -> bool:
        """Whether some rank waits for a decision."""
        return bool(self.rounds or self.held or self.ready)

    @property
    def owes(self) -> int:
        """How many (rank, name) are to get a verdict when they arrive."""
        return len(self._owed) + len(self._owed_groups)

    # -- submissions ----------------------------------------------------------------------------------------------

    def submit(self, rank: int, defined: Defined, extra: Extra, now: float, payload: bytes = b"") -> None:
        """Take in a submission of a member. The payload of one that waits behind another is dropped."""
        info = defined.info
        if (self._owed or self._owed_groups) and self._settle(rank, defined):
            return
        current = self.rounds.get(info.name)
        if current is None:
            current = self.rounds[info.name] = Round(info, defined.local, now)
        elif rank in current.heads:
            if current.behind is None:
                current.behind = {}
            current.behind.setdefault(rank, deque()).append((defined, extra))
            return
        heads = current.heads
        heads[rank] = defined
        if extra:
            if current.extras is None:
                current.extras = {}
            current.extras[rank] = extra
        if payload:
            if current.payloads is None:
                current.payloads = {}
            current.payloads[rank] = payload
        if info is not current.info:
            self._mismatch(current, now)
            return
        if defined.local != current.local:
            current.agree = False
        if len(heads) == self.size:
            self._complete(current, now)

    def _complete(self, complete: Round, now: float) -> None:
        info = complete.info
        del self.rounds[info.name]
        if not info.group:
            self.ready.append(complete)
        else:
            held = self.held.setdefault(info.group, [])
            held.append(complete)
            if len(held) == info.group_size:
                self.ready += held
                del self.held[info.group]
        if complete.behind:
            self._advance(info.name, complete.behind, now)

    def _advance(self, name: str, behind: dict[int, deque[Item]], now: float) -> None:
        """Begin the next round of ``name`` with what waited behind the last one."""
        while behind:
            firsts = [(rank, *queue.popleft()) for rank, queue in behind.items()]
            behind = {rank: queue for rank, queue in behind.items() if queue}
            for rank, defined, extra in firsts:
                self.submit(rank, defined, extra, now)
            current = self.rounds.get(name)
            if current is not None:
                if current.behind is None:
                    current.behind = behind or None
                else:
                    for rank, queue in behind.items():
                        current.behind.setdefault(rank, deque()).extend(queue)
                return

    # -- verdicts -------------------------------------------------------------------------------------------------

    def _mismatch(self, current: Round, now: float) -> None:
        name = current.info.name
        parties = parties_of(current.heads)
        groups = {d.info.group for d in current.heads.values()}
        if len(groups) > 1:
            # Which tensors go together is disputed itself: there is no saying which others the verdict concerns.
            said = "; ".join(f"ranks {list(p.ranks)} ({p.site}): {p.request}" for p in parties)
            self.conflict = f"the ranks disagree about `{name}`: {said}"
            return
        self._decide(current, Mismatch(name, parties), now)

    def duplicate(self, name: str, rank: int, first_site: str, second_site: str, now: float) -> None:
        """A rank has submitted ``name`` again: end the round with an error, if it has not been released yet."""
        verdict = DuplicateName(name, rank, first_site, second_site)
        current = self.rounds.get(name)
        if current is None:
            for held in self.held.values():
                for complete in held:
                    if complete.info.name == name:
                        self._decide_group(complete.info, verdict, {}, now)
                        return
        elif rank in current.heads:
            self._decide(current, verdict, now)

    def _decide(self, current: Round, verdict: Verdict, now: float) -> None:
        info = current.info
        del self.rounds[info.name]
        for rank, defined in current.heads.items():
            self._reject(rank, defined, verdict)
        if info.group:
            self._decide_group(info, verdict, dict.fromkeys(current.heads, 1), now, current.behind)
            return
        for rank in self.ranks:
            if rank not in current.heads:
                self._owed.setdefault((rank, info.name), deque()).append(verdict)
        if current.behind:
            self._advance(info.name, current.behind, now)

    def _decide_group(
        self,
        info: Interned,
        verdict: Verdict,
        taken: dict[int, int],
        now: float,
        behind: dict[int, deque[Item]] | None = None,
    ) -> None:
        """Extend a verdict to the whole group: its tensors are released together or not at all."""
        group, size = info.group, info.group_size
        for complete in self.held.pop(group, ()):
            for rank, defined in complete.heads.items():
                self._reject(rank, defined, verdict)
                taken[rank] = taken.get(rank, 0) + 1
        left = [(rank, item) for rank, queue in (behind or {}).items() for item in queue]
        for name in [
            n for n, r in self.rounds.items() if any(d.info.group == group for d in r.heads.values())
        ]:
            left += self._withdraw(self.rounds.pop(name))
        again: list[tuple[int, Item]] = []
        for rank, item in left:
            if item[0].info.group == group and taken.get(rank, 0) < size:
                taken[rank] = taken.get(rank, 0) + 1
                self._reject(rank, item[0], verdict)
            else:
                again.append((rank, item))
        for rank in self.ranks:
            if taken.get(rank, 0) < size:
                owed = self._owed_groups.setdefault((rank, group), deque())
                owed.append([size - taken.get(rank, 0), verdict])
        for rank, (defined, extra) in again:
            self.submit(rank, defined, extra, now)

    def _reject(self, rank: int, defined: Defined, verdict: Verdict) -> None:
        self.rejections.append(Rejection(len(self.ready), rank, defined.local, verdict))

    @staticmethod
    def _withdraw(current: Round) -> Iterable[tuple[int, Item]]:
        """All submissions of a round and behind it, oldest first for each rank."""
        extras = current.extras or {}
        for rank, defined in current.heads.items():
            yield rank, (defined, extras.get(rank, ()))
        for rank, queue in (current.behind or {}).items():
            for item in queue:
                yield rank, item

    def _settle(self, rank: int, defined: Defined) -> bool:
        """Give a submission the verdict that it owes, if any."""
        info = defined.info
        if info.group:
            owed_group = self._owed_groups.get((rank, info.group))
            if not owed_group:
                return False
            first = owed_group[0]
            count, verdict = first
            assert isinstance(count, int)
            assert not isinstance(verdict, int)
            first[0] = count - 1
            if count == 1:
                owed_group.popleft()
                if not owed_group:
                    del self._owed_groups[rank, info.group]
        else:
            owed = self._owed.get((rank, info.name))
            if not owed:
                return False
            verdict = owed.popleft()
            if not owed:
                del self._owed[rank, info.name]
        self._reject(rank, defined, verdict)
        return True

    def forgive(self, rank: int) -> None:
        """Forget the verdicts that ``rank`` owes: its cell has ended, it will not submit what they are about."""
        for table in (self._owed, self._owed_groups):
            for key in [key for key in table if key[0] == rank]:
                del table[key]

    # -- reports --------------------------------------------------------------------------------------------------

    def waiting(self) -> Iterable[tuple[Round, tuple[int, ...]]]:
        """Undecided rounds with the ranks that are missing (none for those held back by their group)."""
        for current in self.rounds.values():
            yield current, tuple(rank for rank in self.ranks if rank not in current.heads)
        for held in self.held.values():
            for complete in held:
                yield complete, ()
        for complete in self.ready:
            yield complete, ()

    def report(self) -> tuple[AbortedCollective, ...]:
        """What is pending, for error texts."""
        waiting = list(self.waiting())
        full = sum(len(current.heads) for current, _ in waiting) <= SITES_LIMIT
        return tuple(report_round(current, missing, all_sites=full) for current, missing in waiting)

    def validate(self) -> None:
        """Assert what must hold between calls."""
        members = self.members
        assert not self.rejections
        assert all(current.info.fuse_key is not None for current in self.ready), "held, but never fused"
        for name, current in self.rounds.items():
            assert name == current.info.name
            assert current.heads.keys() <= members
            assert 0 < len(current.heads) < self.size, (name, current.heads)
            assert all(d.info is current.info for d in current.heads.values())
            for rank, queue in (current.behind or {}).items():
                assert queue
                assert rank in current.heads
        for group, held in self.held.items():
            assert 0 < len(held) < held[0].info.group_size
            assert all(r.info.group == group and r.heads.keys() == members for r in held)
        assert {rank for rank, _ in (*self._owed, *self._owed_groups)} <= members
        assert all(self._owed.values())
        assert all(self._owed_groups.values())
