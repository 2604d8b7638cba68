"""The rounds of a process set that are not over: which they are, which ranks they wait for, and how they are reported."""

from __future__ import annotations

from collections.abc import Iterable

from hvdlab.collectives.coordinator.rounds import Round
from hvdlab.collectives.coordinator.scheduling import Schedule
from hvdlab.collectives.coordinator.signatures import Channel
from hvdlab.collectives.coordinator.verdicts import Debts, Rejection
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
        return tuple(
            rank for rank in wanted if rank not in current.heads and (not between or rank in between)
        )

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
        full = sum(len(current.heads) for current, _ in waiting) <= SITES_LIMIT
        return tuple(self.report_round(current, missing, all_sites=full) for current, missing in waiting)

    def report_round(
        self, current: Round, missing: tuple[int, ...], *, all_sites: bool = True
    ) -> AbortedCollective:
        """A round as messages report it."""
        waited = tuple(sorted(current.heads))
        shown = waited if all_sites else waited[:1]
        sites = tuple(current.heads[rank].site for rank in shown)
        return AbortedCollective(current.info.kind, current.info.name, waited, missing, sites, self.joined)

    def validate(self) -> None:
        """Assert what must hold between calls."""
        members = self.members
        assert not self.rejections
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
            assert all(r.info.group == group and r.heads.keys() | {*r.absent} == members for r in held)
        assert self.disputes == {n: r for n, r in self.rounds.items() if r.disputed is not None}
        for channel in self.channels:
            assert self.oldest_sent(channel) is None or self.oldest_received(channel) is None, channel
        on_channels = {current for current in self.rounds.values() if current.info.channel is not None}
        assert {current for rounds in self.channels.values() for current in rounds} == on_channels
        assert self.joining is None or self.rounds.get(self.joining.info.name) is self.joining
        assert self.debts.ranks <= members - {*self.joined}
