"""Events for peers that do not read as fast as ranks record.

What they are sent waits in this process; only what else they are sent overtakes it. So who is far behind gets no events until he has
read what waits; then he goes on with the present. How much he has missed is added to what the batches themselves say
was lost.
"""

from __future__ import annotations

import msgspec

from hvdlab.collectives.coordinator.connection import Connection
from hvdlab.collectives.protocol.messages import RankEvents
from hvdlab.collectives.timeline.batches import count_of, with_lost

BEHIND = 16 << 20
"""Bytes that may wait for one who has read everything before."""
BEHIND_AT_FIRST = 128 << 20
"""Bytes that may wait for one who is still reading the history."""
CAUGHT_UP = 1 << 20
"""Bytes that may wait for one who counts as having read everything."""


class Watcher:
    """How a subscriber keeps up.

    Attributes:
        behind: Whether he gets no events for now.
    """

    __slots__ = ("_missed", "_room", "behind")

    def __init__(self) -> None:
        self.behind = False
        self._room = BEHIND_AT_FIRST
        self._missed: dict[int, int] = {}

    def take(self, message: RankEvents, waiting: int) -> RankEvents | None:
        """What to send of a batch while so many bytes wait; ``None`` for nothing."""
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


def take(connection: Connection, message: RankEvents) -> RankEvents | None:
    """What to send to this subscriber of a batch, or ``None``."""
    if connection.watcher is None:
        connection.watcher = Watcher()
    return connection.watcher.take(message, connection.endpoint.backlog)
