"""Finds out where ranks are: asks them, and looks at the processes of those that can't answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hvdlab.kernel_ext.cells.events import Event, ProcessSeen, StackArrived
from hvdlab.kernel_ext.processes import Processes, halted
from hvdlab.kernel_ext.questions import Answer, Questions
from hvdlab.kernel_ext.wire.codec import TO_RANK, encode
from hvdlab.kernel_ext.wire.status import AskStack, Stack

ELSEWHERE = "it does not answer"


class Lookout:
    """Asks the ranks of one pool where they are, and looks at their processes.

    Args:
        post: ``post(topic, body, ranks)``; must not block.
        questions: Hands out tickets, and answers.
        local_pid: The process of a rank on this host, or None.
    """

    def __init__(
        self,
        post: Callable[[str, bytes, Sequence[int]], None],
        questions: Questions,
        local_pid: Callable[[int], int | None],
    ) -> None:
        self._post, self._questions, self._local_pid = post, questions, local_pid
        self._processes = Processes()

    def watch(self, feed: Callable[[Event], None]) -> Watch:
        """The lookout of one cell; ``feed`` takes what is found, as events."""
        return Watch(self, feed)

    def ask(self, ticket: int, ranks: Sequence[int]) -> None:
        self._post(TO_RANK, encode(AskStack(ticket)), ranks)

    def look(self, ranks: Sequence[int]) -> dict[int, str]:
        """Rank to what keeps it from answering. Any thread; takes a moment."""
        pids = {rank: pid for rank in ranks if (pid := self._local_pid(rank)) is not None}
        return {**dict.fromkeys(ranks, ELSEWHERE), **self._processes.look_at(pids)}

    def halted(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of these ranks that can't answer since their process is stopped, with a text that says so. Any thread."""
        pids = {rank: pid for rank in ranks if (pid := self._local_pid(rank)) is not None}
        return {rank: text for rank, pid in pids.items() if (text := halted(pid))}

    def follow(self, take: Callable[[int, Answer], None]) -> int:
        return self._questions.follow(take)

    def unfollow(self, ticket: int) -> None:
        self._questions.unfollow(ticket)


class Watch:
    """The questions of one cell. Any thread."""

    def __init__(self, lookout: Lookout, feed: Callable[[Event], None]) -> None:
        self._lookout, self._feed = lookout, feed
        self._ticket = lookout.follow(self._answered)

    def ask(self, ranks: Sequence[int]) -> None:
        """Ask ranks where they are: :class:`StackArrived` brings each answer, :class:`ProcessSeen` why a rank can't answer."""
        self._lookout.ask(self._ticket, ranks)
        for rank, text in self._lookout.halted(ranks).items():
            self._feed(ProcessSeen(rank, text))

    def look(self, ranks: Sequence[int]) -> None:
        """Look at ranks' processes; the findings come as :class:`ProcessSeen`. Does not block."""
        threading.Thread(target=self._look, args=(tuple(ranks),), name="hvdlab-look", daemon=True).start()

    def _look(self, ranks: Sequence[int]) -> None:
        for rank, text in self._lookout.look(ranks).items():
            self._feed(ProcessSeen(rank, text))

    def close(self) -> None:
        """Take no more answers."""
        self._lookout.unfollow(self._ticket)

    def _answered(self, rank: int, answer: Answer) -> None:
        if isinstance(answer, Stack):
            self._feed(StackArrived(rank, answer))
