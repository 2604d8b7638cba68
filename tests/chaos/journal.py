"""Journal that a rank of elastic training keeps of its own history, and its reports to the campaign.

The numbers of all elastic campaigns are whole ones in 64-bit floats, so that sums are exact in any order:
the model after any steps depends on the ranks of each step alone (:func:`replayed`).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence

from hvdlab.collectives import context

COMMIT_EVERY = 3
"""Steps between commits, more than which must not be lost."""

Groups = Sequence[tuple[tuple[int, ...], int]]
"""Ranks, and how many steps in a row they made together."""


def factor(step: int) -> int:
    """Return the factor of a rank's gradient in this step: its number plus one is the rest."""
    return 1 + step % 7


def with_step(groups: Groups, ranks: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
    """Return these groups, after one more step of these ranks."""
    found = [*groups]
    if found and found[-1][0] == ranks:
        found[-1] = (ranks, found[-1][1] + 1)
    else:
        found.append((ranks, 1))
    return found


def replayed(groups: Groups) -> tuple[float, float]:
    """Return any element of the model and of its momentum after these ranks have trained so many steps each."""
    weight = momentum = step = 0
    for ranks, count in groups:
        for _ in range(count):
            momentum += sum(rank + 1 for rank in ranks) * factor(step)
            weight -= momentum
            step += 1
    return float(weight), float(momentum)


class Journal:
    """History of one process in the training.

    Args:
        mailbox: Socket of the campaign's mailbox.

    Attributes:
        pid, rank: The process, and its number, which stays while other ranks come or go.
        done: Steps that this process has completed.
        committed: Steps that it has committed.
        back: Each time it went back: from which step, to which one, and with which commit.
    """

    def __init__(self, mailbox: str) -> None:
        self._mailbox = mailbox
        self.pid, self.rank = os.getpid(), context.engine().rank
        self.done = self.committed = 0
        self.back: list[tuple[int, int, int]] = []

    def begin(self, step: int) -> None:
        """Begin training, or continue with other ranks, from this step."""
        if step < self.done:
            self.back.append((self.done, step, self.committed))
        self.done = step

    def tell(self, ranks: Sequence[int], kept: str, host: str = "") -> None:
        """Report a commit that was made with these ranks; ``kept`` is the hash of the memory that must not change."""
        letter = {
            "rank": self.rank,
            "what": "step",
            "at": time.monotonic_ns() / 1e9,
            "step": self.done,
            "group": list(ranks),
            "pid": self.pid,
            "host": host,
            "back": self.back,
            "kept": kept,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(json.dumps(letter).encode(), self._mailbox)
