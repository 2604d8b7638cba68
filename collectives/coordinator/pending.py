"""The rounds of a process set that are not over: which they are, which ranks they wait for, and how they are reported.

Ranks behind one relay, which send equal announcements, may be a *bloc*: their submissions are one head in a round, so that the
coordinator does not count each rank. As soon as anything might end differently for one of them than for another, the bloc is taken
apart: each of its ranks gets the bloc's heads as its own, and all goes on as if there had been no bloc, until none of these ranks
waits for anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

from hvdlab.collectives.coordinator.rounds import Round
from hvdlab.collectives.coordinator.scheduling import Schedule
from hvdlab.collectives.coordinator.signatures import Channel, Defined
from hvdlab.collectives.coordinator.verdicts import Debts, Rejection
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.protocol.messages import AbortedCollective

SITES_LIMIT = 4096
"""Call sites that one report of pending collectives carries at most."""


def waits_for_receiver(current: Round) -> bool:
    """Whether a round is a message that only its sender has submitted."""
    return not current.info.from_any and current.heads.keys() == {*current.info.between[:1]}


class PendingRounds:
    """What the members have submitted and what has become of it, in one epoch of a process set.

    Attributes:
        ranks: Members, by position.
        size: How many heads a complete round of all members has: one of each bloc, and one of each rank that is in none.
        blocs: The ranks of each bloc, by its first rank, under which the heads of all of them are.
        firsts: The first rank of its bloc, for each rank that is in one.
        rounds: Rounds that are not complete, by name, oldest first.
        held: Complete rounds whose group is not.
        ready: Complete rounds to be released, in order.
        schedule: Complete rounds with a priority, of which some wait for their turn.
        rejections: Submissions that got a verdict, in order.
        conflict: Text of a disagreement that can't be limited to one name, or empty.
        disputes: Incomplete rounds in which ranks disagree, by name, oldest first.
        joining: The round of the ranks that have joined, or ``None`` if none has.
        debts: Verdicts on submissions that have not come yet.
        channels: The rounds of messages and of receives from any rank that are not complete, by channel, oldest first.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.members = frozenset(ranks)
        self.size = len(ranks)
        self.blocs: dict[int, tuple[int, ...]] = {}
        self.firsts: dict[int, int] = {}
        self.rounds: dict[str, Round] = {}
        self.held: dict[str, list[Round]] = {}
        self.ready: list[Round] = []
        self.schedule = Schedule()
        self.rejections: list[Rejection] = []
        self.conflict = ""
        self.disputes: dict[str, Round] = {}
        self.joining: Round | None = None
        self.debts = Debts()
        self.channels: dict[Channel, dict[Round, None]] = {}

    @property
    def pending(self) -> bool:
        """Whether some rank waits for a decision."""
        return bool(self.rounds or self.held or self.ready or self.schedule)

    @property
    def joined(self) -> tuple[int, ...]:
        """Ranks that have joined, lowest first."""
        return () if self.joining is None else tuple(sorted(self.joining.heads))

    def add(self, current: Round) -> None:
        """Begin a round."""
        self.rounds[current.info.name] = current
        if current.info.channel is not None:
            self.channels.setdefault(current.info.channel, {})[current] = None

    def remove(self, current: Round) -> None:
        """A round is complete, or ends before that."""
        del self.rounds[current.info.name]
        channel = current.info.channel
        if channel is not None:
            del self.channels[channel][current]
            if not self.channels[channel]:
                del self.channels[channel]

    # -- blocs ----------------------------------------------------------------------------------------------------

    def unite(self, ranks: tuple[int, ...]) -> None:
        """These members, which wait for nothing, are a bloc from now on."""
        self.blocs[ranks[0]] = ranks
        self.firsts.update(dict.fromkeys(ranks, ranks[0]))
        self.size -= len(ranks) - 1

    def wait_for_nothing(self, ranks: Iterable[int]) -> bool:
        """Whether none of these members has submitted anything that is not over, owes anything, or has joined."""
        alone = frozenset(ranks)
        return (
            self.joining is None
            and not self.debts
            and all(alone.isdisjoint(current.heads) for current in self._all_rounds())
        )

    def _all_rounds(self) -> Iterable[Round]:
        return itertools.chain(self.rounds.values(), *self.held.values(), self.ready, self.schedule)

    def fits(self, first: int, submitted: Collection[Defined]) -> bool:
        """Whether the bloc of this first rank can submit these as one, because they can't end differently for one of its ranks.

        So a bloc has no part in messages, disputes and joining, and never waits behind itself. Nor may a round that it completes be followed
        by one that began behind it: that one would be older than the rounds of what the bloc submits along with it.
        """
        several = len(submitted) > 1
        for defined in submitted:
            info = defined.info
            current = self.rounds.get(info.name)
            if info.between or info.kind == OpKind.JOIN:
                return False
            if current is None:
                continue
            if current.info is not info or current.disputed is not None or first in current.heads:
                return False
            if several and current.behind:
                return False
        return len({defined.info.name for defined in submitted}) == len(submitted)

    def take_apart(self, first: int) -> None:
        """Give each rank of a bloc the bloc's heads as its own. From now on each of them submits by itself."""
        ranks = self.blocs.pop(first)
        for rank in ranks:
            del self.firsts[rank]
        self.size += len(ranks) - 1
        for current in self._all_rounds():
            head = current.heads.get(first)
            if head is not None:
                current.heads.update(dict.fromkeys(ranks, head))

    def take_all_apart(self) -> None:
        """Something happens that concerns ranks singly, such as a verdict."""
        for first in list(self.blocs):
            self.take_apart(first)

    def head_of(self, current: Round, rank: int) -> Defined | None:
        """What a rank has submitted for a round, alone or with its bloc; ``None`` if it has not."""
        return current.heads.get(self.firsts.get(rank, rank))

    def heads_of(self, current: Round) -> Mapping[int, Defined]:
        """What each rank has submitted for a round."""
        if not self.blocs:
            return current.heads
        blocs, heads = self.blocs, current.heads.items()
        return {rank: head for first, head in heads for rank in blocs.get(first, (first,))}

    # -- which ranks a round waits for ----------------------------------------------------------------------------

    def is_complete(self, current: Round) -> bool:
        """Whether all ranks that the round concerns have submitted it, or have joined."""
        joining, heads = self.joining, current.heads
        if (
            current.info.from_any
        ):  # it is given to a message's round as soon as there is one, so only joining can end its wait here
            return joining is not None and not self.missing(current)
        if current.info.between:
            joined = () if joining is None else joining.heads
            return all(rank in heads or rank in joined for rank in current.info.between)
        if joining is None or joining is current:
            return len(heads) == self.size
        return all(rank in heads or rank in joining.heads for rank in self.ranks)

    def not_joined(self) -> Iterable[int]:
        """The members that have not joined."""
        joining = self.joining
        return self.ranks if joining is None else [rank for rank in self.ranks if rank not in joining.heads]

    def missing(self, current: Round) -> tuple[int, ...]:
        """The ranks that a round waits for, or any of which a receive from any rank waits for; never one that has joined."""
        wanted = self.ranks if current is self.joining else self.not_joined()
        between = () if current.info.from_any else current.info.between
        heads = self.heads_of(current)
        return tuple(rank for rank in wanted if rank not in heads and (not between or rank in between))

    def concerned(self, current: Round) -> set[int]:
        """The ranks that some submission of a round concerns."""
        return {rank for head in current.heads.values() for rank in head.info.between or self.ranks}

    def oldest_sent(self, channel: Channel) -> Round | None:
        """The oldest message on a channel that waits for its receiver; ``None`` if none does."""
        waiting = self.channels.get(channel, ())
        return next((each for each in waiting if each.disputed is None and waits_for_receiver(each)), None)

    def oldest_received(self, channel: Channel) -> Round | None:
        """The oldest receive from any rank on a channel; ``None`` if there is none."""
        waiting = self.channels.get(channel, ())
        return next((each for each in waiting if each.disputed is None and each.info.from_any), None)

    def waiting(self) -> Iterable[tuple[Round, tuple[int, ...]]]:
        """Undecided rounds with the ranks that are missing (none for those held back by their group).

        Those that wait for their turn are not among them: nothing is missing, and they will be executed.
        """
        for current in self.rounds.values():
            yield current, self.missing(current)
        for held in self.held.values():
            for complete in held:
                yield complete, ()
        for complete in self.ready:
            yield complete, ()

    def report(self) -> tuple[AbortedCollective, ...]:
        """What is pending, for error texts."""
        waiting = [*self.waiting(), *((current, ()) for current in self.schedule)]
        full = sum(len(self.heads_of(current)) for current, _ in waiting) <= SITES_LIMIT
        return tuple(self.report_round(current, missing, all_sites=full) for current, missing in waiting)

    def report_round(
        self, current: Round, missing: tuple[int, ...], *, all_sites: bool = True
    ) -> AbortedCollective:
        """A round as messages report it."""
        heads = self.heads_of(current)
        waited = tuple(sorted(heads))
        shown = waited if all_sites else waited[:1]
        sites = tuple(heads[rank].site for rank in shown)
        return AbortedCollective(current.info.kind, current.info.name, waited, missing, sites, self.joined)

    def validate(self) -> None:
        """Assert what must hold between calls."""
        members = self.members
        assert not self.rejections
        self._validate_blocs()
        self.schedule.validate()
        assert all(current.info.fuse_key is not None for current in self.ready), "held, but never fused"
        for name, current in self.rounds.items():
            assert name == current.info.name
            assert current.heads.keys() <= members
            assert current.heads, name
            assert len(current.heads) < self.size or current.info.between, (name, current.heads)
            assert (current.disputed is None) == all(d.info is current.info for d in current.heads.values())
            assert not self.is_complete(current)
            for rank, queue in (current.behind or {}).items():
                assert queue
                assert rank in current.heads
        for group, held in self.held.items():
            assert 0 < len(held) < held[0].info.group_size
            assert all(
                r.info.group == group and self.heads_of(r).keys() | {*r.absent} == members for r in held
            )
        assert self.disputes == {n: r for n, r in self.rounds.items() if r.disputed is not None}
        for channel in self.channels:
            assert self.oldest_sent(channel) is None or self.oldest_received(channel) is None, channel
        on_channels = {current for current in self.rounds.values() if current.info.channel is not None}
        assert {current for rounds in self.channels.values() for current in rounds} == on_channels
        assert self.joining is None or self.rounds.get(self.joining.info.name) is self.joining
        assert self.debts.ranks <= members - {*self.joined}

    def _validate_blocs(self) -> None:
        assert self.firsts == {rank: first for first, ranks in self.blocs.items() for rank in ranks}
        assert self.size == len(self.ranks) - len(self.firsts) + len(self.blocs)
        assert self.members.issuperset(self.firsts)
        if self.blocs:
            assert not self.debts, "ranks owe submissions singly"
            assert self.joining is None, "ranks join singly"
        inner = self.firsts.keys() - self.blocs.keys()
        for current in self._all_rounds():
            assert not inner & current.heads.keys(), "submitted alone as well as with its bloc"
            assert not (current.behind or {}).keys() & self.firsts.keys()
            assert not current.info.between or not current.heads.keys() & self.blocs.keys()
