"""Events for peers that do not read as fast as ranks record.

Events for such a peer wait in this process; its other messages overtake them. A peer that is far behind gets no more events until it
has read those that wait; then it goes on with the present. How many it has missed is added to the number that the batches themselves
give as lost.
"""

from __future__ import annotations

import msgspec

from hvdlab.collectives.protocol.messages import RankEvents
from hvdlab.collectives.tracing.record_format import count_of, with_lost

BEHIND = 16 << 20
"""Bytes that may wait for a peer that has caught up before."""
BEHIND_AT_FIRST = 128 << 20
"""Bytes that may wait for a peer that is still reading the history."""
CAUGHT_UP = 1 << 20
"""Bytes that may wait for a peer that counts as having caught up."""


class Watcher:
    """How a subscriber keeps up.

    Attributes:
        behind: Whether it gets no events for now.
    """

    __slots__ = ("_missed", "_room", "behind")

    def __init__(self) -> None:
        self.behind = False
        self._room = BEHIND_AT_FIRST
        self._missed: dict[int, int] = {}

    def take(self, message: RankEvents, waiting: int) -> RankEvents | None:
        """The batch to send while ``waiting`` bytes wait for the peer, with what it has missed before; ``None`` to send nothing."""
        if waiting <= CAUGHT_UP:
            self.behind, self._room = False, BEHIND
        elif waiting > self._room:
            self.behind = True
        missed = self._missed.get(message.rank, 0)
        if self.behind:
            self._missed[message.rank] = missed + count_of(message.batch)
            return None
        if not missed:
            return message
        return msgspec.structs.replace(message, batch=with_lost(message.batch, missed))
