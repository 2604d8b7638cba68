"""A part of the rendezvous store."""

from __future__ import annotations

from hvdlab.collectives.planes.base import KeyValue


class ScopedStore(KeyValue):
    """Keys of ``store`` that begin with ``prefix``."""

    def __init__(self, store: KeyValue, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, timeout: float) -> bytes:
        return self._store.get(self._prefix + key, timeout)
