"""The ranks' event batches: a bounded history, and the peers that subscribe to new ones."""

from __future__ import annotations

from collections import deque

from hvdlab.collectives.coordinator.events import Outbox
from hvdlab.collectives.coordinator.options import HISTORY_BYTES
from hvdlab.collectives.protocol.messages import RankEvents

UNREAD_BYTES = 4 * 1024 * 1024
"""Size in bytes of the history until the first client comes: only clients ask for the past."""


class History:
    """Keeps the newest batches, up to ``limit`` bytes of payload.

    Attributes:
        dropped: How many batches made room for newer ones.
        number: Number of the newest batch; the first one was 1.
    """

    def __init__(self, limit: int = HISTORY_BYTES) -> None:
        self.limit = limit
        self.nbytes = 0
        self.dropped = 0
        self.number = 0
        self._batches: deque[RankEvents] = deque()
        self._subscribers: tuple[int, ...] = ()

    def add(self, rank: int, batch: bytes, outbox: Outbox) -> None:
        """Keep a batch of ``rank`` and pass it on."""
        self.number += 1
        message = RankEvents(rank, batch, self.number)
        self._batches.append(message)
        self.nbytes += len(batch)
        while self.nbytes > self.limit:
            self.nbytes -= len(self._batches.popleft().batch)
            self.dropped += 1
        outbox.send(self._subscribers, message)

    def subscribe(self, peer: int, outbox: Outbox, *, past: bool = True, after: int = 0) -> None:
        """Send ``peer`` the history, oldest first, and everything from now on. Idempotent.

        Args:
            peer: The subscriber.
            outbox: Takes the messages.
            past: Whether it gets the history.
            after: Number of the last batch that it has already: of the history it gets those after that one.
        """
        if peer in self._subscribers:
            return
        for message in self._batches if past else ():
            if message.number > after:
                outbox.send((peer,), message)
        self._subscribers += (peer,)

    def unsubscribe(self, peer: int) -> None:
        self._subscribers = tuple(p for p in self._subscribers if p != peer)
