"""Matching of submissions: per name, the heads of the ranks' queues against each other.

A *round* of a name ends when each member has a submission at the head: ready if they are equal, else with a verdict.
Where heads differ, the ranks that are still missing are waited for a little, so that all that was asked for can be
named; then the verdict holds for the whole round: the ranks that have a head get it now, the others owe one
submission of that name, which gets the same verdict when it arrives. So every rank raises, and none waits long for
another one to make the same mistake.

A rank that has *joined* is not waited for: a round is complete without it. Joining is a round, too, the one that
every member has to submit.

A message of one member to another is a round that only these two have to submit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hvdlab.collectives.coordinator.joining import refuse_incomplete, refuse_with_joined
from hvdlab.collectives.coordinator.pending import PendingRounds
from hvdlab.collectives.coordinator.rounds import Extra, Item, Round, parties_of, report_round
from hvdlab.collectives.coordinator.signatures import Defined, Interned
from hvdlab.collectives.coordinator.verdicts import DuplicateName, InVain, Mismatch, Rejection, Verdict
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.errors import CauseKind
from hvdlab.collectives.protocol.messages import AbortedCollective

_JOIN = int(OpKind.JOIN)


class Matcher(PendingRounds):
    """Takes in submissions, and finds out which of them belong together."""

    # -- submissions ----------------------------------------------------------------------------------------------

    def submit(
        self,
        rank: int,
        defined: Defined,
        extra: Extra,
        now: float,
        payload: bytes = b"",
        *,
        look: bool = True,
    ) -> Round | None:
        """Take in a submission of a member.

        Args:
            rank: Whose it is.
            defined: What it is.
            extra: Its numbers.
            now: The time.
            payload: The tensor, if it came along. That of one that waits behind another is dropped.
            look: Whether to look if its round is complete now; the caller does if not.

        Returns:
            Its round, or ``None`` if it got a verdict or waits behind another one.
        """
        info = defined.info
        if self.debts and (verdict := self.debts.settle(rank, info)) is not None:
            self._reject(rank, defined, verdict)
            return None
        current = self.rounds.get(info.name)
        if current is None:
            current = self.rounds[info.name] = Round(info, defined.local, now)
        elif rank in current.heads:
            if current.behind is None:
                current.behind = {}
            current.behind.setdefault(rank, deque()).append((defined, extra))
            return None
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
            if current.disputed is None:
                current.disputed = now
                self.disputes[info.name] = current
        elif defined.local != current.local:
            current.agree = False
        if look:
            if self.joining is not None or info.kind == _JOIN:
                self._look(current, now)
            elif len(heads) == self.size or (current.info.between and self.is_complete(current)):
                self._complete(current, now)
        return current

    def _submit_all(self, items: Iterable[tuple[int, Item]], now: float) -> None:
        """Take in several submissions before looking at what has become complete.

        One that has joined is not waited for, but what it has submitted before is to meet that of the others.
        """
        placed: dict[Round, None] = {}
        for rank, (defined, extra) in items:
            current = self.submit(rank, defined, extra, now, look=False)
            if current is not None:
                placed[current] = None
        for current in placed:
            if self.rounds.get(current.info.name) is current:
                self._look(current, now)

    def _look(self, current: Round, now: float) -> None:
        if current.info.kind == _JOIN:
            self._join(current, now)
        if self.is_complete(current):
            self._complete(current, now)

    def _join(self, joining: Round, now: float) -> None:
        """A rank has run out of work: nobody waits for it any more."""
        self.joining = joining
        if self.debts:
            for rank in joining.heads:
                self.debts.forgive(rank)
        for current in list(self.rounds.values()):
            # Completing one may complete others of its name, or of its group, as well.
            there = current is not joining and self.rounds.get(current.info.name) is current
            if there and self.is_complete(current):
                self._complete(current, now)

    def _complete(self, complete: Round, now: float) -> None:
        info = complete.info
        if complete.disputed is not None:
            self._mismatch(complete, now)
            return
        if self._lacks(complete):
            complete.agree = False
            complete.absent = tuple(rank for rank in info.between or self.ranks if rank not in complete.heads)
            verdict = refuse_with_joined(info.signature, self.joined)
            if verdict is not None:
                self._decide(complete, verdict, now)
                return
        del self.rounds[info.name]
        if self.joining is not None:
            self._progress(complete, now)
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

    def _progress(self, complete: Round, now: float) -> None:
        """Something goes on while ranks have joined; when all have, each is told who was the last."""
        assert self.joining is not None
        if complete is self.joining:
            for held in list(self.held.values()):  # nobody is left who might complete these groups
                info = held[0].info
                self._decide_group(info, refuse_incomplete(info.signature, self.joined), {}, now)
            complete.extras = dict.fromkeys(self.ranks, (next(reversed(complete.heads)),))
            self.joining = None
        else:
            self.joining.since, self.joining.reported = now, 0

    def _advance(self, name: str, behind: dict[int, deque[Item]], now: float) -> None:
        """Begin the next rounds of ``name`` with what waited behind the last one."""
        while behind:
            for rank, queue in behind.items():
                while queue:
                    defined, extra = queue.popleft()
                    if self.submit(rank, defined, extra, now, look=False) is not None:
                        break
            behind = {rank: queue for rank, queue in behind.items() if queue}
            current = self.rounds.get(name)
            if current is None:
                continue
            for rank, queue in (current.behind or {}).items():
                behind.setdefault(rank, deque()).extend(queue)
            current.behind = behind or None
            if current.info.kind == _JOIN:
                self._join(current, now)
            if not self.is_complete(current):
                return
            if current.info.group and self._gets_verdict(current):
                self._complete(current, now)  # it concerns what waits behind as well
                return
            current.behind = None  # goes on here: there may be thousands
            self._complete(current, now)

    def _gets_verdict(self, complete: Round) -> bool:
        if complete.disputed is not None:
            return True
        return self._lacks(complete) and refuse_with_joined(complete.info.signature, self.joined) is not None

    def _lacks(self, complete: Round) -> bool:
        """Whether a round is complete without some of those that it concerns, as they have joined."""
        return len(complete.heads) < (len(complete.info.between) or self.size)

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

    def end_disputes(self, grace: float, now: float) -> None:
        """Give verdicts on the rounds that have been disputed for ``grace`` seconds."""
        for current in list(self.disputes.values()):
            there = self.disputes.get(current.info.name) is current
            if there and current.disputed is not None and now >= current.disputed + grace:
                self._mismatch(current, now)

    @property
    def disputed_since(self) -> float | None:
        """When the oldest dispute began, or ``None`` if there is none."""
        return min((r.disputed for r in self.disputes.values() if r.disputed is not None), default=None)

    # -- messages that end alone ----------------------------------------------------------------------------------

    def end_message(
        self, current: Round, kind: CauseKind, ranks: tuple[int, ...], text: str, now: float
    ) -> None:
        """The other rank of a message won't come: the one that waits gets this verdict, and what it has behind is next."""
        verdict = InVain(report_round(current, self.missing(current), self.joined), kind, ranks, text)
        left = list(self._withdraw(current))[len(current.heads) :]  # the heads come first
        self._take_out(current.info.name)
        for rank, defined in current.heads.items():
            self._reject(rank, defined, verdict)
        self._submit_all(left, now)

    def cancel(self, rank: int, defined: Defined, later: int, now: float) -> AbortedCollective | None:
        """A rank gives up a message that waits for the other rank.

        Args:
            rank: The rank.
            defined: What it had submitted it as.
            later: How many of the same it has submitted after it.
            now: The time.

        Returns:
            What had been submitted; ``None`` if it does not wait any more.
        """
        current = self.rounds.get(defined.info.name)
        if current is None or not defined.info.between:
            return None
        items = list(self._withdraw(current))
        alike = [place for place, (of, item) in enumerate(items) if of == rank and item[0] is defined]
        if len(alike) <= later:
            return None
        report = report_round(current, self.missing(current), self.joined)
        self._take_out(current.info.name)
        del items[alike[-1 - later]]
        self._submit_all(items, now)
        return report

    def _take_out(self, name: str) -> Round:
        """A round ends before it is complete."""
        current = self.rounds.pop(name)
        self.disputes.pop(name, None)
        if current is self.joining:
            self.joining = None
        return current

    def _decide(self, current: Round, verdict: Verdict, now: float) -> None:
        info = current.info
        self._take_out(info.name)
        for rank, defined in current.heads.items():
            self._reject(rank, defined, verdict)
        if info.group:
            self._decide_group(info, verdict, dict.fromkeys(current.heads, 1), now, current.behind)
            return
        concerned = self.concerned(current)
        for rank in self.not_joined():
            if rank not in current.heads and rank in concerned:
                self.debts.owe(rank, info, 1, verdict)
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
            left += self._withdraw(self._take_out(name))
        again: list[tuple[int, Item]] = []
        for rank, item in left:
            if item[0].info.group == group and taken.get(rank, 0) < size:
                taken[rank] = taken.get(rank, 0) + 1
                self._reject(rank, item[0], verdict)
            else:
                again.append((rank, item))
        for rank in self.not_joined():
            if taken.get(rank, 0) < size:
                self.debts.owe(rank, info, size - taken.get(rank, 0), verdict)
        self._submit_all(again, now)

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
