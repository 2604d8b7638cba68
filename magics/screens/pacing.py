"""Keeps a kernel's output under the rate at which Jupyter's server drops messages.

The server counts the last three seconds, by default 1 MB and 1,000 messages a second, and drops what is over. A burst
passes at once; what is more waits here, and the ranks that write it are held back by their credit.
"""

from __future__ import annotations

BURST_BYTES = 2_400_000
BYTES_PER_SECOND = 700_000
BURST_MESSAGES = 1500
MESSAGES_PER_SECOND = 500


class Pacer:
    """Two token buckets, for bytes and for messages. ``now`` in seconds of any clock."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._bytes = float(BURST_BYTES)
        self._messages = float(BURST_MESSAGES)

    def take(self, size: int, now: float) -> bool:
        """Whether a message of ``size`` bytes may go now; if so it is counted."""
        self._refill(now)
        if self._messages < 1 or (self._bytes < size and self._bytes < BURST_BYTES):
            return False
        self._bytes -= size
        self._messages -= 1
        return True

    def ready_at(self, size: int, now: float) -> float:
        """When a message of ``size`` bytes may go."""
        self._refill(now)
        missing = min(size, BURST_BYTES) - self._bytes
        return now + max(0.01, missing / BYTES_PER_SECOND, (1 - self._messages) / MESSAGES_PER_SECOND)

    def _refill(self, now: float) -> None:
        passed, self._at = now - self._at, now
        self._bytes = min(BURST_BYTES, self._bytes + passed * BYTES_PER_SECOND)
        self._messages = min(BURST_MESSAGES, self._messages + passed * MESSAGES_PER_SECOND)
