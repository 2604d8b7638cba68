"""Negotiation: which submissions of the ranks belong together, when they are complete, and with which error they end otherwise.

The heads of the ranks' queues are matched by name. A *round* of a name ends when each member has a submission at the head:
ready if they are equal, otherwise with a verdict.
Where heads differ, the coordinator waits a little for the ranks that are still missing, so that the error can name all
requests. Then the verdict holds for the whole round: the ranks that have a head get it now. The others owe one
submission of that name, which gets the same verdict when it arrives. So every rank raises, and none waits long for
another one to make the same mistake.

No round waits for a rank that has *joined*: it is complete without it. Joining is a round, too, the one that
every member has to submit.

Messages between two members have rounds of their own (:mod:`~hvdlab.collectives.coordinator.point_to_point`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from hvdlab.collectives.coordinator.decision_log import DecisionEntry, DecisionKind, InvariantOf
from hvdlab.collectives.coordinator.point_to_point import MessageChannels, give_to_receiver
from hvdlab.collectives.coordinator.priorities import PriorityQueue
from hvdlab.collectives.coordinator.signatures import (
    Extra,
    InternedSignature,
    Item,
    LocalDefinition,
    NegotiationRound,
    kind_label,
    parties_of,
)
from hvdlab.collectives.errors import CauseKind, call_name
from hvdlab.collectives.protocol.messages import (
    AbortedCollective,
    Cancelled,
    Decline,
    Message,
    Party,
    Reject,
    RejectDuplicate,
    Signature,
)
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.types import OpKind, ReduceOp

SITES_LIMIT = 4096
"""Call sites that one report of pending collectives carries at most: ranks times collectives can be millions, in one message."""

_JOIN = int(OpKind.JOIN)


class Negotiation:
    """Negotiation of one generation of a process set, with all submissions of its members, until they are dispatched or rejected.

    Attributes:
        ranks, members, size: Members, by position; as a set; and their number.
        rounds: Rounds that are not complete, by name, oldest first.
        incomplete_groups: Complete rounds whose group is not, by group.
        ready: Complete rounds to be dispatched, in order.
        priorities: Complete rounds with a priority, of which some wait for their turn.
        rejections: Submissions that got a verdict, in order.
        conflict: Text of a disagreement that can't be limited to one name, or empty.
        mismatches: Incomplete rounds in which ranks disagree, by name, oldest first.
        joining: The round of the ranks that have joined, or ``None`` if none has.
        owed: Verdicts on submissions that have not come yet.
        channels: The rounds of messages and of receives from any rank that are not complete, by channel, oldest first.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.members = frozenset(ranks)
        self.size = len(ranks)
        self.rounds: dict[str, NegotiationRound] = {}
        self.incomplete_groups: dict[str, list[NegotiationRound]] = {}
        self.ready: list[NegotiationRound] = []
        self.priorities = PriorityQueue()
        self.rejections: list[Rejection] = []
        self.conflict = ""
        self.mismatches: dict[str, NegotiationRound] = {}
        self.joining: NegotiationRound | None = None
        self.owed = OwedRejections()
        self.channels = MessageChannels()

    @property
    def pending(self) -> bool:
        """Return whether some rank waits for a decision."""
        return bool(self.rounds or self.incomplete_groups or self.ready or self.priorities)

    @property
    def joined(self) -> tuple[int, ...]:
        """Return the ranks that have joined, lowest first."""
        return () if self.joining is None else tuple(sorted(self.joining.submissions))

    def add(self, current: NegotiationRound) -> None:
        """Begin a round."""
        self.rounds[current.info.name] = current
        self.channels.add(current)

    def remove(self, current: NegotiationRound) -> None:
        """Remove a round that is complete, or ends before that."""
        del self.rounds[current.info.name]
        self.channels.remove(current)

    # -- submissions ----------------------------------------------------------------------------------------------

    def submit(
        self,
        rank: int,
        defined: LocalDefinition,
        extra: Extra,
        now: float,
        payload: bytes = b"",
        *,
        check: bool = True,
    ) -> NegotiationRound | None:
        """Add a submission of a member.

        Args:
            rank: The rank that submits.
            defined: The definition of its local id.
            extra: The numbers that go along with it.
            now: The time, in monotonic seconds.
            payload: The tensor's bytes, if they came along. Those of a submission that waits behind another are dropped.
            check: Whether to check if its round is complete now; otherwise the caller does.

        Returns:
            Its round, or ``None`` if it got a verdict or waits behind another one.
        """
        info = defined.info
        # First: a submission that the rank owes belongs to a round that is over, and must not begin another one.
        if self.owed and (verdict := self.owed.pop_next(rank, info)) is not None:
            self._reject(rank, defined, verdict)
            return None
        # Only a faulty peer sends this: the receive would get a message that is for another rank.
        if info.from_any and info.between != (rank,):
            raise ValueError("a receive from any rank in place of another rank")
        current = self.rounds.get(info.name)
        if current is None:
            current = NegotiationRound(info, defined.local, now, defined.priority)
            self.add(current)
        elif rank in current.submissions:
            # Its payload is dropped: rounds that start from a queue use the plane, on all members alike.
            if current.queued is None:
                current.queued = {}
            current.queued.setdefault(rank, deque()).append((defined, extra))
            return None
        submissions = current.submissions
        submissions[rank] = defined
        if extra:
            if current.extras is None:
                current.extras = {}
            current.extras[rank] = extra
        if payload:
            if current.payloads is None:
                current.payloads = {}
            current.payloads[rank] = payload
        # By identity, as equal signatures are one object: this runs for each submission.
        if info is not current.info:
            # The first difference starts the time that the others have; further ones do not prolong it.
            if current.mismatch_since is None:
                current.mismatch_since = now
                self.mismatches[info.name] = current
        # With one local id on all ranks, one message can order all of them to execute it.
        elif defined.local != current.local:
            current.same_local_id = False
        if check:
            # Without joined ranks and messages a count decides: this runs for each submission of each rank.
            if self.joining is not None or info.kind == _JOIN or current.info.between:
                self._complete_if_ready(current, now)
            elif len(submissions) == self.size:
                self._complete(current, now)
        return current

    def _submit_all(self, items: Iterable[tuple[int, Item]], now: float) -> None:
        """Add several submissions before checking which rounds have become complete.

        No round waits for a rank that has joined, but its submissions before that have to meet those of the others.
        """
        placed: dict[NegotiationRound, None] = {}
        for rank, (defined, extra) in items:
            current = self.submit(rank, defined, extra, now, check=False)
            if current is not None:
                placed[current] = None
        for current in placed:
            # Completing one can have completed or rejected another of these, and begun the next round of its name.
            if self.rounds.get(current.info.name) is current:
                self._complete_if_ready(current, now)

    def _complete_if_ready(self, current: NegotiationRound, now: float) -> None:
        if current.info.kind == _JOIN:
            self._join(current, now)
        current = self._match_any_source(current, now)
        if self.is_complete(current):
            self._complete(current, now)

    def _match_any_source(self, current: NegotiationRound, now: float) -> NegotiationRound:
        """Merge the rounds of a message and a receive from any rank that wait for each other.

        Args:
            current: A round that has a new head.
            now: The time, in monotonic seconds.

        Returns:
            The round of the message, which is complete now; otherwise ``current``.
        """
        matched = self.channels.match(current)
        if matched is None:
            return current
        sent, received = matched
        # Removed before it is given away, so that its name is free for the receives queued behind it.
        self._remove_incomplete(received.info.name)
        give_to_receiver(sent, received, now)
        # Found when the receive was given to it; `submit()` records only the mismatches that it finds itself.
        if sent.mismatch_since is not None:
            self.mismatches[sent.info.name] = sent
        if received.queued:
            self._start_queued(received.info.name, received.queued, now)
        return sent

    def _join(self, joining: NegotiationRound, now: float) -> None:
        """Complete the rounds that waited only for a rank that has joined: no round but the joining itself waits for it any more."""
        self.joining = joining  # first, since is_complete() reads it
        if self.owed:
            for rank in joining.submissions:
                self.owed.discard_rank(rank)
        for current in list(self.rounds.values()):
            # Completing one can complete others of its name, or of its group, as well.
            there = current is not joining and self.rounds.get(current.info.name) is current
            if there and self.is_complete(current):
                self._complete(current, now)

    def _complete(self, complete: NegotiationRound, now: float) -> None:
        info = complete.info
        # First: the check of the joined ranks reads one signature of the round, and here there are several.
        if complete.mismatch_since is not None:
            self._mismatch(complete, now)
            return
        if self._lacks(complete):
            # Ranks that have joined have no local id for it, so the orders differ.
            complete.same_local_id = False
            complete.absent = tuple(
                rank for rank in info.between or self.ranks if rank not in complete.submissions
            )
            verdict = refuse_with_joined(info.signature, self.joined)
            if verdict is not None:
                self._reject_round(complete, verdict, now)
                return
        # Removed before the queued submissions of its name start the next round.
        self.remove(complete)
        if self.joining is not None:
            self._progress(complete, now)
        if not info.group:
            self.ready.append(complete)
        else:
            held = self.incomplete_groups.setdefault(info.group, [])
            held.append(complete)
            if len(held) == info.group_size:
                # All at once, and only when the group is whole: a batch of events must not dispatch a part of it.
                self.ready += held
                del self.incomplete_groups[info.group]
        if complete.queued:
            self._start_queued(info.name, complete.queued, now)

    def _progress(self, complete: NegotiationRound, now: float) -> None:
        """Count the completion of a round while ranks have joined. If it is the joining itself, all have: add which rank was the last."""
        assert self.joining is not None
        if complete is self.joining:
            for held in list(
                self.incomplete_groups.values()
            ):  # no rank is left that could complete these groups
                info = held[0].info
                self._reject_group(info, refuse_incomplete(info.signature, self.joined), {}, now)
            # Submissions are in the order in which they came, so the last key is the rank that joined last: the result of `join()`.
            complete.extras = dict.fromkeys(self.ranks, (next(reversed(complete.submissions)),))
            # Only now: while it is set, all ranks count as joined, and the rejections above leave none of them owing a submission.
            self.joining = None
        else:
            # The others still make progress: the joined ranks wait for them as they should, and no stall is due for that.
            self.joining.since, self.joining.reported = now, 0

    def _start_queued(self, name: str, queued: dict[int, deque[Item]], now: float) -> None:
        """Start the next rounds of ``name`` with the submissions that were queued behind the last one."""
        while queued:
            # Without a check: the round gets one submission of each rank before it is decided, as if they came at the same time.
            for rank, queue in queued.items():
                while queue:
                    defined, extra = queue.popleft()
                    if self.submit(rank, defined, extra, now, check=False) is not None:
                        break
            queued = {rank: queue for rank, queue in queued.items() if queue}
            current = self.rounds.get(name)
            if current is None:
                continue
            for rank, queue in (current.queued or {}).items():
                queued.setdefault(rank, deque()).extend(queue)
            current.queued = queued or None
            if current.info.kind == _JOIN:
                self._join(current, now)
            paired = self._match_any_source(current, now)
            if paired is not current:
                self._complete(paired, now)
                return  # submissions queued behind it were started when the first one was given to the message
            if not self.is_complete(current):
                return
            if current.info.group and self._gets_verdict(current):
                self._complete(current, now)  # the verdict concerns the queued submissions as well
                return
            # This loop continues with it, instead of a recursion: there can be thousands.
            current.queued = None
            self._complete(current, now)

    def _gets_verdict(self, complete: NegotiationRound) -> bool:
        if complete.mismatch_since is not None:
            return True
        return self._lacks(complete) and refuse_with_joined(complete.info.signature, self.joined) is not None

    def _lacks(self, complete: NegotiationRound) -> bool:
        """Return whether a complete round lacks some of the ranks that it concerns, because they have joined."""
        return complete.info.from_any or len(complete.submissions) < (len(complete.info.between) or self.size)

    # -- verdicts -------------------------------------------------------------------------------------------------

    def _mismatch(self, current: NegotiationRound, now: float) -> None:
        name = current.info.name
        parties = parties_of(current.submissions)
        groups = {d.info.group for d in current.submissions.values()}
        if len(groups) > 1:
            # The ranks disagree about which tensors go together, so it is unknown which others the verdict concerns.
            listed = "; ".join(f"ranks {list(p.ranks)} ({p.site}): {p.request}" for p in parties)
            # The round stays where it is: the abort of the generation that follows reports it.
            self.conflict = f"the ranks disagree about `{name}`: {listed}"
            return
        self._reject_round(current, Mismatch(name, parties), now)

    def duplicate(self, name: str, rank: int, first_site: str, second_site: str, now: float) -> None:
        """Reject the round of ``name``, which a rank has submitted twice, if it has not been dispatched yet."""
        verdict = DuplicateName(name, rank, first_site, second_site)
        current = self.rounds.get(name)
        if current is None:
            for held in self.incomplete_groups.values():
                for complete in held:
                    if complete.info.name == name:
                        self._reject_group(complete.info, verdict, {}, now)
                        return
        # Otherwise the round in which the rank had submitted the name twice has been decided meanwhile, and this is the next one.
        elif rank in current.submissions:
            self._reject_round(current, verdict, now)

    def reject_mismatches(self, grace: float, now: float) -> None:
        """Reject the rounds in which ranks have disagreed for ``grace`` seconds."""
        for current in list(self.mismatches.values()):
            # The verdict on an earlier one can have ended this one as well, as a part of its group.
            there = self.mismatches.get(current.info.name) is current
            if there and current.mismatch_since is not None and now >= current.mismatch_since + grace:
                self._mismatch(current, now)

    @property
    def oldest_mismatch(self) -> float | None:
        """Return the time at which the oldest mismatch came up, or ``None`` if there is none."""
        return min(
            (r.mismatch_since for r in self.mismatches.values() if r.mismatch_since is not None), default=None
        )

    # -- messages that end alone ----------------------------------------------------------------------------------

    def end_message(
        self, current: NegotiationRound, kind: CauseKind, ranks: tuple[int, ...], text: str, now: float
    ) -> None:
        """End a message that the other rank won't meet: the rank that waits gets this verdict, and its next submission of the name is due."""
        verdict = InVain(self.report_round(current, self.missing(current)), kind, ranks, text)
        left = list(self._all_submissions(current))[len(current.submissions) :]  # the heads come first
        self._remove_incomplete(current.info.name)
        for rank, defined in current.submissions.items():
            self._reject(rank, defined, verdict)
        self._submit_all(left, now)

    def cancel(self, rank: int, defined: LocalDefinition, later: int, now: float) -> AbortedCollective | None:
        """Cancel a message that waits for the other rank.

        Args:
            rank: The rank that gives it up.
            defined: The definition under which it had submitted the message.
            later: How many more it has submitted under that definition after this one.
            now: The time, in monotonic seconds.

        Returns:
            The report of the round; ``None`` if the message does not wait any more.
        """
        current = self.rounds.get(defined.info.name)
        # A faulty peer can name a collective, whose end concerns more ranks than the two of a message.
        if current is None or not defined.info.between:
            return None
        items = list(self._all_submissions(current))
        # Counted from the youngest: the rank can't know how many of its submissions have been decided by now.
        alike = [place for place, (of, item) in enumerate(items) if of == rank and item[0] is defined]
        if len(alike) <= later:
            return None
        report = self.report_round(current, self.missing(current))
        self._remove_incomplete(current.info.name)
        del items[alike[-1 - later]]
        self._submit_all(items, now)
        return report

    def _remove_incomplete(self, name: str) -> NegotiationRound:
        """Remove and return a round that ends before it is complete."""
        current = self.rounds[name]
        self.remove(current)
        self.mismatches.pop(name, None)
        if current is self.joining:
            self.joining = None
        return current

    def _reject_round(self, current: NegotiationRound, verdict: RejectReason, now: float) -> None:
        info = current.info
        self._remove_incomplete(info.name)
        for rank, defined in current.submissions.items():
            self._reject(rank, defined, verdict)
        if info.group:
            self._reject_group(info, verdict, dict.fromkeys(current.submissions, 1), now, current.queued)
            return
        # A third rank will never submit a message between two others, and would keep the verdict for its own next one.
        concerned = self.concerned(current)
        for rank in self.not_joined():
            if rank not in current.submissions and rank in concerned:
                self.owed.add(rank, info, 1, verdict)
        if current.queued:
            self._start_queued(info.name, current.queued, now)

    def _reject_group(
        self,
        info: InternedSignature,
        verdict: RejectReason,
        taken: dict[int, int],
        now: float,
        queued: dict[int, deque[Item]] | None = None,
    ) -> None:
        """Extend a verdict to the whole group: its tensors are dispatched together or not at all."""
        # ``taken`` counts the submissions of the group that have got the verdict, by rank.
        group, size = info.group, info.group_size
        for complete in self.incomplete_groups.pop(group, ()):
            for rank, defined in complete.submissions.items():
                self._reject(rank, defined, verdict)
                taken[rank] = taken.get(rank, 0) + 1
        left = [(rank, item) for rank, queue in (queued or {}).items() for item in queue]
        for name in [
            n for n, r in self.rounds.items() if any(d.info.group == group for d in r.submissions.values())
        ]:
            left += self._all_submissions(self._remove_incomplete(name))
        again: list[tuple[int, Item]] = []
        for rank, item in left:
            # A rank has `size` submissions in each use of a group; further ones in the queues belong to its next use, which is not
            # concerned.
            if item[0].info.group == group and taken.get(rank, 0) < size:
                taken[rank] = taken.get(rank, 0) + 1
                self._reject(rank, item[0], verdict)
            else:
                again.append((rank, item))
        for rank in self.not_joined():
            if taken.get(rank, 0) < size:
                self.owed.add(rank, info, size - taken.get(rank, 0), verdict)
        self._submit_all(again, now)  # last: their rounds must find all verdicts that their ranks owe

    def _reject(self, rank: int, defined: LocalDefinition, verdict: RejectReason) -> None:
        self.rejections.append(Rejection(len(self.ready), rank, defined.local, verdict))

    @staticmethod
    def _all_submissions(current: NegotiationRound) -> Iterable[tuple[int, Item]]:
        """Yield all submissions of a round and those queued behind it, oldest first for each rank."""
        extras = current.extras or {}
        for rank, defined in current.submissions.items():
            yield rank, (defined, extras.get(rank, ()))
        for rank, queue in (current.queued or {}).items():
            for item in queue:
                yield rank, item

    # -- which ranks a round waits for ----------------------------------------------------------------------------

    def is_complete(self, current: NegotiationRound) -> bool:
        """Return whether all ranks that the round concerns have submitted it, or have joined."""
        joining, submissions = self.joining, current.submissions
        if (
            current.info.from_any
        ):  # a message's round gets it as soon as there is one, so only joining can end its wait here
            return joining is not None and not self.missing(current)
        if current.info.between:
            joined = () if joining is None else joining.submissions
            return all(rank in submissions or rank in joined for rank in current.info.between)
        if joining is None or joining is current:
            return len(submissions) == self.size
        return all(rank in submissions or rank in joining.submissions for rank in self.ranks)

    def not_joined(self) -> Iterable[int]:
        """Return the members that have not joined."""
        joining = self.joining
        return (
            self.ranks
            if joining is None
            else [rank for rank in self.ranks if rank not in joining.submissions]
        )

    def missing(self, current: NegotiationRound) -> tuple[int, ...]:
        """Return the ranks that a round waits for, or any of which a receive from any rank waits for; never one that has joined."""
        wanted = self.ranks if current is self.joining else self.not_joined()
        between = () if current.info.from_any else current.info.between
        return tuple(
            rank for rank in wanted if rank not in current.submissions and (not between or rank in between)
        )

    def concerned(self, current: NegotiationRound) -> set[int]:
        """Return the ranks that some submission of a round concerns."""
        return {rank for head in current.submissions.values() for rank in head.info.between or self.ranks}

    def waiting(self) -> Iterable[tuple[NegotiationRound, tuple[int, ...]]]:
        """Yield the undecided rounds with the ranks that are missing (none for those held back by their group).

        Those that wait for their turn are not among them: no rank is missing, and they will be executed.
        """
        for current in self.rounds.values():
            yield current, self.missing(current)
        for held in self.incomplete_groups.values():
            for complete in held:
                yield complete, ()
        for complete in self.ready:
            yield complete, ()

    def report(self) -> tuple[AbortedCollective, ...]:
        """Return the undecided collectives, for error texts."""
        waiting = [*self.waiting(), *((current, ()) for current in self.priorities)]
        full = sum(len(current.submissions) for current, _ in waiting) <= SITES_LIMIT
        return tuple(self.report_round(current, missing, all_sites=full) for current, missing in waiting)

    def report_round(
        self, current: NegotiationRound, missing: tuple[int, ...], *, all_sites: bool = True
    ) -> AbortedCollective:
        """Return a round as messages report it."""
        waited = tuple(sorted(current.submissions))
        shown = waited if all_sites else waited[:1]
        sites = tuple(current.submissions[rank].site for rank in shown)
        return AbortedCollective(current.info.kind, current.info.name, waited, missing, sites, self.joined)

    def validate(self) -> None:
        """Assert the invariants that hold between calls."""
        members = self.members
        assert not self.rejections
        self.priorities.validate()
        assert all(current.info.fuse_key is not None for current in self.ready), "held, but never fused"
        for name, current in self.rounds.items():
            with InvariantOf(name=name):
                assert name == current.info.name
                assert current.submissions.keys() <= members
                assert current.submissions, name
                assert len(current.submissions) < self.size or current.info.between, (
                    name,
                    current.submissions,
                )
                assert (current.mismatch_since is None) == all(
                    d.info is current.info for d in current.submissions.values()
                )
                assert not self.is_complete(current)
                for rank, queue in (current.queued or {}).items():
                    assert queue
                    assert rank in current.submissions
        for group, held in self.incomplete_groups.items():
            assert 0 < len(held) < held[0].info.group_size
            assert all(r.info.group == group and r.submissions.keys() | {*r.absent} == members for r in held)
        assert self.mismatches == {n: r for n, r in self.rounds.items() if r.mismatch_since is not None}
        self.channels.validate(self.rounds.values())
        assert self.joining is None or self.rounds.get(self.joining.info.name) is self.joining
        assert self.owed.ranks <= members - {*self.joined}


