"""Matching of submissions: per name, the heads of the ranks' queues against each other.

A *round* of a name ends when each member has a submission at the head: ready if they are equal, else with a verdict.
Where heads differ, the coordinator waits a little for the ranks that are still missing, so that the error can name all that was
asked for; then the verdict holds for the whole round: the ranks that have a head get it now, the others owe one
submission of that name, which gets the same verdict when it arrives. So every rank raises, and none waits long for
another one to make the same mistake.

No round waits for a rank that has *joined*: it is complete without it. Joining is a round, too, the one that
every member has to submit.

A message of one member to another is a round that only these two have to submit. A receive from any rank is a round of its own as
long as it waits. Where it and a message of its channel wait at the same time, it becomes the receiver's part of the message's round;
the order then says which rank has sent. A receive that names the sender gets a message before those from any rank do, and of several
messages the oldest is received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hvdlab.collectives.coordinator.joining import refuse_incomplete, refuse_with_joined
from hvdlab.collectives.coordinator.pending import PendingRounds, waits_for_receiver
from hvdlab.collectives.coordinator.rounds import Extra, Item, Round, parties_of
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
            rank: The rank that submits.
            defined: What its local id stands for.
            extra: The numbers that go along with it.
            now: The time, in monotonic seconds.
            payload: The tensor's bytes, if they came along. Those of a submission that waits behind another are dropped.
            look: Whether to check if its round is complete now; otherwise the caller does.

        Returns:
            Its round, or ``None`` if it got a verdict or waits behind another one.
        """
        info = defined.info
        if self.debts and (verdict := self.debts.settle(rank, info)) is not None:
            self._reject(rank, defined, verdict)
            return None
        if info.from_any and info.between != (rank,):
            raise ValueError("a receive from any rank in place of another rank")
        current = self.rounds.get(info.name)
        if current is None:
            current = Round(info, defined.local, now, defined.priority)
            self.add(current)
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
            if self.joining is not None or info.kind == _JOIN or current.info.between:
                self._look(current, now)
            elif len(heads) == self.size:
                self._complete(current, now)
        return current

    def _submit_all(self, items: Iterable[tuple[int, Item]], now: float) -> None:
        """Take in several submissions before checking which rounds have become complete.

        No round waits for a rank that has joined, but what it has submitted before that has to meet the others' submissions.
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
        current = self._pair(current, now)
        if self.is_complete(current):
            self._complete(current, now)

    def _pair(self, current: Round, now: float) -> Round:
        """If a message and a receive from any rank wait for each other, make one round of them.

        Args:
            current: A round that has a new head.
            now: The time, in monotonic seconds.

        Returns:
            The round of the message, which is complete now; else ``current``.
        """
        channel = current.info.channel
        if channel is None or current.disputed is not None:
            return current
        received: Round | None = current
        sent: Round | None = current
        if current.info.from_any:
            sent = self.oldest_sent(channel)
        elif waits_for_receiver(current):
            received = self.oldest_received(channel)
        else:
            return current
        if received is None or sent is None:
            return current
        (target, defined), *_ = received.heads.items()
        self._take_out(received.info.name)
        sent.heads[target] = defined
        sent.agree = False
        sent.extras = dict.fromkeys(
            sent.info.between, sent.info.between[:1]
        )  # tells the receiver which rank has sent
        if not defined.info.may_get(sent.info):
            sent.disputed = now
            self.disputes[sent.info.name] = sent
        if received.behind:
            self._advance(received.info.name, received.behind, now)
        return sent

    def _join(self, joining: Round, now: float) -> None:
        """A rank has run out of work: no round but the joining itself waits for it any more."""
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
        self.remove(complete)
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
        """A round was completed while ranks have joined. If it is the joining itself, all have: add which rank was the last."""
        assert self.joining is not None
        if complete is self.joining:
            for held in list(self.held.values()):  # no rank is left that might complete these groups
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
            paired = self._pair(current, now)
            if paired is not current:
                self._complete(paired, now)
                return  # what waits behind went on when the first one was given to the message
            if not self.is_complete(current):
                return
            if current.info.group and self._gets_verdict(current):
                self._complete(current, now)  # the verdict concerns what waits behind as well
                return
            current.behind = None  # this loop goes on with it, and not a recursion: there may be thousands
            self._complete(current, now)

    def _gets_verdict(self, complete: Round) -> bool:
        if complete.disputed is not None:
            return True
        return self._lacks(complete) and refuse_with_joined(complete.info.signature, self.joined) is not None

    def _lacks(self, complete: Round) -> bool:
        """Whether a complete round lacks some of the ranks that it concerns, because they have joined."""
        return complete.info.from_any or len(complete.heads) < (len(complete.info.between) or self.size)

    # -- verdicts -------------------------------------------------------------------------------------------------

    def _mismatch(self, current: Round, now: float) -> None:
        name = current.info.name
        parties = parties_of(current.heads)
        groups = {d.info.group for d in current.heads.values()}
        if len(groups) > 1:
            # The ranks disagree about which tensors go together, so it can't be said which others the verdict concerns.
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
        """The other rank of a message won't come: the rank that waits gets this verdict, and its next submission of the name is due."""
        verdict = InVain(self.report_round(current, self.missing(current)), kind, ranks, text)
        left = list(self._withdraw(current))[len(current.heads) :]  # the heads come first
        self._take_out(current.info.name)
        for rank, defined in current.heads.items():
            self._reject(rank, defined, verdict)
        self._submit_all(left, now)

    def cancel(self, rank: int, defined: Defined, later: int, now: float) -> AbortedCollective | None:
        """A rank gives up a message that waits for the other rank.

        Args:
            rank: The rank that gives it up.
            defined: The definition under which it had submitted the message.
            later: How many more it has submitted under that definition after this one.
            now: The time, in monotonic seconds.

        Returns:
            The report of the round; ``None`` if the message does not wait any more.
        """
        current = self.rounds.get(defined.info.name)
        if current is None or not defined.info.between:
            return None
        items = list(self._withdraw(current))
        alike = [place for place, (of, item) in enumerate(items) if of == rank and item[0] is defined]
        if len(alike) <= later:
            return None
        report = self.report_round(current, self.missing(current))
        self._take_out(current.info.name)
        del items[alike[-1 - later]]
        self._submit_all(items, now)
        return report

    def _take_out(self, name: str) -> Round:
        """Take out a round that ends before it is complete."""
        current = self.rounds[name]
        self.remove(current)
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
