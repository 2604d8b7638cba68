"""Event history: the newest event batches of all ranks, and the peers that subscribe to new ones.

Ranks can record faster than a subscriber reads. Its events wait in this process, and its other messages overtake them. One that
lags far behind gets no more events until it has read those that wait; then it continues with the present. The number of events that
it has missed is added to the number that the batches themselves give as lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

import msgspec

from hvdlab.collectives.coordinator.events import Send
from hvdlab.collectives.coordinator.process import HISTORY_BYTES
from hvdlab.collectives.protocol.messages import RankEvents
from hvdlab.collectives.tracing.record_format import count_of, with_lost

UNREAD_BYTES = 4 * 1024 * 1024
"""Size in bytes of the history until the first client comes: only clients ask for the past."""


class EventHistory:
    """Bounded history of the newest event batches, up to ``limit`` bytes of payload.

    Attributes:
        limit: Bytes of payload that are kept at most.
        nbytes: Bytes of payload that are kept now.
        dropped: Number of batches that made room for newer ones.
        number: Number of the newest batch; the first one was 1.
    """

    def __init__(self, limit: int = HISTORY_BYTES) -> None:
        self.limit = limit
        self.nbytes = 0
        self.dropped = 0
        self.number = 0
        #: The newest batches, in order.
        self._batches: deque[RankEvents] = deque()
        #: Connections of subscribers; a tuple, since it is the audience of each batch.
        self._subscribers: tuple[int, ...] = ()

    def pass_on(self, rank: int, batch: bytes) -> Generator[Send, None, None]:
        """Keep a batch of ``rank`` and pass it on."""
        self.number += 1
        message = RankEvents(rank, batch, self.number)
        self._batches.append(message)
        self.nbytes += len(batch)
        # A batch that alone exceeds the limit is not kept either; subscribers get it all the same.
        while self.nbytes > self.limit:
            self.nbytes -= len(self._batches.popleft().batch)
            self.dropped += 1
        yield Send(self._subscribers, message)

    def subscribe(self, peer: int, *, past: bool = True, after: int = 0) -> Generator[Send, None, None]:
        """Send ``peer`` the history, oldest first, and everything from now on. Idempotent.

        Args:
            peer: The subscriber.
            past: Whether it gets the history.
            after: Number of the last batch that it has already: of the history it gets those after that one.
        """
        if peer in self._subscribers:
            return
        # Before it is a subscriber: it gets all batches in the order of their numbers.
        for message in self._batches if past else ():
            if message.number > after:
                yield Send((peer,), message)
        self._subscribers += (peer,)

    def unsubscribe(self, peer: int) -> None:
        self._subscribers = tuple(p for p in self._subscribers if p != peer)


LAG_LIMIT = 16 << 20
"""Bytes that can wait for a peer that has caught up before."""
FIRST_LAG_LIMIT = 128 << 20
"""Bytes that can wait for a peer that is still reading the history, which has up to :data:`HISTORY_BYTES` of payload by default."""
CAUGHT_UP_BYTES = 1 << 20
"""Bytes that can wait for a peer that counts as having caught up."""


class LaggingSubscriber:
    """Subscriber that can read more slowly than events come.

    Attributes:
        lagging: Whether it gets no events for now.
    """

    __slots__ = ("_missed", "_room", "lagging")

    def __init__(self) -> None:
        self.lagging = False
        #: Bytes that can wait for it now.
        self._room = FIRST_LAG_LIMIT
        #: Number of events that it has missed, by the rank that recorded them.
        self._missed: dict[int, int] = {}

    def next_batch(self, message: RankEvents, waiting: int) -> RankEvents | None:
        """Return the batch to send while ``waiting`` bytes wait for the peer, or ``None`` to send nothing.

        The number of events that it has missed before is added to those that the batch gives as lost.
        """
        if waiting <= CAUGHT_UP_BYTES:
            self.lagging, self._room = False, LAG_LIMIT
        elif waiting > self._room:
            self.lagging = True
        # Never set back to 0: a batch gives as lost all records since its rank began, so the missed ones have to stay in each later
        # sum.
        missed = self._missed.get(message.rank, 0)
        if self.lagging:
            self._missed[message.rank] = missed + count_of(message.batch)
            return None
        if not missed:
            return message
        return msgspec.structs.replace(message, batch=with_lost(message.batch, missed))
