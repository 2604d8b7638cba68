"""Announcements that a relay holds until all of its ranks have sent an equal one."""

from __future__ import annotations

from collections.abc import Collection

HOLD = 1e-3
"""Seconds for which an announcement is held at most."""


class Held:
    """An announcement that some ranks have sent.

    Attributes:
        payload: Its bytes.
        peers: The ranks, by the relay's numbers.
        due: When it has to go on.
    """

    __slots__ = ("due", "payload", "peers")

    def __init__(self, payload: bytes, due: float) -> None:
        self.payload = payload
        self.peers: dict[int, None] = {}
        self.due = due


class Holding:
    """What is held, in the order in which it goes on: each rank's announcements stay in order, so those before one go with it."""

    def __init__(self) -> None:
        self._held: list[Held] = []

    @property
    def due(self) -> float | None:
        """When the first one has to go on; ``None`` if none is held."""
        return self._held[0].due if self._held else None

    def put(self, peers: Collection[int], payload: bytes, now: float) -> None:
        """Hold an announcement of these ranks, with an equal one of others if that is behind all that these have sent before."""
        for held in self._held[self._behind(peers) :]:
            if held.payload == payload:
                held.peers.update(dict.fromkeys(peers))
                return
        held = Held(payload, now + HOLD)
        held.peers.update(dict.fromkeys(peers))
        self._held.append(held)

    def take_complete(self, count: int) -> list[Held]:
        """Take out what all of the relay's ranks, of which there are ``count``, have sent."""
        complete = [place for place, held in enumerate(self._held) if len(held.peers) >= count]
        return self._take(complete[-1] + 1 if complete else 0)

    def take_of(self, peers: Collection[int]) -> list[Held]:
        """Take out what these ranks have sent, since something else of theirs goes on."""
        return self._take(self._behind(peers))

    def take_due(self, now: float) -> list[Held]:
        """Take out what has been held for long enough."""
        return self._take(sum(held.due <= now for held in self._held))

    def _behind(self, peers: Collection[int]) -> int:
        """The place behind the last one that any of these ranks has sent."""
        for place in range(len(self._held) - 1, -1, -1):
            if not self._held[place].peers.keys().isdisjoint(peers):
                return place + 1
        return 0

    def _take(self, count: int) -> list[Held]:
        taken, self._held = self._held[:count], self._held[count:]
        return taken
