"""The rendezvous store of one process set and epoch."""

from __future__ import annotations

from hvdlab.collectives.coordinator.events import Outbox
from hvdlab.collectives.protocol.messages import StoreValue


class Store:
    """Values by key, and the peers that wait for keys which are not set yet."""

    __slots__ = ("_values", "_waiting")

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, int]]] = {}

    def set(self, key: str, value: bytes, outbox: Outbox) -> None:
        """Keep a value (the last one counts) and answer the peers that wait for it."""
        self._values[key] = value
        for peer, ticket in self._waiting.pop(key, ()):
            outbox.send((peer,), StoreValue(ticket, value))

    def get(self, key: str, peer: int, ticket: int, outbox: Outbox) -> None:
        """Answer ``peer`` now, or once the key is set."""
        value = self._values.get(key)
        if value is None:
            self._waiting.setdefault(key, []).append((peer, ticket))
        else:
            outbox.send((peer,), StoreValue(ticket, value))
