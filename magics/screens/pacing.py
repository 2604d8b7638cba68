"""Keeps a kernel's output under the rate at which Jupyter's server drops messages.

The server counts what came in the last three seconds, by default 3 MB and 3,000 messages, drops what is over, and
begins anew with each cell. A burst passes at once; what is more waits here, and the pool holds the ranks that write it
back by their credit.
"""

from __future__ import annotations

import json
from collections import deque

WINDOW = 3.5
"""Seconds; longer than the server's, since messages may reach it closer together than they were sent."""

WINDOW_BYTES = 2_800_000
WINDOW_MESSAGES = 2_800
BURST_BYTES = 2_500_000
BYTES_PER_SECOND = 700_000
"""The rate after a burst, so that output flows instead of coming in one burst for each window."""

ENVELOPE = 1200
"""Bytes of a message besides its text, about."""


def wire_size(text: str) -> int:
    """Bytes of a stream message with this text."""
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")) + ENVELOPE


class Pacer:
    """Decides when the messages of one cell may go. ``now`` in seconds of any clock."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._allowance = float(BURST_BYTES)
        self._sent: deque[tuple[float, int]] = deque()
        self._bytes = 0

    def take(self, size: int, now: float) -> bool:
        """Whether a message of ``size`` bytes may go now; if so it is counted."""
        if self.ready_at(size, now) > now:
            return False
        self._allowance -= size
        self._sent.append((now, size))
        self._bytes += size
        return True

    def ready_at(self, size: int, now: float) -> float:
        """When a message of ``size`` bytes may go; ``now`` if it may at once."""
        self._pass(now)
        at = now
        missing = min(size, BURST_BYTES) - self._allowance
        if missing > 0:
            at = now + missing / BYTES_PER_SECOND + 0.001
        over = self._bytes + min(size, WINDOW_BYTES) - WINDOW_BYTES
        if len(self._sent) >= WINDOW_MESSAGES:
            at = max(at, self._sent[0][0] + WINDOW)
        for time, sent in self._sent:
            if over <= 0:
                break
            over -= sent
            at = max(at, time + WINDOW)
        return at

    def _pass(self, now: float) -> None:
        passed, self._at = now - self._at, now
        self._allowance = min(BURST_BYTES, self._allowance + passed * BYTES_PER_SECOND)
        while self._sent and self._sent[0][0] + WINDOW <= now:
            self._bytes -= self._sent.popleft()[1]