class RejectReason(Protocol):
    """Reason to reject a round: the *verdict* on it.

    Attributes:
        name: The round's name.
        decision: Its entry in the decision log; 0 as long as it has none.
    """

    name: str
    decision: int

    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that it is about."""
        ...

    def facts(self) -> dict[str, str]:
        """Return its other fields for the decision log."""
        ...

    def message(self, process_set: int, generation: int, locals: tuple[int, ...]) -> Message:
        """Return the message to a rank about its submissions with these local ids."""
        ...


class Mismatch:
    """Reason to reject a round in which ranks disagree.

    Attributes:
        name, decision: As in :class:`RejectReason`.
        parties: The requests that ranks have made, each with its ranks and the line of one of them.
    """

    __slots__ = ("decision", "name", "parties")

    def __init__(self, name: str, parties: tuple[Party, ...]) -> None:
        self.name, self.parties, self.decision = name, parties, 0

    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for party in self.parties for rank in party.ranks)

    def facts(self) -> dict[str, str]:
        return {format_ranks(party.ranks): f"{party.request} ({party.site})" for party in self.parties[:4]}

    def message(self, process_set: int, generation: int, locals: tuple[int, ...]) -> Message:
        return Reject(process_set, generation, locals, self.name, self.parties, self.decision)


class DuplicateName:
    """Reason to reject a round: one rank has submitted its name twice.

    Attributes:
        name, decision: As in :class:`RejectReason`.
        rank: The rank.
        first_site, second_site: The lines of its two submissions.
    """

    __slots__ = ("decision", "first_site", "name", "rank", "second_site")

    def __init__(self, name: str, rank: int, first_site: str, second_site: str) -> None:
        self.name, self.rank, self.first_site, self.second_site = name, rank, first_site, second_site
        self.decision = 0

    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)

    def facts(self) -> dict[str, str]:
        return {"first_site": self.first_site, "second_site": self.second_site}

    def message(self, process_set: int, generation: int, locals: tuple[int, ...]) -> Message:
        sites = self.first_site, self.second_site
        return RejectDuplicate(process_set, generation, locals, self.name, self.rank, *sites, self.decision)


class Impossible:
    """Reason to reject a round on which all ranks agree, but which is impossible.

    Attributes:
        name, decision: As in :class:`RejectReason`.
        reason: Why it can't be done, in one sentence.
        joined: The ranks that have joined, if it can't be done because of them.
    """

    __slots__ = ("decision", "joined", "name", "reason")

    def __init__(self, name: str, reason: str, joined: tuple[int, ...] = ()) -> None:
        self.name, self.reason, self.joined, self.decision = name, reason, joined, 0

    def ranks(self) -> tuple[int, ...]:
        return self.joined

    def facts(self) -> dict[str, str]:
        return {"reason": self.reason}

    def message(self, process_set: int, generation: int, locals: tuple[int, ...]) -> Message:
        return Decline(process_set, generation, locals, self.name, self.reason, self.joined, self.decision)


class InVain:
    """Reason to end a message that the other rank won't meet: it ends alone, since it concerns no third rank.

    Attributes:
        name, decision: As in :class:`RejectReason`.
        report: Its submissions so far.
        kind, culprits, text: The cause.
    """

    __slots__ = ("culprits", "decision", "kind", "name", "report", "text")

    def __init__(
        self, report: AbortedCollective, kind: CauseKind, culprits: tuple[int, ...], text: str
    ) -> None:
        self.report, self.kind, self.culprits, self.text = report, kind, culprits, text
        self.name, self.decision = report.name, 0

    def ranks(self) -> tuple[int, ...]:
        return self.culprits

    def facts(self) -> dict[str, str]:
        return {"cause": self.kind.value, "text": self.text}

    def message(self, process_set: int, generation: int, locals: tuple[int, ...]) -> Message:
        cause = self.kind.value, self.culprits, self.text, ""
        return Cancelled(process_set, generation, locals, *cause, self.report, decision=self.decision)


def log_verdict(process_set: int, generation: int, verdict: RejectReason) -> Iterator[DecisionEntry]:
    """Yield the verdict for the decision log, unless it has an entry: slower ranks get it later, under the same number."""
    if not verdict.decision:
        entry = DecisionEntry(
            DecisionKind.REJECTED,
            process_set=process_set,
            generation=generation,
            names=(verdict.name,),
            ranks=verdict.ranks(),
            facts=verdict.facts(),
        )
        yield entry
        verdict.decision = entry.number


class Rejection(NamedTuple):
    """Submission that got a verdict.

    Attributes:
        after: How many rounds were ready before. A rank distinguishes its submissions of one local id by their order
            alone, so they have to end in that order.
        rank, local: The rank that submitted it, and its local id.
        verdict: The verdict.
    """

    after: int
    rank: int
    local: int
    verdict: RejectReason


class OwedRejections(dict[tuple[int, str, str], deque[tuple[int, RejectReason]]]):
    """Rejections for ranks that have not submitted yet.

    After a mismatch the round is over, but slower ranks will still submit that name once: they get the same error at once, instead of
    starting a new round alone. For each rank, and name or group: how many of its next submissions get which verdict.
    """

    @property
    def ranks(self) -> set[int]:
        return {rank for rank, _, _ in self}

    def add(self, rank: int, info: InternedSignature, count: int, verdict: RejectReason) -> None:
        """Reject the next ``count`` submissions of this name, or of its group if it has one, with this verdict."""
        self.setdefault(_key(rank, info), deque()).append((count, verdict))

    def pop_next(self, rank: int, info: InternedSignature) -> RejectReason | None:
        """Remove and return the verdict that a submission gets, if the rank owes it; ``None`` otherwise."""
        key = _key(rank, info)
        owed = self.get(key)
        if owed is None:
            return None
        count, verdict = owed.popleft()
        if count > 1:
            owed.appendleft((count - 1, verdict))
        elif not owed:
            del self[key]
        return verdict

    def discard_rank(self, rank: int) -> None:
        """Forget the rejections of ``rank``, which will not submit these names."""
        for key in [key for key in self if key[0] == rank]:
            del self[key]


def _key(rank: int, info: InternedSignature) -> tuple[int, str, str]:
    return (rank, "", info.group) if info.group else (rank, info.name, "")


_WITH_ZEROS = frozenset({ReduceOp.SUM, ReduceOp.AVERAGE})
"""Operators for which zeros are a contribution like another."""


def refuse_with_joined(signature: Signature, joined: tuple[int, ...]) -> Impossible | None:
    """Return the verdict on a collective to which the ranks ``joined`` can't contribute; ``None`` if they can."""
    kind = signature.kind
    if kind == OpKind.BARRIER or (kind == OpKind.ALLREDUCE and signature.op in _WITH_ZEROS):
        return None
    what = call_name(kind_label(kind), signature.name)
    if kind == OpKind.ALLREDUCE:
        what += f" with op={_operator(signature.op)}"
    has = "has" if len(joined) == 1 else "have"
    reason = (
        f"{what} is not supported with join: {format_ranks(joined)} {has} joined, having no data left. "
        "Until all ranks have joined only allreduce with Sum or Average, and barrier, can be used"
    )
    return Impossible(signature.name, reason, joined)


def refuse_incomplete(signature: Signature, joined: tuple[int, ...]) -> Impossible:
    """Return the verdict on a group of which some tensors have not been submitted when all ranks have joined."""
    what = call_name(kind_label(signature.kind), signature.name)
    reason = f"{what} is one of a group of {signature.group_size} tensors, which was not complete when all ranks joined"
    return Impossible(signature.name, reason, joined)


def _operator(op: int) -> str:
    try:
        return ReduceOp(op).name.capitalize()
    except ValueError:
        return str(op)
