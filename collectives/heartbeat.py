"""Whether the coordinator still answers: silence alone says nothing, an unanswered question does. No I/O."""

from __future__ import annotations

from collections.abc import Callable

ASK_AFTER = 2.0
"""Seconds of silence after which the client asks the coordinator for a sign of life."""
STOPPED_AFTER = 1.0
"""Seconds without an answer after which the coordinator counts as lost if its process is stopped (SIGSTOP, a debugger)."""
SILENT_AFTER = 30.0
"""Seconds without an answer after which it counts as lost in any case."""


class Heartbeat:
    """When to ask, and when to give up.

    Args:
        now: The time, in monotonic seconds.
        stopped: Returns whether the coordinator's process is known to be stopped.
    """

    def __init__(self, now: float, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self._heard = now
        self._asked: float | None = None

    def heard(self, now: float) -> None:
        """Anything came from the coordinator."""
        self._heard = now
        self._asked = None

    def asks(self, now: float) -> bool:
        """Whether to ask now."""
        if self._asked is not None or now < self._heard + ASK_AFTER:
            return False
        self._asked = now
        return True

    def lost(self, now: float) -> str:
        """Why it counts as lost, or an empty text. Call this after taking in everything that has come."""
        if self._asked is None:
            return ""
        waited = now - self._asked
        if waited >= SILENT_AFTER:
            return f"it has not answered for {waited:.0f} s"
        if waited >= STOPPED_AFTER and self._stopped():
            return "its process is stopped (SIGSTOP)"
        return ""

    def timeout(self, now: float) -> float:
        """Seconds until there is something to do."""
        if self._asked is None:
            return max(0.0, self._heard + ASK_AFTER - now)
        return STOPPED_AFTER
